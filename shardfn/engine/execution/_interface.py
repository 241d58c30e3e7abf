"""The interface of a sharded function: its arguments beyond the first and its result, cut by specs or passed on."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import disable_current_modes
from shardfn.capture import fakes
from shardfn.collectives import (
    AnyControl,
    AxisTypeError,
    AxisTypeMode,
    GlobalTensor,
    current_mesh,
    psum,
    pvary,
    track_axis_types,
)
from shardfn.core import (
    DonatedError,
    Mesh,
    P,
    PyTree,
    Sharding,
    Zero,
    all_coords,
    block_slices,
    broadcast_prefix,
    named_leaves,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.loss import check_specs
from shardfn.engine.plan import MOVE_THEM, Plan
from shardfn.memory import DiskTensor
from shardfn.state import lies_on_disk

from ._arguments import Argument, Donated, check_donated, owners_of, taking_the_place_of

# For a function that writes to an argument.
REMEDY = "Name the argument in donate=, or write to a clone()."


# Finds the global shapes of blocks, from their paths, values and specs.
ShapeOf = Callable[[Sequence[tuple[str, Tensor, P]]], list[torch.Size]]


def is_entry(x: Any) -> bool:
    """Returns whether `x` is a leaf of `in_specs` or `out_specs`. None means that the value is passed on unchanged."""
    return x is None or isinstance(x, P | Sharding | Donated)


def _spec_of(entry: Any) -> P | None:
    """Returns the spec of an entry of `in_specs`, or None where the value is passed on unchanged."""
    return entry.spec if isinstance(entry, Sharding) else entry


class ResultPlaces(NamedTuple):
    """The places of the leaves of a result.

    Attributes:
        paths: names.
        specs: how each is cut, or None where it is passed on unchanged.
        owners: the donated leaf whose place it takes, if it takes one.
    """

    paths: list[str]
    specs: list[P | None]
    owners: list[Argument | None]


@dataclasses.dataclass(frozen=True)
class Interface:
    """The arguments and results of a sharded function, but for its first argument, which the layout describes.

    Attributes:
        mesh: the mesh.
        in_specs: a prefix tree of `P` for each argument beyond the first; None: it is not sharded. A `Sharding` on the
            host is for leaves that are kept there, and that the function sees there.
        out_specs: a prefix tree of `P` and `Donated` for the result. None: this rank's own value.
        donate: positions, among all arguments, of those whose memory the function may overwrite.
    """

    mesh: Mesh
    in_specs: tuple[PyTree, ...] = ()
    out_specs: PyTree = None
    donate: tuple[int, ...] = ()

    def check(self) -> None:
        """Refuses specs and donations that fit no call.

        Raises:
            ValueError: a spec names an axis that the mesh lacks, or is not a spec, or a donated argument is not
                sharded.
        """
        trees = {"in_specs": self.in_specs, "out_specs": self.out_specs}
        problems = [
            f"{path} is {x!r}; write P(...), or None for a value that is passed on unchanged"
            for path, x in named_leaves(trees, "specs", is_leaf=is_entry)
            if not is_entry(x)
        ]
        raise_all(ValueError, "the specs of arguments and results:", problems)
        problems = [
            f"{path} is {x!r}; only out_specs may name a donated argument"
            for path, x in named_leaves(self.in_specs, "in_specs", is_leaf=is_entry)
            if isinstance(x, Donated)
        ]
        problems += [
            f"{path} is {x!r}; write Sharding(spec, 'host') for a block that the function sees on the host, else a P"
            for path, x in named_leaves(self.in_specs, "in_specs", is_leaf=is_entry)
            if isinstance(x, Sharding) and x != Sharding(x.spec, "host")
        ]
        problems += [
            f"{path} is {x!r}; write a P, or Donated(k) for a result that takes the place of an argument on the host"
            for path, x in named_leaves(self.out_specs, "out_specs", is_leaf=is_entry)
            if isinstance(x, Sharding)
        ]
        raise_all(ValueError, "the specs of arguments:", problems)
        entries = tree_leaves(self.out_specs, is_leaf=is_entry)
        specs = map(_spec_of, tree_leaves(trees, is_leaf=is_entry))
        check_specs([x for x in specs if isinstance(x, P)], P(), Zero(), self.mesh)
        for k in self.donate:
            if k == 0:
                raise ValueError(
                    "donate=0: the first argument is gathered during its use, so that nothing can be written to its"
                    " memory. Pass a tree that is to be written as an argument of its own, with an entry in in_specs."
                )
            if not 0 < k <= len(self.in_specs) or self.in_specs[k - 1] is None:
                raise ValueError(
                    f"donate={k} has no effect: in_specs has no entry for args[{k}], which only a sharded argument"
                    " needs. Its first entry is for args[1]."
                )
        check_donated(entries, self.donate)

    def arguments(self, args: Sequence[Any]) -> list[Argument]:
        """Returns the leaves of the arguments beyond the first.

        Raises:
            TypeError: an argument that has a spec holds something else than global tensors.
            ValueError: one is cut or kept otherwise, or there are more specs than arguments.
            DonatedError: one was consumed before.
        """
        if len(self.in_specs) > len(args):
            raise ValueError(
                f"in_specs has {len(self.in_specs)} entries, one an argument beyond the first, but there"
                f" {'is' if len(args) == 1 else 'are'} {len(args)}."
            )
        out: list[Argument] = []
        for k, tree in enumerate(args, 1):
            spec = self.in_specs[k - 1] if k <= len(self.in_specs) else None
            specs = broadcast_prefix(spec, tree, is_entry, names=(f"in_specs[{k - 1}]", f"args[{k}]"))
            for path, x, entry in zip(tree_paths(tree, f"args[{k}]"), tree_leaves(tree), specs, strict=True):
                donated, there = k in self.donate and entry is not None, isinstance(entry, Sharding)
                out.append(Argument(path, x, _spec_of(entry), donated, k, on_host=there))
        _check_arguments(out, self.mesh)
        return out

    def abstract(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments without data.

        Sharded ones may be whole tensors, which are cut to this rank's blocks.
        """

        def without_data(x: Any, entry: P | Sharding | None) -> Any:
            spec, there = _spec_of(entry), isinstance(entry, Sharding)
            if isinstance(x, GlobalTensor):
                held = x.held if isinstance(x.held, Tensor) else torch.empty(x.held.shape, dtype=x.dtype, device="meta")
                on = "cpu" if there else self.mesh.device
                return GlobalTensor(fakes([held], on)[0], x.shape, x.spec, x.mesh, x.memory_kind)
            if not isinstance(x, Tensor):
                return x
            (whole,) = fakes([x.cpu() if there and not x.is_meta else x], "cpu" if there else self.mesh.device)
            if spec is None:
                return whole
            block = whole[block_slices(tuple(x.shape), spec, self.mesh.shape, self.mesh.coords)]
            return GlobalTensor(block.contiguous(), x.shape, spec, self.mesh, "host" if there else "device")

        out: list[Any] = []
        for k, tree in enumerate(args, 1):
            spec = self.in_specs[k - 1] if k <= len(self.in_specs) else None
            leaves, treedef = tree_flatten(tree)
            specs = broadcast_prefix(spec, tree, is_entry, names=(f"in_specs[{k - 1}]", f"args[{k}]"))
            out.append(tree_unflatten(treedef, map(without_data, leaves, specs)))
        return tuple(out)

    def places(self, out: PyTree, arguments: Sequence[Argument] = ()) -> ResultPlaces:
        """Returns the places of a result's leaves.

        Raises:
            ValueError: the specs do not fit, or a leaf does not fit the donated one whose place it takes.
        """
        entries = broadcast_prefix(self.out_specs, out, is_entry, names=("out_specs", "result"))
        paths = tree_paths(out, "result")
        owners = owners_of(entries, paths, tree_leaves(out), arguments)
        return ResultPlaces(paths, [x if a is None else a.spec for x, a in zip(entries, owners, strict=True)], owners)

    def results(
        self,
        out: PyTree,
        shape_of: ShapeOf,
        arguments: Sequence[Argument] = (),
    ) -> PyTree:
        """Returns the result, whose blocks become global tensors.

        Those that take the place of an argument have its shape. `shape_of` finds those of the others.

        Args:
            out: the result.
            shape_of: finds shapes.
            arguments: the leaves of the arguments.

        Raises:
            ValueError: specs and result do not fit.
        """
        leaves, treedef = tree_flatten(out)
        places = self.places(out, arguments)
        for i, (shape, spec) in self.cut_shapes(leaves, places, shape_of).items():
            leaves[i] = GlobalTensor(leaves[i], shape, spec, self.mesh)
        for i, a in enumerate(places.owners):
            if a is not None:
                leaves[i] = taking_the_place_of(a.given, leaves[i])
        return tree_unflatten(treedef, leaves)

    def cut_shapes(
        self, leaves: Sequence[Any], places: ResultPlaces, shape_of: ShapeOf
    ) -> dict[int, tuple[torch.Size, P]]:
        """Returns the global shape and spec of each leaf of a result that is a separate block, by index."""
        found = enumerate(zip(places.paths, leaves, places.specs, places.owners, strict=True))
        blocks = {i: (n, x, p) for i, (n, x, p, a) in found if p is not None and a is None and isinstance(x, Tensor)}
        raise_all(
            ValueError,
            "specs have more entries than their result has dims:",
            [f"{n} of shape {tuple(x.shape)} has spec {p!r}" for n, x, p in blocks.values() if len(p) > x.ndim],
        )
        shapes = shape_of([*blocks.values()])
        return {i: (shape, p) for (i, (_, _, p)), shape in zip(blocks.items(), shapes, strict=True)}

    @property
    def has_specs(self) -> bool:
        """Returns whether a result is cut, or promised to be the same on all ranks."""
        return any(x is not None for x in tree_leaves(self.out_specs, is_leaf=is_entry))

    def typed(self, out: PyTree, mode: AxisTypeMode, arguments: Sequence[Argument] = ()) -> PyTree:
        """Returns the result, whose sharded leaves vary along the axes of their specs.

        Raises:
            AxisTypeError: one varies along others. The message lists them.
        """
        leaves, treedef = tree_flatten(out)
        places = self.places(out, arguments)
        _check_varying(zip(places.paths, leaves, places.specs, strict=True), mode)
        # Blocks that are equal are blocks nevertheless.
        pairs = zip(leaves, places.specs, strict=True)
        cast = [mode.cast(x, p.axes) if isinstance(x, Tensor) and p is not None else x for x, p in pairs]
        return tree_unflatten(treedef, cast)

    def following(
        self, plan: Plan, f: Callable[..., Any], arguments: Sequence[Argument], args: tuple[Any, ...]
    ) -> Callable[[PyTree], Any]:
        """Returns the function of its first argument, whose values are followed where `out_specs` has specs."""
        mode = plan.following_function
        if not (mode.axes and self.has_specs):
            return lambda params: f(params, *args)

        def run(params: PyTree) -> Any:
            for a, x in zip(arguments, tree_leaves(args), strict=True):
                if a.spec is not None:
                    mode.declare(x.local if isinstance(x, GlobalTensor) else x, a.spec.axes)
            with track_axis_types(mode):
                return self.typed(f(params, *args), mode, arguments)

        return run

    def shapes_by(self, control: AnyControl) -> ShapeOf:
        """Finds global shapes by asking the other ranks. Collective where a result is cut.

        Raises:
            ValueError: (by the returned function, on all ranks) blocks are not the cut of a single tensor.
        """

        def shape_of(blocks: Sequence[tuple[str, Tensor, P]]) -> list[torch.Size]:
            if not any(self.mesh.axes(spec.axes) for _, _, spec in blocks):
                return [x.shape for _, x, _ in blocks]
            told: Any = control.gather([tuple(x.shape) for _, x, _ in blocks])
            # On every rank for all blocks of all ranks: so an error is the same everywhere.
            found = [
                _join_shapes(name, [row[k] for row in told], spec, self.mesh)
                for k, (name, _, spec) in enumerate(blocks)
            ]
            raise_all(
                ValueError,
                "results are not cut according to out_specs; the blocks of all ranks, in rank order:",
                [x for x in found if isinstance(x, str)],
            )
            return [x for x in found if isinstance(x, torch.Size)]

        return shape_of

    def shapes_within(self, blocks: Sequence[tuple[str, Tensor, P]]) -> list[torch.Size]:
        """Finds global shapes inside a transform or a capture: by sums outside of it."""

        def whole(x: Tensor, spec: P) -> torch.Size:
            sizes = list(x.shape)
            for dim in range(len(spec)):
                # The minor axis first: it cuts the blocks of the major one.
                for axis in reversed(self.mesh.axes(spec.dim_axes(dim))):
                    sizes[dim] = size_along(sizes[dim], axis, self.mesh)
            return torch.Size(sizes)

        return [whole(x, spec) for _, x, spec in blocks]


def size_along(size: int, axis: str, mesh: Mesh) -> int:
    """Returns the sum of a size over the ranks along an axis. The mesh must be bound."""
    with disable_current_modes():  # while a program is captured, too, sizes are numbers
        return int(psum(torch.tensor(size, device=mesh.device), axis))


def block_of(x: GlobalTensor, spec: P, path: str, name: str) -> Tensor:
    """This rank's block of a leaf that the specs `name` cut as `spec`.

    Raises:
        ValueError: it is cut otherwise.
    """
    if not x.mesh.is_like(current_mesh()):
        raise ValueError(f"{path} is on {x.mesh!r}, not on {current_mesh()!r}; {MOVE_THEM}.")
    if x.spec != spec:
        raise ValueError(_cut_otherwise(x, spec, path, name))
    return x.local


def _check_varying(results: Iterable[tuple[str, Any, P | None]], mode: AxisTypeMode) -> None:
    """Refuses results that vary along axes that their specs leave out.

    Args:
        results: path, value and spec of each.
        mode: has followed them.

    Raises:
        AxisTypeError: lists them, with the lines that made them and the remedy.
    """
    problems = []
    for path, x, spec in results:
        rest = [] if spec is None or not isinstance(x, Tensor) else [a for a in mode.axes_of(x) if a not in spec.axes]
        if rest:
            named = ", ".join(map(repr, rest))
            problems.append(
                f"{path} of shape {tuple(x.shape)} varies along {named}, and its spec {spec!r} has it the same there"
                f"{mode.origin(x)}: sum it with sf.psum(x, {named}) or take sf.pmean; if it is a block, name {named}"
                " in its spec; if it was gathered, use sf.all_gather_invariant"
            )
    raise_all(AxisTypeError, "ranks hold different values where out_specs promises one:", problems)


def entered_argument(a: Argument, plan: Plan) -> Any:
    """Returns an argument of a differentiated function, which varies along the axes of its spec.

    Without one, the batch's.
    """
    x = a.seen
    if not isinstance(x, Tensor):
        return x
    # A donated one may be written to, and a pure function does not change its arguments.
    block = x.clone() if a.donated else x.view_as(x)
    return plan.following_function.declare(block, plan.batch_axes if a.spec is None else a.spec.axes)


def entered_as_rows(a: Argument, plan: Plan) -> Any:
    """Returns an argument of a differentiated function whose values vary along the batch's axes, as those of a loss."""
    if a.spec is None or not isinstance(a.seen, Tensor):
        return a.seen
    rest = tuple(axis for axis in plan.batch_axes if axis not in a.spec.axes)
    block = pvary(a.seen, rest) if a.seen.is_floating_point() else a.seen
    return block.clone() if a.donated else block


def _check_arguments(arguments: Sequence[Argument], mesh: Mesh) -> None:
    sharded = [(a.path, a.given, a.spec) for a in arguments if a.spec is not None]
    stay = {a.path for a in arguments if not a.donated}
    there = {a.path for a in arguments if a.on_host}
    raise_all(
        TypeError,
        "in_specs declares arguments as trees of GlobalTensors; make one with sf.shard(x, spec, mesh), or write None:",
        [f"{path} is a {type(x).__name__}" for path, x, _ in sharded if not isinstance(x, GlobalTensor)],
    )
    away = {a.path for a in arguments if a.away}
    raise_all(
        DonatedError,
        "these leaves were consumed by an earlier call; use the call's result, or leave the argument out of donate=:",
        [path for path, x, _ in sharded if x.donated],
    )
    raise_all(
        ValueError,
        f"arguments are on another mesh than {mesh!r}; {MOVE_THEM}:",
        [f"{path} is on {x.mesh!r}" for path, x, _ in sharded if not x.mesh.is_like(mesh)],
    )
    raise_all(
        ValueError,
        "arguments are not kept according to in_specs:",
        [_cut_otherwise(x, spec, path, "in_specs") for path, x, spec in sharded if x.spec != spec]
        + [
            f"{path} is kept at {x.memory_kind!r}; only the first argument and those in donate= may be kept elsewhere"
            " than on the device"
            for path, x, _ in sharded
            if path in away & stay - there
        ]
        + [
            f"{path} is kept at {x.memory_kind!r}, and in_specs has it at 'host'; pass"
            f" sf.reshard(x, sf.Sharding({x.spec!r}, 'host'))"
            for path, x, _ in sharded
            if path in there and (path not in away or lies_on_disk(x))
        ]
        + [
            f"{path} is kept on disk as a {type(x.held).__name__}; make it without stacked=True"
            for path, x, _ in sharded
            if not isinstance(x.held, Tensor | DiskTensor) and path not in stay
        ],
    )


def _cut_otherwise(x: GlobalTensor, spec: P, path: str, name: str) -> str:
    return f"{path} is kept as {x.spec!r}, {name} says {spec!r}; pass x.full_tensor() or change the spec."


def _join_shapes(path: str, blocks: Sequence[Sequence[int]], spec: P, mesh: Mesh) -> torch.Size | str:
    """Returns the shape of the tensor that these blocks, one per rank, are cut from, or why there is no such tensor."""
    places = all_coords(mesh.shape)
    sizes = list(blocks[mesh.rank])
    for dim in range(len(spec)):
        axes = mesh.axes(spec.dim_axes(dim))
        sizes[dim] = sum(blocks[r][dim] for r in mesh.along(axes)) if axes else sizes[dim]
    cut = [[s.stop - s.start for s in block_slices(tuple(sizes), spec, mesh.shape, at)] for at in places]
    # The sums fit one rank's line of blocks. Others may not fit them.
    if [list(b) for b in blocks] != cut:
        return f"{path} has blocks {[*map(tuple, blocks)]}, and {spec!r} cuts {tuple(sizes)} as {[*map(tuple, cut)]}"
    return torch.Size(sizes)
