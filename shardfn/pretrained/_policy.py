"""A policy that learns from rewards: the models, the step and the engine of a directory, made by one call."""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn import rl
from shardfn.collectives import unshard
from shardfn.core import Mesh, PyTree, Zero, explains_keywords, key, make_mesh, tree_map
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.interop import gpt_from_hf, gpt_to_hf
from shardfn.lora import LoRA
from shardfn.models import gpt
from shardfn.optim import GradientTransformation
from shardfn.transforms import ShardedStep, TrainState, WeightedMean, sharded_step

from ._text import wrap_transformers_tokenizer
from ._tokenizers import load_tokenizer

_ZERO = Zero(stage=3)
Prompt = str | Sequence[dict[str, str]] | Sequence[int]
_ADAPTED = r"\.w[qkvo]$", r"\.w_"  # weights that have adapters
_MEANT = {
    "reward_funcs": "policy.score(reward, rollout)",
    "num_generations": "Sampling(n={value!r}) of policy.sample",
    "max_completion_length": "Sampling(max_tokens={value!r}) of policy.sample",
    "peft_config": "lora=, the rank of adapters",
    "learning_rate": "the optimizer, such as optim.adamw({value!r})",
    "epsilon": "loss=functools.partial(rl.grpo, epsilon={value!r})",
}


@dataclass(frozen=True)
class TextPolicy:
    """Functions of a language model that learns from rewards. All ranks of the mesh make the same calls.

    Attributes:
        config: config of the model.
        step: training step of batches {"rollout", "advantages"}, for loops by hand.
        engine: engine of this rank, which draws the answers.
        sampling: sampling of the answers, `n` to each prompt.
        tokenizer: tokenizer of transformers.
        lora: adapters, or None where all weights are trained.

    Example:
        See `load_policy`.
    """

    config: gpt.Config
    step: ShardedStep
    engine: Engine
    sampling: Sampling
    tokenizer: Any
    lora: LoRA | None

    def merge(self, state: TrainState) -> PyTree:
        """Returns the whole parameters of the policy, adapters added to their weights. Collective."""
        return _merge(self.lora, state)

    def sample(self, state: TrainState, prompts: Sequence[Prompt], key: Int64[Tensor, "2"]) -> rl.Rollout:
        """Returns answers to this rank's part of the prompts, drawn by the weights of a state. Collective.

        Args:
            state: state of the step.
            prompts: prompts of all ranks: texts, lists of messages for the chat template, or ids.
            key: key of the iteration.

        Returns:
            See `rl.sample`. Rows without rewards.

        Raises:
            ValueError: see `rl.sample`.
        """
        version = self.engine.update_weights(self.merge(state))
        ids = [self._encode(prompt) for prompt in prompts]
        own = self.step.rows(len(prompts))
        length = min(self.engine.limits.context, max(map(len, ids), default=1) + self.sampling.max_tokens)
        rollout = rl.sample(self.engine, ids[own], self.sampling, key=key, start=own.start, length=length)
        rl.check_versions(rollout, version)
        return rollout

    def score(
        self, reward: Callable[..., float], rollout: rl.Rollout, given: Sequence[Any] | None = None, **limits: Any
    ) -> rl.Rollout:
        """Returns a rollout with the rewards of a function of texts.

        Args:
            reward: function `reward(prompt, answer) -> float` of two texts without special tokens, and with `given`
                also of the row's entry.
            rollout: rollout of `sample`.
            given: value of each row, such as a solution.
            **limits: see `rl.score`.

        Raises:
            ValueError: see `rl.score`.
        """
        read = functools.partial(self.tokenizer.decode, skip_special_tokens=True)

        def score_texts(prompt: list[int], answer: list[int], *row: Any) -> float:
            return reward(read(prompt), read(answer), *row)

        return rl.score(score_texts, rollout, given, **limits).rollout

    def update(self, state: TrainState, rollout: rl.Rollout) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state and the metrics of a step, whose advantages compare answers to one prompt. Collective.

        Args:
            state: state of the step.
            rollout: rollout with rewards.

        Returns:
            The next state, and the metrics of `rl.policy_metrics` and `rl.rollout_metrics` with "loss".
        """
        advantages = rl.group_advantages(rollout.rewards, self.sampling.n)
        return self.step(state, {"rollout": rollout, "advantages": advantages})

    def save(self, directory: str | os.PathLike[str], state: TrainState) -> None:
        """Writes the policy and its tokenizer as a directory of transformers. Collective."""
        gpt_to_hf(directory, self.config, self.merge(state))
        if self.step.mesh.rank == 0:
            self.tokenizer.save_pretrained(directory)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if prompt and isinstance(prompt[0], dict):
            chat = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
            return list(self.tokenizer.apply_chat_template(list(prompt), **chat))
        return list(prompt)  # type: ignore[arg-type]


@explains_keywords(**_MEANT)
def load_policy(
    model: str | os.PathLike[str],
    optimizer: GradientTransformation,
    sampling: Sampling,
    *,
    mesh: Mesh | None = None,
    loss: Callable[..., WeightedMean] = rl.grpo,
    beta: float = 0.0,
    lora: int = 0,
    zero: Zero = _ZERO,
    seed: int = 0,
    **sizes: Any,
) -> tuple[TextPolicy, TrainState]:
    """Makes a policy from a directory: the step, its first state, and an engine for answers. Collective.

    The model is batch-invariant. So without adapters the ratio of the first update is exactly 1.

    Args:
        model: directory of transformers, of a kind that `interop.gpt_from_hf` reads, with a tokenizer.
        optimizer: optimizer of the step.
        sampling: sampling of answers, `n` of `max_tokens` to each prompt. The tokenizer's end of a text is added to
            `stop_tokens`.
        mesh: mesh with the axis "dp". Default: all ranks of the program.
        loss: `loss(logprobs, old_logprobs, advantages, lengths)` as `rl.grpo`, or a `functools.partial` of it. With
            `beta` also `ref_logprobs_BT` and `beta`.
        beta: weight of the divergence from the model of the directory.
        lora: rank of adapters, which then are trained in place of all weights. The base is the reference of `beta`.
        zero: stage of the step, and its options.
        seed: seed of the adapters.
        **sizes: sizes of the engine, see `inference.limits_of`.

    Returns:
        The policy and the first state.

    Raises:
        ValueError: the mesh has another axis, or the model cannot be read. See `interop.gpt_from_hf`.
        FileNotFoundError: a file is missing.
        ImportError: transformers is missing.

    Example:
        >>> from shardfn import optim
        >>> load_policy("no/such/model", optim.adamw(1e-5), Sampling(n=4))
        Traceback (most recent call last):
        FileNotFoundError: ...
    """
    mesh = make_mesh({"dp": -1}) if mesh is None else mesh
    if other := [name for name in mesh.axis_names if name != "dp"]:
        raise ValueError(
            f"load_policy: the mesh must have only the axis 'dp', as each rank has an engine, got {other}."
        )
    config, params = gpt_from_hf(model, batch_invariant=True)
    tokenizer = load_tokenizer(pathlib.Path(model))
    branches = _make_branches(config, params, lora, beta > 0, seed)
    step = sharded_step(
        functools.partial(_policy_loss, config, branches.lora, loss, beta),
        optimizer,
        mesh=mesh,
        specs=branches.specs,
        trainable=branches.trainable,
        zero=zero,
        has_aux=True,
    )
    state, made = step.init(branches.params), decoder(config)
    ends = {*sampling.stop_tokens, *wrap_transformers_tokenizer(tokenizer).ends}
    engine = Engine(made, _merge(branches.lora, state), mesh=make_mesh(alone=True), limits=limits_of(made, **sizes))
    sampling = replace(sampling, stop_tokens=tuple(sorted(ends)))
    return TextPolicy(config, step, engine, sampling, tokenizer, branches.lora), state


class _Branches(NamedTuple):
    """Branches of a state: "policy" and perhaps "reference", or "base" and "lora"."""

    params: PyTree
    specs: PyTree
    trainable: Any
    lora: LoRA | None


def _make_branches(config: gpt.Config, params: PyTree, rank: int, has_reference: bool, seed: int) -> _Branches:
    specs = gpt.specs(config)
    if rank:
        lora = LoRA.of(params, _ADAPTED, rank=rank, specs=specs)
        return _Branches({"base": params, "lora": lora.init(key(seed))}, lora.specs, lora.trainable, lora)
    # Only tensors are copied: a deferred leaf is read anew for each branch.
    copy = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, params) if has_reference else None
    branches = {"policy": params} if copy is None else {"policy": params, "reference": copy}
    return _Branches(branches, dict.fromkeys(branches, specs), {name: name == "policy" for name in branches}, None)


def _merge(lora: LoRA | None, state: TrainState) -> PyTree:
    if lora is None:
        return unshard(state.params["policy"])
    params = unshard(state.params)
    return lora.merge(params["base"], params["lora"])


def _policy_loss(
    config: gpt.Config,
    lora: LoRA | None,
    loss: Callable[..., WeightedMean],
    beta: float,
    params: PyTree,
    batch: PyTree,
) -> tuple[WeightedMean, dict[str, Any]]:
    rollout, advantages = batch["rollout"], batch["advantages"]
    policy = params["policy"] if lora is None else lora.apply(params["base"], params["lora"])

    def logprobs_of(branch: PyTree) -> Tensor:
        return rl.completion_logprobs(gpt.apply(config, branch, rollout.ids), rollout.ids, rollout.spans)

    logprobs, reference = logprobs_of(policy), dict[str, Any]()
    if beta:
        with torch.no_grad():
            reference["ref_logprobs_BT"] = logprobs_of(params["reference" if lora is None else "base"])
    metrics = rl.policy_metrics(logprobs, rollout.logprobs, rollout.lengths, **reference)
    metrics |= rl.rollout_metrics(rollout, advantages)
    reference |= {"beta": beta} if beta else {}
    return loss(logprobs, rollout.logprobs, advantages, rollout.lengths, **reference), metrics
