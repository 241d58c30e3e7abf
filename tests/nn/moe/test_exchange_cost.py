"""Covers the choice of an exchange by its bytes: published models, the formula's turning points, and mistakes."""

from typing import Any

import pytest

from shardfn.graph import Cluster, Device, Link
from shardfn.nn import moe

MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "mixtral-8x7b": ({"top_k": 2, "num_experts": 8, "d_model": 4096, "d_ff": 14336}, 129_024),
    "qwen3-30b-a3b": ({"top_k": 8, "num_experts": 128, "d_model": 2048, "d_ff": 768}, 27_648),
}


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_travel_while_they_are_fewer_bytes_than_weights(name: str, ranks: int) -> None:
    sizes, turn = MODELS[name]
    given: Any = {**sizes, "ranks": ranks}
    assert moe.cheapest("ep", tokens=turn, **given) == moe.AllToAll("ep")
    assert moe.cheapest("ep", tokens=turn + 1, **given) == moe.GatherExperts("ep")
    assert moe.cheapest("ep", tokens=2 * turn // 3, remat=True, **given) == moe.AllToAll("ep")
    assert moe.cheapest("ep", tokens=2 * turn // 3 + 1, remat=True, **given) == moe.GatherExperts("ep")


def test_one_rank_exchanges_nothing() -> None:
    sizes, _ = MODELS["mixtral-8x7b"]
    assert moe.cheapest("ep", tokens=64, ranks=1, **sizes) == moe.Local()
    assert moe.cheapest(None, tokens=64, ranks=4, **sizes) == moe.Local()
    found = moe.exchange_bytes(64, 2, 8, d_model=4, d_ff=8, ranks=1)
    assert set(found) == {0.0}


def test_a_sum_costs_less_than_tokens_of_several_choices() -> None:
    found = moe.exchange_bytes(64, 4, 8, d_model=4, d_ff=8, ranks=4, itemsize=4)
    assert found.sum * 4 == found.tokens <= found.most


def test_sizes_are_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"exchange_bytes:\n.*tokens=0 must be at least 1\.\n.*ranks=0 must be"):
        moe.exchange_bytes(0, 2, 8, d_model=4, d_ff=8, ranks=0)


def test_few_rows_travel_by_two_hops_and_many_by_one() -> None:
    """On nodes of 8 with slow first bytes between nodes: one hop has 24 such messages, two hops have 3."""
    device, sizes = Device("box", 1, {"float32": 1.0}, 1.0), {"top_k": 2, "num_experts": 64, "d_model": 64, "d_ff": 512}
    cluster = Cluster(device, 8, Link(10e9, 0.0), Link(10e9, 200e-6))
    given: Any = {**sizes, "ranks": (4, 8), "cluster": cluster}
    both, row = ("node", "gpu"), 2 * 64 * 2
    # 21 messages of 200 us against the bytes inside, R (1 - 1 / 8) (1 - 1 / 4) / 10 GB/s.
    turn = int(21 * 200e-6 * 10e9 / (7 / 8 * 3 / 4) / row)
    assert moe.cheapest(both, tokens=16, **given) == moe.AllToAll(both, hierarchical=True)
    wide = {**given, "d_ff": 1 << 20}
    assert moe.cheapest(both, tokens=turn, **wide) == moe.AllToAll(both, hierarchical=True)
    assert moe.cheapest(both, tokens=turn + 1, **wide) == moe.AllToAll(both)
    assert moe.cheapest(both, tokens=1 << 24, **given) == moe.GatherExperts(both)
    # A single axis, and nodes that do not lie along the first axis, have one hop.
    assert moe.cheapest("ep", tokens=16, **{**given, "ranks": 32}) == moe.AllToAll("ep")
    assert moe.cheapest(both, tokens=16, **{**given, "ranks": (8, 4)}) == moe.AllToAll(both)
    with pytest.raises(ValueError, match=r"ranks=\(4, 8, 2\) must have a number for each axis"):
        moe.cheapest(both, tokens=16, **{**given, "ranks": (4, 8, 2)})
