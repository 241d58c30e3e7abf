"""Covers the choice of an exchange by its bytes: published models, the formula's turning points, and mistakes."""

from typing import Any

import pytest

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
