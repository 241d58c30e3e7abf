"""Covers the exact forms of functions: equal bits of a row in any company, and the values of torch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.kernels import pack_rows
from shardfn.modules import ExactRows, PackedWeight, WeightUses
from shardfn.testing import RTOL

WIDTH = 37
WEIGHT, BIAS = torch.linspace(0.5, 1.5, WIDTH), torch.linspace(-1, 1, WIDTH)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x.clone(), inplace=True),
    "sigmoid": torch.sigmoid,
    "sigmoid of a tensor": lambda x: x.sigmoid(),
    "gelu": F.gelu,
    "gelu with tanh": lambda x: F.gelu(x, approximate="tanh"),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), WEIGHT, BIAS, 1e-5),
    "layer_norm without weights": lambda x: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), WEIGHT),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_rows_have_the_bits_that_they_have_alone(name: str) -> None:
    f, x = FUNCTIONS[name], torch.randn(21, WIDTH, generator=torch.Generator().manual_seed(0)) * 3
    with ExactRows({}):
        whole = f(x)
        for num in (1, 2, 7, 16, 21):
            assert torch.equal(f(x[:num]), whole[:num])
    torch.testing.assert_close(whole, f(x), rtol=RTOL[torch.float32], atol=1e-6)
    with ExactRows({}):
        assert f(x.double()[:2]).dtype == torch.float64


@pytest.mark.parametrize("transposed", [False, True])
def test_linear_layers_read_packed_weights(transposed: bool) -> None:
    x, weight = torch.randn(16, WIDTH), torch.randn(5, WIDTH)
    bias, given = torch.randn(5), weight.T.contiguous() if transposed else weight

    def layer(x: Tensor) -> Tensor:
        return torch.addmm(bias, x, given) if transposed else F.linear(x, given, bias=bias)

    uses = WeightUses({"w": given, "b": bias})
    with uses:
        want = layer(x)
    assert uses.linear == {"w": transposed} and uses.others == {"b"} and not uses.products
    with ExactRows({id(given): PackedWeight(pack_rows(weight), 5)}):
        whole = layer(x)
        assert all(torch.equal(layer(x[i : i + 1]), whole[i : i + 1]) for i in range(16))
        scaled = torch.addmm(bias, x, weight.T, beta=0.5)
    torch.testing.assert_close(whole, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(scaled, torch.addmm(bias, x, weight.T, beta=0.5))


def test_other_products_and_other_uses_of_a_weight_are_seen() -> None:
    weight = torch.randn(5, WIDTH)
    uses = WeightUses({"w": weight})
    with uses:
        F.linear(torch.randn(2, WIDTH), weight)
        assert weight.dtype == torch.float32 and not uses.others
        F.embedding(torch.tensor([1]), weight)
        _ = torch.randn(2, WIDTH) @ torch.randn(WIDTH, 2)
    assert uses.linear == {"w": False} and uses.others == {"w"} and len(uses.products) == 1
