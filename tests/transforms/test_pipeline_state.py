"""Covers the model state of pipelines: it equals one device's with the same microbatches; errors."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, PipelineState, Zero, optim, schedules
from shardfn.testing import distributed

D, ROWS, MICRO, STEPS = 4, 6, 4, 2
ODD = Zero.flat(stage=3, persist_elements=2, bucket_bytes=64, prefetch_bytes=150)


def _params(layers: int, chunks: int = 1) -> Any:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(layers, D, D, generator=g, dtype=torch.float64) / 2
    stacks = [{"w": x} for x in w.tensor_split(chunks)]
    return {"bias": torch.randn(D, generator=g, dtype=torch.float64), "blocks": stacks if chunks > 1 else stacks[0]}


def _state(layers: int, chunks: int = 1) -> PipelineState:
    mean = torch.linspace(-1, 1, layers * D, dtype=torch.float64).view(layers, D)
    stacks = [{"mean": x, "seen": torch.zeros(len(x), dtype=torch.int64)} for x in mean.tensor_split(chunks)]
    own = {"mean": torch.zeros(D, dtype=torch.float64), "seen": torch.tensor(0), "odd": torch.tensor(False)}
    return PipelineState(own, stacks if chunks > 1 else stacks[0], {"loss": torch.zeros((), dtype=torch.float64)})


def _specs(params: Any, state: PipelineState) -> Any:
    cut = sf.tree_map(lambda _: P("pp"), params["blocks"])
    return {"bias": P(), "blocks": cut}, PipelineState(P(), sf.tree_map(lambda _: P("pp"), state.blocks), P())


def _norm(s: Any, h: Tensor, axis: Any) -> tuple[Tensor, Tensor]:
    mean = 0.5 * s["mean"] + 0.5 * sf.pmean(h.mean(0), axis)
    return h - mean, mean


def _first(p: Any, s: Any, x: Tensor, axis: Any = "dp") -> Any:
    h, mean = _norm(s, x + p["bias"], axis)
    return h, {"mean": mean, "seen": s["seen"] + 1, "odd": ~s["odd"]}


def _block(p: Any, s: Any, h: Tensor, axis: Any = "dp") -> Any:
    normed, mean = _norm(s, h, axis)
    return h + torch.tanh(normed @ p["w"]), {"mean": mean, "seen": s["seen"] + 1}


def _last(p: Any, s: Any, h: Tensor, x: Tensor, axis: Any = "dp") -> Any:
    loss = (h * p["bias"] - x).square().mean() + 0.1 * s["loss"]
    return loss, {"loss": 0.5 * s["loss"] + 0.5 * sf.pmean(loss.detach(), axis)}


def _batch(n: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(n)
    return list(torch.randn(MICRO * ROWS, D, generator=g, dtype=torch.float64).chunk(MICRO))


def _one_device(params: Any, state: PipelineState, turns: bool = False) -> tuple[Any, PipelineState]:
    """Plain SGD, microbatch by microbatch."""
    for n in range(STEPS):
        leaves, treedef = sf.tree_flatten(params)
        handles = [x.clone().requires_grad_() for x in leaves]
        p, losses = sf.tree_unflatten(treedef, handles), []
        for x in _batch(n):
            h, first = _first(p, state.first, x, None)
            alone = not isinstance(p["blocks"], list)
            stacks = [(p["blocks"], state.blocks)] if alone else list(zip(p["blocks"], state.blocks, strict=True))
            blocks = []
            for c, (stack, old) in enumerate(stacks):
                rows: list[Any] = [None] * len(stack["w"])
                for i in reversed(range(len(rows))) if turns and c % 2 else range(len(rows)):
                    h, rows[i] = _block({"w": stack["w"][i]}, {k: v[i] for k, v in old.items()}, h, None)
                blocks.append({k: torch.stack([r[k] for r in rows]) for k in old})
            loss, last = _last(p, state.last, h, x, None)
            losses.append(loss)
            state = sf.tree_map(torch.Tensor.detach, PipelineState(first, blocks[0] if alone else blocks, last))
        grads = torch.autograd.grad(torch.stack(losses).mean(), handles)
        params = sf.tree_unflatten(treedef, [x - 0.1 * g for x, g in zip(leaves, grads, strict=True)])
    return params, state


def _close(got: Any, want: Any) -> None:
    assert sf.tree_structure(got) == sf.tree_structure(want)
    for a, b in zip(sf.tree_leaves(got), sf.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _run(step: Any, state: Any, mesh: sf.Mesh) -> Any:
    for n in range(STEPS):
        own = [x.chunk(mesh.shape.get("dp", 1))[mesh.coords.get("dp", 0)] for x in _batch(n)]
        state, metrics = step(state, torch.cat(own))
        assert metrics["finite"]
    return state


def _parity(mesh: sf.Mesh, layers: int = 5, chunks: int = 1, jit: Any = None, **options: Any) -> Any:
    zero, wrap = options.pop("zero", None), options.pop("wrap", lambda f: f)
    params, state = _params(layers, chunks), _state(layers, chunks)
    loss = sf.pipeline(_first, wrap(_block), _last, num_microbatches=MICRO, num_chunks=chunks, **options)
    specs, state_specs = _specs(params, state)
    how: Any = {"mesh": mesh, "specs": specs, "state_specs": state_specs, "batch": P("dp"), "zero": zero}
    step = sf.sharded_step(loss if jit is None else jit(loss), optim.sgd(0.1), has_state=True, **how)
    got = _run(step, step.init(params, model_state=state), mesh)
    want, want_state = _one_device(params, state, turns=options.get("schedule") in ("zb-v", "dualpipe-v"))
    _close(sf.unshard(got.params), want)
    _close(sf.unshard(got.model_state), want_state)
    return got


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.nightly), "1f1b"])
@distributed(world=4)
def test_it_equals_one_device(schedule: str) -> None:
    _parity(sf.make_mesh({"pp": 2, "dp": 2}, device="cpu"), schedule=schedule, zero=ODD)


@pytest.mark.nightly
@distributed(world=2)
def test_a_captured_step_has_the_bits_of_the_eager_one() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 1}, device="cpu")
    eager = _parity(mesh, 7)
    graph = _parity(mesh, 7, jit=functools.partial(sf.jit, backend="graph"))
    for a, b in zip(sf.tree_leaves(sf.unshard(graph)), sf.tree_leaves(sf.unshard(eager)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=4)
def test_every_stage_of_zero(schedule: str, stage: int) -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    zero = Zero.flat(stage=stage, persist_elements=2, bucket_bytes=64, prefetch_bytes=150)
    for wrap in (lambda f: f, sf.remat):
        for jit in (None, functools.partial(sf.jit, backend="graph")):
            _parity(mesh, schedule=schedule, zero=zero, wrap=wrap, jit=jit)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe-v"])
@distributed(world=4)
def test_several_chunks(schedule: str) -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    for jit in (None, functools.partial(sf.jit, backend="graph")):
        _parity(mesh, 7, 2, schedule=schedule, zero=ODD, jit=jit)


@pytest.mark.nightly
@distributed(world=3)
def test_three_stages_of_unequal_lengths() -> None:
    mesh = sf.make_mesh({"pp": 3, "dp": 1}, device="cpu")
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        _parity(mesh, 7, schedule=schedule)


def _by_functions(num: int) -> tuple[Any, Any, Any]:
    params, state = _params(num), _state(num)
    params["blocks"] = [{"w": w} for w in params["blocks"]["w"]]
    rows = [{k: v[i] for k, v in state.blocks.items()} for i in range(num)]
    return params, state, state._replace(blocks=rows)


@pytest.mark.nightly
@distributed(world=2)
def test_functions_and_rows_without_a_layer() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 1}, device="cpu")
    params, state, apart = _by_functions(3)
    want, want_state = _one_device(_params(3), state)
    listed = sf.pipeline(_first, [_block] * 3, _last, num_microbatches=MICRO)
    step = sf.sharded_step(listed, optim.sgd(0.1), mesh=mesh, batch=P("dp"), has_state=True)
    got = _run(step, step.init(params, model_state=apart), mesh)
    _close(torch.stack([x["w"] for x in sf.unshard(got.params)["blocks"]]), want["blocks"]["w"])
    for k, x in want_state.blocks.items():
        _close(torch.stack([row[k] for row in sf.unshard(got.model_state).blocks]), x)

    padded = {**_params(3), "blocks": sf.pad_layers(_params(3)["blocks"], (2, 1))}
    with_rows = state._replace(blocks=sf.pad_layers(state.blocks, (2, 1)))
    loss = sf.pipeline(_first, _block, _last, num_microbatches=MICRO, layers_per_stage=(2, 1))
    for on in (mesh, sf.make_mesh({"dp": 1}, device="cpu", ranks=[mesh.rank])):
        specs, state_specs = _specs(padded, with_rows) if on is mesh else (P(), P())
        how: Any = {"mesh": on, "specs": specs, "state_specs": state_specs, "batch": P("dp")}
        step = sf.sharded_step(loss, optim.sgd(0.1), has_state=True, **how)
        kept = sf.unshard(_run(step, step.init(padded, model_state=with_rows), on).model_state)
        _close(kept._replace(blocks=sf.unpad_layers(kept.blocks, (2, 1))), want_state)


@distributed(world=2)
def test_the_loss_and_an_evaluation_take_it_too() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 1}, device="cpu")
    params, state = _params(3), _state(3)
    specs, state_specs = _specs(params, state)
    loss = sf.pipeline(_first, _block, _last, num_microbatches=MICRO)
    how: Any = {"mesh": mesh, "specs": specs, "state_specs": state_specs, "batch": P("dp"), "donate": False}
    step = sf.sharded_step(loss, optim.sgd(0.1), has_state=True, **how)
    begun, x = step.init(params, model_state=state), torch.cat(_batch(0))
    _, metrics = step(begun, x)
    torch.testing.assert_close(step.loss(begun.params, x, model_state=begun.model_state), metrics["loss"])
    assert float(step.evaluate(begun, [x])["loss"]) > 0


def _step(loss: Any = None, mesh: Any = None, **options: Any) -> Any:
    loss = sf.pipeline(_first, _block, _last, num_microbatches=2) if loss is None else loss
    mesh = sf.make_mesh({"pp": 2, "dp": 1}, abstract=True) if mesh is None else mesh
    how: Any = {"mesh": mesh, "specs": {"bias": P(), "blocks": P("pp")}, "batch": P("dp"), "has_state": True, **options}
    return sf.sharded_step(loss, optim.sgd(0.1), **how)


def test_a_state_that_does_not_fit_is_refused() -> None:
    cut = PipelineState(P(), P("pp"), P())
    with pytest.raises(
        TypeError,
        match=r"is a dict, but must be a sf\.PipelineState. Give each function a part: sf\.PipelineState\(first=",
    ):
        _step().init(_params(4), model_state={"mean": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"blocks\['mean'\] has spec P\(\); use P\('pp'\)"):
        _step().init(_params(4), model_state=_state(4))
    with pytest.raises(ValueError, match=r"first\['mean'\] has spec P\('pp'\); leave 'pp' out"):
        _step(state_specs=PipelineState(P("pp"), P("pp"), P())).init(
            _params(4), model_state=PipelineState({"mean": torch.zeros(4)}, _state(4).blocks)
        )
    with pytest.raises(ValueError, match=r"blocks\['mean'\] has shape \(3, 4\), for 4 layers"):
        _step(state_specs=cut).init(_params(4), model_state=_state(3))
    late = (schedules.parse("F1 F0 B0 B1"),) * 2
    wrong = schedules.PipelineSchedule("by hand", 2, ((0,), (1,)), late)
    with pytest.raises(ValueError, match="by hand runs F0 on rank 0 after the forward of a later microbatch"):
        _step(sf.pipeline(_first, _block, _last, num_microbatches=2, schedule=wrong))


@distributed(world=2)
def test_a_function_that_returns_no_state_is_named() -> None:
    def plain(p: Any, s: Any, h: Tensor) -> Tensor:
        return _block(p, s, h)[0]

    mesh = sf.make_mesh({"pp": 2, "dp": 1}, device="cpu")
    step = _step(sf.pipeline(_first, plain, _last), mesh, state_specs=PipelineState(P(), P("pp"), P()))
    state = step.init(_params(4), model_state=_state(4))
    with pytest.raises((TypeError, sf.RankError), match=r"block of a pipeline must return \(h, its part of the model"):
        step(state, torch.cat(_batch(0)))
