"""Covers the sinks of a logger: CSV, TensorBoard, and yours; those that fail, and a disk without room."""

import csv
import json
import math
import pathlib
import resource
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from shardfn.metrics import CSV, Logger, TensorBoard


class Listed:
    """A user's sink, in which errors can be provoked."""

    def __init__(self, *broken: int) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.calls: list[Any] = []
        self.broken = set(broken)

    def open(self, folder: pathlib.Path, start: int) -> None:
        self.calls.append(("open", folder.name, start))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self.calls.append(step)
        if step in self.broken:
            self.broken.remove(step)
            raise ConnectionError("the service is down")
        self.rows.append((step, dict(row)))

    def close(self) -> None:
        self.calls.append("close")


def _steps(folder: pathlib.Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _table(folder: pathlib.Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _scalars(folder: pathlib.Path, name: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return [(e.step, e.value) for e in accumulator.EventAccumulator(str(folder)).Reload().Scalars(name)]


def test_every_sink_has_the_same_rows(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboard")
    own = Listed()
    with Logger(tmp_path, sinks=[CSV(), TensorBoard(), own]) as logger:
        logger.write(1, {"loss": 0.5})
        logger.write(2, {"loss": 0.25, "validation_loss": 0.75})
        logger.write(3, {"loss": math.nan})
    assert own.calls == [("open", tmp_path.name, 0), 1, 2, 3, "close"]
    assert own.rows[:2] == [(1, {"loss": 0.5}), (2, {"loss": 0.25, "validation_loss": 0.75})]
    assert _table(tmp_path) == [
        {"step": "1", "loss": "0.5", "validation_loss": ""},
        {"step": "2", "loss": "0.25", "validation_loss": "0.75"},
        {"step": "3", "loss": "nan", "validation_loss": ""},
    ]
    assert _scalars(tmp_path, "loss")[:2] == [(1, 0.5), (2, 0.25)] and _scalars(tmp_path, "validation_loss") == [
        (2, 0.75)
    ]
    with pytest.raises(ValueError, match="after the logger was closed"):
        logger.write(4, {"loss": 1.0})


def test_a_resumed_run_drops_later_rows_of_each(tmp_path: pathlib.Path) -> None:
    with Logger(tmp_path, sinks=[CSV()]) as logger:
        for n in (1, 2, 3):
            logger.write(n, {"loss": float(n)})
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("4,0.")  # it died while it wrote
    own = Listed()
    with Logger(tmp_path, sinks=[CSV(), own], start=2) as logger:
        logger.write(3, {"loss": 7.0, "rate": 0.5})
    assert [(row["step"], row["loss"], row["rate"]) for row in _table(tmp_path)] == [
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "7.0", "0.5"),
    ]
    assert own.calls[0] == ("open", tmp_path.name, 2) and own.rows == [(3, {"loss": 7.0, "rate": 0.5})]
    Logger(tmp_path, sinks=[CSV()]).close()
    assert _table(tmp_path) == [] and _steps(tmp_path) == []


def test_a_sink_that_raises_stops_nothing_and_gets_its_rows_later(tmp_path: pathlib.Path) -> None:
    own, other = Listed(2, 3), Listed()
    with Logger(tmp_path, sinks=[own, other]) as logger:
        logger.write(1, {"loss": 1.0})
        with pytest.warns(
            UserWarning, match=r"Listed could not write step 2 \(ConnectionError: the service is down\)"
        ) as got:
            for n in range(2, 9):
                logger.write(n, {"loss": 1.0})
    assert len(got) == 1
    assert [step for step, _ in own.rows] == [step for step, _ in other.rows] == _steps(tmp_path) == [*range(1, 9)]
    # Attempts grow rare: after a second failure two rows are left out.
    assert own.calls == [("open", tmp_path.name, 0), 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, "close"]


def test_a_sink_that_never_works_has_one_warning_and_a_last_chance(tmp_path: pathlib.Path) -> None:
    class Broken(Listed):
        def write(self, step: int, row: Mapping[str, float]) -> None:
            self.calls.append(step)
            raise OSError("no route")

        def close(self) -> None:
            raise OSError("no route either")

    own = Broken()
    with pytest.warns(UserWarning, match="Broken could not write step 0") as got:
        with Logger(tmp_path, sinks=[own]) as logger:
            for n in range(100):
                logger.write(n, {"loss": 1.0})
    assert len(got) == 1 and len(own.calls) == 1 + 7 + 1 and len(_steps(tmp_path)) == 100


def test_values_that_are_no_sinks_are_listed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError) as error:
        Logger(tmp_path, sinks=[CSV, print, CSV()])  # pyright: ignore[reportArgumentType]
    assert r"sinks[0] is the class CSV; make one: CSV()" in str(error.value)
    assert "sinks[1], a builtin_function_or_method, lacks open, write, close" in str(error.value)
    assert "sinks[2]" not in str(error.value) and not (tmp_path / "metrics.jsonl").exists()


def test_a_sink_that_cannot_begin_stops_the_run_before_it_begins(tmp_path: pathlib.Path) -> None:
    class Closed(Listed):
        def open(self, folder: pathlib.Path, start: int) -> None:
            raise PermissionError("log in first")

    first = Listed()
    with pytest.raises(PermissionError, match="log in first"):
        Logger(tmp_path, sinks=[first, Closed()])
    assert first.calls[-1] == "close"


# No room

LONG = {f"a_metric_of_a_long_name_{i}": float(i) for i in range(20)}


@pytest.fixture
def tiny(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 256 KiB."""
    place, mount = tmp_path / "tiny", shutil.which("mount")
    place.mkdir()
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", place]).returncode:
        pytest.skip("needs root, to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def _fill(place: pathlib.Path) -> pathlib.Path:
    """Takes all the room that is left."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def test_a_full_disk_keeps_the_rows_before_and_later_has_all(tiny: pathlib.Path) -> None:
    pytest.importorskip("tensorboard")
    with Logger(tiny, sinks=[CSV(), TensorBoard()]) as logger:
        for n in range(5):
            logger.write(n, LONG)
        filler = _fill(tiny)
        with pytest.warns(UserWarning, match=r"could not write step \d+ \(OSError: .*No space left on device") as got:
            for n in range(5, 40):
                logger.write(n, LONG)
            logger.write(40, LONG | {"new": 1.0})
        names = sorted(str(w.message).split()[1] for w in got)
        assert names == ["CSV", "JSONFile", "TensorBoard"]
        # Every line there is whole.
        assert _steps(tiny) == [*range(len(_steps(tiny)))] and 5 <= len(_steps(tiny)) < 40
        assert [int(row["step"]) for row in _table(tiny)] == [*range(len(_table(tiny)))] and len(_table(tiny)) >= 5
        filler.unlink()
    assert _steps(tiny) == [int(row["step"]) for row in _table(tiny)] == [*range(41)]
    assert [step for step, _ in _scalars(tiny, "a_metric_of_a_long_name_7")] == [*range(41)]


def test_a_run_resumes_on_a_full_disk(tiny: pathlib.Path) -> None:
    with Logger(tiny, sinks=[CSV()]) as logger:
        for n in range(30):
            logger.write(n, LONG)
    _fill(tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with Logger(tiny, sinks=[CSV()], start=20) as logger:
            for n in range(21, 200):
                logger.write(n, LONG)
    assert _steps(tiny)[:21] == [int(row["step"]) for row in _table(tiny)][:21] == [*range(21)]
    assert _steps(tiny) == [*range(len(_steps(tiny)))]


def test_a_limit_of_file_sizes_is_a_full_disk(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboard")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Logger(tmp_path, sinks=[CSV(), TensorBoard()]) as logger:
        logger.write(0, LONG)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
        try:
            with pytest.warns(UserWarning, match="File too large") as got:
                for n in range(1, 20):
                    logger.write(n, LONG)
            assert len(got) == 3
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        found = _steps(tmp_path)
        assert found == [*range(len(found))] and 1 <= len(found) < 20
    assert _steps(tmp_path) == [int(row["step"]) for row in _table(tmp_path)] == [*range(20)]
    assert [step for step, _ in _scalars(tmp_path, "a_metric_of_a_long_name_0")] == [*range(20)]
