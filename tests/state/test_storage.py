"""Covers the forms of a block in each memory."""

import pathlib

import torch
from torch import Tensor

from shardfn.core import Placement, Stored
from shardfn.memory import Pool
from shardfn.state import store


def test_a_tensor_is_sent_to_its_memory(tmp_path: pathlib.Path) -> None:
    x = torch.arange(3.0)
    assert store(x, Placement(memory_kind="device"), None) is x
    host = store(x, Placement(memory_kind="host"), None)
    assert isinstance(host, Tensor) and host.data_ptr() != x.data_ptr() and torch.equal(host, x)
    with Pool(tmp_path / "pool") as pool:
        disk = store(x, Placement(memory_kind="disk"), pool)
        assert isinstance(disk, Stored) and disk.kind == "disk" and torch.equal(disk.load(), x)
