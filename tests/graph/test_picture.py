"""Covers shardfn/graph/_show.py and `lowered.plot`: pictures show the numbers of the analyses."""

import pathlib
import sys
from typing import Any
from unittest import mock

import pytest
import torch

import shardfn as sf
from shardfn.graph import cluster
from shardfn.transforms import Lowered


def _lowered() -> Lowered:
    mesh = sf.make_mesh({"dp": 4}, abstract=True)

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ params["w"]).square().mean()

    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    return step.lower({"w": torch.ones(64, 33)}, torch.ones(7, 64))


@pytest.mark.nightly
def test_drawn_memory_equals_the_analysis(tmp_path: pathlib.Path) -> None:
    low = _lowered()
    found = low.memory_analysis()
    axes: list[Any] = low.plot(tmp_path / "memory.png").axes
    over, at_peak = axes
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    drawn = over.collections[0].get_paths()[0].vertices
    assert drawn[:, 1].max() * (1 << 20) == pytest.approx(max(found.timeline))
    assert over.lines[0].get_ydata()[0] * (1 << 20) == pytest.approx(found.peak)
    assert sum(bar.get_width() for bar in at_peak.patches) * (1 << 20) == pytest.approx(found.peak)
    assert found.node in over.get_title()
    assert {text.get_text().strip(): text.get_position()[0] for text in over.texts} == found.begins
    assert [*found.begins.values()] == sorted(found.begins.values()) and {"forward", "backward"} <= {*found.begins}


@pytest.mark.nightly
def test_time_has_a_lane_of_compute_and_one_for_each_axes(tmp_path: pathlib.Path) -> None:
    low, box = _lowered(), cluster("h100")
    every: list[Any] = low.plot(tmp_path / "time.svg", kind="time", cluster=box).axes
    (axes,) = every
    assert "<svg" in (tmp_path / "time.svg").read_text()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["compute", "transfers over dp"]
    events = low.estimate(box).events
    assert len(axes.collections) == len(events)
    ends = [bar.get_paths()[0].vertices[:, 0].max() for bar in axes.collections]
    assert ends == pytest.approx([(e.start + e.seconds) * 1e3 for e in events])
    assert axes.get_legend() is not None


def test_mistakes_and_a_missing_matplotlib_raise() -> None:
    low = _lowered()
    with pytest.raises(ValueError, match=r"plot\(kind='space'\): there are 'time' and 'memory'"):
        low.plot(kind="space")
    with pytest.raises(ValueError, match="needs a cluster to predict for"):
        low.plot(kind="time")
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        with pytest.raises(ImportError, match=r"pip install 'shardfn\[train\]'"):
            low.plot()
