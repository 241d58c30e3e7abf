"""Covers apply_if_finite, adafactor and constraints: sharded, captured, in pieces, and their refusals."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.core import tree_leaves, tree_map
from shardfn.testing import assert_same, distributed, on_mesh, one_device


def params() -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 6), "v": (7, 5), "stack": (3, 5, 5), "b": (6,), "s": ()}
    return {k: torch.randn(s, generator=draw).abs() for k, s in shapes.items()}


def loss(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p["v"])
    for w in p["stack"].unbind(0):
        h = torch.tanh(h @ w)
    return (h @ p["w"] + p["b"] - p["s"]).square().mean()


def batches(*broken: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    out = [torch.randn(12, 7, generator=draw) for _ in range(4)]
    for k in broken:
        out[k][11, 2] = math.nan
    return out


SMALL: Any = {"min_dim_size_to_factor": 3}
CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1))
SOME = {"w": True, "v": False, "stack": False, "b": True, "s": False}
# A rule, and the batches that are not finite.
RULES: dict[str, Any] = {
    "finite": (lambda: optim.apply_if_finite(optim.adamw(0.1), 2), (1, 2)),
    "finite clip": (lambda: optim.apply_if_finite(CLIPPED, 2), (1,)),
    "adafactor": (lambda: optim.adafactor(0.05, **SMALL), ()),
    "adafactor all": (lambda: optim.adafactor(0.05, momentum=0.9, weight_decay_rate=0.01, **SMALL), ()),
    "nonnegative": (lambda: optim.chain(optim.adamw(0.3), optim.keep_params_nonnegative()), ()),
    "clamped": (lambda: optim.chain(optim.sgd(1.0), optim.masked(optim.clamp_params(-0.2, 0.2), SOME)), ()),
    "ball": (lambda: optim.chain(optim.sgd(1.0), optim.project_params(lambda x: x / x.norm().clamp(min=1.0))), ()),
}


def check(name: str, mesh: Any, f: Any = loss, **zero: Any) -> None:
    make, broken = RULES[name]
    got = on_mesh(f, make(), params(), batches(*broken), mesh=mesh, zero=sf.Zero.flat(persist_elements=0, **zero))
    want = one_device(loss, make(), params(), batches(*broken))
    if broken:  # the metrics of broken steps are NaN
        got, want = got._replace(metrics=[]), want._replace(metrics=[])
    assert_same(got, want)
    assert all(x.isfinite().all() for x in tree_leaves(got.params))


@pytest.mark.parametrize(
    "name",
    [
        "finite",
        pytest.param("adafactor all", marks=pytest.mark.nightly),
        pytest.param("ball", marks=pytest.mark.nightly),
    ],
)
@distributed(world=2)
def test_sharded_equals_one_device(name: str) -> None:
    check(name, sf.make_mesh({"dp": 2}), stage=3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RULES)
@distributed(world=[1, 2, 3])
def test_sharded_equals_one_device_at_every_stage(world: int, name: str) -> None:
    mesh = sf.make_mesh({"dp": world})
    for stage in range(4):
        check(name, mesh, stage=stage)
    check(name, mesh, sf.jit(loss, backend="graph"), stage=3)
    if "adafactor" not in name and name != "ball":
        check(name, mesh, stage=2, optimizer="host")


@pytest.mark.nightly
@distributed(world=2)
def test_factored_moments_of_leaves_cut_by_tensor_parallelism() -> None:
    mesh = sf.make_mesh({"tp": 2})
    specs = {"w": P("tp"), "v": P(None, "tp"), "stack": P(None, "tp"), "b": P(), "s": P()}
    dims = {"w": 0, "v": 1, "stack": 1}

    def cut(p: Any, x: Tensor) -> Tensor:
        whole = {k: sf.all_gather_invariant(p[k], "tp", dim=d, size=5) for k, d in dims.items()}
        return loss({**p, **whole}, x)

    make, _ = RULES["adafactor all"]
    got = on_mesh(cut, make(), params(), batches(), mesh=mesh, specs=specs)
    assert_same(got, one_device(loss, make(), params(), batches()))


def test_vectors_are_kept_whole_and_matrices_are_not() -> None:
    step = sf.sharded_step(loss, optim.adafactor(0.1, **SMALL))
    state = step.init(params()).opt_state[0]
    # The matrices have 140 elements.
    assert state.v["w"] is None and state.v_row["b"] is None
    assert state.v_row["v"].shape == (5,) and state.v_col["v"].shape == (7,)
    assert sum(x.numel() for x in tree_leaves((state.v_row, state.v_col))) == 53


def test_errors_in_a_row_are_counted_and_then_let_through() -> None:
    for apply in (False, True):
        tx, w = optim.apply_if_finite(optim.sgd(1.0, momentum=0.5), 2), [torch.ones(2)]
        state, bad, good = tx.init(w), torch.tensor([math.inf, 0.0]), torch.ones(2)
        for k, grad in enumerate([bad, bad, good, bad, bad, bad]):
            if apply:
                w, state = optim.inplace(tx)([grad.clone()], state, w)
            else:
                us, state = tx.update([grad], state, w)
                w = optim.apply_updates(w, us)
            counts = (int(state.notfinite_count), bool(state.last_finite), int(state.total_notfinite))
            assert (
                counts == [(1, False, 1), (2, False, 2), (0, True, 2), (1, False, 3), (2, False, 4), (3, False, 5)][k]
            )
            assert bool(w[0].isfinite().all()) == (k < 5)


def test_finite_in_pieces_equals_the_whole() -> None:
    tx = optim.apply_if_finite(optim.adamw(0.1), 3)
    assert tx.needs.granularity == "element"
    for bad in (False, True):
        whole, part = [torch.ones(4, 3)], [torch.ones(4, 3)]
        grads = [torch.full((4, 3), 0.5)]
        if bad:
            grads[0][3, 0] = math.nan
        want, after = optim.inplace(tx)(tree_map(torch.clone, grads), tx.init(whole), whole)
        pieces, state = optim.in_pieces(tx, part), tx.init(part)
        token = pieces.begin(state, [pieces.measure(grads[0])])  # pyright: ignore[reportOptionalCall]
        for cut in (slice(0, 2), slice(2, 4)):
            own = tree_map(lambda x, cut=cut: x[cut] if x.ndim else x, state)
            pieces.apply(token, [grads[0][cut].clone()], own, [part[0][cut]])
        state = pieces.end(token, state)
        for a, b in zip(tree_leaves((part, state)), tree_leaves((want, after)), strict=True):
            assert torch.equal(a, b)


def test_projections_and_bounds() -> None:
    w = [torch.tensor([0.5, -0.5]).bfloat16()]
    for tx in (optim.chain(optim.sgd(1.0), optim.clamp_params(upper=0.25)), optim.keep_params_nonnegative()):
        us, state = tx.update([torch.tensor([0.1, -3.0])], tx.init(w), w)
        pure = optim.apply_updates(w, us)[0]
        inplace = optim.inplace(tx)([torch.tensor([0.1, -3.0])], state, tree_map(torch.clone, w))[0][0]
        assert torch.equal(pure, inplace)
    with pytest.raises(ValueError, match=r"lower=2.0 and upper=1.0 are not the bounds"):
        optim.clamp_params(2.0, 1.0)
    with pytest.raises(ValueError, match=r"\[0\] has shape \(1,\), but its parameter has \(2,\)"):
        tx = optim.project_params(lambda x: x[:1])
        tx.update(w, tx.init(w), w)
    with pytest.raises(ValueError, match="max_consecutive_errors=-1"):
        optim.apply_if_finite(optim.sgd(0.1), -1)
