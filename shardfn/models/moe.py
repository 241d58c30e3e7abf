"""Transformers with experts: settings of `gpt.Config`, the loss with facts of the routers, and students.

A model with experts is a `gpt.Config(experts=...)`. All functions of `models.gpt` take it. `loss` here also returns the
metrics of the routers, and moves the biases of experts that are balanced without a loss.

A student is the same model without some of its layers, with the teacher's weights.

L layers with experts, E experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import psum
from shardfn.core import Axes, PyTree, raise_all, tree_map
from shardfn.engine import PipelineState, WeightedMean
from shardfn.nn import moe

from . import gpt
from ._expert_states import aggregate_experts as aggregate_experts
from ._expert_states import count_choices as count_choices
from ._expert_states import make_biases
from ._expert_states import most_used as most_used
from ._expert_states import prune_experts as prune_experts
from ._expert_states import upcycle_experts as upcycle_experts
from ._experts import Experts as Experts
from ._gpt_config import Config
from ._gpt_leaves import Params, stack_blocks, unstack_blocks
from ._gpt_stages import for_each_layer

ModelState = dict[str, Any]


def gpt_moe(**changes: Any) -> gpt.Config:
    """Returns GPT-2 small with GShard's experts in every second layer, with `changes`.

    Example:
        >>> gpt_moe(num_layers=4).expert_layers
        [1, 3]

    References:
        Lepikhin et al., GShard, 2020, https://arxiv.org/abs/2006.16668
    """
    return gpt.Config.gpt2_like(**{"experts": Experts(num=8, every=2), **changes})


def mixtral_like(**changes: Any) -> gpt.Config:
    """Returns Mixtral 8x7B with `changes`: 8 experts, two for each token.

    Example:
        >>> mixtral_like(num_layers=2).experts.num
        8

    References:
        Jiang et al., Mixtral of Experts, 2024, https://arxiv.org/abs/2401.04088
    """
    style: dict[str, Any] = {"num_kv_heads": 8, "d_ff": 14336, "max_len": 32768, "rope_base": 1e6}
    return gpt.Config.llama_like(**{**style, "experts": Experts(num=8, balance=0.02), **changes})


def qwen3_moe_like(**changes: Any) -> gpt.Config:
    """Returns Qwen3-30B-A3B's layers with `changes`: 128 small experts, eight for each token.

    Queries and keys are not normalised, although they are in Qwen3.

    Example:
        >>> qwen3_moe_like(num_layers=2).experts.top_k
        8

    References:
        Qwen Team, Qwen3 Technical Report, 2025, https://arxiv.org/abs/2505.09388
    """
    shape: dict[str, Any] = {"vocab_size": 151936, "num_layers": 48, "d_model": 2048, "num_heads": 32}
    style: dict[str, Any] = {"num_kv_heads": 4, "d_ff": 6144, "rope_base": 1e6, "max_len": 32768}
    experts = Experts(num=128, top_k=8, d_ff=768, balance=0.001)
    return gpt.Config.llama_like(**{**shape, **style, "experts": experts, **changes})


def deepseek_v3_like(**changes: Any) -> gpt.Config:
    """Returns DeepSeek-V3's feed-forward layers with `changes`: 256 experts and a shared expert, balanced by biases.

    Attention is Llama's. DeepSeek's is `latent=gpt.Latent(512, 128, 64, 128, q_rank=1536)`. The loss has a state:
    `init_state`, `loss`, `finish`.

    Example:
        >>> deepseek_v3_like(num_layers=5).expert_layers
        [3, 4]

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437
    """
    shape: dict[str, Any] = {"vocab_size": 129280, "num_layers": 61, "d_model": 7168, "num_heads": 128}
    route = functools.partial(moe.sigmoid_groups, groups=8, groups_kept=4, scale=2.5)
    balance = {"balance": 1e-4, "balance_loss": moe.balance.sequence, "bias_rate": 1e-3}
    experts = Experts(num=256, top_k=8, d_ff=2048, first=3, route=route, shared=True, **balance)
    return gpt.Config.llama_like(**{**shape, "d_ff": 18432, "max_len": 4096, "experts": experts, **changes})


def loss(
    config: gpt.Config,
    params: Params,
    *rest: Any,
    axes: Axes = None,
    **options: Any,
) -> Any:
    """Returns `gpt.loss` and the metrics of the routers. Where experts have a bias, with the model state, too.

        loss(config, params, batch[, key]) -> (loss, aux)
        loss(config, params, model_state, batch[, key]) -> (loss, aux, model_state)        with bias_rate > 0

    Args:
        config: shape, with experts.
        params: parameters as from `gpt.init`.
        rest: model state if experts have a bias, the batch, and the key that turns dropout on.
        axes: axes of the batch, over which the choices of experts are counted for their biases.
        options: options of `gpt.loss`.

    Raises:
        ValueError: the config has no experts, or more or fewer arguments.

    Example:
        >>> import shardfn.core as core
        >>> config = mixtral_like(vocab_size=64, num_layers=1, d_model=32, num_heads=8, d_ff=16)
        >>> batch = {"tokens": torch.zeros(2, 9, dtype=torch.int64)}
        >>> _, aux = loss(config, gpt.init(config, core.key(0)), batch)
        >>> "balance" in aux
        True
    """
    state, rest = (rest[0], rest[1:]) if _has_bias(config) and len(rest) > 1 else (None, rest)
    if not 1 <= len(rest) <= 2 or (state is None) == _has_bias(config):
        need = "params, model_state, batch[, key]" if _has_bias(config) else "params, batch[, key]"
        raise ValueError(f"moe.loss(config, {need}) for {config.experts}: it got {len(rest)} arguments after params.")
    bias = None if state is None else state["bias"]
    value, seen = gpt.loss_and_seen(config, params, *rest, bias=bias, load=True, **options)
    assert seen is not None
    pairs = {name: WeightedMean(total.sum(), weight.sum()) for name, (total, weight) in seen.metrics.items()}
    balance = seen.loss.detach().mean()
    # Where ranks count by their targets, the loss holds the balance by this weight.
    weighted = WeightedMean(balance * value.weight, value.weight) if isinstance(value, WeightedMean) else balance
    aux = {"balance": weighted} | pairs
    if state is None:
        return value, aux
    counts = tree_map(lambda old, new: old + psum(new, axes), state["counts"], seen.counts)
    return value, aux, {**state, "counts": counts}


def init_state(config: gpt.Config) -> ModelState:
    """Returns the biases of all experts and their counts in this step.

    `{"bias": [L, E], "counts": int64 [L, E]}`, zeros. For a pyramid both are lists with `[E]` of each layer.

    Example:
        >>> init_state(deepseek_v3_like(num_layers=5))["bias"].shape
        torch.Size([2, 256])
    """
    _get_experts(config)
    return make_biases(config)


def stages(
    config: gpt.Config,
    *,
    axes: Axes = None,
    wrap: gpt.Wrap = lambda inner: inner,
    axis: Axes = None,
    sequence: bool = False,
    loss: gpt.LogitsLoss | None = None,
) -> gpt.Stages:
    """Returns `gpt.stages` of experts with a bias, which each stage keeps for its layers.

    The model state is `PipelineState(blocks=moe.init_state(config))`, with the spec `PipelineState(P(), P("pp"), P())`.
    Layers that are not stacked have `PipelineState(blocks=moe.layer_states(config))`, a list, with the spec `P()`.

    Args:
        config: shape, with experts that have a bias.
        axes: axes of the batch, over which the choices of experts are counted.
        wrap: see `gpt.stages`.
        axis: see `gpt.stages`.
        sequence: see `gpt.stages`.
        loss: see `gpt.stages`.

    Raises:
        ValueError: experts have no bias, or as `gpt.stages`.

    Example:
        >>> from shardfn.core import key
        >>> config = deepseek_v3_like(vocab_size=64, num_layers=2, d_model=32, num_heads=4, d_ff=16, stacked=True,
        ...     experts=Experts(num=4, d_ff=8, bias_rate=0.1, route=moe.sigmoid_groups))
        >>> first, block, last = stages(config)
        >>> h, _ = first(gpt.init(config, key(0)), (), {"tokens": torch.zeros(2, 9, dtype=torch.int64)})
        >>> p = {name: x[0] for name, x in gpt.init(config, key(0))["blocks"].items()}
        >>> _, state = block(p, {name: x[0] for name, x in init_state(config).items()}, h)
        >>> state["counts"].sum()
        tensor(32)
    """
    if not _has_bias(config):
        raise ValueError(f"moe.stages: {config.experts} have no bias (bias_rate=0). Use gpt.stages.")
    first, run, last = gpt.stages_and_seen(config, axis, sequence, loss)

    def run_layer(i: int, p: Params, state: Any, h: Any, key: Tensor | None = None) -> tuple[Any, Any]:
        h, seen = run(p, h, key, state["bias"] if state else None, i)
        return h, state if seen is None else {**state, "counts": state["counts"] + psum(seen.counts, axes)}

    def drop_state(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, state, *rest: (f(params, *rest), state)

    run_layers = for_each_layer(config, lambda i: wrap(functools.partial(run_layer, i)))
    return gpt.Stages(drop_state(first), run_layers, drop_state(last))


def layer_states(config: gpt.Config) -> list[Any]:
    """Returns `init_state` by layer, for a pipeline of layers that are not stacked: () for a layer without experts.

    Example:
        >>> config = deepseek_v3_like(num_layers=4)
        >>> [len(x) for x in layer_states(config)]
        [0, 0, 0, 2]
    """
    state, where = init_state(config), config.expert_layers
    rows = [{name: x[n] for name, x in state.items()} for n in range(len(where))]
    return [rows[where.index(i)] if i in where else () for i in range(config.num_layers)]


def finish(config: gpt.Config, model_state: Any) -> Any:
    """Returns the model state after a step.

    Biases have moved once by the counts of all microbatches, and the counts are cleared.

    The function is for `sharded_step(finish=functools.partial(moe.finish, config), has_state=True)`. In a pipeline the
    state is a `PipelineState`.

    Example:
        >>> config = deepseek_v3_like(num_layers=4)
        >>> state = init_state(config)
        >>> state["counts"][0, 0] = 512
        >>> finish(config, state)["bias"][0, :3]
        tensor([-0.0010,  0.0010,  0.0010])
    """
    if isinstance(model_state, PipelineState):
        return model_state._replace(blocks=finish(config, model_state.blocks))
    if isinstance(model_state, list):  # by layer
        return [finish(config, x) if x else x for x in model_state]
    rate = _get_experts(config).bias_rate
    bias = tree_map(lambda b, n: moe.bias_update(b, n, rate), model_state["bias"], model_state["counts"])
    return {**model_state, "bias": bias, "counts": tree_map(torch.zeros_like, model_state["counts"])}


def add_biases(params: PyTree, model_state: Mapping[str, Any]) -> PyTree:
    """Returns the parameters of a config with `bias_rate` as an engine takes them: with the biases of the experts.

    Args:
        params: parameters as from `gpt.init`.
        model_state: state of `loss`, as from `init_state`.

    Example:
        >>> from shardfn.core import key
        >>> config = deepseek_v3_like(num_layers=4, d_model=32, num_heads=4, num_kv_heads=4, vocab_size=64, d_ff=16)
        >>> params = add_biases(gpt.init(config, key(0)), init_state(config))
        >>> params["expert_bias"].dtype
        torch.float32
    """
    return {**params, gpt.EXPERT_BIAS: model_state["bias"]}


def split_biases(config: gpt.Config, params: PyTree) -> tuple[PyTree, ModelState]:
    """Returns parameters without the biases of the experts, and the model state of `loss`: the inverse of `add_biases`.

    Args:
        config: shape, with `bias_rate`.
        params: parameters as an engine takes them, such as a DeepSeek-V3's from `interop.gpt_from_hf`.

    Example:
        >>> from shardfn.core import key
        >>> config = deepseek_v3_like(num_layers=4, d_model=32, num_heads=4, num_kv_heads=4, vocab_size=64, d_ff=16)
        >>> params, state = split_biases(config, add_biases(gpt.init(config, key(0)), init_state(config)))
        >>> "expert_bias" in params, sorted(state)
        (False, ['bias', 'counts'])
    """
    bias = params[gpt.EXPERT_BIAS]
    full: Any = bias.full() if hasattr(bias, "full") else bias
    rest = {name: x for name, x in params.items() if name != gpt.EXPERT_BIAS}
    return rest, {**init_state(config), "bias": full}


def num_active_params(config: gpt.Config) -> int:
    """Returns the number of parameters that a token uses.

    Example:
        >>> round(num_active_params(mixtral_like()) / 1e9, 1), round(gpt.num_params(mixtral_like()) / 1e9, 1)
        (12.9, 46.7)
    """
    experts = _get_experts(config)
    one = (3 if config.mlp == "swiglu" else 2) * config.d_model * (experts.d_ff or config.ff_dim)
    return gpt.num_params(config) - sum(num - experts.top_k for num in config.num_experts) * one


def _get_experts(config: gpt.Config) -> Experts:
    if config.experts is None:
        raise ValueError(f"the model has no experts. Give it some, as in {mixtral_like.__name__}().")
    return config.experts


def _has_bias(config: gpt.Config) -> bool:
    return _get_experts(config).bias_rate > 0


def student(
    config: Config, params: Params, *, keep: Sequence[int] | None = None, every: int = 8
) -> tuple[Config, Params]:
    """Returns a model of some layers of a model, and the weights of these layers: a student that begins as its teacher.

    With `distill.staged_step` it learns from the whole model: a Mixture-of-Students, if the model has experts.

    Args:
        config: the teacher.
        params: parameters of the teacher, as from `gpt.init`.
        keep: numbers of the layers that the student has, in order. None: all but each `every`-th.
        every: distance of the layers that are left out, such as 8 for 21 layers of 24.

    Returns:
        The student's config and parameters. Leaves are the teacher's own, which `step.init` copies. Layers of a student
        that have experts at other distances are in `Experts(layers=)`, and lie unstacked.

    Raises:
        ValueError: no layers, unknown or repeated layers, or another order than the teacher's. Or all are kept, or a
            number of layers that does not fit.

    Example:
        >>> from shardfn.core import key
        >>> from shardfn.models import gpt, moe
        >>> teacher = moe.gpt_moe(vocab_size=64, num_layers=8, d_model=32, num_heads=4)
        >>> config, params = student(teacher, gpt.init(teacher, key(0)))
        >>> config.num_layers, config.expert_layers, len(params["blocks"])
        (7, [1, 3, 5], 7)

    References:
        Rajbhandari et al., DeepSpeed-MoE, 2022, https://arxiv.org/abs/2201.05596, section 4.2
    """
    if keep is None:
        keep = [i for i in range(config.num_layers) if (i + 1) % every] if every > 0 else []
    _check_kept(config, keep, every)
    layers = unstack_blocks(config, params)["blocks"]
    made = _make_config(config, keep)
    out = {**params, "blocks": [layers[i] for i in keep]}
    return made, stack_blocks(made, out, torch.stack) if made.stacked else out


def _make_config(config: Config, keep: Sequence[int]) -> Config:
    if config.experts is None:
        return dataclasses.replace(config, num_layers=len(keep))
    at = {layer: i for i, layer in enumerate(config.expert_layers)}
    kept = [i for i in keep if i in at]
    layers = tuple(i for i, layer in enumerate(keep) if layer in at)
    if not layers:
        return dataclasses.replace(config, num_layers=len(keep), experts=None)
    num = config.experts.num
    num = num if isinstance(num, int) else tuple(num[at[i]] for i in kept)
    experts = dataclasses.replace(config.experts, num=num, layers=None)
    alike = layers == tuple(i for i in range(len(keep)) if experts.in_layer(i))
    if config.experts.layers is None and alike and len(keep) % config.layers_a_block == 0:
        return dataclasses.replace(config, num_layers=len(keep), experts=experts)
    named = dataclasses.replace(experts, layers=layers, every=1, first=0)
    return dataclasses.replace(config, num_layers=len(keep), experts=named, stacked=False)


def _check_kept(config: Config, keep: Sequence[int], every: int) -> None:
    num, problems = config.num_layers, []
    if every < 2:
        problems.append(f"every must be 2 or more, got {every}. For example 8 leaves out each 8th layer")
    elif not keep:
        problems.append(f"a student must have layers, got {keep} of {num}")
    if unknown := [i for i in keep if not 0 <= i < num]:
        problems.append(f"layers {unknown} must be from 0 to {num - 1}, got {list(keep)}")
    elif list(keep) != sorted(set(keep)):
        problems.append(f"keep must be ascending, as the teacher has its layers, got {list(keep)}")
    elif len(keep) == num:
        problems.append(f"all {num} layers are kept. Pass keep=, or a smaller every={every}")
    raise_all(ValueError, "moe.student:", problems)
