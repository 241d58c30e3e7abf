"""Covers the operations on stored values: each memory and form gives the elements of the device."""

import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardfn.core import MemoryKind, Placement, Stored, StoredValue, kind_when_loaded, load
from shardfn.memory import Pool
from shardfn.state import (
    Successor,
    apart,
    change,
    codes_of,
    copy_value,
    encode,
    fetch,
    layers_of,
    load_at,
    prefetch,
    replace,
    slices_of,
    stack_values,
    start_move,
    store,
    succeed,
    with_codes,
    zero_block,
)

KINDS: list[MemoryKind] = ["device", "host", "disk"]
CPU = torch.device("cpu")


@pytest.fixture
def pool(tmp_path: pathlib.Path) -> Iterator[Pool]:
    with Pool(tmp_path / "pool") as pool:
        yield pool


def _x() -> Tensor:
    return torch.arange(12.0).view(4, 3).clone()


def _stored(kind: MemoryKind, pool: Pool, x: Tensor | None = None) -> StoredValue:
    return store(_x() if x is None else x, Placement(memory_kind=kind), pool)


def test_a_tensor_is_sent_to_its_memory(pool: Pool) -> None:
    x = torch.arange(3.0)
    assert store(x, Placement(memory_kind="device"), None) is x
    host = store(x, Placement(memory_kind="host"), None)
    assert isinstance(host, Tensor) and host.data_ptr() != x.data_ptr() and torch.equal(host, x)
    disk = store(x, Placement(memory_kind="disk"), pool)
    assert isinstance(disk, Stored) and disk.kind == "disk" and torch.equal(disk.load(), x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_loaded_fetched_and_moved_from_each_memory(kind: MemoryKind, pool: Pool) -> None:
    value = _stored(kind, pool)
    assert torch.equal(load_at(value, kind), _x()) and torch.equal(fetch(value, kind, CPU), _x())
    assert (prefetch(value, kind, CPU) is value) == (kind == "device")
    for to in KINDS:
        moved = start_move(value, kind, to, CPU, pool).result()
        assert torch.equal(load(moved), _x()) and (moved is value) == (to == kind)
        assert isinstance(moved, Stored) == (to == "disk")
    assert kind_when_loaded(kind) == ("device" if kind == "device" else "host")
    zeros = zero_block((2, 3), torch.bfloat16, kind, CPU, pool)
    assert isinstance(zeros, Stored) == (kind == "disk") and torch.equal(load(zeros), torch.zeros(2, 3).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_changed_in_place_and_others_replaced(kind: MemoryKind, pool: Pool) -> None:
    value = _stored(kind, pool)
    copy, at = copy_value(value, kind), Placement(memory_kind=kind)
    new = change(value, at, pool, lambda x: x.add_(1))
    assert (new is value) == (kind != "disk") and torch.equal(load(new), _x() + 1) and torch.equal(load(copy), _x())
    other = replace(new, kind, _x() + 2)
    assert torch.equal(load(other), _x() + 2) and (other is new) == (kind != "disk")
    last = succeed(new, kind, _x() + 3)
    assert torch.equal(load(last), _x() + 3)
    assert (last is new) == (kind == "host") and isinstance(last, Stored) == (kind == "disk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_successor_is_made_row_by_row(kind: MemoryKind, place: MemoryKind, pool: Pool) -> None:
    value = _stored(kind, pool)
    writer = Successor(value, kind, pool)
    for lo, hi in ((2, 4), (0, 2)):
        rows, into = _x()[lo:hi] * 2, writer.rows(lo, hi, place)
        assert (into is not None) == (kind == place)
        if into is not None:
            into.copy_(rows)
        going = writer.write(lo, rows, place)
        assert (going is None) == (kind == place)
        if going is not None:
            going.result()
    new = writer.finish()
    assert torch.equal(load(new), _x() * 2) and (new is value) == (kind != "disk")
    assert kind != "disk" or torch.equal(load(value), _x())  # the old value stays


def test_a_successor_beside_a_tensor_leaves_it(pool: Pool) -> None:
    value = _stored("device", pool)
    writer = Successor(value, "device", pool, beside=True)
    into = writer.rows(0, None, "host")
    assert into is not None and writer.rows(0, None, "device") is None
    into.copy_(_x() + 1)
    assert writer.write(0, into, "host") is None
    assert torch.equal(load(writer.finish()), _x() + 1) and torch.equal(load(value), _x())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_slices_are_stacked_again(kind: MemoryKind, pool: Pool) -> None:
    value = _stored(kind, pool)
    layers = layers_of(value)
    assert [load(x).tolist() for x in layers] == _x().tolist()
    whole = stack_values(layers)
    assert torch.equal(load(whole), _x()) and (whole is value) == (kind != "disk")
    if kind != "disk":
        return
    first, rest = slices_of(value, [torch.Size([3]), torch.Size([3, 3])])
    assert torch.equal(load(first), _x()[0]) and torch.equal(load(rest), _x()[1:])
    own = apart(rest, Placement(memory_kind="disk"), pool)
    assert own is not rest and torch.equal(load(own), _x()[1:]) and apart(own, Placement(), pool) is own


@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_block_in_codes_is_its_codes(kind: MemoryKind) -> None:
    at = Placement(memory_kind=kind, quantization="int8")
    x = torch.randn(4, 40)
    value = store(x, at, None)
    assert (value.shape, value.dtype) == (x.shape, x.dtype) and value.nbytes == 4 * 2 * 34
    codes = codes_of(value)
    assert torch.equal(fetch(value, kind, CPU), load(codes)) and codes_of(codes) is codes
    assert torch.equal(load(with_codes(value, load(codes).clone(), kind)), load(value))
    assert torch.equal(load(encode(x, at)), load(value)) and encode(x, Placement()) is x


def test_layers_without_elements_are_different_reads(pool: Pool) -> None:
    """In a graph two reads with equal arguments are one value, though other ranks read elements of two layers."""
    parts = layers_of(_stored("disk", pool, torch.empty(3, 0, 2)))
    assert [vars(x)["_start"] for x in parts] == [0, 1, 2]
    assert all(load(x).shape == (0, 2) for x in parts)
