"""Covers the block-sparse body: layouts against dense attention, transforms, capture, computed tiles and refusals."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfn as sf
from shardfn import nn
from shardfn.graph import cost_analysis
from shardfn.nn import _rectangles, layouts

RANDOM: Any = {"random": (1, sf.key(0)), "num_heads": 4}
WAYS = ("bidirectional", "unidirectional")
PATTERNS: list[Any] = [
    layouts.dense,
    *(functools.partial(layouts.fixed, attention=way, num_local_blocks=2) for way in (*WAYS, "horizontal")),
    *(functools.partial(layouts.variable, attention=way, **RANDOM) for way in (*WAYS, "horizontal")),
    *(functools.partial(layouts.bigbird, attention=way, **RANDOM) for way in WAYS),
    *(functools.partial(layouts.bslongformer, attention=way) for way in WAYS),
    *(functools.partial(layouts.local_window, attention=way) for way in WAYS),
]


def gradients(impl: Any, qkv: list[Tensor], w: Tensor, **options: Any) -> list[Tensor]:
    own = [x.clone().requires_grad_() for x in qkv]
    y = nn.attention(*own, impl=impl, **options)
    return [y.detach(), *torch.autograd.grad((y * w).sum(), own)]


@pytest.mark.day("0", "12")
@pytest.mark.parametrize(
    "which", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(range(len(PATTERNS)))]
)
def test_every_layout_is_dense_attention_with_its_mask(which: int) -> None:
    """Also for lengths that blocks do not divide, where the last block is shorter."""
    g = torch.Generator().manual_seed(which)
    for T, block in ((75, 16), (128, 32)):
        qkv = [torch.randn(2, T, n, 8, generator=g) for n in (4, 2, 2)]
        w = torch.randn(2, T, 4, 8, generator=g)
        layout = PATTERNS[which](T, block=block, padded=True)
        for mask in (layout, nn.Causal() & layout):
            want = gradients(nn.Dense(), qkv, w, mask=mask)
            for impl in (nn.BlockSparse(), nn.BlockSparse(24)):
                for a, b in zip(gradients(impl, qkv, w, mask=mask), want, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_heads_have_their_own_layouts_and_only_their_tiles_are_computed() -> None:
    layout = layouts.fixed(64, block=8, num_heads=4, num_patterns=4, attention="unidirectional")
    tiles = _rectangles.tiles_of(nn.Causal() & layout, (0, 64), (0, 64), 8)
    assert len(tiles.columns) == layout.blocks.sum() and len(tiles.patterns) == 1
    assert [len(tiles.columns), tiles.starts.shape] == [4 * 24, (4, 9)]
    # With another tile than the layout's block the tiles that cover its blocks are computed.
    assert len(_rectangles.tiles_of(layout, (0, 64), (0, 64), 16).columns) == sum(
        int(x.reshape(4, 2, 4, 2).any((1, 3)).sum()) for x in layout.blocks
    )
    assert len(_rectangles.tiles_of(nn.Causal() & nn.Window(15), (0, 64), (0, 64), 16).columns) == 4 + 3


def test_layouts_of_one_length_are_distinguished() -> None:
    q = torch.randn(1, 32, 2, 4)
    for make, block in itertools.product((layouts.dense, layouts.local_window), (4, 8)):
        mask = make(32, block=block)
        torch.testing.assert_close(
            nn.attention(q, q, q, mask=mask, impl=nn.BlockSparse()), nn.attention(q, q, q, mask=mask)
        )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_transforms() -> None:
    ids = torch.tensor([[0] * 3 + [1] * 3] * 2)
    bias = torch.randn(6, 6, dtype=torch.float64)
    q, k, v = (torch.randn(2, 6, n, 2, dtype=torch.float64) for n in (2, 1, 1))
    many = torch.stack([q, 2 * q, -q])
    mask = nn.Causal() & nn.Segments(ids) & nn.Added(bias)

    def f(impl: Any, q: Tensor, mask: nn.Mask = mask) -> Tensor:
        return nn.attention(q, k, v, mask=mask, slopes_H=torch.tensor([0.5, 0.25]), impl=impl)

    sparse, dense = (functools.partial(f, impl) for impl in (nn.BlockSparse(4), nn.Blockwise(4)))
    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(torch.func.vmap(sparse)(many), torch.func.vmap(dense)(many))
    close(
        torch.func.vmap(sparse, in_dims=2, out_dims=2)(many.movedim(0, 2)), torch.func.vmap(dense)(many).movedim(0, 2)
    )
    close(*(torch.func.vmap(torch.func.grad(lambda q, f=f: f(q).square().sum()))(many) for f in (sparse, dense)))
    for data, make in ((torch.stack([ids, ids * 0]), nn.Segments), (torch.stack([bias, -bias]), nn.Added)):
        found = [torch.func.vmap(lambda x, f=f, make=make: f(q, nn.Causal() & make(x)))(data) for f in (sparse, dense)]
        close(*found)
    tables = torch.randn(2, 1, 3, dtype=torch.float64)
    close(*(torch.func.vmap(lambda x, f=f: f(q, nn.Causal() & nn.Relative(x)))(tables) for f in (sparse, dense)))
    # The derivatives of the gradient, too, backward and forward, which torch's kernels lack.
    formula = functools.partial(f, nn.Dense())
    first = [torch.func.grad(lambda q, f=f: f(q).pow(3).sum()) for f in (sparse, formula)]
    with sdpa_kernel(SDPBackend.MATH):
        close(*(torch.func.jvp(f, (q,), (q,)) for f in (sparse, formula)))
        close(*(torch.func.grad(lambda q, g=g: g(q).square().sum())(q) for g in first))
        close(*(torch.func.jvp(g, (q,), (k.expand_as(q),))[1] for g in first))


@pytest.mark.nightly
def test_gradcheck() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 7, n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    mask = nn.BlockLayout(torch.rand(4, 3, 3) < 0.6, 3, padded=True, allow_empty=True) & nn.Window(4, 4)
    for impl in (nn.BlockSparse(), nn.Blockwise(4)):
        attend = functools.partial(nn.attention, mask=mask, impl=impl)
        assert torch.autograd.gradcheck(attend, inputs)
        assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


# Under capture, remat and scan.


def loss(w: Tensor, x: Tensor, impl: Any, wrap: Any = lambda f: f) -> Tensor:
    mask = nn.Causal() & layouts.fixed(x.shape[1], block=4, attention="unidirectional")

    @wrap
    def layer(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (3, 2, 4)).unbind(-3)
        return x + nn.attention(q, k, v, mask=mask, slopes_H=torch.tensor([0.5, 0.1]), impl=impl).flatten(-2)

    y, _ = nn.scan(lambda x, w: (layer(x, w), None), x, w)
    return y.square().mean()


@pytest.mark.nightly
def test_a_captured_graph_has_one_node_a_pass() -> None:
    w, x = torch.randn(3, 8, 24) / 4, torch.randn(2, 32, 8)
    want = torch.func.grad(loss)(w, x, nn.Blockwise(4))
    eager = torch.func.grad(loss)(w, x, nn.BlockSparse())
    torch.testing.assert_close(eager, want, rtol=1e-5, atol=1e-6)
    step = sf.jit(sf.grad(lambda w: loss(w, x, nn.BlockSparse())))
    assert torch.equal(step(w), eager)
    remat = sf.grad(lambda w: loss(w, x, nn.BlockSparse(), sf.remat))(w)
    assert torch.equal(remat, eager)


@pytest.mark.nightly
def test_flops_are_those_of_the_tiles() -> None:
    """Two products forward and five backward, of the tiles that there are; all heads of one layout."""
    q, k = torch.randn(2, 32, 4, 8), torch.randn(2, 32, 2, 8)
    for heads, block in ((1, 8), (4, 8), (4, None)):
        layout = layouts.fixed(32, block=4, num_heads=heads, num_local_blocks=2)
        tiles = _rectangles.tiles_of(layout, (0, 32), (0, 32), block or 4)
        num = len(tiles.columns) * (4 // len(tiles.starts))
        unit = 2 * 2 * num * (block or 4) ** 2 * 8  # samples, a product and a sum, pairs, K
        mask, impl = layout, nn.BlockSparse(block)

        def gradient(q: Tensor, k: Tensor, *, mask: Any, impl: Any) -> Tensor:
            return torch.func.grad(lambda q: nn.attention(q, k, k, mask=mask, impl=impl).sum())(q)

        step = make_fx(functools.partial(gradient, mask=mask, impl=impl), tracing_mode="fake")(q, k)
        nodes = [n.name for n in step.graph.nodes if n.name.startswith("block_sparse")]
        assert nodes == ["block_sparse_attention", "block_sparse_attention_backward"]
        assert cost_analysis(step).flops == 7 * unit, (heads, block)


def test_refusals() -> None:
    q = torch.randn(1, 32, 4, 8)
    attend = functools.partial(nn.attention, q, q, q, impl=nn.BlockSparse())
    with pytest.raises(ValueError, match=r"BlockSparse\(block=0\)"):
        nn.BlockSparse(0)
    with pytest.raises(ValueError, match="BlockLayout for 3 heads, but there are 4"):
        attend(mask=layouts.fixed(32, num_heads=3))
    with pytest.raises(ValueError, match="BlockLayout of 4 blocks of 16 for 32 tokens: make a layout for 2 blocks"):
        attend(mask=layouts.fixed(64))
    with pytest.raises(ValueError, match="slopes_H requires a gradient, which only Dense"):
        attend(slopes_H=torch.ones(4, requires_grad=True))
    for impl in (nn.BlockSparse(), nn.Blockwise()):
        with pytest.raises(
            ValueError, match=r"data of the masks Added require a gradient, which only Dense\(\) computes"
        ):
            nn.attention(q, q, q, impl=impl, mask=nn.Causal() & nn.Added(torch.zeros(32, 32, requires_grad=True)))
    with pytest.raises(ValueError, match=r"Added of shape \(3, 32, 32\) for 32 queries, 32 keys and 4 heads"):
        attend(mask=nn.Added(torch.zeros(3, 32, 32)))
    with pytest.raises(ValueError, match="Keys of 31 tokens for 32 keys"):
        attend(mask=nn.Keys(torch.ones(1, 31, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"Relative of shape \(1, 4\) for 4 heads: give \[H or 1, 2 R \+ 1\]"):
        attend(mask=nn.Relative(torch.zeros(1, 4)))

    class Drawn(nn.Window):
        @property
        def tensors(self) -> tuple[torch.Tensor, ...]:
            return (torch.ones(1),)

        def with_tensors(self, tensors: Any) -> nn.Mask:
            return self

    with pytest.raises(ValueError, match=r"does not know the data of Drawn\. Give that mask a method given"):
        attend(mask=nn.Causal() & Drawn(9))


def test_added_numbers_have_a_gradient_of_dense_attention() -> None:
    q = torch.randn(1, 6, 2, 4, dtype=torch.float64)
    table, bias = (torch.randn(2, n, dtype=torch.float64, requires_grad=True) for n in (5, 6))
    assert torch.autograd.gradcheck(
        lambda t, b: nn.attention(q, q, q, mask=nn.Causal() & nn.Relative(t) & nn.Added(b[:, :, None])), [table, bias]
    )


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    qkv = [torch.randn(1, 200, n, 16) for n in (2, 1, 1)]
    w, mask, usual = torch.randn(1, 200, 2, 16), nn.Causal() & layouts.fixed(200, padded=True), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(gradients(nn.BlockSparse(), qkv, w, mask=mask))
    finally:
        torch.set_num_threads(usual)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
