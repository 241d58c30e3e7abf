"""Reward functions that work, raise, hang, return no number, or end their process: counted, and never waited for."""

import math
import os
import time

import pytest
import torch

from shardfn import make_mesh, rl
from shardfn.testing import distributed


def rollout(rows: int) -> rl.Rollout:
    ids = torch.arange(rows)[:, None] + torch.arange(6)
    num = torch.full((rows,), 2)
    return rl.empty_rollout(rows, 6, 4)._replace(ids=ids, prompts=num, lengths=num + 1)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are made from here on."""
    pids, fork = list[int](), os.fork

    def noted() -> int:
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", noted)
    return pids


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.day("1", "3")
@pytest.mark.parametrize("workers", [1, 3, 20])
def test_rewards(workers: int) -> None:
    known = {5: 0.5}  # of this process

    def reward(prompt: list[int], answer: list[int], given: int) -> float:
        assert len(prompt) == 2 and answer == [prompt[0] + 2 + i for i in range(3)]
        return prompt[0] * known[5] + given

    found = rl.score(reward, rollout(7), list(range(0, 70, 10)), workers=workers)
    assert found.rollout.rewards.tolist() == [10.5 * i for i in range(7)]
    assert sum(found.counts.values()) == 0 and found.first == ""


def spoilt(prompt: list[int], answer: list[int]) -> float:
    del answer
    match prompt[0]:
        case 1:
            raise KeyError("no such problem")
        case 2:
            return math.nan
        case 3:
            while True:  # never lets go
                pass
        case 4:
            os._exit(3)
        case 5:
            return "good"  # pyright: ignore[reportReturnType]
        case 6:
            time.sleep(60)
        case 7:
            raise SystemExit
        case 8:
            return -math.inf
    return 1.0


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 4])
def test_failures_are_counted_and_end(workers: int, forks: list[int]) -> None:
    start = time.monotonic()
    found = rl.score(spoilt, rollout(11), seconds=0.3, workers=workers)
    assert time.monotonic() - start < 20
    assert found.counts == {"raised": 2, "late": 2, "invalid": 3, "died": 1}
    assert found.first == "row 1 raised KeyError: 'no such problem'"
    assert found.rollout.rewards.isnan().tolist() == [False] + 8 * [True] + 2 * [False]
    assert forks and not any(map(alive, forks))


def test_an_interrupted_call_leaves_no_process(monkeypatch: pytest.MonkeyPatch, forks: list[int]) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardfn.rl._scores.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rl.score(lambda prompt, answer: 1.0, rollout(2), workers=2)
    assert len(forks) == 2 and not any(map(alive, forks))


def test_torch_is_at_hand_in_a_reward() -> None:
    _ = torch.ones(300, 300) @ torch.ones(300, 300)  # starts threads
    found = rl.score(lambda prompt, answer: (torch.ones(300, 300) @ torch.ones(300, 300))[0, 0].item(), rollout(2))
    assert found.rollout.rewards.tolist() == [300, 300]


def test_no_rows() -> None:
    assert rl.score(spoilt, rollout(0)).rollout.rewards.shape == (0,)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="3 values are given for 2 rows"):
        rl.score(spoilt, rollout(2), [1, 2, 3])
    with pytest.raises(ValueError, match=r"must be positive and finite, got 0 and 1"):
        rl.score(spoilt, rollout(2), seconds=0)
    with pytest.raises(ValueError, match=r"must be positive and finite, got inf and 1"):
        rl.score(spoilt, rollout(2), seconds=math.inf)


def test_a_system_without_fork_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(NotImplementedError, match=r"this system cannot fork.*rollout._replace\(rewards="):
        rl.score(spoilt, rollout(2))


def slow_on_some(prompt: list[int], answer: list[int], rank: int) -> float:
    del answer
    if prompt[0] == 2 and rank == 0:
        time.sleep(60)
    return prompt[0] + rank / 10


@pytest.mark.day("1")
@distributed(world=[1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_of_equal_rows_have_equal_rewards(world: int) -> None:
    mesh = make_mesh({"dp": max(world // 2, 1), "tp": min(world, 2)})
    rank = mesh.axis_index("tp")
    found = rl.score(slow_on_some, rollout(5), [rank] * 5, seconds=0.3, mesh=mesh, axis="tp")
    wanted = [0, 1.1, math.nan, 3.1, 4] if world > 1 else [0, 1, math.nan, 3, 4]
    assert torch.equal(found.rollout.rewards.nan_to_num(-1), torch.tensor(wanted).nan_to_num(-1))
    assert found.counts["late"] == 1 and found.first == "row 2 took more than 0.3 seconds"


def test_any_result_and_any_error_is_counted() -> None:
    class Unspoken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    results = [1.0, True, torch.tensor(2.0), "5", 10**400, 10**5000]
    found = rl.score(lambda prompt, answer: results[prompt[0]], rollout(6))
    assert found.rollout.rewards[:3].tolist() == [1, 1, 2] and found.rollout.rewards[3:].isnan().all()
    assert found.counts["invalid"] == 3 and found.first == "row 3 returned '5', which is not a finite number"

    def raises(prompt: list[int], answer: list[int]) -> float:
        raise Unspoken

    with pytest.warns(UserWarning, match="failed for all 1 answers"):
        found = rl.score(raises, rollout(1))
    assert found.counts["raised"] == 1
    assert found.first == "row 0 raised Unspoken: a Unspoken whose text raises RuntimeError"
