"""Covers memory kinds under jit: the bits of eager steps, moves that overlap, and analyses that are the ledger's."""

import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import tempfile
import types
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.engine.transfers import _gradient_store
from shardfn.graph._inductor import find_compiler
from shardfn.memory import _transfer
from shardfn.testing import ODD_TRAINABLE, Run, assert_same, distributed, odd_batch, odd_loss, odd_params, on_mesh

KINDS = ("device", "host", "disk")
WAYS = [("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host")]
WAIT = torch.ops.shardfn_memory.wait.default
graph = functools.partial(sf.jit, backend="graph")
CLIPPED = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))
NOTHING = sf.graph.Schedule(prefetch=None, bucket=None, reductions=None, donate=False)
PASSES: list[dict[str, Any]] = [
    {"prefetch": 300},
    {"reuse": 10**6},
    {"budget": 0},
    {"donate": True},
    {"prefetch": 300, "reuse": 300, "bucket": 200, "reductions": 10**6, "budget": 10**4, "donate": True},
]


def _zero(kinds: tuple[str, ...], directory: str, **fields: Any) -> sf.Zero:
    params, grads, optimizer = kinds
    where = {"directory": directory} if "disk" in kinds else {}
    placed: dict[str, Any] = {"params": params, "grads": grads, "optimizer": optimizer, **where}
    return sf.Zero.flat(**{"persist_elements": 0, "bucket_bytes": 64, "chunk_bytes": 2048, **placed, **fields})


def _run(mesh: sf.Mesh, zero: sf.Zero, loss: Any = odd_loss, **options: Any) -> Run:
    batches = [odd_batch(n) for n in range(2)]
    options = {"mesh": mesh, "zero": zero, "trainable": ODD_TRAINABLE} | options
    return on_mesh(loss, CLIPPED, odd_params(), batches, **options)


def _placed(mesh: sf.Mesh, kinds: tuple[str, ...], loss: Any, *, stage: int = 3, **options: Any) -> Run:
    with tempfile.TemporaryDirectory() as directory:
        return _run(mesh, _zero(kinds, directory, stage=stage), loss, **options)


def _compare(stage: int, world: int, placements: Iterable[tuple[str, ...]]) -> None:
    mesh = sf.make_mesh({"dp": world})
    want = _run(mesh, sf.Zero(stage, persist_elements=0, travel=sf.Travel(bucket_bytes=64)))
    for kinds in placements:
        assert_same(_placed(mesh, kinds, graph(odd_loss), stage=stage), want, exact=True)


@pytest.mark.nightly
@distributed(world=2)
def test_placements_have_the_bits_of_eager(world: int) -> None:
    _compare(3, world, [("host", "host", "disk"), ("disk", "disk", "host")])


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=[1, 2, 4], timeout=600)
def test_every_placement_has_the_bits_of_eager(world: int, stage: int) -> None:
    _compare(stage, world, itertools.product(KINDS, repeat=3))


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_composes_with_precision_accumulation_remat_and_skipped_steps(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    half, host = sf.mixed_precision(odd_loss, sf.Policy.bf16()), ("host", "host", "disk")
    scaled = sf.mixed_precision(odd_loss, sf.Policy.fp16(), sf.optim.dynamic_loss_scale(init=256.0))
    wide = sf.mixed_precision(odd_loss, sf.Policy.bf16(param=torch.float32))
    losses: list[Any] = [(sf.accumulate(sf.mixed_precision(sf.remat(odd_loss), sf.Policy.bf16()), 2), host)]
    losses += [(half, ("disk", "disk", "host")), (scaled, ("disk", "host", "host")), (wide, ("host", "disk", "host"))]
    for loss, kinds in losses if world == 1 else losses[:1]:
        want = _run(mesh, sf.Zero(3, persist_elements=0, travel=sf.Travel(bucket_bytes=64)), loss)
        assert_same(_placed(mesh, kinds, graph(loss), donate=kinds is host), want, exact=True)


@pytest.mark.nightly
def test_each_pass_and_all_of_them_keep_every_bit() -> None:
    mesh, kinds = sf.make_mesh({"dp": 1}), ("disk", "host", "host")
    want = _run(mesh, sf.Zero(3, persist_elements=0, travel=sf.Travel(bucket_bytes=64)))
    for changes in PASSES:
        jitted = graph(odd_loss, graph_schedule=sf.graph.Schedule(**{**vars(NOTHING), **changes}))
        assert_same(_placed(mesh, kinds, jitted), want, exact=True)


@pytest.mark.nightly
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_compiled_steps_agree_to_rounding() -> None:
    mesh = sf.make_mesh({"dp": 1})
    want = _run(mesh, sf.Zero(3, persist_elements=0, travel=sf.Travel(bucket_bytes=64)))
    assert_same(_placed(mesh, ("host", "host", "disk"), sf.jit(odd_loss, backend="inductor")), want, exact=False)


# The transfers of a step, their times, and its memory.

LAYERS, WIDTH = 4, 128
LEAF = 4 * WIDTH * WIDTH


def _deep(params: list[Tensor], x: Tensor) -> Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().mean()


def _ledger(mesh: sf.Mesh, zero: sf.Zero, loss: Any) -> tuple[sf.memory.Ledger, Any]:
    """The ledger of the second step; the lowered step, for which no byte was read."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(LAYERS)]
    step = sf.sharded_step(loss, sf.optim.adamw(1e-3), mesh=mesh, zero=zero)
    state, x = step.init(params), torch.ones(2, WIDTH)
    with sf.memory.ledger() as book:
        lowered = step.lower(state, x)
    assert not any(book.moved(*way) for way in WAYS)
    state, _ = step(state, x)
    with sf.memory.ledger() as book:
        sf.core.tree_map(lambda x: book.count(x.held, x.memory_kind), (state.params, state.opt_state))
        state, _ = step(state, x)
    step.close()
    return book, lowered


class _Late(concurrent.futures.Future[None]):
    """A copy that takes place at its wait: so peaks do not depend on the speed of the link."""

    def __init__(self, copy: Callable[..., None], *args: Any) -> None:
        super().__init__()
        self._copy = functools.partial(copy, *args)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            copy, self._copy = self._copy, functools.partial(lambda: None)
            copy()
            del copy
            self.set_result(None)
        return super().exception(timeout)


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_analyses_equal_the_ledger(world: int) -> None:
    late = mock.patch.object(_transfer, "_thread", lambda way: types.SimpleNamespace(submit=_Late))
    with late, mock.patch.object(_gradient_store, "LEAVING_BYTES", LEAF):
        _compare_books(sf.make_mesh({"dp": world}))


def _compare_books(mesh: sf.Mesh) -> None:
    placements = [("device", "host", "host"), ("host", "host", "disk"), ("disk", "disk", "host")]
    for kinds in placements if mesh.size == 1 else placements[1:2]:
        books: list[Any] = []
        for loss in (_deep, graph(_deep)):
            with tempfile.TemporaryDirectory() as directory:
                zero = _zero(kinds, directory, stage=3, bucket_bytes=0, chunk_bytes=LEAF)
                books.append(_ledger(mesh, zero, loss))
        (eager, _), (captured, lowered) = books
        cost, memory = lowered.cost_analysis(), lowered.memory_analysis()
        moved = [cost.moves.get(way, (0, 0))[1] for way in WAYS]
        assert moved == [eager.moved(*way) for way in WAYS] == [captured.moved(*way) for way in WAYS], kinds
        assert sum(moved) > 0
        if mesh.size == 1:  # a channel's buffers are its own affair
            for book in (eager, captured):
                assert abs(memory.by_memory["device"] / book.peak("device") - 1) < 0.05, kinds
        assert captured.peak("device") <= memory.by_memory["device"] + 4096
        assert memory.peak == memory.by_memory["device"] == sum(memory.by_kind.values())
        for kind in ("host", "disk"):
            assert captured.peak(kind) <= 1.02 * memory.by_memory[kind] + 4096, (kinds, kind)
            assert (memory.by_memory[kind] > 0) == (kind in kinds or kind == "host")


def _positions(lowered: Any, op: str) -> list[int]:
    return [i for i, n in enumerate(lowered.gm.graph.nodes) if getattr(n.target, "_opname", "") == op]


@pytest.mark.nightly
def test_fetched_leaves_come_early_and_gradients_leave_during_the_backward() -> None:
    mesh, shapes = sf.make_mesh({"dp": 2}, abstract=True), [torch.empty(WIDTH, WIDTH, device="meta")] * LAYERS
    zero = _zero(("disk", "host", "host"), "/nowhere", stage=3, bucket_bytes=0)
    lowered = [
        sf.sharded_step(graph(_deep, graph_schedule=schedule), sf.optim.adamw(1e-3), mesh=mesh, zero=zero).lower(
            shapes, torch.empty(2, WIDTH, device="meta")
        )
        for schedule in (NOTHING, sf.graph.Schedule(prefetch=LEAF, reuse=0, bucket=None))
    ]
    as_captured, scheduled = lowered
    first = [_positions(x, "mm")[0] for x in lowered]
    reads, fetches = (
        [sum(i < at for i in _positions(x, op)) for x, at in zip(lowered, first, strict=True)]
        for op in ("read_start", "to_device_start")
    )
    assert reads[0] == fetches[0] == 1 and reads[1] > fetches[1] >= 3
    for x in lowered:  # a share leaves before the last product, and is waited for after it
        last, down = _positions(x, "mm")[-1], _positions(x, "to_host_start")
        waits = [i for i, n in enumerate(x.gm.graph.nodes) if _waits_for_host(n)]
        assert sum(i < last for i in down) >= LAYERS - 2 and min(waits) > last
    sums, landed = _positions(scheduled, "psum_scatter_start"), _positions(scheduled, "to_host_start")
    products = _positions(scheduled, "mm")
    assert any(sums[0] < i < landed[0] for i in products)  # and the sum before it is covered, too
    assert not any(
        _positions(as_captured, "psum_scatter_start")[0] < i < _positions(as_captured, "to_host_start")[0]
        for i in _positions(as_captured, "mm")
    )
    wires = {"host": sf.graph.Link(1e6, 0.0), "disk": sf.graph.Link(1e6, 0.0)}
    on, off = (x.estimate(dataclasses.replace(sf.graph.cluster("cpu"), **wires)) for x in (scheduled, as_captured))
    read = scheduled.cost_analysis().moves["disk", "host"][1]
    assert on.communication["disk -> host"] == pytest.approx(read / 1e6)
    assert on.seconds < off.seconds and on.exposed["disk -> host"] < off.exposed["disk -> host"]
    assert "start disk -> host" in scheduled.as_text() and "host peak" in str(scheduled.memory_analysis())


def _waits_for_host(node: Any) -> bool:
    return node.target is WAIT and getattr(node.args[0].target, "_opname", "") == "to_host_start"


@pytest.mark.nightly
def test_states_on_disk_are_committed_and_resumed(tmp_path: pathlib.Path) -> None:
    zero = _zero(("disk", "host", "disk"), str(tmp_path), stage=3)
    params, x = [torch.eye(WIDTH)], torch.ones(2, WIDTH)

    def make() -> Any:
        return sf.sharded_step(graph(_deep), sf.optim.adamw(0.1), mesh=sf.make_mesh({"dp": 1}), zero=zero)

    step = make()
    state, _ = step(step.init(params), x)
    kept = state.params[0].full_tensor()
    step.close()
    again = make()
    state = again.resume(params)
    assert int(state.step) == 1 and torch.equal(state.params[0].full_tensor(), kept)
    state, metrics = again(state, x)
    assert metrics["finite"] and not torch.equal(state.params[0].full_tensor(), kept)
    again.close()


def test_a_move_inside_a_function_is_a_move_of_its_graph() -> None:
    def f(x: Tensor) -> Tensor:
        return (sf.memory.put(3 * sf.memory.put(x, "host"), "device") ** 2).sum()

    gradient = sf.jit(torch.func.grad(f), backend="graph")
    x = torch.arange(3.0)
    with sf.memory.ledger() as book:
        assert torch.equal(gradient(x), 18 * x)
    assert book.moved("device", "host") == book.moved("host", "device") == 2 * x.nbytes


@pytest.mark.nightly
def test_an_error_on_the_way_ends_the_step_and_leaves_the_state(tmp_path: pathlib.Path) -> None:
    zero = _zero(("disk", "device", "device"), str(tmp_path), stage=3)
    step = sf.sharded_step(graph(_deep), sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}), zero=zero)
    state, x = step.init([torch.eye(WIDTH)]), torch.ones(2, WIDTH)
    state, _ = step(state, x)
    with mock.patch.object(sf.memory.DiskWriter, "write", side_effect=OSError("the disk is gone")):
        with pytest.raises(OSError, match="the disk is gone"):
            step(state, x)
    state, metrics = step(state, x)
    assert metrics["finite"] and int(state.step) == 2
    step.close()
