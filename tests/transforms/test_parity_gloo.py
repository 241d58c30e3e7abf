"""Covers the law over gloo: the tests of `test_parity.py` once more, every night, with ranks that share no memory."""

import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import shardfn as sf
from shardfn.collectives import Channels
from shardfn.testing import distributed
from shardfn.testing._pool import _WORKERS, end_workers

_SPEC = importlib.util.spec_from_file_location("parity_over_gloo", pathlib.Path(__file__).with_name("test_parity.py"))
assert _SPEC is not None and _SPEC.loader is not None
_PARITY: Any = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _PARITY  # where `distributed` looks for the file of a function
_SPEC.loader.exec_module(_PARITY)
globals().update({name: test for name, test in vars(_PARITY).items() if name.startswith("test_")})

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True, scope="module")
def ranks_of_gloo() -> Iterator[None]:
    """A worker has the environment of its start, so there are new ones, and others after them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDFN_CHANNEL", "gloo")
        end_workers(_WORKERS)
        yield
        end_workers(_WORKERS)


@distributed(world=2)
def test_these_ranks_share_no_memory() -> None:
    assert os.environ["SHARDFN_CHANNEL"] == "gloo"
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    assert Channels(mesh).gather(("dp",)).shared_bytes == 0
    mesh.close()
