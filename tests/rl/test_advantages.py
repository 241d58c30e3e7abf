"""Advantages: of groups, also where they are cut by ranks, and by a critic."""

import json
import math
import pathlib
from typing import Any, cast

import pytest
import torch

import shardfn as sf
from shardfn import P, rl
from shardfn.testing import distributed

GOLDENS = json.loads(pathlib.Path(__file__).with_name("trl_goldens.json").read_text())["advantages"]
REWARDS = torch.tensor([1, 0, 0, 1, 2, 2, 2, 2, 3, 1, 0, 0], dtype=torch.float64)
WANTED = {
    (): [0.865875, -0.865875, -0.865875, 0.865875, 0, 0, 0, 0, 1.414114, 0, -0.707057, -0.707057],
    ("others",): [0.666667, -0.666667, -0.666667, 0.666667, 0, 0, 0, 0, 2.666667, 0, -1.333333, -1.333333],
    ("mean",): [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, 2, 0, -1, -1],
}


@pytest.mark.parametrize("how", WANTED)
def test_groups(how: tuple[str, ...]) -> None:
    more = {"baseline": how[0], "scale_rewards": "none"} if how else {}
    found = rl.group_advantages(REWARDS, 4, **more)  # pyright: ignore[reportArgumentType]
    assert [round(x, 6) for x in found.tolist()] == WANTED[how]


@pytest.mark.parametrize("baseline", ["mean", "others"])
def test_equal_rewards_have_no_advantage(baseline: str) -> None:
    for value in (0.1, -3.3, 1e6, 1 / 3):
        for size in (1, 3, 7):
            rewards = torch.full((size,), value)
            found = rl.group_advantages(rewards, size, baseline=baseline)  # pyright: ignore[reportArgumentType]
            assert found.tolist() == [0] * size


def test_a_missing_reward_is_left_out() -> None:
    nan = math.nan
    rewards = torch.tensor([1, nan, 3, nan, nan, nan, 2, nan, nan, -0.3, -0.3, nan])
    found = rl.group_advantages(rewards, 3, scale_rewards="none")
    assert found.tolist() == [-1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    scaled = rl.group_advantages(rewards, 3)
    assert not scaled.isnan().any() and torch.equal(scaled[:3], rl.group_advantages(rewards[[0, 1, 2]], 3))


def test_groups_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"12 rewards and groups of 5. Pass whole groups"):
        rl.group_advantages(REWARDS, 5)
    with pytest.raises(ValueError, match=r"baseline must be .*got 'median'"):
        rl.group_advantages(REWARDS, 4, baseline="median")  # pyright: ignore[reportArgumentType]


@distributed(world=[1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_groups_that_ranks_cut(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})

    def own(rewards: torch.Tensor) -> torch.Tensor:
        return rl.group_advantages(rewards, 6, axis="dp")

    found = sf.shard_map(own, mesh=mesh, in_specs=(P("dp"),), out_specs=P("dp"))(REWARDS)
    assert torch.equal(found, rl.group_advantages(REWARDS, 6))


def test_gae_of_answers_of_any_length() -> None:
    draw = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(4, 6, dtype=torch.float64, generator=draw) for _ in range(2))
    lengths = torch.tensor([6, 1, 0, 3])
    advantages, returns = rl.gae(rewards, values, lengths, gamma=0.9, lam=0.8)
    for i, n in enumerate(lengths.tolist()):
        wanted = torch.zeros(6, dtype=torch.float64)
        for t in range(n):
            for k in range(t, n):
                after = values[i, k + 1] if k + 1 < n else 0
                wanted[t] += (0.9 * 0.8) ** (k - t) * (rewards[i, k] + 0.9 * after - values[i, k])
        torch.testing.assert_close(advantages[i], wanted)
        assert advantages[i, n:].eq(0).all() and returns[i, n:].eq(0).all()
        torch.testing.assert_close(returns[i, :n], (wanted + values[i])[:n])
    assert rl.gae(rewards[:, :0], values[:, :0], torch.zeros(4, dtype=torch.int64))[0].shape == (4, 0)


def test_large_rewards_neither_vanish_nor_overflow() -> None:
    rewards = torch.tensor([3e38, -3e38, 0.0, 0.0])
    found = rl.group_advantages(rewards, 4)
    torch.testing.assert_close(found, rl.group_advantages(rewards / 3e38, 4, eps=1e-30))


@pytest.mark.parametrize(
    "case", GOLDENS["cases"], ids=lambda c: f"{c['multi_objective_aggregation']}-{c['scale_rewards']}"
)
def test_advantages_of_several_rewards_are_those_of_trl(case: dict[str, Any]) -> None:
    rows = [[math.nan if v is None else v for v in row] for row in GOLDENS["table"]]
    table = torch.tensor(rows, dtype=torch.float64)
    if case["multi_objective_aggregation"] == "normalize_then_sum":
        found = rl.decoupled_advantages(table, 3, reward_weights=[1.0, 2.0])
    else:
        sums = (table * torch.tensor([1.0, 2.0])).nansum(1)
        sums[table.isnan().all(1)] = math.nan
        found = rl.group_advantages(sums, 3, scale_rewards=case["scale_rewards"])
    wanted = torch.tensor(case["advantages"], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_whitened_tokens_have_mean_0_and_variance_1() -> None:
    draw, lengths = torch.Generator().manual_seed(0), torch.tensor([5, 0, 3])
    x = 3 + 2 * torch.randn(3, 5, dtype=torch.float64, generator=draw)
    mask = rl.completion_mask(lengths, 5)
    found = rl.whiten(x, lengths)
    assert abs(found[mask].mean()) < 1e-12 and abs(found[mask].var() - 1) < 1e-6 and not found[~mask].any()
    kept = rl.whiten(x, lengths, shift_mean=False)
    torch.testing.assert_close(kept[mask] - found[mask], x[mask].mean().expand(8), rtol=1e-12, atol=0)
    assert torch.equal(rl.whiten(torch.where(mask, x, torch.nan), lengths), found)
    assert not rl.whiten(x, torch.tensor([0, 0, 0])).any() and not rl.whiten(x, torch.tensor([1, 0, 0])).any()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rl.decoupled_advantages(torch.ones(4, 2), 3), "4 rewards and groups of 3"),
        (lambda: rl.decoupled_advantages(torch.ones(4, 2), 2, reward_weights=[1.0]), r"each of 2 columns, got \[1.0\]"),
        (lambda: rl.decoupled_advantages(torch.ones(4), 2), r"rewards_BR has shape \(4,\)"),
        (
            lambda: rl.group_advantages(torch.ones(4), 2, scale_rewards=cast(Any, True)),
            '"batch" or "none", got True',
        ),
    ],
)
def test_mistakes_are_named(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
