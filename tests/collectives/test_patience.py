"""Covers waits for ranks that do not come: `full_tensor` by one rank alone reports the ranks that it waits for."""

import logging
import time
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.collectives.transport import _epoch
from shardfn.testing import distributed


def _run(mesh: sf.Mesh) -> tuple[Any, Any]:
    step = sf.sharded_step(
        lambda w, x: (w * x).mean(), sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(3, persist_elements=0)
    )
    return step, step.init(torch.ones(4))


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.nightly
@distributed(world=2)
def test_a_rank_alone_in_full_tensor_raises() -> None:
    mesh, heard, before = sf.make_mesh(), _Heard(), _epoch.SECONDS
    _, state = _run(mesh)
    _epoch.SECONDS = 0.1
    logging.getLogger("shardfn.collectives").addHandler(heard)
    try:
        if mesh.rank == 1:
            time.sleep(1.0)
            _epoch.SECONDS = 60.0
        assert torch.equal(state.params.full_tensor(), torch.ones(4))
    finally:
        logging.getLogger("shardfn.collectives").removeHandler(heard)
        _epoch.SECONDS = before
    if mesh.rank == 0:
        assert "rank 0 is in full_tensor() of a leaf of shape (4,), which all ranks along ('dp',)" in heard.texts[0]
    else:
        assert not heard.texts
