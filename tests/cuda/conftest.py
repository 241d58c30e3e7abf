"""The suite for a GPU: every test of this folder is marked `cuda`, and skipped where there is no device for it.

    ./scripts/test -m cuda

It has never run: no GPU has been lent so far. Its expectations of a GPU are derived from the code, not observed.

It needs a torch that shardfn runs on, built for CUDA; the head of the report names it. Tests that need several devices
start their own ranks, with NCCL between them.
"""

import pathlib

import pytest
import torch

HERE = pathlib.Path(__file__).parent


def pytest_report_header() -> str:
    """The torch and the devices in use, in front of the results."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"cuda: torch {torch.__version__} for CUDA {torch.version.cuda}, {torch.cuda.device_count()} x {name}"


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
