"""Covers experts under everything at once: a covering array, which has each pair of values of its axes at least once.

Experts, dense layers and the batch lie on a mesh of at most 8 ranks. A run equals one device that computes the same
microbatches, each over the whole mesh.
"""

import functools
import itertools
import math
import random
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import nn
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import assert_parity, distributed

AXES: dict[str, tuple[Any, ...]] = {
    "ep": (1, 2, 4),
    "stage": (0, 1, 2, 3),
    "tp": (1, 2),
    "sp": (1, 2),
    "pp": (1, 2),
    "dp": (1, 2),
    "router": ("top_k", "sigmoid", "switch"),
    "rows": ("dropless", "capacity"),
    "remat": (False, True),
    "microbatches": (1, 2),
    "jit": (False, True),
    "exchange": ("tokens", "weights"),
    "experts": (4, 5),
    "sequence": (False, True),
}
MOST = 8
Case = dict[str, Any]


def allowed(case: Case) -> bool:
    """Whether a case has at most 8 ranks, and no option without effect."""
    ranks = math.prod(case[a] for a in ("ep", "tp", "sp", "pp", "dp"))
    stage = case["stage"] == 0 or case["dp"] * case["ep"] * case["sp"] > 1
    # A capacity counts tokens in the order of ranks, which is that of one device unless sequences are cut.
    order = case["sp"] == 1 or case["rows"] != "capacity"
    return ranks <= MOST and stage and order and (not case["sequence"] or case["tp"] > 1)


def pairs_of(case: Case) -> set[Any]:
    """All pairs of values of a case."""
    return {frozenset(p) for p in itertools.combinations(case.items(), 2)}


def covering() -> list[Case]:
    """Cases out of some thousands drawn at random, chosen greedily, that hold all pairs which these hold."""
    draw = random.Random(0)
    drawn = [{a: draw.choice(values) for a, values in AXES.items()} for _ in range(8000)]
    found = [(case, pairs_of(case)) for case in drawn if allowed(case)]
    left, cases = set().union(*(pairs for _, pairs in found)), list[Case]()
    while left:
        case, pairs = max(found, key=lambda c: len(c[1] & left))
        cases.append(case)
        left -= pairs
    return cases


CASES = covering()
ROUTERS: dict[str, Any] = {
    "top_k": layers.top_k,
    "sigmoid": functools.partial(layers.sigmoid_groups, groups=1, groups_kept=1),
    "switch": lambda logits, k, name: layers.switch_top1(logits, name=name),
}


def made(case: Case, *, alone: bool) -> gpt.Config:
    """The config on the mesh, or on one device."""
    batch = ("dp", "ep", "sp")
    exchange = {"tokens": layers.AllToAll("ep"), "weights": layers.GatherExperts("ep")}[case["exchange"]]
    experts = moe.Experts(
        num=case["experts"],
        top_k=1 if case["router"] == "switch" else 2,
        route=ROUTERS[case["router"]],
        balance=0.1,
        z=0.01,
        axes=None if alone else batch,
        capacity=None if case["rows"] == "dropless" else 0.8,
        exchange=layers.Local() if alone else exchange,
        every=2,
    )
    sizes: dict[str, Any] = {"vocab_size": 13, "num_layers": 4, "d_model": 16, "num_heads": 4, "d_ff": 10, "max_len": 8}
    style: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False, "per_head": True}
    body = nn.Dense() if alone or case["sp"] == 1 else nn.Ulysses("sp", 8)
    return gpt.Config(**sizes, **style, stacked=case["pp"] > 1, experts=experts, attention=body)


def run(case: Case) -> None:
    """Compares two steps of a case with one device."""
    mesh = sf.make_mesh({a: case[a] for a in ("pp", "dp", "ep", "sp", "tp")}, device="cpu")
    config, alone, num = made(case, alone=False), made(case, alone=True), case["microbatches"]
    how: dict[str, Any] = {
        "axis": "tp",
        "sequence": case["sequence"],
        "wrap": sf.remat if case["remat"] else lambda f: f,
    }
    pipelined = case["pp"] > 1
    loss: Any = functools.partial(gpt.loss, config, **how)
    if pipelined:
        loss = sf.pipeline(*gpt.stages(config, **how), axis="pp", num_microbatches=num)
    elif num > 1:
        loss = sf.accumulate(loss, num)
    ranks, rows = case["dp"] * case["ep"], 2

    def reference(params: Any, batch: Any) -> Any:
        # Microbatch m has the m-th rows of every rank.
        parts = [
            {k: x.unflatten(0, (ranks, num, -1))[:, m].flatten(0, 1) for k, x in batch.items()} for m in range(num)
        ]
        values = [gpt.loss(alone, params, part) for part in parts]
        return sf.WeightedMean(*(torch.stack(x).sum() for x in zip(*values, strict=True)))

    g = torch.Generator().manual_seed(1)
    batches = [gpt.shifted({"tokens": torch.randint(13, (ranks * num * rows, 9), generator=g)}) for _ in range(2)]
    leaves = sf.core.tree_map(lambda x: x.double() * 3, gpt.init(config, sf.key(0)))
    with mesh:
        assert_parity(
            sf.jit(loss, backend="graph") if case["jit"] else loss,
            sf.optim.sgd(0.1, momentum=0.9),
            leaves,
            batches,
            reference=reference,
            mesh=mesh,
            specs=gpt.specs(config, tp="tp", pp="pp" if pipelined else None),
            batch=sf.P(("dp", "ep"), "sp"),
            zero=sf.Zero(stage=case["stage"], axis=("dp", "ep", "sp"), persist_elements=0),
        )


@distributed(world=1)
def on_1(case: Case) -> None:
    """A case on one rank."""
    run(case)


@distributed(world=2)
def on_2(case: Case) -> None:
    """A case on two ranks."""
    run(case)


@distributed(world=4, timeout=300)
def on_4(case: Case) -> None:
    """A case on four ranks."""
    run(case)


@distributed(world=8, timeout=600)
def on_8(case: Case) -> None:
    """A case on eight ranks."""
    run(case)


def test_the_array_covers_all_pairs() -> None:
    held = set().union(*(pairs_of(case) for case in CASES))
    values = [(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]]
    missing = [v for v in values if frozenset({v[:2], v[2:]}) not in held]
    # Those that no case may have: too many ranks alone, or an option without effect.
    assert {(a, b) for a, _, b, _ in missing} <= {("tp", "sequence"), ("sp", "rows")} and len(CASES) < 40


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()))
def test_experts_under_everything_equal_one_device(case: Case) -> None:
    {1: on_1, 2: on_2, 4: on_4, 8: on_8}[math.prod(case[a] for a in ("ep", "tp", "sp", "pp", "dp"))](case)
