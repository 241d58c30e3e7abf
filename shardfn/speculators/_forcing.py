"""Jacobi Forcing: a model learns to draw right tokens from the wrong guesses of Jacobi decoding.

A row has a prompt, and then each block of n tokens twice: a state k_j of its Jacobi trajectory, and its last state l_j,
the greedy text. Both have the positions of the block in the text, under the mask `nn.JacobiBlocks`. So one forward has
the logits of all blocks after noisy and after clean text. The loss is

    10 CE(prompt, l_0, l_1, ..) + tau^2 / J sum over i of softmax(l_j,i / tau) . -log softmax(k_j,i / tau)

with the mean of the second part over the places i of all blocks from the first wrong guess on, and no gradient through
the logits of l. Block j has a noise near ratio j mod w of w ratios, from few to many wrong guesses. On later passes
over the same trajectories block j has ratio (j + shift) mod w. With the same noise on each pass, a model learns these
states by heart, and draws few right tokens from other states.

B rows, P tokens of the prompt, J blocks, n tokens of a block, w blocks of a window, T = P + 2 J n tokens of a row, V
vocabulary.

References:
    Jacobi Forcing: Fast and Accurate Causal Parallel Decoding, 2025, https://arxiv.org/abs/2512.14681
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor

from shardfn import nn
from shardfn.core import PyTree, raise_all
from shardfn.engine import WeightedMean
from shardfn.models import gpt


@dataclasses.dataclass(frozen=True)
class ForcingConfig:
    """Settings of Jacobi Forcing.

    Attributes:
        block: tokens n of a block.
        window: blocks w of a window, over which the noise grows.
        least: smallest part of wrong guesses that is aimed at.
        most: largest part of wrong guesses that is aimed at.
        temperature: temperature tau of both distributions.
        text_weight: weight of the cross entropy of the clean text.

    Raises:
        ValueError: lists every field that is out of range.

    Example:
        >>> ForcingConfig(block=8, window=4, least=0.25).ratios
        [0.25, 0.5, 0.75, 1.0]
    """

    block: int = 16
    window: int = 8
    least: float = 0.0
    most: float = 1.0
    temperature: float = 1.0
    text_weight: float = 10.0

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be an integer of at least 1, got {value!r}"
            for name in ("block", "window")
            if type(value := getattr(self, name)) is not int or value < 1
        ]
        if not 0 <= self.least <= self.most <= 1:
            problems.append(f"least and most must be ascending from 0 to 1, got {self.least} and {self.most}")
        if not self.temperature > 0 or self.text_weight < 0:
            problems.append(
                f"temperature must be above 0 and text_weight at least 0, got {self.temperature} and {self.text_weight}"
            )
        raise_all(ValueError, "speculators.ForcingConfig:", problems)

    @property
    def ratios(self) -> list[float]:
        """Returns the part of wrong guesses that each block of a window aims at, ascending."""
        return torch.linspace(self.least, self.most, self.window, dtype=torch.float64).tolist()


class Trajectory(NamedTuple):
    """States of Jacobi decoding of a text, block by block.

    Attributes:
        prompt: token ids before the first block.
        states: states of each block, from the first guesses to the greedy text, n tokens each.
    """

    prompt: list[int]
    states: list[list[list[int]]]


def pick_noise(config: ForcingConfig, states: Sequence[Sequence[int]], number: int) -> list[int]:
    """Returns the state of a block with the part of wrong guesses nearest to the block's ratio.

    A state counts as wrong from its first wrong guess on. The first of equally near states is taken.

    Args:
        config: settings.
        states: states of the block, the greedy text last.
        number: number of the block in its text.

    Example:
        >>> pick_noise(ForcingConfig(block=4, window=2), [[9, 9, 9, 9], [5, 6, 9, 9], [5, 6, 7, 8]], 1)
        [9, 9, 9, 9]
    """
    wanted, clean = config.ratios[number % config.window], states[-1]
    return list(min(states, key=lambda state: abs(1 - find_divergence(state, clean) / len(clean) - wanted)))


def find_divergence(state: Sequence[int], clean: Sequence[int]) -> int:
    """Returns the number of right guesses before the first wrong guess.

    Example:
        >>> find_divergence([5, 9, 7], [5, 6, 7])
        1
    """
    return next((i for i, (a, b) in enumerate(zip(state, clean, strict=True)) if a != b), len(clean))


def make_forcing_batch(
    config: ForcingConfig, trajectories: Sequence[Trajectory], *, shift: int = 0
) -> dict[str, Tensor]:
    """Returns the batch of `forcing_loss`: {"prompt": [B, P], "noisy": [B, J, n], "clean": [B, J, n]}, int64.

    Args:
        config: settings.
        trajectories: trajectories with prompts of one length and one number of blocks.
        shift: number added to each block's number, to choose its noise. Another shift on each pass, from 0 to
            `config.window - 1`, shows each block with each noise.

    Raises:
        ValueError: there are no trajectories, or they differ in length, or blocks have another number of tokens.

    Example:
        >>> batch = make_forcing_batch(ForcingConfig(block=2), [Trajectory([1], [[[9, 9], [5, 6]]])])
        >>> batch["noisy"].tolist(), batch["clean"].tolist()
        ([[[5, 6]]], [[[5, 6]]])
    """
    sizes = {(len(one.prompt), len(one.states)) for one in trajectories}
    blocks = {len(state) for one in trajectories for states in one.states for state in states}
    if len(sizes) != 1 or blocks != {config.block}:
        raise ValueError(
            "make_forcing_batch: trajectories must have one length of prompts and one number of blocks of"
            f" {config.block} tokens, got {sorted(sizes)} and blocks of {sorted(blocks)} tokens."
        )
    noisy = [[pick_noise(config, states, j + shift) for j, states in enumerate(one.states)] for one in trajectories]
    clean = [[states[-1] for states in one.states] for one in trajectories]
    found = {"prompt": [one.prompt for one in trajectories], "noisy": noisy, "clean": clean}
    return {name: torch.tensor(x) for name, x in found.items()}


def pack_blocks(batch: Mapping[str, Tensor]) -> Int64[Tensor, "b t"]:
    """Returns the rows [prompt][k_0][l_0][k_1][l_1].. of a batch.

    Args:
        batch: see `make_forcing_batch`.
    """
    pairs_BT = torch.stack([batch["noisy"], batch["clean"]], 2).flatten(1)
    return torch.cat([batch["prompt"], pairs_BT], 1)


def forcing_loss(model: gpt.Config, config: ForcingConfig, params: PyTree, batch: Mapping[str, Tensor]) -> WeightedMean:
    """Returns the loss of Jacobi Forcing, a mean over the rows of the batch.

    Args:
        model: shape of the model, without windows and alibi.
        config: settings.
        params: parameters of the model.
        batch: {"prompt": int64 [B, P], "noisy": int64 [B, J, n], "clean": int64 [B, J, n]}.

    Raises:
        ValueError: the batch has other blocks or no prompt, the text is longer than `max_len`, or the model has
            windows, a `layout`, or alibi.

    Example:
        >>> from shardfn import core
        >>> model = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> settings = ForcingConfig(block=2)
        >>> batch = make_forcing_batch(settings, [Trajectory([1], [[[9, 9], [5, 6]]])])
        >>> forcing_loss(model, settings, gpt.init(model, core.key(0)), batch).weight.item()
        1.0
    """
    (B, P), (_, J, n) = batch["prompt"].shape, batch["noisy"].shape
    problems = ["the model has windows or a layout"] if model.window is not None or model.layout is not None else []
    problems += [f"blocks must have {config.block} tokens, got {n}"] if n != config.block else []
    problems += [] if P else ["prompts must have at least a token"]
    problems += [f"{P + J * n} tokens do not fit max_len={model.max_len}"] if P + J * n > model.max_len else []
    raise_all(ValueError, "forcing_loss:", problems)
    mask, tokens_BT = nn.JacobiBlocks(P, n, config.window), pack_blocks(batch)
    packed: Any = dataclasses.replace(model, layout=lambda num: mask, batch_invariant=False)
    positions_T = mask.find_positions(tokens_BT.shape[1], tokens_BT.device)
    logits_BTV, _ = gpt.apply_and_hidden(packed, params, tokens_BT, positions=positions_T)
    pairs_BJ2nV = logits_BTV[:, P:].unflatten(1, (J, 2, n))
    student_BJnV, teacher_BJnV = pairs_BJ2nV[:, :, 0], pairs_BJ2nV[:, :, 1].detach()
    own_BSV = torch.cat([logits_BTV[:, :P], pairs_BJ2nV[:, :, 1].flatten(1, 2)], 1)
    text_BS = torch.cat([batch["prompt"], batch["clean"].flatten(1)], 1)
    ce_BS = F.cross_entropy(own_BSV[:, :-1].transpose(1, 2), text_BS[:, 1:], reduction="none")
    soft_BJn = _measure_soft_entropy(student_BJnV / config.temperature, teacher_BJnV / config.temperature)
    kept_BJn = (batch["noisy"] != batch["clean"]).cumsum(-1) > 0
    scale_B = config.temperature**2 / J / kept_BJn.flatten(1).sum(1).clamp(min=1)
    rows_B = config.text_weight * ce_BS.mean(1) + scale_B * (soft_BJn * kept_BJn).flatten(1).sum(1)
    return WeightedMean(rows_B.sum(), rows_B.new_tensor(float(B)))


def _measure_soft_entropy(student_V: Tensor, teacher_V: Tensor) -> Tensor:
    """Returns the cross entropy of the student under the teacher's distribution."""
    return -(teacher_V.softmax(-1) * student_V.log_softmax(-1)).sum(-1)
