"""Covers kernels.gated_silu, gated_sigmoid and gelu: bits of the definition on every processor, those of a row alone.

And the gradient of the first, with the bits of torch's operations.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from shardfn import kernels, nn
from shardfn.kernels import _build
from shardfn.kernels._fixed_bits import exponential

NIGHTLY = pytest.mark.nightly
WIDTHS = [77, pytest.param(512, marks=NIGHTLY), pytest.param(1409, marks=NIGHTLY)]
ODD = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e30, -1e30, 88.7, 88.73, 89.5, -87.0, -87.1, 1e-40])


def _of(name: str, x: Tensor) -> Tensor:
    return kernels.gelu(x) if name == "gelu" else getattr(kernels, name)(x, x.cos().nan_to_num() + 2)


def _drawn(*shape: int) -> Tensor:
    return 20 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dim", [14, 70, 128])
def test_a_rotation_on_every_processor(generation: int, dim: int) -> None:
    x, (cos, sin) = _drawn(9, 3, dim), nn.rope_table(torch.arange(9) * 37, dim)
    assert torch.equal(kernels.rotate(x, cos, sin), nn.rope(x[None], cos, sin)[0])


@pytest.mark.parametrize("kind", ["native", "reference", "triton"])
def test_a_rotation_has_the_bits_of_rope(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, (cos, sin) = _drawn(9, 3, 14), nn.rope_table(torch.arange(9) * 37, 14)
    with kernels.implemented_by(kind if kind != "native" or _build.library() else "reference"):
        assert torch.equal(kernels.rotate(x, cos, sin), nn.rope(x[None], cos, sin)[0])
        assert torch.equal(kernels.rotate(x[::2], cos[::2], sin[::2]), nn.rope(x[None], cos, sin)[0, ::2])
        assert kernels.rotate(x[:0], cos[:0], sin[:0]).shape == (0, 3, 14)
    with pytest.raises(ValueError, match="K must be even"):
        kernels.rotate(x[..., :13], cos[:, :13], sin[:, :13])


def test_the_exponential_is_within_a_unit() -> None:
    x = torch.linspace(-87, 0, 40001)
    exact = x.double().exp()
    assert ((exponential(x) - exact).abs() <= 2**-23 * exact).all()
    assert exponential(torch.tensor([-87.1, -math.inf, -0.0])).tolist() == [0, 0, 1]
    assert exponential(torch.tensor([math.nan])).isnan().all()


@pytest.mark.usefixtures("generation")
@pytest.mark.parametrize("name", ["gated_silu", "gated_sigmoid", "gelu"])
def test_every_processor_has_the_bits_of_the_definition(name: str) -> None:
    x = torch.cat([_drawn(9001), ODD])
    got = _of(name, x)
    with kernels.implemented_by("reference"):
        want = _of(name, x)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int32)[~got.isnan()], want.view(torch.int32)[~got.isnan()])
    assert got.isnan().sum() == 2 - (name == "gated_sigmoid")  # of NaN, and of x = -inf times 0, as torch's


@pytest.mark.day("x86-64-v4-gated_silu-77-1", "x86-64-v3-gelu-77-1")
@pytest.mark.usefixtures("generation")
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=NIGHTLY)])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["gated_silu", pytest.param("gated_sigmoid", marks=NIGHTLY), "gelu"])
def test_a_row_has_its_bits_alone(name: str, width: int, threads: int) -> None:
    x = _drawn(2000, width)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([_of(name, row) for row in x[:65].split(1)])
        for rows in range(1, 66):
            assert torch.equal(_of(name, x[:rows]), alone[:rows]), rows
        assert torch.equal(_of(name, x)[:65], alone)
    finally:
        torch.set_num_threads(before)


def test_values_are_those_of_torch() -> None:
    x = _drawn(3, 500)
    torch.testing.assert_close(kernels.gelu(x), gelu(x, approximate="tanh"))
    torch.testing.assert_close(kernels.gated_silu(x, x.sin()), silu(x) * x.sin())
    torch.testing.assert_close(kernels.gated_sigmoid(x, x.sin()), x.sigmoid() * x.sin())
    assert kernels.gelu(x[:0]).shape == (0, 500)


@pytest.mark.day("gated_silu")
@pytest.mark.parametrize("name", ["gated_silu", pytest.param("gated_sigmoid", marks=NIGHTLY), "gelu"])
def test_triton_has_the_bits_of_a_row_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = _drawn(19, 70)
    # The interpreter rounds products, so that its bits are its own; infinities warn there.
    with kernels.implemented_by("triton"), np.errstate(all="ignore"):
        got = _of(name, x)
        assert torch.equal(torch.cat([_of(name, row) for row in x.split(1)]), got)
    torch.testing.assert_close(got, _of(name, x), rtol=1e-5, atol=1e-5)


def test_results_have_the_dtype_and_strides_of_their_abstract_values() -> None:
    x = torch.randn(6, 13)[:, :1]  # of strides (13, 1), and contiguous all the same
    results = [
        lambda x: kernels.gelu(x),
        lambda x: kernels.gated_silu(x, x),
        lambda x: kernels.rotate(x.expand(6, 2)[:, None].contiguous(), x.expand(6, 2), x.expand(6, 2)),
        lambda x: kernels.row_norm(x, x[0], None, centered=False),
    ]
    before = [call(x) for call in results]
    torch.set_default_dtype(torch.float64)
    try:
        after = [call(x) for call in results]
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(before, after, strict=True):
        assert other.dtype == torch.float32 and torch.equal(one, other)
        assert one.stride() == torch.empty(one.shape).stride()


def test_a_mapped_dim_joins_the_rows() -> None:
    x, up = _drawn(4, 3, 5), _drawn(3, 5)
    got = torch.func.vmap(kernels.gated_silu, in_dims=(1, None))(x.movedim(0, 1), up)
    assert torch.equal(got, kernels.gated_silu(x, up.expand_as(x)))


@pytest.mark.parametrize(
    "call, kind, said",
    [
        (lambda: kernels.gelu(torch.ones(2).half()), TypeError, "x must be float32 or float64, got torch.float16"),
        (lambda: kernels.gated_silu(torch.ones(2), torch.ones(2).half()), TypeError, "up is torch.float16"),
        (
            lambda: kernels.gated_silu(torch.ones(2), torch.ones(1)),
            ValueError,
            r"up is of shape \(1,\), must be \(2,\)",
        ),
        (
            lambda: kernels.gelu(torch.ones(2, requires_grad=True)).sum().backward(),
            NotImplementedError,
            r"gelu has no derivative: use nn\.mlp",
        ),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(7, 5), (40, 1021), (0, 3), (2, 3, 16)])
def test_the_gradient_of_gated_silu_has_the_bits_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, dy = _drawn(*shape[:-1], 2 * shape[-1]).to(dtype) / 8, _drawn(*shape).to(dtype) / 8
    gate, up = x.chunk(2, -1)
    wanted = torch.cat([torch.ops.aten.silu_backward(dy * up, gate), dy * silu(gate)], -1)
    assert torch.equal(kernels.gated_silu_gradient(x, dy), wanted)
    over = torch.ops.shardfn_kernels.gated_silu_gradient_(x, dy)
    assert over.data_ptr() == x.data_ptr()
    assert torch.equal(x, wanted)


def test_the_gradient_of_gated_silu_refuses_operands_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match="dy"):
        kernels.gated_silu_gradient(torch.ones(2, 4), torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="half a row of x"):
        kernels.gated_silu_gradient(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match="must be even"):
        kernels.gated_silu_gradient(torch.ones(2, 3), torch.ones(2, 1))
