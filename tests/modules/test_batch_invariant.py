"""Covers the exact forms of functions: equal bits of a row in any company, and the values of torch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn import P, make_mesh, shard_map
from shardfn.collectives import take_own_block
from shardfn.kernels import pack_rows
from shardfn.modules import ExactRows, PackedWeight, RowEdge, WeightUses
from shardfn.modules._batch_invariant import grouped_rows
from shardfn.testing import RTOL, distributed

WIDTH = 37
WEIGHT, BIAS = torch.linspace(0.5, 1.5, WIDTH), torch.linspace(-1, 1, WIDTH)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x.clone(), inplace=True),
    "sigmoid": torch.sigmoid,
    "sigmoid of a tensor": lambda x: x.sigmoid(),
    "softmax": lambda x: F.softmax(x, dim=-1),
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


def test_rows_of_experts_have_the_bits_that_they_have_alone() -> None:
    x, w = torch.randn(7, WIDTH), torch.randn(3, WIDTH, 5)
    counts, want = torch.tensor([2, 0, 5]), torch.cat([x[:2] @ w[0], x[2:] @ w[2]])
    torch.testing.assert_close(grouped_rows(x, w, counts, False), want, rtol=1e-5, atol=1e-5)
    with ExactRows({}):
        whole = grouped_rows(x, w.mT.contiguous(), counts, True)
        assert torch.equal(grouped_rows(x[4:5], w, torch.tensor([0, 0, 1]), False), whole[4:5])
        assert grouped_rows(x.bfloat16(), w.bfloat16(), counts, False).dtype == torch.bfloat16
    torch.testing.assert_close(whole, want, rtol=1e-5, atol=1e-5)
    uses = WeightUses({"w": w})
    with uses:
        grouped_rows(x, w, counts, False)
    assert uses.others == {"w"} and not uses.products


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


@pytest.mark.day("2-5")
@pytest.mark.parametrize("num", [1, 5, 130])
@distributed(world=[2, 3])
def test_ranks_that_cut_outputs_have_the_bits_of_one(world: int, num: int) -> None:
    mesh, draw = make_mesh({"tp": world}), torch.Generator().manual_seed(0)
    x, bias = torch.randn(7, WIDTH, generator=draw), torch.randn(num, generator=draw)
    up, down = torch.randn(num, WIDTH, generator=draw), torch.randn(WIDTH, num, generator=draw)
    whole = PackedWeight(pack_rows(up), num)(x, bias)

    def cut(weight: Tensor, edge: RowEdge) -> PackedWeight:
        return PackedWeight(pack_rows(take_own_block(weight, "tp")), weight.shape[0], "tp", edge)

    def layers(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = cut(up, RowEdge.ENTER)(x, bias)
        return cut(up, RowEdge.WHOLE)(x, bias), cut(down, RowEdge.LEAVE)(inner, None)

    joined, left = shard_map(layers, mesh=mesh, in_specs=(P(),), out_specs=(P(), P()))(x)
    assert torch.equal(joined, whole)
    assert torch.equal(left, PackedWeight(pack_rows(down), WIDTH)(whole, None))
