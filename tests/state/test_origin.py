"""Covers whose values a directory holds: exchanged, mixed and foreign ones are refused before they are opened."""

import json
import logging
import pathlib
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import distributed

BATCH = sf.P(("dp", "tp"))


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def _make(place: pathlib.Path, shape: dict[str, int], axis: str = "dp") -> sf.transforms.ShardedStep:
    kinds: dict[str, Any] = {"params": "disk", "optimizer": "disk", "directory": str(place)}
    zero = sf.Zero.flat(stage=3, axis=axis, persist_elements=0, **kinds)
    return sf.sharded_step(_loss, sf.optim.adam(0.1), mesh=sf.make_mesh(shape), batch=BATCH, zero=zero)


def _start() -> dict[str, Tensor]:
    return {"w": torch.arange(24.0).view(12, 2) / 24}


def _write(place: pathlib.Path, shape: dict[str, int]) -> Tensor:
    step = _make(place, shape)
    state, _ = step(step.init(_start()), torch.ones(2, 12))
    out = sf.unshard(state.params)["w"]
    step.close()
    return out


def _exchange(place: pathlib.Path, a: str = "rank0", b: str = "rank1") -> None:
    (place / a).rename(place / "aside")
    (place / b).rename(place / a)
    (place / "aside").rename(place / b)


def _resume(place: pathlib.Path, shape: dict[str, int], axis: str = "dp") -> tuple[str, Any]:
    """The error of resuming, or the resumed parameters."""
    step = _make(place, shape, axis)
    try:
        state = step.resume(_start())
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    out = sf.unshard(state.params)["w"]
    step.close()
    return "", out


@distributed(world=2)
def _written(place: pathlib.Path, shape: dict[str, int]) -> Tensor:
    return _write(place, shape)


@distributed(world=2)
def _resumed(place: pathlib.Path, shape: dict[str, int], axis: str = "dp") -> tuple[str, Any]:
    return _resume(place, shape, axis)


@distributed(world=3)
def _resumed_by_three(place: pathlib.Path) -> tuple[str, Any]:
    return _resume(place, {"dp": 3})


@pytest.mark.nightly
def test_exchanged_directories_are_detected_and_can_be_put_back(tmp_path: pathlib.Path) -> None:
    want = _written(tmp_path, {"dp": 2})[0]
    _exchange(tmp_path)
    for told, _ in _resumed(tmp_path, {"dp": 2}):
        assert f"rank 0: {tmp_path}/rank0 was written by rank 1" in told and "rank 1: " in told
        assert "give each rank the directory that it wrote" in told
    _exchange(tmp_path)
    for told, got in _resumed(tmp_path, {"dp": 2}):
        assert not told and torch.equal(got, want)


@pytest.mark.nightly
def test_another_number_of_ranks_is_named(tmp_path: pathlib.Path) -> None:
    _written(tmp_path, {"dp": 2})
    for told, _ in [_resume(tmp_path, {"dp": 1}), *_resumed_by_three(tmp_path)]:
        assert f"the state under {tmp_path} must be resumed on 2 ranks" in told, told
    assert [told for told, _ in _resumed(tmp_path, {"dp": 2})] == ["", ""]


def test_another_mesh_or_another_cut_is_named(tmp_path: pathlib.Path) -> None:
    _written(tmp_path, {"dp": 2})
    for told, _ in _resumed(tmp_path, {"tp": 2}, "tp"):
        assert "was written on the mesh {'dp': 2}, this one is {'tp': 2}" in told
    assert [told for told, _ in _resumed(tmp_path, {"dp": 2, "tp": 1})] == ["", ""]


@pytest.mark.nightly
def test_directories_of_two_runs_are_distinguished(tmp_path: pathlib.Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    _written(a, {"dp": 2})
    _written(b, {"dp": 2})
    (a / "rank1").rename(tmp_path / "kept")
    (b / "rank1").rename(a / "rank1")
    for told, _ in _resumed(a, {"dp": 2}):
        assert "different runs" in told and f"rank 1: {a}/rank1 is of run" in told
    (a / "rank1").rename(b / "rank1")
    (tmp_path / "kept").rename(a / "rank1")
    assert [told for told, _ in _resumed(a, {"dp": 2})] == ["", ""]


def _forget_origin(place: pathlib.Path) -> None:
    """Makes a commit like those of older versions, which did not record an origin."""
    for path in place.glob("rank*/manifest*.json"):
        body = json.loads(json.loads(path.read_text())["body"])
        del body["about"]
        text = json.dumps(body)
        path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "body": text}))


def test_a_commit_without_a_rank_is_taken_with_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    want = _write(tmp_path, {"dp": 1})
    _forget_origin(tmp_path)
    with caplog.at_level(logging.WARNING, logger="shardfn.memory"):
        told, got = _resume(tmp_path, {"dp": 1})
    assert not told and torch.equal(got, want)
    assert "rank0 has no record of the rank that wrote it" in caplog.text


def test_a_commit_without_a_rank_is_refused_where_more_ranks_wrote_beside_it(tmp_path: pathlib.Path) -> None:
    _written(tmp_path, {"dp": 2})
    _forget_origin(tmp_path)
    assert "must be resumed on 2 ranks, by which it was written, got 1 ranks" in _resume(tmp_path, {"dp": 1})[0]
