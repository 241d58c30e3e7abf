"""Covers kernels.row_norm: the bits of its definition on every processor, and those of a row alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

from shardfn import kernels

NIGHTLY = pytest.mark.nightly
KINDS = [(True, True), (False, False), pytest.param((True, False), marks=NIGHTLY)]  # centered, with a bias


def _drawn(rows: int, d: int, biased: bool) -> Any:
    draw = torch.Generator().manual_seed(rows + d)
    x = 3 * torch.randn(rows, d, generator=draw) + 1
    return x, torch.randn(d, generator=draw), torch.randn(d, generator=draw) if biased else None


@pytest.mark.usefixtures("generation")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("d", [1, 63, 64, 77, 512, pytest.param(1409, marks=NIGHTLY)])
def test_every_processor_has_the_bits_of_the_definition(d: int, kind: tuple[bool, bool]) -> None:
    x, *how = _drawn(40, d, kind[1])
    got = kernels.row_norm(x, *how, centered=kind[0])
    with kernels.implemented_by("reference"):
        assert torch.equal(got, kernels.row_norm(x, *how, centered=kind[0]))


@pytest.mark.usefixtures("generation")
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=NIGHTLY)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("d", [77, pytest.param(512, marks=NIGHTLY), pytest.param(1409, marks=NIGHTLY)])
def test_a_row_has_its_bits_alone(d: int, kind: tuple[bool, bool], threads: int) -> None:
    x, *how = _drawn(4000, d, kind[1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([kernels.row_norm(row, *how, centered=kind[0]) for row in x[:65].split(1)])
        for rows in (*range(1, 66), 4000):
            assert torch.equal(kernels.row_norm(x[:rows], *how, centered=kind[0])[:65], alone[:rows]), rows
        assert torch.equal(kernels.row_norm(x[:65].view(5, 13, d), *how, centered=kind[0]).view(65, d), alone)
    finally:
        torch.set_num_threads(before)


def test_values_are_those_of_torch() -> None:
    x, weight, bias = _drawn(9, 300, True)
    torch.testing.assert_close(
        kernels.row_norm(x, weight, bias, eps=1e-3, centered=True), layer_norm(x, (300,), weight, bias, 1e-3)
    )
    torch.testing.assert_close(kernels.row_norm(x, weight, eps=1e-3, centered=False), rms_norm(x, (300,), weight, 1e-3))
    for rows, d in ((0, 5), (3, 0)):
        assert kernels.row_norm(torch.ones(rows, d), torch.ones(d), centered=True).shape == (rows, d)


def test_values_that_are_not_finite_stay_in_their_row() -> None:
    x, weight, bias = _drawn(4, 77, True)
    x[0, 3], x[1, 5], x[2, 76] = math.inf, math.nan, 3e38
    got = kernels.row_norm(x, weight, bias, centered=True)
    assert got[:2].isnan().any(1).all() and got[3].isfinite().all()
    assert torch.equal(got[3:], kernels.row_norm(x[3:], weight, bias, centered=True))


@pytest.mark.parametrize("kind", [(True, True), (False, False)], ids=str)
def test_triton_has_the_bits_of_a_row_alone(kind: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, *how = _drawn(5, 77, kind[1])
    with kernels.implemented_by("triton"):  # whose interpreter rounds products, so that its bits are its own
        got = kernels.row_norm(x, *how, centered=kind[0])
        assert torch.equal(kernels.row_norm(x[2:3], *how, centered=kind[0]), got[2:3])
    torch.testing.assert_close(got, kernels.row_norm(x, *how, centered=kind[0]))


def test_a_mapped_dim_joins_the_rows_and_mapped_weights_get_a_call_each() -> None:
    x, weight, _ = _drawn(6, 5, False)
    weights = torch.stack([weight, 2 * weight])
    got = torch.func.vmap(lambda w: kernels.row_norm(x, w, centered=False))(weights)
    assert torch.equal(got, torch.stack([kernels.row_norm(x, w, centered=False) for w in weights]))
    got = torch.func.vmap(lambda x: kernels.row_norm(x, weight, centered=False))(x.view(2, 3, 5))
    assert torch.equal(got.view(6, 5), kernels.row_norm(x, weight, centered=False))


@pytest.mark.parametrize(
    "call, kind, said",
    [
        (
            lambda: kernels.row_norm(torch.ones(2).half(), torch.ones(2), centered=True),
            TypeError,
            "x must be float32 or float64, got torch.float16",
        ),
        (
            lambda: kernels.row_norm(torch.ones(2, 3), torch.ones(2), centered=True),
            ValueError,
            r"weight is of shape \(2,\), must be \(3,\)",
        ),
        (
            lambda: kernels.row_norm(torch.ones(3, requires_grad=True), torch.ones(3), centered=True).sum().backward(),
            NotImplementedError,
            r"row_norm has no derivative: use nn\.batch_invariant_rms_norm",
        ),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call()
