"""`Manager`: the checkpoints of a run, written in the background. `Preemption`: a signal on any rank ends the run.

A save copies this rank's part to the host. A thread writes the copy while the next steps run. Ranks coordinate the save
on a separate communicator, so that no message of a step has to wait. At most one save is in progress.

`best`: the checkpoints of a run with the lowest, or the highest, value of a metric.

The manifest holds the value, so value and checkpoint appear and disappear together.

A scheduler announces a preemption by a signal (for example SIGTERM), to some processes or to all, at different times.
Ranks that left the loop at different steps would deadlock. So the handler only notes the signal. The note is part of
the agreement before each step, and after the step all ranks know the note.
"""

import contextlib
import logging
import math
import os
import signal
import threading
import time
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn import core
from shardfn.collectives import Rounds, notice_of
from shardfn.core import Mesh, as_mesh
from shardfn.engine import agree_on_step, comms_of, losing_no_peer, told_before
from shardfn.memory import host_empty, on_host
from shardfn.state import check_alive

from ._contents import Part, local_slices
from ._job import FILE_BYTES, Saved, SaveJob, SaveOptions, by_first, finish, prepare, step_of
from ._located import steps, store_of
from ._place import Store, read_manifest
from ._restore import Restored, restore


class Ranking:
    """Orders the checkpoints of a store by a metric.

    Args:
        store: the checkpoints.
        metric: name of the metric, such as "loss".
        mode: "min" or "max": the best value is the lowest, or the highest.

    Raises:
        ValueError: there is no such mode.
    """

    def __init__(self, store: Store, metric: str, mode: str) -> None:
        if mode not in ("min", "max"):
            raise ValueError(
                f"mode={mode!r}: the best value of {metric!r} is the lowest, 'min', or the highest, 'max'."
            )
        self.metric, self._store, self._sign = metric, store, 1.0 if mode == "min" else -1.0
        # The values that were read, by step; NaN where a checkpoint lacks the metric.
        self._known: dict[int, float] = {}

    def first(self, steps: Iterable[int], num: int) -> list[int]:
        """Returns the best `num` steps, from the best on.

        The earliest of equal steps comes first. Steps without a value are left out.
        """
        values = {n: self._sign * self._metric_value(n) for n in steps}
        return sorted((n for n, x in values.items() if not math.isnan(x)), key=lambda n: (values[n], n))[:num]

    def forget(self, step: int) -> None:
        """Reads the value of a step again when the checkpoint is replaced."""
        self._known.pop(step, None)

    def measured(self, metrics: Mapping[str, Any] | None, step: int, *, required: bool) -> dict[str, float]:
        """Returns the metric's value, for the manifest.

        Args:
            metrics: the caller's values by name.
            step: number of the checkpoint.
            required: whether the metric must be there.

        Raises:
            ValueError: the metric is missing. The message lists the metrics that are given.
            TypeError: the value is not a number.
        """
        if metrics is None or self.metric not in metrics:
            if not required:
                return {}
            there = [*metrics] if metrics is not None else []
            has = f"metrics= has {', '.join(map(repr, there))}" if there else "metrics= is missing or empty"
            raise ValueError(
                f"Manager(best={self.metric!r}): at step {step} {has}.{core.did_you_mean(self.metric, there)} Pass"
                f" metrics={{{self.metric!r}: value}} whenever a save is due. With now=True it may be absent."
            )
        x = metrics[self.metric]
        if wrong := core.not_scalar(x):
            raise TypeError(f"metrics[{self.metric!r}] must be a number or a 0-d tensor, but is {wrong}.")
        return {self.metric: float(x)}

    def _metric_value(self, step: int) -> float:
        if step not in self._known:
            try:
                self._known[step] = read_manifest(self._store.at(step)).metrics.get(self.metric, math.nan)
            except (OSError, ValueError):
                return math.nan  # damaged: a restore of the checkpoint raises the error
        return self._known[step]


def best(directory: str | os.PathLike[str], metric: str, mode: str = "min") -> int | None:
    """Returns the step of the checkpoint with the best value of a metric, as stored by `Manager(best=metric)`.

    Args:
        directory: a run's checkpoints.
        metric: name of the metric, such as "loss".
        mode: "min" or "max": whether the lowest or the highest value is the best.

    Returns:
        The step (the earliest step if values are equal), or None if no complete checkpoint has the metric.

    Raises:
        ValueError: there is no such mode.

    Example:
        >>> import tempfile, torch
        >>> from shardfn.checkpoint import Manager
        >>> directory = tempfile.mkdtemp()
        >>> with Manager(directory, best="loss", keep_last=1) as manager:
        ...     for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
        ...         _ = manager.save({"w": torch.ones(2)}, step, metrics={"loss": loss})
        >>> best(directory, "loss")
        1
    """
    store = store_of(directory)
    return next(iter(Ranking(store, metric, mode).first(store.steps(), 1)), None)


_LOG = logging.getLogger("shardfn.checkpoint")


class Manager:
    """Saves at regular steps, keeps the newest checkpoints, and restores the checkpoint to resume from.

    All methods except `steps` are collective over the mesh. The manager owns the directory until `close`, or the end of
    a `with`.

    Args:
        directory: directory of the run's checkpoints, as for `save`.
        mesh: mesh whose ranks save. Default: one device.
        save_every: `save` acts at multiples of this number of steps.
        keep_last: number of the newest checkpoints to keep.
        keep_every: checkpoints at multiples of this number of steps are kept in addition, for example 1000, 2000, ...
            for 1000. None: no additional checkpoints.
        best: the name of a metric of `save(metrics=)`. The checkpoints with the best values are kept in addition.
        mode: whether the best value is the lowest, "min", or the highest, "max".
        keep_best: number of the best checkpoints to keep.
        background: whether files are written while the next steps run.
        durable: whether to wait, in the background, until the disk has the files.
        file_bytes: see `save`.
        replace: whether the run replaces a longer run, for example after resuming from an older checkpoint. Existing
            steps are saved again, and newer checkpoints are removed after a complete save.

    Raises:
        ValueError: an argument is out of range.
        InUseError: another process writes checkpoints there.
        PermissionError: the directory cannot be written to.

    Example:
        >>> import tempfile
        >>> with Manager(tempfile.mkdtemp(), save_every=2, keep_last=2) as manager:
        ...     for step in range(9):
        ...         _ = manager.save({"w": torch.full((2,), float(step))}, step)
        ...     manager.restore({"w": torch.zeros(2)}).tree, manager.steps()
        ({'w': tensor([8., 8.])}, [6, 8])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        mesh: core.Mesh | None = None,
        save_every: int = 1,
        keep_last: int = 2,
        keep_every: int | None = None,
        best: str | None = None,
        mode: str = "min",
        keep_best: int = 1,
        background: bool = True,
        durable: bool = True,
        file_bytes: int = FILE_BYTES,
        replace: bool = False,
    ) -> None:
        if min(save_every, keep_last, keep_every or 1, keep_best, file_bytes) < 1:
            raise ValueError(
                f"save_every={save_every}, keep_last={keep_last}, keep_every={keep_every}, keep_best={keep_best},"
                f" file_bytes={file_bytes}: all must be at least 1."
            )
        if best is None and (mode, keep_best) != ("min", 1):
            raise ValueError(f"mode={mode!r}, keep_best={keep_best} have no effect without best=, a metric's name.")
        self._directory, self._mesh = directory, core.as_mesh(mesh)
        self._every, self._last, self._keep_every = save_every, keep_last, keep_every
        self._keep_best = keep_best
        self._background, self._options = background, SaveOptions(durable, replace, file_bytes, in_order=True)
        self._stack = contextlib.ExitStack()
        control = comms_of(self._mesh).control
        with told_before(control):
            self._store = store_of(directory)
            self._ranking = None if best is None else Ranking(self._store, best, mode)
            if self._mesh.rank == 0:
                self._stack.enter_context(self._store.owning())
        by = "" if best is None else f", the {mode} of {best!r}"
        agree_on_step(control, f"checkpoint.Manager, every {save_every} steps{by}")
        group = self._mesh.new_group(self._mesh.axis_names, backend="gloo") if self._mesh.size > 1 else None
        self._rounds = Rounds(group, self._mesh.rank, _lost_save)
        # The thread's outcome, read only after the end of the thread.
        self._thread: threading.Thread | None = None
        self._done: Saved | Exception | None = None
        # The host memory of snapshots, by part. The memory of the last snapshot is filled again.
        self._buffers: dict[Part, Tensor] = {}

    def save(
        self,
        tree: core.PyTree,
        step: int | None = None,
        *,
        user: Any = None,
        metrics: Mapping[str, Any] | None = None,
        now: bool = False,
        at: str = "",
    ) -> bool:
        """Saves a state if the step is a multiple of `save_every`.

        The call returns once the state is copied. The state may then be passed to the next step. The checkpoint is
        complete some time later.

        Args:
            tree: see `save`.
            step: number of the checkpoint. Default: the state's step.
            user: see `save`.
            metrics: values by name, such as {"loss": 2.5}. With `best=`, the named metric must be a number or a 0-d
                tensor, the same on all ranks. Other metrics are ignored. NaN is never the best.
            now: whether to save regardless of `save_every`. Between multiples the metric may be absent.
            at: see `save`.

        Returns:
            Whether the state is saved.

        Raises:
            Exception: the error of the previous save, which was still in progress, or an error of `save`.
            FileExistsError: the directory has a checkpoint of this step, or newer checkpoints, and `replace` is False.
            ValueError: leaves are on another mesh than the manager's, or the metric of `best=` is absent.
        """
        number = step_of(tree, step)
        if not now and number % self._every:
            return False
        self.wait()
        check_alive(tree)
        comms = comms_of(self._mesh)
        with told_before(comms.control):
            value = self._metric_value(metrics, number)
        job = prepare(self._store, tree, at, number, user, self._mesh, self._options, value)
        if not self._background:
            with losing_no_peer(comms):
                self._done = self._finish_write(job, None, comms.control.gather)
            self.wait()
            return True
        with losing_no_peer(comms):
            copies = self._copy_parts(job)
        light = job.without_tensors()
        self._thread = threading.Thread(
            target=core.adopting(self._start_write), args=(light, copies), name="shardfn-checkpoint"
        )
        self._thread.start()
        return True

    def wait(self) -> Saved | None:
        """Waits for the save in progress.

        Returns:
            The saved checkpoint, or None if no save was in progress.

        Raises:
            Exception: the error of the save, on this rank or another rank. An error is raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        done, self._done = self._done, None
        if isinstance(done, Exception):
            raise done
        return done

    def restore(self, like: core.PyTree, **options: Any) -> Restored:
        """Returns the newest checkpoint, or another checkpoint. See `checkpoint.restore`."""
        self.wait()
        return restore(self._directory, like, **options)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in order."""
        return self._store.steps()

    def best(self) -> int | None:
        """Returns the step of the checkpoint with the best value of the metric, or None if no checkpoint has a value.

        The call waits for the save in progress, so that all ranks have the same answer.

        Raises:
            ValueError: the manager has no `best=`.
            Exception: the error of the save.
        """
        if self._ranking is None:
            raise ValueError("Manager.best() needs Manager(best=), the name of a metric.")
        self.wait()
        return next(iter(self._ranking.first(self.steps(), 1)), None)

    def close(self) -> None:
        """Waits for a save in progress, and releases the directory.

        Raises:
            Exception: the error of the save.
        """
        try:
            self.wait()
        finally:
            self._stack.close()
            self._rounds.close()

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return self.close()
        try:
            self.close()
        except Exception:  # the error of the body must not be hidden
            _LOG.exception("%s: the last checkpoint was not written", self._store)

    def _metric_value(self, metrics: Mapping[str, Any] | None, step: int) -> dict[str, float]:
        """Returns the value by which the checkpoint of a step is compared."""
        if self._ranking is None:
            if metrics is not None:
                raise ValueError("Manager.save(metrics=) has no effect without Manager(best=), the name of a metric.")
            return {}
        self._ranking.forget(step)
        return self._ranking.measured(metrics, step, required=step % self._every == 0)

    def _start_write(self, job: SaveJob, copies: dict[Part, Tensor]) -> None:
        try:
            self._done = self._finish_write(job, copies, self._rounds.gather)
        except Exception as error:
            self._done = error

    def _finish_write(self, job: SaveJob, copies: dict[Part, Tensor] | None, meet: Any) -> Saved | Exception:
        done = finish(job, copies, meet)
        if isinstance(done, Exception):
            return done
        return by_first(self._mesh, self._store, meet, self._remove_old, job.step) or done

    def _remove_old(self, newest: int) -> None:
        """Removes checkpoints that are not kept. Steps above `newest` are of a replaced run."""
        found = self._store.steps()
        own = [n for n in found if n <= newest]
        best = [] if self._ranking is None else self._ranking.first(own, self._keep_best)
        left = to_remove(own, self._last, self._keep_every, best)
        for number in [*(n for n in found if n > newest and self._options.replace), *left]:
            self._store.remove(number)

    def _copy_parts(self, job: SaveJob) -> dict[Part, Tensor]:
        """Copies this rank's parts in memory. Blocks on disk never change, so no copy is made."""
        out: dict[Part, Tensor] = {}
        with torch.no_grad(), on_host():
            for part in (p for plan in job.files(job.mesh.rank) for p in plan.parts):
                leaf = job.leaves[part.leaf]
                if isinstance(leaf.held, Tensor):
                    x = leaf.held.detach()[local_slices(leaf, part.box)]
                    had = self._buffers.get(part)
                    fits = had is not None and had.shape == x.shape and had.dtype == x.dtype
                    out[part] = had if fits and had is not None else host_empty(x.shape, x.dtype)
                    out[part].copy_(x)
        self._buffers = out
        return out


def to_remove(found: Sequence[int], keep_last: int, keep_every: int | None, best: Collection[int] = ()) -> list[int]:
    """Returns the checkpoints to remove: not among the last, not at a multiple, and not among the best.

    Example:
        >>> to_remove([10, 20, 30, 40, 50], keep_last=2, keep_every=20)
        [10, 30]
    """
    old = sorted(found)[:-keep_last]
    return [n for n in old if n not in best and (keep_every is None or n % keep_every)]


def latest(directory: str | os.PathLike[str]) -> int | None:
    """Returns the step of the newest complete checkpoint of a directory, or None without a complete checkpoint.

    Example:
        >>> import tempfile
        >>> latest(tempfile.mkdtemp()) is None
        True
    """
    found = steps(directory)
    return found[-1] if found else None


def _lost_save(error: BaseException) -> core.RankError:
    return core.RankError(
        f"another rank failed while a checkpoint was written ({type(error).__name__}). It has no name, so it does not"
        " count; those before it do."
    )


# EX_TEMPFAIL of sysexits.h: the job is to be started again. Launchers take 0 for a job that is done.
_TRY_AGAIN: Mapping[signal.Signals, int] = types.MappingProxyType({signal.SIGTERM: 75})


class Preemption:
    """Notices signals while its block runs, and has all ranks stop after the same step.

    No additional message is sent: the note is part of the agreement before each step (eager, captured, or a call of a
    `sharded` function). After the same steps all ranks have the same value.

    A second signal ends the process immediately, as without this block. Signals within `patience` seconds of the first
    count as one, since launchers forward a signal that the whole process group has already received.

    Args:
        mesh: mesh whose ranks stop together. Default: one device.
        signals: the signals to handle, each with the exit code for it. Launchers take 0 for a job that is done. If
            ranks receive different signals, the greatest code counts.
        patience: seconds in which further signals count as the first signal.

    Raises:
        ValueError: not in the main thread, which Python's handlers need, or an exit code outside 0 to 255.

    Example:
        >>> with Preemption() as preemption:
        ...     for step in range(10):
        ...         if step == 3:
        ...             signal.raise_signal(signal.SIGTERM)
        ...         preemption.meet()  # a step of `sharded_step` does
        ...         if preemption.stopping:
        ...             break
        >>> step, preemption.exit_code
        (3, 75)
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        signals: Mapping[signal.Signals, int] = _TRY_AGAIN,
        patience: float = 5.0,
    ) -> None:
        for number, code in signals.items():
            if not 0 <= code <= 255:
                raise ValueError(f"signals[{number.name}]={code}: a process ends with a number from 0 to 255.")
        self._mesh, self._signals, self._patience = as_mesh(mesh), dict(signals), patience
        self._pid, self._notice = os.getpid(), notice_of(self._mesh)
        self._since: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def stopping(self) -> bool:
        """Returns whether ranks stop now. The result is equal on all ranks that have run the same steps."""
        return self._notice.told > 0

    @property
    def exit_code(self) -> int:
        """Returns the exit code for the process: 0 until ranks stop, then the code of the signal."""
        return max(self._notice.told - 1, 0)

    def stop(self, exit_code: int = 0) -> None:
        """Requests from this rank that all ranks stop, as a signal does, for example when the time is up."""
        self._notice.mine = max(self._notice.mine, exit_code + 1)

    def meet(self) -> None:
        """Exchanges the notes by a separate message, for loops without agreements before steps. Collective."""
        comms_of(self._mesh).control.exchange(0)

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("Preemption handles signals, which Python allows in the main thread only. Enter it there.")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None is a handler that was not set from Python, and that Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle_signal(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        forked = os.getpid() != self._pid  # a loader's worker has inherited the handler, and is to end
        if forked or (self._since is not None and time.monotonic() - self._since > self._patience):
            signal.signal(number, self._before.get(signal.Signals(number)) or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._since = time.monotonic() if self._since is None else self._since
        self.stop(self._signals[signal.Signals(number)])
