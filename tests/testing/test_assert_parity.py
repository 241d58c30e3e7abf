"""Covers `assert_parity`: it passes if a sharded run equals one device, or names each leaf and both values."""

import math
import re

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import RTOL, Run, assert_parity, assert_same, distributed

Params = dict[str, Tensor]


def _mean(params: Params, x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"]).square() + params["b"]).mean()


def _total(params: Params, x: Tensor) -> Tensor:
    """No mean over rows, so the ranks' values of their own rows do not average to that of one device."""
    return (torch.tanh(x @ params["w"]).square().sum(0) + params["b"]).mean()


def _late(params: Params, x: Tensor) -> Tensor:
    """Wrong by a term of the last of 35 elements, and only where rows are spread over ranks."""
    return _mean(params, x) + params["w"][-1, -1] * (len(x) - 6)


def _check(loss, world: int, stage: int = 3, **options) -> Run:
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(7, 5, generator=draw), "b": torch.randn(5, generator=draw)}
    rows = [torch.randn(6, 7, generator=draw) for _ in range(2)]
    zero = sf.Zero(stage=stage, persist_elements=0)
    return assert_parity(loss, sf.optim.sgd(0.1), params, rows, mesh=sf.make_mesh({"dp": world}), zero=zero, **options)


def _found(loss, world: int, **options) -> dict[str, tuple[float, float]]:
    """The error's lines: for each leaf or metric, by path and element, the sharded value and that of one device."""
    with pytest.raises(AssertionError) as caught:
        _check(loss, world, **options)
    title, *lines = str(caught.value).splitlines()
    assert title == "the runs differ:"
    rows = [re.fullmatch(r"  - (.+): (\S+) is not (\S+); the largest element is \S+", line) for line in lines]
    assert all(rows), lines
    return {row[1]: (float(row[2]), float(row[3])) for row in rows if row}


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly), 3])
def test_it_passes_where_runs_are_equal(world: int) -> None:
    run = _check(_mean, world)
    assert len(run.metrics) == 2 and run.params["w"].shape == (7, 5)


@distributed(world=[2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_loss_that_is_no_mean_fails_with_both_values(world: int) -> None:
    found = _found(_total, world)
    assert {re.sub(r"\[[\d, ]+\]$", "", path) for path in found} == {
        "params['w']",
        *(f"metrics[{n}]['{name}']" for n in range(2) for name in ("loss", "grad_norm")),
    }  # the gradient of `b` is the same on any number of ranks
    for n in range(2):
        got, want = found[f"metrics[{n}]['grad_norm']"]
        assert 0 < got < want
    (path,) = [path for path in found if path.startswith("params['w'][")]
    got, want = found[path]
    assert math.isclose(got, want, rel_tol=0.9) and abs(got - want) > 1e-3


@distributed(world=1)
def test_one_rank_has_nothing_to_get_wrong() -> None:
    _check(_total, 1)
    _check(_late, 1)


@distributed(world=2)
def test_the_element_that_differs_is_the_one_that_is_shown() -> None:
    found = _found(_late, 2)
    got, want = found["params['w'][6, 4]"]
    assert math.isclose(got - want, 0.1 * 3 * 2, abs_tol=0.1)  # two steps of rate 0.1, each with 3 rows too few


@distributed(world=2)
def test_all_ranks_fail_where_one_of_them_computes_something_else() -> None:
    rank = torch.distributed.get_rank()
    found = _found(lambda params, x: _mean(params, x) * (1 + 1e-3 * rank), 2, reference=_mean)
    got, want = found["metrics[0]['loss']"]
    assert 1 < got / want < 1 + 1e-3  # of one of the two ranks


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        pytest.param(torch.float32, marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_the_tolerance_is_a_part_of_the_largest_element(dtype: torch.dtype) -> None:
    want = torch.tensor([1.0, 64.0], dtype=dtype)

    def differ(by: float, *, exact: bool = False) -> None:
        got = want + torch.tensor([0.0, 64.0 * by], dtype=dtype)
        assert not torch.equal(got, want)
        assert_same(Run({"w": got}, (), []), Run({"w": want}, (), []), exact=exact)

    differ(0.9 * RTOL[dtype])
    with pytest.raises(AssertionError, match=r"params\['w'\]\[1\]: 6\d\S+ is not 64.0; the largest element is 64$"):
        differ(3 * RTOL[dtype])
    with pytest.raises(AssertionError, match=r"params\['w'\]: not bit-identical"):
        differ(0.9 * RTOL[dtype], exact=True)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (torch.tensor([1.0, math.nan]), r"\[1\]: nan is not 2.0"),
        pytest.param(torch.tensor([math.inf, 2.0]), r"\[0\]: inf is not 1.0", marks=pytest.mark.nightly),
        pytest.param(torch.ones(3), r": \(3,\) torch.float32 is not \(2,\) torch.float32", marks=pytest.mark.nightly),
        (torch.ones(2, dtype=torch.float64), r": \(2,\) torch.float64 is not \(2,\) torch.float32"),
    ],
)
def test_nans_and_other_shapes_or_dtypes_differ(got: Tensor, message: str) -> None:
    want = torch.tensor([1.0, 2.0])
    for part in ("params", "opt_state", "metrics[0]"):
        runs = [
            Run(*({"x": x if part == name else want} for name in ("params", "opt_state")), [{"x": x}])  # pyright: ignore
            for x in (got, want)
        ]
        if not part.startswith("metrics"):
            runs[0] = runs[0]._replace(metrics=[{"x": want}])
        with pytest.raises(AssertionError, match=f"^the runs differ:\n  - {re.escape(part)}\\['x'\\]{message}"):
            assert_same(*runs)


@distributed(world=2)
def test_a_mean_over_unequal_terms_gets_its_remedy() -> None:
    def masked(params: Params, x: Tensor) -> Tensor:
        counts = (x[:, :1] > 0).to(x)
        return ((x @ params["w"]).square() * counts).sum() / counts.sum()

    with pytest.raises(AssertionError, match=r"^the runs differ:") as caught:
        _check(masked, 2)
    assert "mean of the losses of 2 parts" in caught.value.__notes__[0] and "WeightedMean" in caught.value.__notes__[0]
    shown = "\n".join([str(caught.value), *caught.value.__notes__])
    for text in ("mean of the losses of 2 parts", "metrics[0]['loss']"):
        assert shown.count(text) == 1, shown
