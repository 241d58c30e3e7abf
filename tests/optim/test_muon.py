"""Covers Muon: its iterations, which leaves are matrices, and that sharded matrices are computed whole."""

import math
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.collectives import bind_mesh
from shardfn.core import tree_map
from shardfn.optim import MatrixDims, NewtonSchulz
from shardfn.testing import assert_parity, assert_same, distributed, on_mesh, one_device


def params(dtype: torch.dtype = torch.float64) -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes = {"embed": (11, 5), "up": (7, 5), "down": (5, 7), "stack": (3, 5, 5), "conv": (5, 1, 1, 5), "head": (11, 5)}
    return {k: torch.randn(s, generator=draw, dtype=dtype) / 3 for k, s in shapes.items()} | {
        "bias": torch.zeros(7, dtype=dtype)
    }


def loss(p: Any, ids: Tensor) -> Tensor:
    x = p["embed"][ids]
    for k in range(3):
        x = x + torch.tanh(x @ p["stack"][k].T)
    x = x + torch.tanh(x @ p["up"].T + p["bias"]) @ p["down"].T
    x = x @ p["conv"].flatten(1).T
    return torch.nn.functional.cross_entropy(x @ p["head"].T, (ids * 3) % 11)


def batches(num: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(11, (12,), generator=draw) for _ in range(num)]


def test_singular_values_follow_the_scalar_map() -> None:
    # The five iterations of numbers, in float64.
    for x, want in ((0.7, 1.12032), (0.5, 0.76544), (0.3, 1.07959), (0.1, 0.71212), (0.03, 1.12233), (0.01, 0.69892)):
        singular = torch.tensor([x, math.sqrt(1 - x * x)], dtype=torch.float64)
        u, v = (torch.linalg.qr(torch.randn(n, 2, dtype=torch.float64))[0] for n in (6, 3))
        out = NewtonSchulz(eps=0.0)((u * singular) @ v.T)
        got = torch.linalg.svdvals(out)
        assert min(abs(got[:2] - want)) < 1e-5


def test_a_zero_matrix_stays_zero_and_small_ones_are_not_lost() -> None:
    assert not NewtonSchulz()(torch.zeros(3, 4)).any()
    tiny = torch.randn(3, 4) * 1e-9
    for dtype in (torch.float16, torch.bfloat16):
        got = NewtonSchulz(eps=0.0, dtype=dtype)(tiny).float()
        assert 0.6 < torch.linalg.svdvals(got).min() and torch.linalg.svdvals(got).max() < 1.3


def test_hidden_matrices_of_names() -> None:
    names = {
        "model.embed_tokens.weight": False, "wte": False, "lm_head.weight": False, "head": False,
        "blocks_norm_w": False, "layers.0.input_layernorm.weight": False, "bq": False, "b_up": True, "wq": True,
        "attn.multi_head_attention.in_proj_weight": True, "mlp.gate_proj.weight": True,
    }  # fmt: skip
    found = optim.hidden_matrices({k: torch.zeros(4, 4) for k in names})
    assert {k: x is not False for k, x in found.items()} == names
    assert optim.hidden_matrices([torch.zeros(3), torch.zeros(2, 3, 4, 5)]) == [False, MatrixDims((0,), (1, 2, 3))]


def test_without_bias_correction_it_takes_torchs_steps() -> None:
    draw = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(6, 4, generator=draw))
    mine = [w.detach().clone()]
    theirs = torch.optim.Muon([w], lr=0.05, weight_decay=0.1, momentum=0.95)
    how = {"bias_correction": False, "newton_schulz": NewtonSchulz(eps=1e-7, dtype=torch.bfloat16)}
    tx = optim.muon(0.05, matrices=[True], weight_decay=0.1, **how)
    state = tx.init(mine)
    for _ in range(5):
        w.grad = torch.randn(6, 4, generator=draw)
        mine, state = optim.inplace(tx)([w.grad.clone()], state, mine)
        theirs.step()
    torch.testing.assert_close(mine[0], w.detach(), rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize(("nesterov", "rms"), [(True, None), (True, 0.2), (False, None)])
def test_only_bias_correction_separates_its_steps_from_torchs(
    nesterov: bool, rms: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch rounds its iterations to bfloat16, which hides the difference; all else is torch's own.
    exact = NewtonSchulz(eps=1e-7)
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda m, *how: exact(m))
    draw = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(6, 4, generator=draw, dtype=torch.float64))
    how = {"nesterov": nesterov, "adjust_lr_fn": None if rms is None else "match_rms_adamw"}
    theirs = torch.optim.Muon([w], lr=0.05, weight_decay=0.1, momentum=0.95, **how)
    same = {"matrices": [True], "weight_decay": 0.1, "nesterov": nesterov}
    same |= {"consistent_rms": rms, "newton_schulz": exact}
    rules = [optim.muon(0.05, bias_correction=corrected, **same) for corrected in (False, True)]
    found = [([w.detach().clone()], rule.init([w.detach()])) for rule in rules]
    for _ in range(5):
        w.grad = torch.randn(6, 4, generator=draw, dtype=torch.float64)
        found = [optim.inplace(rule)([w.grad.clone()], s, p) for rule, (p, s) in zip(rules, found, strict=True)]
        theirs.step()
    far = [float((params[0] - w.detach()).abs().max()) for params, _ in found]
    # Without Nesterov the correction is a factor of the whole momentum, which its normalisation removes.
    assert far[0] < 1e-12 and (far[1] > 1e-4 if nesterov else far[1] < 1e-6), far


def test_leaves_that_are_no_matrices_are_refused() -> None:
    tx = optim.muon(0.1, matrices={"b": True})
    with pytest.raises(ValueError, match=r"\['b'\] of shape \(3,\) is not made of matrices by MatrixDims.*False"):
        tx.init({"b": torch.zeros(3)})
    with pytest.raises(ValueError, match="params"):
        optim.muon(0.1, matrices={"b": True}).init({"w": torch.zeros(3, 3)})
    bad: Any
    for bad in ({"beta": 1.0}, {"consistent_rms": 0.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            optim.muon(0.1, **bad)
    with pytest.raises(ValueError, match="steps=0"):
        NewtonSchulz(steps=0)


def rule(others: Any = None) -> optim.GradientTransformation:
    return optim.chain(optim.clip_by_global_norm(0.5), optim.muon(0.05, others or optim.adamw(0.01), weight_decay=0.1))


@pytest.mark.nightly
@distributed(world=2)
def test_sharded_equals_one_device() -> None:
    mesh = sf.make_mesh({"dp": 2})
    for stage in (0, 3):
        assert_parity(loss, rule(), params(), batches(), mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))


@pytest.mark.nightly
@distributed(world=[1, 2, 3])
def test_sharded_equals_one_device_at_every_stage(world: int) -> None:
    mesh, want = sf.make_mesh({"dp": world}), one_device(loss, rule(), params(), batches())
    runs = []
    for stage in range(4):
        zero = sf.Zero(stage=stage, persist_elements=0)
        runs.append(on_mesh(loss, rule(), params(), batches(), mesh=mesh, zero=zero))
        assert_same(runs[-1], want)
        assert_same(on_mesh(sf.jit(loss, backend="graph"), rule(), params(), batches(), mesh=mesh, zero=zero), want)
    for other in runs[2:]:
        assert_same(other, runs[1], exact=True)


CUTS = {"embed": P("tp"), "up": P("tp"), "down": P(None, "tp"), "stack": P(None, "tp"), "head": P("tp")}
SPECS = {k: CUTS.get(k, P()) for k in ("embed", "up", "down", "stack", "conv", "head", "bias")}
SIZES = {k: tuple(x.shape) for k, x in params().items()}


def tp_loss(p: Any, ids: Tensor) -> Tensor:
    """The loss of blocks, which it gathers one by one."""
    dims = {k: len(s) - 1 for k, s in CUTS.items()}
    whole = {k: sf.all_gather_invariant(p[k], "tp", dim=d, size=SIZES[k][d]) for k, d in dims.items()}
    return loss({**p, **whole}, ids)


@pytest.mark.nightly
@distributed(world=2)
def test_matrices_cut_by_tensor_parallelism_are_computed_whole() -> None:
    assert_parity(tp_loss, rule(), params(), batches(), mesh=sf.make_mesh({"tp": 2}), reference=loss, specs=SPECS)


@pytest.mark.nightly
@distributed(world=[3, 4])
def test_matrices_cut_by_both_are_computed_whole(world: int) -> None:
    mesh = sf.make_mesh({"tp": 3} if world == 3 else {"dp": 2, "tp": 2})
    for stage in (0,) if world == 3 else (0, 1, 3):
        zero = sf.Zero(stage=stage, persist_elements=0)
        for f in (tp_loss, sf.jit(tp_loss, backend="graph")):
            assert_parity(f, rule(), params(), batches(), mesh=mesh, reference=loss, specs=SPECS, zero=zero)


@distributed(world=2)
def test_each_matrix_is_computed_by_one_rank() -> None:
    mesh, seen = sf.make_mesh({"dp": 2}), []

    class Watched(NewtonSchulz):
        def __call__(self, x: Tensor) -> Tensor:
            seen.append(tuple(x.shape))
            return super().__call__(x)

    tx = optim.scale_by_muon(newton_schulz=Watched(), matrices=MatrixDims())
    whole = {"a": torch.randn(4, 6), "b": torch.randn(4, 6), "stack": torch.randn(3, 2, 2), "small": torch.randn(3, 2)}
    specs = {"a": P("dp"), "b": P(None, "dp"), "stack": P("dp"), "small": P("dp")}
    cut = lambda x, spec: x[sf.core.block_slices(tuple(x.shape), spec, mesh.shape, mesh.coords)]  # noqa: E731
    with bind_mesh(mesh):
        fixed = optim.resolve_masks(tx, whole)
        blocks = tree_map(cut, whole, specs)
        fixed.update(blocks, fixed.init(blocks), specs=specs)
        # Each rank has whole matrices of the stack.
        own = [(2, 2)] * len(blocks["stack"])
        assert sorted(seen) == sorted([*own, (4, 6), *([(3, 2)] if mesh.rank == 0 else [])])
        with pytest.raises(ValueError, match=r"decide it first[^$]*\['a'\] is cut as P\('dp'\)"):
            tx.update(blocks, tx.init(blocks), specs=specs)


@pytest.mark.nightly
@distributed(world=2)
def test_on_a_host_and_restored_on_another_mesh(tmp_path: pathlib.Path) -> None:
    want = one_device(loss, rule(), params(), batches(4))
    mesh, alone = sf.make_mesh({"dp": 2}), sf.make_mesh({"dp": 1, "tp": 2})
    zero = sf.Zero(stage=2, optimizer="host", persist_elements=0)
    assert_same(on_mesh(loss, rule(), params(), batches(4), mesh=mesh, zero=zero), want)
    step = sf.sharded_step(loss, rule(), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    state = step.init(params())
    for batch in batches(4)[:2]:
        state, _ = step(state, batch[mesh.rank * 6 : mesh.rank * 6 + 6])
    sf.checkpoint.save(tmp_path, state)
    other = sf.sharded_step(tp_loss, rule(), mesh=alone, specs=SPECS)
    state = sf.checkpoint.restore(tmp_path, other.init(params())).tree
    for batch in batches(4)[2:]:
        state, _ = other(state, batch)
    for k, x in state.params.items():
        torch.testing.assert_close(x.full_tensor(), want.params[k], rtol=1e-10, atol=1e-12)
