"""Self-attention as a block of a model: projections, attention and output, with heads cut along a mesh axis.

Query heads and key heads are cut as by `torch.chunk`. Any numbers will do, for example 6 query and 2 key heads on 4
ranks. Where each rank's query heads read only local key heads, nothing more is sent. Elsewhere (fewer key heads than
ranks, or borders that do not meet) the projections of keys and values are gathered, in a single message, and each rank
uses the needed heads. The transpose sums the gradients.

B batch, T tokens, D model, H query heads, G key and value heads, K head dim. A projection is [H * K, D] or [H, K, D]:
the second is cut between heads by any axis, the first by axes that divide H.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from shardfn.collectives import all_gather, axis_index, axis_size
from shardfn.core import Axes

from ._attention import attention
from ._attention_backends import Attending
from ._batch_invariant import AnyWeight, BatchInvariantWeight
from ._online import OnlineScores
from ._parallel import affine, affines, all_ranges, check_block, enter_parallel, evenly, keys_of, rank_range, row_linear


def rope_table(
    positions_T: Int64[Tensor, " t"], head_dim: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "t k"], Float[Tensor, "t k"]]:
    """Returns the cos and sin of position * base^(-2i / K), i = 0 .. K/2 - 1, both halves equal.

    Args:
        positions_T: global positions of the tokens.
        head_dim: K, even.
        base: the longest wave is 2 pi base tokens.
        dtype: dtype of the result. Angles are always formed in float32 or better.

    Returns:
        cos_TK and sin_TK, for `rope`.

    Raises:
        ValueError: `head_dim` is odd.

    Example:
        >>> cos_TK, sin_TK = rope_table(torch.arange(3), 4)
        >>> cos_TK.shape
        torch.Size([3, 4])
    """
    if head_dim % 2:
        raise ValueError(f"rope_table(head_dim={head_dim}): rotation pairs dims, so the head dim must be even.")
    work = torch.float64 if dtype == torch.float64 else torch.float32
    powers = torch.arange(0, head_dim, 2, dtype=work, device=positions_T.device) / head_dim
    angles_TK = torch.outer(positions_T.to(work), base**-powers).repeat(1, 2)
    return angles_TK.cos().to(dtype), angles_TK.sin().to(dtype)


def rope(
    x_BTHK: Float[Tensor, "b t h k"], cos_TK: Float[Tensor, "t k"], sin_TK: Float[Tensor, "t k"]
) -> Float[Tensor, "b t h k"]:
    """Rotates each pair (a, b) = (x_k, x_(k + K/2)) by the pair's angle: x cos + (-b, a) sin.

    So <rope(q)_s, rope(k)_t> depends on the positions only through s - t.

    Args:
        x_BTHK: queries or keys.
        cos_TK: cosines from `rope_table`.
        sin_TK: sines from `rope_table`.

    Example:
        >>> x_BTHK = torch.ones(1, 1, 1, 2)
        >>> torch.equal(rope(x_BTHK, *rope_table(torch.tensor([0]), 2)), x_BTHK)
        True
    """
    a, b = x_BTHK.chunk(2, dim=-1)
    return x_BTHK * cos_TK[:, None] + torch.cat((-b, a), dim=-1) * sin_TK[:, None]


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
    """

    wq: AnyWeight
    wk: AnyWeight
    wv: AnyWeight
    wo: AnyWeight
    bq: Tensor | None = None
    bk: Tensor | None = None
    bv: Tensor | None = None
    bo: Tensor | None = None


def self_attention(
    x_BTD: Float[Tensor, "b t d"],
    w: AttentionWeights,
    heads: Heads,
    *,
    table: tuple[Tensor, Tensor] | None = None,
    slopes_H: Float[Tensor, " h"] | None = None,
    how: Attending = ATTENDING,
    rows_R: Int[Tensor, " r"] | None = None,
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
        rows_R: tokens with wanted results, for a body from `Local.with_queries(rows_R)`, without a table. All
            tokens give their keys and values. None: all tokens.
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
    first, q_BTHK, k_BTGK, v_BTGK = _project_inputs(x_BTD, w, heads, axis, rows_R)
    if table is not None:
        q_BTHK, k_BTGK = rope(q_BTHK, *table), rope(k_BTGK, *table)
    read = [h // (heads.queries // heads.keys) - first for h in range(start, stop)]
    if not evenly(read, k_BTGK.shape[2]):
        k_BTGK, v_BTGK = k_BTGK[:, :, read], v_BTGK[:, :, read]
    slopes_H = None if slopes_H is None else slopes_H[start:stop]
    mask = how.mask.of_heads(start, stop)
    if rows_R is None:
        y_BTHK = attention(q_BTHK, k_BTGK, v_BTGK, mask=mask, slopes_H=slopes_H, impl=how.impl)
    else:  # the body knows the positions of its queries, and masks by number do not fit
        y_BTHK = how.impl.attend(q_BTHK, k_BTGK, v_BTGK, OnlineScores(mask, None, slopes_H, None), k_BTGK.shape[1])
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
    x_BTD: Tensor, w: AttentionWeights, heads: Heads, axis: Axes, rows_R: Tensor | None
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Returns the first needed key head, and the rank's queries, keys and values [B, T, heads, K].

    There are R queries where `rows_R` is given.
    """
    ratio = heads.queries // heads.keys
    needed = [keys_of(queries, ratio) for queries in all_ranges(heads.queries, axis)]
    held = all_ranges(heads.keys, axis)
    rows = 1 if w.wk.ndim == 3 else heads.dim
    for name, x in (("wk", w.wk), ("wv", w.wv), ("bk", w.bk), ("bv", w.bv)):
        if x is not None:
            _check_rows(name, x, heads.keys, heads, axis, by_head=rows == 1)
    # Rows cut inside a head are always joined.
    aligned = all_ranges(heads.keys * rows, axis) == [(a * rows, b * rows) for a, b in held]
    if aligned and all(a == b or (a[0] == a[1] and b[0] == b[1]) for a, b in zip(needed, held, strict=True)):
        if rows_R is None:
            q, k, v = affines(x_BTD, (w.wq, w.wk, w.wv), (w.bq, w.bk, w.bv))
        else:
            q, (k, v) = affine(x_BTD[:, rows_R], w.wq, w.bq), affines(x_BTD, (w.wk, w.wv), (w.bk, w.bv))
        return held[int(axis_index(axis))][0], _split_heads(q, heads), _split_heads(k, heads), _split_heads(v, heads)
    q_BTHK = _split_heads(affine(x_BTD if rows_R is None else x_BTD[:, rows_R], w.wq, w.bq), heads)
    (start, stop), size = needed[int(axis_index(axis))], heads.keys * rows
    own = slice(start * rows, stop * rows)
    if isinstance(w.wk, BatchInvariantWeight):  # with joined keys, as panels cannot be cut
        parts = torch.stack([affine(x_BTD, w.wk, w.bk), affine(x_BTD, w.wv, w.bv)], -1)
        k, v = all_gather(parts, axis, dim=2, size=size)[:, :, own].unbind(-1)
        return start, q_BTHK, _split_heads(k, heads), _split_heads(v, heads)
    wk, wv, bk, bv = _gather_weights(w, axis, size, own)
    return start, q_BTHK, _split_heads(affine(x_BTD, wk, bk), heads), _split_heads(affine(x_BTD, wv, bv), heads)


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
