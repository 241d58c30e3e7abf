"""Covers capacities: DeepSpeed's values, each order of choices by a slow reference, and ranks as one device."""

import itertools
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import key, normal
from shardfn.nn import moe
from shardfn.nn.moe._capacity import Priority
from shardfn.nn.moe._route import words_of
from shardfn.testing import distributed

SIX = torch.tensor([[2.0, 1, 0], [3, 0, 0], [0, 2, 1], [1, 0.5, 0], [0, 0, 4], [2, 2.5, 0]], dtype=torch.float64)


def dense(routing: moe.Routing) -> Tensor:
    """[S, E]: the weight of each expert."""
    zeros = torch.zeros_like(routing.probs)
    return zeros.scatter_add(1, routing.experts.clamp(min=0), routing.weights)


def close(got: Tensor, want: list[Any]) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), rtol=0, atol=1e-6)


def test_the_capacity_is_deepspeeds() -> None:
    assert moe.capacity(6, 1, 3, minimum=1) == 2
    assert moe.capacity(6, 2, 3, minimum=1) == moe.capacity(6, 1, 3) == 4
    assert moe.capacity(6, 2, 3, 0.5, 1) == 2
    assert moe.capacity(10, 1, 1, 1.1) == 11  # 10 * 1.1 is more than 11 in float64
    assert moe.capacity(7, 1, 2, 1.0, 0) == 4


def test_top_1_by_position() -> None:
    kept = moe.apply_capacity(moe.switch_top1(SIX), 2)
    assert kept.experts.flatten().tolist() == [0, 0, 1, -1, 2, 1]
    close(kept.weights[:, 0], [0.665241, 0.909443, 0.665241, 0, 0.964663, 0.592201])


def test_top_2_is_gshards() -> None:
    kept = moe.apply_capacity(moe.gshard_top2(SIX), 4, priority="choice", renormalise=True)
    want = [[0.731059, 0.268941, 0], [0.952574, 0.047426, 0], [0, 0.731059, 0.268941], [1, 0, 0]]
    close(dense(kept), [*want, [0.017986, 0, 0.982014], [0, 1, 0]])


def test_top_k_by_position_and_by_probabilities_is_deepspeeds() -> None:
    kept = moe.apply_capacity(moe.top_k(SIX, 2), 4, renormalise=True)
    want = [[0.731059, 0.268941, 0], [0.952574, 0.047426, 0], [0, 0.731059, 0.268941], [0.622459, 0.377541, 0]]
    close(dense(kept), [*want, [0.017986, 0, 0.982014], [0, 0, 0]])
    kept = moe.apply_capacity(moe.top_k(SIX, 2), 2, priority="probs", renormalise=True)
    close(dense(kept), [[1, 0, 0], [1, 0, 0], [0, 0.731059, 0.268941], [0, 0, 0], [0, 0, 1], [0, 1, 0]])


def slow(routing: moe.Routing, capacity: int, by: Priority, index: Tensor) -> Tensor:
    """The experts that stay, one expert after the other."""
    kept, K = torch.full_like(routing.experts, -1), routing.experts.shape[1]
    probs, words = routing.probs.gather(1, routing.experts.clamp(min=0)), words_of(key(5), index, routing.experts)
    orders: dict[str, Callable[[tuple[int, int]], float]] = {
        "position": lambda at: 0,
        "choice": lambda at: at[1],
        "probs": lambda at: -probs[at].item(),
        "random": lambda at: -words[at].item(),
    }
    for e in range(routing.num_experts):
        made = [(s, k) for s, k in itertools.product(range(len(kept)), range(K)) if routing.experts[s, k] == e]
        for at in sorted(made, key=orders[by])[:capacity]:
            kept[at] = e
    return kept


def routed(dtype: torch.dtype) -> tuple[moe.Routing, Tensor]:
    logits = normal(key(2), (24, 5), dtype=dtype)
    logits[::4] = logits[0].clone()  # ties
    return moe.top_k(logits, 3, mask=torch.arange(24) % 7 != 3), torch.arange(24) + 100


@pytest.mark.day(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("by", get_args(Priority))
def test_the_first_ones_of_each_order_stay(by: Priority, dtype: torch.dtype) -> None:
    routing, index = routed(dtype)
    drawn: dict[str, Any] = {"key": key(5), "index": index} if by == "random" else {}
    for capacity in (1, 5, 11, 100):
        kept = moe.apply_capacity(routing, capacity, priority=by, **drawn)
        assert torch.equal(kept.experts, slow(routing, capacity, by, index))
        assert torch.equal(kept.weights, torch.where(kept.experts >= 0, routing.weights, 0.0))


def test_a_capacity_of_a_number_of_tokens_that_is_data() -> None:
    routing, index = routed(torch.float64)
    for num, factor, minimum in ((0, 1.0, 1), (6, 0.5, 1), (10, 1.1, 4), (24, 1.25, 4)):
        C = moe.capacity(num, 3, 5, factor, minimum)
        found = moe.capacity(torch.tensor(num), 3, 5, factor, minimum)
        assert found == C
        assert torch.equal(moe.apply_capacity(routing, found).experts, slow(routing, C, "position", index))


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_experts_choose_among_the_tokens_of_all_ranks(world: int) -> None:
    cuts = [0, 5, 24] if world == 2 else [0, 0, 11, 24]  # unequal numbers of tokens
    mesh = sf.make_mesh({"dp": world})
    own, mask = slice(*cuts[mesh.coords["dp"] :][:2]), torch.arange(24) % 7 != 3
    for dtype, masked in itertools.product((torch.float64, torch.float32), (None, mask)):
        logits = normal(key(2), (24, 5), dtype=dtype)
        logits[::4] = logits[0].clone()  # ties
        for C in (1, 7, 21):
            x, y = (logits.clone().requires_grad_() for _ in range(2))
            want = moe.expert_choice(x, C, mask=masked)
            with sf.collectives.bind_mesh(mesh):
                got = moe.expert_choice(y[own], C, axes="dp", mask=None if masked is None else masked[own])
            assert torch.equal(got.experts, want.experts[own])
            assert torch.equal(got.weights, want.weights[own])
            want.weights[own].square().sum().backward()
            got.weights.square().sum().backward()
            assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


@distributed(world=[2, pytest.param(3, marks=pytest.mark.nightly)])
def test_the_capacity_of_the_batch_is_that_of_one_device(world: int) -> None:
    routing, index = routed(torch.float64)
    cuts = [0, 5, 24] if world == 2 else [0, 0, 11, 24]  # unequal numbers of tokens
    mesh = sf.make_mesh({"dp": world})
    own = slice(*cuts[mesh.coords["dp"] :][:2])

    for by in get_args(Priority):
        drawn: dict[str, Any] = {"key": key(5), "index": index} if by == "random" else {"key": None, "index": None}
        whole = moe.apply_capacity(routing, 7, priority=by, **drawn)
        mine, drawn = moe.Routing(*(x[own] for x in routing)), drawn | {"index": index[own] if by == "random" else None}
        with sf.collectives.bind_mesh(mesh):
            kept = moe.apply_capacity(mine, 7, priority=by, axes="dp", **drawn)
        assert torch.equal(kept.experts, whole.experts[own])
        assert torch.equal(kept.weights, whole.weights[own])


def test_renormalised_weights_keep_their_sum_and_have_gradients() -> None:
    x = normal(key(4), (6, 3), dtype=torch.float64).requires_grad_()

    def weights(x: Tensor) -> Tensor:
        routing = moe.sigmoid_groups(x, 2, scale=2.5)
        kept = moe.apply_capacity(routing, 3, renormalise=True)
        some = (kept.experts >= 0).any(-1)
        torch.testing.assert_close(kept.weights.sum(-1), torch.where(some, 2.5, 0.0).to(x.dtype))
        return kept.weights

    assert torch.autograd.gradcheck(weights, (x,))
