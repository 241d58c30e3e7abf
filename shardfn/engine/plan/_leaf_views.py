"""Identifies the parameters of a function inside a step: the whole tensor and the block of each.

The loss sees the leaves of the tree that the step has met. The function of a pipeline's layer sees one row of each leaf
of the stack, so do others that are called with a part of the tree. `pick` is that part.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from shardfn.collectives import current_mesh
from shardfn.core import P, PyTree, block_slices, tree_flatten, tree_unflatten
from shardfn.leaves import LeafLayout

from ._planner import Planner


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
