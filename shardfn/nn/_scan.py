"""`scan`: a loop over equal layers with parameters stacked along a leading dim."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardfn import core
from shardfn._torch import exported_scan
from shardfn.collectives import AxisTypeError, current_axis_types

# `run(carry, x, first ys) -> (carry, y)`, and the loop that carries a value through all layers by `run`.
Run = Callable[..., Any]
Loop = Callable[[Run, core.PyTree, Sequence[core.PyTree]], tuple[core.PyTree, list[core.PyTree]]]
_LOOP = core.Ambient[Loop]("loop of scans")


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]], init: core.PyTree, xs: core.PyTree = None, *, length: int | None = None
) -> tuple[core.PyTree, core.PyTree]:
    """Carries a value through `f` over the leading dim of `xs`: JAX's `lax.scan`.

        carry = init;  for i in range(L):  carry, y[i] = f(carry, xs[i]);  return carry, stack(y)

    A model of equal layers keeps each parameter stacked, [L, *shape], for example [48, 4096, 1024], and runs the layers
    by `scan`. With specs `Sharding(spec, stacked=True)` a sharded step cuts, gathers, reduces and frees such a leaf
    layer by layer. In a captured step the body is captured once, forward and backward, and written down for the other
    layers by substitution, so a capture takes only the time of a few layers. The graph equals the graph of the loop.
    Where `f` is the same code over the same objects for each microbatch, the layers of all microbatches are copies of a
    single layer.

    Args:
        f: `f(carry, x) -> (carry, y)`, a pure function: differences between layers are in `x`. In a captured step the
            Python code runs only for some layers, of some microbatches.
        init: the first carry: a tree of tensors.
        xs: tree of tensors with the same leading dim, or None with `length`.
        length: number of layers, in agreement with `xs`.

    Returns:
        The last carry, and the ys, each leaf stacked along a new dim 0.

    Raises:
        TypeError: a leaf is not a tensor, or structure, shapes or dtypes of the carry change. The message lists all
            leaves.
        AxisTypeError: `f` makes a leaf of the carry vary along an axis along which `init` is the same on all ranks, as
            in JAX. The message lists all leaves. Pass `sf.pvary` of the leaf in `init`.
        ValueError: leaves of `xs` differ in length, or there is nothing to scan over. The message lists all leaves.
        CaptureError: (in a captured step) `f` does not run the same operations for all layers.

    Example:
        >>> import torch
        >>> scan(lambda c, x: (c + x, c * x), torch.tensor(0.0), torch.arange(1.0, 5.0))
        (tensor(10.), tensor([ 0.,  2.,  9., 24.]))

    References:
        JAX, jax.lax.scan, https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html
    """
    x_leaves, x_def = core.tree_flatten(xs)
    if torch.compiler.is_exporting() and x_leaves:
        return _export_loop(f, init, xs)
    num = _num_layers(xs, x_leaves, length)
    _check_tensors("init", init)
    # unbind, not indices: the transpose of each index would make a gradient of all layers.
    columns = [x.unbind(0) for x in x_leaves]
    layers = [core.tree_unflatten(x_def, [column[i] for column in columns]) for i in range(num)]
    carry, ys = run_layers(ScanBody(f, init), init, layers)
    return carry, _stack_trees(ys)


def _export_loop(
    f: Callable[[Any, Any], tuple[Any, Any]], init: core.PyTree, xs: core.PyTree
) -> tuple[core.PyTree, core.PyTree]:
    """Returns the results of `scan` as one node of `torch.export`'s graph, so that the length may be dynamic.

    Leaves of the carry that `f` returns as they are, such as weights, are inputs of the body.
    """
    (carries, c_def), (columns, x_def) = core.tree_flatten(init), core.tree_flatten(xs)
    first, y = f(init, core.tree_map(lambda x: x[0], xs))
    kept = [new is old for new, old in zip(core.tree_leaves(first), carries, strict=True)]
    moving = [x for x, stays in zip(carries, kept, strict=True) if not stays]
    still = [x for x, stays in zip(carries, kept, strict=True) if stays]

    def join(carry: Sequence[Tensor], weights: Sequence[Tensor]) -> core.PyTree:
        each = iter(carry), iter(weights)
        return core.tree_unflatten(c_def, [next(each[stays]) for stays in kept])

    def body(*leaves: Tensor) -> list[Tensor]:
        carry, x, weights = (list(part) for part in _split(leaves, len(moving), len(columns)))
        new, y = f(join(carry, weights), core.tree_unflatten(x_def, x))
        found = [x for x, stays in zip(core.tree_leaves(new), kept, strict=True) if not stays]
        return [x.clone() for x in (*found, *core.tree_leaves(y))]  # torch refuses results that share memory

    results = exported_scan(body, [x.clone() for x in moving], [x.contiguous() for x in columns], tuple(still))
    return join(results[: len(moving)], still), core.tree_unflatten(core.tree_structure(y), results[len(moving) :])


def _split(leaves: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [leaves[a:b] for a, b in zip([0, *ends], [*ends, len(leaves)], strict=True)]


def run_layers(run: Run, carry: core.PyTree, layers: Sequence[core.PyTree]) -> tuple[core.PyTree, list[core.PyTree]]:
    """Runs the loop of a `scan` on separate layers, and returns the last carry, and the y of each layer."""
    loop = _LOOP.innermost() or plain_loop
    return loop(run, carry, layers)


def looping(loop: Loop) -> AbstractContextManager[Any]:
    """Lets `loop` run the layers of scans. A capture has a special way."""
    return _LOOP.bound(loop)


def plain_loop(run: Run, carry: core.PyTree, layers: Sequence[core.PyTree]) -> tuple[core.PyTree, list[core.PyTree]]:
    """Runs layers in order."""
    ys: list[core.PyTree] = []
    for x in layers:
        carry, y = run(carry, x, ys[:1])
        ys.append(y)
    return carry, ys


@dataclasses.dataclass(frozen=True)
class ScanBody:
    """Function `(carry, x, first ys) -> f(carry, x)`, where the carry must be like `init`, and y like the first y."""

    f: Callable[[Any, Any], tuple[Any, Any]]
    init: core.PyTree

    @functools.cached_property
    def _init_looks(self) -> object:
        return _structure_key(self.init)

    def __call__(self, carry: core.PyTree, x: core.PyTree, first: list[core.PyTree]) -> Any:
        """Runs a layer.

        Raises:
            TypeError: the carry or y differs from `init` or the first y. The message lists every leaf with both values.
            AxisTypeError: a leaf of the carry varies along an axis where all ranks held the same value before.
        """
        out = self.f(carry, x)
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"scan's f must return (carry, y), got {_shape_text(out)}. With nothing to stack return (carry, None)."
            )
        if _structure_key(out[0]) != self._init_looks:
            _check_tensors("carry", out[0])
            _check_alike("carry", out[0], "init", self.init)
        _check_axes(out[0], carry)
        if out[1] is not None or (first and first[0] is not None):
            _check_tensors("y", out[1])
            if first:
                _check_alike("y", out[1], "the first y", first[0])
        return out


def _structure_key(tree: core.PyTree) -> object:
    """Returns a key with equality exactly for trees of tensors of the same structure, shapes and dtypes."""
    if type(tree) is Tensor:
        return tree.shape, tree.dtype
    leaves, treedef = core.tree_flatten(tree)
    return treedef, *((x.shape, x.dtype) if isinstance(x, Tensor) else object() for x in leaves)


def _stack_trees(ys: list[core.PyTree]) -> core.PyTree:
    """Stacks trees of the same structure along a new dim 0."""
    columns = zip(*(core.tree_leaves(y) for y in ys), strict=True)
    return core.tree_unflatten(core.tree_structure(ys[0]), [torch.stack(column) for column in columns])


def _num_layers(xs: core.PyTree, leaves: list[Any], length: int | None) -> int:
    _check_tensors("xs", xs)
    # Paths are made only for errors, as paths take longer than small layers.
    sizes = [tuple(x.shape[:1]) for x in leaves]
    if () in sizes:
        flat = [path for path, size in zip(core.tree_paths(xs, "xs"), sizes, strict=True) if not size]
        what = [
            f"{path} must have a leading dim, got a 0-d tensor. Add a dim, or close over the tensor" for path in flat
        ]
        core.raise_all(ValueError, "scan goes along dim 0 of each leaf of xs:", what)
    lengths = {size[0] for size in sizes} | ({length} if length is not None else set())
    if not lengths:
        raise ValueError("scan needs xs or length=, to know how often to call f.")
    if len(lengths) > 1:
        differing = [f"{path} has {size[0]}" for path, size in zip(core.tree_paths(xs, "xs"), sizes, strict=True)]
        differing += [] if length is None else [f"length={length}"]
        core.raise_all(ValueError, "the lengths of a scan differ:", differing)
    (num,) = lengths
    if num < 1:
        raise ValueError(
            "a scan must have at least one layer for a y to stack, got none. Leave the y out, or give a layer."
        )
    return num


def _check_tensors(name: str, tree: core.PyTree) -> None:
    if all(isinstance(x, Tensor) for x in core.tree_leaves(tree)):
        return
    named = core.named_leaves(tree, name)
    wrong = [f"{path} must be a tensor, got {_shape_text(x)}" for path, x in named if not isinstance(x, Tensor)]
    core.raise_all(TypeError, "a scan takes and returns trees of tensors:", wrong)


def _check_alike(name: str, got: core.PyTree, like: str, want: core.PyTree) -> None:
    if core.tree_structure(got) != core.tree_structure(want):
        raise TypeError(
            f"scan's f returns a {name} of structure {core.tree_structure(got)}, but {like} has"
            f" {core.tree_structure(want)}. Return the same tree from every call."
        )
    pairs = list(zip(core.tree_leaves(got), core.tree_leaves(want), strict=True))
    if all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs):
        return
    rows = [(path, *pair) for path, pair in zip(core.tree_paths(got, name), pairs, strict=True)]
    changed = [
        f"{path} must be {_shape_text(b)}, as in {like}, got {_shape_text(a)}"
        for path, a, b in rows
        if a.shape != b.shape or a.dtype != b.dtype
    ]
    core.raise_all(
        TypeError, f"scan's f changes shapes or dtypes of the {name}, which must stay. Cast or reshape:", changed
    )


def _check_axes(got: core.PyTree, given: core.PyTree) -> None:
    """Raises for a carry that varies along more axes than the carry before.

    Raises:
        AxisTypeError: lists all leaves, with the axes and the remedy.
    """
    mode = current_axis_types(begin=False)
    if mode is None:
        return
    pairs = zip(core.tree_leaves(got), core.tree_leaves(given), strict=True)
    more = [[a for a in mode.axes_of(x) if a not in mode.axes_of(before)] for x, before in pairs]
    if not any(more):
        return
    wrong = [
        f"{path} varies along {', '.join(map(repr, axes))}{mode.origin(x)}, but in init all ranks hold the same there:"
        f" pass sf.pvary({path.replace('carry', 'init', 1)}, {(axes[0] if len(axes) == 1 else tuple(axes))!r})"
        for path, x, axes in zip(core.tree_paths(got, "carry"), core.tree_leaves(got), more, strict=True)
        if axes
    ]
    core.raise_all(AxisTypeError, "scan's f changes the axes along which the carry varies, which must stay:", wrong)


def _shape_text(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
