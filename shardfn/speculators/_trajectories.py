"""Trajectories of Jacobi decoding, drawn by an engine, and their files, which know the weights."""

import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from shardfn.core import PyTree, raise_all
from shardfn.inference import Context, Decoder, Engine, Jacobi, Sampling, limits_of

from ._forcing import Trajectory
from ._target import LeafDigest, digest_weights, list_other_weights

_FORMAT = "shardfn-trajectories"


class _RecordingJacobi(Jacobi):
    """Jacobi decoding block by block, which keeps the states of each block."""

    def __init__(self, block: int) -> None:
        super().__init__(block)
        self.states: list[list[list[int]]] = []

    def propose(self, context: Context, most: int) -> list[int]:
        number, done = divmod(len(context.tokens) - context.prompt, self.block)
        found = super().propose(context, self.block)[: self.block - done]
        known = context.tokens[len(context.tokens) - done :].tolist()
        self.states += [[] for _ in range(number + 1 - len(self.states))]
        self.states[number].append([*known, *found])
        return found[:most]

    def copy(self) -> "_RecordingJacobi":
        return self


def draw_trajectories(
    decoder: Decoder, params: PyTree, prompts: Sequence[Sequence[int]], *, block: int, num_blocks: int
) -> Iterator[Trajectory]:
    """Yields the states of greedy Jacobi decoding of each prompt, block by block.

    The first guesses of a block are what the step before drew behind it, and tokens of the text.

    Args:
        decoder: decoder of a single rank.
        params: parameters of the model.
        prompts: token ids of each prompt.
        block: tokens n of a block.
        num_blocks: number of blocks of each prompt.

    Raises:
        ValueError: `block` or `num_blocks` is below 1, or a prompt leaves no room for the blocks.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> model = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32, batch_invariant=True)
        >>> [found] = draw_trajectories(decoder(model), gpt.init(model, core.key(0)), [[5, 6]], block=3, num_blocks=2)
        >>> len(found.states), {len(state) for states in found.states for state in states}
        (2, {3})
    """
    problems = [
        f"{name} must be an integer of at least 1, got {value!r}"
        for name, value in (("block", block), ("num_blocks", num_blocks))
        if type(value) is not int or value < 1
    ]
    if not problems and (most := max(map(len, prompts), default=0) + block * num_blocks + 1) > decoder.context:
        problems.append(f"prompts, blocks and a token must be at most the context {decoder.context}, got {most} tokens")
    raise_all(ValueError, "draw_trajectories:", problems)
    limits = limits_of(decoder, drafts=block, running=1, buckets=(block + 1, 64 + block))
    drafter, how = _RecordingJacobi(block), Sampling(max_tokens=block * num_blocks + 1, temperature=0.0)
    engine = Engine(decoder, params, limits=limits, drafter=drafter)
    for prompt in prompts:
        drafter.states = []
        tokens = engine.generate([list(prompt)], how)[0].tokens
        drafter.states += [[] for _ in range(num_blocks - len(drafter.states))]
        clean = [tokens[j * block : (j + 1) * block] for j in range(num_blocks)]
        yield Trajectory(list(prompt), [[*drafter.states[j], clean[j]] for j in range(num_blocks)])


def save_trajectories(
    path: str | os.PathLike[str], trajectories: Sequence[Trajectory], decoder: Decoder, params: PyTree
) -> None:
    """Writes trajectories, with digests of the weights that drew them.

    Args:
        path: file of JSON.
        trajectories: trajectories.
        decoder: decoder of the model.
        params: parameters of the model.
    """
    about = {"format": _FORMAT, "model_digest": decoder.digest, "model_weights": digest_weights(decoder, params)}
    pathlib.Path(path).write_text(json.dumps(about | {"rows": trajectories}) + "\n", encoding="utf-8")


def load_trajectories(path: str | os.PathLike[str], decoder: Decoder, params: PyTree) -> list[Trajectory]:
    """Returns the trajectories of a file.

    Args:
        path: file as of `save_trajectories`.
        decoder: decoder of the model.
        params: parameters of the model.

    Raises:
        ValueError: the file has another format, or the trajectories are of another model or of other weights, such as
            the weights before a training. The message lists the leaves.
    """
    try:
        about: Any = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    kind = about.get("format") if isinstance(about, dict) else None
    if kind != _FORMAT:
        raise ValueError(f"{path} must have the format {_FORMAT!r}, got {kind!r:.40}. Draw trajectories again.")
    weights = {name: LeafDigest(*row) for name, row in about["model_weights"].items()}
    problems = list_other_weights(weights, digest_weights(decoder, params))
    if about["model_digest"] != decoder.digest:
        problems = [f"the model's digest is {decoder.digest}, and the trajectories have {about['model_digest']}"]
    raise_all(ValueError, f"{path}: trajectories of other weights. Draw them again:", problems)
    return [Trajectory(*row) for row in about["rows"]]
