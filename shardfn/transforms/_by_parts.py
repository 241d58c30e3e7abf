"""`by_parts`: splits a leaf of several matrices, so that each matrix can be cut, and joins the parts for the loss."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn import core


def by_parts(
    params: core.PyTree, parts: Mapping[str, tuple[int, int | Sequence[int]]]
) -> tuple[core.PyTree, Callable[[core.PyTree], core.PyTree]]:
    """Splits fused leaves into parts, and returns the inverse, too: `whole(by_parts(params)[0]) == params`.

    GPT-2's `c_attn` is [D, 3 D]: queries, keys and values side by side. Under P(None, "tp") a rank holds a block of the
    columns: for example only queries, or only keys. To compute with some heads a rank needs a block of each: P(None,
    None, "tp") on [D, 3, D]. The loss still sees [D, 3 D]:

        params, whole = sf.by_parts(params, {"c_attn.weight": (1, 3), "c_attn.bias": (0, 3)})
        loss = sf.partition(lambda p, x: inner(whole(p), x))

    `partition` then plans the values of the projection as cut by parts, and splitting the projection sends no messages.

    Parts of equal size stay a leaf with a further dim, and `whole` is a view. Parts of different sizes become a tuple
    of leaves, and `whole` copies the parts at each use. The copy stays in memory for the backward, at ZeRO 3 too.

    Args:
        params: tree of parameters.
        parts: mapping from a pattern to (dim, parts). `re.search` looks for the pattern in the paths of leaves. The
            parts are a number of equal parts, or a tuple with the size of each.

    Returns:
        The parameters, by parts, and the function that joins the parts.

    Raises:
        ValueError: a pattern finds no leaf, two patterns find the same leaf, or the parts do not add up to a leaf's
            dim. The message lists all.

    Example:
        >>> params = {"c_attn": torch.arange(12.0).reshape(2, 6), "qkv": torch.ones(8), "out": torch.ones(2, 2)}
        >>> split, whole = by_parts(params, {"c_attn": (1, 3), "qkv": (0, [4, 2, 2])})
        >>> split["c_attn"].shape, [tuple(x.shape) for x in split["qkv"]], whole(split)["qkv"].shape
        (torch.Size([2, 3, 2]), [(4,), (2,), (2,)], torch.Size([8]))
    """
    leaves, treedef = core.tree_flatten(params)
    paths = core.tree_paths(params, "params")
    found = {p: [path for path in paths if re.search(p, path)] for p in parts}
    core.raise_all(ValueError, "by_parts:", list(_find_problems(parts, found, dict(zip(paths, leaves, strict=True)))))
    of = {
        path: _Fused(*parts[p], leaf.ndim)
        for p in parts
        for path, leaf in zip(paths, leaves, strict=True)
        if path in found[p]
    }
    fused = [of.get(path) for path in paths]
    split = [x if f is None else f.apart(x) for f, x in zip(fused, leaves, strict=True)]

    def whole(params: core.PyTree) -> core.PyTree:
        held: list[Any] = treedef.flatten_up_to(params)
        return core.tree_unflatten(
            treedef, [x if f is None else f.join_parts(x) for f, x in zip(fused, held, strict=True)]
        )

    return core.tree_unflatten(treedef, split), whole


@dataclasses.dataclass(frozen=True)
class _Fused:
    """Division of a leaf into parts."""

    given_dim: int
    sizes: int | Sequence[int]
    ndim: int

    @property
    def dim(self) -> int:
        return self.given_dim % self.ndim

    def apart(self, x: Tensor) -> Any:
        if isinstance(self.sizes, int):
            return x.unflatten(self.dim, (self.sizes, x.shape[self.dim] // self.sizes))
        return tuple(one.clone() for one in x.split(list(self.sizes), self.dim))  # leaves share no memory

    def join_parts(self, x: Any) -> Tensor:
        return x.flatten(self.dim, self.dim + 1) if isinstance(self.sizes, int) else torch.cat(list(x), self.dim)


def _find_problems(
    parts: Mapping[str, tuple[int, int | Sequence[int]]], found: Mapping[str, Sequence[str]], leaves: Mapping[str, Any]
) -> Iterator[str]:
    seen: dict[str, str] = {}
    for pattern, (dim, sizes) in parts.items():
        if not found[pattern]:
            yield f"no leaf's path has {pattern!r}; the leaves are {', '.join(list(leaves)[:8])}, ..."
        for path in found[pattern]:
            shape = tuple(leaves[path].shape)
            if path in seen:
                yield f"{path} is found by {seen[path]!r} and by {pattern!r}. Name it once"
            seen[path] = pattern
            if not -len(shape) <= dim < len(shape):
                yield f"{path} of shape {shape} has no dim {dim}"
            elif isinstance(sizes, int) and (sizes < 1 or shape[dim] % sizes):
                yield f"{path} of shape {shape}: dim {dim} is not {sizes} equal parts; pass the size of each"
            elif not isinstance(sizes, int) and (sum(sizes) != shape[dim] or min(sizes, default=0) < 1):
                total = sum(sizes)
                yield f"{path} of shape {shape}: the parts {list(sizes)} are {total} long, dim {dim} is {shape[dim]}"
