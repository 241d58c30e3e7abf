"""Covers the compressed optimizers in steps: ZeRO's stages, jit, other axes, other numbers of ranks."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import identity, int8, unshard
from shardfn.core import RankError, tree_leaves, tree_map, tree_paths
from shardfn.testing import ODD_TRAINABLE, assert_same, distributed, odd_batch, odd_loss, odd_params, on_mesh

ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}
BATCHES = 6
LATE = (ValueError, RankError)  # a rank that is late learns it from the other


def run(tx: Any, mesh: sf.Mesh, stage: int = 0, loss: Any = odd_loss, steps: int = BATCHES, **options: Any) -> Any:
    batches = [odd_batch(n) for n in range(steps)]
    zero = options.pop("zero", {"axis": "dp"})
    options |= {"zero": sf.Zero.flat(stage=stage, **zero, **ODD), "trainable": ODD_TRAINABLE}
    return on_mesh(loss, tx, odd_params(), batches, mesh=mesh, **options)


def kept(run: Any, *fields: str) -> Any:
    """The part of a run that all stages share."""
    return run._replace(opt_state={f: getattr(run.opt_state, f) for f in fields}, metrics=[])


@pytest.mark.nightly
@distributed(world=2)
def test_stages_give_the_same_bits() -> None:
    mesh = sf.make_mesh({"dp": 2})
    tx: Any = optim.onebit_adam(
        1e-2, b2=0.5, weight_decay=0.01, freeze_step=optim.VarianceStability(0.01, after=3), exact=_is_small
    )
    whole = run(tx, mesh)
    assert int(whole.opt_state.freeze.frozen) == 4 and int(whole.opt_state.freeze.begun) == 1
    for stage in (1, 3):
        cut = run(tx, mesh, stage)
        assert_same(kept(cut, "adam", "residual"), kept(whole, "adam", "residual"), exact=True)
        # At one bit an element, and a scale a rank: 7 rows of 5 are padded to 48.
        codes = {path: (x.dtype, tuple(x.shape)) for path, x in zip(*_named(cut.opt_state.codes), strict=True)}
        want = [(torch.uint8, (2, 3)), (torch.float32, (2,))]
        assert [codes[f"['blocks'][0]['w'][{i}]"] for i in (0, 1)] == want
        assert not any("bias7" in path for path in codes)
    lamb: Any = optim.onebit_lamb(1e-2, weight_decay=0.01, freeze_step=3)
    same = "lamb", "coeff", "factor", "scaling", "fresh"
    assert_same(kept(run(lamb, mesh, 1), *same), kept(run(lamb, mesh), *same))
    decayed: Any = optim.chain(optim.add_decayed_weights(0.1), optim.onebit_adam(1e-2, freeze_step=2))
    with pytest.raises(LATE, match=r"rules \[0\] of a chain look at parameters(.|\n)*params\['wide'\]"):
        run(decayed, mesh, 1)
    assert all(x.isfinite().all() for x in tree_leaves(run(decayed, mesh, steps=3).params))
    alone: Any = optim.zero_one_adam(1e-2, var_freeze_step=2)
    with pytest.raises(LATE, match=r"steps every rank along 'dp' alone.*another axis(.|\n)*params\['wide'\]"):
        run(alone, mesh, 1)
    assert all(x.isfinite().all() for x in tree_leaves(run(alone, mesh).params))


@pytest.mark.nightly
@distributed(world=2, timeout=400)
def test_jit_gives_the_same_bits() -> None:
    mesh = sf.make_mesh({"dp": 2})
    makes = {
        0: optim.zero_one_adam(1e-2, var_freeze_step=3, var_update_scaler=2, local_step_scaler=1),
        1: optim.onebit_adam(1e-2, b2=0.5, weight_decay=0.01, freeze_step=optim.VarianceStability(0.01, after=3)),
        2: optim.onebit_lamb(1e-2, weight_decay=0.01, freeze_step=3),
        3: optim.apmsqueeze(1e-2, freeze_step=2, compressor=int8()),
    }
    for stage, tx in makes.items():
        assert_same(run(tx, mesh, stage, sf.jit(odd_loss, backend="graph")), run(tx, mesh, stage), exact=True)


@pytest.mark.nightly
@distributed(world=4, timeout=300)
def test_states_are_cut_over_the_axis_of_the_mean_and_another() -> None:
    mesh = sf.make_mesh({"node": 2, "gpu": 2})
    how: dict[str, Any] = {"mesh": mesh, "batch": sf.P(("node", "gpu"))}
    for make in (optim.onebit_adam, optim.onebit_lamb):
        exact: Any = make(1e-2, freeze_step=2, axis="node", compressor=identity())
        coded: Any = make(1e-2, freeze_step=2, axis="node")
        whole = _params_of(run(coded, zero={"axis": "node"}, **how))
        alone = _params_of(run(make(1e-2, freeze_step=2, compressor=identity()), sf.make_mesh({"dp": 4})))
        for stage, axes in itertools.product((1, 3), (("node", "gpu"), ("gpu", "node"), "gpu")):
            # Without compression these are the steps of a mean over all ranks.
            assert_same(_params_of(run(exact, stage=stage, zero={"axis": axes}, **how)), alone)
            if axes != "gpu":  # rows along "gpu" only are messages, and have scales, of their own
                # With one bit, these are the steps of states that are not cut.
                assert_same(_params_of(run(coded, stage=stage, zero={"axis": axes}, **how)), whole)


def _params_of(run: Any) -> Any:
    return run._replace(opt_state=(), metrics=[])


def _is_small(params: Any) -> Any:
    return tree_map(lambda p: p.ndim < 2, params)


def _named(tree: Any) -> tuple[list[str], list[Tensor]]:
    return tree_paths(tree), tree_leaves(tree)


@distributed(world=2)
def _saved() -> Any:
    tx: Any = optim.chain(optim.onebit_adam(1e-2, freeze_step=2, compressor=int8()))
    out = run(tx, sf.make_mesh({"dp": 2}), 1, steps=4)
    return out.params, out.opt_state


@distributed(world=[1, 3])
def _resumed(params: Any, opt_state: Any, world: int) -> Any:
    mesh = sf.make_mesh({"dp": world})
    tx: Any = optim.chain(optim.onebit_adam(1e-2, freeze_step=2, compressor=int8()))
    zero = sf.Zero.flat(stage=1, **ODD)
    step = sf.sharded_step(odd_loss, tx, mesh=mesh, zero=zero, trainable=ODD_TRAINABLE)
    state = step.init(params)
    opt = optim.rebalance_residuals(opt_state, state.opt_state)
    moved = unshard(opt)
    state, _ = step(state._replace(opt_state=opt), sf.testing.shard_rows(odd_batch(4), sf.P("dp"), mesh))
    return moved, unshard(state.params), unshard(state.opt_state)


@pytest.mark.nightly
def test_a_recut_keeps_the_sum_of_the_errors_of_ranks() -> None:
    [(params, (old,)), _] = _saved()
    for world in (1, 3):
        [((moved,), stepped, (after,)), *_] = _resumed(params, (old,), world=world)
        for name, leaf in params.items():
            if name in ("frozen", "empty", "unused"):
                continue
            a, b = old.residual[name], moved.residual[name]
            for x, y, p in [(a, b, leaf)] if isinstance(leaf, Tensor) else [(a[0]["w"], b[0]["w"], leaf[0]["w"])]:
                n = p.numel()
                owed = [(r.worker.mean(0) + r.server)[:n] for r in (x, y)]
                torch.testing.assert_close(owed[1], owed[0], rtol=1e-6, atol=1e-7)
                assert y.worker.shape[0] == world and (n < 3 or owed[0].any())
        assert_equal(moved.adam, old.adam)
        assert int(moved.freeze.begun) == 0 and int(after.freeze.begun) == 1 and int(after.freeze.frozen) == 2
        assert all(x.isfinite().all() for x in tree_leaves(stepped))


def test_errors_of_other_cuts_are_refused() -> None:
    tx: Any = optim.onebit_adam(1e-2, freeze_step=1)

    def first(axes: Any, spec: sf.P) -> Any:
        step = sf.sharded_step(odd_loss, tx, mesh=sf.make_mesh(axes, abstract=True), specs=spec)
        return step.init({"w": torch.empty(8, 8, device="meta")}).opt_state

    # 2 x 64 elements either way, but those of a block of columns would go to rows.
    with pytest.raises(ValueError, match="residual 0: 2 blocks became 1"):
        optim.rebalance_residuals(first({"dp": 2, "tp": 2}, sf.P(None, "tp")), first({"dp": 2}, sf.P()))


def assert_equal(got: Any, want: Any) -> None:
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert torch.equal(a, b)


@pytest.mark.nightly
@distributed(world=4, timeout=400)
def test_other_axes() -> None:
    specs = {name: sf.P() for name in odd_params()} | {
        "wide": sf.P(None, "tp"),
        "blocks": sf.P("tp"),
        "tied": sf.P("tp"),
    }
    for make in (optim.onebit_adam, optim.onebit_lamb):
        exact: Any = make(1e-2, weight_decay=0.01, freeze_step=2, compressor=identity())
        want = run(exact, sf.make_mesh({"dp": 4}))
        mesh = sf.make_mesh({"dp": 2, "tp": 2})
        field = "adam" if make is optim.onebit_adam else "lamb"
        for stage in (0, 1):
            got = run(exact, mesh, stage, _gathered, specs=specs)
            assert_same(kept(got, field), kept(want, field))
        # Errors of their own along tp, also where blocks are uneven.
        coded = run(make(1e-2, freeze_step=2), mesh, 1, _gathered, specs=specs)
        assert all(x.isfinite().all() for x in tree_leaves(coded.params))
        nodes = sf.make_mesh({"node": 2, "gpu": 2})
        both = {"batch": sf.P(("node", "gpu")), "zero": {"axis": ("node", "gpu")}}
        outer: Any = make(
            1e-2, weight_decay=0.01, freeze_step=2, axis=("node", "gpu"), outer="node", compressor=identity()
        )
        for stage in (0, 1):
            got = run(outer, nodes, stage, **both)
            assert_same(kept(got, field), kept(want, field))
        inside: Any = make(1e-2, weight_decay=0.01, freeze_step=2, axis="node", compressor=identity())
        got = run(inside, nodes, 2, batch=sf.P(("node", "gpu")), zero={"axis": "gpu"})
        assert_same(kept(got, field), kept(want, field))


def _gathered(params: Any, batch: Any) -> Tensor:
    whole = dict(params)
    whole["wide"] = sf.all_gather_invariant(params["wide"], "tp", dim=1, size=7)
    whole["blocks"] = [{"w": sf.all_gather_invariant(b["w"], "tp", size=7)} for b in params["blocks"]]
    whole["tied"] = sf.all_gather_invariant(params["tied"], "tp", size=5)
    return odd_loss(whole, batch)
