"""Covers where summed gradients wait: each memory gives the sums of the device; how much is on its way at once."""

import pathlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import SumWire
from shardfn.core import MemoryKind, Pending, Stored, load
from shardfn.engine import Plan
from shardfn.engine.transfers import _gradient_store
from shardfn.engine.transfers._gradient_store import GradientStore
from shardfn.memory import Pool

from .fakes import Wire, plan_of

BF16, FP32 = torch.bfloat16, torch.float32


def _store(plan: Plan, pool: Pool | None = None) -> GradientStore:
    wire = Wire()
    wires = [SumWire(wire, plan.layers[x.leaves[0]].ways.reduce, x.packing) for x in plan.reduce_units]
    with mock.patch.object(_gradient_store, "pool_of", lambda plan: pool):
        return GradientStore(plan, wires, ())


def _plan(home: MemoryKind, sizes: tuple[int, ...] = (2000,)) -> Plan:
    """Leaves of one unit each, whose rows on rank 0 of two wait in a memory."""
    how: dict[str, Any] = {"disk": sf.Disk("unused")} if home == "disk" else {}
    zero = sf.Zero(2, grads=home, optimizer=home, persist_elements=0, travel=sf.Travel(bucket_bytes=0), **how)
    return plan_of({f"leaf{i}": (n,) for i, n in enumerate(sizes)}, zero)[0]


@pytest.mark.parametrize(
    "home", ["device", pytest.param("host", marks=pytest.mark.nightly), pytest.param("disk", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("travels", [FP32, BF16])
def test_microbatches_are_added_in_the_dtype_of_the_sum(
    home: MemoryKind, travels: torch.dtype, tmp_path: pathlib.Path
) -> None:
    draw = torch.Generator().manual_seed(3)
    shares = [torch.randn(1000, generator=draw).to(travels) for _ in range(3)]
    want = shares[0].float() + shares[1].float() + shares[2].float()
    with Pool(tmp_path / "pool") as pool:
        store = _store(_plan(home), pool)
        for k, share in enumerate(shares):
            assert (0 in store) == (k > 0)
            store.receive(0, Pending.of(share.clone()), last=k == 2)
        store.finish()
        kept = store.share(0)
        assert isinstance(kept, Stored) == (home == "disk")
        assert load(kept).dtype == FP32 and torch.equal(load(kept), want)
        assert store.units == [0]
        store.split([0], lambda layer: True)
        assert torch.equal(load(store.take(0)), want)
        assert 0 not in store and not store.units


def test_a_part_that_is_never_added_to_stays_on_the_device_unchanged() -> None:
    store, share = _store(_plan("device")), torch.randn(1000).to(BF16)
    store.receive(0, Pending.of(share), last=True)
    assert store.share(0) is share
    store.finish()
    assert isinstance(x := store.share(0), Tensor) and x.dtype == FP32


class _Slow:
    """A share that arrives when it is waited for."""

    def __init__(self, x: Tensor, waited: list[int]) -> None:
        self._x, self._waited = x, waited

    def done(self) -> bool:
        return False

    def result(self) -> Tensor:
        self._waited.append(int(self._x[0]))
        return self._x


def test_the_oldest_shares_are_waited_for_when_too_many_are_on_their_way() -> None:
    waited: list[int] = []
    limit = mock.patch.multiple(_gradient_store, LEAVING_BYTES=2 * 400, to_host=lambda x: _Slow(x.clone(), waited))
    with limit:
        store = _store(_plan("host", (200,) * 4))
        for unit in range(4):
            store.receive(unit, Pending.of(torch.full((100,), float(unit))), last=True)
            assert waited == list(range(max(0, unit - 1)))  # two of them fit
    assert [float(load(store.share(unit))[0]) for unit in range(4)] == [0, 1, 2, 3]
