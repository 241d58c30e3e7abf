"""Covers shardfn/interop/_eval_state.py and the rules that average parameters: sharded, evaluated, saved, exported."""

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn import optim
from shardfn.core import tree_leaves
from shardfn.testing import assert_same, distributed, on_mesh, one_device

RULES: dict[str, Any] = {
    "average": lambda: optim.average_params(optim.adamw(0.05), 0.8),
    "debiased": lambda: optim.average_params(optim.adamw(0.05), 0.8, debias=True),
    "mean": lambda: optim.chain(
        optim.clip_by_global_norm(0.1), optim.average_params(optim.sgd(0.1), lambda count: count / (count + 1))
    ),
    "lookahead": lambda: optim.lookahead(optim.adamw(0.05), 2, 0.5),
    "reset": lambda: optim.lookahead(optim.adamw(0.05), 2, 0.5, reset_state=True),
    "free": lambda: optim.schedule_free(optim.adamw(0.05, b1=0.0), 0.05),
}
every = pytest.mark.parametrize("name", RULES)


def params() -> Any:
    draw = torch.Generator().manual_seed(0)
    return {k: torch.randn(s, generator=draw) for k, s in {"w": (5, 7), "b": (5,), "s": ()}.items()}


def loss(p: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["w"].T + p["b"]) - p["s"]).square().mean()


def batches(num: int = 5) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(12, 7, generator=draw) for _ in range(num)]


def evaluated(name: str, opt_state: Any, ps: Any) -> Any:
    """The parameters to evaluate after a run on one device."""
    own = opt_state[1] if name == "mean" else opt_state
    if name == "free":
        return optim.schedule_free_eval_params(own, ps)
    return own.slow if name in ("lookahead", "reset") else own.average


def check(name: str, world: int, **zero: Any) -> None:
    want = one_device(loss, RULES[name](), params(), batches())
    mesh = sf.make_mesh({"dp": world})
    step = sf.sharded_step(loss, RULES[name](), mesh=mesh, zero=sf.Zero.flat(persist_elements=0, **zero))
    state = step.init(params())
    for batch in batches():
        state, _ = step(state, batch[step.rows(12)])
    best, there = sf.eval_state(state), evaluated(name, want.opt_state, want.params)
    for k, x in best.params.items():
        assert x.placement == state.params[k].placement
        torch.testing.assert_close(x.full_tensor(), there[k], rtol=1e-5, atol=1e-6)
    rows = batches()[0]
    found = step.evaluate(best, [rows[step.rows(12)]])["loss"]
    assert found == pytest.approx(float(loss(there, rows)), rel=1e-5)
    # The state was read, not consumed.
    step(state, rows[step.rows(12)])


@pytest.mark.day("debiased")
@every
@distributed(world=2)
def test_the_average_is_evaluated(world: int, name: str) -> None:
    check(name, world, stage=1)


@pytest.mark.nightly
@every
@distributed(world=[1, 2, 3])
def test_sharded_averages_equal_those_of_one_device(world: int, name: str) -> None:
    want = one_device(loss, RULES[name](), params(), batches())
    for stage in range(4):
        zero = sf.Zero(stage=stage, persist_elements=0)
        for f in (loss, sf.jit(loss, backend="graph")):
            got = on_mesh(f, RULES[name](), params(), batches(), mesh=sf.make_mesh({"dp": world}), zero=zero)
            assert_same(got, want)
        check(name, world, stage=stage)
    check(name, world, stage=2, optimizer="host")


def exact(p: Any, x: Tensor) -> Tensor:
    """Its gradients are sixteenths of small integers, so that no order of summation rounds them."""
    return (x @ p["w"].T).sum(1).mean() + (p["b"] * x[:, :5]).sum(1).mean() + p["s"] * x[:, 0].mean()


def whole_numbers(num: int = 6) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(-8, 8, (16, 7), generator=draw).float() for _ in range(num)]


def averaged(debias: bool) -> list[Any]:
    """The average after each step, by plain torch."""
    d, out, p = 0.9, [], params()
    a = p
    for t, batch in enumerate(whole_numbers()):
        grads = torch.func.grad(exact)(p, batch)
        p = {k: x - 0.25 * grads[k] for k, x in p.items()}
        r = d * (1 - d**t) / (1 - d ** (t + 1)) if debias else d
        a = {k: r * x + (1 - r) * p[k] for k, x in a.items()}
        out.append(a)
    return out


@pytest.mark.day("1-1")
@pytest.mark.parametrize("stage", [pytest.param(k, marks=pytest.mark.nightly if k in (0, 2) else ()) for k in range(4)])
@distributed(world=[1, 2])
def test_the_average_has_the_bits_of_one_device(world: int, stage: int) -> None:
    zero = sf.Zero(stage=stage, persist_elements=0)
    for debias in (False, True):
        rule, want = optim.average_params(optim.sgd(0.25), 0.9, debias=debias), averaged(debias)
        for f in (exact, sf.jit(exact, backend="graph")):
            step = sf.sharded_step(f, rule, mesh=sf.make_mesh({"dp": world}), zero=zero)
            state = step.init(params())
            for batch, there in zip(whole_numbers(), want, strict=True):
                state, _ = step(state, batch[step.rows(16)])
                best = sf.eval_state(state).params
                assert all(torch.equal(x.full_tensor(), there[k]) for k, x in best.items())


def test_an_average_without_bias_begins_at_the_first_step() -> None:
    step = sf.sharded_step(exact, optim.average_params(optim.sgd(0.25), 0.999, debias=True))
    state, _ = step(step.init(params()), whole_numbers()[0])
    for k, x in sf.eval_state(state).params.items():
        assert torch.equal(x.full_tensor(), state.params[k].full_tensor())
    with pytest.raises(ValueError, match="expected a number as decay"):
        optim.average_params(optim.sgd(0.25), lambda t: t / (t + 1), debias=True)


@distributed(world=2)
def test_the_average_of_masters_is_restored_and_exported(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    module, mesh = nn.Linear(5, 3), sf.make_mesh({"dp": 2})
    weights, apply = sf.from_module(module)
    lossy = sf.mixed_precision(lambda p, x: apply(p, x).float().square().mean(), sf.Policy.bf16())
    step = sf.sharded_step(lossy, optim.average_params(optim.sgd(1e-4), 0.5), mesh=mesh, zero=3)
    state, x = step.init(weights), torch.ones(2, 5)
    for _ in range(2):
        state, _ = step(state, x)
    sf.checkpoint.save(tmp_path / "run", state)
    restored = sf.checkpoint.restore(tmp_path / "run", step.init(weights)).tree
    (state, _), (again, _) = step(state, x), step(restored, x)
    average = {k: x.full_tensor() for k, x in state.opt_state.inner.average.items()}
    for a, b in zip(tree_leaves(state.opt_state), tree_leaves(again.opt_state), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    best = sf.eval_state(state)
    assert best.params["weight"].dtype == torch.bfloat16 and average["weight"].dtype == torch.float32
    assert not torch.equal(average["weight"].bfloat16().float(), average["weight"])
    sf.to_module(best, module)
    assert torch.equal(module.weight.detach(), average["weight"])
    sf.export(best, module, tmp_path / "out")
    torch.distributed.barrier()
    read: dict[str, Any] = sf.interop.module_from_hf(nn.Linear(5, 3), tmp_path / "out")
    assert torch.equal(read["weight"].full(), average["weight"])


def test_an_optimizer_that_averages_nothing_is_refused() -> None:
    step = sf.sharded_step(loss, optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"optimizer that averages parameters, such as optim\.average_params"):
        sf.eval_state(step.init(params()))


def test_leaves_that_are_not_averaged_are_the_states_own() -> None:
    step = sf.sharded_step(loss, RULES["average"](), trainable={"w": True, "b": False, "s": True})
    state, _ = step(step.init(params()), batches()[0])
    best = sf.eval_state(state).params
    assert best["b"] is state.params["b"] and not torch.equal(best["w"].full_tensor(), state.params["w"].full_tensor())


def test_numbers_out_of_range_are_refused() -> None:
    for make, message in (
        (lambda: optim.average_params(optim.sgd(0.1), 1.0), "decay=1.0"),
        (lambda: optim.lookahead(optim.sgd(0.1), 0, 0.5), "sync_period=0"),
        (lambda: optim.schedule_free(optim.sgd(0.1), 0.1, b1=0.0), "b1=0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_sync_leaves_fast_and_slow_equal_to_the_bit() -> None:
    tx, w = optim.lookahead(optim.sgd(0.3), 1, 0.7), [torch.randn(100).bfloat16(), torch.randn(100)]
    w, state = optim.inplace(tx)([torch.randn(100).bfloat16(), torch.randn(100)], tx.init(w), w)
    assert all(map(torch.equal, w, state.slow))
