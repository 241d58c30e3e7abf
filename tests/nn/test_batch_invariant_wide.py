"""Covers exact layers in float64: a row has the bits that it has alone, and derivatives are those of differences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import nn

F64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return nn.linear(x, nn.BatchInvariantWeight.of(w), b)


def mlp(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return nn.mlp(x, nn.BatchInvariantWeight.of(w), nn.BatchInvariantWeight.of(w.mT), b, x[0])


def swiglu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return nn.swiglu(
        x + b[:1], nn.BatchInvariantWeight.of(w), nn.BatchInvariantWeight.of(2 * w), nn.BatchInvariantWeight.of(w.mT)
    )


LAYERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": linear,
    "mlp": mlp,
    "swiglu": swiglu,
    "layer_norm": lambda x, w, b: nn.batch_invariant_layer_norm(x, w[0], w[1]) + b[:1],
    "rms_norm": lambda x, w, b: nn.batch_invariant_rms_norm(x, w[0]) + b[:1],
    "softmax": lambda x, w, b: nn.batch_invariant_softmax(x * w[0] + b[:1]),
    "sigmoid": lambda x, w, b: nn.batch_invariant_sigmoid(x * w[0] + b[:1]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_has_its_bits_alone(name: str) -> None:
    layer, x, w, b = LAYERS[name], drawn(33, 77, seed=5), drawn(41, 77, seed=1) / 8, drawn(41, seed=2)
    if name == "mlp":  # its second bias is the first row of x
        own, b_down = layer, x[:1].clone()
        layer = lambda x, w, b: own(torch.cat([b_down, x]), w, b)[1:]  # noqa: E731
    whole = layer(x, w, b)
    assert whole.dtype == F64 and not torch.equal(whole, whole.float().double())
    for size in (1, 2, 16, 19):
        assert torch.equal(torch.cat([layer(part, w, b) for part in x.split(size)]), whole), size


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_are_those_of_differences(name: str) -> None:
    args = [x.requires_grad_() for x in (drawn(2, 3), drawn(3, 3, seed=1), drawn(3, seed=2))]
    assert torch.autograd.gradcheck(LAYERS[name], args, atol=1e-8, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(LAYERS[name], args, atol=1e-7, fast_mode=True)


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": nn.Window(3)},
    "alibi": {"slopes_H": torch.tensor([0.5, 0.25], dtype=F64)},
    "sinks": {"sinks_H": torch.tensor([0.3, -1.0], dtype=F64)},
}


@pytest.mark.parametrize("name", HOW)
def test_attention_has_both(name: str) -> None:
    how: dict[str, Any] = {"mask": nn.Causal(), **HOW[name]}
    q, k, v = drawn(2, 9, 2, 4), drawn(2, 9, 1, 4, seed=1), drawn(2, 9, 1, 4, seed=2)

    def attended(q: Tensor, k: Tensor, v: Tensor, impl: nn.AttentionBackend) -> Tensor:
        return nn.attention(q, k, v, **how, impl=impl)

    whole = attended(q, k, v, nn.BatchInvariant())
    torch.testing.assert_close(whole, attended(q, k, v, nn.Dense()), rtol=1e-12, atol=1e-13)
    for t in (1, 5, 8):
        assert torch.equal(attended(q[1:, :t], k[1:, :t], v[1:, :t], nn.BatchInvariant()), whole[1:, :t])
    leaves = [x[:1, :3].clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: attended(q, k, v, nn.BatchInvariant()), leaves, atol=1e-8)


@pytest.mark.parametrize("base", [10000.0, 5e5])
def test_rotations_are_those_of_torch(base: float) -> None:
    at = torch.tensor([0, 1, 7, 1000, 131071])
    found, wanted = (
        nn.batch_invariant_rope_table(at, 16, base=base, dtype=F64),
        nn.rope_table(at, 16, base=base, dtype=F64),
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)  # 131071 times half a unit of 1 is 1.5e-11
    assert torch.equal(found[0][3:4], nn.batch_invariant_rope_table(at[3:4], 16, base=base, dtype=F64)[0])
