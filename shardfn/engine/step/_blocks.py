"""`Blocks`: the memory behind the arguments of a call of a sharded function."""

import collections
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardfn.core import PyTree, raise_all, tree_leaves, tree_map
from shardfn.engine.execution import REMEDY, Argument
from shardfn.state import version_of


class Blocks:
    """The memory of a call's global tensors, during it: which may be written, and which the result may keep.

    Made before the function runs; `check` and `apart` come after.
    """

    def __init__(self, params: PyTree, arguments: Sequence[Argument]) -> None:
        own = [a for a in arguments if a.spec is not None]
        held = [x.held for x in tree_leaves(params)]
        # By the address of a storage. Those of arguments, and of the parameters, that the call may not keep in its
        # result are in `_kept`; of donated ones it may keep one tensor. All of them outlive the call, so that no
        # address is another's.
        self._donated = {_memory(a.seen) for a in own if a.donated}
        seen = [a.seen for a in arguments if isinstance(a.seen, Tensor)]
        self._kept = {_memory(x) for x in (*held, *seen) if isinstance(x, Tensor)}
        self._watched = [(a.path, a.seen, version_of(a.seen)) for a in own if not a.donated]
        _refuse_twice(own, [x for x in (*held, *seen) if isinstance(x, Tensor)])

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
        largest: dict[int, Tensor] = {}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and _memory(x) in self._donated:
                before = largest.setdefault(_memory(x), x)
                largest[_memory(x)] = x if x.numel() > before.numel() else before

        def own(x: Any) -> Any:
            if not isinstance(x, Tensor) or _memory(x) not in self._kept:
                return x
            return x if largest.get(_memory(x)) is x else x.clone()

        return tree_map(own, out)


def _refuse_twice(own: Sequence[Argument], passed: Sequence[Tensor]) -> None:
    """Refuses memory that is donated and passed again: another argument, or a parameter, would see the writes."""
    counts = collections.Counter(_memory(x) for x in passed if x.numel())
    raise_all(
        ValueError,
        "donated arguments share memory with others; give each a copy of its own, or leave them out of donate=:",
        [a.path for a in own if a.donated and counts[_memory(a.seen)] > 1],
    )


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
