"""Covers the table of transforms: which order of two is refused, and in which words."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.engine.loss._transform_order import TABLE, WHY, find_transforms
from shardfn.transforms import policies

MAKE: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: sf.jit(f, backend="graph"),
    "accumulate": lambda f: sf.accumulate(f, 2),
    "mixed_precision": lambda f: sf.mixed_precision(f, sf.Policy()),
    "partition": sf.partition,
    "remat": sf.remat,
    "offload": lambda f: sf.offload(f, policies.offload_larger_than(0)),
    "pipeline": lambda f: sf.pipeline(f, lambda p, h: h, lambda w, h, x: h, blocks=lambda w: w.reshape(1)),
    "sharded": sf.sharded,
    "bucketed": lambda f: sf.bucketed(f, (None, 0), sizes=(4, 8), with_length=False),
}
# Returns a plain function, which cannot be recognised.
UNSEEN = {"remat"}


def _loss(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).square().mean()


def _refused(outer: str, inner: str) -> bool:
    return outer not in TABLE[inner].within and inner not in UNSEEN


def test_every_transform_has_a_row() -> None:
    assert set(MAKE) == set(TABLE)


def test_the_words_are_those_of_the_refused_orders() -> None:
    assert set(WHY) == {pair for pair in itertools.product(TABLE, TABLE) if _refused(*pair)}


@pytest.mark.day(14)
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        pytest.param(*x, marks=pytest.mark.nightly if i % 3 else ())
        for i, x in enumerate(list(itertools.product(TABLE, TABLE)))
    ],
)
def test_an_order_means_the_loss_or_is_refused(outer: str, inner: str) -> None:
    if _refused(outer, inner):
        with pytest.raises(ValueError) as told:
            MAKE[outer](MAKE[inner](_loss))
        assert str(told.value) == WHY[outer, inner]
        return
    w, x = torch.tensor(2.0), torch.arange(4.0)
    made = MAKE[outer](MAKE[inner](_loss))
    params: Any = made.init(w) if outer == "sharded" else made.inner.init(w) if inner == "sharded" else w
    assert torch.equal(made(params, x), _loss(w, x))


def test_a_step_takes_over_the_transforms_around_the_loss() -> None:
    offloaded = MAKE["offload"](_loss)
    around, inner = find_transforms(MAKE["jit"](MAKE["mixed_precision"](MAKE["accumulate"](offloaded))))
    assert [x.transform for x in around] == ["jit", "mixed_precision", "accumulate"]
    assert inner is offloaded
    assert find_transforms(_loss) == ([], _loss)


def test_a_transform_that_means_nothing_twice_is_refused_by_the_step() -> None:
    with pytest.raises(ValueError, match=r"the loss is jitted twice. Drop one\."):
        sf.sharded_step(MAKE["jit"](MAKE["accumulate"](MAKE["jit"](_loss))), sf.optim.sgd(0.1))
