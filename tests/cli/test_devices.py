"""Covers shardfn/cli/_arguments.py: the memory of an estimate is that of this machine, where the device is here."""

from types import SimpleNamespace

import pytest
import torch

from shardfn.cli import _arguments, main
from shardfn.graph import DEVICES, machine_memory


def test_ranks_on_a_cpu_share_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _arguments.device_cluster("cpu", {"dp": 1}).device.memory == machine_memory()
    monkeypatch.setattr(_arguments.graph, "machine_memory", lambda: 64 << 30)
    per_node = DEVICES["cpu"].per_node
    for shape, ranks in (({"dp": 4}, 4), ({"dp": 2, "tp": 2}, 4), ({"dp": 1000}, per_node)):
        assert _arguments.device_cluster("cpu", shape).device.memory == (64 << 30) // ranks
    assert _arguments.device_cluster("h100", {"dp": 4}) == DEVICES["h100"]


def test_the_gpu_that_is_here_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, known in (("NVIDIA A100-PCIE-40GB", "a100-80"), ("Tesla V100-SXM2-16GB", "v100-32")):
        about = SimpleNamespace(name=name, total_memory=12345)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, about=about: about)
        found = _arguments.local_cluster({"dp": 2})
        assert found.device.memory == 12345 and found.device.flops == DEVICES[known].device.flops


def test_a_plan_for_a_cpu_has_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arguments.graph, "machine_memory", lambda: 100 << 30)
    main(["plan", "gpt2", "--device", "cpu", "--precision", "fp32-adam", "--mesh", "dp=2"])
    assert "of 47.00 GiB" in capsys.readouterr().out
