"""Covers ZeRO's known cases with exact numbers: analytic gradients, means, accumulation, traffic, layout, init."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import GatherWire
from shardfn.engine.transfers._gather import GatheredUnit
from shardfn.testing import distributed


@distributed(world=2)
def test_analytic_integers_of_three_chained_leaves() -> None:
    """3 x 5 leaves filled i in the first half of the flat order and 2 i in the second; x = y = 1."""
    rank = torch.distributed.get_rank()
    params = {}
    for i in (1, 2, 3):
        flat = torch.full((15,), float(i))
        flat[8:] = 2.0 * i
        params[f"w{i}"] = flat.view(3, 5)

    def loss(p: dict, b: Tensor) -> Tensor:
        h = b[0, 0]
        out = torch.ones(()) * h
        for i in (1, 2, 3):
            out = out * p[f"w{i}"]
        return (out - 1).abs().sum()

    grads = {}
    take = sf.optim.GradientTransformation(
        lambda p: (), lambda g, s, p=None, specs=None: (grads.update(g) or sf.core.tree_map(torch.zeros_like, g), s)
    )
    step = sf.sharded_step(loss, take, mesh=sf.make_mesh({"dp": 2}), zero=sf.Zero(stage=3, persist_elements=0))
    state = step.init(params)
    for _ in range(3):
        state, metrics = step(state, torch.ones(1, 1))
        assert metrics["loss"] == 8 * 5 + 7 * 47
        expected = {"w3": (2.0, 8.0), "w2": (3.0, 12.0), "w1": (6.0, 24.0)}
        for name, (low, high) in expected.items():
            flat = torch.full((15,), low)
            flat[8:] = high
            columns = flat.view(3, 5)[:, :3] if rank == 0 else flat.view(3, 5)[:, 3:]
            assert torch.equal(grads[name], columns), (name, grads[name])


@pytest.mark.nightly
@distributed(world=2)
def test_gradient_is_the_mean_over_ranks() -> None:
    rank = torch.distributed.get_rank()
    for stage in range(4):
        zero = sf.Zero(stage=stage, persist_elements=0)
        step = sf.sharded_step(
            lambda w, x: (w * x[0]).sum(), sf.optim.sgd(1.0), mesh=sf.make_mesh({"dp": 2}), zero=zero
        )
        state, metrics = step(step.init(torch.zeros(2)), torch.tensor([[1.0, 2.0]]) * (1 + 2 * rank))
        assert state.params.full_tensor().tolist() == [-2.0, -4.0]
        assert metrics["grad_norm"] == pytest.approx(math.sqrt(20), rel=1e-6)


@pytest.mark.nightly
@distributed(world=2)
def test_last_microbatch_is_reduced_too() -> None:
    rank = torch.distributed.get_rank()
    x = torch.tensor([[1.0, 3, 5, 7], [11, 13, 15, 17]]) + 18 * rank
    for stage in range(4):
        for accumulate in ("each", "once"):
            zero = sf.Zero(stage=stage, persist_elements=0, pace=sf.Pace(accumulate=accumulate))
            loss = sf.accumulate(lambda w, b: (w * b[0]).sum(), 2)
            step = sf.sharded_step(loss, sf.optim.sgd(1.0), mesh=sf.make_mesh({"dp": 2}), zero=zero)
            state, _ = step(step.init(torch.zeros(4)), x)
            assert state.params.full_tensor().tolist() == [-15.0, -17.0, -19.0, -21.0]


@distributed(world=[2, pytest.param(4, marks=pytest.mark.nightly)])
def test_bytes_sent_are_those_of_the_paper(world: int) -> None:
    size = {"w1": (64, 32), "w2": (32, 64), "w3": (64, 32)}
    params = {k: torch.ones(*s) / 64 for k, s in size.items()}
    psi = sum(p.numel() * 4 for p in params.values())

    def loss(p: dict, x: Tensor) -> Tensor:
        return (x @ p["w1"] @ p["w2"] @ p["w3"]).square().mean()

    for stage, volume in ((0, 2), (1, 2), (2, 2), (3, 3)):
        mesh = sf.make_mesh({"dp": world})
        zero = sf.Zero(
            stage=stage, persist_elements=0, travel=sf.Travel(bucket_bytes=0), pace=sf.Pace(prefetch_bytes=0)
        )
        step = sf.sharded_step(loss, sf.optim.adamw(1e-3), mesh=mesh, zero=zero)
        state = step.init(params)
        state, _ = step(state, torch.ones(2, 64))
        with sf.count_traffic() as traffic:
            state, _ = step(state, torch.ones(2, 64))
        bulk = sum(b for (op, _), (_, b) in traffic.by_op.items() if op != "psum")
        expected = volume * psi * (world - 1) / world
        if stage == 3:
            # Less than the paper's: w3, last in the forward, is first in the backward and not gathered twice; w1 is not
            # gathered in the backward at all, since the gradient of x is not needed.
            expected -= (params["w1"].numel() + params["w3"].numel()) * 4 * (world - 1) / world
        assert bulk == expected, (stage, traffic.by_op)


@pytest.mark.nightly
@distributed(world=2)
def test_live_whole_parameters_are_bounded_by_the_window() -> None:
    leaf, num = 64 * 64 * 4, 12
    alive: list = []
    peak = [0]
    start = GatherWire.start

    def counted(wire, pieces):
        into = pieces[0].new_empty(sum(wire.packing.sizes))
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(into.untyped_storage()))
        peak[0] = max(peak[0], sum(not ref.expired() for ref in alive) * leaf)
        return wire.start_into(pieces, into)

    def loss(p: list, x: Tensor) -> Tensor:
        for w in p:
            x = torch.tanh(x @ w)
        return x.mean()

    GatherWire.start = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        params = [torch.eye(64) for _ in range(num)]
        for window in (0, 2 * leaf, 4 * leaf):
            zero = sf.Zero(
                stage=3, persist_elements=0, travel=sf.Travel(bucket_bytes=0), pace=sf.Pace(prefetch_bytes=window)
            )
            step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 2}), zero=zero)
            state = step.init(params)
            for _ in range(2):
                alive.clear()
                peak[0] = 0
                state, _ = step(state, torch.ones(2, 64))
            assert peak[0] <= max(window, leaf) + leaf, (window, peak)
            assert sum(not ref.expired() for ref in alive) == 0
    finally:
        GatherWire.start = start


@distributed(world=4)
def test_states_are_kept_in_pieces() -> None:
    mesh = sf.make_mesh({"dp": 4})
    params = {"w": torch.ones(10, 3), "row": torch.ones(1, 9), "one": torch.ones(1), "s": torch.ones(())}
    step = sf.sharded_step(
        lambda p, b: p["w"].sum(), sf.optim.adam(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0)
    )
    state = step.init(params)
    assert {k: s.spec for k, s in step.specs(params).items()} == {
        "w": sf.P("dp"),
        "row": sf.P(None, "dp"),
        "one": sf.P(),
        "s": sf.P(),
    }
    rank = mesh.rank
    assert state.params["w"].local.shape == (3 if rank < 3 else 1, 3)
    assert state.params["row"].local.shape == (1, 3 if rank < 3 else 0)
    mu = state.opt_state[0].mu
    assert mu["w"].local.shape == state.params["w"].local.shape and mu["w"].spec == sf.P("dp")
    assert state.params["w"].to_dtensor().full_tensor().shape == (10, 3)


def _init(key: Tensor) -> dict:
    keys = sf.split(key, 2)
    return {
        "w": sf.core.normal(keys[0], (37, 11), stddev=0.1),
        "v": sf.core.uniform(keys[1], (3, 50)),
        "b": sf.core.zeros((7,)),
    }


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly), 3])
def test_sharded_init_draws_own_blocks_bit_equal_to_the_whole(world: int) -> None:
    from shardfn.core import _draw

    whole = _init(sf.key(5))
    drawn = [0]
    sample = _draw._draw_block

    def counted(key, shape, slices, *args):
        out = sample(key, shape, slices, *args)
        drawn[0] += out.numel()
        return out

    _draw._draw_block = counted
    try:
        step = sf.sharded_step(
            lambda p, b: p["w"].sum(),
            sf.optim.sgd(0.1),
            mesh=sf.make_mesh({"dp": world}),
            zero=sf.Zero(3, persist_elements=0),
        )
        state = step.init(_init, sf.key(5))
    finally:
        _draw._draw_block = sample
    corners = 4 * 4 + 3 * 4 if world > 1 else 0  # by which the ranks see that they draw the same
    assert drawn[0] == state.params["w"].local.numel() + state.params["v"].local.numel() + corners
    for name, x in whole.items():
        assert torch.equal(state.params[name].full_tensor(), x)


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_apply_sees_the_leaves_of_the_loss(world: int) -> None:
    params = {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(4)}
    step = sf.sharded_step(
        lambda p, b: p["w"].sum(),
        sf.optim.sgd(0.1),
        mesh=sf.make_mesh({"dp": world}),
        zero=sf.Zero(3, persist_elements=0),
    )
    state = step.init(params)

    def forward(p: dict, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, p["w"], p["b"])

    for _ in range(3):
        out = step.apply(forward, state, torch.ones(2, 3))
        assert torch.equal(out, torch.ones(2, 3) @ params["w"].t() + 1)
        assert not out.requires_grad


@distributed(world=2)
def test_parameters_are_immutable_inside_the_loss() -> None:
    def loss(p: dict, x: Tensor) -> Tensor:
        p["w"].add_(1.0)
        return p["w"].sum()

    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 2}), zero=sf.Zero(3, persist_elements=0))
    with pytest.raises(ValueError, match=r"params\['w'\] is written to inside the loss \(by add_\)"):
        step(step.init({"w": torch.ones(4)}), torch.ones(1))


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_aux_is_averaged_over_ranks_and_microbatches(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})

    def loss(w: Tensor, x: Tensor) -> tuple:
        aux = {"mean": x.mean(), "share": sf.WeightedMean((x > 2).sum(), x.numel())}
        return (w * x).mean(), aux

    step = sf.sharded_step(sf.accumulate(loss, 2), sf.optim.sgd(0.1), mesh=mesh, has_aux=True)
    x = torch.arange(4.0).chunk(world)[mesh.rank]
    _, metrics = step(step.init(torch.ones(())), x)
    assert metrics["mean"] == 1.5 and metrics["share"] == 0.25


@pytest.mark.nightly
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly), 3])
def test_one_gradient_tensor_for_two_leaves_is_not_overwritten(world: int) -> None:
    """Autograd may hand one tensor, or overlapping ones, to several leaves; sums and updates must not mix them."""
    rank = 0 if world == 1 else torch.distributed.get_rank()

    def shared(p: dict, x: Tensor) -> Tensor:
        return ((p["a"] + p["b"]) * x.mean()).sum() + (p["z"] + torch.cat([p["c"], p["d"]])).sum() / 4

    x = 1.0 + 2.0 * torch.arange(world)
    for stage in range(4):
        for clip in (False, True):
            zero = sf.Zero(stage=stage, persist_elements=0, travel=sf.Travel(bucket_bytes=0))
            optimizer = sf.optim.sgd(1.0)
            if clip:
                optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(1e6), optimizer)
            step = sf.sharded_step(shared, optimizer, mesh=sf.make_mesh({"dp": world}), zero=zero)
            state = step.init({k: torch.zeros(4 if k in "abz" else 2) for k in "abcdz"})
            state, _ = step(state, x[rank : rank + 1])
            want = {"a": -x.mean(), "b": -x.mean(), "z": -0.25, "c": -0.25, "d": -0.25}
            for name, value in want.items():
                got = state.params[name].full_tensor()
                assert torch.allclose(got, torch.full_like(got, float(value))), (stage, name, got)


@pytest.mark.nightly
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_gradient_that_the_user_keeps_is_not_overwritten(world: int) -> None:
    kept = torch.full((4,), 2.0)

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w: Tensor) -> Tensor:
            return w.sum()

        @staticmethod
        def backward(ctx, *grads: Tensor) -> Tensor:
            return kept

    for stage in range(4):
        zero = sf.Zero(stage=stage, persist_elements=0, travel=sf.Travel(bucket_bytes=0))
        optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(1e-3), sf.optim.sgd(1.0))
        step = sf.sharded_step(lambda w, x: Keep.apply(w), optimizer, mesh=sf.make_mesh({"dp": world}), zero=zero)
        step(step.init(torch.ones(4)), torch.ones(1))
        assert torch.equal(kept, torch.full((4,), 2.0)), stage


@distributed(world=2)
def test_writing_through_a_view_of_a_parameter_is_refused() -> None:
    def loss(p: dict, x: Tensor) -> Tensor:
        return (p["w"].view(-1).mul_(2) ** 2).sum()

    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 2}), zero=sf.Zero(3, persist_elements=0))
    with pytest.raises(ValueError, match=r"params\['w'\] is written to inside the loss, through a view"):
        step(step.init({"w": torch.ones(4)}), torch.ones(1))


@distributed(world=2)
def test_ranks_that_draw_or_return_different_things_raise() -> None:
    rank = torch.distributed.get_rank()
    mesh = sf.make_mesh({"dp": 2})
    step = sf.sharded_step(lambda p, b: p["w"].sum(), sf.optim.sgd(0.1), mesh=mesh)
    with pytest.raises(sf.RankError, match=r"different values.*\n.*params\['b'\]"):
        step.init(lambda: {k: sf.core.normal(sf.key(rank), (3,)) for k in "wb"})

    def loss(p: Tensor, x: Tensor):
        return p.sum(), ({"a": 1.0} if rank else {"b": 1.0})

    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, has_aux=True)
    with pytest.raises(sf.RankError, match=r"(?s)the result of the loss.*rank 0: a mean and aux \['b'\].*\['a'\]"):
        step(step.init(torch.ones(3)), torch.ones(1))
    # the order of names is not a difference
    names = ("a", "b") if rank else ("b", "a")
    step = sf.sharded_step(
        lambda p, x: (p.sum(), {n: 1.0 if n == "a" else 100.0 for n in names}),
        sf.optim.sgd(0.1),
        mesh=mesh,
        has_aux=True,
    )
    _, metrics = step(step.init(torch.ones(3)), torch.ones(1))
    assert metrics["a"] == 1 and metrics["b"] == 100


class _Scaled(torch.autograd.Function):
    """sum(w * x), by hand; `apply` passes its arguments on without `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        return (w * x).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        w, x = ctx.saved_tensors
        return grads[0] * x, grads[0] * w


@pytest.mark.nightly
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_function_of_ones_own_has_the_gradients_of_one_device(world: int) -> None:
    def loss(p: dict[str, Any], x: Tensor) -> Tensor:
        out = (
            _Scaled.apply(p["w"], x[0])
            + _Scaled.apply(p["stack"], x[0].expand(2, 6))
            + _Scaled.apply(p["stack"][1], x[0])
        )
        return out + (p["w"] ** 2).sum()  # and taken the usual way, too

    params = {"w": torch.arange(6.0), "stack": torch.ones(2, 6)}
    specs = {"w": sf.Sharding(sf.P()), "stack": sf.Sharding(sf.P(), stacked=True)}
    x = torch.arange(1.0, 7.0)
    want = {"w": params["w"] - 0.5 * (x + 2 * params["w"]), "stack": 1 - 0.5 * torch.stack([x, 2 * x])}
    for run in (loss, sf.jit(loss, backend="graph"), sf.remat(loss)):
        placed: list[dict[str, Any]] = [{}, {"params": "host", "grads": "host", "optimizer": "host"}]
        for kinds in placed:
            zero = sf.Zero.flat(stage=3, persist_elements=0, **kinds)
            step = sf.sharded_step(run, sf.optim.sgd(0.5), mesh=sf.make_mesh({"dp": world}), zero=zero, specs=specs)
            state, _ = step(step.init(params), x[None])
            got = sf.unshard(state.params)
            assert all(torch.equal(got[name], want[name]) for name in want), (got, want)


@pytest.mark.nightly
@distributed(world=[pytest.param(2, marks=pytest.mark.nightly), 3])
def test_a_window_for_all_leaves_lets_the_gather_after_the_update_run_into_the_next_forward(world: int) -> None:
    """It is sent once a step, as after the update of stage 2, and each leaf is waited for at its first use."""
    draw = torch.Generator().manual_seed(0)
    params = {f"w{i}": torch.randn(7, 7, generator=draw) for i in range(4)}
    x = torch.randn(6, 7, generator=draw).chunk(world)[torch.distributed.get_rank()]
    mesh, told = sf.make_mesh({"dp": world}, device="cpu"), list[str]()

    def loss(p: dict, x: Tensor) -> Tensor:
        for i in range(4):
            x = torch.tanh(x @ p[f"w{i}"])
            told.append(f"used w{i}")
        return x.square().mean()

    def made(stage: int, pace: sf.Pace) -> Any:
        zero = sf.Zero(stage, persist_elements=0, travel=sf.Travel(bucket_bytes=0), pace=pace)
        return sf.sharded_step(loss, sf.optim.adamw(0.1), mesh=mesh, zero=zero, donate=False)

    plain, ahead = made(2, sf.Pace()), made(3, sf.Pace(prefetch_bytes=1 << 40))
    states = [step.init(params) for step in (plain, ahead)]
    states = [step(state, x)[0] for step, state in zip((plain, ahead), states, strict=True)]  # the order is learnt
    for _ in range(2):
        sent = []
        for i, step in enumerate((plain, ahead)):
            with sf.count_traffic() as traffic, _gathers_told(told):
                again = step(states[i], x)[0]
                told.clear()
                states[i] = step(states[i], x)[0]  # from the same state, which anybody may read
            sent.append(traffic.by_op["all_gather", ("dp",)][1])
            assert _bits_of(again) == _bits_of(states[i])
        assert sent[0] == sent[1]  # a gather of each leaf a step, and no second one for the backward
        assert _bits_of(states[0]) == _bits_of(states[1])
    begun, *rest = "".join(f"{word[0]}{word[-1]} " for word in told).split("a", 1)
    assert begun.split() == ["s0", "s1", "s2", "s3"]  # all set out before the first is waited for
    assert f"a{rest[0]}".split() == ["a0", "u0", "a1", "u1", "a2", "u2", "a3", "u3"]


def _bits_of(state: Any) -> list[list[float]]:
    return [x.full_tensor().flatten().tolist() for x in sf.core.tree_leaves(state.params)]


@contextlib.contextmanager
def _gathers_told(told: list[str]) -> Iterator[None]:
    """Notes when the gather of a leaf sets out, and when it is waited for."""
    init, arrive = GatheredUnit.__init__, GatheredUnit.arrive

    names: dict[int, str] = {}

    def began(self: Any, wire: Any, pieces: Any, leaves: Any) -> None:
        names[id(self)] = leaves[0].path[-3:-2]
        told.append(f"sent {names[id(self)]}")
        init(self, wire, pieces, leaves)

    def arrived(self: Any) -> None:
        if not self.arrived:
            told.append(f"arrived {names[id(self)]}")
        arrive(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatheredUnit, "__init__", began)
        patch.setattr(GatheredUnit, "arrive", arrived)
        yield
