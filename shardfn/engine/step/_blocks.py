"""`Blocks`: the memory behind the arguments of a call of a sharded function."""

import collections
from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor

from shardfn.core import PyTree, raise_all, tree_flatten, tree_leaves, tree_unflatten
from shardfn.engine.execution import REMEDY, Argument
from shardfn.state import version_of


class Blocks:
    """The memory of a call's global tensors, during it: which may be written, and which the result may keep.

    Made before the function runs; `check` and `apart` come after.
    """

    def __init__(self, params: PyTree, arguments: Sequence[Argument]) -> None:
        own = [a for a in arguments if a.spec is not None]
        held = [x.held for x in tree_leaves(params)]
        away = [a for a in own if a.moves and isinstance(a.given.held, Tensor)]
        # By the address of a storage. Those of arguments, and of the parameters, that the call may not keep in its
        # result are in `_kept`; of donated ones it may keep one tensor. All of them outlive the call, so that no
        # address is another's.
        self._donated = {memory_of(a.seen) for a in own if a.donated}
        seen = [a.seen for a in arguments if isinstance(a.seen, Tensor)]
        self._kept = {memory_of(x) for x in (*held, *seen) if isinstance(x, Tensor)}
        self._watched = [(a.path, a.seen, version_of(a.seen)) for a in own if not a.donated]
        # The memory that the call may write over: the block as it is kept, or if that is on disk, its copy.
        given = [(a.path, a.given.held if isinstance(a.given.held, Tensor) else a.seen) for a in own if a.donated]
        refuse_twice(given, [x for x in (*held, *seen, *(a.given.held for a in away)) if isinstance(x, Tensor)])

    def check(self) -> None:
        """Refuses writes to arguments that are not donated.

        Raises:
            ValueError: lists them.
        """
        written = [path for path, x, version in self._watched if version_of(x) != version]
        if written:
            raise ValueError(
                f"arguments are written to inside the function: {', '.join(written)}. {REMEDY} They have changed on"
                " this rank, and must not be used any more."
            )

    def apart(self, out: PyTree) -> PyTree:
        """Clones results that alias an argument, except the largest result per donated argument."""
        leaves, treedef = tree_flatten(out)
        return tree_unflatten(treedef, apart(leaves, self._donated, self._kept))


def apart(leaves: Sequence[Any], donated: Container[int], *kept: Container[int]) -> list[Any]:
    """Results that share no memory with an argument, except the largest result per donated memory; others are cloned.

    Args:
        leaves: the results; values that are not tensors are returned unchanged.
        donated: the donated memory, by `memory_of`.
        *kept: all memory that a result may not share otherwise, donated memory included.
    """
    largest: dict[int, Tensor] = {}
    for x in leaves:
        if isinstance(x, Tensor) and (m := memory_of(x)) in donated:
            before = largest.setdefault(m, x)
            largest[m] = x if x.numel() > before.numel() else before

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        m = memory_of(x)
        if not any(m in memory for memory in kept):
            return x
        return x if largest.get(m) is x else x.clone()

    return [own(x) for x in leaves]


def refuse_twice(donated: Sequence[tuple[str, Tensor]], passed: Sequence[Tensor]) -> None:
    """Refuses memory that is donated and passed again: another argument, or a parameter, would see the writes.

    Args:
        donated: the donated arguments, by path.
        passed: the blocks of all arguments, parameters included.

    Raises:
        ValueError: lists the donated arguments whose memory is passed again.
    """
    counts = collections.Counter(memory_of(x) for x in passed if x.numel())
    raise_all(
        ValueError,
        "donated arguments share memory with others; give each a copy of its own, or leave them out of donate=:",
        [path for path, x in donated if counts[memory_of(x)] > 1],
    )


def memory_of(x: Tensor) -> int:
    """The address of a tensor's storage, which is another's once the storage is gone."""
    return x.untyped_storage()._cdata
