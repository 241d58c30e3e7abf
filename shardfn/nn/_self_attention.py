"""Self-attention as a block of a model: projections, attention and output, with heads cut along a mesh axis.

Query heads and key heads are cut as by `torch.chunk`. Any numbers will do, for example 6 query and 2 key heads on 4
ranks. Where each rank's query heads read only local key heads, nothing more is sent. Elsewhere (fewer key heads than
ranks, or borders that do not meet) the projections of keys and values are gathered, in a single message, and each rank
uses the needed heads. The transpose sums the gradients.

B batch, T tokens, D model, H query heads, G key and value heads, K head dim. A projection is [H * K, D] or [H, K, D]:
the second is cut between heads by any axis, the first by axes that divide H.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.collectives import all_gather, axis_size
from shardfn.core import Axes

from ._attention import attention
from ._attention_backends import Attending
from ._batch_invariant import AnyWeight, BatchInvariantWeight
from ._online import OnlineScores
from ._parallel import affine, affines, all_ranges, check_block, enter_parallel, evenly, keys_of, rank_range, row_linear
from ._rope import rope

ATTENDING = Attending()


class Heads(NamedTuple):
    """Numbers of heads of the whole layer.

    Attributes:
        queries: H.
        keys: number G of key heads, a divisor of H.
        dim: K.
    """

    queries: int
    keys: int
    dim: int


class AttentionWeights(NamedTuple):
    """Blocks of the rank: wq, wk, wv and biases along heads, wo along columns, and the whole bo.

    Attributes:
        wq: [H * K, D] or [H, K, D].
        wk: [G * K, D] or [G, K, D].
        wv: weights as wk.
        wo: [D, H * K] or [D, H, K].
        bq: [H * K] or [H, K], or None.
        bk: [G * K] or [G, K], or None.
        bv: biases as bk.
        bo: [D], or None.
        sinks: [H], the scores of the rank's attention sinks, or None.
    """

    wq: AnyWeight
    wk: AnyWeight
    wv: AnyWeight
    wo: AnyWeight
    bq: Tensor | None = None
    bk: Tensor | None = None
    bv: Tensor | None = None
    bo: Tensor | None = None
    sinks: Tensor | None = None


class HeadNorms(NamedTuple):
    """Norms of queries and keys, before their rotation.

    Attributes:
        queries: function of queries [.., K], or of all heads together, [.., H K].
        keys: function of keys.
        joint: whether all heads of a token are normalised together.
    """

    queries: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    joint: bool = False


class KeyValues(NamedTuple):
    """Keys and values of a rank, for several layers.

    Attributes:
        first: number of the first key head.
        k_BSGK: keys, rotated where there is a table.
        v_BSGK: values.
    """

    first: int
    k_BSGK: Float[Tensor, "b s g k"]
    v_BSGK: Float[Tensor, "b s g k"]


def project_keys(
    x_BSD: Float[Tensor, "b s d"],
    w: AttentionWeights,
    heads: Heads,
    *,
    table: tuple[Tensor, Tensor] | None = None,
    axis: Axes = None,
    sequence: int | None = None,
) -> KeyValues:
    """Returns keys and values x wk^T, x wv^T, with biases: for layers that share keys, or take keys from another state.

    Args:
        x_BSD: see `self_attention`.
        w: blocks of the weights of the rank. Only keys and values are read.
        heads: heads of the whole layer.
        table: cos and sin for `rope`, of all tokens. None: no rotation.
        axis: see `self_attention`.
        sequence: see `self_attention`.

    Example:
        >>> w = AttentionWeights(*(torch.ones(8, 8) for _ in range(4)))
        >>> x, heads = torch.ones(2, 5, 8), Heads(queries=2, keys=2, dim=4)
        >>> y = self_attention(x, w, heads, keys=project_keys(x, w, heads))
        >>> torch.equal(y, self_attention(x, w, heads))
        True
    """
    found = _project_keys(enter_parallel(x_BSD, axis, sequence), w, heads, axis)
    return found if table is None else found._replace(k_BSGK=rope(found.k_BSGK, *table))


def self_attention(
    x_BTD: Float[Tensor, "b t d"],
    w: AttentionWeights,
    heads: Heads,
    *,
    table: tuple[Tensor, Tensor] | None = None,
    slopes_H: Float[Tensor, " h"] | None = None,
    how: Attending = ATTENDING,
    scale: float | None = None,
    softcap: float | None = None,
    norms: HeadNorms | None = None,
    rows_R: Int[Tensor, " r"] | None = None,
    keys: KeyValues | None = None,
    axis: Axes = None,
    sequence: int | None = None,
) -> Float[Tensor, "b t2 d"]:
    """Returns attention(x wq^T, x wk^T, x wv^T) wo^T, with biases.

    Args:
        x_BTD: whole input, or with `sequence` the rank's rows of the tokens.
        w: blocks of the weights of the rank.
        heads: heads of the whole layer.
        table: cos and sin for `rope`, of all tokens. None: no rotation.
        slopes_H: ALiBi's slopes of all H heads, or None.
        how: mask and body of attention. Where `how.impl` cuts the tokens, x and the table have only the rank's tokens.
        scale: see `attention`.
        softcap: see `attention`.
        norms: norms of queries and keys. Ranks that cut heads exchange the heads of joint norms.
        rows_R: tokens with wanted results, for a body from `Local.with_queries(rows_R)`, without a table. All
            tokens give their keys and values. None: all tokens.
        keys: keys and values from `project_keys`, without norms, in place of keys of x. wk and wv are not read. x may
            have only some of the tokens then, for a body from `Local.with_queries`.
        axis: mesh axes along which heads are cut. None means a single device.
        sequence: T where x and the result are the rank's rows of the tokens (sequence parallelism).

    Returns:
        The shape of `x_BTD`, with R tokens where `rows_R` is given.

    Raises:
        ValueError: the axis would cut a head in two, or a weight is not a block of the heads.

    Example:
        >>> w = AttentionWeights(*(torch.ones(8, 8) for _ in range(4)))
        >>> self_attention(torch.ones(2, 5, 8), w, Heads(queries=2, keys=2, dim=4), axis="tp").shape
        torch.Size([2, 5, 8])
    """
    start, stop = _local_heads(w.wq, heads, axis)
    x_BTD = enter_parallel(x_BTD, axis, sequence)
    joint = norms is not None and norms.joint
    if keys is None:
        first, q_BTHK, k_BTGK, v_BTGK = _project_inputs(x_BTD, w, heads, axis, rows_R, whole_keys=joint)
    else:
        (first, k_BTGK, v_BTGK), q_BTHK = keys, _split_heads(affine(x_BTD, w.wq, w.bq), heads)
    if norms is not None:
        cut_keys = joint and axis_size(axis) > 1 and _has_local_keys(w, heads, axis)
        q_BTHK, k_BTGK = _norm_heads(q_BTHK, k_BTGK, norms, heads, axis, cut_keys=cut_keys)
    if table is not None:
        q_BTHK, k_BTGK = rope(q_BTHK, *table), k_BTGK if keys is not None else rope(k_BTGK, *table)
    read = [h // (heads.queries // heads.keys) - first for h in range(start, stop)]
    if not evenly(read, k_BTGK.shape[2]):
        k_BTGK, v_BTGK = k_BTGK[:, :, read], v_BTGK[:, :, read]
    slopes_H = None if slopes_H is None else slopes_H[start:stop]
    mask = how.mask.of_heads(start, stop)
    scores: Any = {"slopes_H": slopes_H, "scale": scale, "softcap": softcap, "sinks_H": w.sinks}
    if rows_R is None and q_BTHK.shape[1] == k_BTGK.shape[1]:
        y_BTHK = attention(q_BTHK, k_BTGK, v_BTGK, mask=mask, impl=how.impl, **scores)
    else:  # the body knows the positions of its queries, and masks by number do not fit
        y_BTHK = how.impl.attend(q_BTHK, k_BTGK, v_BTGK, OnlineScores(mask, **scores), k_BTGK.shape[1])
    columns = heads.queries * heads.dim if w.wo.ndim == 2 else (heads.queries, heads.dim)
    return row_linear(y_BTHK.flatten(-2), w.wo, w.bo, features=columns, axis=axis, sequence=sequence)


def fused_self_attention(
    x_BTD: Float[Tensor, "b t d"],
    w_GRKD: Float[AnyWeight, "g r k d"],
    w_DHK: Float[AnyWeight, "d h k"],
    b_GRK: Float[Tensor, "g r k"] | None = None,
    b_D: Float[Tensor, " d"] | None = None,
    *,
    groups: int | None = None,
    table: tuple[Tensor, Tensor] | None = None,
    axis: Axes = None,
    sequence: int | None = None,
) -> Float[Tensor, "b t2 d"]:
    """Returns causal self-attention with a single projection for queries, keys and values, group by group.

    Each of the G groups has H / G query heads, a key head and a value head in order: R = H / G + 2. For example R = 3
    is BLOOM's layout. An axis cuts between groups, by `P(axis)`.

    Args:
        x_BTD: whole input, or with `sequence` the rank's rows of the tokens.
        w_GRKD: groups of the projection of the rank.
        w_DHK: columns of the output projection of the rank, with H in the order of groups.
        b_GRK: groups of the bias of the rank, or None.
        b_D: bias of the output projection, or None.
        groups: number G of groups of the whole layer, needed where the axis has several ranks.
        table: cos and sin for `rope`, of all tokens. None: no rotation.
        axis: mesh axes along which groups are cut. None means a single device. `w_DHK` is cut in step with the groups
            where H = G, or the axis divides G.
        sequence: T where x and the result are the rank's rows of the tokens (sequence parallelism).

    Returns:
        The shape of `x_BTD`.

    Raises:
        ValueError: R < 3, the two weights have different numbers of heads, or the weights are not the rank's blocks.

    Example:
        >>> fused_self_attention(torch.ones(2, 5, 8), torch.ones(2, 3, 4, 8), torch.ones(8, 2, 4)).shape
        torch.Size([2, 5, 8])
    """
    G, R = w_GRKD.shape[:2]
    check_block("fused_self_attention: w_GRKD", (G,), groups, axis, option="groups")
    if R < 3 or w_DHK.shape[1] != G * (R - 2):
        raise ValueError(
            f"fused_self_attention: {G} groups of {R} heads, keys and values among them, and {w_DHK.shape[1]}"
            " heads on the way back. Groups must have 3 or more, and the axis must cut both weights equally."
        )
    y_BTGRK = affine(enter_parallel(x_BTD, axis, sequence), w_GRKD, b_GRK)
    q_BTHK, k_BTGK, v_BTGK = y_BTGRK[..., :-2, :].flatten(2, 3), y_BTGRK[..., -2, :], y_BTGRK[..., -1, :]
    if table is not None:
        q_BTHK, k_BTGK = rope(q_BTHK, *table), rope(k_BTGK, *table)
    y_BTHK = attention(q_BTHK, k_BTGK, v_BTGK)
    columns = None if groups is None else (groups * (R - 2), w_DHK.shape[2])
    return row_linear(y_BTHK.flatten(-2), w_DHK, b_D, features=columns, axis=axis, sequence=sequence)


def _local_heads(wq: AnyWeight, heads: Heads, axis: Axes) -> tuple[int, int]:
    """Returns the query heads of the rank.

    Raises:
        ValueError: the axis would cut a head in two, or the weight is not a block of the heads.
    """
    n, (start, stop) = axis_size(axis), rank_range(heads.queries, axis)
    by_row, by_head = all_ranges(heads.queries * heads.dim, axis), all_ranges(heads.queries, axis)
    if wq.ndim == 2 and by_row != [(a * heads.dim, b * heads.dim) for a, b in by_head]:
        raise ValueError(
            f"{n} ranks of {axis!r} would cut {heads.queries} heads of {heads.dim} rows inside a head. Keep the weights"
            " by heads, [H, K, D] (of models.gpt: Config(per_head=True)), or take an axis that divides them."
        )
    _check_rows("wq", wq, heads.queries, heads, axis)
    return start, stop


def _check_rows(name: str, w: AnyWeight, num: int, heads: Heads, axis: Axes, by_head: bool = False) -> None:
    """Raises unless a projection of `num` heads, or the bias, is the rank's block."""
    whole = num if by_head or w.ndim == 3 else num * heads.dim
    check_block(f"self_attention: {name} of {heads}", w.shape[:1], whole, axis, option="heads")


def _project_inputs(
    x_BTD: Tensor, w: AttentionWeights, heads: Heads, axis: Axes, rows_R: Tensor | None, *, whole_keys: bool = False
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Returns the first needed key head, and the rank's queries, keys and values [B, T, heads, K].

    There are R queries where `rows_R` is given. With `whole_keys`, ranks that share heads get all key heads.
    """
    if rows_R is None and _has_local_keys(w, heads, axis):
        _check_key_rows(w, heads, axis)
        q, k, v = affines(x_BTD, (w.wq, w.wk, w.wv), (w.bq, w.bk, w.bv))
        start = 0 if axis_size(axis) == 1 else rank_range(heads.keys, axis)[0]
        return start, _split_heads(q, heads), _split_heads(k, heads), _split_heads(v, heads)
    q_BTHK = _split_heads(affine(x_BTD if rows_R is None else x_BTD[:, rows_R], w.wq, w.bq), heads)
    start, k_BTGK, v_BTGK = _project_keys(x_BTD, w, heads, axis, whole_keys=whole_keys)
    return start, q_BTHK, k_BTGK, v_BTGK


def _project_keys(
    x_BTD: Tensor, w: AttentionWeights, heads: Heads, axis: Axes, *, whole_keys: bool = False
) -> KeyValues:
    """Returns the first needed key head, and the rank's keys and values [B, T, heads, K]."""
    _check_key_rows(w, heads, axis)
    if _has_local_keys(w, heads, axis):
        k, v = affines(x_BTD, (w.wk, w.wv), (w.bk, w.bv))
        return KeyValues(rank_range(heads.keys, axis)[0], _split_heads(k, heads), _split_heads(v, heads))
    rows = 1 if w.wk.ndim == 3 else heads.dim
    start, stop = keys_of(rank_range(heads.queries, axis), heads.queries // heads.keys)
    if whole_keys:
        start, stop = 0, heads.keys
    own, size = slice(start * rows, stop * rows), heads.keys * rows
    if isinstance(w.wk, BatchInvariantWeight):  # with joined keys, as panels cannot be cut
        parts = torch.stack([affine(x_BTD, w.wk, w.bk), affine(x_BTD, w.wv, w.bv)], -1)
        k, v = all_gather(parts, axis, dim=2, size=size)[:, :, own].unbind(-1)
    else:
        wk, wv, bk, bv = _gather_weights(w, axis, size, own)
        k, v = affine(x_BTD, wk, bk), affine(x_BTD, wv, bv)
    return KeyValues(start, _split_heads(k, heads), _split_heads(v, heads))


def _check_key_rows(w: AttentionWeights, heads: Heads, axis: Axes) -> None:
    for name, x in (("wk", w.wk), ("wv", w.wv), ("bk", w.bk), ("bv", w.bv)):
        if x is not None:
            _check_rows(name, x, heads.keys, heads, axis, by_head=w.wk.ndim == 3)


def _has_local_keys(w: AttentionWeights, heads: Heads, axis: Axes) -> bool:
    """Returns whether the query heads of every rank read only the rank's key heads."""
    if axis_size(axis) == 1:
        return True
    needed = [keys_of(queries, heads.queries // heads.keys) for queries in all_ranges(heads.queries, axis)]
    held, rows = all_ranges(heads.keys, axis), 1 if w.wk.ndim == 3 else heads.dim
    # Rows cut inside a head are always joined.
    aligned = all_ranges(heads.keys * rows, axis) == [(a * rows, b * rows) for a, b in held]
    return aligned and all(a == b or (a[0] == a[1] and b[0] == b[1]) for a, b in zip(needed, held, strict=True))


def _norm_heads(
    q_BTHK: Tensor, k_BTGK: Tensor, norms: HeadNorms, heads: Heads, axis: Axes, *, cut_keys: bool
) -> tuple[Tensor, Tensor]:
    """Returns normalised queries and keys. For joint norms ranks get the missing heads of all ranks."""
    if not norms.joint:
        return norms.queries(q_BTHK), norms.keys(k_BTGK)

    def norm_together(x: Tensor, norm: Callable[[Tensor], Tensor], num: int, cut: bool) -> Tensor:
        whole = all_gather(x, axis, dim=2, size=num) if cut else x
        y = norm(whole.flatten(-2)).view_as(whole)
        return y[:, :, slice(*rank_range(num, axis))] if cut else y

    q_BTHK = norm_together(q_BTHK, norms.queries, heads.queries, axis_size(axis) > 1)
    return q_BTHK, norm_together(k_BTGK, norms.keys, heads.keys, cut_keys)


def _gather_weights(w: AttentionWeights, axis: Axes, size: int, own: slice) -> tuple[Any, ...]:
    """Gathers some rows of wk, wv, bk and bv from the ranks' blocks, in a single message."""
    biases = [b[..., None] for b in (w.bk, w.bv) if b is not None]
    parts: list[Any] = [w.wk, w.wv, *biases]
    whole = all_gather(torch.cat(parts, -1), axis, dim=0, size=size)[own]
    found = [x.to(p.dtype) for x, p in zip(whole.split([p.shape[-1] for p in parts], -1), parts, strict=True)]
    rest = iter(found[2:])
    return *found[:2], *(None if b is None else next(rest)[..., 0] for b in (w.bk, w.bv))


def _split_heads(y: Tensor, heads: Heads) -> Tensor:
    """Returns [B, T, heads of the rank, K]."""
    return y if y.ndim == 4 else y.unflatten(-1, (-1, heads.dim) if y.shape[-1] else (0, heads.dim))
