"""Covers `sharded_step(count=True)`: a loss that takes the number of the step equals one device."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn
from shardfn import P, optim
from shardfn.testing import ODD_TRAINABLE, assert_opened, assert_parity, distributed, odd_batch, odd_loss, odd_params

sf: Any = shardfn  # one test makes errors of types
NIGHTLY = pytest.mark.nightly
ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}
UNTIL = 2


def _loss(params: Any, batch: Any, *, step: Tensor) -> Tensor:
    """Returns a loss with an L2 term until some step, and with a term of growing weight."""
    decay = params["bias7"].square().sum() + params["blocks"][0]["w"].square().sum()
    return odd_loss(params, batch) + torch.where(step < UNTIL, decay, 0.0) + 0.1 * step * params["one"].sum()


def _noisy(params: Any, batch: Any, key: Tensor, step: Tensor) -> Tensor:
    noise = sf.core.normal(key, params["bias7"].shape)
    return _loss({**params, "bias7": params["bias7"] + noise / (1 + step)}, batch, step=step)


def _batches(num: int = 4) -> list[Any]:
    return [odd_batch(n) for n in range(num)]


def _parity(loss: Any, mesh: Any, stage: int, reference: Any = _loss, **options: Any) -> Any:
    zero = sf.Zero.flat(stage=stage, **ODD)
    options = {"trainable": ODD_TRAINABLE, "reference": reference, "zero": zero, "count": True, **options}
    return assert_parity(loss, optim.adamw(1e-2), odd_params(), _batches(), mesh=mesh, **options)


@pytest.mark.day("2-2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=[1, 2, 3])
def test_eager_jitted_and_accumulated_steps_equal_one_device(world: int, stage: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    graph = functools.partial(sf.jit, backend="graph")
    for wrap in (lambda f: f, sf.remat, lambda f: sf.accumulate(f, 2), graph, lambda f: graph(sf.accumulate(f, 2))):
        _parity(wrap(_loss), mesh, stage)
    for wrap in (lambda f: f, graph):
        _parity(wrap(_noisy), mesh, stage, _noisy, key=sf.key(3))


@distributed(world=[2])
def test_opened_steps_are_the_step(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    for wrap in (lambda f: f, functools.partial(sf.jit, backend="graph")):
        options: dict[str, Any] = {"mesh": mesh, "trainable": ODD_TRAINABLE, "count": True}
        assert_opened(wrap(_loss), optim.adamw(1e-2), odd_params(), _batches(), zero=sf.Zero(stage=2), **options)


def test_one_graph_serves_all_steps() -> None:
    seen = []

    def loss(params: Any, batch: Any, step: Tensor) -> Tensor:
        seen.append((step.dtype, step.shape))
        return _loss(params, batch, step=step)

    step = sf.sharded_step(sf.jit(loss, backend="graph"), optim.adamw(1e-2), trainable=ODD_TRAINABLE, count=True)
    state = step.init(odd_params())
    for batch in _batches(5):
        state, _ = step(state, batch)
    info = step.cache_info()
    assert (info.misses, info.hits, len(seen)) == (1, 4, 1)
    assert seen == [(torch.int64, torch.Size([]))]
    inputs = [n.meta["leaf"] for n in step.lower(state, odd_batch(0)).gm.graph.nodes if n.op == "placeholder"]
    assert inputs.count("step") == 1


def test_a_number_that_a_loss_writes_to_is_not_that_of_the_state() -> None:
    def writes(w: Tensor, x: Tensor, step: Tensor) -> Tensor:
        step += 7
        return (w * x).mean() * step

    step = sf.sharded_step(writes, optim.sgd(0.0), count=True)
    state = step.init(torch.ones(()))
    losses = []
    for _ in range(3):
        state, metrics = step(state, torch.ones(2))
        losses.append(float(metrics["loss"]))
    assert losses == [7.0, 8.0, 9.0]
    assert int(state.step) == 3


@distributed(world=[1, 3])
def test_evaluation_and_the_pure_loss_see_the_number_of_the_state(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})

    def loss(w: Tensor, x: Tensor, *, step: Tensor) -> Tensor:
        return (w * x).mean() * (1 + step)

    x = torch.arange(6.0)[:, None]
    for wrap in (lambda f: f, functools.partial(sf.jit, backend="graph")):
        step = sf.sharded_step(wrap(loss), optim.sgd(0.0), mesh=mesh, count=True)
        state = step.init(torch.ones(1))
        own = x[step.rows(6)]
        for n in range(3):
            assert step.evaluate(state, [own]) == {"loss": 2.5 * (1 + n)}
            assert float(step.loss(state.params, own, state.step)) == 2.5 * (1 + n)

            def pure(by: Tensor, s: Any = state, own: Tensor = own, step: Any = step) -> Any:
                value = step(s, by * own)[1]["loss"]
                return value, value.detach()

            _, found = torch.func.grad(pure, has_aux=True)(torch.ones(()))
            assert float(found) == 2.5 * (1 + n)
            state, metrics = step(state, own)
            assert float(metrics["loss"]) == 2.5 * (1 + n)


def test_a_skipped_step_is_not_counted() -> None:
    seen: list[int] = []

    def loss(w: Tensor, x: Tensor, step: Tensor) -> Tensor:
        seen.append(int(step))
        return (w * x).mean()

    step = sf.sharded_step(loss, optim.sgd(0.1), count=True, skip_nonfinite=True)
    state = step.init(torch.ones(1))
    for x in (1.0, float("inf"), 1.0, 1.0):
        state, _ = step(state, torch.full((2,), x))
    assert seen == [0, 1, 1, 2]


@distributed(world=[2])
def test_several_losses_all_see_it(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    params, rows = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}, torch.arange(12.0).reshape(4, 3)

    def fit(p: Any, x: Tensor, step: Tensor) -> Tensor:
        return (x * p["a"] * p["b"]).mean() * (1 + step)

    def pull(p: Any, x: Tensor, *, step: Tensor) -> Tensor:
        return torch.where(step < 1, (x * p["a"]).square().mean(), 0.0 * p["a"].sum())

    for wrap in (lambda f: f, functools.partial(sf.jit, backend="graph")):
        losses = {"fit": wrap(fit), "pull": wrap(pull)}
        step = sf.sharded_step(losses, optim.sgd(0.01), mesh=mesh, zero=2, count=True)
        state = step.init(params)
        plain = {k: v.clone().requires_grad_() for k, v in params.items()}
        for n in range(3):
            own = rows[2 * mesh.rank : 2 * mesh.rank + 2]
            state, _ = step(state, {"fit": own, "pull": own})
            total = fit(plain, rows, torch.tensor(n)) + pull(plain, rows, step=torch.tensor(n))
            grads = torch.autograd.grad(total, list(plain.values()))
            plain = {
                k: (v - 0.01 * g).detach().requires_grad_() for (k, v), g in zip(plain.items(), grads, strict=True)
            }
        for name, x in plain.items():
            torch.testing.assert_close(state.params[name].full_tensor(), x.detach())


def _stack() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"into": torch.randn(5, 4, generator=g), "blocks": torch.randn(3, 4, 4, generator=g) / 2}


def _first(p: Any, x: Tensor, *key: Tensor) -> Tensor:
    return x @ p["into"]


def _block(p: Tensor, h: Tensor, *key: Tensor) -> Tensor:
    noise = sf.core.normal(key[0], p.shape) / 10 if key else 0.0
    return torch.tanh(h @ (p + noise))


def _last(p: Any, h: Tensor, x: Tensor, *key: Tensor, step: Tensor) -> Tensor:
    return h.square().mean() + torch.where(step < UNTIL, p["into"].square().sum(), 0.0)


def _plain(p: Any, x: Tensor, *key: Tensor, step: Tensor) -> Tensor:
    h = _first(p, x)
    for l in range(3):
        h = _block(p["blocks"][l], h, *(sf.fold_in(k, l) for k in key))
    return _last(p, h, x, step=step)


@pytest.mark.parametrize("jitted", [False, pytest.param(True, marks=NIGHTLY)])
@distributed(world=[1, 2, pytest.param(3, marks=NIGHTLY)])
def test_a_pipeline_passes_it_to_its_last_function(world: int, jitted: bool) -> None:
    mesh = sf.make_mesh({"pp": world})
    staged = sf.pipeline(_first, _block, _last, num_microbatches=3)
    g = torch.Generator().manual_seed(1)
    batches = [torch.randn(6, 5, generator=g) for _ in range(4)]
    for key in (None, sf.key(5)):
        assert_parity(
            sf.jit(staged, backend="graph") if jitted else staged,
            optim.adamw(1e-2),
            _stack(),
            batches,
            mesh=mesh,
            reference=_plain,
            specs={"into": P(), "blocks": P("pp")},
            batch=P(),
            key=key,
            count=True,
        )


@distributed(world=[2])
def test_a_partitioned_loss(world: int) -> None:
    mesh = sf.make_mesh({"tp": world})
    torch.manual_seed(0)
    params = {"a": torch.randn(5, 7), "b": torch.randn(7, 3)}

    def loss(p: Any, x: Tensor, step: Tensor) -> Tensor:
        return (torch.tanh(x @ p["a"]) @ p["b"]).square().mean() / (1 + step)

    for wrap in (lambda f: f, functools.partial(sf.jit, backend="graph")):
        assert_parity(
            wrap(sf.partition(loss, axes="tp")),
            optim.adamw(1e-2),
            params,
            [torch.randn(6, 5) for _ in range(3)],
            mesh=mesh,
            reference=loss,
            specs={"a": P(None, "tp"), "b": P("tp")},
            batch=P(),
            count=True,
        )


@distributed(world=[2])
def test_with_a_model_state(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})

    def loss(w: Tensor, kept: Tensor, x: Tensor, key: Tensor, step: Tensor) -> Any:
        return (w * x * (1 + step)).mean() + kept.detach().sum(), kept + step

    for wrap in (lambda f: f, lambda f: sf.accumulate(f, 2), functools.partial(sf.jit, backend="graph")):
        step = sf.sharded_step(wrap(loss), optim.sgd(0.0), mesh=mesh, count=True, has_state=True, key=sf.key(0))
        state = step.init(torch.ones(1), model_state=torch.zeros((), dtype=torch.int64))
        for _ in range(3):
            state, _ = step(state, torch.ones(4, 1))
        cut = getattr(wrap(loss), "num_microbatches", 1)
        assert int(state.model_state.full_tensor()) == 3 * cut


def test_it_passes_through_adapters_and_precision() -> None:
    def loss(p: Any, x: Tensor, step: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        assert step.dtype == torch.int64
        return (x @ p["w"]).float().square().mean() * step

    base = {"w": torch.ones(4, 4)}
    low = sf.lora.LoRA.of(base, ["w"], rank=2)
    adapted = low.adapt(sf.remat(loss))
    step = sf.sharded_step(sf.mixed_precision(adapted, sf.Policy.bf16()), optim.sgd(0.1), count=True)
    state = step.init({"base": base, "lora": low.init(sf.key(0), params=base)})
    for n in range(2):
        state, metrics = step(state, torch.ones(2, 4))
        assert float(metrics["loss"]) == 16.0 * n


def test_a_loss_without_the_argument_is_refused() -> None:
    def without(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).mean()

    def takes(w: Tensor, x: Tensor, *, step: Tensor) -> Tensor:
        return (w * x).mean() * step

    for wrap in (lambda f: f, lambda f: sf.jit(sf.accumulate(f, 2))):
        with pytest.raises(
            TypeError, match=r"without\(w.*step=step\)\. With count=True a loss takes the number of the step"
        ):
            sf.sharded_step(wrap(without), optim.sgd(0.1), count=True)
        with pytest.raises(
            TypeError, match=r"Is 'step' the number of the step\? Then pass sharded_step\(..., count=True\)"
        ):
            sf.sharded_step(wrap(takes), optim.sgd(0.1))
    losses = {"good": takes, "bad": without}
    with pytest.raises(TypeError, match=r"without\(w"):
        sf.sharded_step(losses, optim.sgd(0.1), count=True)
    staged = sf.pipeline(_first, _block, lambda p, h, x: h.mean(), num_microbatches=2)
    with pytest.raises(
        TypeError, match="last of a pipeline takes the number of the step under count=True, got <lambda>"
    ):
        sf.sharded_step(staged, optim.sgd(0.1), count=True)


@distributed(world=[2])
def test_ranks_that_count_differently_are_refused(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    step = sf.sharded_step(lambda w, x, step=0: (w * x).mean(), optim.sgd(0.1), mesh=mesh, count=mesh.rank == 0)
    with pytest.raises(sf.RankError, match="count True"):
        step(step.init(torch.ones(1)), torch.ones(2))
