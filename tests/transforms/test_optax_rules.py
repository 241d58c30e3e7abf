"""Covers the rules of optax in a step: sharded they equal one device, under each stage, memory, mesh and transform."""

import math
import pathlib
from collections.abc import Callable

import pytest
import torch

import shardfn as sf
from shardfn import optim
from shardfn.testing import (
    ODD_TRAINABLE,
    assert_same,
    distributed,
    odd_batch,
    odd_loss,
    odd_params,
    on_mesh,
    one_device,
)

# Those whose step depends on a leaf.
LEAF: dict[str, Callable[[], optim.GradientTransformation]] = {
    "lamb": lambda: optim.lamb(1e-2, eps=1e-6, bias_correction="moments", min_coeff=0.0, max_coeff=math.inf),
    "lars": lambda: optim.lars(0.1, 0.1, trust_coefficient=0.1),
    "block rms": lambda: optim.chain(optim.clip_by_block_rms(0.01), optim.sgd(1e-2)),
    "units": lambda: optim.chain(optim.adaptive_grad_clip(0.05), optim.sgd(1e-2)),
}
ELEMENT: dict[str, Callable[[], optim.GradientTransformation]] = {
    "nadam": lambda: optim.adam(1e-2, eps=1e-4, eps_root=1e-8, nesterov=True),
    "radam": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.radam(1e-2, b2=0.8, eps=1e-4)),
    "rmsprop": lambda: optim.rmsprop(1e-3, eps=1e-3, initial_scale=0.1, centered=True, momentum=0.5),
    "adagrad": lambda: optim.named_chain(("clip", optim.clip_by_global_norm(0.1)), ("step", optim.adagrad(1e-2))),
    "partition": lambda: optim.partition(
        {"a": optim.nadamw(1e-2, eps=1e-4), "b": optim.lars(1e-2)},
        lambda params: sf.tree_map(lambda x: "a" if x.ndim > 1 else "b", params),
    ),
}
STEPS = 3
ODD = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}


def compare(world: int, name: str, stages: tuple[int, ...]) -> None:
    mesh, batches = sf.make_mesh({"dp": world}), [odd_batch(n) for n in range(STEPS)]
    tx = {**LEAF, **ELEMENT}[name]()
    want = one_device(odd_loss, tx, odd_params(), batches, trainable=ODD_TRAINABLE)
    for stage in stages:
        zero = sf.Zero.flat(stage=stage, **ODD)
        assert_same(on_mesh(odd_loss, tx, odd_params(), batches, mesh=mesh, zero=zero, trainable=ODD_TRAINABLE), want)


@pytest.mark.day("units")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(LEAF)]
)
@distributed(world=2)
def test_rules_of_leaves_equal_one_device(name: str) -> None:
    compare(2, name, (3,))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*LEAF, *ELEMENT])
@distributed(world=3)
def test_all_stages_equal_one_device(name: str) -> None:
    compare(3, name, (0, 1, 2, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*LEAF, *ELEMENT])
@distributed(world=2)
def test_jit_and_states_on_a_host_keep_every_bit(name: str) -> None:
    mesh, batches = sf.make_mesh({"dp": 2}), [odd_batch(n) for n in range(STEPS)]
    tx = {**LEAF, **ELEMENT}[name]()
    runs = [
        on_mesh(loss, tx, odd_params(), batches, mesh=mesh, zero=zero)
        for loss, zero in (
            (odd_loss, sf.Zero(stage=3)),
            (sf.jit(odd_loss, backend="graph"), sf.Zero(stage=3)),
            (odd_loss, sf.Zero(stage=2, optimizer="host")),
        )
    ]
    for run in runs[1:]:
        assert_same(run, runs[0], exact=True)


@pytest.mark.nightly
@distributed(world=2)
def test_a_mean_in_bfloat16_is_kept_in_pieces_and_on_a_host() -> None:
    mesh, batches = sf.make_mesh({"dp": 2}), [odd_batch(n) for n in range(STEPS)]
    tx = optim.adamw(1e-2, mu_dtype=torch.bfloat16)
    want = on_mesh(odd_loss, tx, odd_params(), batches, mesh=mesh, zero=sf.Zero(stage=0))
    for zero in (sf.Zero(stage=3), sf.Zero(stage=2, optimizer="host")):
        got = on_mesh(odd_loss, tx, odd_params(), batches, mesh=mesh, zero=zero)
        assert_same(got, want, computed=torch.bfloat16)
        assert {x.dtype for x in sf.tree_leaves(got.opt_state[0].mu)} == {torch.bfloat16}


def _tp_loss(params: dict, batch: dict) -> torch.Tensor:
    h = torch.tanh(sf.pvary(batch["x"], "tp") @ params["up"])
    return ((sf.psum(h @ params["down"], "tp") - batch["y"]) ** 2).mean()


@distributed(world=2)
def test_units_and_norms_of_leaves_that_specs_cut() -> None:
    mesh = sf.make_mesh({"tp": 2})
    g = torch.Generator().manual_seed(0)
    params = {"up": torch.randn(5, 7, generator=g), "down": torch.randn(7, 3, generator=g)}
    specs, batches = {"up": sf.P(None, "tp"), "down": sf.P("tp")}, [odd_batch(n) for n in range(STEPS)]
    for make in LEAF.values():
        want = one_device(_tp_loss, make(), params, batches)
        assert_same(on_mesh(_tp_loss, make(), params, batches, mesh=mesh, specs=specs, zero=None), want)


@pytest.mark.nightly
@distributed(world=2)
def test_a_saved_state_goes_on(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2})
    rows = [sf.tree_map(lambda x: x[mesh.coords["dp"] :: 2], odd_batch(n)) for n in range(2)]
    for name in ("adagrad", "rmsprop", "partition"):
        step = sf.sharded_step(odd_loss, ELEMENT[name](), mesh=mesh, zero=3)
        state, _ = step(step.init(odd_params()), rows[0])
        sf.checkpoint.save(tmp_path / name, state)
        again = sf.checkpoint.restore(tmp_path / name, step.init(odd_params())).tree
        after = [sf.tree_leaves(step(x, rows[1])[0]) for x in (state, again)]
        assert all(torch.equal(a.local, b.local) for a, b in zip(*after, strict=True) if isinstance(a, sf.GlobalTensor))
