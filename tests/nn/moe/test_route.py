"""Covers routers: published values, ties, padding, replay, gradients, noise and refusals."""

import pytest
import torch
from torch import Tensor

from shardfn.nn import moe

# Of transformers 5.24's own routers.
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
