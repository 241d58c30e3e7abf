"""Covers collectives of a loss through shared memory: values, graphs, failures, and ranks without it."""

import functools
import gc
import itertools
import os
import pathlib
import signal
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import shardfn as sf
from shardfn.collectives import Channel, bind_mesh
from shardfn.collectives.transport import _sharing
from shardfn.collectives.transport._channel import LOSS_CHANNELS
from shardfn.collectives.transport._memory import RINGS, SUMMED
from shardfn.collectives.transport._segment import NotSharedError
from shardfn.collectives.transport._sharing import VARIABLE, wished
from shardfn.memory import ledger
from shardfn.testing import distributed

pytestmark = pytest.mark.skipif(wished() == "gloo", reason="of the way through memory, which is not wished for")
_FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# A few elements, no element, several dims, and an odd number larger than a ring.
_SHAPES = [(1,), (0,), (7, 5), (RINGS // 4 + 3,)]


def _all(x: Tensor, axis: Any, size: int) -> list[Tensor]:
    """The result of every primitive for `x`, whose dim 0 has at least one row for each rank of an axis of that size."""
    around = [(i, (i + 1) % size) for i in range(size)]
    return [
        sf.psum(x, axis),
        sf.pmax(x, axis),
        sf.all_gather(x, axis),
        sf.psum_scatter(x, axis),
        sf.all_to_all(x, axis, split_dim=0, concat_dim=0),
        sf.ppermute(x, axis, around),
    ]


def _channels(mesh: sf.Mesh) -> list[Channel]:
    """The channels of the loss that a mesh has."""
    channels = LOSS_CHANNELS.get(mesh)
    return [] if channels is None else [x for (kind, _), x in channels._made.items() if kind == "loss"]


def _equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@distributed(world=[pytest.param(2, marks=pytest.mark.nightly), 3])
def test_values_are_those_of_rank_order_to_the_bit(world: int) -> None:
    made = torch.Generator().manual_seed(dist.get_rank())
    with sf.make_mesh({"dp": -1}, device="cpu") as mesh, bind_mesh(mesh):
        for shape, dtype in itertools.product(_SHAPES, _FLOATS):
            x = torch.randn(shape, generator=made).to(dtype)
            rows: list[Any] = [None] * world
            dist.all_gather_object(rows, x)
            wide = [r.to(torch.float64 if dtype == torch.float64 else torch.float32) for r in rows]
            total = wide[0].clone()
            for row in wide[1:]:
                total += row
            assert torch.equal(sf.psum(x, "dp"), total.to(dtype)), (shape, dtype)
            assert torch.equal(sf.pmax(x, "dp"), torch.stack(rows).amax(0)), (shape, dtype)
            assert torch.equal(sf.all_gather(x, "dp"), torch.cat(rows)), (shape, dtype)
        assert [x.shared_bytes > RINGS // 2 for x in _channels(mesh)] == [True]


@pytest.mark.nightly
@distributed(world=4)
def test_all_dtypes_and_orders_of_axes_are_as_by_gloo() -> None:
    made, found = torch.Generator().manual_seed(dist.get_rank()), {}
    cases = list(itertools.product(("dp", "tp", ("dp", "tp"), ("tp", "dp")), (torch.float32, torch.int64, torch.uint8)))
    inputs = {case: torch.randint(0, 9, (12, 3), generator=made).to(case[1]) for case in cases}
    for way in ("gloo", "memory"):
        mesh = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu")
        with pytest.MonkeyPatch.context() as patch, bind_mesh(mesh):
            patch.setenv(VARIABLE, way)
            for (axis, dtype), x in inputs.items():
                found[way, axis, dtype] = _all(x, axis, mesh.axis_size(axis))
        assert {bool(x.shared_bytes) for x in _channels(mesh)} == {way == "memory"}
    for axis, dtype in cases:
        _equal(found["memory", axis, dtype], found["gloo", axis, dtype])


@pytest.mark.nightly
@distributed(world=4)
def test_blocks_of_sums_have_one_order_by_memory_by_gloo_and_in_graphs() -> None:
    found = {}
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    for way in ("gloo", "memory"):
        mesh = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu")
        with pytest.MonkeyPatch.context() as patch, bind_mesh(mesh):
            patch.setenv(VARIABLE, way)
            for axis in ("dp", ("dp", "tp"), ("tp", "dp")):
                f = functools.partial(sf.psum_scatter, axis=axis)
                found[way, axis] = [f(x), sf.jit(f, backend="graph")(x)]
    for (_, axis), blocks in found.items():
        _equal(blocks, [found["gloo", axis][0]] * 2)


@distributed(world=2)
def test_sums_that_memory_does_not_know_go_by_the_group() -> None:
    assert torch.complex32 not in SUMMED
    with bind_mesh(sf.make_mesh({"dp": 2}, device="cpu")):
        assert torch.equal(sf.psum(torch.ones(3, dtype=torch.int16), "dp"), torch.full((3,), 2, dtype=torch.int16))
        with pytest.raises(TypeError, match=r"gloo sums no torch\.float8_e4m3fn"):
            sf.psum(torch.ones(2, dtype=torch.float8_e4m3fn), "dp")
        assert sf.psum(torch.ones(1), "dp") == 2


@distributed(world=2)
def test_derivatives_of_every_kind_go_through_memory() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    with bind_mesh(mesh):
        r = dist.get_rank()
        x = torch.arange(6.0, requires_grad=True)

        def f(x: Tensor) -> Tensor:
            return (sf.all_gather(x * (r + 1), "dp") ** 2).sum()

        (grad,) = torch.autograd.grad(f(x), x, create_graph=True)
        assert torch.equal(grad, 4 * (r + 1) ** 2 * x)
        (twice,) = torch.autograd.grad(grad.sum(), x)
        assert torch.equal(twice, torch.full((6,), 4.0 * (r + 1) ** 2))
        assert torch.equal(torch.func.grad(f)(x.detach()), grad.detach())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at the first use of forward mode
            tangent = torch.func.jvp(lambda x: sf.psum(x * x, "dp"), (x.detach(),), (torch.ones(6),))[1]
        assert torch.equal(tangent, 4 * x.detach())
        batched = torch.vmap(lambda x: sf.psum(x, "dp"))(torch.arange(6.0).view(2, 3) + r)
        assert torch.equal(batched, 2 * torch.arange(6.0).view(2, 3) + 1)
        assert _channels(mesh) and all(x.shared_bytes for x in _channels(mesh))


def _along_tp(params: dict[str, Tensor], x: Tensor) -> Tensor:
    y = sf.pvary(x, "tp") @ params["w"]
    return sf.psum(torch.tanh(y) @ params["v"], "tp").square().mean()


def _step(mesh: sf.Mesh, loss: Any) -> Any:
    specs = {"w": sf.P(None, "tp"), "v": sf.P("tp")}
    return sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, specs=specs, batch=sf.P(), donate=False)


def _params() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {"w": torch.randn(4, 6, generator=made), "v": torch.randn(6, 3, generator=made)}


@pytest.mark.day("")
@distributed(world=2)
@pytest.mark.parametrize("backend", ["", "graph", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_steps_and_their_graphs_send_through_memory_alone(backend: str) -> None:
    x, runs = torch.ones(5, 4), {}
    for way in ("gloo", "memory"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, way)
            counts = {"sums": 0}
            real = Channel.all_reduce

            def counted(
                self: Channel, *args: Any, counts: dict[str, int] = counts, real: Any = real, **named: Any
            ) -> Any:
                counts["sums"] += bool(self._lanes)
                return real(self, *args, **named)

            patch.setattr(Channel, "all_reduce", counted)
            mesh = sf.make_mesh({"tp": 2}, device="cpu")
            step = _step(mesh, sf.jit(_along_tp, backend=backend) if backend else _along_tp)
            state = step.init(_params())
            losses, before = [], 0
            for _ in range(3):
                before = counts["sums"]
                state, metrics = step(state, x)
                losses.append(float(metrics["loss"]))
            assert (counts["sums"] > before) == (way == "memory"), counts
            runs[way] = losses, {k: v.full_tensor() for k, v in state.params.items()}
            mesh.close()
    _equal(runs["memory"], runs["gloo"])


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("backend", ["", "graph"])
def test_a_rank_that_raises_in_a_loss_is_named_and_the_next_step_goes_through_memory(backend: str) -> None:
    mesh, fails = sf.make_mesh({"tp": 2}, device="cpu"), [False]

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = sf.psum(x @ params["w"] @ params["v"], "tp")
        if fails[0] and dist.get_rank() == 1:
            raise ValueError("over")
        return sf.psum(y, "tp").square().mean()

    step = _step(mesh, loss)
    good = _step(mesh, sf.jit(_along_tp, backend=backend) if backend else _along_tp)
    state, x = step.init(_params()), torch.ones(5, 4)
    want = [float(good(good.init(_params()), x)[1]["loss"]) for _ in range(2)]
    for _ in range(3):
        fails[0] = True
        start = time.monotonic()
        with pytest.raises((ValueError, sf.RankError), match="over"):
            step(state, x)
        assert time.monotonic() - start < 30
        fails[0] = False
        step(state, x)
        assert [float(good(good.init(_params()), x)[1]["loss"]) for _ in range(2)] == want
        assert any(x.shared_bytes for x in _channels(mesh))


@pytest.mark.nightly
@distributed(world=2)
def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    mesh = sf.make_mesh({"tp": 2}, device="cpu", timeout=2)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        if dist.get_rank() == 1 and late[0]:
            time.sleep(6)
        return sf.psum(x @ params["w"] @ params["v"], "tp").square().mean()

    late = [False]
    step, x = _step(mesh, loss), torch.ones(5, 4)
    state, _ = step(step.init(_params()), x)
    late[0] = True
    start = time.monotonic()
    with pytest.raises(sf.RankError, match=r"rank 1 (did not reach|reached)|given up waiting for this one, rank 1"):
        step(state, x)
    assert time.monotonic() - start < 30


@distributed(world=3, timeout=60)
def _die_in_a_sum(signal_number: int, out: pathlib.Path) -> None:
    rank, alive = dist.get_rank(), [True]

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = sf.psum(x @ params["w"] @ params["v"], "tp")
        if rank == 1 and not alive[0]:
            os.kill(os.getpid(), signal_number)
        return sf.psum(y, "tp").square().mean()

    step, x = _step(sf.make_mesh({"tp": 3}, device="cpu", timeout=20), loss), torch.ones(5, 4)
    state, _ = step(step.init(_params()), x)
    alive[0] = False
    start = time.monotonic()
    try:
        step(state, x)
    except sf.RankError as error:
        (out / f"rank{rank}").write_text(f"{time.monotonic() - start:.1f} {error}")
        raise


def test_a_rank_that_is_killed_in_a_sum_wakes_those_who_wait(tmp_path: pathlib.Path) -> None:
    with pytest.raises(sf.RankError, match="rank 1"):
        _die_in_a_sum(signal.SIGKILL, tmp_path)
    told = {path.name: path.read_text().split(" ", 1) for path in tmp_path.iterdir()}
    assert told and all(float(seconds) < 15 and "rank 1 died" in text for seconds, text in told.values()), told


@distributed(world=2)
def test_without_shared_memory_all_goes_by_gloo_with_one_warning() -> None:
    def refuses(self: Any, *args: Any) -> None:
        raise NotSharedError("there is none")

    found = {}
    for way in ("memory", "gloo"):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            patch.setenv(VARIABLE, way)
            patch.setattr(_sharing, "_SAID", set())
            patch.setattr(_sharing.Lanes, "__init__", refuses)
            with sf.make_mesh({"dp": 2}, device="cpu") as mesh, bind_mesh(mesh):
                x = torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
                found[way] = _all(x, "dp", 2)
                assert [x.shared_bytes for x in _channels(mesh)] == [0]
            told = [str(w.message) for w in said if "talk by gloo" in str(w.message)]
            assert len(told) == (way == "memory" and dist.get_rank() == 0), told
    _equal(found["memory"], found["gloo"])


@distributed(world=2)
def test_a_program_s_own_collectives_on_the_same_group_stay_its_own() -> None:
    grid = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    group, mesh = grid.get_group("dp"), sf.core.as_mesh(grid)
    with bind_mesh(mesh):
        for turn in range(3):
            x = torch.full((3,), float(turn + dist.get_rank()))
            assert torch.equal(sf.psum(x, "dp"), torch.full((3,), 2.0 * turn + 1))
            dist.all_reduce(x, group=group)
            assert float(x[0]) == 2 * turn + 1
    mesh.close()
    assert dist.get_world_size(group) == 2
    dist.barrier(group)


@pytest.mark.nightly
@distributed(world=2)
def test_meshes_of_one_group_do_not_know_one_another() -> None:
    grid = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def works(mesh: sf.Mesh) -> bool:
        with bind_mesh(mesh):
            return float(sf.psum(torch.ones(1), "dp")) == 2

    first, second, third = sf.make_mesh({"dp": 2}, device="cpu"), sf.make_mesh({"dp": -1}), sf.core.as_mesh(grid)
    assert len({mesh.group("dp") for mesh in (first, second, third)}) == 1
    assert all(works(mesh) for mesh in (first, second, third, first))
    second.close()
    assert works(first) and works(third)
    first.close()
    assert works(third)
    for _ in range(2):
        assert works(sf.make_mesh({"dp": 2}, device="cpu"))  # and is dropped
        gc.collect()
        assert works(third)
    failing = sf.make_mesh({"dp": 2}, device="cpu")

    def loss(params: Tensor, x: Tensor) -> Tensor:
        if dist.get_rank():
            raise ValueError("over")
        return sf.psum(x @ params, "dp").square().mean()

    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=failing, batch=sf.P())
    with pytest.raises((ValueError, sf.RankError), match="over"):
        step(step.init(torch.ones(4, 3)), torch.ones(2, 4))
    assert works(third) and works(failing)


@distributed(world=2)
@pytest.mark.parametrize("backend", ["graph", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_function_captured_before_a_step_fails_goes_on_after_it(backend: str) -> None:
    mesh, fails = sf.make_mesh({"tp": 2}, device="cpu"), [True]
    f = sf.jit(lambda x: sf.psum(x, "tp") * 2, backend=backend)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = sf.psum(x @ params["w"] @ params["v"], "tp")
        if fails[0] and dist.get_rank():
            raise ValueError("over")
        return y.square().mean()

    with bind_mesh(mesh):
        assert float(f(torch.ones(1))) == 4
    step, x = _step(mesh, loss), torch.ones(5, 4)
    state = step.init(_params())
    with pytest.raises((ValueError, sf.RankError), match="over"):
        step(state, x)
    with bind_mesh(mesh):
        assert float(f(torch.ones(1))) == 4
    fails[0] = False
    step(state, x)
    with bind_mesh(mesh):
        assert float(f(torch.ones(1))) == 4 and float(sf.psum(torch.ones(1), "tp")) == 2


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_losses_that_torch_compiles_run_uncompiled_along_an_axis_of_the_model(backend: str) -> None:
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tests' checks of shapes have functions that dynamo does not know
        x, losses = torch.ones(5, 4), []
        for loss in (_along_tp, torch.compile(_along_tp, backend=backend)):
            step = _step(mesh, loss)
            state = step.init(_params())
            for _ in range(3):
                state, metrics = step(state, x)
                losses.append(float(metrics["loss"]))
        torch.testing.assert_close(losses[:3], losses[3:])
        assert _channels(mesh) and all(x.shared_bytes for x in _channels(mesh))


@distributed(world=2)
def test_the_maximum_of_a_nan_and_a_number_is_nan_on_all_ranks() -> None:
    x = torch.tensor([torch.nan, 1.0] if dist.get_rank() else [1.0, torch.nan])
    with bind_mesh(sf.make_mesh({"dp": 2}, device="cpu")):
        assert sf.pmax(x, "dp").isnan().all()


@distributed(world=2)
def test_an_end_of_the_mesh_takes_the_memory_with_it() -> None:
    for _ in range(3):
        mesh = sf.make_mesh({"dp": 2}, device="cpu")
        with bind_mesh(mesh):
            assert sf.psum(torch.ones(1), "dp") == 2
        (channel,) = _channels(mesh)
        lanes = channel._lanes
        mesh.close()
        assert not _channels(mesh) and lanes is not None and lanes.why() == "this communicator has ended"
        with bind_mesh(mesh), pytest.raises(ValueError, match="is closed, so it cannot send anything"):
            sf.psum(torch.ones(1), "dp")


@distributed(world=2)
def test_a_backward_comes_after_the_mesh_was_bound_and_under_modes_that_look_at_it() -> None:
    with bind_mesh(sf.make_mesh({"dp": 2}, device="cpu")):
        x = torch.arange(6.0, requires_grad=True)
        y = sf.all_gather(x * (dist.get_rank() + 1), "dp")
    with FlopCounterMode(display=False):
        (g,) = torch.autograd.grad((y**2).sum(), x)
    assert torch.equal(g, 4 * (dist.get_rank() + 1) ** 2 * x.detach())


@distributed(world=2)
def test_the_ledger_counts_the_memory_of_a_loss_s_sums() -> None:
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        step, x = _step(mesh, _along_tp), torch.ones(5, 4)
        state = step.init(_params())
        with ledger() as book:
            for _ in range(2):
                state, _ = step(state, x)
        own = sum(x.shared_bytes for x in _channels(mesh))
        assert own >= RINGS and book.peak("host") >= own
