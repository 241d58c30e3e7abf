"""A policy that learns from rewards: the models, the step and the engine of a directory, made by one call."""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
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
from shardfn.state import check_alive
from shardfn.transforms import ShardedStep, TrainState, WeightedMean, sharded_step

from ._text import wrap_transformers_tokenizer
from ._tokenizers import load_tokenizer

_ZERO = Zero(stage=3)
Prompt = str | Sequence[dict[str, str]] | Sequence[int]
ADAPTED = r"\.w[qkvo]$", r"\.w_"  # weights that have adapters


class GPTModel(NamedTuple):
    """Model of `models.gpt`.

    Attributes:
        config: shape.
        params: parameters.
    """

    config: gpt.Config
    params: PyTree


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
        tokenizer: tokenizer of transformers, or None where prompts are ids.
        lora: adapters, or None where all weights are trained.
        branch: branch of the state's parameters that is the policy. None: the parameters are {"base", "lora"}.

    Example:
        See `load_policy`.
    """

    config: gpt.Config
    step: ShardedStep
    engine: Engine
    sampling: Sampling
    tokenizer: Any = None
    lora: LoRA | None = None
    branch: str | None = "policy"
    _first: list[TrainState] = field(default_factory=list, repr=False)  # its weights are the engine's

    def merge(self, state: TrainState) -> PyTree:
        """Returns the whole parameters of the policy, adapters added to their weights. Collective."""
        return merge_branch(self.lora, self.branch, state.params)

    def sample(
        self, state: TrainState, prompts: Sequence[Prompt], key: Int64[Tensor, "2"], *, length: int | None = None
    ) -> rl.Rollout:
        """Returns answers to this rank's part of the prompts, drawn by the weights of a state. Collective.

        Args:
            state: state of the step.
            prompts: prompts of all ranks: texts, lists of messages for the chat template, or ids.
            key: key of the iteration.
            length: number of ids in a row. Default: the longest prompt and `max_tokens`.

        Returns:
            See `rl.sample`. Rows without rewards.

        Raises:
            ValueError: see `rl.sample`.
        """
        version = self._load_weights(state)
        ids = [self._encode(prompt) for prompt in prompts]
        own = self.step.rows(len(prompts))
        longest = max(map(len, ids), default=1) + self.sampling.max_tokens
        length = min(self.engine.limits.context, longest) if length is None else length
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
            The next state, and the metrics of `rl.policy_metrics` and `rl.rollout_metrics` with "loss" and "entropy".
        """
        advantages = rl.group_advantages(rollout.rewards, self.sampling.n)
        return self.step(state, {"rollout": rollout, "advantages": advantages})

    def save(self, directory: str | os.PathLike[str], state: TrainState) -> None:
        """Writes the policy and its tokenizer as a directory of transformers. Collective."""
        gpt_to_hf(directory, self.config, self.merge(state))
        if self.step.mesh.rank == 0:
            self.tokenizer.save_pretrained(directory)

    def _load_weights(self, state: TrainState) -> int:
        """Returns the version of the state's weights. The engine was made with the weights of the first state."""
        check_alive(state)
        is_loaded = bool(self._first) and self._first.pop() is state and self.engine.version == 0
        return 0 if is_loaded else self.engine.update_weights(self.merge(state))

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
    config, params = gpt_from_hf(model, batch_invariant=True)
    tokenizer = load_tokenizer(pathlib.Path(model))
    ends = {*sampling.stop_tokens, *wrap_transformers_tokenizer(tokenizer).ends}
    sampling = replace(sampling, stop_tokens=tuple(sorted(ends)))
    how = {"mesh": mesh, "loss": loss, "beta": beta, "lora": lora, "zero": zero, "seed": seed}
    return make_policy(GPTModel(config, params), optimizer, sampling, tokenizer=tokenizer, **how, **sizes)


@explains_keywords(**_MEANT)
def make_policy(
    model: GPTModel,
    optimizer: GradientTransformation,
    sampling: Sampling,
    *,
    tokenizer: Any = None,
    mesh: Mesh | None = None,
    loss: Callable[..., WeightedMean] = rl.grpo,
    beta: float = 0.0,
    lora: int = 0,
    frozen: Mapping[str, GPTModel] = MappingProxyType({}),
    zero: Zero = _ZERO,
    seed: int = 0,
    **sizes: Any,
) -> tuple[TextPolicy, TrainState]:
    """Makes a policy from a model in memory: the step, its first state, and an engine for answers. Collective.

    Args:
        model: shape and parameters. With `batch_invariant=True` in the shape, the first ratios are exactly 1.
        optimizer: optimizer of the step.
        sampling: sampling of answers, with the tokens that end one.
        tokenizer: tokenizer of transformers, for prompts and rewards of texts. None takes only ids.
        mesh: see `load_policy`.
        loss: see `load_policy`.
        beta: see `load_policy`.
        lora: see `load_policy`.
        frozen: models by name, such as a model of rewards: branches of the state for `policy.step.apply`.
        zero: see `load_policy`.
        seed: see `load_policy`.
        **sizes: see `load_policy`.

    Returns:
        The policy and the first state.

    Raises:
        ValueError: the mesh has another axis than "dp".

    Example:
        >>> from shardfn import core, optim
        >>> config = gpt.Config.llama_like(vocab_size=16, num_layers=1, d_model=32, num_heads=4, d_ff=64, max_len=16)
        >>> model = GPTModel(config, gpt.init(config, key(0)))
        >>> policy, state = make_policy(model, optim.sgd(1e-2), Sampling(max_tokens=2, n=2), mesh=make_mesh(alone=True))
        >>> rollout = policy.sample(state, [[3, 1], [7]], key(1))._replace(rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]))
        >>> state, metrics = policy.update(state, rollout)
        >>> float(metrics["reward"])
        0.5
    """
    mesh = make_mesh({"dp": -1}) if mesh is None else mesh
    check_mesh("make_policy", mesh)
    branches = _make_branches(model, lora, beta > 0, frozen, seed)
    step = sharded_step(
        functools.partial(_policy_loss, model.config, branches.lora, loss, beta),
        optimizer,
        mesh=mesh,
        specs=branches.specs,
        trainable=branches.trainable,
        zero=zero,
        has_aux=True,
    )
    state = step.init(branches.params)
    branch = None if branches.lora else "policy"
    engine = make_own_engine(model.config, merge_branch(branches.lora, branch, state.params), **sizes)
    policy = TextPolicy(model.config, step, engine, sampling, tokenizer, branches.lora, branch)
    policy._first.append(state)
    return policy, state


def check_mesh(who: str, mesh: Mesh) -> None:
    """Refuses axes other than "dp".

    Raises:
        ValueError: names the axes.
    """
    if other := [name for name in mesh.axis_names if name != "dp"]:
        raise ValueError(f"{who}: the mesh must have only the axis 'dp', as each rank has an engine, got {other}.")


def make_own_engine(config: gpt.Config, params: PyTree, **sizes: Any) -> Engine:
    """Returns an engine of this rank."""
    made = decoder(config)
    return Engine(made, params, mesh=make_mesh(alone=True), limits=limits_of(made, **sizes))


class _Branches(NamedTuple):
    """Branches of a state: "policy" and perhaps "reference", or "base" and "lora", and frozen models."""

    params: PyTree
    specs: PyTree
    trainable: Any
    lora: LoRA | None


def _make_branches(
    model: GPTModel, rank: int, has_reference: bool, frozen: Mapping[str, GPTModel], seed: int
) -> _Branches:
    params, specs, lora = model.params, gpt.specs(model.config), None
    if rank:
        lora = LoRA.of(params, ADAPTED, rank=rank, specs=specs)
        made = _Branches({"base": params, "lora": lora.init(key(seed))}, lora.specs, lora.trainable, lora)
    else:
        branches = {"policy": params, "reference": copy_leaves(params)} if has_reference else {"policy": params}
        trainable = {name: name == "policy" for name in branches}
        made = _Branches(branches, dict.fromkeys(branches, specs), trainable, None)
    if taken := frozen.keys() & made.params.keys():
        raise ValueError(
            f"make_policy: frozen must have other names than the branches of the policy, got {sorted(taken)}."
        )
    return _Branches(
        made.params | {name: x.params for name, x in frozen.items()},
        made.specs | {name: gpt.specs(x.config) for name, x in frozen.items()},
        made.trainable | dict.fromkeys(frozen, False),
        lora,
    )


def copy_leaves(params: PyTree) -> PyTree:
    """Returns copies of the tensors. A deferred leaf is read anew for each branch."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, params)


def merge_branch(lora: LoRA | None, branch: str | None, params: PyTree) -> PyTree:
    """Returns the whole parameters of a branch of a state, adapters added to their weights. Collective."""
    found = unshard(params if branch is None else params[branch])
    return found if lora is None else lora.merge(found["base"], found["lora"])


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

    logits, reference = gpt.apply(config, policy, rollout.ids), dict[str, Any]()
    logprobs = rl.completion_logprobs(logits, rollout.ids, rollout.spans)
    with torch.no_grad():
        entropies = rl.completion_entropies(logits, rollout.spans)
        if beta:
            before = gpt.apply(config, params["reference" if lora is None else "base"], rollout.ids)
            reference["ref_logprobs_BT"] = rl.completion_logprobs(before, rollout.ids, rollout.spans)
    metrics = rl.policy_metrics(logprobs, rollout.logprobs, rollout.lengths, **reference)
    metrics["entropy"] = rl.token_mean(entropies, rollout.lengths)
    metrics |= rl.rollout_metrics(rollout, advantages)
    reference |= {"beta": beta} if beta else {}
    return loss(logprobs, rollout.logprobs, advantages, rollout.lengths, **reference), metrics
