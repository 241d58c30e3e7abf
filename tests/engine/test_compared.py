"""Covers what is compared between ranks in the first step: their rows, and a loss that is summed already."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, nn, optim
from shardfn.collectives import all_to_all, is_summed, psum, pvary
from shardfn.graph import AxisTypeError
from shardfn.models import gpt
from shardfn.testing import distributed

CONFIG = gpt.Config(vocab_size=8, num_layers=1, d_model=8, num_heads=2, max_len=8)
TOKENS = torch.arange(12).view(2, 6) % 8


def _step(mesh: sf.Mesh, **options: Any) -> Any:
    loss = functools.partial(gpt.loss, CONFIG, axis="tp")
    return sf.sharded_step(loss, optim.sgd(1.0), mesh=mesh, specs=gpt.specs(CONFIG, tp="tp"), **options)


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


@pytest.mark.parametrize("jitted", [False, True])
@distributed(world=2)
def test_a_batch_cut_along_an_axis_of_the_model_is_refused(jitted: bool) -> None:
    mesh = sf.make_mesh({"tp": 2})
    loss = functools.partial(gpt.loss, CONFIG, axis="tp")
    held = sf.jit(loss) if jitted else loss
    step = sf.sharded_step(held, optim.sgd(1.0), mesh=mesh, specs=gpt.specs(CONFIG, tp="tp"), batch=P("tp"))
    state = step.init(gpt.init(CONFIG, sf.key(0)))
    with pytest.raises(AxisTypeError, match="the loss is summed over 'tp' already"):
        step(state, {"tokens": TOKENS})


@distributed(world=2)
def test_a_loss_that_takes_the_mean_itself_is_refused() -> None:
    mesh = sf.make_mesh({"dp": 2})

    def mean(w: Tensor, x: Tensor) -> Tensor:
        return sf.pmean((w * x).mean(), "dp")

    def passed_on(w: Tensor, x: Tensor) -> Tensor:
        return (pvary(psum(w * x.mean(), "dp"), "dp") * x.mean()).sum()

    x = torch.full((2,), 1.0 + mesh.rank)
    step = sf.sharded_step(mean, optim.sgd(1.0), mesh=mesh)
    with pytest.raises(AxisTypeError, match="gradients would be 2 times too small"):
        step(step.init(torch.ones(())), x)
    step = sf.sharded_step(passed_on, optim.sgd(1.0), mesh=mesh)
    state, _ = step(step.init(torch.ones(())), x)
    # d/dw of (1 + 2) * (w + 2 w) / 2.
    torch.testing.assert_close(state.params.full_tensor(), torch.tensor(1 - 4.5))


@distributed(world=2)
def test_what_a_graph_says_of_sums() -> None:
    mesh = sf.make_mesh({"dp": 2})
    with sf.collectives.bind_mesh(mesh):
        w = torch.ones(2, requires_grad=True)
        assert is_summed(psum(w, "dp").sum() * 2, "dp")
        assert is_summed((psum(w, "dp") * psum(w + 1, "dp").detach()).mean(), "dp")
        assert not is_summed(psum(w, "dp").sum() + w.sum(), "dp")
        assert not is_summed(pvary(psum(w, "dp"), "dp").sum(), "dp")
        assert not is_summed(all_to_all(psum(w, "dp"), "dp", split_dim=0, concat_dim=0).sum(), "dp")
        assert not is_summed(w.sum(), "dp")
        assert not is_summed(torch.ones(()), "dp")
        assert not is_summed(nn.rms_norm(w, w).sum(), "dp")
