"""Covers experts under tensor and expert parallelism together: dealt tokens, and recomputation that sends nothing."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import assert_parity, distributed

NIGHT = pytest.mark.nightly
PLAIN, DEALT = layers.AllToAll("ep"), layers.AllToAll("ep", dealt="tp")
STYLES: dict[str, dict[str, Any]] = {
    "gelu": {"mlp": "gelu", "position": "rope"},
    "swiglu": {"mlp": "swiglu", "norm": "rms", "position": "rope", "bias": False},
}


KEPT = sf.policies.save_collectives


def config(exchange: Any, style: str = "swiglu", **changes: Any) -> gpt.Config:
    sizes: dict[str, Any] = {"vocab_size": 13, "num_layers": 2, "d_model": 8, "num_heads": 2, "d_ff": 6, "max_len": 8}
    options: dict[str, Any] = {"num": 5, "balance": 0.1, "z": 0.01, "exchange": exchange, **changes}
    options["axes"] = None if isinstance(exchange, layers.Local) else exchange.axis
    return gpt.Config(**sizes, **STYLES[style], per_head=True, experts=moe.Experts(**options))


def params_of(c: gpt.Config) -> Any:
    made = torch.Generator().manual_seed(2)
    moved = lambda x: x + 0.3 * torch.randn(x.shape, generator=made, dtype=torch.float64)  # noqa: E731
    return sf.core.tree_map(moved, gpt.init(c, sf.key(0)))


def batch_of(rows: int = 6, tokens: int = 7, seed: int = 1) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return gpt.shifted({"tokens": torch.randint(13, (rows, tokens + 1), generator=made)})


def parity(
    exchange: Any,
    mesh: sf.Mesh,
    *,
    sequence: bool,
    jit: bool,
    style: str,
    stage: int = 0,
    rows: int = 6,
    capacity: Any = None,
    **options: Any,
) -> None:
    """Three rows of seven tokens a rank, which two ranks deal as 11 and 10, or as 4 and 3 of each row."""
    c, alone = (config(how, style, capacity=capacity) for how in (exchange, layers.Local()))
    loss: Any = functools.partial(gpt.loss, c, axis="tp", sequence=sequence, **options)
    assert_parity(
        sf.jit(loss, backend="graph") if jit else loss,
        sf.optim.sgd(0.1, momentum=0.9),
        params_of(alone),
        [batch_of(rows, seed=1), batch_of(rows, seed=2)],
        reference=functools.partial(gpt.loss, alone),
        mesh=mesh,
        specs=gpt.specs(c, tp="tp"),
        batch=sf.P(exchange.axis),
        zero=sf.Zero(stage=stage, axis="ep", persist_elements=0) if stage else None,
    )


@distributed(world=4)
def test_dealt_tokens_equal_one_device() -> None:
    with sf.make_mesh({"ep": 2, "tp": 2}, device="cpu") as mesh:
        parity(DEALT, mesh, sequence=False, jit=False, style="gelu")


@NIGHT
@distributed(world=4, timeout=600)
@pytest.mark.parametrize("capacity", [None, 0.8])
@pytest.mark.parametrize("kind", [*STYLES, "gpt_oss"])
def test_experts_on_all_ranks_equal_one_device(kind: str, capacity: float | None) -> None:
    """Experts over "ep" and "tp": ranks of "tp" have the same tokens, and each sends a part of them."""
    style = kind if kind in STYLES else "swiglu"
    more: Any = {"biases": True, "gate": layers.ClampedGate()} if kind == "gpt_oss" else {}
    both = config(layers.AllToAll(("ep", "tp")), style, capacity=capacity, **more)
    assert both.experts is not None
    both = dataclasses.replace(both, experts=dataclasses.replace(both.experts, axes="ep"))  # of the batch
    alone = config(layers.Local(), style, capacity=capacity, **more)
    with sf.make_mesh({"ep": 2, "tp": 2}, device="cpu") as mesh:
        assert_parity(
            functools.partial(gpt.loss, both, axis="tp"),
            sf.optim.sgd(0.1, momentum=0.9),
            params_of(alone),
            [batch_of(6, seed=1), batch_of(6, seed=2)],
            reference=functools.partial(gpt.loss, alone),
            mesh=mesh,
            specs=gpt.specs(both, tp="tp"),
            batch=sf.P("ep"),
        )


@NIGHT
@distributed(world=4, timeout=600)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_dealt_tokens_under_stages_and_recomputation(style: str, sequence: bool, jit: bool) -> None:
    with sf.make_mesh({"tp": 2, "ep": 2}, device="cpu") as mesh:
        parity(DEALT, mesh, sequence=sequence, jit=jit, style=style, capacity=0.8)
        for stage, wrap in ((1, lambda f: f), (3, sf.remat), (0, functools.partial(sf.remat, policy=KEPT))):
            parity(DEALT, mesh, sequence=sequence, jit=jit, style=style, stage=stage, wrap=wrap)


@NIGHT
@distributed(world=8, timeout=600)
@pytest.mark.parametrize("jit", [False, True])
def test_dealt_tokens_over_two_networks_equal_one_device(jit: bool) -> None:
    exchange = layers.AllToAll(("node", "ep"), hierarchical=True, dealt="tp")
    with sf.make_mesh({"node": 2, "ep": 2, "tp": 2}, device="cpu") as mesh:
        for sequence in (False, True):
            parity(exchange, mesh, sequence=sequence, jit=jit, style="swiglu", rows=8)


def traffic_of(exchange: Any, mesh: sf.Mesh, *, wrap: Any, jit: bool = False, sequence: bool = False) -> dict[Any, Any]:
    """The calls and bytes of a step by operation and axes."""
    c = config(exchange)
    loss: Any = functools.partial(gpt.loss, c, axis="tp", sequence=sequence, wrap=wrap)
    step = sf.sharded_step(
        sf.jit(loss, backend="graph") if jit else loss,
        sf.optim.sgd(0.0),
        mesh=mesh,
        specs=gpt.specs(c, tp="tp"),
        batch=sf.P("ep"),
    )
    batch = {k: x.chunk(2)[mesh.coords["ep"]] for k, x in batch_of(8, 8).items()}
    state, _ = step(step.init(params_of(c)), batch)
    with sf.count_traffic() as traffic:
        step(state, batch)
    return {key: tuple(found) for key, found in traffic.by_op.items()}


def plain(f: Any) -> Any:
    return f


@distributed(world=4)
def sent_over_experts() -> list[tuple[int, int]]:
    """The calls and bytes of this rank's rows, plain over ep, dealt over ep, and dealt over tp."""
    with sf.make_mesh({"ep": 2, "tp": 2}, device="cpu") as mesh:
        one, two = (traffic_of(exchange, mesh, wrap=plain) for exchange in (PLAIN, DEALT))
        op = "ragged_all_to_all"
        return [one[op, ("ep",)], two[op, ("ep",)], two[op, ("tp",)]]


def test_only_a_share_of_the_rows_travels_over_experts() -> None:
    """Summed over ranks, as the tokens of a rank may choose experts of other ranks more or less often."""
    found = sent_over_experts()
    calls, sent = torch.tensor(found).sum(0).unbind(-1)
    assert sent[0] == 2 * sent[1] > 0 and calls[0] == calls[1]
    # A gather and a sum of each of two layers, forward and backward.
    assert calls[2] == 4 * 2 * 4


def check_recomputation(exchange: Any, mesh: sf.Mesh, **how: Any) -> None:
    kept, want = (
        traffic_of(exchange, mesh, wrap=wrap, **how) for wrap in (functools.partial(sf.remat, policy=KEPT), plain)
    )
    assert kept == want, (exchange, kept, want)


@pytest.mark.nightly
@distributed(world=4)
def test_a_recomputation_sends_nothing() -> None:
    """Along tp and ep together, with the sums of balance losses."""
    with sf.make_mesh({"ep": 2, "tp": 2}, device="cpu") as mesh:
        check_recomputation(DEALT, mesh)


@NIGHT
@distributed(world=4, timeout=600)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_a_recomputation_sends_nothing_in_any_step(jit: bool, sequence: bool) -> None:
    with sf.make_mesh({"ep": 2, "tp": 2}, device="cpu") as mesh:
        for exchange in (PLAIN, DEALT):
            check_recomputation(exchange, mesh, jit=jit, sequence=sequence)
            again, want = (traffic_of(exchange, mesh, wrap=wrap, jit=jit) for wrap in (sf.remat, plain))
            assert sum(n for n, _ in again.values()) > sum(n for n, _ in want.values())


def mixed(params: Any, x: Tensor) -> Tensor:
    routing = layers.top_k(x @ params["router"].t(), 2)
    return layers.apply(layers.swiglu_experts, params["experts"], x, routing, exchange=DEALT).square().mean()


@pytest.mark.day(False)
@distributed(world=4)
@pytest.mark.parametrize("jit", [False, True])
def test_a_dealt_axis_without_the_same_tokens_is_refused(jit: bool) -> None:
    leaves = {"w_gate_up": torch.ones(4, 2, 4, 6), "w_down": torch.ones(4, 6, 4)}
    params = {"router": torch.ones(4, 6), "experts": leaves}
    specs = {"w_gate_up": sf.P("ep", None, "tp"), "w_down": sf.P("ep", None, "tp")}
    with sf.make_mesh({"ep": 2, "tp": 2}, device="cpu") as mesh:
        how: dict[str, Any] = {"mesh": mesh, "specs": {"router": sf.P(), "experts": specs}, "batch": sf.P(("ep", "tp"))}
        step = sf.sharded_step(sf.jit(mixed, backend="graph") if jit else mixed, sf.optim.sgd(0.1), **how)
        with pytest.raises((ValueError, sf.RankError), match="takes the same tokens on all ranks along 'tp'"):
            step(step.init(params), torch.ones(3, 6))
        c = config(DEALT)
        uncut: Any = functools.partial(gpt.loss, c)
        step = sf.sharded_step(uncut, sf.optim.sgd(0.0), mesh=mesh, specs=gpt.specs(c), batch=sf.P("ep"))
        with pytest.raises((ValueError, sf.RankError), match="deals tokens over 'tp', but the features of experts"):
            step(step.init(params_of(c)), {k: x[:3] for k, x in batch_of().items()})
