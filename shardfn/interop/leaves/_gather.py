"""Leaves of a tree in sequence, whole, for a file: at most one leaf is in memory at a time.

The first rank writes, and all gather. After an error in writing, the first rank must keep gathering, or the other ranks
would wait for ever. All ranks raise the error at the end.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardfn import core
from shardfn.collectives import GlobalTensor
from shardfn.core import named_parameters
from shardfn.engine import agree_on_step, comms_of, losing_no_peer, told_before

_KEYS = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def join_keys(path: str) -> str:
    """Returns the keys of a path with dots between: the module's name where the tree is `from_module`'s.

    Example:
        >>> join_keys("['blocks'][0]['w']"), join_keys("['0.weight']")
        ('blocks.0.w', '0.weight')
    """
    return ".".join(a or b or c for a, b, c in _KEYS.findall(path))


def parameter_names(module: nn.Module) -> dict[str, list[str]]:
    """Returns a mapping from the first name to all names of a parameter."""
    firsts = {id(p): name for name, p in named_parameters(module)}
    out: dict[str, list[str]] = {name: [] for name in firsts.values()}
    for name, p in named_parameters(module, remove_duplicate=False):
        out[firsts[id(p)]].append(name)
    return out


def gather_leaf(x: Any) -> Tensor:
    """Returns the whole leaf, detached. Collective where the leaf is sharded."""
    return x.full_tensor() if isinstance(x, GlobalTensor) else x.detach()


def gather_layer(x: Any, i: int) -> Tensor:
    """Returns row `i` of a stack, whole. Collective.

    Where dim 0 is not cut, only the row crosses the mesh.
    """
    if not isinstance(x, GlobalTensor):
        return x[i].detach()
    if x.mesh.axes(x.spec.dim_axes(0)):
        return x.full_tensor()[i].clone()
    entries = [x.spec.dim_axes(d) or None for d in range(1, len(x.shape))]
    return GlobalTensor(x.local[i], torch.Size(x.shape[1:]), core.P(*entries), x.mesh).full_tensor()


def gather_own_rows(x: Any) -> Iterator[tuple[int, Tensor]]:
    """Yields the rows of a stack with their numbers, each on the first of the ranks with the row. Collective.

    Rows do not travel between ranks along dim 0: all ranks gather a local row at the same time, along the axes that cut
    the other dims. A caller must take all rows, or peers would wait: a deadlock.
    """
    if not isinstance(x, GlobalTensor):
        yield from ((i, row.detach()) for i, row in enumerate(x))
        return
    cutting = x.mesh.axes(x.spec.dim_axes(0))
    sizes = {axis: x.mesh.shape[axis] for axis in cutting}
    own = core.block_slices(tuple(x.shape), x.spec, sizes, x.mesh.coords)[0]
    # The first block is the longest.
    most = core.block_slices(tuple(x.shape), x.spec, sizes, {})[0].stop
    first = not any(at for axis, at in x.mesh.coords.items() if axis not in cutting)
    rest = core.P(*(x.spec.dim_axes(d) or None for d in range(1, len(x.shape))))
    block, shape = x.local, torch.Size(x.shape[1:])
    for i in range(own.start, own.start + most):
        # A rank without a further row gathers with peers along other axes, which have no further row either.
        here = i < own.stop
        row = block[i - own.start] if here else block.new_zeros(block.shape[1:])
        whole_row = GlobalTensor(row, shape, rest, x.mesh).full_tensor()
        if here and first:
            yield i, whole_row


def is_writer(tree_leaves: Sequence[Any]) -> bool:
    """Returns whether this rank writes: the first rank of the leaves' mesh."""
    return all(x.mesh.rank == 0 for x in tree_leaves if isinstance(x, GlobalTensor))


class Writer(Protocol):
    """Writer of files. Files get their names on leaving, or are removed after an error."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def put(self, name: Any, x: Tensor) -> None:
        """Writes a leaf."""
        ...


class WrittenByFirst:
    """Writer on the first rank, while all ranks gather. Entered and left by all ranks: collective.

    On leaving, an error is raised on the first rank, and on all other ranks a `RankError` with the message.

    Args:
        leaves: leaves of the tree that is written.
        what: words for the call.
        opened: function that makes the writer.
        then: function to call on the first rank when the files have their names.
    """

    def __init__(
        self, leaves: Sequence[Any], what: str, opened: Callable[[], Writer], then: Callable[[], object] = bool
    ) -> None:
        self._writes, self._what, self._opened, self._then = is_writer(leaves), what, opened, then
        self._failed: Exception | None = None
        self._writer: Writer | None = None
        mesh = next((x.mesh for x in leaves if isinstance(x, GlobalTensor)), None)
        # Plain tensors are not gathered, and each caller writes: no other rank need take part.
        self._comms = None if mesh is None else comms_of(mesh)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "WrittenByFirst":
        if self._comms is not None:
            self._stack.enter_context(losing_no_peer(self._comms))
        self._do_unless_failed(self._open_writer)
        return self

    def put(self, name: Any, x: Tensor) -> None:
        """Writes a leaf, on the first rank, unless an error came before."""
        if self._writer is not None:
            self._do_unless_failed(self._writer.put, name, x)

    def put_all(self, made: Callable[[], Mapping[str, Tensor]]) -> None:
        """Writes tensors made of a leaf, only on the first rank."""

        def put_leaf(writer: Writer) -> None:
            for name, x in made().items():
                writer.put(name, x)

        if self._writer is not None:
            self._do_unless_failed(put_leaf, self._writer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = error or self._failed
        if self._writer is not None and failed is not None:
            self._writer.__exit__(type(failed), failed, failed.__traceback__)
        elif self._writer is not None:
            self._do_unless_failed(self._writer.__exit__, None, None, None)
        self._stack.__exit__(kind, error, trace)
        if error is not None:
            return
        self._do_unless_failed(self._then)
        with contextlib.nullcontext() if self._comms is None else told_before(self._comms.control):
            if self._failed is not None:
                raise self._failed
        if self._comms is not None:
            agree_on_step(self._comms.control, f"{self._what}, written")

    def _open_writer(self) -> None:
        writer = self._opened()
        writer.__enter__()
        self._writer = writer

    def _do_unless_failed(self, work: Callable[..., object], *args: Any) -> None:
        if self._writes and self._failed is None:
            try:
                work(*args)
            except Exception as problem:
                self._failed = problem


class Turns:
    """Work of all ranks of a mesh, in turns. An error of a rank ends the work for all ranks, after the turn.

    Args:
        mesh: mesh of the ranks.
        what: words for the call.
    """

    def __init__(self, mesh: core.Mesh, what: str) -> None:
        self._comms, self._what = comms_of(mesh), what

    def take(self, name: str, work: Callable[[], object]) -> None:
        """Takes a turn. Collective.

        Raises:
            RankError: another rank failed in the turn.
        """
        with told_before(self._comms.control):
            work()
        agree_on_step(self._comms.control, f"{self._what}, {name}")
