"""Layers against written-out references, values and gradients; dropout is invariant to the samples' distribution."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardfn import nn
from shardfn.core import fold_in, key, normal, split

F64 = torch.float64


def draws(*shapes, dtype=F64):
    return [normal(k, s, dtype=dtype).requires_grad_() for k, s in zip(split(key(0), len(shapes)), shapes, strict=True)]


def slow_attention(q_BTHK, k_BSGK, v_BSGK, causal=True, scale=None):
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (x.repeat_interleave(repeats, dim=2) for x in (k_BSGK, v_BSGK))
    scores_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) * (scale or q_BTHK.shape[-1] ** -0.5)
    if causal:
        future = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool).triu(1)
        scores_BHTS = scores_BHTS.masked_fill(future, -math.inf)
    return torch.einsum("bhts,bshk->bthk", scores_BHTS.softmax(-1), v_BSHK)


def slow_swiglu(x, w_gate, w_up, w_down):
    gate = x @ w_gate.T
    return (gate * gate.sigmoid() * (x @ w_up.T)) @ w_down.T


def slow_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slow_mlp(x, w_up, w_down, b_up, b_down):
    return slow_gelu(x @ w_up.T + b_up) @ w_down.T + b_down


def slow_layer_norm(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return w * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() + b


def slow_rope(x_BTHK, cos_TK, sin_TK):
    K = x_BTHK.shape[-1]
    pairs = torch.complex(x_BTHK[..., : K // 2], x_BTHK[..., K // 2 :])
    turned = pairs * torch.complex(cos_TK, sin_TK)[:, None, : K // 2]
    return torch.cat((turned.real, turned.imag), -1)


TABLE = nn.rope_table(torch.tensor([0, 1, 5]), 4, dtype=F64)
CASES: dict[str, Any] = {
    "linear": (nn.linear, lambda x, w, b: x @ w.T + b, [(2, 3, 4), (5, 4), (5,)]),
    "linear_no_bias": (nn.linear, lambda x, w: x @ w.T, [(3, 4), (5, 4)]),
    "layer_norm": (nn.layer_norm, slow_layer_norm, [(2, 3, 4), (4,), (4,)]),
    "rms_norm": (nn.rms_norm, lambda x, w: w * x / (x.square().mean(-1, True) + 1e-5).sqrt(), [(2, 3, 4), (4,)]),
    "rope": (lambda x: nn.rope(x, *TABLE), lambda x: slow_rope(x, *TABLE), [(2, 3, 2, 4)]),
    "attention": (nn.attention, slow_attention, [(2, 3, 2, 4)] * 3),
    "attention_gqa": (nn.attention, slow_attention, [(1, 3, 4, 2), (1, 3, 2, 2), (1, 3, 2, 2)]),
    "attention_mqa": (nn.attention, slow_attention, [(1, 3, 3, 2), (1, 3, 1, 2), (1, 3, 1, 2)]),
    "attention_full": (
        functools.partial(nn.attention, causal=False, scale=0.3),
        functools.partial(slow_attention, causal=False, scale=0.3),
        [(1, 3, 2, 2), (1, 5, 2, 2), (1, 5, 2, 2)],
    ),
    "mlp": (nn.mlp, slow_mlp, [(2, 3), (4, 3), (3, 4), (4,), (3,)]),
    "swiglu": (nn.swiglu, slow_swiglu, [(2, 3), (4, 3), (4, 3), (3, 4)]),
    "embedding": (
        lambda w: nn.embedding(torch.tensor([[0, 2, 2]]), w),
        lambda w: w[torch.tensor([[0, 2, 2]])],
        [(3, 4)],
    ),
    "cross_entropy": (
        lambda x: nn.cross_entropy(x, torch.tensor([[1, -100, 0]])),
        lambda x: (x.logsumexp(-1)[0, [0, 2]] - x[0, [0, 2], [1, 0]]).mean(),
        [(1, 3, 4)],
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(CASES)]
)
def test_layer_equals_reference_in_values_and_gradients(name):
    layer, reference, shapes = CASES[name]
    args = draws(*shapes)
    out, want = layer(*args), reference(*args)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    cotangent = normal(key(1), out.shape, dtype=F64)
    grads, wants = (torch.autograd.grad(y, args, cotangent) for y in (out, want))
    torch.testing.assert_close(grads, wants, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(layer, args)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(CASES)]
)
def test_layer_in_float32(name):
    layer, reference, shapes = CASES[name]
    if name == "rope":
        pytest.skip("its table is float64")
    args = draws(*shapes, dtype=torch.float32)
    assert layer(*args).dtype == torch.float32
    torch.testing.assert_close(layer(*args), reference(*args), rtol=1e-5, atol=1e-5)


def test_attention_refuses_arguments_that_do_not_fit():
    q, kv = torch.zeros(1, 3, 4, 2), torch.zeros(1, 3, 3, 2)
    with pytest.raises(ValueError, match="number of key heads must divide the number of query heads, got 3 and 4"):
        nn.attention(q, kv, kv)
    longer = torch.zeros(1, 5, 4, 2)
    with pytest.raises(ValueError, match="3 queries over 5 keys"):
        nn.attention(q, longer, longer)


def test_rope_scores_depend_on_distance_alone():
    q, k = (x.detach().expand(1, 6, 1, 8) for x in draws((1, 1, 1, 8), (1, 1, 1, 8)))
    cos, sin = nn.rope_table(torch.arange(6), 8, dtype=F64)
    scores = torch.einsum("bthk,bshk->ts", nn.rope(q, cos, sin), nn.rope(k, cos, sin))
    for d in range(-5, 6):
        line = scores.diagonal(d)
        torch.testing.assert_close(line, line[:1].expand_as(line))
    with pytest.raises(ValueError, match="head_dim=5"):
        nn.rope_table(torch.arange(2), 5)


def test_rope_table_is_llama_s():
    cos, sin = nn.rope_table(torch.tensor([3]), 4, base=100.0)
    want = torch.tensor([3.0, 0.3, 3.0, 0.3])
    torch.testing.assert_close(cos[0], want.cos())
    torch.testing.assert_close(sin[0], want.sin())


def test_cross_entropy_sum_and_count():
    logits, targets = normal(key(0), (2, 3, 5)), torch.tensor([[1, -1, 2], [-1, -1, 4]])
    total, count = nn.cross_entropy_sum(logits, targets, ignore_index=-1)
    assert count.item() == 3.0
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(total / count, want)
    torch.testing.assert_close(nn.cross_entropy(logits, targets, ignore_index=-1), want)


def test_cross_entropy_of_no_targets_is_zero_with_zero_gradient():
    logits = normal(key(0), (1, 2, 3)).requires_grad_()
    loss = nn.cross_entropy(logits, torch.full((1, 2), -100))
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0.0 and not grad.any()


def test_cross_entropy_of_bfloat16_is_summed_in_float32():
    logits = normal(key(0), (1, 50, 7)).bfloat16()
    total, count = nn.cross_entropy_sum(logits, torch.zeros(1, 50, dtype=torch.int64))
    assert total.dtype == count.dtype == torch.float32


@pytest.mark.parametrize(
    "shape",
    [
        (6,),
        pytest.param((6, 1), marks=pytest.mark.nightly),
        pytest.param((6, 5), marks=pytest.mark.nightly),
        (6, 3, 7),
        pytest.param((6, 0), marks=pytest.mark.nightly),
    ],
)
def test_dropout_is_the_same_bits_however_samples_are_dealt(shape):
    x, index_B = normal(key(1), shape), torch.tensor([4, 0, 9, 2**33, 7, 1])
    whole = nn.dropout(key(0), x, 0.3, index_B)
    for rows in (slice(0, 2), slice(2, 6), [5, 0, 3]):
        assert torch.equal(nn.dropout(key(0), x[rows], 0.3, index_B[rows]), whole[rows])


def test_dropout_keeps_the_mean_and_zeroes_the_rate():
    x = torch.ones(16, 5000)
    for rate in (0.1, 0.5, 0.9):
        y = nn.dropout(key(0), x, rate, torch.arange(16))
        assert abs((y == 0).float().mean().item() - rate) < 0.01
        torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - rate)), rtol=2e-4, atol=0)


def test_dropout_differs_between_keys_samples_and_positions():
    x = torch.ones(3, 4, 400)
    a, b = (nn.dropout(k, x, 0.5, torch.arange(3)) != 0 for k in (key(0), fold_in(key(0), 1)))
    for one, two in ((a, b), (a[0], a[1]), (a[0, 0], a[0, 1]), (a[0, 1], a[0, 2]), (a[0, 2], a[0, 3])):
        assert abs((one == two).float().mean().item() - 0.5) < 0.1


def test_dropout_gradient_uses_the_mask_and_rate_zero_is_the_identity():
    (x,) = draws((3, 8))
    assert nn.dropout(key(0), x, 0.0, torch.arange(3)) is x
    y = nn.dropout(key(0), x, 0.5, torch.arange(3))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, (y != 0) * 2.0)
    assert torch.autograd.gradcheck(lambda x: nn.dropout(key(0), x, 0.5, torch.arange(3)), [x])
    with pytest.raises(ValueError, match=r"rate=1\.0"):
        nn.dropout(key(0), x, 1.0, torch.arange(3))
