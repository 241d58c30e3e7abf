"""Covers where summed gradients wait: each memory gives the sums of the device; how much is on its way at once."""

import pathlib
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardfn.core import MemoryKind, Placement, Stored
from shardfn.memory import Pool
from shardfn.state import _parts
from shardfn.state._kept import closed
from shardfn.state._parts import Parts
from shardfn.state._stored import loaded

BF16, FP32 = torch.bfloat16, torch.float32


def _shares(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(1000, generator=draw).to(dtype) for _ in range(3)]


@pytest.mark.parametrize(
    "home", ["device", pytest.param("host", marks=pytest.mark.nightly), pytest.param("disk", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("travels", [FP32, BF16])
def test_microbatches_are_added_in_the_dtype_of_the_sum(
    home: MemoryKind, travels: torch.dtype, tmp_path: pathlib.Path
) -> None:
    shares = _shares(travels)
    want = shares[0].float() + shares[1].float() + shares[2].float()
    with Pool(tmp_path / "pool") as pool:
        parts = Parts([home], [FP32], pool)
        for k, share in enumerate(shares):
            assert (0 in parts) == (k > 0)
            parts.add(0, share.clone(), last=k == 2)
        parts.finish(0)
        kept = parts[0]
        assert isinstance(kept, Stored) == (home == "disk")
        assert loaded(kept).dtype == FP32 and torch.equal(loaded(kept), want)
        assert list(parts) == [0] and parts.home(0) == home
        assert torch.equal(loaded(parts.pop(0)), want)
        assert 0 not in parts and not list(parts)


def test_a_part_that_is_never_added_to_stays_on_the_device_unchanged() -> None:
    parts, (share, *_) = Parts(["device"], [FP32], None), _shares(BF16)
    parts.add(0, share, last=True)
    assert parts[0] is share
    parts.finish(0)
    assert isinstance(x := parts[0], Tensor) and x.dtype == FP32
    parts.drop(0)
    parts.drop(0)
    assert 0 not in parts


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
    homes: list[MemoryKind] = ["host"] * 4
    limit = mock.patch.multiple(_parts, LEAVING_BYTES=2 * 400, to_host=lambda x: _Slow(x.clone(), waited))
    with limit:
        parts = Parts(homes, [FP32] * 4, None)
        for unit in range(4):
            parts.add(unit, torch.full((100,), float(unit)), last=True)
            assert waited == list(range(max(0, unit - 1)))  # two of them fit
    assert [float(loaded(parts[unit])[0]) for unit in range(4)] == [0, 1, 2, 3]


def test_a_tensor_is_sent_to_its_memory(tmp_path: pathlib.Path) -> None:
    x = torch.arange(3.0)
    assert closed(x, Placement(memory_kind="device"), None) is x
    host = closed(x, Placement(memory_kind="host"), None)
    assert isinstance(host, Tensor) and host.data_ptr() != x.data_ptr() and torch.equal(host, x)
    with Pool(tmp_path / "pool") as pool:
        disk = closed(x, Placement(memory_kind="disk"), pool)
        assert isinstance(disk, Stored) and disk.kind == "disk" and torch.equal(disk.load(), x)
