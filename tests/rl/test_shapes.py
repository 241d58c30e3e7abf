"""Tensors of other shapes than a loss takes, and answers outside of their rows, are refused, also when captured."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl

# Rows and tokens are equally many, so that every mistake here would broadcast.
BT, B, LENGTHS = torch.zeros(3, 3), torch.zeros(3), torch.tensor([3, 0, 2])

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "an advantage for each row": (
        lambda: rl.ppo_policy(BT, BT, B, LENGTHS),
        r"ppo_policy: .*\n.*advantages_BT has shape \(3,\); it must be \[B = 3, T = 3\]",
    ),
    "advantages of tokens": (lambda: rl.grpo(BT, BT, BT, LENGTHS), r"grpo: .*\n.*advantages_B has shape \(3, 3\)"),
    "advantages of tokens of whole answers": (lambda: rl.rloo(BT, BT, BT, LENGTHS), "advantages_B has shape"),
    "old values of rows": (lambda: rl.ppo_value(BT, B, BT, LENGTHS), r"old_values_BT has shape \(3,\)"),
    "old log probabilities of a column": (
        lambda: rl.grpo(BT, BT[:, :1], B, LENGTHS),
        r"old_logprobs_BT has shape \(3, 1\)",
    ),
    "a preference of tokens": (
        lambda: rl.dpo(BT, BT, BT, BT),
        r"dpo: .*\n.*chosen_B has shape \(3, 3\); it must be \[B\]\n",
    ),
    "a column of references": (
        lambda: rl.dpo(B, B, B[:, None], B, chosen_lengths_B=LENGTHS, rejected_lengths_B=LENGTHS, loss_type="ipo"),
        r"ref_chosen_B has shape \(3, 1\)",
    ),
    "wanted answers of a column": (lambda: rl.kto(B, B, B[:, None] > 0, B[0]), "desirable_B has shape"),
    "odds of tokens": (lambda: rl.orpo(BT - 1, BT - 1), "chosen_B has shape"),
    "rewards by group": (lambda: rl.group_advantages(BT, 3), r"rewards_B has shape \(3, 3\); it must be \[B\]"),
    "values of rows": (lambda: rl.gae(BT, B, LENGTHS), "values_BT has shape"),
    "scores of a column": (lambda: rl.kl_rewards(BT, BT, B[:, None], LENGTHS), "scores_B has shape"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_tensor_of_another_shape_is_refused(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        call()


LONG = torch.tensor([3, 4, 2])

TOO_LONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "token_mean": lambda lengths: rl.token_mean(BT, lengths),
    "ppo_policy": lambda lengths: rl.ppo_policy(BT, BT, BT, lengths),
    "ppo_value": lambda lengths: rl.ppo_value(BT, BT, BT, lengths),
    "grpo": lambda lengths: rl.grpo(BT, BT, B, lengths, loss_type="grpo"),
    "rloo": lambda lengths: rl.rloo(BT, BT, B, lengths),
    "policy_metrics": lambda lengths: rl.policy_metrics(BT, BT, lengths)["ratio"],
    "gae": lambda lengths: rl.gae(BT, BT, lengths)[0],
    "kl_rewards": lambda lengths: rl.kl_rewards(BT, BT, B, lengths),
    "last_values": lambda lengths: rl.last_values(BT, lengths),
    "pairwise": lambda lengths: rl.pairwise(BT, BT, BT.long(), BT.long(), LENGTHS, lengths),
}


@pytest.mark.parametrize("name", TOO_LONG)
@pytest.mark.parametrize("wrong", [4, -1])
def test_a_length_beyond_the_tokens_is_refused(name: str, wrong: int) -> None:
    lengths = torch.tensor([3, wrong, 2])
    message = rf"{name}: \w*lengths_B\[1\] is {wrong}, and the other tensors have T = 3 tokens; .* cut the answers to 3"
    with pytest.raises(ValueError, match=message):
        TOO_LONG[name](lengths)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["grpo", "gae", "ppo_value"])
def test_a_captured_step_refuses_a_length_beyond_the_tokens(name: str) -> None:
    def loss(w: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found = TOO_LONG[name](lengths)
        return w * (found if isinstance(found, torch.Tensor) else found.total).sum()

    step = sf.sharded_step(sf.jit(loss), sf.optim.sgd(0.1), donate=False)
    state, _ = step(step.init(torch.tensor(1.0)), LENGTHS)
    with pytest.raises(ValueError, match=rf"{name}: a length in lengths_B is not from 0 to T = 3"):
        step(state, LONG)


def logprobs(prompts: list[int], lengths: list[int], width: int) -> torch.Tensor:
    logits = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(16).view(2, 8) % 5
    return rl.completion_logprobs(logits, ids, rl.CompletionSpans(torch.tensor(prompts), torch.tensor(lengths), width))


@pytest.mark.parametrize(
    ("prompts", "lengths", "width"), [([5, 5], [4, 3], 4), ([0, 5], [4, 3], 4), ([1, 1], [4, 3], 3)], ids=str
)
def test_an_answer_outside_of_its_row_is_refused(prompts: list[int], lengths: list[int], width: int) -> None:
    with pytest.raises(ValueError, match=r"completion_logprobs: an answer does not lie in its row.*together at most 8"):
        logprobs(prompts, lengths, width)


def test_answers_that_fill_their_rows_and_empty_ones_are_taken() -> None:
    assert logprobs([5, 0], [3, 0], 3).shape == (2, 3)


@pytest.mark.nightly
def test_a_captured_step_refuses_an_answer_outside_of_its_row() -> None:
    def loss(w: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = w * torch.ones(2, 8, 5)
        ids = torch.zeros(2, 8, dtype=torch.int64)
        return rl.completion_logprobs(logits, ids, rl.CompletionSpans(batch["prompts"], batch["lengths"], 4)).mean()

    step = sf.sharded_step(sf.jit(loss), sf.optim.sgd(0.1), donate=False)
    state, one = step.init(torch.tensor(1.0)), torch.tensor([1, 1])
    state, _ = step(state, {"prompts": one, "lengths": one})
    with pytest.raises(ValueError, match="an answer does not lie in its row"):
        step(state, {"prompts": 6 * one, "lengths": 3 * one})
