"""Covers the update that begins before the backward ends: its bits, its gradients' way, its end and its errors."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import optim
from shardfn.core import P, Pending, load, tree_flatten, tree_leaves, tree_unflatten
from shardfn.state._operands import LeafRows, Update, UpdateOperand
from shardfn.state._overlapped_update import OverlappedUpdate, Promised
from shardfn.state._state import state_owners

STACK, PLAIN = (3, 4, 2), (5,)  # three layers, and a leaf of its own


class _Late(Pending[Tensor]):
    """A share that comes when it is sent."""

    def __init__(self, x: Tensor) -> None:
        self.sent = threading.Event()

        def result() -> Tensor:
            assert self.sent.wait(20)
            return x

        super().__init__(result, self.sent.is_set)


def _values(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=draw) for s in (STACK, PLAIN)]


def _ahead(rule: optim.GradientTransformation) -> tuple[OverlappedUpdate, Update]:
    """Units 0 to 2 are the layers from the last to the first, unit 3 is the plain leaf."""
    params = _values(0)
    leaves, treedef = tree_flatten(rule.init(params))
    promised = [Promised(i, x.shape, x.dtype, stacked=i == 0) for i, x in enumerate(params)]
    owners = state_owners(rule.init(params), params, rule)
    counters = [k is None for k in owners]
    state = [UpdateOperand(x, "device" if c else "host", kept=not c) for x, c in zip(leaves, counters, strict=True)]
    update = Update(
        optimizer=rule,
        treedef=tree_flatten(params)[1],
        specs=[P(), P()],
        numels=[x.numel() for x in params],
        params=[UpdateOperand(x, "host", kept=True) for x in params],
        grads=[UpdateOperand(x, "host") for x in promised],
        state=state,
        state_treedef=treedef,
        owners=owners,
        scale=None,
        device=torch.device("cpu"),
        pool=None,
        chunk=100,
    )
    layer, plain = torch.Size(STACK[1:]), torch.Size(PLAIN)
    units = {u: [(LeafRows(0, 2 - u, 3 - u), layer)] for u in range(3)} | {3: [(LeafRows(1), plain)]}
    return OverlappedUpdate(update, [rows for u in range(4) for rows, _ in units[u]], units), update


def _shares() -> dict[int, Tensor]:
    stack, plain = _values(1)
    return {0: stack[2].reshape(-1), 1: stack[1].reshape(-1), 2: stack[0].reshape(-1), 3: plain}


def test_leaves_are_stepped_as_their_gradients_come() -> None:
    rule = optim.adamw(0.1)
    ahead, update = _ahead(rule)
    shares, takers = {u: _Late(x) for u, x in _shares().items()}, {}
    ahead.begin()
    for unit, share in shares.items():
        takers[unit] = ahead.take(unit, share, None, torch.float32)
        assert not ahead.is_used(unit) or unit == 0 or shares[unit - 1].done()
        share.sent.set()
        assert torch.equal(ahead.square(unit), optim.sum_squares([share.result()]))
        takers[unit].result()
        assert takers[unit].done()
    done = ahead.finish()
    params, grads = _values(0), _values(1)
    new, state = optim.inplace(rule)(grads, rule.init(params), params, specs=[P(), P()])
    for i, want in enumerate(tree_leaves(new)):
        assert torch.equal(done.params[i], want)  # type: ignore[arg-type]
    want_state = tree_leaves(state)
    for k, owner in enumerate(update.owners):
        assert (owner is None) == (k not in done.state)
        assert owner is None or torch.equal(done.state[k], want_state[k])  # type: ignore[arg-type]
    assert all(torch.equal(load(c.held), x) for c, x in zip(update.params, _values(0), strict=True) if c is not None)


def test_an_earlier_sum_is_added_in_its_dtype() -> None:
    ahead, _ = _ahead(optim.sgd(1.0))
    before = torch.full((5,), 0.125)
    ahead.begin()
    for unit, share in _shares().items():
        if unit == 3:
            half = share.bfloat16()
            ahead.take(3, Pending.of(half), before, torch.float32)
            want = half.float() + 0.125
        else:
            ahead.take(unit, Pending.of(share), None, torch.float32)
    done = ahead.finish()
    assert torch.equal(done.params[1], _values(0)[1] - want)  # type: ignore[arg-type]


def test_an_abandoned_update_ends_and_waits_for_nothing() -> None:
    ahead, _ = _ahead(optim.adamw(0.1))
    ahead.begin()
    ahead.take(0, Pending.of(_shares()[0]), None, torch.float32)
    ahead.stop()
    assert not ahead.finish().params
    assert ahead.is_used(3)  # no gradient is held back any more
    late = ahead.take(1, _Late(_shares()[1]), None, torch.float32)
    assert late.done()
    late.result()


def test_its_error_is_raised_to_the_caller_that_waits() -> None:
    def broken() -> Tensor:
        raise OSError("no link")

    ahead, _ = _ahead(optim.adamw(0.1))
    ahead.begin()
    ahead.take(0, Pending(broken, lambda: True), None, torch.float32)
    with pytest.raises(OSError, match="no link"):
        ahead.square(0)
    with pytest.raises(OSError, match="no link"):
        ahead.finish()


def test_a_promised_gradient_is_stored_and_lets_go_of_rows_that_were_read() -> None:
    grad = Promised(0, torch.Size(PLAIN), torch.float32, stacked=False)
    assert (grad.kind, grad.nbytes, grad.dtype) == ("host", 20, torch.float32)

    class Known(OverlappedUpdate):
        def __init__(self) -> None:
            self.dropped: list[Any] = []

        def gradient(self, leaf: int, lo: int) -> Tensor:
            return torch.arange(5.0)

        def drop(self, leaf: int, lo: int) -> None:
            self.dropped.append((leaf, lo))

    grad.ahead = known = Known()
    assert grad.read(0, 2).result().tolist() == [0, 1] and not known.dropped
    assert grad.read(2, 5).result().tolist() == [2, 3, 4] and known.dropped == [(0, 0)]
    with pytest.raises(NotImplementedError):
        grad.flat()
    assert tree_leaves(tree_unflatten(tree_flatten([0])[1], [grad])) == [grad]
