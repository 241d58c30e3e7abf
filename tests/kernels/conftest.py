"""Every implementation in turn."""

from collections.abc import Iterator

import numpy as np
import pytest

from shardfn import kernels
from shardfn.kernels import _build


@pytest.fixture(params=["native", "triton"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An implementation that runs during the test; Triton's under its interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    if request.param == "native" and _build.library() is None:
        pytest.skip("no C++ compiler")
    with kernels.implemented_by(request.param), np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield request.param


@pytest.fixture(params=[4, 3, pytest.param(1, marks=pytest.mark.nightly)], ids=lambda n: f"x86-64-v{n}")
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A generation of processors; a test that needs a newer one than is here runs as the newest."""
    if _build.library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(_build, "NEWEST", request.param)
    return request.param
