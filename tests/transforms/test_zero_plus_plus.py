"""Covers ZeRO++: secondary pieces, quantised gathers and reductions: values, bytes by axis, staleness, jit, errors."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import tree_leaves
from shardfn.testing import (
    ODD_TRAINABLE,
    Run,
    assert_same,
    distributed,
    odd_batch,
    odd_loss,
    odd_params,
    on_mesh,
    shard_rows,
)

ROWS = sf.P(("node", "gpu"))
AXES: dict[str, Any] = {"stage": 3, "axis": ("node", "gpu")}
# Small enough that the odd leaves fall on both sides of each threshold.
ODD: dict[str, Any] = {**AXES, "persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}
ALL: dict[str, Any] = {"gather": "int8", "secondary_axis": "gpu", "reduce": "int4"}


def _mesh() -> sf.Mesh:
    return sf.make_mesh({"node": 2, "gpu": 2})


def _runs(loss: Any, batches: list, zero: sf.Zero) -> tuple[Any, list[int]]:
    """A run, and the bytes that each of its steps gathers across nodes."""
    mesh, far, metrics = _mesh(), [], []
    step = sf.sharded_step(
        loss, sf.optim.adamw(1e-2), mesh=mesh, batch=ROWS, zero=zero, trainable=ODD_TRAINABLE, donate=False
    )
    state = step.init(odd_params())
    for batch in batches:
        with sf.count_traffic() as traffic:
            state, measured = step(state, shard_rows(batch, ROWS, mesh))
        far.append(traffic.by_op.get(("all_gather", ("node",)), [0, 0])[1])
        metrics.append(measured)
    return Run(sf.unshard(state.params), sf.unshard(state.opt_state), metrics), far


@pytest.mark.nightly
@pytest.mark.parametrize("near", ["gpu", pytest.param("node", marks=pytest.mark.nightly)])
@distributed(world=4)
def test_secondary_pieces_never_change_a_bit_and_are_never_stale(near: str) -> None:
    batches, rule = [odd_batch(n) for n in range(2)], {**ODD, "secondary_axis": near}
    loss = sf.accumulate(odd_loss if near == "gpu" else sf.remat(odd_loss), 3)
    want, none = _runs(loss, batches, sf.Zero.flat(**ODD))
    got, far = _runs(loss, batches, sf.Zero.flat(**rule))
    assert_same(got, want, exact=True)
    assert all(m["grad_norm"] > 0 for m in got.metrics)
    if near == "gpu":
        # Leaves cross nodes once a step, however many times they are used in it, and in each step anew.
        once, fewer = _runs(odd_loss, batches[:1], sf.Zero.flat(**rule))
        assert none == [0, 0] and far == 2 * fewer and far[0] > 0 and once.metrics[0]["grad_norm"] > 0
    else:
        got, _ = _runs(loss, batches, sf.Zero.flat(**rule, params="host", optimizer="host"))
        assert_same(got, want, exact=True)


def _block(h: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return h + torch.tanh(h @ p["w"].t()) @ p["w"], h.square().mean()


def _scanned(p: dict, batch: dict) -> Tensor:
    h, ys = sf.scan(sf.remat(_block), batch["x"] @ p["in"], p["blocks"])
    return ((h @ p["out"] - batch["y"]) ** 2).mean() + ys.sum() * p["small"]


def _scanned_params() -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    blocks = {"w": torch.randn(5, 7, 6, generator=g) / 4}
    rest = {"in": torch.randn(5, 6, generator=g), "out": torch.randn(6, 3, generator=g)}
    return {"blocks": blocks, **rest, "small": torch.tensor(0.1)}


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{**ALL, "block_elements": 4}, {"secondary_axis": "gpu"}], ids=["all", "secondary"])
@distributed(world=4)
def test_a_captured_step_has_the_bits_of_the_eager_one(options: dict) -> None:
    mesh, batches = _mesh(), [odd_batch(n) for n in range(2)]
    specs = {"blocks": sf.Sharding(sf.P(), stacked=True), "in": sf.P(), "out": sf.P(), "small": sf.P()}
    how: dict[str, Any] = {"mesh": mesh, "batch": ROWS, "specs": specs, "zero": sf.Zero.flat(**ODD, **options)}
    loss, tx = sf.accumulate(_scanned, 3), sf.optim.adamw(1e-2)
    want = on_mesh(loss, tx, _scanned_params(), batches, **how)
    step = sf.sharded_step(sf.jit(loss, backend="graph"), tx, **how)
    state, rows = step.init(_scanned_params()), [shard_rows(b, ROWS, mesh) for b in batches]
    predicted = step.lower(state, rows[0]).cost_analysis().transfers
    metrics = []
    for x in rows:
        with sf.count_traffic() as traffic:
            state, measured = step(state, x)
        assert {(op, ",".join(axes)): tuple(v) for (op, axes), v in traffic.by_op.items()} == predicted
        metrics.append(measured)
    got = want._replace(params=sf.unshard(state.params), opt_state=sf.unshard(state.opt_state), metrics=metrics)
    assert_same(got, want, exact=True)


# The quantiser, written once more.


def _rounded(x: Tensor, bits: int, block: int) -> Tensor:
    """A flat tensor after a journey in blocks."""
    rows = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    top = rows.abs().amax(1, keepdim=True)
    top = torch.where(top == 0, 2.0 ** (bits - 1), top)
    half = 2 ** (bits - 1)
    codes = (rows * (half / top)).round().clamp(-half, half - 1)
    return (codes * (top / half)).view(-1)[: x.numel()]


def _blocks(x: Tensor) -> list[Tensor]:
    """The rows of each of 2 x 2 ranks, flat; the first of two gets the odd one."""
    halves = x.split(-(-len(x) // 2))
    return [quarter.reshape(-1) for half in halves for quarter in half.split(-(-len(half) // 2))]


def _net(p: dict, batch: dict) -> Tensor:
    return ((torch.tanh(batch["x"] @ p["w"].t()) @ p["v"] * p["s"] - batch["y"]) ** 2).mean()


def _net_params() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {"w": torch.randn(38, 5, generator=g), "v": torch.randn(38, 3, generator=g) / 6, "s": torch.ones(3)}


def _simulated(batches: list, zero: sf.Zero, tx: Any) -> dict[str, Tensor]:
    """Quantised training on one process, rank by rank."""
    params, state = _net_params(), tx.init(_net_params())
    for batch in batches:
        seen = {
            k: x if x.numel() <= zero.persist_elements else _journey(x, 8, zero.travel.block_elements)
            for k, x in params.items()
        }
        grads = [_gradients(seen, {k: v[3 * r : 3 * r + 3] for k, v in batch.items()}) for r in range(4)]
        total = {k: _total([g[k] for g in grads], zero) for k in params}
        updates, state = tx.update(total, state, params)
        params = {k: params[k] + updates[k] for k in params}
    return params


def _journey(x: Tensor, bits: int, block: int) -> Tensor:
    return torch.cat([_rounded(b, bits, block) for b in _blocks(x)]).view(x.shape)


def _gradients(params: dict, batch: dict) -> dict[str, Tensor]:
    leaves = {k: x.clone().requires_grad_() for k, x in params.items()}
    return dict(zip(leaves, torch.autograd.grad(_net(leaves, batch) / 4, list(leaves.values())), strict=True))


def _total(grads: list[Tensor], zero: sf.Zero) -> Tensor:
    if grads[0].numel() <= zero.persist_elements:
        return sum(grads[1:], grads[0])
    sent = [[_rounded(b, 4, zero.travel.block_elements) for b in _blocks(g)] for g in grads]
    if zero.travel.secondary_axis is None:
        total = [a + b + c + d for a, b, c, d in zip(*sent, strict=True)]
    else:
        nodes = [
            [_rounded(a + b, 4, zero.travel.block_elements) for a, b in zip(*sent[i : i + 2], strict=True)]
            for i in (0, 2)
        ]
        total = [a + b for a, b in zip(*nodes, strict=True)]
    return torch.cat(total).view(grads[0].shape)


@pytest.mark.nightly
@distributed(world=4)
def test_quantised_steps_equal_an_explicit_simulation_and_train_as_well() -> None:
    batches = [odd_batch(n % 4) for n in range(30)]
    how: dict[str, Any] = {"mesh": _mesh(), "batch": ROWS}
    common: dict[str, Any] = {**AXES, "persist_elements": 8, "bucket_bytes": 0}
    for near, block in itertools.product((None, "gpu"), (16, 256)):
        # A rate that multiplies without rounding: the same arithmetic in place and on whole tensors.
        zero, tx = sf.Zero.flat(**common, **{**ALL, "secondary_axis": near}, block_elements=block), sf.optim.sgd(0.125)
        got, want = on_mesh(_net, tx, _net_params(), batches[:3], zero=zero, **how), _simulated(batches[:3], zero, tx)
        assert all(torch.equal(got.params[k], x) for k, x in want.items()), (near, block)
    runs = [
        on_mesh(_net, sf.optim.adamw(1e-2), _net_params(), batches, zero=sf.Zero.flat(**common, **options), **how)
        for options in ({}, ALL)
    ]
    first, aim, last = (float(m["loss"]) for m in (runs[0].metrics[0], runs[0].metrics[-1], runs[1].metrics[-1]))
    assert aim < 0.5 * first and abs(last - aim) < 0.02 * aim
    # Values without a code are not hidden: a gradient of one rank that is NaN stops all.
    rank = how["mesh"].rank

    def bad(p: dict, batch: dict) -> Tensor:
        return _net(p, batch) + ((p["w"] * 0).abs().sqrt().sum() if rank == 1 else 0)

    step = sf.sharded_step(bad, sf.optim.sgd(0.125), **how, zero=sf.Zero.flat(**common, **ALL), skip_nonfinite=True)
    _, metrics = step(step.init(_net_params()), shard_rows(batches[0], ROWS, how["mesh"]))
    assert metrics["skipped"] and metrics["loss"].isfinite() and metrics["grad_norm"].isnan()


@pytest.mark.nightly
@distributed(world=4)
def test_leaves_of_unlike_scales_have_scales_of_their_own() -> None:
    draw = torch.Generator().manual_seed(0)
    start, x = torch.randn(2, 7, 7, generator=draw), torch.randn(8, 7, generator=draw)

    def loss(params: Any, batch: Tensor) -> Tensor:
        return (batch @ params[0]).square().mean() + (batch @ params[1]).square().mean()

    def run(scale: float, loss: Any = loss, **options: Any) -> Run:
        params = [start[0], start[1] * scale]
        zero = sf.Zero.flat(**AXES, persist_elements=2, **options)
        return on_mesh(loss, sf.optim.sgd(0.1), params, [x], mesh=_mesh(), batch=ROWS, zero=zero)

    for options in ({"gather": "int8"}, {"reduce": "int4"}, ALL):
        even, uneven = (run(scale, **options) for scale in (1.0, 1e4))
        assert torch.equal(uneven.params[0], even.params[0])
        captured = run(1e4, sf.jit(loss, backend="graph"), **options)
        assert_same(captured, uneven, exact=True)


@distributed(world=4)
def test_bytes_across_nodes() -> None:
    mesh, g, num = _mesh(), torch.Generator().manual_seed(0), 8
    params = {"scale": torch.ones(64)} | {f"w{i}": torch.randn(64, 64, generator=g) / 8 for i in range(num)}
    psi, policy = num * 64 * 64, sf.Policy.bf16(reduce=torch.bfloat16)

    def loss(p: dict, x: Tensor) -> Tensor:
        x = x * p["scale"]
        for i in range(num):
            x = torch.tanh(x @ p[f"w{i}"])
        return x.square().mean()

    def crossed(**options: Any) -> float:
        """The bytes that a node sends to the other one in its second step, in psi times 16 bits."""
        zero = sf.Zero.flat(**AXES, persist_elements=64, bucket_bytes=0, prefetch_bytes=0, **options)
        step = sf.sharded_step(sf.mixed_precision(loss, policy), sf.optim.sgd(1e-2), mesh=mesh, batch=ROWS, zero=zero)
        state, _ = step(step.init(params), torch.ones(2, 64))
        with sf.count_traffic() as traffic:
            step(state, torch.ones(2, 64))
        return 2 * traffic.across("node", mesh.shape) / (2 * psi)

    # The small leaf, whole: its gradient there and back; the norm; the loss's own sums.
    rest = 2 * (64 / 2) * 2 * 2 / (2 * psi)
    # The last matrix of the forward is still here in the backward.
    gathers, int8, int4 = 2 - 1 / num, 0.5 + 2 / 256, 0.25 + 2 / 256
    for options, want in (
        ({}, gathers + 1),
        ({"secondary_axis": "gpu"}, 1 / 2 + 1),
        ({"gather": "int8", "reduce": "int4"}, gathers * int8 + int4),
        (ALL, int8 / 2 + int4 / 2),
    ):
        assert want <= crossed(**options) <= want + 2 * rest, options


def test_options_without_effect_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stage": 3, "reduce": "once"}, r"Pace\(accumulate='once'\)"),
        ({"stage": 3, "gather": "int9"}, "Did you mean 'int8'"),
        ({"stage": 2, "gather": "int8"}, r"stage=2, travel=Travel\(gather='int8'\).*no effect"),
        ({"stage": 1, "secondary_axis": "gpu", "axis": ("node", "gpu")}, "no effect"),
        ({"reduce": "int4"}, r"stage=0, travel=Travel\(reduce='int4'\).*no effect"),
        ({"stage": 3, "block_elements": 64}, "no option quantises"),
        ({"stage": 3, "reduce": "int4", "block_elements": 3}, "even"),
        ({"stage": 3, "axis": ("node", "gpu"), "secondary_axis": "gpus"}, "Did you mean 'gpu'"),
        ({"stage": 3, "secondary_axis": "dp"}, "no effect, because it names all axes"),
    ]
    for fields, match in cases:
        with pytest.raises(ValueError, match=match):
            sf.Zero.flat(**fields)
    mesh = sf.make_mesh({"node": 2, "gpu": 2}, abstract=True)
    make = lambda mesh, **o: sf.sharded_step(_net, sf.optim.sgd(1.0), mesh=mesh, batch=sf.P(), zero=sf.Zero.flat(**o))  # noqa: E731
    with pytest.raises(ValueError, match="no effect: the mesh is"):
        make(sf.make_mesh({"node": 1, "gpu": 4}, abstract=True), **AXES, secondary_axis="gpu")
    for options in ({"gather": "int8"}, {"secondary_axis": "gpu"}, {"reduce": "int8"}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.*Lower persist_elements"):
            make(mesh, **AXES, **options).init(_net_params())
    # On one rank nothing travels.
    one = make(sf.make_mesh({"node": 1, "gpu": 1}), **AXES, **ALL)
    assert len(tree_leaves(one.init(_net_params()).params)) == 3
