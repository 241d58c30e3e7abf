"""Covers the compressed optimizers where they are exact: the warm-up's bits, and steps through the identity compressor.

The references are the uncompressed rules in plain code, for all ranks at once. Rules and references round each
operation once, roots too, so that their bits are equal on every processor.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import axis_index, axis_size, bind_mesh, identity, local, pmean
from shardfn.core import tree_flatten, tree_leaves, tree_map, tree_unflatten
from shardfn.testing import distributed

STEPS, FREEZE, WD = 9, 3, 0.1
SCHEDULE = optim.warmup_cosine_decay_schedule(0.001, 0.02, 3, 30)
MASK = {"w": True, "blocks": True, "scale": False, "none": False, "empty": True, "one": True}
EXACT = {"w": False, "blocks": [False, True], "scale": True, "none": False, "empty": False, "one": False}
PARENTS: dict[str, Any] = {
    "onebit_adam": (optim.onebit_adam, optim.adamw, {"freeze_step": FREEZE}),
    "zero_one_adam": (optim.zero_one_adam, optim.adamw, {"var_freeze_step": 9, "var_update_scaler": FREEZE}),
    "onebit_lamb": (optim.onebit_lamb, optim.lamb, {"freeze_step": FREEZE}),
}


def make_params(dtype: torch.dtype = torch.float32) -> Any:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    return {
        "w": draw(5, 7), "blocks": [draw(3, 4, 2), draw(9)], "scale": draw(), "none": None,
        "empty": torch.zeros(0, 3, dtype=dtype), "one": draw(1),
    }  # fmt: skip


def make_grads(params: Any, step: int, rank: int) -> Any:
    g = torch.Generator().manual_seed(100 * step + rank)
    return tree_map(lambda p: torch.randn(p.shape, generator=g).to(p.dtype), params)


def step_by(tx: Any, in_place: bool, grads: Any, state: Any, params: Any) -> Any:
    if in_place:
        return optim.inplace(tx)(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optim.apply_updates(params, updates), state


def assert_equal(got: Any, want: Any) -> None:
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), (a, b)


@pytest.mark.day("True-onebit_adam")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(PARENTS)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_warm_up_has_the_bits_of_its_parent(name: str, in_place: bool) -> None:
    make, parent, options = PARENTS[name]
    for dtype in (torch.float32, torch.bfloat16):
        numbers: dict[str, Any] = {"weight_decay": WD, "mask": MASK}
        tx, plain = make(SCHEDULE, **numbers, **options), parent(SCHEDULE, **numbers)
        params, other = make_params(dtype), make_params(dtype)
        state, known = tx.init(params), plain.init(other)
        for t in range(FREEZE):
            assert tx.needs.phases.next(state) == optim.Phase("warmup", False)
            params, state = step_by(tx, in_place, make_grads(params, t, 0), state, params)
            other, known = step_by(plain, in_place, make_grads(other, t, 0), known, other)
        assert_equal((params, state[1] if name == "onebit_lamb" else state.adam), (other, known))
        assert tx.needs.phases.next(state).name != "warmup"
        params, state = step_by(tx, in_place, make_grads(params, FREEZE, 0), state, params)
        assert all(x.isfinite().all() for x in tree_leaves(params))


# ---- the uncompressed rules, for all ranks at once ----


def average(ranks: list[Tensor]) -> Tensor:
    total = ranks[0]
    for x in ranks[1:]:
        total = total + x
    return total / len(ranks)


def root(x: Tensor) -> Tensor:
    """The nearest float32; which torch's own root is not, on some processors."""
    return x.double().sqrt().float()


def corrections(t: int, frozen: int) -> tuple[Tensor, Tensor]:
    t64, f64 = torch.tensor(t).double(), torch.tensor(frozen).double()
    return (1 - torch.pow(0.9, t64)).float(), (1 - torch.pow(0.999, f64)).float()


def frozen_adam(p: Tensor, mu: Tensor, nu: Tensor, ranks: list[Tensor], t: int, wd: float) -> tuple[Tensor, Tensor]:
    c1, c2 = corrections(t, FREEZE)
    mu = average([0.9 * mu + (1 - 0.9) * g for g in ranks])
    return p + ((mu / c1) / (root(nu / c2) + 1e-8) + wd * p) * -SCHEDULE(torch.tensor(t - 1)), mu


class Reference:
    """Warm-up by the parent; afterwards, leaf by leaf: exact leaves by the parent, the others by `after`."""

    def __init__(self, parent: Any, in_place: bool, after: Callable[..., Any]) -> None:
        self.plain, self.in_place, self.after = parent(SCHEDULE, weight_decay=WD, mask=MASK), in_place, after
        self.params = make_params()
        self.state = self.plain.init(self.params)

    def step(self, t: int, world: int) -> None:
        ranks = [make_grads(self.params, t, rank) for rank in range(world)]
        mean = pmean(ranks[axis_index("dp")], "dp")  # of three numbers, in gloo's order
        old = tree_map(torch.clone, (self.params, self.state[0].mu, self.state[0].nu))
        self.params, self.state = step_by(self.plain, self.in_place, mean, self.state, self.params)
        if t <= FREEZE:
            return
        treedef = tree_flatten(self.params)[1]
        exact = [False, True, False, False, True, False]  # blocks[0], blocks[1], empty, one, scale, w
        decays = [True, True, True, True, False, True]
        new = []
        table = zip(*map(tree_leaves, (self.params, self.state[0].mu, self.state[0].nu)), exact, decays, strict=True)
        for i, (p, mu, nu, on, decay) in enumerate(table):
            if not on:
                p, mu, nu = (tree_leaves(x)[i] for x in old)
                p, mu = self.after(p, mu, nu, [tree_leaves(r)[i] for r in ranks], t, WD if decay else 0.0)
            new.append((p, mu, nu))
        self.params, mu, nu = (tree_unflatten(treedef, [row[j] for row in new]) for j in range(3))
        self.state = (self.state[0]._replace(mu=mu, nu=nu), *self.state[1:])


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_through_the_identity_compressor_the_rules_are_exact(world: int) -> None:
    with bind_mesh(sf.make_mesh({"dp": world})) as mesh:
        rank = mesh.axis_index("dp")
        for in_place in (False, True):
            tx: Any = optim.onebit_adam(
                SCHEDULE, weight_decay=WD, mask=MASK, freeze_step=FREEZE, exact=EXACT, compressor=identity()
            )
            want = Reference(optim.adamw, in_place, frozen_adam)
            params = make_params()
            state = tx.init(params)
            for t in range(1, STEPS + 1):
                phase = tx.needs.phases.next(local(state))
                ranks = [make_grads(params, t, r) for r in range(world)]
                grads = ranks[rank] if phase.local else pmean(ranks[rank], "dp")
                params, state = step_by(tx, in_place, grads, state, params)
                want.step(t, world)
                assert_equal((params, state.adam[0].mu), (want.params, want.state[0].mu))
            assert int(state.freeze.frozen) == FREEZE and int(state.adam[-1].count) == STEPS


@pytest.mark.nightly
@distributed(world=2)
def test_zero_one_adam_through_the_identity_compressor_is_exact() -> None:
    with bind_mesh(sf.make_mesh({"dp": 2})) as mesh:
        rank = mesh.axis_index("dp")
        tx: Any = optim.zero_one_adam(
            SCHEDULE, weight_decay=WD, var_freeze_step=4, var_update_scaler=2, local_step_scaler=2,
            local_step_clipper=4, compressor=identity(),
        )  # fmt: skip
        p = torch.randn(6, generator=torch.Generator().manual_seed(0))
        params, state, names = [p.clone()], tx.init([p]), []
        plain = optim.adamw(SCHEDULE, weight_decay=WD)
        known, num_var = plain.init([p]), 2
        mu, nu, start, rates, decays = p, p, p, torch.zeros(()), torch.zeros(())
        mus, drifts = [p, p], [p, p]
        for t in range(1, 15):
            ranks = [make_grads([p], t, r)[0] for r in range(2)]
            phase = tx.needs.phases.next(local(state))
            names.append(phase.name)
            grads = ranks[rank] if phase.local else average(ranks)
            params, state = step_by(tx, True, [grads], state, params)
            lr, c1 = SCHEDULE(torch.tensor(t - 1)), corrections(t, 1)[0]
            if phase.name == "warmup":
                [p], known = step_by(plain, True, [average(ranks)], known, [p])
                mu, nu = known[0].mu[0].clone(), known[0].nu[0].clone()
            elif phase.name in ("full", "onebit"):
                mu = 0.9 * mu + (1 - 0.9) * average(ranks)
                if phase.name == "full":
                    nu, num_var = 0.999 * nu + (1 - 0.999) * average(ranks).square(), num_var + 1
                p = p + ((mu / c1) / (root(nu / corrections(1, num_var)[1]) + 1e-8) + WD * p) * -lr
            else:
                if phase.name == "switch":
                    start, mus, drifts = p, [mu, mu], [torch.zeros(6)] * 2
                mus = [0.9 * m + (1 - 0.9) * g for m, g in zip(mus, ranks, strict=True)]
                rate, scale = lr / c1, root(nu / corrections(1, num_var)[1]) + 1e-8
                rates, decays = rates + rate, decays + lr
                drifts = [s + rate * m for s, m in zip(drifts, mus, strict=True)]
                p = p - rate * mus[rank] / scale
                if phase.name != "local":
                    total = average(drifts)
                    start = p = start * (1 - WD * decays) - total / scale
                    mus, drifts = [total / rates] * 2, [torch.zeros(6)] * 2
                    rates, decays = torch.zeros(()), torch.zeros(())
            assert_equal(params, [p])
            # Whole parameters on all ranks alike after a round, and each its own in between.
            assert torch.equal(pmean(params[0], "dp"), params[0]) == optim.is_in_round(state) == (phase.name != "local")
        early = ["warmup", "warmup", "onebit", "full", "onebit", "switch", "round", "round", "local"]
        assert names == [*early, "local", "local", "round", "local", "local"]


@pytest.mark.nightly
@distributed(world=2)
def test_onebit_lamb_through_the_identity_compressor_is_exact() -> None:
    with bind_mesh(sf.make_mesh({"dp": 2})) as mesh:
        rank = mesh.axis_index("dp")
        tx: Any = optim.onebit_lamb(SCHEDULE, weight_decay=WD, freeze_step=FREEZE, compressor=identity())
        ps = [make_params()["w"], torch.randn(4, generator=torch.Generator().manual_seed(1))]
        params, state = tree_map(torch.clone, ps), tx.init(ps)
        plain = optim.lamb(SCHEDULE, weight_decay=WD)
        known = plain.init(ps)
        last = scaling = coeff = torch.ones(2)
        mus, nus, freshs, phase = ps, ps, ps, tx.needs.phases.next(local(state))
        for t in range(1, STEPS + 1):
            ranks = [make_grads(ps, t, r) for r in range(2)]
            mean = tree_map(lambda *gs: average(list(gs)), *ranks)
            phase = tx.needs.phases.next(local(state))
            params, state = step_by(tx, True, ranks[rank] if phase.local else mean, state, params)
            if t <= FREEZE:
                ps, known = step_by(plain, True, mean, known, ps)
                mus, nus = (tree_map(torch.clone, x) for x in (known[0].mu, known[0].nu))
                freshs, coeff = tree_map(torch.clone, nus), state.coeff / state.weight
                continue
            if t == FREEZE + 1:
                rms = (optim.sum_squares(mus) / torch.tensor([35.0, 4.0])).sqrt()
                scaling = rms.mean() / rms
            news = [
                average([(0.9 * m + (1 - 0.9) * r[i]) * scaling[i] for r in ranks]) / scaling[i]
                for i, m in enumerate(mus)
            ]
            freshs = [
                0.999 * f + (1 - 0.999) * ((n - 0.9 * m) / (1 - 0.9)).square()
                for f, n, m in zip(freshs, news, mus, strict=True)
            ]
            mus, ds = news, [root(nu) + 1e-8 for nu in nus]
            f = torch.stack([(d / (root(x) + 1e-8)).amax() for d, x in zip(ds, freshs, strict=True)])
            ws = [m / d for m, d in zip(mus, ds, strict=True)]
            us = [w + WD * p for w, p in zip(ws, ps, strict=True)]
            r = (optim.sum_squares(ws).sqrt() / optim.sum_squares(us).sqrt()).clamp(max=1.0)
            f = last = (f * r + (1 - r)).clamp(0.5, 4.0).clamp(last * 0.9, last * 1.1)
            c1, c2 = 1 - 0.9 ** torch.tensor(t).double(), 1 - 0.999 ** torch.tensor(FREEZE).double()
            rate = SCHEDULE(torch.tensor(t - 1)) * (c2.sqrt() / c1).float()
            ps = [p + u * -c for p, u, c in zip(ps, us, rate * coeff * f, strict=True)]
            assert_equal((params, state.lamb[0].mu, state.factor), (ps, mus, last))
        assert phase.name == "compressed" and axis_size("dp") == 2
