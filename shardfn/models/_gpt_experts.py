"""The mixture of experts of a single layer, on this rank's part of the layer, and the facts of the router.

B batch, T tokens, S = B T, D model, E experts, k choices.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from shardfn.collectives import all_gather_invariant, axis_size, psum, pvary, take_own_block
from shardfn.core import Axes, P, checkpoint_name, tree_map
from shardfn.nn import BatchInvariantWeight, between, enter_parallel, leave_parallel, linear, moe, whole_length

from ._experts import Experts
from ._gpt_config import Config
from ._gpt_leaves import Params, weight


class Along(NamedTuple):
    """Axes that cut the blocks. With `sequence`, the number of tokens, tokens are cut between blocks."""

    axis: Axes = None
    sequence: int | None = None


class Seen(NamedTuple):
    """Facts of one router, or their sums over several routers.

    Attributes:
        loss: weighted balance losses.
        counts: choices of each expert, int64 `[E]`, of several layers `[L, E]`, of a pyramid a list of `[E]` by layer.
        metrics: metrics of `moe.load`: sums and weights, or {} where metrics are not asked for.
        experts: experts of each token, before a capacity, int64 `[S, k]`, of several layers `[L, S, k]`.
    """

    loss: Tensor
    counts: Any
    metrics: dict[str, tuple[Tensor, Tensor]]
    experts: Tensor


def mixture(
    config: Config,
    along: Along,
    p: Params,
    x_BTD: Tensor,
    bias_E: Tensor | None,
    name: str,
    mask_BT: Tensor | None = None,
    chosen_BTk: Tensor | None = None,
    *,
    load: bool = False,
) -> tuple[Tensor, Seen]:
    """Returns the sum of the experts that each token has chosen, or are replayed, weighted by the router.

    Padding has the sum 0.
    """
    assert config.experts is not None
    cut = _features_are_cut(config.experts, along)
    if cut and config.batch_invariant:
        raise ValueError(
            f"{name}: batch_invariant=True with {config.experts.exchange}: ranks along {along.axis!r} would have"
            f" features of all experts, whose sums have other bits. Use"
            f" exchange=moe.AllReduce({along.axis!r}, in_order=True)."
        )
    options = {
        "bias": bias_E,
        "mask": None if mask_BT is None else mask_BT.flatten(),
        "chosen": None if chosen_BTk is None else chosen_BTk.flatten(0, 1).long(),
    }
    logits_BTE = _logits_of_all(config, p["router"], p.get("router_b"), x_BTD, along)
    routing, seen = _route_tokens(config, config.experts, logits_BTE, name, options, load)
    exchange, dealt = config.experts.exchange, _deals_tokens(config.experts, along, name)
    if cut and not dealt:
        # Each rank has a part of the features of every expert, and so a part of each result.
        x_BTD, routing = enter_parallel(x_BTD, *along), routing._replace(weights=pvary(routing.weights, along.axis))
    elif along.sequence is not None:
        routing = moe.Routing(*(_take_rows(x, along, len(x_BTD)) for x in routing))
    how: Any = {"axis": along.axis if cut else None, "batch_invariant": config.batch_invariant}
    run = functools.partial(moe.gelu_experts, **how)
    if config.mlp == "swiglu":
        run = functools.partial(moe.swiglu_experts, gate=config.experts.gate, **how)
    leaves = {n.removeprefix("e_"): x for n, x in p.items() if n.startswith("e_")}
    leaves = {n if n.startswith("b_") else f"w_{n}": x for n, x in leaves.items()}
    x_SD, shares = x_BTD.flatten(0, 1), _shares_tokens(config.experts, along)
    if shares and isinstance(exchange, moe.AllToAll):
        x_SD, *rows = (take_own_block(x, along.axis, dim=0) for x in (x_SD, *routing))
        num, routing = len(x_BTD.flatten(0, 1)), moe.Routing(*rows)
        rest = tuple(x for x in P(exchange.axis).axes if x not in P(along.axis).axes)
        exchange = dataclasses.replace(exchange, tokens=axis_size(rest or None) * num)
    elif isinstance(exchange, moe.AllToAll):
        exchange = _fit_exchange(config, along, exchange, dealt, *x_BTD.shape[:2])
    y_SD = moe.apply(run, leaves, x_SD, routing, exchange=exchange, name=name)
    y_SD = all_gather_invariant(y_SD, along.axis, dim=0, size=len(x_BTD.flatten(0, 1))) if shares else y_SD
    y_BTD = y_SD.view_as(x_BTD)
    return (leave_parallel(y_BTD, *along) if cut and not dealt else y_BTD), seen


def _deals_tokens(experts: Experts, along: Along, name: str) -> bool:
    """Returns whether each rank along the blocks' axis sends a share of the tokens.

    Raises:
        ValueError: the exchange names another axis than the blocks' axis.
    """
    exchange = experts.exchange
    if not isinstance(exchange, moe.AllToAll) or axis_size(exchange.dealt) == 1:
        return False
    if axis_size(along.axis) == 1 or set(P(exchange.dealt).axes) != set(P(along.axis).axes):
        raise ValueError(
            f"{name}: {exchange} deals tokens over {exchange.dealt!r}, but the features of experts are cut along"
            f" {along.axis!r}. Use dealt={along.axis!r}."
        )
    return True


def _fit_exchange(
    config: Config, along: Along, exchange: moe.AllToAll, dealt: bool, num_rows: int, num_tokens: int
) -> moe.AllToAll:
    """Returns the exchange with the number of tokens, where ranks may have unequal numbers."""
    own_rows = dealt and along.sequence is not None
    tokens, axes = exchange.tokens, P(exchange.axis).axes
    if tokens is None:
        axes = (*axes, *P(exchange.dealt).axes) if own_rows else axes
        tokens = tokens_of_all(config, along, axes, num_rows, num_tokens)
        tokens = None if tokens == axis_size(axes) * num_rows * num_tokens else tokens
    return dataclasses.replace(exchange, tokens=tokens, own_rows=own_rows)


def mix_residual(
    config: Config, along: Along, p: Params, experts_BTD: Tensor, mlp_BTD: Tensor, x_BTD: Tensor
) -> Tensor:
    """Returns the mean of experts and MLP by a token's two coefficients, which are computed in float32 at least."""
    w_2D, b_2 = p["mix"], between(p["mix_b"], *along)
    if config.batch_invariant:
        w_2D = weight(config, w_2D if isinstance(w_2D, BatchInvariantWeight) else between(w_2D, *along))
        return moe.residual(experts_BTD, mlp_BTD, x_BTD, w_2D, b_2, batch_invariant=True)
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    mixed = moe.residual(experts_BTD, mlp_BTD, x_BTD.to(wide), between(w_2D, *along).to(wide), b_2.to(wide))
    return mixed.to(x_BTD.dtype)


def join_seen(config: Config, found: Sequence[Seen]) -> Seen | None:
    """Returns the facts of the routers of several layers."""
    if not found:
        return None
    counts = [x.counts for x in found]
    pyramid = config.experts is not None and isinstance(config.experts.num, tuple)
    joined = tree_map(lambda *each: torch.stack(each), *(x._replace(counts=()) for x in found))
    return joined._replace(counts=counts if pyramid else torch.stack(counts))


def by_layer(config: Config, chosen_BTmk: Tensor, tokens_BT: Tensor) -> Tensor:
    """Returns the choices of each layer with experts, [m, B, T, k].

    Raises:
        ValueError: choices do not fit the config's layers and the tokens.
    """
    k = config.experts.top_k if config.experts is not None else 0
    wanted = (*tokens_BT.shape, len(config.expert_layers), k)
    if config.experts is None or chosen_BTmk.shape != wanted:
        has = "no experts" if config.experts is None else f"k={k} choices in {wanted[2]} layers with experts"
        raise ValueError(
            f"apply: chosen has shape {tuple(chosen_BTmk.shape)}, and tokens {tuple(tokens_BT.shape)}. The config has"
            f" {has}, so chosen must be {'None' if config.experts is None else wanted}: the routes of an engine of this"
            " config."
        )
    return rearrange(chosen_BTmk, "b t m k -> m b t k")


def check_bias(config: Config, bias_mE: Tensor | Sequence[Tensor] | None) -> None:
    """Refuses biases of other experts, and missing biases where tokens choose by biases.

    Raises:
        ValueError: has both shapes, and the remedy.
    """
    experts = config.experts
    if bias_mE is None:
        if experts is not None and experts.bias_rate > 0:
            raise ValueError(
                f"experts with bias_rate={experts.bias_rate} are chosen by biases, which lie in the model state, and"
                ' bias is missing. Pass bias=model_state["bias"], or train by models.moe.loss.'
            )
        return
    pyramid = experts is not None and isinstance(experts.num, tuple)
    wanted: Any = None if experts is None else (len(config.expert_layers), experts.num)
    found: Any = tuple(bias_mE.shape) if isinstance(bias_mE, Tensor) else [tuple(x.shape) for x in bias_mE]
    if pyramid:
        wanted = [(num,) for num in config.num_experts]
    if found != wanted:
        raise ValueError(
            f"bias has shape {found}, and the config's layers with experts need {wanted}: a number for"
            " each expert of each, as models.moe.init_state makes them. A config without experts takes None."
        )


def _features_are_cut(experts: Experts, along: Along) -> bool:
    """Returns whether each rank along the blocks' axis has only a part of the features of each expert.

    Raises:
        ValueError: the exchange is along that axis, and takes tokens that lie otherwise.
    """
    shared = set(P(along.axis).axes) & set(experts.exchange.spec.axes)
    if axis_size(along.axis) == 1 or not shared:
        return axis_size(along.axis) > 1
    if not _shares_tokens(experts, along) and isinstance(experts.exchange, moe.AllReduce) == (
        along.sequence is not None
    ):
        own = "their own" if along.sequence is not None else "the same"
        remedy = "AllToAll or GatherExperts" if along.sequence is not None else "AllReduce, or sequence=True"
        raise ValueError(
            f"experts: ranks along {along.axis!r} have {own} tokens, but not for {experts.exchange}. Use {remedy}."
        )
    return False


def _shares_tokens(experts: Experts, along: Along) -> bool:
    """Returns whether ranks along the blocks' axis have the same tokens, and each sends its part of them to experts."""
    exchange = experts.exchange
    if not isinstance(exchange, moe.AllToAll) or along.sequence is not None or axis_size(along.axis) == 1:
        return False
    return set(P(along.axis).axes) < set(P(exchange.axis).axes) and axis_size(exchange.dealt) == 1


def _route_tokens(
    config: Config,
    experts: Experts,
    logits_BTE: Tensor,
    name: str,
    options: dict[str, Any],
    load: bool,
) -> tuple[moe.Routing, Seen]:
    """Returns the routing of all tokens of the ranks that share a block, and the facts of the router.

    Counts of each expert's tokens are sent between ranks only with `load`.
    """
    mask = options["mask"]
    by: dict[str, Any] = {"axes": experts.axes} | ({} if mask is None else {"mask": mask})
    routing = experts.routing(logits_BTE.flatten(0, 1), name, batch_invariant=config.batch_invariant or None, **options)
    own = by
    if experts.balance_loss is moe.balance.sequence:
        cut = config.attention.axes
        rest = tuple(a for a in P(experts.axes).axes if a not in cut)
        own = by | {"axes": cut or None, "batch_axes": rest or None, "num_sequences": len(logits_BTE)}
    loss = experts.balance * experts.balance_loss(routing, **own)
    if experts.z:
        loss = loss + experts.z * moe.balance.z(routing, **by)
    kept = routing
    if experts.capacity is not None:
        tokens = _count_tokens(routing, experts.axes, mask)
        num = moe.capacity(tokens, experts.top_k, routing.num_experts, experts.capacity, minimum=1)
        kept = moe.apply_capacity(routing, num, axes=experts.axes)
    return kept, Seen(loss, routing.counts(), moe.load(routing, kept, **by) if load else {}, routing.experts)


def _count_tokens(routing: moe.Routing, axes: Axes, mask: Tensor | None) -> int | Tensor:
    """Returns the number of tokens that count on all ranks of `axes`, which may have different numbers of rows."""
    own = len(routing.experts)
    if mask is not None:
        return psum(mask.sum(), axes)
    return own if axis_size(axes) == 1 else psum(routing.experts.new_tensor(own), axes)


def tokens_of_all(config: Config, along: Along, axes: Axes, num_rows: int, num_tokens: int) -> int:
    """Returns the most tokens that the ranks along `axes` have together, for example 7 tokens on 2 ranks with 4 and 3.

    Args:
        config: config whose attention's axes cut sequences.
        along: axes of the blocks. With `sequence`, the blocks' axis cuts tokens between blocks.
        axes: axes of the ranks.
        num_rows: number of rows of this rank, and of each other rank.
        num_tokens: number of tokens of a row on this rank. Ranks that cut a sequence may have other numbers.
    """
    ranks, named = axis_size(axes), set(P(axes).axes)
    cuts: list[tuple[Any, int]] = []
    if along.sequence is not None:
        cuts.append((P(along.axis).axes, along.sequence))
    if axis_size(config.attention.axes or None) > 1:
        cuts.append((config.attention.axes, whole_length(config.attention, num_tokens)))
    for cut, whole in cuts:
        if (parts := axis_size(tuple(a for a in cut if a in named) or None)) > 1:
            ranks, num_tokens = ranks // parts, whole
    return ranks * num_rows * num_tokens


def _logits_of_all(config: Config, w_ED: Any, b_E: Tensor | None, x_BTD: Tensor, along: Along) -> Tensor:
    """Returns the logits of all tokens that the ranks of a block have. The router computes in float32 at least."""
    logits_BTE = _compute_logits(config, w_ED, b_E, x_BTD, along)
    if along.sequence is None:
        return logits_BTE
    # All ranks of the block route all tokens of the block, and continue with equal choices.
    return checkpoint_name(all_gather_invariant(logits_BTE, along.axis, dim=1, size=along.sequence), "tp_gather")


def _compute_logits(config: Config, w_ED: Any, b_E: Tensor | None, x_BTD: Tensor, along: Along) -> Tensor:
    b_E = None if b_E is None else between(b_E, *along)
    if config.batch_invariant:
        return linear(
            x_BTD, weight(config, w_ED if isinstance(w_ED, BatchInvariantWeight) else between(w_ED, *along)), b_E
        )
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    return linear(x_BTD.to(wide), between(w_ED, *along).to(wide), None if b_E is None else b_E.to(wide))


def _take_rows(x_SE: Tensor, along: Along, batch: int) -> Tensor:
    assert along.sequence is not None
    return take_own_block(x_SE.unflatten(0, (batch, along.sequence)), along.axis, dim=1).flatten(0, 1)
