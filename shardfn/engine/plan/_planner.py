"""`Planner`: makes the plan of each parameter tree from a step's annotations."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor, current_mesh, list_blocks, list_sharded
from shardfn.core import (
    GROUP,
    GROUP_BYTES,
    Dtypes,
    MemoryKind,
    Mesh,
    P,
    Placement,
    Policy,
    PyTree,
    Quantization,
    Sharding,
    Zero,
    are_tensors,
    block_slices,
    broadcast_prefix,
    chunk_bounds,
    find_directory_problem,
    is_device,
    is_frozen,
    is_in_memory,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.loss import Masks, check_travel, is_spec
from shardfn.leaves import (
    LeafLayout,
    leaf_layout,
    stacked_layout,
    with_ratio,
)
from shardfn.state import TrainState, check_passed

from ._chunks import Chunks
from ._plan import Plan


class Words(NamedTuple):
    """The words of errors about parameters that do not fit a plan: no leaves, other cuts or memories, other dtypes."""

    no_tensors: str
    shardings: str
    policy: str


OF_A_STATE = Words(
    "the state's params are not GlobalTensors; make the state with step.init:",
    "the state was made by a step with other shardings:",
    "the state was made under another policy:",
)
MOVE_THEM = "bring them there first, sf.reshard(tree, to, mesh=...)"


class Planner:
    """Makes a `Plan` for each parameter tree, from the annotations of a step.

    Args:
        mesh: the mesh.
        specs: prefix tree of compute specs.
        batch: prefix tree of the batch's specs.
        zero: the ZeRO rule.
        trainable: prefix tree of bools, or the `Masks` of several losses. None: all but frozen leaves. policy:
            precision policy. None: leaves keep their dtypes. stage_axes: axis of a pipeline, along which ranks have
            different layers of stacked leaves. `()` without one.
    """

    def __init__(
        self,
        mesh: Mesh,
        specs: PyTree,
        batch: PyTree,
        zero: Zero,
        trainable: PyTree,
        policy: Policy | None = None,
        stage_axes: tuple[str, ...] = (),
    ) -> None:
        self.mesh, self.batch, self.zero, self.policy, self._stage_axes = mesh, batch, zero, policy, stage_axes
        self._specs, self.trainable = specs, trainable
        used = {a for spec in tree_leaves(batch, is_leaf=is_spec) for a in mesh.axes(spec.axes)}
        self.batch_axes = tuple(a for a in mesh.axis_names if a in used)
        self._plans: dict[Any, Plan] = {}
        # The last result of `kept`, which is nearly always the next result, too.
        self._last: Plan | None = None

    @property
    def num_chunks(self) -> int:
        """Returns the number of chunks of the batch that each rank runs in a step: 1 without canonical sums."""
        zero = self.zero
        return Chunks.of(zero.reduction_chunks, self.mesh, self.batch_axes).most if zero.is_canonical else 1

    def plan(self, treedef: Any, like: list[Any]) -> Plan:
        """Returns the plan for leaves of these shapes and dtypes.

        Raises:
            ValueError: specs do not fit. Every leaf is listed.
        """
        shapes, dtypes = tuple(torch.Size(x.shape) for x in like), tuple(x.dtype for x in like)
        key = treedef, shapes, dtypes, tuple(map(is_frozen, like))
        if key not in self._plans:
            self._plans[key] = self._make_plan(*key)
        return self._plans[key]

    @property
    def plans(self) -> list[Plan]:
        """Returns the plans that were made."""
        return list(self._plans.values())

    def plan_of(self, state: TrainState) -> Plan:
        """Returns the plan of a state.

        Raises:
            TypeError: the state does not consist of global tensors.
            ValueError: the state was made under other annotations. Every leaf is listed.
        """
        check_passed(state)
        return self.kept(state.params, OF_A_STATE)

    def kept(self, params: PyTree, words: "Words") -> Plan:
        """Returns the plan of params between two steps.

        Raises:
            TypeError: the params are not global tensors.
            ValueError: the params were made under other annotations. Every leaf is listed.
        """
        leaves, treedef = tree_flatten(params)
        if self._last is not None and treedef == self._last.treedef and _is_made_by(self._last, leaves):
            return self._last
        wrong = [i for i, x in enumerate(leaves) if not isinstance(x, GlobalTensor)]
        if wrong:
            paths = tree_paths(params, "params")
            listed = [f"{paths[i]} is a {type(leaves[i]).__name__}" for i in wrong]
            raise_all(TypeError, words.no_tensors, listed)
        elsewhere = [i for i, x in enumerate(leaves) if not x.mesh.is_like(self.mesh)]
        if elsewhere:
            paths = tree_paths(params, "params")
            listed = [f"{paths[i]} is on {leaves[i].mesh!r}" for i in elsewhere]
            raise_all(ValueError, f"leaves are on another mesh than {self.mesh!r}; {MOVE_THEM}:", listed)
        plan = self.plan(treedef, leaves)
        pairs = zip(plan.leaves, leaves, strict=True)
        raise_all(
            ValueError,
            words.shardings,
            [
                f"{leaf.path} is kept as {_describe_leaf(x)}; here it is {_describe_leaf(leaf.ways.kept)}"
                for leaf, x in pairs
                if x.spec != leaf.param
                or not is_in_memory(x.memory_kind, leaf.home)
                or x.quantization != leaf.places.quantization
            ],
        )
        raise_all(
            ValueError,
            words.policy,
            [
                f"{leaf.path} is {x.dtype}; here it is kept in {leaf.dtypes.param}"
                for leaf, x in zip(plan.leaves, leaves, strict=True)
                if x.dtype != leaf.dtypes.param
            ],
        )
        self._last = plan
        return plan

    def rows(self, num: int) -> slice:
        """Returns the rows of a global batch of `num` rows that this rank passes, if only dim 0 of the batch is cut.

        Raises:
            ValueError: with canonical sums, the chunks do not divide `num`.
        """
        axes, zero = self.batch_axes, self.zero
        if not zero.is_canonical:
            return slice(*chunk_bounds(num, self.mesh.axis_size(axes), self.mesh.axis_index(axes)))
        if num % zero.reduction_chunks:
            raise ValueError(f"rows({num}): {zero.reduction_chunks} chunks do not divide {num} rows.")
        start, stop = Chunks.of(zero.reduction_chunks, self.mesh, axes).bounds
        rows = num // zero.reduction_chunks
        return slice(start * rows, stop * rows)

    def _make_plan(
        self, treedef: Any, shapes: tuple[torch.Size, ...], dtypes: tuple[Any, ...], frozen: tuple[bool, ...]
    ) -> Plan:
        tree = tree_unflatten(treedef, list(range(len(shapes))))
        paths = tree_paths(tree, "params")
        specs = broadcast_prefix(self._specs, tree, is_spec, names=("specs", "params"))
        train = [not f for f in frozen]
        if isinstance(self.trainable, Masks):
            train = self.trainable.of(tree, frozen, paths)
        elif self.trainable is not None:
            train = broadcast_prefix(self.trainable, tree, lambda x: isinstance(x, bool), names=("trainable", "params"))
        computes = [s.spec if isinstance(s, Sharding) else s for s in specs]
        # "device" is a Sharding's default, so it leaves the choice to the rule.
        kinds = [s.memory_kind if isinstance(s, Sharding) else Sharding.memory_kind for s in specs]
        homes = [None if is_device(kind) else kind for kind in kinds]
        quantization: list[Quantization | None] = [s.quantization if isinstance(s, Sharding) else None for s in specs]
        stacked = [isinstance(s, Sharding) and s.stacked for s in specs]
        rows = list(zip(paths, shapes, dtypes, computes, train, homes, strict=True))
        raise_all(
            ValueError,
            "specs have more entries than their leaf has dims:",
            [f"{p} of shape {tuple(s)} has spec {c!r}; drop entries" for p, s, _, c, *_ in rows if len(c) > len(s)],
        )
        raise_all(
            ValueError,
            "complex parameters have no gradients here; close over them, or mark them trainable=False:",
            [p for p, _, d, _, t, _ in rows if t and d.is_complex],
        )
        if self.policy is not None:
            self.policy.check([p for p, _, d, *_ in rows if d.is_floating_point])
        raise_all(
            ValueError,
            "stacked leaves have a leading dim of layers, which the stages of a pipeline alone cut:",
            [x for (p, s, _, c, *_), k in zip(rows, stacked, strict=True) if k for x in self._not_stacked(p, s, c)],
        )
        coded = zip(rows, quantization, stacked, strict=True)
        raise_all(
            ValueError,
            "quantized leaves:",
            [
                why
                for (p, s, d, c, t, h), q, k in coded
                if q is not None
                for why in self._not_coded(p, s, d, c, t, h, q, k)
            ],
        )
        leaves = [
            (stacked_layout if k else leaf_layout)(
                p,
                s,
                Dtypes.plain(d) if self.policy is None else self.policy.dtypes(p, d),
                c,
                zero=self.zero,
                mesh=self.mesh,
                batch_axes=self.batch_axes,
                trainable=t and d.is_floating_point,
                home=h,
                quantization=q,
            )
            for (p, s, d, c, t, h), q, k in zip(rows, quantization, stacked, strict=True)
        ]
        leaves = [dataclasses.replace(x, frozen=True) if f else x for x, f in zip(leaves, frozen, strict=True)]
        leaves = with_ratio(leaves, self.zero.optimizer_fraction)
        _check_disk(leaves, self.zero)
        check_travel(leaves, self.zero, self.mesh)
        bucket = self.zero.travel.bucket_bytes
        return Plan(leaves, treedef, self.zero, self.mesh, self.batch_axes, self.batch, self._stage_axes, bucket)

    def _not_stacked(self, path: str, shape: torch.Size, compute: P) -> Iterator[str]:
        """Yields the reasons why a leaf cannot be stacked, empty if it can."""
        if not shape or not shape[0]:
            yield f"{path} of shape {tuple(shape)} has no layers; leave out stacked=True"
            return
        apart = self.mesh.axes(compute.dim_axes(0))
        shared = [a for a in apart if a in self.batch_axes or a in self.mesh.axes(self.zero.axis)]
        if compute.dim_axes(0) and (shared or compute.dim_axes(0) != self._stage_axes):
            entries = (None, *compute.entries[1:])
            yield f"{path} of shape {tuple(shape)} has spec {compute!r}; use Sharding({P(*entries)!r}, stacked=True)"
        num = self.mesh.axis_size(apart)
        if chunk_bounds(shape[0], num, num - 1)[0] >= shape[0]:
            yield (
                f"{path} of shape {tuple(shape)} with spec {compute!r} leaves no layer to the last of {num} ranks;"
                " leave out stacked=True, or use a number of layers that leaves it one"
            )

    def _not_coded(
        self,
        path: str,
        shape: torch.Size,
        dtype: torch.dtype,
        compute: P,
        trained: bool,
        home: MemoryKind | None,
        quantization: str,
        stacked: bool,
    ) -> Iterator[str]:
        """Yields the reasons why a leaf cannot be kept in codes, empty if it can."""
        named = f"{path} of shape {tuple(shape)}"
        if quantization not in GROUP_BYTES:
            yield f"{named} quantization must be one of {(*GROUP_BYTES,)}, got {quantization!r}"
        if not dtype.is_floating_point:
            yield f"{named} is {dtype}, which is not rounded; remove quantization={quantization!r}"
        elif trained:
            yield (
                f"{named} is trained, and quantization={quantization!r} would round each update away; freeze it"
                " (trainable=) and train an adapter next to it (sf.lora), or remove quantization"
            )
        if len(shape) < 1 + stacked or not shape.numel():
            yield f"{named} has no rows of elements that share scales; remove quantization={quantization!r}"
            return
        num = self.mesh.axis_size(compute.dim_axes(len(shape) - 1))
        if num > 1 and shape[-1] % (num * GROUP):
            yield (
                f"{named} has spec {compute!r}, whose {num} ranks do not cut its last dim of {shape[-1]} between groups"
                f" of {GROUP} that share a scale; cut another dim, or remove quantization={quantization!r}"
            )
        if "disk" in (home, self.zero.params):
            yield f"{named} would be on disk; quantization={quantization!r} is kept on the device or on the host"


def _describe_leaf(x: GlobalTensor | Placement) -> str:
    return f"{x.spec!r} at {x.memory_kind!r}{'' if x.quantization is None else f' quantized as {x.quantization}'}"


def _is_made_by(plan: Plan, leaves: list[Any]) -> bool:
    """Returns whether leaves are as steps of this plan make them: a quick check, in place of comparing everything."""
    if len(list_sharded(leaves)) < len(leaves) or [*map(_LEAF_LAYOUT, leaves)] != plan.leaf_layouts:
        return False
    blocks = list_blocks(leaves)
    if [*map(_DTYPE, blocks)] != plan.leaf_dtypes:
        return False
    if are_tensors(blocks):
        return not plan.has_codes
    return all(x.quantization == leaf.places.quantization for x, leaf in zip(leaves, plan.leaves, strict=True))


# For all leaves at once, in C, without a bytecode for each.
_LEAF_LAYOUT = operator.attrgetter("spec", "mesh", "shape", "frozen", "memory_kind")
_DTYPE = operator.attrgetter("dtype")


def _check_disk(leaves: list[LeafLayout], zero: Zero) -> None:
    kinds = {kind for leaf in leaves for kind in leaf.places.memories}
    if find_directory_problem(kinds, zero.disk) == "idle":
        raise ValueError(f"Zero(disk={zero.disk!r}) has no effect: nothing is kept on disk.")


@dataclasses.dataclass(frozen=True)
class LeafView:
    """A tensor that a function is called with.

    Attributes:
        shape: shape of the whole.
        spec: how the whole is cut.
        block: the shape of this rank's block.
    """

    shape: tuple[int, ...]
    spec: P
    block: tuple[int, ...]

    @staticmethod
    def of(leaf: LeafLayout) -> "LeafView":
        """Returns a leaf, as a loss sees it."""
        # The layers of a stacked leaf travel one by one, so its block is made of theirs.
        block = (len(leaf.layers), *leaf.layers[0].block) if leaf.layers else leaf.block
        return LeafView(tuple(leaf.shape), leaf.compute, tuple(block))

    def along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Returns the shape of the block that is whole along some axes, and cut along all others.

        Raises:
            ValueError: a dim is cut along another axis, too, after one of these.
        """
        mesh = current_mesh()
        for d in range(len(self.spec)):
            names = mesh.axes(self.spec.dim_axes(d))
            inner = names[next((i for i, name in enumerate(names) if name in axes), len(names)) :]
            if not set(inner) <= set(axes):
                raise ValueError(
                    f"partition(axes={axes[0]!r}): a leaf of shape {self.shape} has spec {self.spec!r}, which cuts dim"
                    f" {d} along several axes. Cut it along {axes[0]!r} alone, or name them all, axes={names!r}."
                )
        left = P(*(tuple(a for a in self.spec.dim_axes(d) if a not in axes) for d in range(len(self.spec))))
        cuts = block_slices(self.shape, left, mesh.shape, mesh.coords)
        return tuple(cut.stop - cut.start for cut in cuts)

    def row(self) -> "LeafView":
        """One row along dim 0."""
        return LeafView(self.shape[1:], P(*self.spec.entries[1:]), self.block[1:])


# From the tree of `LeafView`s of a step's parameters to the trees that a function may be called with.
Pick = Callable[[PyTree], Sequence[PyTree]]


def every_leaf(tree: PyTree) -> Sequence[PyTree]:
    """Returns the leaves that a loss is called with: all of the tree."""
    return [tree]


@dataclasses.dataclass(frozen=True)
class LeafViews:
    """The trees of leaves that a function may be called with, of each tree that a step has met.

    Attributes:
        planner: planner of the step.
        pick: which trees these are.
    """

    planner: Planner
    pick: Pick = every_leaf
    _found: dict[Any, Sequence[LeafView]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def seen_as(self, treedef: Any, blocks: Sequence[Tensor]) -> Sequence[LeafView]:
        """Returns the leaves that the tensors of a call are blocks of.

        Args:
            treedef: the structure of the first argument.
            blocks: leaves.

        Raises:
            ValueError: no tree has these blocks on this rank, or several have, of other shapes or specs.
        """
        shapes, plans = tuple(tuple(x.shape) for x in blocks), self.planner.plans
        key = treedef, shapes, len(plans)  # a plan that is new may be as good
        if key not in self._found:
            found = {
                views
                for known, views in self._build_trees()
                if known == treedef and tuple(view.block for view in views) == shapes
            }
            if len(found) != 1:
                what = "several trees that this step has met have" if found else "no tree that this step has met has"
                raise ValueError(
                    f"partition or pipeline: {what} blocks of shapes {list(shapes)}. Make a step for each tree."
                )
            self._found[key] = found.pop()
        return self._found[key]

    def _build_trees(self) -> Iterator[tuple[Any, tuple[LeafView, ...]]]:
        for plan in self.planner.plans:
            for tree in self.pick(tree_unflatten(plan.treedef, [LeafView.of(leaf) for leaf in plan.leaves])):
                views, treedef = tree_flatten(tree)
                yield treedef, tuple(views)
