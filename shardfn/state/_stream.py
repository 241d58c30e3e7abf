"""The update of states that are not all on the device: in chunks, through the memory where the update runs.

While a part of a chunk is stepped, the next parts are read and the previous parts are written, so the update takes the
memory of three chunks, however large the state is. Values on disk are never overwritten: after a step that fails the
old parts are still there.
"""

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.capture import capturing
from shardfn.core import MemoryKind, Pending, PyTree, StoredValue, load, tree_leaves, tree_unflatten
from shardfn.memory import host_empty
from shardfn.optim import in_pieces

from ._operands import LeafRows, Update, UpdatedLeaves, UpdateOperand
from ._storage import Successor, bring_rows, common_kind, empty_block, in_memory, replace

PAGE = 4096
# How many parts of a chunk are read while one is stepped, and how many are written: three chunks together. If leaves
# that are stepped whole are larger, one is read and one is written.
AHEAD, BEHIND = 3, 2
PARTS = (AHEAD + 1 + BEHIND) // 3


def stream(update: Update, done: UpdatedLeaves) -> tuple[list[StoredValue | None], PyTree]:
    """Runs an update. The values before are consumed, but for those on disk.

    Args:
        update: operands.
        done: leaves of it that have been stepped already. Their new values in host memory go home now.

    Returns:
        For each leaf of params its new rows, None where it is frozen, and the optimizer's new state.
    """
    out = _ChunkStream(update)
    order = [LeafRows(i) for i, c in enumerate(update.params) if c is not None and i not in done.params]
    token = out.run(order, out.measures(done))
    params = [None if c is None else out.finished(c, done.params.get(i)) for i, c in enumerate(update.params)]
    state = [out.finished(c, done.state.get(k)) for k, c in enumerate(update.state)]
    return params, out.end(token, tree_unflatten(update.state_treedef, state))


def stream_some(update: Update, order: Sequence[LeafRows]) -> UpdatedLeaves:
    """Steps some leaves, whose new values are new files and new host memory; counters do not change.

    No measure is known, so the rule takes none, or measures ahead.

    Args:
        update: all leaves; gradients of those in `order` only.
        order: which rows, in this order; cut further where they can be.
    """
    out = _ChunkStream(update)
    out.run(order, None)
    leaves = list(dict.fromkeys(rows.leaf for rows in order))
    params = [(i, update.params[i]) for i in leaves]
    state = [(k, update.state[k]) for i in leaves for k in out.owned(i)]
    return UpdatedLeaves(
        {i: out.finished(c) for i, c in params if c is not None}, {k: out.finished(c) for k, c in state}
    )


class _ChunkStream:
    def __init__(self, update: Update) -> None:
        self._u = update
        like = [
            None if c is None else torch.empty(c.held.shape, dtype=c.held.dtype, device="meta") for c in update.params
        ]
        self._pieces = in_pieces(update.optimizer, tree_unflatten(update.treedef, like))
        self._owned: dict[int, list[int]] = {}
        for k, owner in enumerate(update.owners):
            if owner is not None:
                self._owned.setdefault(owner, []).append(k)
        # New values in flight, by the column's address: the update holds its columns as long as this lives.
        self._successors: dict[int, Successor] = {}
        self._places: dict[int, MemoryKind] = {}
        self._columns: dict[int, list[UpdateOperand]] = {}
        # Bytes of a part of a chunk.
        self._size = max(update.chunk // PARTS, 1)
        # Memory of the device is not kept: its allocator keeps pages.
        self.spares: dict[MemoryKind, Spare] = {"host": Spare()}

    def run(self, order: Sequence[LeafRows], measures: Sequence[Tensor] | None) -> Any:
        """Steps rows of leaves, given the measures of all; gives the optimizer's token of the step."""
        token = self._begin_chunks(measures)
        chunks = list(self._cut_chunks(order))
        coming: collections.deque[_RowChunk] = collections.deque()
        leaving: collections.deque[_RowChunk] = collections.deque()
        for k in range(len(chunks)):
            while k + len(coming) < len(chunks) and (
                len(coming) < 2 or self._fits_part(coming, chunks[k + len(coming)], AHEAD + 1)
            ):
                rows, nbytes = chunks[k + len(coming)]
                coming.append(_RowChunk(self, self._u.device, rows, nbytes))
            now = coming.popleft()
            now.step(token)
            while leaving and not self._fits_part(leaving, chunks[k], BEHIND):
                leaving.popleft().settle()
            now.leave()
            leaving.append(now)
        for chunk in leaving:
            chunk.settle()
        return token

    def _fits_part(self, held: Iterable["_RowChunk"], more: tuple[list[LeafRows], int], parts: int) -> bool:
        """Returns whether chunks and one more are no larger than `parts` parts of a chunk."""
        return sum(chunk.nbytes for chunk in held) + more[1] <= parts * self._size

    def end(self, token: Any, state: PyTree) -> PyTree:
        """Returns the state with its counters advanced."""
        return self._pieces.end(token, state)

    def owned(self, leaf: int) -> list[int]:
        """Returns the leaves of the optimizer's state that belong to a leaf of params."""
        return self._owned.get(leaf, [])

    def successor(self, column: UpdateOperand) -> Successor:
        """Returns the writer of the new value of a leaf."""
        made = self._successors.get(id(column))
        if made is None:
            made = Successor(column.held, column.home, self._u.pool, beside=column.kept)
            self._successors[id(column)] = made
        return made

    def finished(self, column: UpdateOperand, done: StoredValue | None = None) -> StoredValue:
        """Returns the new value of a leaf; `done`, in its place, if it was stepped before."""
        return self.successor(column).finish() if done is None else replace(column.held, column.home, done)

    def measures(self, done: UpdatedLeaves) -> list[Tensor]:
        """Returns the optimizer's measure of each gradient; known already for leaves that have been stepped."""
        u, measure = self._u, self._pieces.measure
        out: list[Tensor] = []
        for i, (param, grad) in enumerate(zip(u.params, u.grads, strict=True)):
            if param is None or measure is None:
                continue
            if i not in done.measures:
                assert grad is not None
                x = load(grad.held)
                done.measures[i] = measure(x if u.scale is None else x * u.scale.to(x.device), u.specs[i])
            out.append(done.measures[i].to(u.device))
        return out

    def _begin_chunks(self, measures: Sequence[Tensor] | None) -> Any:
        u = self._u
        counters = [c.held if owner is None else None for c, owner in zip(u.state, u.owners, strict=True)]
        specs = [None if c is None else s for c, s in zip(u.params, u.specs, strict=True)]
        state = tree_unflatten(u.state_treedef, counters)
        return self._pieces.begin(state, measures, specs=tree_unflatten(u.treedef, specs))

    def _cut_chunks(self, order: Sequence[LeafRows]) -> Iterator[tuple[list[LeafRows], int]]:
        """Neighbouring rows that are stepped in one memory, up to the size of a part of a chunk, and their bytes."""
        group: list[LeafRows] = []
        size = 0
        for rows, nbytes in self._cut_rows(order):
            apart = group and self.place(rows.leaf) != self.place(group[0].leaf)
            apart = apart or any(rows.leaf == other.leaf for other in group)  # a part has a leaf once
            if group and (apart or size + nbytes > self._size) and self._pieces.granularity != "tree":
                yield group, size
                group, size = [], 0
            group.append(rows)
            size += nbytes
        if group:
            yield group, size

    def _cut_rows(self, order: Sequence[LeafRows]) -> Iterator[tuple[LeafRows, int]]:
        for rows in order:
            i, column = rows.leaf, self._u.params[rows.leaf]
            assert column is not None
            shape, total = column.held.shape, self._count_bytes(i)
            if rows.hi is not None:
                yield rows, total * (rows.hi - rows.lo) // shape[0]
                continue
            if (
                self._pieces.granularity != "element"
                or not all(shape[:1] or (0,))
                or total <= self._size
                or not self._must_move(i)
            ):
                yield LeafRows(i), total
                continue
            step = max(1, shape[0] * self._size // total)
            whole = math.lcm(*(_rows_a_page(c.held) for c in self.columns(i)))
            step = step // whole * whole or step  # rows that fill pages are read and written without a copy
            for lo in range(0, shape[0], step):
                hi = min(lo + step, shape[0])
                yield LeafRows(i, lo, hi), total * (hi - lo) // shape[0]

    def _count_bytes(self, leaf: int) -> int:
        return self._u.numels[leaf] * sum(c.held.dtype.itemsize for c in self.columns(leaf))

    def _must_move(self, leaf: int) -> bool:
        """Returns whether anything of a leaf must come to where it is stepped, or go from there."""
        place = self.place(leaf)
        return any(c.home != place for c in self.columns(leaf))

    def columns(self, leaf: int) -> list[UpdateOperand]:
        """Parameter, gradient and state of a leaf, in this order."""
        if leaf not in self._columns:
            param, grad = self._u.params[leaf], self._u.grads[leaf]
            assert param is not None and grad is not None
            self._columns[leaf] = [param, grad, *(self._u.state[k] for k in self.owned(leaf))]
        return self._columns[leaf]

    def place(self, leaf: int) -> MemoryKind:
        """Returns the memory in which a leaf is stepped: the host, if its state is not on the device."""
        if leaf not in self._places:
            param, _, *state = self.columns(leaf)
            self._places[leaf] = common_kind([c.home for c in state or [param]])
        return self._places[leaf]

    def apply(self, token: Any, chunk: "list[tuple[LeafRows, list[Tensor]]]") -> None:
        """Steps a chunk in place."""
        u = self._u
        params: list[Any] = [None] * len(u.params)
        grads: list[Any] = [None] * len(u.params)
        state: list[Any] = [c.held if owner is None else None for c, owner in zip(u.state, u.owners, strict=True)]
        # Values that belong to no rows, such as factored moments, come to where the rows are stepped.
        beside = {k: x for k, x in enumerate(state) if x is not None and x.ndim}
        for k, x in beside.items():
            state[k] = x.to(chunk[0][1][0].device)
        for rows, (param, grad, *rest) in chunk:
            if u.scale is not None:
                grad.mul_(u.scale.to(grad.device))
            params[rows.leaf], grads[rows.leaf] = param, grad
            for k, x in zip(self.owned(rows.leaf), rest, strict=True):
                state[k] = x
        specs = [None if p is None else s for p, s in zip(params, u.specs, strict=True)]
        given = tree_unflatten(u.state_treedef, state)
        gs, ps, cuts = (tree_unflatten(u.treedef, x) for x in (grads, params, specs))
        new, after = self._pieces.apply(token, gs, given, ps, specs=cuts)
        _keep_buffers([*tree_leaves(ps), *tree_leaves(given)], [*tree_leaves(new), *tree_leaves(after)])
        for k, x in beside.items():
            if state[k] is not x:
                x.copy_(state[k])


def _keep_buffers(before: list[Tensor], after: list[Tensor]) -> None:
    """A rule may return other tensors than those it was given."""
    for x, y in zip(before, after, strict=True):
        if x is not y:
            x.copy_(y)


def _rows_a_page(held: StoredValue) -> int:
    """Returns the least number of rows that fill whole pages."""
    return PAGE // math.gcd(PAGE, held.shape[1:].numel() * held.dtype.itemsize)


class _RowChunk:
    """Rows on their way through the update."""

    def __init__(self, stream: _ChunkStream, device: torch.device, rows: list[LeafRows], nbytes: int) -> None:
        self.nbytes = nbytes
        self._stream, self._device, self._rows = stream, device, rows
        self._place: MemoryKind = stream.place(rows[0].leaf)
        self._spare = stream.spares.get(self._place)
        # Rows are in one of three: on their way here, here, on their way home. `_buffers` are the spare's until they
        # have left.
        self._buffers: list[Tensor] = []
        self._coming = [[self._bring_rows(r, c) for c in stream.columns(r.leaf)] for r in rows]
        self._here: list[list[Tensor]] = []
        self._going: list[Pending[Any]] = []

    def _take_buffer(self, rows: LeafRows, column: UpdateOperand) -> Tensor | None:
        """Memory of the host for rows that come from elsewhere. It goes back to the stream when they have left."""
        if self._spare is None or column.home == self._place or capturing():
            return None
        x = self._spare.take(rows.shape(column.held.shape), column.held.dtype)
        self._buffers.append(x)
        return x

    def _bring_rows(self, rows: LeafRows, column: UpdateOperand) -> Tensor | Pending[Tensor]:
        """Brings rows to where they are stepped; a view of those that are there already."""
        held = column.held
        # The memory of the new value, if the rows can be stepped there.
        into = self._stream.successor(column).rows(rows.lo, rows.hi, self._place)
        if into is not None and not (column.kept and column.read):
            return into
        into = self._take_buffer(rows, column) if into is None else into
        if column.read:
            return bring_rows(held, (rows.lo, rows.hi), (column.home, self._place), self._device, into)
        if into is not None:
            return into
        return empty_block(rows.shape(held.shape), held.dtype, self._place, self._device)

    def step(self, token: Any) -> None:
        """Waits for the rows, and steps them."""
        self._here = [[x if isinstance(x, Tensor) else x.result() for x in coming] for coming in self._coming]
        self._coming = []
        with in_memory(self._place):
            self._stream.apply(token, list(zip(self._rows, self._here, strict=True)))

    def leave(self) -> None:
        """Begins to send the new rows to where they are kept."""
        for rows, (param, _, *rest) in zip(self._rows, self._here, strict=True):
            own, _, *state = self._stream.columns(rows.leaf)
            for column, x in zip((own, *state), (param, *rest), strict=True):
                going = self._stream.successor(column).write(rows.lo, x, self._place)
                if going is not None:
                    self._going.append(going)
        self._here = []

    def settle(self) -> None:
        """Waits until they have left."""
        for going in self._going:
            going.result()
            # On an accelerator a result is there when its stream is. Its source may be written only later.
            going.wait()
        self._going = []
        # Only now: transfers wrote into these buffers, or read them, until here.
        if self._spare is not None:
            self._spare.give(self._buffers)
        self._buffers = []


class Spare:
    """Host memory that chunks hand on to one another: fresh pages cost more than the work on them."""

    def __init__(self) -> None:
        # Free buffers have no other holder: a chunk waits for all transfers from and to a buffer before it gives it
        # back.
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of that shape, of any content."""
        free = self._free.get((shape.numel(), dtype))
        return free.pop().view(shape) if free else host_empty(shape, dtype)

    def give(self, buffers: list[Tensor]) -> None:
        """Takes back buffers that are not used any more."""
        for x in buffers:
            self._free.setdefault((x.numel(), x.dtype), []).append(x)
