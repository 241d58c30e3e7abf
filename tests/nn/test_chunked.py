"""Covers attention whose chunks wait elsewhere: values and gradients, memory of the device, jit, remat, refusals."""

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import memory, nn
from shardfn.collectives import bind_mesh
from shardfn.testing import distributed


def drawn(T: int, heads: int, key_heads: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(T)
    qkv = [torch.randn(2, T, n, 4, generator=g, dtype=torch.float64).to(dtype) for n in (heads, key_heads, key_heads)]
    return qkv, torch.randn(2, T, heads, 4, generator=g, dtype=torch.float64).to(dtype)


def gradients(qkv: list[Tensor], w: Tensor, mask: nn.Mask, impl: Any) -> list[Tensor]:
    own = [x.clone().requires_grad_() for x in qkv]
    y = nn.attention(*own, mask=mask, impl=impl)
    return [y.detach(), *torch.autograd.grad((y * w).sum(), own)]


def masks(T: int) -> list[nn.Mask]:
    ids = torch.arange(T).repeat(2, 1) // 5
    drop = nn.PairDropout(sf.key(3), 0.25, torch.arange(2))
    empty = nn.BlockLayout(torch.eye(-(-T // 4)).roll(1, 0), 4, padded=True)  # rows that see no key, with Causal
    return [nn.Full(), nn.Causal(), nn.Window(3, 2), nn.Causal() & nn.Segments(ids) & drop, nn.Causal() & empty]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["host", "disk"])
def test_chunks_are_dense_attention(to: Any, tmp_path: Any) -> None:
    pool = memory.Pool(tmp_path) if to == "disk" else None
    qkv, w = drawn(19, 4, 2)
    for mask in masks(19):
        want = gradients(qkv, w, mask, nn.Dense())
        for chunk in (1, 4, 19, 100) if to == "host" else (7,):
            close(gradients(qkv, w, mask, nn.Chunked(chunk, to=to, pool=pool)), want)


def test_narrow_dtypes_are_summed_in_float32() -> None:
    qkv, w = drawn(50, 2, 2, torch.bfloat16)
    want = gradients([x.double() for x in qkv], w.double(), nn.Causal(), nn.Dense())
    dense = gradients(qkv, w, nn.Causal(), nn.Dense())
    for a, b, c in zip(want, dense, gradients(qkv, w, nn.Causal(), nn.Chunked(16)), strict=True):
        assert c.dtype == torch.bfloat16
        assert (c - a).abs().max() <= 2 * (b - a).abs().max() + torch.finfo(torch.bfloat16).eps * a.abs().max()


def on_ranks(mesh: sf.Mesh, lengths: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    draw = random.Random(0)
    for T in lengths:
        for heads, key_heads in ((4, 2), (3, 1), (2, 2)):
            qkv, w = drawn(T, heads, key_heads)
            for mask in masks(T):
                want = gradients(qkv, w, mask, nn.Dense())
                impl = nn.Chunked(draw.choice([2, 5, 8, 100]), "sp", T)
                with bind_mesh(mesh):
                    at = torch.cat([torch.arange(a, b) for a, b in (*impl.rows(T), (0, 0))])
                    order = nn.sequence_order(impl, T, mesh.size)
                    assert order.sort().values.equal(torch.arange(T))
                    assert torch.equal(at, order.split([len(x) for x in torch.arange(T).chunk(mesh.size)])[mesh.rank])
                    got = gradients([x[:, at] for x in qkv], w[:, at], mask, impl)
                close(got, [x[:, at] for x in want])


@distributed(world=[pytest.param(2, marks=pytest.mark.nightly), 3])
def test_chunks_on_ranks_are_dense_attention(world: int) -> None:
    """Lengths that no mesh divides, fewer heads and key heads than ranks, masks of all kinds."""
    on_ranks(sf.make_mesh({"sp": world}), (11,))


@pytest.mark.nightly
@distributed(world=[2, 3, 4], timeout=600)
def test_many_chunks_on_ranks(world: int) -> None:
    on_ranks(sf.make_mesh({"sp": world}), (world + 1, world * 2 - 1, 23, 40, 61))


# Memory of the device.


def beside(T: int, chunk: int) -> float:
    """The most bytes on the device beside arguments, results, and the pieces that they are made of; in chunks of q."""
    torch.set_num_threads(1)
    qkv = [torch.randn(1, T, 2, 16, requires_grad=True) for _ in range(3)]
    one = qkv[0].nbytes
    with memory.ledger() as book:
        y = nn.attention(*qkv, impl=nn.Chunked(chunk))
        assert book.peak("device") < 2 * one + 10 * one * chunk / T  # y, and its pieces
        assert book.live("device") < one + 4096
        torch.autograd.grad(y, qkv, torch.ones_like(y))
    assert book.moved("host", "device") > 4 * one
    return (book.peak("device") - 8 * one) / (one * chunk / T)  # y, dy, three gradients, and their pieces


@pytest.mark.nightly
def test_the_device_holds_a_few_chunks_however_many_there_are() -> None:
    found = [beside(T, 128) for T in (1024, 2048, 4096)]
    assert max(found) <= 10, found
    assert max(found) - min(found) <= 1, found


def test_on_disk_nothing_stays_on_the_host(tmp_path: Any) -> None:
    qkv = [torch.randn(1, 256, 2, 16, requires_grad=True) for _ in range(3)]
    with memory.Pool(tmp_path) as pool, memory.ledger() as book:
        y = nn.attention(*qkv, impl=nn.Chunked(64, to="disk", pool=pool))
        buffers = book.live("host")  # of the pool
        assert book.live("disk") >= 4 * y.nbytes
        torch.autograd.grad(y.sum(), qkv)
        del y
        assert book.live("disk") == 0
        assert abs(book.live("host") - buffers) <= 4096


# In a step.


def loss(w: Tensor, x: Tensor, impl: Any, wrap: Any = lambda f: f) -> Tensor:
    @wrap
    def layer(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (3, 2, 4)).unbind(-3)
        return x + nn.attention(q, k, v, slopes_H=torch.tensor([0.5, 0.1]), impl=impl).flatten(-2)

    y, _ = nn.scan(lambda x, w: (layer(x, w), None), x, w)
    return y.square().mean()


@pytest.mark.nightly
def test_remat_jit_and_grad() -> None:
    w, x = torch.randn(2, 8, 24) / 4, torch.randn(2, 21, 8)
    impl = nn.Chunked(8)
    want = torch.func.grad(loss)(w, x, nn.Dense())
    eager = sf.grad(lambda w: loss(w, x, impl))(w)
    torch.testing.assert_close(eager, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.func.grad(loss)(w, x, impl), eager)
    assert torch.equal(sf.grad(lambda w: loss(w, x, impl, sf.remat))(w), eager)
    assert torch.equal(sf.jit(sf.grad(lambda w: loss(w, x, impl)))(w), eager)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_refusals(tmp_path: Any) -> None:
    q = torch.randn(2, 6, 2, 4)
    wrongs: list[dict[str, Any]] = [{"chunk": 0}, {"chunk": 2, "to": "disk"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"or on 'disk' with pool=memory.Pool\(path\)"):
            nn.Chunked(**wrong)
    attend = functools.partial(nn.attention, impl=nn.Chunked(2))
    with pytest.raises(ValueError, match="equal numbers of queries and keys, got 6 queries over 5 keys"):
        attend(q, q[:, :5], q[:, :5], mask=nn.Full())
    for told, f in (
        ("vmap", lambda: torch.func.vmap(lambda q: attend(q, q, q))(torch.stack([q, q]))),
        ("forward-mode derivative", lambda: torch.func.jvp(lambda q: attend(q, q, q), (q,), (q,))),
        ("second derivative", lambda: torch.func.grad(lambda q: torch.func.grad(twice)(q).sum())(q)),
    ):
        with pytest.raises(NotImplementedError, match=rf"Chunked\(\) has no {told}. Blockwise"):
            f()
    with memory.Pool(tmp_path) as pool, pytest.raises(ValueError, match=r"Chunked\(to='disk'\) is not captured"):
        sf.jit(lambda q: attend(q, q, q, impl=nn.Chunked(2, to="disk", pool=pool)))(q)
    mesh = sf.make_mesh({"sp": 2}, abstract=True, device="cpu")
    with bind_mesh(mesh), pytest.raises(ValueError, match="needs length=, the tokens of the whole sequence"):
        attend(q, q, q, impl=nn.Chunked(2, "sp"))


def twice(q: Tensor) -> Tensor:
    return nn.attention(q, q, q, impl=nn.Chunked(2)).pow(3).sum()
