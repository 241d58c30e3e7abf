"""An update that begins before the backward ends: of leaves that need nothing but their own gradient.

It runs in a thread of its own, over leaves in the order in which their gradients are complete, so the state of the next
leaf is read while its gradient is still computed. It writes nothing that the backward reads: new values are new files,
and new host memory. So a step that fails leaves the state that it was given. The thread sends nothing to other ranks.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardfn.core import MemoryKind, Pending, Stored, StoredValue, adopting, load
from shardfn.memory import background, host_empty
from shardfn.optim import sum_squares

from ._operands import LeafRows, Update, UpdatedLeaves
from ._stream import stream_some


class OverlappedUpdate:
    """One step's update of some leaves, in a thread.

    Args:
        update: all leaves. Gradients of those that are stepped here are `Promised`.
        order: the rows of each layer, in the order in which gradients come.
        units: layers by unit: rows and the shape of their gradient.
    """

    def __init__(
        self, update: Update, order: Sequence[LeafRows], units: Mapping[int, Sequence[tuple[LeafRows, torch.Size]]]
    ) -> None:
        self.units = units
        self._update, self._order = update, order
        self._unit = {(rows.leaf, rows.lo): u for u, layers in units.items() for rows, _ in layers}
        # Written under `_change`: `_coming` (taken and not yet used), `_squares`, `_wanted` (the thread waits for a
        # gradient that has not come), `_over` and `_stopped`. Only the thread uses `_here` and `_measures`. Others may
        # read `_done` and `_error` once `_over` is set.
        self._coming: dict[int, Pending[Tensor]] = {}
        self._here: dict[tuple[int, int], Tensor] = {}
        self._squares: dict[int, Tensor] = {}
        self._measures: dict[int, Tensor] = {}
        self._change = threading.Condition()
        self._wanted = self._over = self._stopped = False
        self._error: BaseException | None = None
        self._done = UpdatedLeaves()
        self._thread: threading.Thread | None = None
        for column in update.grads:
            if column is not None and isinstance(column.held, Promised):
                column.held.ahead = weakref.proxy(self)  # in a cycle, the states would outlive the step

    def begin(self) -> None:
        """Begins to read the states that the first gradients will update."""
        self._thread = threading.Thread(target=adopting(self._run_updates), name="shardfn-update", daemon=True)
        self._thread.start()

    def take(self, unit: int, coming: Pending[Tensor], before: StoredValue | None, dtype: torch.dtype) -> Pending[None]:
        """Takes the summed gradient of a unit, on its way to the host.

        Args:
            unit: index.
            coming: last part.
            before: the sum so far, in `dtype`.
            dtype: dtype of the sum.

        Returns:
            Done when the gradient is in use. It does not wait for that while the update itself waits for gradients.
        """
        with self._change:
            # Gradients after the end are dropped: `square` and `finish` raise the error that ended it.
            if not self._over:
                self._coming[unit] = coming.then(lambda x: _add_gradient(x, before, dtype))
                self._change.notify_all()
        return Pending(lambda: self.wait(unit), lambda: self.is_used(unit))

    def square(self, unit: int) -> Tensor:
        """Returns the sum of squares, [1], of a gradient that was taken, and waits for it.

        Raises:
            Exception: the error that ended the update.
        """
        with self._change:
            self._change.wait_for(lambda: unit in self._squares or self._over)
            if unit not in self._squares:
                raise self._error or AssertionError(unit)
            return self._squares[unit]

    def finish(self) -> UpdatedLeaves:
        """Waits for the end of the update. Nothing if it never began, or was stopped.

        Raises:
            Exception: the error that ended it.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not isinstance(self._error, _Stopped):
            raise self._error
        return self._done

    def stop(self) -> None:
        """Ends an update that is of no use any more, and waits until it has ended."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def wait(self, unit: int) -> None:
        """Waits until a gradient is in use, or the update waits for another gradient."""
        with self._change:
            self._change.wait_for(lambda: self.is_used(unit) or self._wanted)

    def is_used(self, unit: int) -> bool:
        """Returns whether the update has begun to use a gradient that was taken."""
        return self._over or unit not in self._coming

    def gradient(self, leaf: int, lo: int) -> Tensor:
        """Returns the gradient of the layer at row `lo` of a leaf, and waits for it.

        In the thread of the update only.
        """
        if (leaf, lo) not in self._here:
            unit = self._unit[leaf, lo]
            flat = self._await_unit(unit).result()
            square = sum_squares([flat])
            sizes = [shape.numel() for _, shape in self.units[unit]]
            for (rows, shape), piece in zip(self.units[unit], flat.split_with_sizes(sizes), strict=True):
                self._here[rows.leaf, rows.lo] = piece = piece.view(shape)
                if (measure := self._update.optimizer.needs.measure) is not None:  # before a step overwrites it
                    self._measures[rows.leaf] = measure.of(piece)
            with self._change:
                self._squares[unit] = square
                self._change.notify_all()
        return self._here[leaf, lo]

    def drop(self, leaf: int, lo: int) -> None:
        """Lets go of a gradient."""
        del self._here[leaf, lo]

    def _await_unit(self, unit: int) -> Pending[Tensor]:
        with self._change:
            self._wanted = unit not in self._coming
            self._change.notify_all()
            self._change.wait_for(lambda: unit in self._coming or self._stopped)
            self._wanted = False
            if self._stopped:
                raise _Stopped
            coming = self._coming.pop(unit)
            self._change.notify_all()
            return coming

    def _run_updates(self) -> None:
        try:
            with torch.no_grad(), background():
                self._done = stream_some(self._update, self._order)
                self._done.measures.update(self._measures)
        except BaseException as error:  # raised again in threads that wait
            self._error = error
        finally:
            with self._change:
                self._over = True
                self._coming.clear()
                self._here.clear()
                self._change.notify_all()


class Promised:
    """The gradient of a leaf, as far as the backward has come: on the host, layer by layer of a stacked leaf. `Stored`.

    Args:
        leaf: index.
        shape: shape of this rank's rows.
        dtype: dtype of the sum.
        stacked: whether each row is a layer.
    """

    kind: MemoryKind = "host"
    quantization: tuple[int, int] | None = None

    def __init__(self, leaf: int, shape: torch.Size, dtype: torch.dtype, stacked: bool) -> None:
        self.shape, self.dtype = shape, dtype
        self.ahead: OverlappedUpdate | None = None
        self._leaf, self._stacked = leaf, stacked

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def flat(self) -> Stored:
        """Not in a single piece."""
        raise NotImplementedError

    def load(self) -> Tensor:
        """Returns the whole of it."""
        return self.read().result()

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
        """Rows `lo:hi` on the host, not copied. The last rows of a layer let go of it, so rows are read in order."""
        assert out is None
        return Pending(lambda: self._read_rows(lo, hi))

    def _read_rows(self, lo: int, hi: int | None) -> Tensor:
        ahead = self.ahead
        assert ahead is not None
        if self._stacked:
            x = ahead.gradient(self._leaf, lo)[None]
            ahead.drop(self._leaf, lo)
            return x
        x = ahead.gradient(self._leaf, 0)
        if hi is None or hi == x.shape[0]:
            ahead.drop(self._leaf, 0)
        return x if hi is None else x[lo:hi]


def _add_gradient(x: Tensor, before: StoredValue | None, dtype: torch.dtype) -> Tensor:
    """Returns the sum of a gradient on the host and `before`, in `dtype`."""
    part = x if x.dtype == dtype else host_empty(x.shape, dtype).copy_(x)
    return part if before is None else load(before).add_(part)


class _Stopped(Exception):
    """The update is of no use any more."""
