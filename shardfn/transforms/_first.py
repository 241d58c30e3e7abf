"""The first state of a step: leaf by leaf where leaves are not kept on the device, each sent home at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfn.core import (
    PyTree,
    Stored,
    raise_all,
    tree_entries,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.optim import GradientTransformation

from ._parts import send_home
from ._plan import Plan
from ._pools import pool_of
from ._state import state_owners
from ._update import init_optimizer, kept, own_rows, rule_of, wrap, wrap_state


def first_state(plan: Plan, optimizer: GradientTransformation, draw: Callable[[int], Tensor]) -> tuple[PyTree, PyTree]:
    """Parameters and optimizer state; of what is not at home in memory, only one leaf is there at a time.

    Args:
        plan: the layout.
        optimizer: the rule; its `init` must treat each leaf for itself.
        draw: gives this rank's block of a leaf, on the device, in the dtype that the optimizer updates.

    Raises:
        ValueError: the optimizer's state for a leaf depends on other leaves.
    """
    if all(leaf.at_home for leaf in plan.leaves):
        with torch.no_grad():
            here = [draw(i) for i in range(len(plan.leaves))]
        return wrap(plan, kept(plan, here)), init_optimizer(plan, optimizer, here)
    first, pool = _FirstState(plan, optimizer), pool_of(plan)
    blocks: list[Tensor | Stored] = []
    with torch.no_grad():
        for i, leaf in enumerate(plan.leaves):
            block = draw(i)
            if leaf.trainable:
                first.add(i, own_rows(plan, leaf, block))
            blocks.append(send_home(block.to(leaf.dtypes.param), leaf.home, pool))
    return wrap(plan, blocks), first.state()


class _FirstState:
    """An optimizer's first state, put together from those of single leaves."""

    def __init__(self, plan: Plan, optimizer: GradientTransformation) -> None:
        self._plan, self._optimizer, self._pool = plan, rule_of(plan, optimizer), pool_of(plan)
        self._train = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
        with FakeTensorMode(allow_non_fake_inputs=True):
            rows = [_no_rows(plan, i) if leaf.trainable else None for i, leaf in enumerate(plan.leaves)]
            self._like = self._optimizer.init(tree_unflatten(plan.treedef, rows))
        self._owners = state_owners(self._like, tree_unflatten(plan.treedef, rows), self._optimizer)
        self._entries = tree_entries(self._like)
        none = tree_unflatten(plan.treedef, [None] * len(plan.leaves))
        self._found: dict[Any, Tensor | Stored] = self._named(self._optimizer.init(none))

    def add(self, leaf: int, rows: Tensor) -> None:
        """Makes the state of one leaf and sends it home."""
        only: list[Tensor | None] = [None] * len(self._plan.leaves)
        only[leaf] = rows
        found = self._named(self._optimizer.init(tree_unflatten(self._plan.treedef, only)))
        home = self._plan.leaves[leaf].state_home
        storage = rows.untyped_storage()._cdata
        for entry, owner in zip(self._entries, self._owners, strict=True):
            if owner is not None and self._train[owner] == leaf and entry in found:
                # A state may start as the parameters themselves; it gets memory of its own.
                x = found[entry]
                own = x.clone() if home == "device" and x.untyped_storage()._cdata == storage else x
                self._found[entry] = send_home(own, home, self._pool)

    def state(self) -> PyTree:
        """The whole state.

        Raises:
            ValueError: leaves of it appear only where the rule sees several parameters.
        """
        paths = tree_paths(self._like, "opt_state")
        lost = [path for path, entry in zip(paths, self._entries, strict=True) if entry not in self._found]
        raise_all(
            ValueError, "an optimizer whose state is kept on host or disk is initialised leaf by leaf; missing:", lost
        )
        leaves = [None if k is None else self._plan.leaves[self._train[k]] for k in self._owners]
        out = [wrap_state(self._plan, self._found[e], x) for e, x in zip(self._entries, leaves, strict=True)]
        return tree_unflatten(tree_flatten(self._like)[1], out)

    def _named(self, tree: PyTree) -> dict[Any, Any]:
        return dict(zip(tree_entries(tree), tree_leaves(tree), strict=True))


def _no_rows(plan: Plan, i: int) -> Tensor:
    """Rows of a leaf as the optimizer gets them, without data."""
    leaf = plan.leaves[i]
    shape: Sequence[int] = leaf.block if leaf.dim is None else leaf.shard_shapes[plan.zero_rank(leaf)]
    return torch.empty(shape, dtype=leaf.dtypes.master, device=plan.mesh.device)
