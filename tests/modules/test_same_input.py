"""Covers modules.SameInput and modules.InputUses: layers of one input have the bits that each has alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.kernels import pack_rows
from shardfn.modules import InputUses, PackedWeight, SameInput

NUMS = {"q": 70, "k": 3, "v": 64}


def _layers() -> tuple[dict[str, PackedWeight], dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    layers = {name: PackedWeight(pack_rows(torch.randn(n, 12, generator=draw)), n) for name, n in NUMS.items()}
    return layers, {name: torch.randn(n, generator=draw) for name, n in NUMS.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_layer_has_its_bits(dtype: torch.dtype) -> None:
    layers, biases = _layers()
    same, xs = SameInput(layers), torch.randn(2, 5, 12).to(dtype)
    for x in xs:
        for name in ("k", "q", "v"):
            assert torch.equal(same(name, x, biases[name]), layers[name](x, biases[name])), name
            assert same(name, x, None).dtype == dtype


def test_a_layer_that_is_left_out_or_asked_for_twice() -> None:
    layers, _ = _layers()
    same, (x, other) = SameInput(layers), torch.randn(2, 5, 12)
    assert torch.equal(same("q", x, None), layers["q"](x, None))
    assert torch.equal(same("k", other, None), layers["k"](other, None))
    assert torch.equal(same("k", other, None), layers["k"](other, None))
    assert torch.equal(same("v", x, None), layers["v"](x, None))


def test_layers_of_one_input_are_those_called_one_after_another() -> None:
    q, k, o = torch.randn(3, 4, 4)
    x = torch.randn(2, 4)
    uses = InputUses({"q": q, "k": k, "o": o})
    with uses:
        F.linear(F.linear(x, q) + F.linear(x, k), o)
        F.linear(x, torch.randn(4, 4))
    assert uses.groups == [["q", "k"], ["o"]]
