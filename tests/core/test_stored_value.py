"""Covers `StoredValue`: a tensor is one, and its identity element; values elsewhere are read."""

import pathlib

import pytest
import torch

from shardfn.core import Absent, StoredValue, as_stored, is_device, is_disk, load, read_rows
from shardfn.memory import Pool, QuantizedBlocks

X = torch.arange(12.0).view(4, 3)


def test_a_tensor_is_a_stored_value_and_is_loaded_as_itself() -> None:
    assert isinstance(X, StoredValue) and load(X) is X and as_stored(X) is None
    rows = read_rows(X, 1, 3).result()
    assert rows.data_ptr() == X[1].data_ptr() and torch.equal(rows, X[1:3])
    out = torch.empty(2, 3)
    assert read_rows(X, 1, 3, out).result() is out and torch.equal(out, X[1:3])
    assert read_rows(torch.tensor(3.0)).result() == 3.0


def test_values_elsewhere_are_read(tmp_path: pathlib.Path) -> None:
    with Pool(tmp_path / "pool") as pool:
        for value in (pool.write(X).result(), QuantizedBlocks.of(X, "int8")):
            assert isinstance(value, StoredValue) and as_stored(value) is value
            assert (value.shape, value.dtype) == (X.shape, X.dtype)
            torch.testing.assert_close(load(value), X, rtol=0.01, atol=0.05)
            assert torch.equal(read_rows(value, 1, 3).result(), load(value)[1:3])


def test_a_rank_outside_of_the_mesh_has_a_value_that_cannot_be_loaded() -> None:
    value = Absent(2, torch.float32, "device", "no block here")
    assert isinstance(value, StoredValue)
    with pytest.raises(ValueError, match="no block here"):
        load(value)


def test_each_memory_kind_answers_one_question() -> None:
    found = {kind: (is_device(kind), is_disk(kind)) for kind in ("device", "host", "disk", "float32")}
    assert found["device"] == (True, False) and found["disk"] == (False, True)
    assert found["host"] == found["float32"] == (False, False)
