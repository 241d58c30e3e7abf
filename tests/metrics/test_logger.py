"""Covers shardfn/metrics/_logger.py: lines of JSON and events, by the first rank."""

import json
import pathlib
import sys

import pytest
import torch

import shardfn as sf
from shardfn.metrics import Logger
from shardfn.testing import distributed


def _lines(folder: pathlib.Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
    with Logger(tmp_path) as logger:
        for n in (1, 2, 3):
            assert logger.write(n, {"loss": torch.tensor(1.0 / n)}, {"lr": 0.5}) == logger.rows[-1]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # it died while it wrote
    with Logger(tmp_path, start=2) as logger:
        logger.write(3, {"loss": 7.0})
    assert [(row["step"], row["loss"]) for row in _lines(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 7.0)]
    Logger(tmp_path).close()
    assert _lines(tmp_path) == []


def test_events_hold_the_same(tmp_path: pathlib.Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Logger(tmp_path, tensorboard=True) as logger:
        logger.write(1, {"loss": 0.5})
        logger.write(2, {"loss": 0.25})
    with Logger(tmp_path, tensorboard=True, start=1) as logger:
        logger.write(2, {"loss": 0.125})
    read = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [(1, 0.5), (2, 0.125)]
    Logger(tmp_path, tensorboard=True).close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


def test_without_tensorboard_it_gives_the_remedy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        Logger(tmp_path, tensorboard=True)


@distributed(world=2)
def test_the_first_rank_writes(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    with Logger(tmp_path / str(mesh.rank), mesh) as logger:
        assert logger.write(1, {"loss": 2.0}) == ({"step": 1, "loss": 2.0} if mesh.rank == 0 else {})
    assert (tmp_path / str(mesh.rank)).exists() == (mesh.rank == 0)
