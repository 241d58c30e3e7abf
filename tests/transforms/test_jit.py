"""Covers jit: a captured step has the bits of the eager one, for stages x worlds x transforms; cache and errors."""

import functools
import logging
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.models import gpt
from shardfn.testing import ODD_TRAINABLE, assert_same, distributed, odd_batch, odd_loss, odd_params, on_mesh

ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}
graph = functools.partial(sf.jit, backend="graph")


def _same(loss: Any, jitted: Any, tx: Any, params: Any, batches: Any, **options: Any) -> None:
    want = on_mesh(loss, tx, params, batches, **options)
    assert_same(on_mesh(jitted, tx, params, batches, **options), want, exact=True)


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ten_steps_have_the_bits_of_eager(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    batches = [odd_batch(n) for n in range(10)]
    for stage in range(4):
        options: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero.flat(stage=stage, **ODD), "trainable": ODD_TRAINABLE}
        _same(odd_loss, graph(odd_loss), optim.adamw(1e-2, weight_decay=0.1), odd_params(), batches, **options)


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [(3,), (0, 1, 2)])
@distributed(world=3, timeout=200)
def test_composes_with_accumulate_remat_clip_and_every_optimizer(stages: tuple[int, ...]) -> None:
    mesh = sf.make_mesh({"dp": 3})
    batches = [odd_batch(n) for n in range(3)]
    clipped = optim.chain(optim.clip_by_global_norm(0.1), optim.lamb(1e-2, weight_decay=0.1))
    schedule = optim.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    rules = (optim.sgd(1e-3, momentum=0.9), optim.lion(1e-3), optim.adam(schedule), clipped)
    for stage, tx in ((stage, rules[stage]) for stage in stages):
        inner = sf.remat(odd_loss)
        loss = sf.accumulate(inner, 2)
        options: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero.flat(stage=stage, **ODD), "trainable": ODD_TRAINABLE}
        _same(loss, graph(loss), tx, odd_params(), batches, **options)
        _same(loss, sf.accumulate(graph(inner), 2), tx, odd_params(), batches, **options)


def _noisy(params: dict, batch: dict, key: Tensor) -> tuple[sf.WeightedMean, dict]:
    x = sf.nn.dropout(key, batch["x"], 0.5, batch["index"])
    errors = (x @ params["w"] - batch["y"][:, 0]) ** 2
    return sf.WeightedMean(errors.sum(), torch.tensor(errors.numel())), {"worst": errors.max(), "two": 2}


@pytest.mark.nightly
@distributed(world=3)
def test_composes_with_keys_aux_weights_and_uneven_ranks() -> None:
    mesh = sf.make_mesh({"dp": 3})
    params = {"w": torch.randn(5, generator=torch.Generator().manual_seed(6))}
    # 10 rows on 3 ranks: 4, 4 and 2
    batches = [{k: v[:10] for k, v in odd_batch(n).items()} | {"index": torch.arange(10) + 10 * n} for n in range(3)]
    for stage in (0, 1, 3):
        options: dict[str, Any] = {
            "mesh": mesh,
            "zero": sf.Zero.flat(stage=stage, **ODD),
            "key": sf.key(7),
            "has_aux": True,
        }
        _same(_noisy, graph(_noisy), optim.adam(1e-2), params, batches, **options)


def _tp_loss(params: dict, batch: dict) -> Tensor:
    h = torch.tanh(sf.pvary(batch["x"], "tp") @ params["up"].t())
    return ((sf.psum(h @ params["down"].t(), "tp") - batch["y"]) ** 2).mean()


@pytest.mark.nightly
@distributed(world=4)
def test_composes_with_tensor_parallel_leaves() -> None:
    g = torch.Generator().manual_seed(3)
    params = {"up": torch.randn(7, 5, generator=g), "down": torch.randn(3, 7, generator=g)}
    specs = {"up": sf.P("tp"), "down": sf.P(None, "tp")}
    mesh = sf.make_mesh({"dp": 2, "tp": 2})
    for stage in (0, 2, 3):
        options: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero.flat(stage=stage, **ODD), "specs": specs}
        _same(_tp_loss, graph(_tp_loss), optim.adamw(1e-2), params, [odd_batch(n) for n in range(3)], **options)


@pytest.mark.nightly
@distributed(world=2)
def test_modules_and_the_gpt_run_as_graphs() -> None:
    mesh = sf.make_mesh({"dp": 2})
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7, affine=False).eval(), torch.nn.Linear(7, 3)
    )
    params, apply = sf.from_module(net)

    def module_loss(p: dict, b: dict) -> Tensor:
        return ((apply(p, b["x"]) - b["y"]) ** 2).mean()

    zero = sf.Zero.flat(stage=3, **ODD)
    batches = [odd_batch(n) for n in range(2)]
    _same(module_loss, graph(module_loss), optim.adamw(1e-2), dict(params), batches, mesh=mesh, zero=zero)
    config = gpt.Config(vocab_size=33, num_layers=2, d_model=16, num_heads=2, max_len=8, tie_embeddings=True)
    g = torch.Generator().manual_seed(0)
    tokens = [{"tokens": torch.randint(33, (4, 9), generator=g)} for _ in range(3)]
    loss = functools.partial(gpt.loss, config)
    remat = functools.partial(gpt.loss, config, wrap=sf.remat)
    params = gpt.init(config, sf.key(0))
    _same(loss, graph(remat), optim.adamw(1e-2), params, tokens, mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))


@pytest.mark.nightly
@distributed(world=2)
def test_skipping_and_keeping_the_state() -> None:
    mesh = sf.make_mesh({"dp": 2})
    loss = graph(lambda p, x: (p["w"] * x).sum())
    for stage in range(4):
        options: dict[str, Any] = {
            "mesh": mesh,
            "zero": sf.Zero(stage=stage, persist_elements=0),
            "skip_nonfinite": True,
        }
        step = sf.sharded_step(loss, optim.adam(0.1), **options)
        state = step.init({"w": torch.ones(6)})
        kept, metrics = step(state, torch.full((6,), torch.inf if mesh.rank else 1.0))
        assert metrics["skipped"] and not metrics["finite"] and kept is state and int(kept.step) == 0
        new, metrics = step(kept, torch.ones(6))
        assert not metrics["skipped"] and int(new.step) == 1
        with pytest.raises(sf.DonatedError):
            step(kept, torch.ones(6))
        step = sf.sharded_step(
            loss, optim.adam(0.1), mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0), donate=False
        )
        state = step.init({"w": torch.ones(6)})
        first, _ = step(state, torch.ones(6))
        again, _ = step(state, torch.ones(6))
        assert torch.equal(sf.unshard(first.params)["w"], sf.unshard(again.params)["w"])
        assert torch.equal(sf.unshard(state.params)["w"], torch.ones(6))


@pytest.mark.nightly
def test_a_new_shape_captures_again_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    step = sf.sharded_step(graph(lambda w, x: (w * x).mean()), optim.sgd(0.1))
    state = step.init(torch.ones(3))
    with caplog.at_level(logging.INFO, "shardfn.jit"):
        for rows in (2, 2, 4, 2):
            state, _ = step(state, torch.ones(rows, 3))
    info = step.cache_info()
    assert (info.hits, info.misses, info.currsize) == (2, 2, 2)
    records = [r for r in caplog.records if r.name == "shardfn.jit" and r.message.startswith("captured")]
    assert [r.levelname for r in records] == ["INFO", "WARNING"] and "batch (4, 3)" in records[1].message


@pytest.mark.nightly
def test_operations_that_a_graph_cannot_hold_are_named_by_line() -> None:
    def branches(w: Tensor, x: Tensor) -> Tensor:
        if (w * x).sum() > 0:  # here
            x = -x
        return (w * x).mean()

    def reads(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).mean() * w.max().item()  # here too

    def indexes(w: Tensor, x: Tensor) -> Tensor:
        rows = tuple(torch.arange(2))
        return (w * x)[rows, rows].mean()  # by what torch looks at as a list of numbers

    for loss, said in ((branches, "# here"), (reads, "# here too"), (indexes, "# by what")):
        step = sf.sharded_step(graph(loss), optim.sgd(0.1))
        lines = pathlib.Path(__file__).read_text().splitlines()
        line = next(n for n, text in enumerate(lines, 1) if said in text)
        with pytest.raises(sf.CaptureError, match=rf"test_jit.py:{line}: .*torch.where"):
            step(step.init(torch.ones(3)), torch.ones(2, 3))
        with pytest.raises(sf.CaptureError, match=rf"test_jit.py:{line}: "):
            graph(loss)(torch.ones(3), torch.ones(2, 3))


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_that_capture_different_collectives_all_raise() -> None:
    mesh = sf.make_mesh({"dp": 2})

    def crooked(w: Tensor, x: Tensor) -> Tensor:
        if mesh.rank == 0:
            return sf.psum((w * x).mean(), "dp")
        return sf.pmax((w * x).detach(), "dp").mean() + (w * x).mean()

    step = sf.sharded_step(graph(crooked), optim.sgd(0.1), mesh=mesh)
    with pytest.raises(
        sf.RankError, match=r"(?s)rank 0: .*test_jit.py:\d+ in crooked.*rank 1: .*test_jit.py:\d+ in crooked"
    ):
        step(step.init(torch.ones(3)), torch.ones(2, 3))

    def fails(w: Tensor, x: Tensor) -> Tensor:
        if mesh.rank == 1:
            raise KeyError("no such thing")
        return (w * x).mean()

    step = sf.sharded_step(graph(fails), optim.sgd(0.1), mesh=mesh)
    with pytest.raises(KeyError if mesh.rank else sf.RankError, match="no such thing"):
        step(step.init(torch.ones(3)), torch.ones(2, 3))


@distributed(world=2)
def test_jit_of_functions_alone() -> None:
    mesh = sf.make_mesh({"dp": 2})
    plain = graph(lambda tree, scale: {"a": tree["a"] * scale, "n": 3})
    for scale in (2.0, 3.0, 2.0):
        out = plain({"a": torch.ones(2)}, scale)
        assert torch.equal(out["a"], torch.full((2,), scale)) and out["n"] == 3
    assert plain.cache_info()[:3] == (1, 2, 2)
    mapped = sf.shard_map(lambda x: sf.psum((x * 2).sum(0), "dp"), mesh=mesh, in_specs=sf.P("dp"), out_specs=sf.P())
    x = torch.arange(10.0).view(5, 2)
    assert torch.equal(graph(mapped)(x), mapped(x))
    rows = sf.shard_map(lambda x: x * 2, mesh=mesh, in_specs=sf.P("dp"), out_specs=sf.P("dp"))
    assert torch.equal(graph(rows)(x), x * 2)
    both = sf.value_and_grad(lambda w: (w**2).sum())
    value, grads = graph(both)(torch.ones(3))
    assert value == 3 and torch.equal(grads, torch.full((3,), 2.0))
    with pytest.raises(sf.CaptureError, match=r"jit\(value_and_grad\(f\)\)"):
        graph(lambda w: w * 2)(torch.ones(3, requires_grad=True))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="Did you mean 'graph'"):
        sf.jit(odd_loss, backend="grph")
    with pytest.raises(ValueError, match="Did you mean 'prefetch'"):
        sf.jit(odd_loss, prefetsh=3)
    with pytest.raises(ValueError, match="Drop one"):
        sf.jit(sf.jit(odd_loss))
    with pytest.raises(ValueError, match=r"jit\(remat\(f\)\)"):
        sf.remat(sf.jit(odd_loss))


@pytest.mark.nightly
def test_draws_from_a_generator_inside_remat_are_refused() -> None:
    def noisy(w: Tensor, x: Tensor) -> Tensor:
        return (torch.nn.functional.dropout(w * x, 0.5) ** 2).mean()

    step = sf.sharded_step(graph(sf.remat(noisy)), optim.sgd(0.1))
    with pytest.raises(sf.CaptureError, match=r"test_jit.py:\d+.*inside remat"):
        step(step.init(torch.ones(8)), torch.ones(8))
    with pytest.raises(sf.CaptureError, match="inside remat"):
        graph(sf.value_and_grad(sf.remat(noisy)))(torch.ones(8), torch.ones(8))
    step = sf.sharded_step(graph(noisy), optim.sgd(0.1))
    with pytest.warns(UserWarning, match=r"draws from torch's generator at .*test_jit.py:\d+ in noisy"):
        assert step(step.init(torch.ones(8)), torch.ones(8))[1]["finite"]


@pytest.mark.nightly
def test_constants_are_distinguished_by_type() -> None:
    scaled = graph(lambda x, s: x * s)
    x = torch.ones(2, dtype=torch.int64)
    assert [scaled(x, s).dtype for s in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]
    assert torch.signbit(scaled(torch.ones(1), -0.0)) and not torch.signbit(scaled(torch.ones(1), 0.0))


@pytest.mark.nightly
@distributed(world=2)
def test_sharded_gradients_and_counts_come_out_of_a_graph() -> None:
    mesh = sf.make_mesh({"dp": 2})

    def loss(p: dict, x: Tensor) -> Tensor:
        return ((x @ p["w"]) ** 2).mean() * sf.psum(torch.tensor(1.0), "dp")

    step = sf.sharded_step(graph(loss), optim.adam(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    state, x = step.init({"w": torch.arange(6.0).view(2, 3)}), torch.ones(3, 2)
    grad = torch.func.grad(step.loss)
    want, got = grad(state.params, x), graph(grad)(state.params, x)
    assert torch.equal(want["w"].full_tensor(), got["w"].full_tensor())
    strided = torch.ones(2, 3).t()
    counts = []
    for batch in (x, x, strided if mesh.rank else x):  # the last is new to one rank only
        with sf.count_traffic() as traffic:
            state, _ = step(state, batch)
        counts.append(traffic.by_op)
    assert counts[0] == counts[1] == counts[2]


@distributed(world=2)
def test_a_lowered_step_keeps_to_itself_and_raises_its_errors() -> None:
    mesh = sf.make_mesh({"dp": 2})
    step = sf.sharded_step(graph(lambda w, x: (w * x).mean()), optim.sgd(0.1), mesh=mesh, donate=False)
    state = step.init(torch.ones(3))
    compiled = step.lower(state, torch.ones(2, 3)).compile()
    assert compiled(state, torch.ones(2, 3))[1]["finite"]
    with pytest.raises(sf.RankError if mesh.rank == 0 else ValueError, match="Lower the step again"):
        compiled(state, torch.ones(2 + mesh.rank, 3))
    assert step(state, torch.ones(2, 3))[1]["finite"]


def test_a_step_that_fails_in_its_graph_leaves_the_state() -> None:
    step = sf.sharded_step(graph(lambda w, x: w[x].mean()), optim.adam(0.1))
    state = step.init(torch.ones(3))
    with pytest.raises(IndexError):
        step(state, torch.tensor([0, 7]))
    new, _ = step(state, torch.tensor([0, 2]))
    assert int(new.step) == 1


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:the loss draws from torch")
def test_draws_of_a_captured_step_are_those_of_the_eager_one() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        scale = torch.empty(1, dtype=x.dtype).uniform_(-1, 1).exp()
        noise = torch.rand(x.shape, dtype=x.dtype) * torch.bernoulli(torch.full(x.shape, 0.5, dtype=x.dtype))
        return ((x * noise * scale) @ w).square().mean() + torch.randn(3, dtype=x.dtype).sum() * w.sum()

    x, found = torch.ones(4, 6, dtype=torch.float64), []
    for f in (loss, sf.jit(loss, backend="graph")):
        step = sf.sharded_step(f, optim.sgd(0.1))
        state = step.init(torch.ones(6, 2, dtype=torch.float64))
        for seed in range(3):
            torch.manual_seed(seed)
            state, _ = step(state, x)
        found.append(state.params.full_tensor())
    torch.testing.assert_close(found[1], found[0], rtol=1e-14, atol=1e-14)
