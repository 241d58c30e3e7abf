"""Covers updates that begin before the backward ends: the bits of those that do not, their transfers, and failures."""

import contextlib
import gc
import pathlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.memory import _io
from shardfn.state import _overlapped_update
from shardfn.testing import assert_same, distributed, on_mesh

SHAPES = {"a": (7, 6), "b": (6, 6), "c": (6,), "s": (3, 6, 6), "large": (40, 6)}


def _params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=draw) / 2 for name, shape in SHAPES.items()}


def _loss(p: dict[str, Any], x: Tensor) -> Tensor:
    h = torch.tanh(x @ p["a"]) * p["c"]
    h, _ = sf.scan(lambda h, w: (torch.tanh(h @ w), None), h, p["s"])
    h = h @ p["b"] * p["c"].detach()  # read by the backward after the gradient of p["c"] is complete
    return (h @ p["large"].t() + h.mean() * p["b"].detach().sum()).square().mean()


def _batch(n: int) -> Tensor:
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(n))


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """The units that go into an update that runs already."""
    units: list[int] = []
    take = _overlapped_update.OverlappedUpdate.take

    def counting(self: _overlapped_update.OverlappedUpdate, unit: int, *rest: Any) -> Any:
        units.append(unit)
        return take(self, unit, *rest)

    with mock.patch.object(_overlapped_update.OverlappedUpdate, "take", counting):
        yield units


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        "adamw, disk",
        "adamw, host",
        "delayed, disk",
        "delayed, host",
    ],
)
@distributed(world=[1, 2])
def test_an_update_beside_the_backward_has_the_bits_of_one_after_it(world: int, case: str) -> None:
    mesh = sf.make_mesh({"dp": world})
    policy = sf.Policy.bf16(reduce=torch.bfloat16)
    narrow = sf.accumulate(sf.mixed_precision(_loss, policy), 2)
    adamw, batches = sf.optim.adamw(1e-2), [_batch(n) for n in range(4)]
    delayed = sf.optim.delayed(sf.optim.chain(sf.optim.clip_by_global_norm(0.5), adamw), warmup=1)
    options: dict[str, Any] = {"mesh": mesh, "specs": {x: sf.Sharding(sf.P(), stacked=x == "s") for x in SHAPES}}
    optimizer = delayed if "delayed" in case else adamw
    on_disk = "disk" in case
    loss, stage, params, grads = (_loss, 3, "disk", "disk") if on_disk else (narrow, 2, "device", "host")
    plain = sf.Zero(stage, persist_elements=8, travel=sf.Travel(bucket_bytes=64))
    want = on_mesh(loss, optimizer, _params(), batches, zero=plain, **options)
    with tempfile.TemporaryDirectory() as place, _counted() as units:
        kinds: dict[str, Any] = {"params": params, "grads": grads, "optimizer": "disk", "directory": place}
        zero = sf.Zero.flat(stage=stage, persist_elements=8, bucket_bytes=64, chunk_bytes=512, **kinds)
        got = on_mesh(loss, optimizer, _params(), batches, zero=zero, donate=on_disk, **options)
    assert_same(got, want, exact=True)
    assert len(units) >= 3 * len(set(units)) > 0  # in all steps but the first


@pytest.mark.nightly
def test_a_rule_that_needs_the_whole_gradient_waits_for_it(tmp_path: pathlib.Path) -> None:
    mesh, adamw = sf.make_mesh({"dp": 1}), sf.optim.adamw(1e-2)
    weighted = lambda p, x: sf.WeightedMean(_loss(p, x) * len(x), torch.tensor(float(len(x))))  # noqa: E731
    clipped = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), adamw)
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (weighted, adamw, {}),
        (_loss, clipped, {}),
        (_loss, adamw, {"skip_nonfinite": True}),
        (_loss, sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.delayed(adamw)), {}),
        (_loss, sf.optim.delayed(clipped, warmup=2), {}),
    ]
    for k, (loss, optimizer, options) in enumerate(cases):
        zero = sf.Zero(2, persist_elements=0, grads="host", optimizer="disk", disk=sf.Disk(str(tmp_path / str(k))))
        step = sf.sharded_step(loss, optimizer, mesh=mesh, zero=zero, **options)
        with _counted() as units:
            state = step.init(_params())
            for n in range(2):
                state, _ = step(state, _batch(n))
        assert not units
        step.close()


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ZeroDivisionError("broken")


def test_a_backward_that_fails_ends_the_update_and_leaves_the_state(tmp_path: pathlib.Path) -> None:
    broken: list[bool] = []

    def loss(p: dict[str, Any], x: Tensor) -> Tensor:
        h = x @ p["a"]
        return ((_Breaks.apply(h) if broken else h) @ p["b"]).square().mean()

    def run(**fields: Any) -> Any:
        zero = sf.Zero.flat(stage=3, persist_elements=0, bucket_bytes=0, **fields)
        step = sf.sharded_step(loss, sf.optim.adamw(1e-2), mesh=sf.make_mesh({"dp": 1}), zero=zero)
        return step, step.init({name: _params()[name] for name in ("a", "b")})

    (step, state), (plain, want) = run(params="disk", grads="disk", optimizer="disk", directory=str(tmp_path)), run()
    for n in range(3):
        if n == 2:
            broken.append(True)
            with _counted() as units, pytest.raises(ZeroDivisionError, match="broken"):
                step(state, _batch(n))
            assert len(units) == 1 and "shardfn-update" not in {t.name for t in threading.enumerate()}
            broken.clear()
        state, _ = step(state, _batch(n))
        want, _ = plain(want, _batch(n))
    for a, b in zip(sf.core.tree_leaves(state.params), sf.core.tree_leaves(want.params), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    step.close()


def _deep(p: list[Any], x: Tensor) -> Tensor:
    for w in p:
        x = torch.tanh(x @ w)
    return x.square().mean()


def _on_disk(loss: Any, place: pathlib.Path, optimizer: Any = None) -> Any:
    kinds: dict[str, Any] = {"params": "disk", "grads": "disk", "optimizer": "disk", "directory": str(place)}
    zero = sf.Zero.flat(stage=3, persist_elements=0, bucket_bytes=0, prefetch_bytes=1 << 20, **kinds)
    optimizer = sf.optim.adamw(1e-2) if optimizer is None else optimizer
    return sf.sharded_step(loss, optimizer, mesh=sf.make_mesh({"dp": 1}), zero=zero)


@pytest.mark.nightly
def test_steps_leave_no_files_to_the_garbage_collector(tmp_path: pathlib.Path) -> None:
    step = _on_disk(_deep, tmp_path)
    state = step.init([torch.randn(32, 32) / 8 for _ in range(4)])
    files: list[int] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            state, _ = step(state, torch.ones(8, 32))
            files.append(len(list(tmp_path.glob("*/slot-*.bin"))))
    finally:
        gc.enable()
    assert len(set(files[2:])) == 1  # two commits, and the step's own
    step.close()


def test_leaves_ahead_of_their_use_are_not_waited_for(tmp_path: pathlib.Path) -> None:
    used: list[threading.Event] = []

    def loss(p: list[Any], x: Tensor) -> Tensor:
        x = torch.tanh(x @ p[0])
        for event in used:
            event.set()
        return (x @ p[1] @ p[2]).square().mean()

    step = _on_disk(loss, tmp_path)
    state = step.init([torch.randn(32, 32) / 8 for _ in range(3)])
    want = step.apply(loss, state, torch.ones(8, 32))  # learns the order
    first, read, waited = state.params[0].held.slot, _io.Io._read_piece, []
    used.append(threading.Event())

    def reads(self: _io.Io, slot: Any, *rest: Any) -> None:
        if slot is not first:
            waited.append(used[0].wait(10))
        read(self, slot, *rest)

    with mock.patch.object(_io.Io, "_read_piece", reads):
        assert torch.equal(step.apply(loss, state, torch.ones(8, 32)), want)
    assert waited == [True, True]
    step.close()


def test_a_clip_of_waiting_gradients_adds_no_moves(tmp_path: pathlib.Path) -> None:
    adamw, moved = sf.optim.adamw(1e-2), []
    for k, rule in enumerate((adamw, sf.optim.chain(sf.optim.clip_by_global_norm(0.5), adamw))):
        step = _on_disk(_deep, tmp_path / str(k), sf.optim.delayed(rule))
        state = step.init([torch.randn(64, 64) / 8 for _ in range(4)])
        for _ in range(2):
            state, _ = step(state, torch.ones(8, 64))
        with sf.memory.ledger() as book:
            state, _ = step(state, torch.ones(8, 64))
        moved.append((book.moved("disk", "host"), book.moved("host", "disk")))
        step.close()
    assert moved[0] == moved[1]


@pytest.mark.day("host-1", "host-3", "disk-1")
@pytest.mark.parametrize("place", [1, 3])  # of the counter of a DelayedState, and of its `measured`
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_counter_is_not_taken_for_the_state_of_a_scalar(tmp_path: pathlib.Path, kind: Any, place: int) -> None:
    def loss(p: list[Tensor], x: Tensor) -> Tensor:
        return ((x @ p[0]) * p[1] + p[2] * p[3]).square().mean()

    params = [torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), *(torch.ones(4) for _ in range(3))]
    params[place] = torch.tensor(1.5)
    optimizer = sf.optim.delayed(sf.optim.chain(sf.optim.clip_by_global_norm(0.1), sf.optim.sgd(0.1)))
    options: dict[str, Any] = {"mesh": sf.make_mesh({"dp": 1})}
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    want = on_mesh(loss, optimizer, params, batches, zero=sf.Zero(2, persist_elements=0), **options)
    zero = sf.Zero(
        2, persist_elements=0, grads="host", optimizer=kind, disk=sf.Disk(str(tmp_path)) if kind == "disk" else None
    )
    assert_same(on_mesh(loss, optimizer, params, batches, zero=zero, **options), want, exact=True)
