"""Covers transfers and `put`: values, errors, their bytes in the ledger, and every torch.func transform of put."""

import threading

import pytest
import torch
from torch.func import grad, hessian, jvp, vjp, vmap

from shardfn import memory
from shardfn.core import Pending


def test_a_round_trip_copies_every_kind_of_tensor() -> None:
    for x in (torch.randn(3, 5), torch.randn(5, 3).t(), torch.tensor(7), torch.empty(0, 4), torch.rand(300, 300) > 0.5):
        down = memory.to_host(x)
        assert isinstance(down, Pending)
        up = memory.to_device(down.result())
        assert torch.equal(up.result(), x) and up.done()
        up.wait()
        assert up.result() is up.result()
        assert not x.numel() or up.result().data_ptr() != x.data_ptr() != down.result().data_ptr()


def test_large_host_tensors_begin_on_a_page() -> None:
    assert memory.host_empty((1 << 20,), torch.uint8).data_ptr() % 4096 == 0
    assert memory.host_empty((3, 0)).shape == (3, 0)


def test_a_transfer_does_not_wait_for_its_turn() -> None:
    # The only thread of this direction is held up, so the copy cannot have been made when `to_host` returns.
    gate = threading.Event()
    held = memory._transfer._thread("down").submit(gate.wait, 10)
    transfer = memory.to_host(torch.ones(4))
    assert not transfer.done()
    gate.set()
    assert held.result() and torch.equal(transfer.result(), torch.ones(4))


def test_an_error_on_the_way_is_the_results() -> None:
    down = memory.to_host(torch.ones(2), out=torch.ones(2, requires_grad=True))  # in place on a leaf: refused by torch
    for _ in range(2):
        with pytest.raises(RuntimeError, match="requires grad"):
            down.result()
    assert down.done()


def test_out_must_fit() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(2,\).*dtype torch.float64, expected torch.float32"):
        memory.to_host(torch.ones(2), out=torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="cast or reshape"):
        memory.to_device(torch.ones(2), out=torch.ones(2, dtype=torch.bfloat16))


# torch's own decompositions for forward mode use torch.jit.script, which it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_put_is_the_identity_under_every_transform() -> None:
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return memory.put(memory.put(x.sin(), "host").exp(), "device")

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    x, v = torch.randn(2, 3, 4, dtype=torch.float64)[:2]
    assert torch.equal(there_and_back(x), plain(x))
    assert torch.equal(grad(lambda x: there_and_back(x).sum())(x), grad(lambda x: plain(x).sum())(x))
    assert torch.equal(vjp(there_and_back, x)[1](v)[0], vjp(plain, x)[1](v)[0])
    assert torch.equal(jvp(there_and_back, (x,), (v,))[1], jvp(plain, (x,), (v,))[1])
    for dim in (0, 1):
        assert torch.equal(vmap(there_and_back, dim, dim)(x), plain(x))
    per_row = vmap(grad(lambda x: there_and_back(x).sum()))(x)
    assert torch.equal(per_row, vmap(grad(lambda x: plain(x).sum()))(x))
    # The engine of reverse over forward sums in another order than that of the plain function.
    torch.testing.assert_close(
        hessian(lambda x: there_and_back(x).sum())(x), hessian(lambda x: plain(x).sum())(x), rtol=1e-12, atol=1e-12
    )
    assert torch.autograd.gradcheck(there_and_back, (x.clone().requires_grad_(),), check_forward_ad=True)


def test_puts_transpose_carries_the_cotangent_back() -> None:
    x = torch.randn(100, requires_grad=True)
    with memory.ledger() as book:
        y = memory.put(x, "host").sum()
        assert (book.moved("device", "host"), book.moved("host", "device")) == (400, 0)
        y.backward()
    assert (book.moved("device", "host"), book.moved("host", "device")) == (400, 400)
    assert (book.transfers("device", "host"), book.transfers("host", "device")) == (1, 1)


def test_put_knows_two_kinds() -> None:
    with pytest.raises(ValueError, match=r"pool.write"):
        memory.put(torch.ones(1), "disk")
