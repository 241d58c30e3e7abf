"""Covers `pipeline`: stages on ranks equal one device, for schedules x ZeRO stages x results of losses."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, WeightedMean, Zero, optim, schedules
from shardfn.engine.execution._run_backward import Performer
from shardfn.engine.pipeline._staged import Staged
from shardfn.nn import DeferredGradients
from shardfn.testing import assert_parity, distributed

V, D, B, T = 11, 6, 12, 3
NIGHTLY = pytest.mark.nightly
ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}


def _params(layers: int, dtype: torch.dtype = torch.float64, chunks: int = 1) -> Any:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) / 2

    def stack(n: int) -> dict[str, Tensor]:
        return {"w": draw(n, D, D), "b": draw(n, D), "g": draw(n)}

    stacks = [stack(layers // chunks + (c < layers % chunks)) for c in range(chunks)]
    return {"embed": draw(V, D), "blocks": stacks[0] if chunks == 1 else stacks, "scale": draw(D), "unused": draw(2)}


def _specs(params: Any) -> Any:
    return sf.core.tree_map(lambda _: P(), params) | {"blocks": sf.core.tree_map(lambda _: P("pp"), params["blocks"])}


def _batches(num: int = 3, rows: int = B) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    made = []
    for _ in range(num):
        tokens = torch.randint(V, (rows, T), generator=g)
        made.append({"tokens": tokens, "weight": torch.rand(rows, generator=g, dtype=torch.float64)})
    return made


def _first(p: Any, batch: Any) -> Any:
    return {"h": p["embed"][batch["tokens"]], "tokens": batch["tokens"], "even": batch["tokens"] % 2 == 0}


def _block(p: Any, x: Any) -> Any:
    shift = torch.where(x["even"], 0.5, -0.5).to(x["h"].dtype)[..., None] * p["g"]
    return {**x, "h": x["h"] + torch.tanh(x["h"] @ p["w"] + p["b"] + shift)}


def _scores(p: Any, x: Any) -> Tensor:
    logits = (x["h"] * p["scale"]) @ p["embed"].t()  # tied
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x["tokens"].flatten(), reduction="none")


def _last(p: Any, x: Any, batch: Any) -> Tensor:
    del batch
    return _scores(p, x).mean()


def _weighted(p: Any, x: Any, batch: Any) -> WeightedMean:
    by = batch["weight"].repeat_interleave(T).to(p["scale"].dtype)
    return WeightedMean((_scores(p, x) * by).sum(), by.sum())


def _plain(last: Any = _last) -> Any:
    """The same loss, written without any of the pipeline's means."""

    def loss(p: Any, batch: Any) -> Any:
        x, stacks = _first(p, batch), p["blocks"]
        for stack in stacks if isinstance(stacks, list) else [stacks]:
            for l in range(stack["g"].shape[0]):
                x = _block({k: v[l] for k, v in stack.items()}, x)
        return last(p, x, batch)

    return loss


def _loss(last: Any = _last, *, m: int = 4, block: Any = _block, **options: Any) -> Any:
    return sf.pipeline(_first, block, last, num_microbatches=m, **options)


def _parity(mesh: sf.Mesh, layers: int = 5, loss: Any = None, last: Any = _last, **options: Any) -> Any:
    chunks, dtype = options.pop("chunks", 1), options.pop("dtype", torch.float64)
    params = _params(layers, dtype, chunks)
    options = {"optimizer": optim.adamw(1e-2), "reference": _plain(last), "specs": _specs(params), **options}
    return assert_parity(
        _loss(last) if loss is None else loss, params=params, batches=_batches(), mesh=mesh, batch=P("dp"), **options
    )


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=NIGHTLY), "1f1b"])
@distributed(world=[pytest.param(2, marks=pytest.mark.nightly), 3])
def test_stages_equal_one_device(world: int, schedule: str) -> None:
    mesh = sf.make_mesh({"pp": world}, device="cpu")
    for dtype in (torch.float32, torch.float64):
        _parity(mesh, loss=_loss(schedule=schedule), dtype=dtype)
    _parity(mesh, loss=_loss(m=1, schedule=schedule))
    _parity(mesh, loss=_loss(m=6, schedule=schedule), layers=3)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=4)
def test_with_every_stage_of_zero(stage: int) -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    clipped = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
    for zero in (Zero(stage=stage), Zero.flat(stage=stage, **ODD)):
        _parity(mesh, loss=_loss(m=3), zero=zero)
    _parity(mesh, loss=_loss(m=3), zero=Zero(stage=stage, reduction="canonical", reduction_chunks=2))
    zero = Zero.flat(stage=stage, accumulate="once", **ODD)
    _parity(mesh, loss=_loss(m=3), zero=zero, dtype=torch.float32, optimizer=clipped)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world=4)
def test_several_chunks(stage: int) -> None:
    mesh = sf.make_mesh({"dp": 2, "pp": 2}, device="cpu")
    for chunks in (2, 3):
        loss = _loss(m=2, schedule="interleaved", num_chunks=chunks)
        _parity(mesh, 7, loss, zero=Zero.flat(stage=stage, **ODD), chunks=chunks)


@pytest.mark.nightly
@distributed(world=4)
def test_norms_are_of_whole_leaves() -> None:
    """LAMB's are by leaf, a clip's is of all: leaves that are cut count once a rank, tied ones once."""
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    for stage in (0, 2, 3):
        lamb = optim.chain(optim.clip_by_global_norm(0.05), optim.lamb(1e-2, weight_decay=0.1))
        _parity(mesh, zero=Zero.flat(stage=stage, **ODD), optimizer=lamb, loss=_loss(m=2), dtype=torch.float32)


@pytest.mark.nightly
@distributed(world=4)
def test_weighted_means() -> None:
    mesh = sf.make_mesh({"dp": 2, "pp": 2}, device="cpu")
    for stage in (1, 3):
        _parity(mesh, loss=_loss(_weighted, m=3), last=_weighted, zero=Zero(stage=stage))


@pytest.mark.nightly
@distributed(world=4)
def test_remat_and_memories() -> None:
    mesh = sf.make_mesh({"dp": 2, "pp": 2}, device="cpu")
    for zero in (Zero(stage=3, persist_elements=0), Zero(stage=2, grads="host", optimizer="host")):
        _parity(mesh, loss=_loss(m=3, block=sf.remat(_block)), zero=zero)


@NIGHTLY
@distributed(world=2)
def test_frozen_leaves() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    params = _params(4)
    for name in ("embed", "blocks", "scale"):
        _parity(mesh, 4, trainable=dict.fromkeys(params, True) | {name: False})


def _run(mesh: sf.Mesh | None, loss: Any, params: Any, batches: list[Any], **options: Any) -> Any:
    specs = P() if mesh is None else _specs(params)
    on = sf.make_mesh(alone=True, device="cpu") if mesh is None else mesh
    step = sf.sharded_step(loss, optim.adamw(1e-2), mesh=on, specs=specs, batch=P("dp"), **options)
    state, out = step.init(sf.core.tree_map(torch.clone, params)), []
    for n, batch in enumerate(batches):
        del n
        state, metrics = step(state, batch)
        out.append(metrics)
    return step, state, out


def _dropped(p: Any, x: Any, key: Tensor) -> Any:
    y = _block(p, x)
    return {**y, "h": sf.nn.dropout(key, y["h"], 0.3, x["rows"])}


@pytest.mark.nightly
@distributed(world=2)
def test_keys_give_the_masks_of_one_device() -> None:
    mesh, key = sf.make_mesh({"pp": 2}, device="cpu"), sf.key(7)

    def first(p: Any, batch: Any, key: Tensor) -> Any:
        x = _first(p, batch)
        return {**x, "rows": batch["rows"], "h": sf.nn.dropout(key, x["h"], 0.1, batch["rows"])}

    def last(p: Any, x: Any, batch: Any, key: Tensor) -> Tensor:
        del key
        return _last(p, x, batch)

    def plain(p: Any, batch: Any, key: Tensor) -> Tensor:
        x = first(p, batch, key)
        for l in range(5):
            x = _dropped({k: v[l] for k, v in p["blocks"].items()}, x, sf.fold_in(key, l))
        return last(p, x, batch, key)

    batches = [{**b, "rows": torch.arange(B)} for b in _batches(2)]
    loss, params = sf.pipeline(first, _dropped, last, num_microbatches=3), _params(5)
    split = sf.pipeline(first, sf.remat(_dropped), last, num_microbatches=3, schedule="zb-h1")
    how: dict[str, Any] = {"mesh": mesh, "reference": plain, "key": key, "specs": _specs(params), "batch": P("dp")}
    for f in (loss, split):
        assert_parity(f, optim.sgd(0.1), params, batches, **how)
    # Before anything is summed in another order the losses have the same bits.
    _, _, (ours, *_) = _run(mesh, loss, params, batches[:1], key=key)
    _, _, (alone, *_) = _run(None, loss, params, batches[:1], key=key)
    assert torch.equal(ours["loss"], alone["loss"])


@pytest.mark.nightly
@distributed(world=4)
def test_mixed_precision_and_aux() -> None:
    mesh = sf.make_mesh({"dp": 2, "pp": 2}, device="cpu")

    def last(p: Any, x: Any, batch: Any) -> Any:
        assert x["h"].dtype == torch.bfloat16
        return _last(p, x, batch), {"size": x["h"].float().square().mean(), "of": WeightedMean(x["h"].sum(), 3)}

    policy = sf.Policy(compute=torch.bfloat16, reduce=torch.float32)
    params, batches = _params(4, torch.float32), _batches(2)
    rows = mesh.coords["dp"]
    mine = [sf.core.tree_map(lambda x: x.chunk(2)[rows], b) for b in batches]
    for scaled, schedule in ((None, "1f1b"), (None, "zb-h1"), (optim.static_loss_scale(8.0), "1f1b")):
        loss = sf.mixed_precision(_loss(last, m=2, schedule=schedule), policy, scaled)
        alone = sf.mixed_precision(_loss(last, m=4), policy, scaled)
        _, state, ours = _run(mesh, loss, params, mine, has_aux=True, zero=Zero(stage=2))
        _, want, theirs = _run(None, alone, params, batches, has_aux=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1.6e-2, atol=1e-5)
        torch.testing.assert_close(sf.unshard(state.params), sf.unshard(want.params), rtol=1.6e-2, atol=2e-2)


@pytest.mark.nightly
@distributed(world=4)
def test_evaluation_and_derivatives_run_stage_after_stage() -> None:
    mesh = sf.make_mesh({"dp": 2, "pp": 2}, device="cpu")
    for chunks in (1, 2):
        params, (batch,) = _params(5, chunks=chunks), _batches(1)
        how = {"schedule": "interleaved", "num_chunks": 2} if chunks == 2 else {}
        loss = _loss(m=2, **how)
        step = sf.sharded_step(
            loss, optim.sgd(0.1), mesh=mesh, specs=_specs(params), batch=P("dp"), zero=Zero.flat(stage=3, **ODD)
        )
        state = step.init(params)
        mine = sf.core.tree_map(lambda x: x.chunk(2)[mesh.coords["dp"]], batch)
        want = _plain()(params, mine)
        torch.testing.assert_close(step.apply(loss, state, mine), want, rtol=1e-12, atol=0)
        handles = sf.core.tree_map(lambda x: x.clone().requires_grad_(), params)
        whole = _plain()(handles, batch)
        grads = sf.core.tree_map(
            lambda x, h: torch.zeros_like(h) if x is None else x,
            sf.core.tree_unflatten(
                sf.core.tree_flatten(params)[1],
                [
                    torch.zeros_like(h) if g is None else g
                    for g, h in zip(
                        torch.autograd.grad(whole, sf.core.tree_leaves(handles), allow_unused=True),
                        sf.core.tree_leaves(handles),
                        strict=True,
                    )
                ],
            ),
            params,
        )
        got = torch.func.grad(step.loss)(state.params, mine)
        torch.testing.assert_close(sf.unshard(got), grads, rtol=1e-11, atol=1e-13)


@pytest.mark.nightly
@distributed(world=3)
def test_an_empty_stage_passes_on_its_input() -> None:
    mesh = sf.make_mesh({"pp": 3}, device="cpu")
    _parity(mesh, 4, loss=_loss(m=2))  # 2, 2 and no layers


@distributed(world=2)
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    params, (batch,) = _params(4), _batches(1)
    step = sf.sharded_step(
        _loss(_weighted), optim.adamw(1e-2), mesh=mesh, specs=_specs(params), batch=P("dp"), skip_nonfinite=True
    )
    state = step.init(params)
    bad = {**batch, "weight": torch.full((B,), float("nan"), dtype=torch.float64)}
    state, metrics = step(state, bad)
    assert metrics["skipped"] and not metrics["finite"]
    torch.testing.assert_close(sf.unshard(state.params), params, rtol=0, atol=0)
    _, metrics = step(state, batch)
    assert metrics["finite"] and not metrics["skipped"]


def test_on_one_device_it_is_the_plain_loss() -> None:
    (batch,) = _batches(1)
    for chunks, how in ((1, {}), (2, {"schedule": "interleaved", "num_chunks": 2})):
        params = _params(5, chunks=chunks)
        got, want = _loss(m=1, **how)(params, batch), _plain()(params, batch)
        assert torch.equal(got, want)
        torch.testing.assert_close(_loss(m=4, **how)(params, batch), want)


def _split_block(p: Any, h: Tensor) -> Tensor:
    """A layer whose hidden units are cut along "tp"."""
    inner = torch.tanh(sf.pvary(h, "tp") @ p["up"])
    return h + sf.psum(inner @ p["down"], "tp")


def _three_axes(mesh: sf.Mesh, stage: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    up, down = torch.randn(3, D, 8, generator=g).to(dtype), torch.randn(3, 8, D, generator=g).to(dtype)
    params = {"blocks": {"up": up / 2, "down": down / 2}, "scale": torch.ones(D, dtype=dtype)}
    specs = {"blocks": {"up": P("pp", None, "tp"), "down": P("pp", "tp")}, "scale": P()}
    loss = sf.pipeline(
        lambda p, x: x * p["scale"],
        _split_block,
        lambda p, h, x: (h * p["scale"] - x).square().mean(),
        num_microbatches=2,
    )
    batches = [torch.randn(8, D, generator=g).to(dtype) for _ in range(3)]
    clipped = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
    optimizer = clipped if dtype == torch.float32 else optim.adamw(1e-2)
    zero = Zero(stage=stage, persist_elements=0)
    assert_parity(loss, optimizer, params, batches, mesh=mesh, specs=specs, batch=P("dp"), zero=zero)


@pytest.mark.nightly
@distributed(world=4)
def test_with_tensor_parallel_layers() -> None:
    mesh = sf.make_mesh({"pp": 2, "tp": 2}, device="cpu")
    for dtype in (torch.float32, torch.float64):
        _three_axes(mesh, 0, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
@distributed(world=8)
def test_three_axes(stage: int) -> None:
    for shape in ({"dp": 2, "pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}):
        mesh = sf.make_mesh(shape, device="cpu")
        for dtype in (torch.float32, torch.float64):
            _three_axes(mesh, stage, dtype)


@pytest.mark.nightly
@distributed(world=3)
def test_open_microbatches_are_those_on_paper() -> None:
    mesh, opened = sf.make_mesh({"pp": 3}, device="cpu"), [0]
    forward = Staged.forward

    def counted(self: Staged, *args: Any) -> Any:
        out = forward(self, *args)
        opened[0] = max(opened[0], len(self._open))
        return out

    made = {
        "gpipe": (schedules.gpipe, 1),
        "1f1b": (schedules.one_f_one_b, 1),
        "interleaved": (schedules.interleaved, 2),
    }
    Staged.forward = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for name, (make, chunks) in made.items():
            opened[0] = 0
            _parity(mesh, 6, _loss(m=6, schedule=name, num_chunks=chunks), chunks=chunks)
            assert opened[0] == schedules.timeline(make(3, 6)).peaks[mesh.coords["pp"]]
    finally:
        Staged.forward = forward  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.nightly
@distributed(world=2)
def test_accumulated_pipelines() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    _parity(mesh, loss=sf.accumulate(_loss(m=2), 2))


V_LISTS = {"zb-v": schedules.zero_bubble_v, "dualpipe-v": schedules.dual_pipe_v}


def _unsplit(of: schedules.PipelineSchedule) -> schedules.PipelineSchedule:
    ranks = tuple(tuple(a for a in row if a.kind != "weights") for row in of.ranks)
    return dataclasses.replace(of, ranks=ranks)


def _turning(p: Any, batch: Any) -> Tensor:
    """The plain loss where the second stack is in reverse."""
    flipped = {k: v.flip(0) for k, v in p["blocks"][1].items()}
    return _plain()({**p, "blocks": [p["blocks"][0], flipped]}, batch)


@pytest.mark.nightly
@distributed(world=2)
def test_down_the_ranks_and_up_again() -> None:
    """The second stack runs in reverse, for any number of ranks."""
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    params = _params(7, chunks=2)

    for make in V_LISTS.values():
        loss = _loss(m=4, schedule=_unsplit(make(2, 4)), num_chunks=2)
        (batch,) = _batches(1)
        torch.testing.assert_close(loss(params, batch), _turning(params, batch))
        _parity(mesh, 7, loss, reference=_turning, chunks=2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
@distributed(world=[2, 3])
def test_split_backwards(world: int, name: str) -> None:
    """B gives gradients of activations, W those of weights."""
    mesh, chunks = sf.make_mesh({"pp": world}, device="cpu"), 1 if name == "zb-h1" else 2
    loss = _loss(m=6, schedule=name, num_chunks=chunks)
    _parity(mesh, 7, loss, reference=_turning if chunks > 1 else _plain(), chunks=chunks)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=4)
def test_split_backwards_with_zero(stage: int) -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    clipped = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
    for accumulate in ("each", "once"):
        zero = Zero.flat(stage=stage, accumulate=accumulate, **ODD)
        _parity(mesh, loss=_loss(m=3, schedule="zb-h1", block=sf.remat(_block)), zero=zero, optimizer=clipped)


@pytest.mark.nightly
@distributed(world=3)
def test_split_backwards_hold_the_activations_on_paper() -> None:
    """From a microbatch's forward to its W; weights are not made before their W."""
    mesh, opened, done = sf.make_mesh({"pp": 3}, device="cpu"), [0], [0, 0]
    forward, note, rest = Performer._forward, DeferredGradients.note, DeferredGradients.rest

    def counted(self: Performer, *args: Any, **named: Any) -> None:
        forward(self, *args, **named)
        opened[0] = max(opened[0], len(self._deferred))

    def noted(self: DeferredGradients, *args: Any) -> None:
        done[0] += 1
        note(self, *args)

    def made(self: DeferredGradients) -> Any:
        done[1] += sum(map(len, self._noted.values()))
        return rest(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Performer, "_forward", counted)
        patch.setattr(DeferredGradients, "note", noted)
        patch.setattr(DeferredGradients, "rest", made)
        loss = _loss(m=6, schedule="zb-h1")
        _parity(mesh, 6, loss)
    rank = mesh.coords["pp"]
    assert opened[0] == schedules.timeline(schedules.zero_bubble_h1(3, 6)).peaks[rank]
    steps = len(_batches())
    # Two layers a stage, each with one product; on the last rank the head, too.
    assert done == [steps * 6 * (2 + (rank == 2))] * 2


@pytest.mark.nightly
@distributed(world=4)
def test_a_split_backward_opens_leaves_no_third_time() -> None:
    """W needs only activations and cotangents, so it costs no gather."""
    mesh, sent = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu"), []
    for schedule in ("1f1b", "zb-h1"):
        params = _params(4)
        with sf.count_traffic() as traffic:
            _run(mesh, _loss(m=4, schedule=schedule), params, _batches(2), zero=Zero.flat(stage=3, **ODD))
        sent.append((traffic.bytes, traffic.calls))
    assert sent[0] == sent[1]


@NIGHTLY
@distributed(world=2)
def test_split_backwards_of_other_kinds_of_losses() -> None:
    """Weighted means; rows of all kinds of ranks; leaves that are frozen; optimizers that act on whole leaves."""
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    _parity(mesh, loss=_loss(_weighted, schedule="zb-h1"), last=_weighted, optimizer=optim.lamb(1e-2))
    for wrap in (
        lambda f: sf.offload(f, sf.policies.offload_larger_than(0)),
        lambda f: sf.remat(f, sf.policies.dots_saveable),
    ):
        _parity(mesh, 4, _loss(m=4, schedule="zb-h1", block=wrap(_block)))
    frozen = {"embed": False, "blocks": True, "scale": True, "unused": False}
    _parity(mesh, loss=_loss(schedule="zb-h1"), trainable=frozen)
    _parity(mesh, loss=sf.accumulate(_loss(m=2, schedule="zb-h1"), 2))


@pytest.mark.nightly
@pytest.mark.parametrize("per_stage", [(1, 4, 2), pytest.param((3, 1, 3), marks=pytest.mark.nightly)])
@distributed(world=3)
def test_unequal_numbers_of_layers(per_stage: tuple[int, ...]) -> None:
    mesh, params = sf.make_mesh({"pp": 3}, device="cpu"), _params(7)

    def plain(p: Any, batch: Any) -> Tensor:
        return _plain()({**p, "blocks": sf.unpad_layers(p["blocks"], per_stage)}, batch)

    params = {**params, "blocks": sf.pad_layers(params["blocks"], per_stage)}
    for dtype in (torch.float64, torch.float32):
        cast = sf.core.tree_map(lambda x, dtype=dtype: x.to(dtype), params)
        # By leaf and of all leaves, norms count unused rows as nothing.
        lamb = optim.chain(optim.clip_by_global_norm(0.05), optim.lamb(1e-2, weight_decay=0.1))
        optimizer = optim.adamw(1e-2, weight_decay=0.1) if dtype == torch.float64 else lamb
        assert_parity(
            _loss(m=3, layers_per_stage=per_stage),
            optimizer,
            cast,
            _batches(),
            mesh=mesh,
            specs=_specs(params),
            batch=P("dp"),
            reference=plain,
        )
    step = sf.sharded_step(
        _loss(m=3, layers_per_stage=per_stage), optim.sgd(0.1), mesh=mesh, specs=_specs(params), batch=P("dp")
    )
    (batch,) = _batches(1)
    got = step.apply(_loss(m=3, layers_per_stage=per_stage), step.init(params), batch)
    torch.testing.assert_close(got, plain(params, batch), rtol=1e-12, atol=0)


def test_stacks_that_are_not_padded_are_refused() -> None:
    stack = {"w": torch.zeros(5, 2), "b": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"is for 4 rows:\n.*stack\['w'\] has 5"):
        sf.pad_layers(stack, (1, 3))
    with pytest.raises(ValueError, match=r"is for 6 rows:"):
        sf.unpad_layers(stack, (1, 3))
    for wrong, chunks in (((), 1), ((2, 0), 1), ((2, 2), 2)):
        with pytest.raises(ValueError, match="every stage has a layer"):
            how = {"schedule": "interleaved", "num_chunks": 2} if chunks == 2 else {}
            _loss(layers_per_stage=wrong, **how)


@distributed(world=2)
def test_numbers_of_layers_for_other_stages_are_refused() -> None:
    mesh, params = sf.make_mesh({"pp": 2}, device="cpu"), _params(6)
    for per_stage, said in (
        ((2, 2, 2), "is for 3 stages, but must be for as many as the axis has ranks, got 2 ranks"),
        ((1, 5), "wants stacks of 10 rows"),
    ):
        step = sf.sharded_step(
            _loss(layers_per_stage=per_stage), optim.sgd(0.1), mesh=mesh, specs=_specs(params), batch=P("dp")
        )
        with pytest.raises(ValueError, match=said):
            state = step.init(params)
            step(state, _batches(1)[0])
