"""Covers routers: published values, ties, padding, replay, gradients, noise and refusals."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardfn.core import key, normal
from shardfn.nn import moe
from shardfn.nn.moe import _capacity, _routing

# The values are those of the routers in transformers 5.24.
FOUR = [[2.0, 1, 0, -1], [3, 0, 0, 0.5], [0, 2, 1, -2], [1, 0.5, 0, 2]]
MIXTRAL = [[0.731059, 0.268941], [0.924142, 0.075858], [0.731059, 0.268941], [0.731059, 0.268941]]


def close(got: Tensor, want: object) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_top_k_is_mixtrals(dtype: torch.dtype) -> None:
    routing = moe.top_k(torch.tensor(FOUR, dtype=dtype), 2)
    assert routing.experts.tolist() == [[0, 1], [0, 3], [1, 2], [3, 0]]
    assert routing.weights.dtype == routing.probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(routing.weights, MIXTRAL)
    assert routing.counts().tolist() == [3, 2, 1, 2]


def test_top_k_without_renormalisation() -> None:
    want = [[0.643914, 0.236883], [0.846268, 0.069466], [0.657233, 0.241782], [0.579259, 0.213097]]
    close(moe.top_k(torch.tensor(FOUR), 2, renormalise=False).weights, want)
    close(moe.top_k(torch.tensor(FOUR), 2, renormalise=False, scale=2.0).weights, 2 * torch.tensor(want))


def test_a_softmax_after_the_choice_is_a_renormalised_one() -> None:
    close(moe.top_k(torch.tensor(FOUR), 2, softmax="after", renormalise=False).weights, MIXTRAL)


@pytest.mark.parametrize("k", [1, 3, 20])
def test_the_lower_index_wins_a_tie(k: int) -> None:
    assert moe.top_k(torch.zeros(5, 20), k).experts.tolist() == [list(range(k))] * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_experts", [1, 5, 64])
def test_the_order_is_that_of_a_stable_sort(dtype: torch.dtype, num_experts: int) -> None:
    scores = torch.randn(300, num_experts, dtype=dtype, generator=torch.Generator().manual_seed(0)).round()
    scores[::5, num_experts // 2 + 1 :] = -torch.inf
    order = scores.sort(stable=True, dim=-1, descending=True).indices
    for k in {1, 2, 3, num_experts // 2, num_experts // 2 + 1} & set(range(1, num_experts + 1)):
        assert torch.equal(_routing.best(scores, k), order[:, :k])
        assert torch.equal(torch.func.vmap(lambda row, k=k: _routing.best(row, k))(scores), order[:, :k])


def by_expert(routing: moe.Routing) -> tuple[list[list[int]], Tensor]:
    """Experts in the order of their numbers, and their weights."""
    experts, order = routing.experts.sort(-1)
    return experts.tolist(), routing.weights.gather(-1, order)


BIAS = torch.tensor([0, 0.3, 0, -0.1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sigmoid_groups_is_deepseeks(dtype: torch.dtype) -> None:
    logits = torch.tensor(FOUR, dtype=dtype)
    routing = moe.sigmoid_groups(logits, 2, BIAS, scale=2.5)
    experts, weights = by_expert(routing)
    assert experts == [[0, 1], [0, 1], [1, 2], [1, 3]]
    close(weights, [[1.366123, 1.133877], [1.639459, 0.860541], [1.366123, 1.133877], [1.035185, 1.464815]])
    assert routing.counts().tolist() == [2, 4, 1, 1]
    assert moe.bias_update(torch.zeros(4), routing.counts(), 1.0).tolist() == [0, -1, 1, 1]
    experts, weights = by_expert(moe.sigmoid_groups(logits, 2, BIAS, groups=2, groups_kept=1, scale=2.5))
    assert experts == [[0, 1]] * 4
    close(weights[2:], [[0.905274, 1.594726], [1.350293, 1.149706]])


def test_a_bias_changes_choices_alone_and_has_no_gradient() -> None:
    bias = BIAS.clone().requires_grad_()
    routing = moe.sigmoid_groups(torch.tensor(FOUR, requires_grad=True), 2, bias, renormalise=False)
    routing.weights.sum().backward()
    assert bias.grad is None
    close(routing.weights, routing.probs.gather(1, routing.experts))


def test_groups_are_compared_by_their_two_best() -> None:
    logits = torch.tensor([[3.0, -9, -9, 1, 1, 1], [1, 1, 1, 2, -9, -9]])
    assert moe.sigmoid_groups(logits, 3, groups=2).experts.tolist() == [[3, 4, 5], [0, 1, 2]]


def test_the_lower_group_wins_a_tie() -> None:
    assert moe.sigmoid_groups(torch.zeros(2, 8), 2, groups=4, groups_kept=2).experts.tolist() == [[0, 1]] * 2


SIX = [[2.0, 1, 0], [3, 0, 0], [0, 2, 1], [1, 0.5, 0], [0, 0, 4], [2, 2.5, 0]]


def test_switch_and_gshard_are_deepspeeds() -> None:
    logits = torch.tensor(SIX, dtype=torch.float64)
    first = moe.switch_top1(logits)
    assert first.counts().tolist() == [3, 2, 1]
    close(first.weights[1:, 0], [0.909443, 0.665241, 0.506480, 0.964663, 0.592201])
    both = moe.gshard_top2(logits)
    assert both.counts().tolist() == [5, 5, 2]
    close(
        both.weights[[0, 1, 2, 4]],
        [[0.731059, 0.268941], [0.952574, 0.047426], [0.731059, 0.268941], [0.982014, 0.017986]],
    )
    for routing in (first, both):
        close(moe.balance.gshard(routing), 1.0807015)
    close(moe.balance.switch(moe.top_k(logits, 2)), 1.0525455)


def test_noise_belongs_to_the_token() -> None:
    logits, index = torch.zeros(64, 5), torch.arange(64) * 3 + (1 << 33)
    for router in (moe.switch_top1, moe.gshard_top2):
        whole = router(logits, key=key(1), index=index)
        part = router(logits[20:31], key=key(1), index=index[20:31])
        assert torch.equal(whole.experts[20:31], part.experts)
        assert not torch.equal(whole.experts, router(logits, key=key(2), index=index).experts)


def test_experts_are_drawn_with_their_probabilities() -> None:
    row = torch.tensor([2.0, 0, 1, -1])
    logits, index = row.expand(20_000, 4), torch.arange(20_000)
    found = moe.switch_top1(logits, key=key(0), index=index)
    torch.testing.assert_close(found.counts() / 20_000, row.softmax(0), rtol=0, atol=0.015)
    close(found.weights[:, 0], found.probs.gather(1, found.experts)[:, 0])  # those without noise
    second = moe.gshard_top2(logits, key=key(0), index=index)
    assert second.experts[:, 0].eq(0).all()
    torch.testing.assert_close(second.counts()[1:] / 20_000, row[1:].softmax(0), rtol=0, atol=0.015)


def test_jitter_stays_within_its_rate() -> None:
    x = moe.jitter(key(0), torch.ones(100, 30, dtype=torch.float64), 0.25, torch.arange(100))
    assert 0.75 <= x.min() < 0.76 < 1.24 < x.max() < 1.25
    assert abs(x.mean() - 1) < 0.01


ROUTERS: dict[str, Callable[..., moe.Routing]] = {
    "mixtral": lambda x, **kwargs: moe.top_k(x, 2, **kwargs),
    "after": lambda x, **kwargs: moe.top_k(x, 2, softmax="after", scale=0.5, **kwargs),
    "plain": lambda x, **kwargs: moe.top_k(x, 2, renormalise=False, **kwargs),
    "switch": moe.switch_top1,
    "gshard": moe.gshard_top2,
    "deepseek": lambda x, **kwargs: moe.sigmoid_groups(x, 2, groups=2, groups_kept=1, scale=2.5, **kwargs),
    "sinkhorn": lambda x, **kwargs: moe.sinkhorn(x, 2, **kwargs),
    "expert_choice": lambda x, **kwargs: moe.expert_choice(x, 3, **kwargs),
}
REPLAYED = [name for name in ROUTERS if name != "expert_choice"]


def drawn(rows: int) -> Tensor:
    return normal(key(rows), (rows, 4), dtype=torch.float64)


@pytest.mark.day(4)
@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_are_finite_differences(name: str) -> None:
    x = drawn(7).requires_grad_()
    mask = torch.arange(7) != 3

    def weights(x: Tensor) -> Tensor:
        return ROUTERS[name](x, mask=mask).weights

    assert torch.autograd.gradcheck(weights, (x,))


@pytest.mark.parametrize("name", ROUTERS)
def test_padding_gets_no_expert_and_changes_nothing(name: str) -> None:
    x, mask = drawn(7), torch.arange(7) % 3 != 0
    x[3] = torch.nan
    x.requires_grad_()
    routing = ROUTERS[name](x, mask=mask)
    assert routing.experts[~mask].eq(-1).all()
    assert routing.weights[~mask].eq(0).all()
    short = ROUTERS[name](x.detach()[mask])
    assert torch.equal(routing.experts[mask], short.experts)
    torch.testing.assert_close(routing.weights[mask], short.weights, rtol=1e-14, atol=1e-14)
    assert torch.equal(routing.counts(), short.counts())
    (grad,) = torch.autograd.grad(routing.weights.square().sum(), x)
    assert grad[~mask].eq(0).all()


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replayed_choice_keeps_weights_and_gradients(name: str) -> None:
    x = drawn(6).requires_grad_()
    first = ROUTERS[name](x)
    again = ROUTERS[name](x, chosen=first.experts)
    assert torch.equal(first.weights, again.weights)
    a, b = (torch.autograd.grad(r.weights.square().sum(), x)[0] for r in (first, again))
    assert torch.equal(a, b)
    other = torch.full_like(first.experts, 3)
    other[0] = -1
    replayed = ROUTERS[name](x, chosen=other)
    assert torch.equal(replayed.experts, other)
    assert replayed.weights[0].eq(0).all()
    assert torch.autograd.grad(replayed.probs.sum() + replayed.weights.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("name", ROUTERS)
def test_16_bit_logits_are_computed_with_in_float32(name: str) -> None:
    x = drawn(7).bfloat16()
    narrow, wide = ROUTERS[name](x), ROUTERS[name](x.float())
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_no_token(name: str) -> None:
    if name != "expert_choice":
        assert ROUTERS[name](drawn(0)).counts().tolist() == [0] * 4


def test_each_expert_takes_its_best_tokens() -> None:
    x = drawn(9)
    routing = moe.expert_choice(x, 4)
    assert routing.counts().tolist() == [4] * 4
    for e in range(4):
        best = x.softmax(-1)[:, e].topk(4).indices
        assert set(best.tolist()) == set((routing.experts[:, e] == e).nonzero().flatten().tolist())


def test_sinkhorn_balances_its_scores() -> None:
    x = drawn(12) + torch.tensor([4.0, 0, 0, -4])
    assert moe.sinkhorn(x, iterations=0).counts().max() >= 11
    shifts = _capacity._compute_shifts(x, 100, None, None)
    close((x + shifts).softmax(-1).mean(0), [0.25] * 4)
    assert moe.sinkhorn(x, iterations=100).counts().max() <= 6


def test_a_router_is_differentiable_by_function_transforms() -> None:
    x = drawn(5)
    found = torch.func.grad(lambda x: moe.top_k(x, 2, renormalise=False).weights.square().sum())(x)
    own = x.clone().requires_grad_()
    moe.top_k(own, 2, renormalise=False).weights.square().sum().backward()
    torch.testing.assert_close(found, own.grad)


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_in_a_batch_of_models(name: str) -> None:
    x = normal(key(1), (3, 6, 4), dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        routing = ROUTERS[name](x)
        kept = moe.apply_capacity(routing, 2)
        return kept.weights.square().sum() + moe.balance.switch(routing)

    found = torch.func.vmap(torch.func.grad(loss))(x)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(loss)(part) for part in x]))


def test_vmap_replays_a_choice_for_each_batch() -> None:
    logits, chosen = torch.randn(3, 4, 5), torch.arange(24).view(3, 4, 2) % 5
    found = torch.func.vmap(lambda x, c: moe.top_k(x, 2, chosen=c).weights)(logits, chosen)
    assert torch.equal(
        found, torch.stack([moe.top_k(x, 2, chosen=c).weights for x, c in zip(logits, chosen, strict=True)])
    )
