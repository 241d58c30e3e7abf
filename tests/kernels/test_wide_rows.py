"""Exact rows in float64: near torch's numbers, the same bits beside any other rows, and no mixture with float32."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn import kernels
from shardfn.kernels._fixed_bits import exponential
from shardfn.kernels._ragged_attention import tanh

F64 = torch.float64
ROWS, WIDTH, OUTPUTS, VOCAB = 21, 37, 70, 83
# Numbers of rows that torch's own products treat differently.
PARTS = (1, 2, 5, 16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


X, W, BIAS = normal(ROWS, WIDTH), normal(OUTPUTS, WIDTH, seed=1), normal(OUTPUTS, seed=2)
SCALE, SHIFT = normal(WIDTH, seed=3), normal(WIDTH, seed=4)
LOGITS = 4 * normal(ROWS, VOCAB, seed=5)
LOGITS[:, 7] = -math.inf


def drawn(x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    uniform = (x[:, 0].abs() * 1000) % 1
    same = torch.full_like(uniform, 1.0)
    how = {"temperature": same * 0.8, "top_k": same.long() * 40, "top_p": same * 0.9, "min_p": same * 0.001}
    return kernels.draw(x, uniform, **how, targets=targets)


def penalised(x: Tensor) -> Tensor:
    history = torch.arange(12, dtype=torch.int32).expand(len(x), 12)
    prompts, one = torch.full((len(x),), 5, dtype=torch.int32), torch.ones(len(x), dtype=F64)
    return kernels.penalise(x, history, prompts, repetition=one * 1.3, presence=one * 0.2, frequency=one * 0.1)


def rotated(x: Tensor) -> Tensor:
    angles = x[:, 1:33].sum(1, keepdim=True).expand(-1, 4)
    return kernels.rotate(x[:, :32].unflatten(1, (8, 4)), angles.cos(), angles.sin())


def grouped(x: Tensor) -> Tensor:
    return kernels.grouped_product(x, W[None], torch.tensor([len(x)]), transposed=True, batch_invariant=True)


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * SCALE


# By name: the kernel, torch's expression for it.
KERNELS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "row_linear": (
        lambda x: kernels.row_linear(x, kernels.pack_rows(W), OUTPUTS, bias=BIAS),
        lambda x: F.linear(x, W, BIAS),
    ),
    "row_linear in chunks": (
        lambda x: kernels.row_linear(x, kernels.pack_rows(W), OUTPUTS, chunks=3),
        lambda x: F.linear(x, W),
    ),
    "row_linears": (
        lambda x: torch.cat(kernels.row_linears(x, [kernels.pack_rows(w) for w in (W, W[:3])], [OUTPUTS, 3]), 1),
        lambda x: F.linear(x, torch.cat([W, W[:3]])),
    ),
    "grouped_product": (grouped, lambda x: F.linear(x, W)),
    "layer norm": (
        lambda x: kernels.row_norm(x, SCALE, SHIFT, centered=True),
        lambda x: F.layer_norm(x, (WIDTH,), SCALE, SHIFT),
    ),
    "rms norm": (lambda x: kernels.row_norm(x, SCALE, centered=False), rms),
    "gated_silu": (lambda x: kernels.gated_silu(x, x.flip(1)), lambda x: F.silu(x) * x.flip(1)),
    "gelu": (kernels.gelu, lambda x: F.gelu(x, approximate="tanh")),
    "rotate": (rotated, lambda x: None),
    "draw": (lambda x: drawn(torch.cat([x, -x], 1))[1], lambda x: None),
    "penalise": (penalised, lambda x: None),
}


@pytest.mark.parametrize("name", KERNELS)
def test_rows_are_near_torch_and_have_the_same_bits_beside_any_others(name: str) -> None:
    run, of_torch = KERNELS[name]
    whole, wanted = run(X), of_torch(X)
    assert whole.dtype == F64
    if wanted is not None:
        torch.testing.assert_close(whole, wanted, rtol=1e-13, atol=1e-13)
    for size in PARTS:
        assert torch.equal(torch.cat([run(part) for part in X.split(size)]), whole), size


def test_drawn_tokens_and_log_probabilities_are_functions_of_their_row() -> None:
    tokens, logprobs = drawn(LOGITS)
    wanted = LOGITS.log_softmax(-1)
    torch.testing.assert_close(logprobs, wanted.gather(1, tokens[:, None])[:, 0], rtol=1e-14, atol=1e-14)
    assert len(set(tokens.tolist())) > 5 and not torch.equal(logprobs, logprobs.float().double())
    alone = [drawn(row[None]) for row in LOGITS.unbind()]
    assert torch.equal(torch.cat([x for x, _ in alone]), tokens)
    assert torch.equal(torch.cat([x for _, x in alone]), logprobs)
    assert torch.equal(drawn(LOGITS, targets=tokens)[1], logprobs)
    top, their = kernels.top_logprobs(LOGITS, 4)
    torch.testing.assert_close(their, wanted.sort(descending=True).values[:, :4], rtol=1e-14, atol=1e-14)
    assert torch.equal(drawn(LOGITS, targets=top[:, 2].contiguous())[1], their[:, 2])
    # Float64 distinguishes logits that are one number in float32.
    near = torch.tensor([[0.0, 1e-12]], dtype=F64)
    zero = torch.zeros(1, dtype=F64)
    greedy = {"temperature": zero, "top_k": zero.long(), "top_p": zero + 1, "min_p": zero}
    assert kernels.draw(near, zero, **greedy)[0].tolist() == [1]


@pytest.mark.parametrize("how", [{}, {"window": 9}, {"softcap": 3.0}, {"slopes": True, "sinks": True}], ids=str)
def test_attention_is_near_torch_and_has_the_bits_of_any_other_cut(how: dict[str, Any]) -> None:
    T, H, G, K, block = 45, 4, 2, 10, 8
    q, k, v = (normal(T, heads, K, seed=i) for i, heads in enumerate((H, G, G)))
    slopes, sinks = (normal(H, seed=9).abs(), normal(H, seed=8)) if "slopes" in how else (None, None)
    how = {"window": how.get("window"), "softcap": how.get("softcap"), "slopes": slopes, "sinks": sinks}
    tables = torch.randperm(8, generator=torch.Generator().manual_seed(1))[None].int()
    found = []
    for size in (T, 1, 7):
        cache, parts = torch.zeros(8, 2, G, block, K, dtype=F64), []
        for at in torch.arange(T, dtype=torch.int32).split(size):
            slots = (tables[0, at // block] * block + at % block).int()
            rows = slice(int(at[0]), int(at[-1]) + 1)
            zeros = torch.zeros_like(at)
            parts.append(kernels.ragged_attention(q[rows], k[rows], v[rows], cache, slots, at, zeros, tables, **how)[0])
        found.append(torch.cat(parts))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    wide_k, wide_v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    scores = torch.einsum("thk,shk->hts", q, wide_k) * K**-0.5
    scores = scores if how["softcap"] is None else 3 * (scores / 3).tanh()
    apart = torch.arange(T)[:, None] - torch.arange(T)
    scores = scores if slopes is None else scores - slopes[:, None, None] * apart
    scores = scores.masked_fill((apart < 0) | (apart >= (how["window"] or T)), -math.inf)
    weights = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(H, T, 1)], 2)
    wanted = torch.einsum("hts,shk->thk", weights.softmax(-1)[..., :T], wide_v)
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-13)


def test_exponentials_and_tangents_are_those_of_float64() -> None:
    x = -torch.logspace(-18, 2.84, 4001, dtype=F64)
    torch.testing.assert_close(exponential(x), x.exp(), rtol=4.5e-16, atol=0)
    assert exponential(torch.tensor([-709.0, -math.inf, math.nan], dtype=F64)).nan_to_num(2.0).tolist() == [0, 0, 2]
    y = torch.cat([x, -x])
    torch.testing.assert_close(tanh(y), y.tanh(), rtol=1e-15, atol=0)
    assert tanh(torch.tensor(math.nan, dtype=F64)).isnan()


def test_roots_of_norms_are_the_numbers_next_to_the_true_ones() -> None:
    x = normal(4000, 1).abs()
    y = kernels.row_norm(x, torch.ones(1, dtype=F64), eps=0.0, centered=False)
    assert torch.equal(y, torch.tensor([[a * (1 / math.sqrt(a * a))] for a in x[:, 0].tolist()], dtype=F64))


def test_a_mixture_with_float32_is_refused() -> None:
    panels, at = kernels.pack_rows(W), torch.zeros(1, dtype=torch.int32)
    q, cache = torch.zeros(1, 1, 4, dtype=F64), torch.zeros(2, 2, 1, 8, 4)
    for call, words in (
        (lambda: kernels.row_linear(X.float(), panels, OUTPUTS), "got x of torch.float32 and packed of torch.float64"),
        (
            lambda: kernels.row_linear(X, kernels.pack_rows(W.float()), OUTPUTS),
            "got x of torch.float64 and packed of torch.float32",
        ),
        (
            lambda: kernels.row_linear(X, panels, OUTPUTS, bias=BIAS.float()),
            "bias is torch.float32, must be torch.float64",
        ),
        (
            lambda: kernels.pack_rows(W, "int8"),
            "weight is torch.float64, with quantization='int8', .*pass weight.float",
        ),
        (lambda: kernels.row_norm(X, SCALE.float(), centered=False), "weight is torch.float32, must be torch.float64"),
        (lambda: kernels.gated_silu(X, X.float()), "up is torch.float32, must be torch.float64"),
        (lambda: kernels.gelu(X.half()), "x must be float32 or float64, got torch.float16"),
        (
            lambda: kernels.ragged_attention(q, q, q, cache, at, at, at, at[None]),
            "cache must be one of torch.float64 for q of torch.float64, got torch.float32",
        ),
        (
            lambda: kernels.ragged_attention(q.float(), q.float(), q.float(), cache.double(), at, at, at, at[None]),
            "cache must be one of torch.float32, torch.bfloat16, .*for q of torch.float32, got torch.float64",
        ),
    ):
        with pytest.raises(TypeError, match=words):
            call()
