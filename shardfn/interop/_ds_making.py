"""A checkpoint of DeepSpeed during the writing: a directory that is renamed when complete."""

import pathlib
import shutil
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from torch import Tensor

from ._ds_parts import StatePart


def making_of(place: pathlib.Path) -> pathlib.Path:
    """Returns the directory of a checkpoint that has no name yet."""
    return place.with_name(place.name + ".tmp")


def give_name(place: pathlib.Path, newest: str) -> None:
    """Gives a complete checkpoint its name, and writes the name to the file `newest` next to the checkpoint."""
    making_of(place).rename(place)
    made = place.with_name(newest + ".tmp")
    made.write_text(place.name)
    made.rename(place.with_name(newest))


class FilesInTheMaking(ABC):
    """Files of a checkpoint that get the final name only when all are written. An error leaves nothing behind.

    Args:
        place: directory of the checkpoint.
        newest: file next to the directory with the name of the newest checkpoint.
    """

    def __init__(self, place: pathlib.Path, newest: str) -> None:
        self._place, self._newest, self._making = place, newest, making_of(place)

    def __enter__(self) -> Self:
        shutil.rmtree(self._making, ignore_errors=True)
        try:
            self._make_directory()
        except BaseException:
            shutil.rmtree(self._making, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._write_files()
                give_name(self._place, self._newest)
        finally:
            # A complete checkpoint has been renamed already.
            shutil.rmtree(self._making, ignore_errors=True)

    @abstractmethod
    def put(self, name: StatePart, x: Tensor) -> None:
        """Takes a leaf: a parameter, a buffer, or a state of a parameter."""

    def _make_directory(self) -> None:
        """Makes the directory."""
        self._making.mkdir(parents=True)

    @abstractmethod
    def _write_files(self) -> None:
        """Writes the files that need all leaves."""
