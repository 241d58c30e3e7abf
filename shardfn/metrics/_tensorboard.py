"""Sink of TensorBoard's events."""

import os
import pathlib
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from ._lines import GrowingFile
from ._sinks import package

_PARTS = ("tensorboard.compat.proto.event_pb2", "tensorboard.compat.proto.summary_pb2")


class TensorBoard:
    """Writes TensorBoard's events in the logger's folder. `tensorboard --logdir` shows the events.

    Events are on disk when `Logger.write` returns. No event waits in a thread, where an error would go unseen.

    Raises:
        ModuleNotFoundError: (when a logger opens the sink) the package `tensorboard` is not installed.
    """

    def __init__(self) -> None:
        self._event: Any = None
        self._summary: Any = None
        self._crc: Any = None
        self._file: GrowingFile | None = None

    def open(self, folder: pathlib.Path, start: int) -> None:
        """Opens a new file. A new run removes the events there. A resumed run makes TensorBoard hide later events."""
        event, summary, records = package(
            "tensorboard", "TensorBoard()", *_PARTS, "tensorboard.summary.writer.record_writer"
        )
        self._event, self._summary, self._crc = event.Event, summary.Summary, records.masked_crc32c
        self._session = event.SessionLog
        if not start:  # TensorBoard would join two runs in one curve
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = GrowingFile(folder / name)
        begin = {"step": start + 1} if start else {}
        records_ = [self._event(wall_time=time.time(), file_version="brain.Event:2", **begin)]
        if start:
            again = self._session(status=self._session.START)
            records_.append(self._event(wall_time=time.time(), session_log=again, **begin))
        self._append_records(records_)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Writes an event for each metric."""
        now = time.time()
        values = [self._summary(value=[self._summary.Value(tag=name, simple_value=x)]) for name, x in row.items()]
        self._append_records([self._event(wall_time=now, step=step, summary=x) for x in values])

    def close(self) -> None:
        """Closes the file."""
        assert self._file is not None
        self._file.close()

    def _append_records(self, events: list[Any]) -> None:
        """Writes records: length, checksum of the length, bytes, checksum of the bytes."""
        assert self._file is not None
        out = []
        for data in (x.SerializeToString() for x in events):
            length = struct.pack("<Q", len(data))
            sums = (struct.pack("<I", self._crc(x)) for x in (length, data))
            out += [length, next(sums), data, next(sums)]
        self._file.append(b"".join(out))
