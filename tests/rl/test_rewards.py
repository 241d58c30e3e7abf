"""The rewards of tokens, and the loss of reward models."""

import torch

from shardfn import rl

F64 = torch.float64


def test_rewards_and_advantages_of_deepspeed_chat() -> None:
    # From the second place of the answers on; the second answer has one token, and its score lands behind it.
    logprobs = torch.tensor([[-0.5, -0.3, -0.9], [-0.5, -0.3, -0.9]], dtype=F64)
    reference = torch.tensor([[-0.7, -0.3, -0.4], [-0.7, -0.3, -0.4]], dtype=F64)
    scores, lengths = torch.tensor([7.0, -0.8], dtype=F64), torch.tensor([3, 1])
    rewards = rl.kl_rewards(logprobs, reference, scores, lengths, after_end=True)
    torch.testing.assert_close(rewards, torch.tensor([[-0.02, 0, 5.05], [-0.02, -0.8, 0]], dtype=F64))
    values = torch.tensor([[0.3, 0.4, 0.5], [0.3, 0.4, 0.5]], dtype=F64)
    advantages, returns = rl.gae(rewards, values, (lengths + 1).clamp(max=3))
    torch.testing.assert_close(advantages, torch.tensor([[4.281375, 4.4225, 4.55], [-1.06, -1.2, 0]], dtype=F64))
    torch.testing.assert_close(returns, torch.tensor([[4.581375, 4.8225, 5.05], [-0.76, -0.8, 0]], dtype=F64))


def test_the_last_token_gets_the_score() -> None:
    zero = torch.zeros(4, 3)
    rewards = rl.kl_rewards(zero, zero, torch.tensor([1.0, 9.0, torch.nan, 2.0]), torch.tensor([3, 1, 2, 0]))
    assert rewards.tolist() == [[0, 0, 1], [5, 0, 0], [0, 0, 0], [0, 0, 0]]
    free = rl.kl_rewards(
        zero, zero, torch.tensor([1.0, 9.0, -9.0, 2.0]), torch.tensor([3, 1, 2, 0]), clip_reward_value=None
    )
    assert free.tolist() == [[0, 0, 1], [9, 0, 0], [0, -9, 0], [0, 0, 0]]


def test_last_values() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert rl.last_values(values, torch.tensor([3, 1])).tolist() == [3, 4]
    assert rl.last_values(values, torch.tensor([2, 0])).tolist() == [2, 0]


def pair(ids: list[int], others: list[int], lengths: tuple[int, int]) -> float:
    chosen, rejected = torch.tensor([[0.2, 0.5, 1.0, 3.0]], dtype=F64), torch.tensor([[0.1, 0.7, -0.2, 1.0]], dtype=F64)
    ends = (torch.tensor([n]) for n in lengths)
    return rl.pairwise(chosen, rejected, torch.tensor([ids]), torch.tensor([others]), *ends).mean().item()


def test_pairs_count_from_their_first_difference() -> None:
    def mean(*x: float) -> float:
        return -torch.nn.functional.logsigmoid(torch.tensor(x, dtype=F64)).mean().item()

    assert abs(pair([1, 2, 3, 0], [4, 2, 3, 0], (3, 3)) - 0.568605959) < 5e-8  # DeepSpeed-Chat's, in float32
    assert pair([1, 2, 3, 9], [1, 4, 3, 9], (4, 3)) == mean(-0.2, 1.2, 2.0)
    assert pair([1, 2, 0, 0], [1, 2, 0, 0], (2, 3)) == mean(1.2)  # one begins with the other: padding is no token
    assert pair([1, 2, 3, 4], [1, 2, 3, 4], (3, 3)) == mean(1.2)  # without a difference: the last token
    assert pair([1, 2, 3, 4], [1, 2, 3, 5], (3, 3)) == mean(1.2)  # a difference in padding is not one


def test_the_gradient_of_pairs() -> None:
    ids, others = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[1, 4, 5], [1, 2, 4]])
    ends = torch.tensor([3, 3]), torch.tensor([2, 3])
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(2, 3, dtype=F64, generator=draw).requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(lambda c, r: rl.pairwise(c, r, ids, others, *ends).mean(), values)
