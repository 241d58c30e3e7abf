"""A checkpoint of DeepSpeed's while it is written: a directory that is renamed when it is complete."""

import pathlib
import shutil
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from torch import Tensor

from ._ds_parts import StatePart


class FilesInTheMaking(ABC):
    """Files of a checkpoint that get its name only when all of them are written; an error leaves nothing behind.

    Args:
        place: the checkpoint's directory.
        newest: the file beside it that names the newest checkpoint.
    """

    def __init__(self, place: pathlib.Path, newest: str) -> None:
        self._place, self._newest = place, place.with_name(newest)
        self._making = place.with_name(place.name + ".tmp")

    def __enter__(self) -> Self:
        shutil.rmtree(self._making, ignore_errors=True)
        try:
            self._begin()
        except BaseException:
            shutil.rmtree(self._making, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
                self._making.rename(self._place)
                made = self._newest.with_name(self._newest.name + ".tmp")
                made.write_text(self._place.name)
                made.rename(self._newest)
        finally:
            # A complete checkpoint has been renamed already.
            shutil.rmtree(self._making, ignore_errors=True)

    @abstractmethod
    def put(self, name: StatePart, x: Tensor) -> None:
        """Takes a leaf: a parameter, a buffer, or a state of a parameter."""

    def _begin(self) -> None:
        """Makes the directory."""
        self._making.mkdir(parents=True)

    @abstractmethod
    def _finish(self) -> None:
        """Writes the files that need all leaves."""
