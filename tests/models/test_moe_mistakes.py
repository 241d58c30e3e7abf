"""Covers mistakes in models with experts: each has its error on every rank, and the state stays."""

import dataclasses
import functools
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import checkpoint
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import distributed
from tests.mistakes import Mistake, check, check_on_all_ranks, made

SIZES: dict[str, Any] = {"vocab_size": 20, "num_layers": 2, "d_model": 12, "num_heads": 2, "d_ff": 10, "max_len": 8}


def config(exchange: Any = None, num: int = 4, **changes: Any) -> gpt.Config:
    experts = moe.Experts(num=num, every=2, exchange=exchange or layers.AllToAll("ep"), **changes)
    return gpt.Config(**SIZES, experts=experts)


def spoilt(c: gpt.Config) -> Any:
    """Parameters whose router has one number that is not finite."""
    params = gpt.init(c, sf.key(0))
    params["blocks"][1]["router"][2, 3] = torch.nan
    return params


def step_of(loss: Any, params: Any, rows: Any, **options: Any) -> None:
    """One step; a refused one changes no leaf of the state."""
    step = made(loss, **options)
    state = step.init(params)
    whole = [x for x in sf.core.tree_leaves(state) if isinstance(x, sf.GlobalTensor)]
    assert len(whole) > 2 * len(sf.core.tree_leaves(params))  # with the optimizer's
    before = [x.local.clone() for x in whole]
    try:
        step(state, rows)
    finally:
        for x, y in zip(whole, before, strict=True):
            torch.testing.assert_close(x.local, y, rtol=0, atol=0, equal_nan=True)


def trained(c: gpt.Config, *, params: Any = None, specs: Any = None, wrap: Any = lambda f: f, **more: Tensor) -> None:
    """One step of a model; `more` is beside the tokens."""
    batch = {"tokens": (torch.arange(4 * 8).view(4, 8) + dist.get_rank()) % 20, **more}
    given: dict[str, Any] = {"specs": gpt.specs(c) if specs is None else specs, "batch": sf.P("ep")}
    step_of(wrap(functools.partial(gpt.loss, c)), params or gpt.init(c, sf.key(0)), batch, **given)


def too_many_choices(logits: Tensor, k: int, **options: Any) -> layers.Routing:
    return layers.top_k(logits, k + 3, **options)


def copy_own_block(params: Any, x: Tensor) -> Tensor:
    """A loss of this rank's experts alone."""
    return (x @ params["experts"].sum(0)).square().mean()


def captured(loss: Any) -> Any:
    return sf.jit(loss, backend="graph")


def without_exchange(batch: sf.P, wrap: Any = lambda f: f) -> None:
    params = {"experts": torch.ones(4, 3, 2)}
    step_of(wrap(copy_own_block), params, torch.ones(4, 3), specs={"experts": sf.P("ep")}, batch=batch)


def without_mask(logits: Tensor, k: int, name: str) -> layers.Routing:
    return layers.top_k(logits, k, name=name)


OF_CONFIGS = [
    Mistake("a capacity of nothing", lambda: config(capacity=0.0),
            ValueError, "capacity=0.0 must be above 0", "None drops nothing"),
    Mistake("more choices than experts", lambda: config(top_k=5),
            ValueError, "top_k=5 choices of num=4 experts", "Choose at most all of them"),
    Mistake("a bias for a router without one", lambda: config(bias_rate=0.1),
            ValueError, "bias_rate=0.1 moves a bias in the choice, and route=top_k takes no bias=",
            "Use moe.sigmoid_groups ... or bias_rate=0"),
    Mistake("a router of one choice", lambda: config(route=layers.switch_top1),
            ValueError, "route=switch_top1 takes no k=", "Wrap it in a function of logits, k and name"),
    Mistake("a router that takes a capacity for the choices", lambda: config(route=layers.expert_choice),
            ValueError, "route=expert_choice takes no k=", "Wrap it"),
]  # fmt: skip


def of_steps(wrap: Any) -> list[Mistake]:
    """Mistakes that a step finds, whose loss is wrapped."""
    run = functools.partial(trained, wrap=wrap)
    uneven = layers.AllToAll("ep", uneven=False)
    return [
        Mistake("a router that chooses more than there are", lambda: run(config(route=too_many_choices)),
                ValueError, "blocks.1: k must be from 1 to 4", "got k=5"),
        Mistake("a router that is not finite", lambda: run(config(), params=spoilt(config())),
                ValueError, "blocks.1 (on the rank at ep ", "Look for the first activation or parameter"),
        Mistake("more rows than room", lambda: run(config(layers.AllToAll("ep", rows=3))),
                ValueError, "Nothing was sent ... blocks.1: ", "which has room for 3; give it more"),
        Mistake("experts that the ranks do not divide", lambda: run(config(uneven, 5)),
                ValueError, "blocks.1: the 5 experts would lie on the ranks of 'ep' as [3, 2]",
                "a multiple of 2 experts"),
        Mistake("leaves that are cut for a layer that exchanges nothing",
                lambda: run(config(layers.Local()), specs=gpt.specs(config())),
                ValueError, "blocks.1: with Local()", "its first dim must be 4 of the 4 experts"),
        Mistake("whole leaves for a layer that exchanges",
                lambda: run(config(), specs=gpt.specs(config(layers.Local()))),
                ValueError, "blocks.1: with AllToAll(axis='ep'", "its first dim must be 2 of the 4 experts"),
        Mistake("an axis of experts that no exchange of the loss is along", lambda: without_exchange(sf.P(), wrap),
                sf.collectives.AxisTypeError, "the loss varies along 'ep'", "Sum the ranks' parts"),
        Mistake("an axis of the batch that cuts experts, and no exchange along it",
                lambda: without_exchange(sf.P("ep"), wrap),
                sf.collectives.AxisTypeError, "params['experts'] is cut along 'ep'", "exchange=nn.moe.AllToAll('ep')"),
        Mistake("padding for a router that knows none",
                lambda: run(config(route=without_mask), mask=torch.ones(4, 8, dtype=torch.bool)),
                ValueError, "blocks.1: route=without_mask ... takes no mask=", "Use a router that does"),
    ]  # fmt: skip


@pytest.mark.parametrize("mistake", OF_CONFIGS, ids=lambda m: m.sentence)
def test_a_config_that_cannot_route_is_refused(mistake: Mistake) -> None:
    check(mistake)


@pytest.mark.day("False")
@distributed(world=2, timeout=120)
@pytest.mark.parametrize("jit", [False, True])
def test_all_ranks_refuse_a_mistake_and_keep_the_state(jit: bool) -> None:
    check_on_all_ranks(of_steps(captured if jit else lambda f: f), {"ep": 2})


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("jit", [False, True])
def test_the_step_after_a_refused_one_is_as_if_it_had_not_been(jit: bool) -> None:
    """Each rank sends more rows than there is room for in one batch; before and behind it are others."""
    c = config(layers.AllToAll("ep", rows=24))
    loss = functools.partial(gpt.loss, c)
    drawn = torch.Generator().manual_seed(0)
    fine = [torch.randint(20, (4, 4), generator=drawn) for _ in range(2)]
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        found = []
        for batches in (fine, [fine[0], torch.full((4, 9), 3), fine[1]]):
            step = sf.sharded_step(
                sf.jit(loss, backend="graph") if jit else loss,
                sf.optim.adamw(0.1),
                mesh=mesh,
                specs=gpt.specs(c),
                batch=sf.P("ep"),
                zero=sf.Zero(stage=3, axis="ep", persist_elements=0),
            )
            state = step.init(gpt.init(c, sf.key(0)))
            for tokens in batches:
                batch = {"tokens": tokens[step.rows(4)]}
                if tokens.shape[1] == 9:
                    with pytest.raises(
                        ValueError, match=r"blocks\.1: \d+ rows come to rank \d of 'ep', which has room"
                    ):
                        step(state, batch)
                else:
                    state, _ = step(state, batch)
            found.append(sf.unshard((state.params, state.opt_state)))
    for a, b in zip(*map(sf.core.tree_leaves, found), strict=True):
        assert torch.equal(a, b)


@distributed(world=2)
def test_a_file_with_another_number_of_experts_is_refused(tmp_path: pathlib.Path) -> None:
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:

        def begun(c: gpt.Config) -> Any:
            step = sf.sharded_step(
                functools.partial(gpt.loss, c), sf.optim.sgd(0.1), mesh=mesh, specs=gpt.specs(c), batch=sf.P("ep")
            )
            return step.init(gpt.init(c, sf.key(0)))

        four = config()
        assert four.experts is not None
        five = dataclasses.replace(four, experts=dataclasses.replace(four.experts, num=5))
        checkpoint.save(tmp_path / "four", begun(four), durable=False)
        state = begun(five)
        with pytest.raises(ValueError, match=r"router.*\(4, 12\).*\(5, 12\)|router.*\(5, 12\).*\(4, 12\)"):
            checkpoint.restore(tmp_path / "four", state)
        assert not any(x.donated for x in sf.core.tree_leaves(state.params))
