"""Covers multi-modal causal attention: values and gradients of two masked softmaxes, on one rank and on many."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import core, nn
from shardfn.collectives import bind_mesh
from shardfn.testing import distributed

BODIES = [nn.Dense(), nn.Blockwise(3), nn.BlockSparse(4), nn.Chunked(4), nn.BatchInvariant()]
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def plain(qkv: list[Tensor], images: Tensor, *, code_rule: bool, back: int | None = None, cap: float | None = None):
    """The definition: a dense matrix of weights, row by row the sum of two softmaxes over the keys of a kind."""
    q, k, v = qkv
    T, H, K = q.shape[1:]
    k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)
    s = s if cap is None else cap * torch.tanh(s / cap)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance <= (T if back is None else back))
    key, row = images[:, None, None], images[:, None, :, None]
    text = seen & ~key & (torch.ones_like(row) if code_rule else ~row)
    image = torch.where(row, torch.eye(T, dtype=torch.bool), seen & key)
    weights = torch.zeros_like(s)
    for kind in (text, image):
        some = kind.any(-1, keepdim=True)
        p = s.masked_fill(~(kind | ~some), -math.inf).softmax(-1)
        weights = weights + p * (kind & some)
    return torch.einsum("bhts,bshk->bthk", weights, v)


def case(T: int, seed: int, groups: int = 2) -> tuple[list[Tensor], Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(3, T, n, 5, generator=draw, dtype=torch.float64) for n in (4, groups, groups)]
    images = torch.rand(3, T, generator=draw) < 0.4
    images[0], images[1, :2] = False, True
    return qkv, torch.randn(3, T, 4, 5, generator=draw, dtype=torch.float64), images


def differentiated(f: Any, qkv: list[Tensor], w: Tensor) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in qkv]
    y = f(*inputs)
    return [y, *torch.autograd.grad((y * w).sum(), inputs)]


@pytest.mark.parametrize("code_rule", [False, True])
@pytest.mark.parametrize("impl", BODIES, ids=str)
def test_equals_two_masked_softmaxes(impl: Any, code_rule: bool) -> None:
    for seed, (T, back, cap) in enumerate([(9, None, None), (1, None, None), (10, 3, None), (7, None, 0.7)]):
        if cap is not None and isinstance(impl, nn.BlockSparse):
            continue
        qkv, w, images = case(T, seed, groups=1 + seed % 2)
        mask = nn.Causal() if back is None else nn.Window(back)

        def attend(*x: Tensor, images: Tensor = images, mask: nn.Mask = mask, cap: float | None = cap) -> Tensor:
            return nn.multimodal_attention(*x, images_BT=images, code_rule=code_rule, mask=mask, softcap=cap, impl=impl)

        def define(*x: Tensor, images: Tensor = images, back: int | None = back, cap: float | None = cap) -> Tensor:
            return plain(list(x), images, code_rule=code_rule, back=back, cap=cap)

        for got, want in zip(differentiated(attend, qkv, w), differentiated(define, qkv, w), strict=True):
            close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", BODIES, ids=str)
def test_rows_without_images_have_the_bits_of_causal_attention(impl: Any, dtype: torch.dtype) -> None:
    if isinstance(impl, nn.BatchInvariant) and dtype != torch.float32:
        return
    qkv, w, images = case(70, 0)
    qkv, w = [x.to(dtype) for x in qkv], w.to(dtype)
    slopes = torch.tensor(nn.alibi_slopes(4))
    for options in ({}, {"slopes_H": slopes}, {"mask": nn.Window(9)}):
        got = differentiated(
            lambda *x, o=options: nn.multimodal_attention(*x, images_BT=images, impl=impl, **o), qkv, w
        )
        want = differentiated(lambda *x, o=options: nn.attention(*x, impl=impl, **o), qkv, w)
        assert torch.equal(got[0][0], want[0][0])  # images[0] has no image
        for a, b in zip(got[1:], want[1:], strict=True):
            close(a[0].double(), b[0].double(), rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_image_rows_reach_only_themselves() -> None:
    qkv, w, images = case(9, 3)
    w = w * images[..., None, None]
    y, *grads = differentiated(lambda *x: nn.multimodal_attention(*x, images_BT=images), qkv, w)
    assert torch.equal(y[images], qkv[2].repeat_interleave(2, 2)[images])
    assert not grads[0].any()
    assert not grads[1].any()
    close(grads[2], w.unflatten(2, (2, 2)).sum(3))


def test_packed_samples_equal_separate_samples() -> None:
    qkv, _, images = case(9, 4)
    ids = torch.tensor([[0] * 4 + [1] * 5] * 3)
    got = nn.multimodal_attention(*qkv, images_BT=images, mask=nn.Causal() & nn.Segments(ids))
    for part in (slice(4), slice(4, 9)):
        own = [x[:, part] for x in qkv]
        close(got[:, part], nn.multimodal_attention(*own, images_BT=images[:, part]))


def check_ranks(mesh: sf.Mesh, T: int, bodies: Any) -> None:
    torch.set_num_threads(1)
    for seed, code_rule in enumerate((False, True)):
        qkv, w, images = case(T, seed)
        want = differentiated(lambda *x, c=code_rule, m=images: plain(list(x), m, code_rule=c), qkv, w)
        for impl in bodies:
            with bind_mesh(mesh):
                at = nn.MultimodalCausal(images, impl).rows(T)
                at = torch.cat([torch.arange(a, b) for a, b in (*at, (0, 0))])
                own = [x[:, at] for x in qkv]
                attend = functools.partial(nn.multimodal_attention, impl=impl, code_rule=code_rule)
                got = differentiated(lambda *x, f=attend, m=images: f(*x, images_BT=m), own, w[:, at])
            for a, b in zip(got, want, strict=True):
                close(a, b[:, at])


@distributed(world=2)
def test_sequence_parallelism_equals_one_device() -> None:
    T = 9
    bodies = (
        nn.Ulysses("sp", T),
        nn.Ulysses("sp", T, nn.Blockwise(3)),
        nn.Ring("sp", T, zigzag=True, block=2),
        nn.Chunked(4, "sp", T),
    )
    check_ranks(sf.make_mesh({"sp": 2}), T, bodies)


@pytest.mark.nightly
@distributed(world=4)
def test_ulysses_over_a_ring_equals_one_device() -> None:
    T = 11
    bodies = (nn.Ulysses("u", T, nn.Ring("r", zigzag=True, block=2)), nn.Ulysses(("r", "u"), T), nn.Ring(("r", "u"), T))
    check_ranks(sf.make_mesh({"r": 2, "u": 2}), T, bodies)


def test_mistakes() -> None:
    qkv, _, images = case(6, 0)
    with pytest.raises(ValueError, match=r"images_BT must be \(3, 6\).* got \(3, 5\)"):
        nn.multimodal_attention(*qkv, images_BT=images[:, :5])
    with pytest.raises(ValueError, match="must have the weight 1 of itself, got sinks"):
        nn.multimodal_attention(*qkv, images_BT=images, sinks_H=torch.zeros(4, dtype=torch.float64))
    drops = nn.Causal() & nn.PairDropout(core.key(0), 0.5, torch.arange(3))
    with pytest.raises(ValueError, match="got PairDropout"):
        nn.multimodal_attention(*qkv, images_BT=images, mask=drops)
    with pytest.raises(ValueError, match=r"the mask must look back, got Full\(\)"):
        nn.multimodal_attention(*qkv, images_BT=images, mask=nn.Full())
