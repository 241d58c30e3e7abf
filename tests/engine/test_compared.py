"""Covers the comparison of ranks in the first step: their rows and losses."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, optim
from shardfn.graph import AxisTypeError
from shardfn.models import gpt
from shardfn.testing import distributed

CONFIG = gpt.Config(vocab_size=8, num_layers=1, d_model=8, num_heads=2, max_len=8)
TOKENS = torch.arange(12).view(2, 6) % 8


def _step(mesh: sf.Mesh, **options: Any) -> Any:
    loss = functools.partial(gpt.loss, CONFIG, axis="tp")
    return sf.sharded_step(loss, optim.sgd(1.0), mesh=mesh, specs=gpt.specs(CONFIG, tp="tp"), **options)


@pytest.mark.nightly
@distributed(world=4)
def test_ranks_of_an_axis_of_the_model_pass_the_same_rows() -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2})
    for batch in (None, P("dp")):
        step = _step(mesh, **({} if batch is None else {"batch": batch}))
        state = step.init(gpt.init(CONFIG, sf.key(0)))
        own = {"tokens": TOKENS.roll(mesh.rank, 1)}
        with pytest.raises(sf.RankError) as caught:
            step(state, own)
        assert str(caught.value).splitlines()[1:] == [
            "  - rank 1 passes other values than rank 0: batch['tokens']",
            "  - rank 3 passes other values than rank 2: batch['tokens']",
        ]
        # Nothing was consumed: the same state takes the right rows.
        state, _ = step(state, {"tokens": TOKENS.roll(mesh.axis_index("dp"), 1)})
        assert int(state.step) == 1


@distributed(world=2)
def test_rows_of_a_pipeline_are_compared() -> None:
    mesh = sf.make_mesh({"pp": 2})
    loss = sf.pipeline(lambda p, x: x, lambda p, h: h * p["w"], lambda p, h, x: h.mean())
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, specs={"blocks": P("pp")})
    state = step.init({"blocks": {"w": torch.ones(2)}})
    with pytest.raises(sf.RankError, match=r"(?s)ranks along \('pp',\) must pass the same batch.*rank 1 passes other"):
        step(state, torch.full((2,), float(mesh.rank)))


@pytest.mark.day("False")
@pytest.mark.parametrize("jitted", [False, True])
@distributed(world=2)
def test_a_batch_cut_along_an_axis_of_the_model_is_refused(jitted: bool) -> None:
    mesh = sf.make_mesh({"tp": 2})
    loss = functools.partial(gpt.loss, CONFIG, axis="tp")
    held = sf.jit(loss) if jitted else loss
    step = sf.sharded_step(held, optim.sgd(1.0), mesh=mesh, specs=gpt.specs(CONFIG, tp="tp"), batch=P("tp"))
    state = step.init(gpt.init(CONFIG, sf.key(0)))
    with pytest.raises(AxisTypeError, match=r"pvary over 'tp' .* that varies there already.*cuts the batch"):
        step(state, {"tokens": TOKENS})
