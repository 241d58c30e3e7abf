"""Covers the warning for ranks that all pass the whole batch: it names the axis and the remedy, and constants pass."""

import warnings
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.testing import distributed

ROWS = torch.arange(24.0).view(8, 3).sin()


def _warned(mesh: sf.Mesh, batches: list[Any], **options: Any) -> list[str]:
    step = sf.sharded_step(lambda w, b: (w * b["x"]).square().mean(), sf.optim.sgd(0.1), mesh=mesh, **options)
    state = step.init(torch.ones(3))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches:
            state, _ = step(state, batch)
    return [str(x.message) for x in found if "ranks along" in str(x.message)]


@distributed(world=2)
def test_the_whole_batch_on_every_rank_is_noticed_once() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    found = _warned(mesh, [{"x": ROWS, "mask": torch.ones(8)}, {"x": ROWS, "mask": torch.ones(8)}])
    assert len(found) == (mesh.rank == 0)  # the first rank alone, in the first step
    for text in found:
        assert "all 2 ranks along 'dp' pass the same values of batch['mask'], batch['x']" in text
        assert "batch[step.rows(len(batch))]" in text and "batch=sf.P()" in text and "filterwarnings" in text


@distributed(world=2)
def test_other_batches_are_not() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    own = ROWS[mesh.rank * 4 :][:4]
    assert not _warned(mesh, [{"x": own}])
    assert not _warned(mesh, [{"x": torch.ones(4, 3)}])  # constant rows prove nothing
    assert not _warned(mesh, [{"x": ROWS[:1].expand(4, 3)}])
    assert not _warned(mesh, [{"x": ROWS}], batch=P())  # computed by every rank on purpose
    # A table that is the same on all ranks, beside rows.
    assert not _warned(mesh, [{"x": own, "table": ROWS}], batch={"x": P("dp"), "table": P()})
    assert not _warned(mesh, [{"x": own, "mask": ROWS[:4].gt(0)}])  # one leaf that differs is enough


@distributed(world=2)
def test_one_row_with_several_values_is_noticed() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    assert len(_warned(mesh, [{"x": ROWS[:1]}])) == (mesh.rank == 0)
    assert not _warned(mesh, [{"x": torch.full((1, 3), 2.0)}])


@pytest.mark.nightly
@distributed(world=4)
def test_each_axis_that_cuts_the_batch_is_looked_at() -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu")
    own = ROWS[mesh.axis_index("dp") * 4 :][:4]
    found = _warned(mesh, [{"x": own}], batch=P(("dp", "tp")))
    assert [text[:24] for text in found] == ["all 2 ranks along 'tp' p"] * (mesh.rank == 0)
    assert not _warned(mesh, [{"x": own}], batch=P("dp"))


@distributed(world=2)
def test_as_an_error_it_comes_before_the_state_is_consumed() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    step = sf.sharded_step(lambda w, b: (w * b).square().mean(), sf.optim.sgd(0.1), mesh=mesh)
    state = step.init(torch.ones(3))
    warnings.simplefilter("error")
    with pytest.raises(sf.RankError, match="all 2 ranks along"):
        step(state, ROWS)
    state, _ = step(state, ROWS[step.rows(8)])
    assert int(state.step) == 1
