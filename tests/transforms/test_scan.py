"""Covers scan and stacked leaves: parity with one device and with leaves layer by layer; the loop's graph; errors."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.node import map_arg

import shardfn as sf
from shardfn import optim
from shardfn.engine.execution._program import capture_program
from shardfn.engine.execution._step_programs import step_program
from shardfn.graph import storage_of, tensors_in
from shardfn.testing import assert_same, distributed, on_mesh, one_device

LAYERS = 5
STACKED = sf.Sharding(sf.P(), stacked=True)
SPECS = {"blocks": STACKED, "in": sf.P(), "out": sf.P()}
TRAINABLE = {
    "blocks": {"frozen": False, "gain": True, "skip": True, "unused": True, "w": True},
    "in": True,
    "out": True,
}
# Small enough that the leaves fall on both sides of each threshold.
ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}


def params() -> dict[str, Any]:
    """Stacked: a 7 x 7, a vector, a scalar a layer, a frozen one, an unused one."""
    g = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) / 4

    blocks = {"w": draw(LAYERS, 7, 7), "gain": draw(LAYERS, 7), "skip": draw(LAYERS), "frozen": draw(LAYERS, 3, 7)}
    return {"blocks": blocks | {"unused": draw(LAYERS, 2, 3)}, "in": draw(5, 7), "out": draw(7, 3)}


def block(h: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Uses `w` twice."""
    y = torch.tanh(h @ p["w"].t() * p["gain"]) @ p["w"]
    return h * p["skip"] + y, (y @ p["frozen"].t()).square().mean()


def loss(p: dict, batch: dict, wrap: Any = lambda f: f) -> Tensor:
    h, ys = sf.scan(wrap(block), batch["x"] @ p["in"], p["blocks"])
    return ((h @ p["out"] - batch["y"]) ** 2).mean() + ys.sum()


def looped(p: dict, batch: dict, wrap: Any = lambda f: f) -> Tensor:
    """The same as a Python loop."""
    h, ys = batch["x"] @ p["in"], []
    f = wrap(block)
    for i in range(LAYERS):
        h, y = f(h, {k: v[i] for k, v in p["blocks"].items()})
        ys.append(y)
    stacked = torch.stack(ys)
    return ((h @ p["out"] - batch["y"]) ** 2).mean() + stacked.sum()


def batch(n: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(100 + n)
    return {"x": torch.randn(12, 5, generator=g).double(), "y": torch.randn(12, 3, generator=g).double()}


rematted = functools.partial(loss, wrap=sf.remat)


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_every_stage_equals_one_device(world: int) -> None:
    mesh, batches = sf.make_mesh({"dp": world}), [batch(n) for n in range(3)]
    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1))
    want = one_device(loss, tx, params(), batches, trainable=TRAINABLE)
    for micro, inner in ((1, loss), (3, rematted)):
        runs = []
        for stage in range(4):
            options: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero.flat(stage=stage, **ODD), "trainable": TRAINABLE}
            run = on_mesh(sf.accumulate(inner, micro), tx, params(), batches, specs=SPECS, **options)
            assert_same(run, want)
            runs.append(run)
        assert_same(runs[2], runs[1], exact=True)
        assert_same(runs[3], runs[1], exact=True)


def ties(p: dict, batch: dict) -> Tensor:
    """Uses a layer outside of the scan, all layers at once, two scans over one stack, and a leaf for all layers."""
    h, _ = sf.scan(lambda h, q: (torch.tanh(h @ q["w"] + p["bias"]), None), batch["x"] @ p["in"], p["blocks"])
    h, _ = sf.scan(lambda h, w: (torch.tanh(h @ w.t()), None), h, p["blocks"]["w"])
    h = h @ p["blocks"]["w"][-2] + p["blocks"]["gain"].sum()
    return ((h @ p["out"] - batch["y"]) ** 2).mean()


def tied_params() -> dict[str, Any]:
    p = params()
    return p | {"blocks": {k: p["blocks"][k] for k in ("w", "gain")}, "bias": torch.linspace(-1, 1, 7).double()}


def partly(p: dict, batch: dict) -> Tensor:
    """Scans over some layers, of some leaves in each way of taking a part, also ways that are not slices of layers."""
    h, w = batch["x"] @ p["in"], p["blocks"]["w"]
    assert w[1:3].shape == (2, 7, 7) and w.narrow(0, 3, 2).shape == (2, 7, 7) and len(w[-9:9]) == LAYERS
    for part in (w[1:3], w[-2:], w.narrow(0, 3, 2), torch.narrow(w, dim=0, start=-2, length=1), w[1:4][1:][:1], w[::2]):
        h, _ = sf.scan(lambda h, w: (torch.tanh(h @ w), None), h, part)
    h = h + p["blocks"]["gain"].narrow(1, 0, 7)[0:1].sum() + w[0:2, 1].sum() + w[2:2].sum()
    return ((h @ p["out"] - batch["y"]) ** 2).mean()


@pytest.mark.nightly
@distributed(world=2)
def test_parts_of_a_stack() -> None:
    mesh, batches = sf.make_mesh({"dp": 2}), [batch(n) for n in range(2)]
    start = {k: v for k, v in tied_params().items() if k != "bias"}
    want = one_device(partly, optim.adamw(1e-2), start, batches)
    for stage in (0, 3):
        options: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero.flat(stage=stage, **ODD), "specs": SPECS}
        eager = on_mesh(partly, optim.adamw(1e-2), start, batches, **options)
        assert_same(eager, want)
        assert_same(
            on_mesh(sf.jit(partly, backend="graph"), optim.adamw(1e-2), start, batches, **options), eager, exact=True
        )


@pytest.mark.nightly
def test_a_part_of_a_stack_gathers_its_layers_alone() -> None:
    def some(p: dict, x: Tensor) -> Tensor:
        return sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, p["w"].narrow(0, 1, 2))[0].square().mean()

    mesh = sf.make_mesh({"dp": 2}, abstract=True)
    step = sf.sharded_step(
        sf.jit(some, bucket=None, prefetch=None, reuse=None),
        optim.sgd(0.1),
        mesh=mesh,
        specs={"w": STACKED},
        zero=sf.Zero.flat(stage=3, persist_elements=0, bucket_bytes=0, prefetch_bytes=0),
    )
    lowered = step.lower({"w": torch.ones(5, 8, 8)}, torch.ones(2, 8))
    analysis = lowered.memory_analysis()
    assert analysis.max_by_kind["gathered"] < 5 * 8 * 8 * 4, str(analysis)
    # Two layers in the forward, and the second again in the backward: x has no gradient.
    assert lowered.cost_analysis().transfers["all_gather", "dp"] == (3, 3 * 8 * 8 * 4 // 2)


def whole(p: dict, batch: dict) -> Tensor:
    """Remat around the scan, and around the layer too."""
    return sf.remat(rematted)(p, batch)


@pytest.mark.nightly
@distributed(world=2, timeout=200)
def test_captured_steps_have_the_bits_of_eager_ones() -> None:
    mesh, batches = sf.make_mesh({"dp": 2}), [batch(n) for n in range(3)]
    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1))
    for stage, inner, micro in ((0, ties, 1), (1, loss, 2), (3, rematted, 1), (3, ties, 2), (3, whole, 1)):
        start, frozen = (tied_params(), True) if inner is ties else (params(), TRAINABLE)
        specs = SPECS | ({"bias": sf.P()} if inner is ties else {})
        options: dict[str, Any] = {
            "mesh": mesh,
            "zero": sf.Zero.flat(stage=stage, **ODD),
            "trainable": frozen,
            "specs": specs,
        }
        outer = sf.accumulate(inner, micro)
        eager = on_mesh(outer, tx, start, batches, **options)
        assert_same(eager, one_device(inner, tx, start, batches, trainable=frozen))
        assert_same(on_mesh(sf.jit(outer, backend="graph"), tx, start, batches, **options), eager, exact=True)


def _program(f: Any, stage: int, start: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The graph of a step as captured: ops, shapes, phases and lines; and which values share memory."""
    mesh = sf.make_mesh({"dp": 2}, abstract=True)
    zero, specs = sf.Zero.flat(stage=stage, **ODD), SPECS | ({"bias": sf.P()} if "bias" in start else {})
    step = sf.sharded_step(f, optim.adamw(1e-2), mesh=mesh, specs=specs, zero=zero)
    state = step.init({k: v for k, v in start.items()})
    rows = {k: v[:6] for k, v in batch(0).items()}
    plan, given, args = step._make_abstract(state, rows, None)
    gm = capture_program(step_program(step._steps.parts, plan, given, args, even=True)).gm
    names: dict[torch.fx.Node, str] = {}
    memory: dict[int, int] = {}
    lines, shares = [], []
    for n in gm.graph.nodes:
        names[n] = f"%{len(names)}"
        given = map_arg((n.args, n.kwargs), lambda m: names[m])
        values = tensors_in(n.meta.get("val"))
        shapes = [(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype) for t in values]
        shares.append(f"{names[n]} {[memory.setdefault(storage_of(t), len(memory)) for t in values]}")
        target = n.target if n.op == "call_function" else n.op
        lines.append(f"{names[n]} = {target}{given} {shapes} {n.meta.get('phase')}")
    return lines, shares


CALLS: list[None] = []


def counted(h: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    CALLS.append(None)
    return block(h, p)


def same(f: Any) -> Any:
    return f


def anew(f: Any) -> Any:
    """A function over an object of its own, so another one for each microbatch."""
    own = object()
    return lambda h, p: f(h, p) if own else None


# The calls of a layer's function: for the first layer, and for two to compare. Microbatches share them where the
# function is the same code over the same objects for each. Those of a remat, which calls it again, are not counted.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stage", "wrap", "micro", "calls"),
    [(0, sf.remat, 1, None), (1, same, 2, 3), (1, anew, 2, 3 * 2), (2, same, 1, 3), (3, sf.remat, 2, None)],
)
def test_the_graph_is_that_of_a_python_loop(stage: int, wrap: Any, micro: int, calls: int | None) -> None:
    want = _program(sf.accumulate(functools.partial(looped, wrap=wrap), micro), stage, params())
    CALLS.clear()
    scanned = functools.partial(loss, wrap=lambda f: wrap(counted))
    assert _program(sf.accumulate(scanned, micro), stage, params()) == want
    assert calls is None or len(CALLS) == calls < LAYERS * micro


@pytest.mark.nightly
@distributed(world=4)
def test_tensor_parallel_layers() -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2})

    def layer(h: Tensor, p: dict) -> tuple[Tensor, None]:
        return h + sf.psum(torch.tanh(sf.pvary(h, "tp") @ p["up"].t()) @ p["down"].t(), "tp"), None

    def parallel(p: dict, b: dict) -> Tensor:
        return ((sf.scan(layer, b["x"], p)[0][:, :3] - b["y"]) ** 2).mean()

    g = torch.Generator().manual_seed(3)
    start = {"up": torch.randn(LAYERS, 7, 5, generator=g), "down": torch.randn(LAYERS, 5, 7, generator=g)}
    start = {k: v.double() / 4 for k, v in start.items()}
    specs = {
        "up": sf.Sharding(sf.P(None, "tp"), stacked=True),
        "down": sf.Sharding(sf.P(None, None, "tp"), stacked=True),
    }
    batches = [batch(n) for n in range(2)]
    want = one_device(parallel, optim.adamw(1e-2), start, batches)
    for stage in (0, 3):
        options: dict[str, Any] = {"mesh": mesh, "specs": specs, "zero": sf.Zero.flat(stage=stage, **ODD)}
        eager = on_mesh(parallel, optim.adamw(1e-2), start, batches, **options)
        assert_same(eager, want)
        graph = sf.jit(parallel, backend="graph")
        assert_same(on_mesh(graph, optim.adamw(1e-2), start, batches, **options), eager, exact=True)


@pytest.mark.nightly
@distributed(world=2)
def test_layout_apply_donation_and_transforms_of_stacked_leaves() -> None:
    mesh = sf.make_mesh({"dp": 2})
    rows = {k: v[mesh.rank * 6 :][:6] for k, v in batch(0).items()}
    for stage in (0, 1, 3):
        step = sf.sharded_step(
            loss, optim.adam(1e-2), mesh=mesh, specs=SPECS, zero=sf.Zero(stage=stage, persist_elements=2), donate=False
        )
        state = step.init(params())
        assert step.specs(params())["blocks"]["w"] == sf.Sharding(state.params["blocks"]["w"].spec, stacked=True)
        assert state.params["blocks"]["w"].spec == (sf.P(None, "dp") if stage == 3 else sf.P())
        assert state.opt_state[0].mu["blocks"]["w"].spec == (sf.P(None, "dp") if stage else sf.P())
        first, again = step(state, rows)[0], step(state, rows)[0]
        assert torch.equal(first.params["blocks"]["w"].local, again.params["blocks"]["w"].local)
        out = step.apply(lambda p: (p["blocks"]["w"][1:3].sum(), sum(w.sum() for w in p["blocks"]["w"])), state)
        w = params()["blocks"]["w"]
        assert torch.equal(out[0], w[1:3].sum()) and torch.allclose(out[1], w.sum(), atol=1e-5)
        grads = sf.unshard(torch.func.grad(step.loss)(state.params, rows))
        want = sf.grad(loss)(params(), batch(0))
        torch.testing.assert_close(grads["blocks"], want["blocks"])


def test_scan_is_the_loop_on_plain_tensors_and_under_torch_func() -> None:
    w, x = torch.randn(3, 2, 2), torch.randn(2)
    carry, ys = sf.scan(lambda c, w: ({"h": w @ c["h"]}, (c["h"], None)), {"h": x}, w)
    assert torch.equal(carry["h"], w[2] @ (w[1] @ (w[0] @ x))) and ys[0].shape == (3, 2) and ys[1] is None
    carry, ys = sf.scan(lambda c, _: (c * 2, None), torch.tensor(1.0), length=3)
    assert carry == 8 and ys is None

    def f(w: Tensor) -> Tensor:
        return sf.scan(lambda c, w: (torch.tanh(w @ c), None), x, w)[0].sum()

    def g(w: Tensor) -> Tensor:
        return torch.tanh(w[2] @ torch.tanh(w[1] @ torch.tanh(w[0] @ x))).sum()

    for transform in (torch.func.grad, torch.func.jacrev, lambda f: torch.func.vmap(torch.func.grad(f))):
        given = w if transform in (torch.func.grad, torch.func.jacrev) else torch.randn(4, 3, 2, 2)
        torch.testing.assert_close(transform(f)(given), transform(g)(given))


def test_errors_name_leaves_and_values() -> None:
    one = torch.ones(())
    with pytest.raises(ValueError, match=r"(?s)xs\['a'\] has 2.*xs\['b'\] has 3"):
        sf.scan(lambda c, x: (c, None), one, {"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match="length=4"):
        sf.scan(lambda c, x: (c, None), one, torch.ones(3), length=4)
    with pytest.raises(ValueError, match="needs xs or length"):
        sf.scan(lambda c, x: (c, None), one)
    with pytest.raises(
        TypeError, match=r"carry\['h'\] must be \(\) torch.float32, as in init, got \(2,\) torch.float32"
    ):
        sf.scan(lambda c, x: ({"h": torch.ones(2)}, None), {"h": one}, length=2)
    with pytest.raises(TypeError, match="structure"):
        sf.scan(lambda c, x: ((c, c), None), one, length=2)
    with pytest.raises(TypeError, match=r"init\['h'\] must be a tensor, got a float"):
        sf.scan(lambda c, x: (c, None), {"h": 1.0}, length=2)
    with pytest.raises(TypeError, match=r"return \(carry, None\)"):
        sf.scan(lambda c, x: c, one, length=2)
    mesh = sf.make_mesh({"tp": 2}, abstract=True)
    specs = {"w": sf.Sharding(sf.P("tp"), stacked=True), "v": STACKED}
    step = sf.sharded_step(lambda p, x: x.sum(), optim.sgd(0.1), mesh=mesh, specs=specs, batch=sf.P())
    with pytest.raises(ValueError, match=r"(?s)params\['v'\] of shape \(\) has no.*params\['w'\].*P\('tp'\)"):
        step.init({"w": torch.ones(2, 2), "v": one})


@pytest.mark.nightly
def test_layers_that_differ_cannot_be_captured() -> None:
    layers = iter(range(100))

    def impure(h: Tensor, w: Tensor) -> tuple[Tensor, None]:
        return h * w * next(layers), None  # here

    graph = sf.jit(lambda w: sf.scan(impure, w.sum(), w)[0], backend="graph")
    with pytest.raises(sf.CaptureError, match=r"test_scan.py:\d+ in impure: .*must be pure"):
        graph(torch.ones(6))
    total = torch.zeros(())

    def writes(h: Tensor, w: Tensor) -> tuple[Tensor, None]:
        return h * w + total.add_(1), None

    kept = []
    graph = sf.jit(lambda w: sf.scan(lambda h, w: (kept.append(h * w) or h, None), w.sum(), w)[0] + kept[-1])
    with pytest.raises(sf.CaptureError, match="must be in the carry or in y"):
        graph(torch.ones(6))
    with pytest.raises(sf.CaptureError, match="writes to a tensor from outside"):
        sf.jit(lambda w: sf.scan(writes, w.sum(), w)[0], backend="graph")(torch.ones(6))


def _begins_alike(p: Any, x: Tensor, *, cast: bool) -> Tensor:
    """Sums up in a carry that begins as the same value on all ranks, as the mean before has begun to follow values."""
    scale = sf.pmean(x.detach().square().mean(), "dp")
    init = {"h": x, "total": sf.pvary(torch.zeros_like(scale), "dp") if cast else torch.zeros_like(scale)}

    def body(c: Any, w: Tensor) -> tuple[Any, None]:
        h = torch.tanh(c["h"] * w / scale)
        return {"h": h, "total": c["total"] + h.mean()}, None

    return sf.scan(body, init, p["w"])[0]["total"]


@distributed(world=2)
def test_a_carry_that_begins_to_vary_is_refused() -> None:
    """JAX refuses it, too; with the initial carry cast the step equals one device, captured or not."""
    mesh, x = sf.make_mesh({"dp": 2}), torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)
    p = {"w": torch.linspace(0.5, 1.5, 15, dtype=torch.float64).view(5, 3)}
    words = r"carry\['total'\] varies along 'dp', made at .*test_scan.py.*pass sf.pvary\(init\['total'\], 'dp'\)"
    for jit in (False, True):
        for cast in (False, True):
            loss: Any = functools.partial(_begins_alike, cast=cast)
            loss = sf.jit(loss, backend="graph") if jit else loss
            step = sf.sharded_step(loss, optim.sgd(1.0), mesh=mesh)
            state = step.init(p)
            if not cast:
                with pytest.raises(sf.collectives.AxisTypeError, match=words):
                    step(state, x[2 * mesh.rank :][:2])
                continue
            state, metrics = step(state, x[2 * mesh.rank :][:2])
            w = p["w"].clone().requires_grad_()
            want = _begins_alike({"w": w}, x, cast=False)
            torch.testing.assert_close(metrics["loss"], want.detach())
            (grad,) = torch.autograd.grad(want, w)
            torch.testing.assert_close(sf.unshard(state.params)["w"], p["w"] - grad)
    f = sf.shard_map(
        lambda x: sf.scan(lambda c, row: (c + row, None), torch.zeros(3), x)[0][None],
        mesh=mesh, in_specs=sf.P("dp"), out_specs=sf.P("dp"),
    )  # fmt: skip
    with pytest.raises(sf.collectives.AxisTypeError, match=r"carry varies along 'dp'.*sf.pvary\(init, 'dp'\)"):
        f(x.float())
