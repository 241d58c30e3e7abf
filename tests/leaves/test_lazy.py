"""Covers shardfn/leaves/_lazy.py: a lazy leaf under Dynamo."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from shardfn.leaves import LazyLeaf


class _Book:
    """Has the whole of one leaf."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    def fetch(self, index: int) -> Tensor:
        del index
        return self.whole

    def look_after(self, path: str, x: Tensor) -> None:
        """Keeps no record: these tests free no memory."""


@pytest.mark.parametrize("fullgraph", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_compiled_function_opens_it_outside_of_its_graph(fullgraph: bool) -> None:
    torch._dynamo.reset()  # of the code that the other case has compiled
    book: Any = _Book(torch.arange(4.0))
    leaf = LazyLeaf.make(0, "params['w']", torch.zeros(4), book)
    # Checks of shapes are made at a function's first call, by code that dynamo cannot trace.
    torch.tanh(leaf * torch.ones(4)).sum()
    f = torch.compile(lambda w, x: torch.tanh(w * x).sum(), backend="eager", fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(Unsupported, match=r'sf.jit\(loss, backend="inductor"\), or leave out'):
            f(leaf, torch.ones(4))
    else:
        torch.testing.assert_close(f(leaf, torch.ones(4)), torch.tanh(book.whole).sum())
