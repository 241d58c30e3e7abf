"""Covers the compressed optimizers on one rank: freezes, leaves that are held still, errors owed, and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import optim
from shardfn.collectives import identity, local, sign
from shardfn.core import tree_leaves, tree_map, tree_structure
from shardfn.optim._chain import _looks_at_params

MAKE: dict[str, Any] = {
    "onebit_adam": lambda **k: optim.onebit_adam(1e-2, freeze_step=k.pop("freeze", 2), **k),
    "apmsqueeze": lambda **k: optim.apmsqueeze(1e-2, freeze_step=2, compressor=sign(), **k),
    "onebit_lamb": lambda **k: optim.onebit_lamb(1e-2, freeze_step=k.pop("freeze", 2), **k),
    "zero_one_adam": lambda **k: optim.zero_one_adam(
        1e-2, var_freeze_step=k.pop("freeze", 2), var_update_scaler=1, local_step_scaler=2, **k
    ),
}
every = pytest.mark.parametrize("name", MAKE)


def draw(step: int, dtype: torch.dtype = torch.float32) -> Any:
    g = torch.Generator().manual_seed(step)
    return {"w": torch.randn(11, generator=g).to(dtype), "b": [torch.randn((), generator=g).to(dtype), None]}


def walk(tx: Any, steps: int, dtype: torch.dtype = torch.float32) -> Any:
    params = draw(0, dtype)
    state, names = tx.init(params), []
    for t in range(1, steps + 1):
        names.append(tx.needs.phases.next(state).name)
        params, state = tx.apply(draw(t, dtype), state, params)
    return params, state, names


@pytest.mark.day("zero_one_adam")
@every
def test_update_is_pure_and_equals_apply(name: str) -> None:
    for dtype, tol in ((torch.float32, 2e-7), (torch.bfloat16, 2e-2)):
        tx: Any = MAKE[name](weight_decay=0.1) if name != "apmsqueeze" else MAKE[name]()
        params = draw(0, dtype)
        state = tx.init(params)
        structure, shapes = tree_structure(state), [x.shape for x in tree_leaves(state)]
        for t in range(1, 9):
            before = tree_map(torch.clone, (params, local(state)))
            updates, after = tx.update(draw(t, dtype), state, params)
            assert all(map(torch.equal, tree_leaves((params, local(state))), tree_leaves(before)))
            new = optim.apply_updates(params, updates)
            params, state = tx.apply(draw(t, dtype), *tree_map(torch.clone, (local(state), params)))
            for a, b in zip(tree_leaves((params, state)), tree_leaves((new, local(after))), strict=True):
                torch.testing.assert_close(a, b, rtol=tol, atol=tol)
            assert tree_structure(state) == structure
            assert [x.shape for x in tree_leaves(state)] == shapes
        residuals = [x for x in tree_leaves(state.residual)]
        assert residuals and all(x.dtype == torch.float32 for x in residuals)


def test_nothing_is_lost() -> None:
    tx: Any = optim.onebit_adam(1e-2, b1=0.5, freeze_step=1)
    params = {"w": torch.randn(1000)}
    state = tx.init(params)
    for t in range(1, 6):
        grads = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(t))}
        old = tree_map(torch.clone, local(state))
        params, state = tx.apply(grads, state, params)
        if t > 1:
            owed = [(s.residual["w"].worker[0] + s.residual["w"].server)[:1000] for s in (old, state)]
            given = 0.5 * old.adam[0].mu["w"] + 0.5 * grads["w"] + owed[0]
            torch.testing.assert_close(state.adam[0].mu["w"] + owed[1], given, rtol=0, atol=1e-6)


@every
def test_elements_without_variance_do_not_move(name: str) -> None:
    tx: Any = MAKE[name]()
    params = {"w": torch.ones(8)}
    state = tx.init(params)
    for t in range(1, 9):
        grads = {"w": torch.randn(8, generator=torch.Generator().manual_seed(t)) * (torch.arange(8) > 2)}
        params, state = tx.apply(grads, state, params)
    assert torch.equal(params["w"][:3], torch.ones(3))
    moved = (params["w"][3:] - 1).abs()
    assert ((moved > 0) & (moved < 0.3)).all()


@pytest.mark.parametrize(
    "name",
    [
        "onebit_adam",
        pytest.param("onebit_lamb", marks=pytest.mark.nightly),
        pytest.param("zero_one_adam", marks=pytest.mark.nightly),
    ],
)
def test_it_freezes_when_the_variance_is_stable(name: str) -> None:
    # Two steps between norms. The gradients fall at first, and are even later on.
    sizes = [64.0, 32.0, 16.0, 8.0, 4.0, 2.0] + [1.0] * 20
    options = {"var_update_scaler": 100} if name == "zero_one_adam" else {}
    make = {"zero_one_adam": lambda **k: optim.zero_one_adam(0.1, b2=0.5, var_freeze_step="auto", **k)}.get(
        name, lambda **k: getattr(optim, name)(0.1, b2=0.5, freeze_step="auto", **k)
    )
    tx: Any = make(**options)
    params = {"w": torch.ones(4)}
    state, norms, names = tx.init(params), [], []
    for size in sizes:
        names.append(tx.needs.phases.next(state).name)
        params, state = tx.apply({"w": torch.full((4,), size)}, state, params)
        norms.append(float(state.freeze.norm))
    frozen = int(state.freeze.frozen)
    assert frozen % 2 == 0 and 6 < frozen < 26
    assert norms[frozen - 1] / norms[frozen - 3] >= 0.96 > norms[frozen - 3] / norms[frozen - 5]
    assert [i for i, n in enumerate(names) if "probe" in n] == list(range(1, frozen, 2))
    assert names[frozen] == ("compressed" if name == "onebit_adam" else "switch")


def test_the_norm_of_a_variance_that_learns_ever_rarer_is_corrected_by_its_own_updates() -> None:
    tx: Any = optim.zero_one_adam(0.0, b2=0.9, var_freeze_step="auto", var_update_scaler=2)
    params = [torch.ones(4)]
    state, norms = tx.init(params), set()
    while not int(state.freeze.frozen):
        params, state = tx.apply([torch.ones(4)], state, params)
        norms.add(round(float(state.freeze.norm), 4))
    assert norms == {0.0, 4.0} and int(state.freeze.frozen) == 20 and int(state.num_var) == 7


def test_more_steps_may_be_asked_for() -> None:
    params, state, _ = walk(MAKE["onebit_lamb"](freeze=2), 4)
    more: Any = MAKE["onebit_lamb"](freeze=6)
    assert more.needs.phases.next(state).name == "warmup"
    params, state = more.apply(draw(5), state, params)
    assert (int(state.freeze.frozen), int(state.freeze.begun), float(state.factor.sum())) == (0, 0, 2.0)
    less: Any = MAKE["onebit_lamb"](freeze=3)
    assert less.needs.phases.next(state).name == "switch" and state.residual[0].worker.any()
    anew = state._replace(residual=tree_map(torch.zeros_like, state.residual))
    (_, anew), (_, state) = (less.apply(draw(6), *tree_map(torch.clone, (x, params))) for x in (anew, state))
    assert int(state.freeze.frozen) == 5
    # Errors of momenta that were scaled otherwise are of no use.
    assert all(map(torch.equal, tree_leaves(state), tree_leaves(anew)))


def test_feedback_can_be_left_out_and_leaves_be_exact() -> None:
    _, state, _ = walk(MAKE["onebit_adam"](feedback=False), 4)
    assert not tree_leaves(state.residual)
    for name in ("onebit_adam", "zero_one_adam", "onebit_lamb"):
        plain: Any = optim.lamb(1e-2) if name == "onebit_lamb" else optim.adamw(1e-2, weight_decay=0.0)
        params = draw(0)
        known = plain.init(params)
        for t in range(1, 6):
            params, known = plain.apply(draw(t), known, params)
        got, state, _ = walk(MAKE[name](exact=lambda params: tree_map(lambda p: True, params)), 5)
        assert all(map(torch.equal, tree_leaves(got), tree_leaves(params)))
        assert not tree_leaves(state.residual)


def test_leaves_without_elements_and_trees_without_leaves() -> None:
    for name, make in MAKE.items():
        for params in ({"a": torch.zeros(0, 3), "b": torch.ones(())}, {}, {"a": None}):
            tx: Any = make()
            state = tx.init(params)
            for _ in range(4):
                params, state = tx.apply(tree_map(torch.ones_like, params), state, params)
            assert int(state.freeze.count) == 4, name


def test_masters_and_chains_pass_phases_on() -> None:
    tx: Any = optim.master_weights(optim.chain(optim.clip(1.0), MAKE["zero_one_adam"]()))
    params, state, names = walk(tx, 8, torch.bfloat16)
    assert (tx.needs.phases.axes, names[:2]) == (("dp",), ["warmup", "full"]) and {"round", "switch"} <= set(names)
    for p, m in zip(tree_leaves(params), tree_leaves(state.master), strict=True):
        assert torch.equal(p, m.bfloat16())


def test_senseless_arguments_are_refused() -> None:
    for step in (0, -1, True):
        with pytest.raises(ValueError, match=r"onebit_adam: freeze_step=.* must be an int >= 1"):
            optim.onebit_adam(0.1, freeze_step=step)
    with pytest.raises(ValueError, match="ratio in"):
        optim.onebit_adam(0.1, freeze_step=optim.VarianceStability(ratio=1.5))
    with pytest.raises(ValueError, match=r"b1=1\.0"):
        optim.zero_one_adam(0.1, b1=1.0, var_freeze_step=1)
    with pytest.raises(ValueError, match=r"factor_max=0\.1 is less than factor_min=0\.5"):
        optim.onebit_lamb(0.1, freeze_step=1, factor_max=0.1)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx: Any = optim.onebit_adam(0.1, freeze_step=1)
        tx.update([torch.ones(1)], tx.init([torch.ones(1)]))
    with pytest.raises(ValueError, match="norm of the gradient"):
        optim.chain(optim.clip_by_global_norm(1.0), optim.onebit_lamb(0.1, freeze_step=1))
    with pytest.raises(ValueError, match=r"rules \[0\] of a chain remember gradients, but rule 1"):
        optim.chain(optim.trace(0.9), optim.onebit_adam(0.1, freeze_step=1)).init([torch.ones(1)])
    for wrapped in (lambda tx: tx, optim.master_weights, optim.chain):
        with pytest.raises(ValueError, match=r"no other rule may change the steps. Put rules \[1\] before it"):
            optim.chain(wrapped(MAKE["zero_one_adam"]()), optim.clip(1.0))
    _, state, _ = walk(MAKE["zero_one_adam"](), 9)
    assert not optim.is_in_round(state)
    with pytest.raises(ValueError, match="the middle of a round"):
        optim.rebalance_residuals(state, state)
    with pytest.raises(ValueError, match=r"other shapes(.|\n)*mu\['w'\]: \(11,\) is not \(12,\)"):
        old = MAKE["onebit_adam"](compressor=identity()).init({"w": torch.ones(11)})
        new = MAKE["onebit_adam"](compressor=identity()).init({"w": torch.ones(12)})
        optim.rebalance_residuals(old, new)


@pytest.mark.parametrize("name", ["onebit_adam", "apmsqueeze"])
def test_updates_have_a_derivative_in_the_learning_rate(name: str) -> None:
    params, steps = {"w": torch.tensor([0.3, -0.5, 0.7])}, 3

    def after(lr: Any) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        tx = getattr(optim, name)(lr, freeze_step=1, compressor=identity())
        p, state = params, tx.init(params)
        for _ in range(steps):
            u, state = tx.update({"w": torch.randn(3, generator=draw)}, state, p)
            p = {"w": p["w"] + u["w"]}
        return p["w"].sum()

    lr = torch.tensor(0.1, requires_grad=True)
    value = after(lr)
    (slope,) = torch.autograd.grad(value, lr)
    assert torch.equal(value, after(0.1))  # the kernel and its replacement have the same bits
    torch.testing.assert_close(slope, (after(0.11) - after(0.09)) / 0.02, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["zero_one_adam", "onebit_lamb"])
def test_updates_without_a_derivative_raise(name: str) -> None:
    tx = MAKE[name]()
    params, state, _ = walk(tx, 9)
    grads = tree_map(lambda x: x.requires_grad_(), draw(10))
    with pytest.raises(NotImplementedError, match=f"{name}: the update has no derivative"):
        tx.update(grads, state, params)


def test_which_rules_look_at_parameters() -> None:
    def skips_nan(updates: Any, params: Any, specs: Any) -> Any:
        del params, specs
        if not all(x.isfinite().all() for x in tree_leaves(updates)):
            raise ValueError("not finite")
        return updates

    def decays_if_it_can(updates: Any, params: Any, specs: Any) -> Any:
        del specs
        return updates if params is None else tree_map(lambda u, p: u + 0.1 * p, updates, params)

    tree = {"w": torch.empty(3, 2, device="meta")}
    looking = [optim.add_decayed_weights(0.1), optim.stateless(decays_if_it_can), optim.scale_by_trust_ratio()]
    for tx in (optim.clip(1.0), optim.stateless(skips_nan)):
        assert not _looks_at_params(tx, tree)
    assert all(_looks_at_params(tx, tree) for tx in looking)
