"""The suite for a GPU: every test of this folder is marked `cuda`, and skipped where there is no device for it.

    ./scripts/test -m cuda

It has never run: no GPU has been lent so far. Its expectations of a GPU are derived from the code, not observed.

It needs the torch that `pyproject.toml` names, built for CUDA. If shardfn imports on another one as well, the head of
the report notes this, since a failure may then be that version's; otherwise the error names both. Tests that need
several devices start their own ranks, with NCCL between them.
"""

import pathlib
import tomllib

import pytest
import torch

HERE = pathlib.Path(__file__).parent
PROJECT = HERE.parents[1] / "pyproject.toml"


def wanted_torch() -> str:
    """The version of torch to which the project is pinned."""
    pins = [d for d in tomllib.loads(PROJECT.read_text())["project"]["dependencies"] if d.startswith("torch==")]
    return pins[0].removeprefix("torch==")


def pytest_report_header() -> str:
    """The torch and the devices in use, in front of the results."""
    found, wanted = torch.__version__, wanted_torch()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    other = (
        "" if found.split("+")[0] == wanted else f"; shardfn needs torch {wanted}, so a failure may be this version's"
    )
    return f"cuda: torch {found} for CUDA {torch.version.cuda}, {torch.cuda.device_count()} x {name}{other}"


@pytest.hookimpl(tryfirst=True)  # before marks are selected by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder; `@pytest.mark.cuda(devices=2)` on a test is the number of devices it needs."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        given = item.get_closest_marker("cuda")
        need = given.kwargs.get("devices", 1) if given else 1
        item.add_marker(pytest.mark.cuda)
        have = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if have < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA device(s); this machine has {have}"))
