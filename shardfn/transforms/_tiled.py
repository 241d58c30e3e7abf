"""`tiled`: the same function, computed for a stretch of a long dim at a time.

Rajbhandari et al., ALST: Arctic Long Sequence Training, 2025, https://arxiv.org/abs/2506.13996
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn import core
from shardfn._torch import forward_level
from shardfn.collectives import transforming
from shardfn.engine import check_order
from shardfn.leaves import opened

from ._remat import remat


def tiled(f: Callable[..., Any], dim: int = 1, *, tiles: int | None = None) -> Callable[..., Any]:
    """Runs `f` tile by tile, and again in the backward: `tiled(f, dim)(params, x) == f(params, x)`.

        f(params, x) = cat([f(params, x_1), ..., f(params, x_n)], dim), or the sum of 0-d results

    The equation holds for functions of single positions, such as an MLP, a norm or a projection, and for sums over
    positions, such as the total of a loss. Intermediate values of `f` exist for one tile at a time, in the forward and
    the backward. Only `x` and the result stay in memory. The cost is a second forward of `f`. Sharded parameters of a
    step are gathered once for all tiles. Gradients of parameters are summed over tiles in float32, or wider.

    There are always exactly `tiles` tiles, so ranks with different lengths make the same calls. The tiles' lengths
    differ by one at most, for example 3, 2 and 2 for 7 positions. With fewer positions than tiles, some are empty.

    Args:
        f: `f(params, *xs, **whole)`, a pure function. Every leaf of the result is 0-d or has `dim`. Not a mean: the sum
            of the means of tiles is not the mean.
        dim: dim to cut of every tensor among the xs, and of the results, counted from the front.
        tiles: number of tiles. Default: positions of the first of the xs divided by the features (the last dim),
            rounded up, so a tile is about square.

    Returns:
        A function like `f`. `params`, a tree, and keyword arguments go to every tile whole.

    Raises:
        ValueError: `dim` is negative, `tiles` is less than 1, or `f` is jitted, accumulated or has a precision policy,
            or (when called) a tensor among the xs lacks the dim or has another length along the dim, or a result is not
            0-d and lacks the tile's length. All leaves are listed.

    Example:
        >>> def norm(w, x):
        ...     return w * x / x.square().mean(-1, keepdim=True).sqrt()
        >>> w, x = torch.rand(4), torch.rand(2, 7, 4)
        >>> torch.equal(tiled(norm, 1, tiles=3)(w, x), norm(w, x))
        True
    """
    check_order("remat", f)
    if dim < 0 or (tiles is not None and tiles < 1):
        raise ValueError(
            "tiled: dim must be 0 or more, because the tensors may have different numbers of dims, and tiles must be"
            f" at least 1, got dim={dim} and tiles={tiles}."
        )
    again = remat(f)

    @functools.wraps(f)
    def run_tiles(params: core.PyTree, *xs: Any, **whole: Any) -> Any:
        leaves, treedef = core.tree_flatten(xs)
        cut = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        lengths = tile_lengths(_tiled_length(dim, xs, cut), tiles or _count_square_tiles(dim, cut))
        parts = {i: opened(x).split(lengths, dim) for i, x in cut.items()}
        # Held while the tiles run, so that a step gathers the leaves once.
        params, uses = _summed_wide(core.tree_map(opened, params))
        outs = []
        for n in range(len(lengths)):
            tile = core.tree_unflatten(treedef, [parts[i][n] if i in parts else x for i, x in enumerate(leaves)])
            outs.append(again(uses(params), *tile, **whole))
        return _join_tiles(dim, lengths, outs)

    return run_tiles


def tile_lengths(length: int, tiles: int) -> list[int]:
    """Returns the lengths of the tiles, with a difference of one at most.

    Example:
        >>> tile_lengths(5, 4), tile_lengths(2, 3)
        ([2, 1, 1, 1], [1, 1, 0])
    """
    each, more = divmod(length, tiles)
    return [each + (n < more) for n in range(tiles)]


class _Handle(torch.autograd.Function):
    """p -> a tensor like p in float32, without memory, at which the gradients of all uses of p are summed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.float32, device=p.device).expand(p.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return grad_outputs[0].to(ctx.dtype)


class _TileUse(torch.autograd.Function):
    """(handle, p) -> p, with the gradient sent to the handle."""

    generate_vmap_rule = True

    @staticmethod
    def forward(handle: Tensor, p: Tensor) -> Tensor:
        del handle
        return p.view_as(p)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return grad_outputs[0].float(), None


def _summed_wide(params: core.PyTree) -> tuple[list[Any], Callable[[list[Any]], core.PyTree]]:
    """Returns the leaves of `params`, and a function that makes the parameters of a tile."""
    leaves, treedef = core.tree_flatten(params)
    backward = torch.is_grad_enabled() and forward_level() < 0  # forward mode has no sum over tiles
    pairs = [(_Handle.apply(p), p.detach()) if backward and _is_narrow(p) else (None, p) for p in leaves]

    def make_uses(pairs: list[Any]) -> core.PyTree:
        return core.tree_unflatten(treedef, [p if h is None else _TileUse.apply(h, p) for h, p in pairs])

    return pairs, make_uses


def _is_narrow(p: Any) -> bool:
    if not isinstance(p, Tensor) or not p.is_floating_point() or p.dtype.itemsize >= 4:
        return False
    return p.requires_grad or transforming()


def _tiled_length(dim: int, xs: core.PyTree, cut: dict[int, Tensor]) -> int:
    paths = core.tree_paths(xs, "xs")
    lacking = [f"{paths[i]} has shape {tuple(x.shape)}" for i, x in cut.items() if x.ndim <= dim]
    core.raise_all(
        ValueError, f"tiled cuts along dim {dim}. Pass tensors that are to be whole by name, or with params:", lacking
    )
    lengths = {x.shape[dim] for x in cut.values()}
    if not cut:
        raise ValueError("tiled has no tensor to cut: f takes params, and then the tensors to cut.")
    lengths_of = [f"{paths[i]} has {x.shape[dim]} of shape {tuple(x.shape)}" for i, x in cut.items()]
    core.raise_all(
        ValueError,
        f"lengths along dim {dim}, which tiled cuts, differ. Pass tensors that are to be whole by name:",
        lengths_of if len(lengths) > 1 else [],
    )
    return lengths.pop()


def _count_square_tiles(dim: int, cut: dict[int, Tensor]) -> int:
    first = next(iter(cut.values()))
    return max(1, -(-first.shape[dim] // max(first.shape[-1], 1))) if first.ndim > dim + 1 else 1


def _join_tiles(dim: int, lengths: list[int], outs: list[Any]) -> Any:
    """Joins the results of the tiles."""
    wrong = []
    for n, out in zip(lengths, outs, strict=True):
        for path, x in core.named_leaves(out, "result"):
            fits = isinstance(x, Tensor) and (x.ndim == 0 or (x.ndim > dim and x.shape[dim] == n))
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            wrong += [] if fits else [f"{path} of a tile of {n} is {got}"]
    core.raise_all(
        ValueError, f"results of a tiled function are 0-d (and summed) or as long as its tile along {dim}:", wrong
    )
    columns = zip(*(core.tree_leaves(out) for out in outs), strict=True)
    # A sum over a stack is rounded once.
    joined = [torch.cat(c, dim) if c[0].ndim else torch.stack(c).sum(dtype=c[0].dtype) for c in columns]
    return core.tree_unflatten(core.tree_flatten(outs[0])[1], joined)
