"""PPO of a language model: actor, critic, reference and model of rewards in one state, made by one call."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from shardfn import rl
from shardfn.core import (
    Mesh,
    PyTree,
    Sharding,
    Zero,
    explains_keywords,
    fold_in,
    key,
    make_mesh,
    named_leaves,
    raise_all,
    tree_map,
)
from shardfn.inference import Sampling
from shardfn.interop import eval_state
from shardfn.lora import LoRA
from shardfn.models import gpt
from shardfn.optim import GradientTransformation, average_params, multi_transform
from shardfn.transforms import TrainState, eval_shape, sharded_step

from ._policy import ADAPTED, GPTModel, TextPolicy, check_mesh, copy_leaves, make_own_engine, merge_branch

_ZERO = Zero(stage=3)
_LEARNING = "actor", "critic"


@dataclass(frozen=True)
class TextPPO:
    """Functions of a language model that learns by PPO. All ranks of the mesh make the same calls.

    Attributes:
        policy: step of the losses of `ppo`, and functions for answers: `sample`, `score`, `engine` and `save`.
        ppo: losses.
        configs: shape of each branch of the state.

    Example:
        See `make_ppo`.
    """

    policy: TextPolicy
    ppo: rl.PPO
    configs: Mapping[str, gpt.Config]

    def reward(
        self, state: TrainState, ids_BL: Int[Tensor, "b l"], lengths_B: Int[Tensor, " b"]
    ) -> Float[Tensor, " b"]:
        """Returns the values of the branch "reward" at the last tokens of conversations. Collective.

        Args:
            state: state of the step.
            ids_BL: conversations of this rank, and padding.
            lengths_B: tokens of each conversation.
        """
        return self.policy.step.apply(
            functools.partial(_last_rewards, self.configs["reward"]), state, (ids_BL, lengths_B)
        )

    def update(
        self, state: TrainState, experience: rl.Experience, text: PyTree = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state and the metrics of a step of actor and critic. Collective.

        Args:
            state: state of the step.
            experience: experience as from `ppo.experience(policy.step, state, rollout)`.
            text: batch of the loss `ptx`, such as {"tokens"}, or None without this loss.

        Returns:
            The next state, and metrics with the names "actor/reward", "actor/divergence", "critic/loss", "ptx/text" and
            others.

        Raises:
            ValueError: `text` is missing, or has no loss.
        """
        if (text is None) != (self.ppo.ptx is None):
            raise ValueError(
                f"update: text must be given exactly if ptx_coef is above 0, got ptx_coef={self.ppo.ptx_coef} and"
                f" {'no text' if text is None else 'a text'}. Pass a batch of {{'tokens'}}, or make_ppo(ptx_coef=...)."
            )
        batch = dict.fromkeys(_LEARNING, experience)
        return self.policy.step(state, batch if text is None else batch | {"ptx": text})

    def average(self, state: TrainState) -> PyTree:
        """Returns the average of the actor's parameters over updates, with `make_ppo(ema=...)`. Collective."""
        return merge_branch(self.policy.lora, "actor", eval_state(state).params)


@explains_keywords(
    unsup_coef="ptx_coef={value!r}", enable_ema="ema=0.992", offload_reference_model="nothing: it is on the host"
)
def make_ppo(
    models: Mapping[str, GPTModel],
    optimizers: Mapping[str, GradientTransformation],
    sampling: Sampling,
    *,
    tokenizer: Any = None,
    mesh: Mesh | None = None,
    ptx_coef: float = 0.0,
    ema: float | None = None,
    losses: Mapping[str, float] | None = None,
    lora: int = 0,
    zero: Zero = _ZERO,
    seed: int = 0,
    **sizes: Any,
) -> tuple[TextPPO, TrainState]:
    """Makes the step of PPO, its first state, and an engine for the answers of the actor. Collective.

    The state has the branches "actor", "critic", "reference" and perhaps "reward". The reference is a copy of the actor
    in host memory, unless it is given. With adapters, "actor" and "critic" are {"base", "lora"}, and the base of the
    actor is the reference. The value of a critic or of a model of rewards is the first logit of a head that is not tied
    (`dataclasses.replace(config, tie_embeddings=False)`).

    Args:
        models: models by the names of branches. "actor" and "critic" are needed.
        optimizers: rules of "actor" and "critic", each with a norm of its own to clip.
        sampling: sampling of answers, with the tokens that end one.
        tokenizer: tokenizer of transformers, for prompts and rewards of texts. None takes only ids.
        mesh: mesh with the axis "dp". Default: all ranks of the program.
        ptx_coef: weight of the loss of a text, `gpt.loss` of the actor. 0 has no such loss.
        ema: decay of an average of the actor's parameters, in [0, 1), for example 0.992. None has no average.
        losses: `gamma`, `lam`, `epsilon`, `cliprange` and `clip_reward_value` of `rl.PPO`.
        lora: rank of adapters, which then are trained in place of all weights. The head of the critic is trained whole.
        zero: stage of the step, and its options.
        seed: seed of the adapters.
        **sizes: sizes of the engine, see `inference.limits_of`.

    Returns:
        The functions and the first state.

    Raises:
        ValueError: a model is missing, has leaves of another shape than its config, or another vocabulary than the
            actor, with each such leaf. The mesh has another axis, `ptx_coef` is negative, or `ema` outside [0, 1). A
            reference is given with adapters.

    Example:
        >>> import dataclasses, torch
        >>> from shardfn import optim
        >>> config = gpt.Config.llama_like(vocab_size=16, num_layers=1, d_model=32, num_heads=4, d_ff=64, max_len=16)
        >>> valued = dataclasses.replace(config, tie_embeddings=False)
        >>> shapes = {"actor": config, "critic": valued}
        >>> models = {name: GPTModel(x, gpt.init(x, key(0))) for name, x in shapes.items()}
        >>> rules = {"actor": optim.adamw(1e-3), "critic": optim.adamw(2e-3)}
        >>> made, state = make_ppo(models, rules, Sampling(max_tokens=2), mesh=make_mesh(alone=True), ema=0.9)
        >>> rollout = made.policy.sample(state, [[3, 1], [7]], key(1))._replace(rewards=torch.tensor([1.0, 0.0]))
        >>> state, metrics = made.update(state, made.ppo.experience(made.policy.step, state, rollout))
        >>> float(metrics["actor/reward"])
        0.5

    References:
        Yao et al., DeepSpeed-Chat, 2023, https://arxiv.org/abs/2308.01320
    """
    mesh = make_mesh({"dp": -1}) if mesh is None else mesh
    check_mesh("make_ppo", mesh)
    _check_models(models, optimizers, lora)
    configs = {name: x.config for name, x in models.items()}
    adapters = {name: _make_adapters(name, models[name], lora) if lora else None for name in _LEARNING}
    if not lora:
        configs.setdefault("reference", configs["actor"])
    rules = {name: optimizers[name] for name in _LEARNING}
    if ema is not None:
        rules["actor"] = average_params(rules["actor"], ema)
    specs = {name: gpt.specs(config) for name, config in configs.items()}
    learns = dict[str, PyTree](dict.fromkeys(configs, False))
    if not lora:
        specs["reference"] = tree_map(lambda spec: Sharding(spec, memory_kind="host"), specs["reference"])
    for name, adapted in adapters.items():
        learns[name] = True if adapted is None else adapted.trainable
        specs[name] = specs[name] if adapted is None else adapted.specs
    ppo = _make_losses(configs, adapters, ptx_coef, losses or {})
    step = sharded_step(
        ppo.objectives(configs, learns),
        multi_transform(rules, {name: "critic" if name == "critic" else "actor" for name in configs}),
        mesh=mesh,
        specs=specs,
        trainable=learns,
        zero=zero,
        has_aux=True,
    )
    params = {name: x.params for name, x in models.items()}
    if not lora:
        params.setdefault("reference", copy_leaves(params["actor"]))
    for i, (name, adapted) in enumerate(adapters.items()):
        if adapted is not None:
            params[name] = {"base": params[name], "lora": adapted.init(fold_in(key(seed), i), params=params[name])}
    state = step.init(params)
    engine = make_own_engine(configs["actor"], merge_branch(adapters["actor"], "actor", state.params), **sizes)
    policy = TextPolicy(configs["actor"], step, engine, sampling, tokenizer, adapters["actor"], "actor")
    policy._first.append(state)
    return TextPPO(policy, ppo, configs), state


def _make_losses(
    configs: Mapping[str, gpt.Config], adapters: Mapping[str, LoRA | None], ptx_coef: float, losses: Mapping[str, float]
) -> rl.PPO:
    logits, values = (functools.partial(_apply, configs[name], adapters[name]) for name in _LEARNING)
    text = functools.partial(_text_loss, configs["actor"], adapters["actor"]) if ptx_coef else None
    base = functools.partial(_base_logits, configs["actor"]) if adapters["actor"] else None
    return rl.PPO(logits, lambda params, ids: values(params, ids)[..., 0], text, ptx_coef, **losses, reference=base)


def _make_adapters(name: str, model: GPTModel, rank: int) -> LoRA:
    whole = ("^head$",) if name == "critic" else ()
    return LoRA.of(model.params, ADAPTED, rank=rank, specs=gpt.specs(model.config), modules_to_save=whole)


def _check_models(models: Mapping[str, GPTModel], optimizers: Mapping[str, GradientTransformation], rank: int) -> None:
    wrong = [
        f"{name!r} is missing in {where}"
        for where, given in (("models", models), ("optimizers", optimizers))
        for name in _LEARNING
        if name not in given
    ]
    raise_all(ValueError, "make_ppo: an actor and a critic learn, each by an optimizer:", wrong)
    if other := models.keys() - {*_LEARNING, "reference", "reward"}:
        raise ValueError(f"make_ppo: models must be actor, critic, reference or reward, got {sorted(other)}.")
    if rank and "reference" in models:
        raise ValueError(
            f"make_ppo: the reference must be the base of the actor with adapters, got lora={rank} and a reference."
            " Leave the reference out, or train all weights."
        )
    size = models["actor"].config.vocab_size
    for name, model in models.items():
        wrong += _list_misfits(name, model)
        if model.config.vocab_size != size:
            wrong.append(
                f"{name!r} has {model.config.vocab_size} tokens, and the actor has {size}: take a model with"
                " the actor's tokenizer"
            )
    raise_all(ValueError, "make_ppo: the models do not fit:", wrong)


def _list_misfits(name: str, model: GPTModel) -> list[str]:
    wanted = _list_shapes(eval_shape(functools.partial(gpt.init, model.config), key(0)))
    given = _list_shapes(model.params)
    return [
        f"{name}{path} must have the shape {wanted.get(path, 'of no leaf')} of its config, got"
        f" {given.get(path, 'no leaf')}: take the config and the parameters of one model"
        for path in {**wanted, **given}
        if wanted.get(path) != given.get(path)
    ]


def _list_shapes(params: PyTree) -> dict[str, tuple[int, ...]]:
    return {path: tuple(x.shape) for path, x in named_leaves(params)}


def _merge_leaves(lora: LoRA | None, branch: PyTree) -> PyTree:
    return branch if lora is None else lora.apply(branch["base"], branch["lora"])


def _apply(config: gpt.Config, lora: LoRA | None, branch: PyTree, ids: Tensor) -> Tensor:
    return gpt.apply(config, _merge_leaves(lora, branch), ids)


def _base_logits(config: gpt.Config, params: PyTree, ids: Tensor) -> Tensor:
    return gpt.apply(config, params["actor"]["base"], ids)


def _last_rewards(config: gpt.Config, params: PyTree, rows: tuple[Tensor, Tensor]) -> Tensor:
    ids, lengths = rows
    return rl.last_values(gpt.apply(config, params["reward"], ids)[..., 0], lengths)


def _text_loss(config: gpt.Config, lora: LoRA | None, branch: PyTree, batch: PyTree) -> Any:
    return gpt.loss(config, _merge_leaves(lora, branch), batch)
