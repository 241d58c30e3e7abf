"""Covers transfers in two hops: the order of second hops, and the error when a first one fails."""

import collections
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn.collectives._zero_plus_plus import Relayed
from shardfn.collectives.transport._channel import Channel
from shardfn.core import Pending


class Far(Channel):
    """The line alone."""

    def __init__(self) -> None:
        self.line: collections.deque[Any] = collections.deque()


class Late(Pending[Tensor]):
    """Here, or broken."""

    def __init__(self, value: float | None) -> None:
        super().__init__()
        self._number = value

    def done(self) -> bool:
        return True

    def result(self) -> Tensor:
        if self._number is None:
            raise RuntimeError("the link is cut")
        return torch.tensor(self._number)


def relayed(far: Far, value: float | None, began: list[float]) -> Relayed:
    def go_on(x: Tensor) -> Pending[Tensor]:
        began.append(x.item())
        return Late(x.item() * 10)

    return Relayed(far, Late(value), go_on)


def test_second_hops_begin_in_the_order_of_the_first_ones() -> None:
    far, began = Far(), list[float]()
    first, second = relayed(far, 1.0, began), relayed(far, 2.0, began)
    assert second.result() == 20 and began == [1.0, 2.0] and first.result() == 10 and not far.line


def test_all_ranks_raise_the_error_of_a_first_hop_that_fails() -> None:
    far, began = Far(), list[float]()
    first, second = relayed(far, None, began), relayed(far, 2.0, began)
    for transfer in (second, first, second):
        with pytest.raises(RuntimeError, match="the link is cut"):
            transfer.result()
    assert began == []
