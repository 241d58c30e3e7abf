"""Covers mistakes with routers, capacities and balance losses."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.nn import moe
from shardfn.testing import distributed
from tests.mistakes import Mistake, cases, check, check_on_all_ranks

X, INDEX = torch.eye(6, 4), torch.arange(6)
LIE: Any = "probabilities"  # no option
ROUTING = moe.top_k(X, 2)

MISTAKES = [
    Mistake("more choices than experts", lambda: moe.top_k(X, 5),
            ValueError, "moe: k must be from 1 to 4", "got k=5"),
    Mistake("no choice", lambda: moe.sigmoid_groups(X, 0, name="layers.1"),
            ValueError, "layers.1: k must be from 1 to 4", "got k=0"),
    Mistake("an unknown softmax", lambda: moe.top_k(X, 2, softmax=LIE),
            ValueError, "softmax='probabilities'", '"before"'),
    Mistake("logits of sequences", lambda: moe.top_k(X.view(2, 3, 4), 2, name="layers.1"),
            ValueError, "token, got shape (2, 3, 4)", "logits.flatten(0, -2)"),
    Mistake("a mask of another batch", lambda: moe.top_k(X, 2, mask=torch.ones(2, 3, dtype=torch.bool)),
            ValueError, "moe: mask is torch.bool of shape (2, 3) for 6 tokens", "mask.flatten()"),
    Mistake("a choice of other experts", lambda: moe.top_k(X, 1, chosen=torch.tensor([[0], [1], [2], [3], [4], [5]])),
            ValueError, "moe: 2 numbers in chosen are not experts: there are 4", "a router of 4 experts"),
    Mistake("a choice of another k", lambda: moe.switch_top1(X, chosen=ROUTING.experts),
            ValueError, "chosen is torch.int64 of shape (6, 2), but 6 tokens with k=1", "int64 of shape (6, 1)"),
    Mistake("noise without numbers of tokens", lambda: moe.gshard_top2(X, key=sf.key(0)),
            ValueError, "moe: noise of a key needs the tokens' global numbers", "index=moe.token_numbers(index_B, T)"),
    Mistake("numbers of other tokens", lambda: moe.switch_top1(X, key=sf.key(0), index=INDEX[:4]),
            ValueError, "moe: index must have a number for each of 6 tokens", "got shape (4,)"),
    Mistake("a jitter of one", lambda: moe.jitter(sf.key(0), X, 1.0, INDEX),
            ValueError, "jitter: the rate must be in [0, 1)", "got rate=1.0"),
    Mistake("groups that do not divide", lambda: moe.sigmoid_groups(X, 2, groups=3),
            ValueError, "groups=3, groups_kept=1 for 4 experts", "choose a divisor"),
    Mistake("groups with too few experts", lambda: moe.sigmoid_groups(X, 3, groups=2),
            ValueError, "k=3 choices, but 1 of 2 groups have 2 of the 4 experts", "Keep more groups"),
    Mistake("a bias of other experts", lambda: moe.sigmoid_groups(X, 2, torch.zeros(3)),
            ValueError, "bias must have a number for each of 4 experts", "got shape (3,)"),
    Mistake("experts that take more than all", lambda: moe.expert_choice(X, 7),
            ValueError, "capacity=7 of 6 tokens", "choose a capacity in 1 .. 6"),
    Mistake("a capacity of nothing", lambda: moe.apply_capacity(ROUTING, 0),
            ValueError, "apply_capacity(capacity=0)", "one choice at least"),
    Mistake("an unknown order", lambda: moe.apply_capacity(ROUTING, 2, priority=LIE),
            ValueError, 'apply_capacity(priority="probabilities")', '"position", "choice", "probs" or "random"'),
    Mistake("a random order without a key", lambda: moe.apply_capacity(ROUTING, 2, priority="random"),
            ValueError, 'apply_capacity(priority="random", key=None)', "Pass key= and index="),
    Mistake("a key without effect", lambda: moe.apply_capacity(ROUTING, 2, key=sf.key(0), index=INDEX),
            ValueError, 'apply_capacity(priority="position", key=...)', "no key with another rule"),
    Mistake("a negative factor", lambda: moe.capacity(6, 2, 4, -1.0),
            ValueError, "capacity(num_tokens=6, k=2, num_experts=4, factor=-1.0", "a factor above 0"),
    Mistake("a balance of other tokens", lambda: moe.balance.switch(ROUTING, mask=torch.ones(5, dtype=torch.bool)),
            ValueError, "mask must have a bool for each of 6 tokens", "got shape (5,)"),
    Mistake("a balance of no sequences", lambda: moe.balance.sequence(ROUTING, 4),
            ValueError, "6 tokens are not those of num_sequences=4 sequences", "number of rows of the batch"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@distributed(world=2)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)


@pytest.mark.day("False")
@distributed(world=2)
@pytest.mark.parametrize("jit", [False, True])
def test_a_sum_refuses_an_expert_that_a_token_has_chosen_twice(jit: bool) -> None:
    # Each rank has one expert, and so one row for each token.
    chosen = torch.tensor([[0, 1], [1, 1], [0, -1]])

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        routing = moe.top_k(x, 2, chosen=chosen)
        return moe.apply(moe.gelu_experts, params, x, routing, exchange=moe.AllReduce("tp"), name="layers.3").sum()

    params = {"w_up": torch.ones(2, 3, 2), "w_down": torch.ones(2, 2, 3)}
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        wrapped = sf.jit(loss) if jit else loss
        step = sf.sharded_step(wrapped, sf.optim.sgd(0.1), mesh=mesh, specs=sf.P("tp"), batch=sf.P())
        with pytest.raises(ValueError, match=r"layers\.3: tokens have chosen an expert twice"):
            step(step.init(params), torch.eye(3, 2))


@pytest.mark.nightly
def test_a_captured_step_refuses_a_choice_of_other_experts() -> None:
    def loss(w: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return moe.top_k(w * X, 1, chosen=chosen).weights.sum()

    step = sf.sharded_step(sf.jit(loss), sf.optim.sgd(0.1), donate=False)
    chosen = torch.zeros(len(X), 1, dtype=torch.int64)
    state, _ = step(step.init(torch.tensor(1.0)), chosen)
    with pytest.raises(
        ValueError, match=r"some numbers in chosen are not experts: there are 4, .* a router of 4 experts"
    ):
        step(state, chosen + 4)
