"""Covers sums of microbatches' gradients in place: bit for bit those out of place; shared memory is not written."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, Sharding, Zero, optim
from shardfn.collectives import SumWire
from shardfn.engine.transfers import _gradient_store
from shardfn.engine.transfers._gradient_store import LocalSums
from shardfn.state import stack_values
from shardfn.testing import distributed

# The arguments of a loss: params, batch, and a list for tensors that a user keeps, whose values must not change.
Case = Callable[[Any, Any, list[Any]], Tensor]


class _Gives(torch.autograd.Function):
    """One, with the gradients `make(cotangent)` of `xs`."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[Tensor], list[Tensor | None]], *xs: Tensor) -> Tensor:
        ctx.make = make
        return xs[0].sum() * 0 + 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.make(grads[0])


def _gives(make: Callable[[Tensor], list[Any]], *xs: Tensor) -> Any:
    return _Gives.apply(make, *xs)


class _Saved(torch.autograd.Function):
    """sum(x y), whose gradient of x is the tensor that it has saved, and not a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return (x * y).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0], None


class _Same(torch.autograd.Function):
    """The identity, whose gradient is the one that comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _plain(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return torch.tanh(x @ p["w"]).square().mean() + (x @ p["v"].t()).mean()


def _expanded(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return (p["w"].sum() + p["v"].mean()) * x.sum()


def _of_the_batch(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return _Saved.apply(p["w"], x) + _Saved.apply(p["v"], x.t())  # pyright: ignore


def _of_an_activation(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    h = x * 3
    kept.append(h)
    return _Saved.apply(p["w"], h.view(3, 3)) + p["v"].square().sum()  # pyright: ignore


def _saved_and_let_go(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return _Saved.apply(p["w"], x * 3) + _Saved.apply(p["v"], x + 1)  # pyright: ignore


def _itself(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return _gives(lambda g: [p["w"].detach(), p["v"].data], p["w"], p["v"]) * x.sum()


def _tied(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    def one(g: Tensor) -> list[Any]:
        grad = x * g
        return [grad, grad]

    return _gives(one, p["w"], p["v"])


def _tied_by_an_add(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return torch.sin((p["w"] + p["v"]) * x).sum()


def _views_of_one(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return torch.sin(torch.stack([p["w"], p["v"], p["w"]]) * x).sum()


def _incoming(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    y = _Same.apply(p["w"]) + p["v"]  # pyright: ignore[reportOperatorIssue]
    y.register_hook(kept.append)
    return (y * x).sum()


def _kept_by_hooks(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    p["w"].register_hook(lambda g: kept.append(g) or None)
    p["v"].register_hook(lambda g: kept.append(g[0].numpy()) or None)
    return _plain(p, x, kept)


def _storage_kept_by_a_hook(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    y = p["w"].view(-1)

    def keep(grad: Tensor) -> None:
        kept.append(grad.untyped_storage())

    y.register_hook(keep)
    return torch.sin(y.view(3, 3) * x).sum() + p["v"].square().sum()


def _differentiated_before(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    h = torch.sin(p["w"] * x)
    (inner,) = torch.autograd.grad(h.sum(), [p["w"]], create_graph=True, retain_graph=True)
    kept.append(inner)
    return (h * p["v"]).sum() + inner.square().sum()


def _sometimes(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return (p["w"] * x).sum() + ((p["v"] * x).sum() if x[0, 0] > 0 else 0)


def _no_gradient(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return _gives(lambda g: [x * g, None], p["w"], p["v"])


def _int_beside(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return (p["w"] * x).sum() + (p["v"] * p["n"]).sum()


_BUFFER = np.arange(9, dtype=np.float32).reshape(3, 3)
_PERSISTENT = torch.arange(18.0).view(2, 3, 3)


def _numpys(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    kept += [torch.from_numpy(_BUFFER)]
    return _gives(lambda g: [torch.from_numpy(_BUFFER), torch.from_dlpack(_BUFFER)], p["w"], p["v"]) + x.sum()


def _persistent(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    kept += [_PERSISTENT]
    return _gives(lambda g: [_PERSISTENT[1], _PERSISTENT[0].t()], p["w"], p["v"]) + x.sum()


def _transposed(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return torch.nn.functional.linear(x, p["w"], p["v"][0]).square().sum()


def _shared(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    return _gives(lambda g: [(x * g).share_memory_(), torch.zeros(3, 3)[:1].expand(3, 3)], p["w"], p["v"])


def _in_a_larger_one(p: Any, x: Tensor, kept: list[Any]) -> Tensor:
    def rows(g: Tensor) -> list[Any]:
        large = torch.cat([x, 2 * x]) * g
        return [large[1:4], large[3:]]  # which share a row

    return _gives(rows, p["w"], p["v"])


CASES: list[Case] = [
    _plain,
    _expanded,
    _of_the_batch,
    _of_an_activation,
    _saved_and_let_go,
    _itself,
    _tied,
    _tied_by_an_add,
    _views_of_one,
    _incoming,
    _kept_by_hooks,
    _storage_kept_by_a_hook,
    _differentiated_before,
    _sometimes,
    _no_gradient,
    _int_beside,
    _numpys,
    _persistent,
    _transposed,
    _shared,
    _in_a_larger_one,
]


@contextlib.contextmanager
def _out_of_place() -> Iterator[None]:
    """Each microbatch is sent, and each sum is a new tensor."""

    def added(before: Tensor | None, part: Tensor, key: int, summed: set[int]) -> Tensor:
        del key, summed
        return part if before is None else before + part

    def add(self: LocalSums, leaf: int, grad: Tensor, *, stays: bool) -> None:
        del stays
        self._at[leaf] = added(self._at.get(leaf), grad.to(self._leaves[leaf].dtypes.accum), leaf, set())

    def total(self: LocalSums, leaf: int, grad: Tensor, *, stays: bool) -> Tensor:
        del stays
        before = self._at.pop(leaf, None)
        return grad if before is None else before + grad.to(before.dtype)

    alone = mock.patch.object(SumWire, "is_alone", False)
    sums = mock.patch.multiple(LocalSums, add=add, total=total)
    with alone, sums, mock.patch.object(_gradient_store, "added", added):
        yield


def _copied(x: Any) -> Any:
    if isinstance(x, torch.UntypedStorage):
        return bytes(x)
    return x.copy() if isinstance(x, np.ndarray) else x.detach().clone()


def _run(case: Case, zero: Zero) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(3)
    params = {"w": torch.randn(3, 3, generator=g), "v": torch.randn(3, 3, generator=g), "n": torch.arange(9).view(3, 3)}
    kept: list[Any] = []
    step = sf.sharded_step(
        sf.accumulate(lambda p, x: case(p, x, kept), 4),
        optim.sgd(0.1),
        mesh=sf.make_mesh({"dp": 1}, device="cpu"),
        zero=zero,
        trainable={"w": True, "v": True, "n": False},
    )
    state, out = step.init(params), []
    batches = [torch.randn(12, 3, generator=g) for _ in range(2)]
    given = [x.clone() for x in batches]
    for x in batches:
        kept.clear()
        state, metrics = step(state, x)
        out += [metrics["grad_norm"].clone(), metrics["loss"].clone()]
        out += [_copied(k) for k in kept]
    assert all(torch.equal(x, y) for x, y in zip(batches, given, strict=True))
    return *out, *(x.full_tensor() for x in sf.tree_leaves(state.params))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bytes):
        return a == b
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else torch.equal(a, b)


@pytest.mark.day(4)
@pytest.mark.parametrize("accumulate", ["each", "once"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(CASES)],
    ids=lambda f: f.__name__,
)
def test_sums_are_those_out_of_place(case: Case, accumulate: Any) -> None:
    zero = Zero.flat(accumulate=accumulate)
    got, buffers = _run(case, zero), (_BUFFER.copy(), _PERSISTENT.clone())
    with _out_of_place():
        want = _run(case, zero)
    assert len(got) == len(want) and all(map(_equal, got, want))
    assert np.array_equal(_BUFFER, buffers[0]) and torch.equal(_PERSISTENT, buffers[1])
    assert np.array_equal(_BUFFER, np.arange(9).reshape(3, 3))
    assert torch.equal(_PERSISTENT, torch.arange(18.0).view(2, 3, 3))


def _layer(kept: list[Any], p: Any, h: Tensor) -> Tensor:
    y = _Same.apply(p["w"]) + p["v"]  # pyright: ignore[reportOperatorIssue]
    y.register_hook(kept.append)
    return torch.tanh(h @ y) + _Saved.apply(p["v"], h[:3].detach())  # pyright: ignore[reportOperatorIssue]


def _pipelined(mesh: sf.Mesh, stacked: bool, schedule: str) -> list[Any]:
    g, kept = torch.Generator().manual_seed(3), list[Any]()
    params = {"e": torch.randn(3, 3, generator=g), "b": {k: torch.randn(4, 3, 3, generator=g) for k in "wv"}}
    loss = sf.pipeline(
        lambda p, x: x @ p["e"],
        lambda p, h: _layer(kept, p, h),
        lambda p, h, x: (h @ p["e"].t() - x).square().mean(),
        num_microbatches=4,
        schedule=schedule,
        blocks=lambda p: p["b"],
    )
    specs = {"e": P(), "b": Sharding(P("pp"), stacked=stacked)}
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, specs=specs, batch=P())
    state, out = step.init(params), []
    for _ in range(2):
        kept.clear()
        state, metrics = step(state, torch.randn(16, 3, generator=g))
        out += [metrics["grad_norm"].clone(), metrics["loss"].clone(), *(x.clone() for x in kept)]
    return [*out, *(x.full_tensor() for x in sf.tree_leaves(state.params))]


@pytest.mark.nightly
@distributed(world=2)
def test_sums_of_a_pipeline_are_those_out_of_place() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    for stacked in (True, False):
        for schedule in ("1f1b", "zb-h1"):
            got = _pipelined(mesh, stacked, schedule)
            with _out_of_place():
                want = _pipelined(mesh, stacked, schedule)
            assert len(got) == len(want) > 16 and all(map(_equal, got, want)), (stacked, schedule)


@pytest.mark.nightly
@distributed(world=2)
def test_sums_of_gradients_in_messages_are_those_out_of_place() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")

    def run(stage: int) -> list[Any]:
        g = torch.Generator().manual_seed(3)
        params = {"w": torch.randn(3, 3, generator=g), "v": torch.randn(3, 3, generator=g)}
        loss = sf.accumulate(lambda p, x: _tied(p, x, []) + _incoming(p, x, []) + _plain(p, x, []), 4)
        step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, batch=P("dp"), zero=Zero(stage, persist_elements=0))
        state, norms = step.init(params), []
        for _ in range(2):
            state, metrics = step(state, torch.randn(12, 3, generator=g))
            norms.append(metrics["grad_norm"])
        return [*norms, *(x.full_tensor() for x in sf.tree_leaves(state.params))]

    for stage in (0, 1, 2, 3):
        got = run(stage)
        with _out_of_place():
            want = run(stage)
        assert all(map(torch.equal, got, want)), stage


def test_sums_of_a_stacks_layers_lie_side_by_side() -> None:
    mesh = sf.make_mesh({"dp": 1}, device="cpu")
    params = {"w": torch.randn(3, 2, 2), "b": torch.randn(2)}
    step = sf.sharded_step(
        sf.accumulate(lambda p, x: sum((x @ w).square().mean() for w in p["w"]) + (x @ p["b"]).mean(), 2),
        optim.sgd(0.1),
        mesh=mesh,
        specs={"w": Sharding(P(), stacked=True), "b": P()},
    )
    state, joined = step.init(params), list[Any]()
    with mock.patch(
        "shardfn.engine.transfers._gradient_store.stack_values",
        lambda parts: joined.append((parts, stack_values(parts))) or joined[-1][1],
    ):
        state, _ = step(state, torch.randn(4, 2))
    ((rows, whole),) = joined
    assert whole.shape == (3, 2, 2) and all(x._base is whole for x in rows)


def test_rows_of_one_tensor_are_joined_as_they_lie() -> None:
    whole = torch.arange(12.0).view(3, 2, 2).clone()
    assert stack_values(list(whole)) is whole
    others = [[whole[0], whole[2], whole[1]], [whole[0], whole[1]], [whole[0], whole[1], whole[2].t()], [whole[0]] * 3]
    others += [list(whole[:, 0]), list(whole.transpose(0, 2)), [whole[0], whole[1], whole[2].clone()]]
    for rows in others:
        made = stack_values(rows)
        assert isinstance(made, Tensor) and torch.equal(made, torch.stack(rows))
        assert made.untyped_storage()._cdata != whole.untyped_storage()._cdata
