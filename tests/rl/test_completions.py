"""Log probabilities and entropies of answers: rows of one width, by a forward of prompts and answers."""

import pytest
import torch

from shardfn import rl

DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 9, (3, 8), generator=DRAW)
LOGITS = torch.randn(3, 8, 9, generator=DRAW)
PROMPTS, LENGTHS = torch.tensor([1, 5, 3]), torch.tensor([4, 3, 0])
SPANS = rl.CompletionSpans(PROMPTS, LENGTHS, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_log_probabilities(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    found = rl.completion_logprobs(logits, IDS, SPANS)
    logs = logits.to(found.dtype).log_softmax(-1)
    for i in range(3):
        for j in range(5):
            at = int(PROMPTS[i]) + j
            wanted = logs[i, at - 1, IDS[i, at]].item() if j < LENGTHS[i] else 0.0
            assert abs(found[i, j].item() - wanted) < 1e-6
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_gradient_is_that_of_log_softmax_and_padding_adds_nothing() -> None:
    logits, weights = LOGITS.clone().requires_grad_(), torch.randn(3, 5, generator=DRAW)
    mask = rl.completion_mask(LENGTHS, 5)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return rl.completion_logprobs(x.double(), IDS, SPANS).float()

    found, wanted = (
        torch.autograd.grad((f(logits) * weights).sum(), logits)[0]
        for f in (lambda x: rl.completion_logprobs(x, IDS, SPANS), plain)
    )
    torch.testing.assert_close(found, wanted)
    assert int(found.ne(0).any(-1).sum()) == int(mask.sum())
    spoilt = IDS.masked_fill(torch.arange(8) >= (PROMPTS + LENGTHS)[:, None], -7)
    again = rl.completion_logprobs(LOGITS[:, :-1], spoilt, SPANS)
    assert torch.equal(again, rl.completion_logprobs(LOGITS, IDS, SPANS))


@pytest.mark.parametrize("places", [None, torch.tensor([[2, 4, 5, 7, 0], [5, 6, 7, 0, 0], [0, 0, 0, 0, 0]])])
def test_logits_at_positions_of_answers_have_the_same_bits(places: torch.Tensor | None) -> None:
    spans = SPANS._replace(places_BT=places)
    at = rl.completion_positions(IDS, spans)
    found = rl.logprobs_at(LOGITS.gather(1, at[..., None].expand(-1, -1, 9)), IDS, spans)
    assert torch.equal(found, rl.completion_logprobs(LOGITS, IDS, spans))


def test_logits_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits_BTV has shape \(3, 8, 9\); it must be \[B = 3, T = 5, V\]"):
        rl.logprobs_at(LOGITS, IDS, SPANS)


def test_entropies() -> None:
    found = rl.completion_entropies(LOGITS, SPANS)
    wanted = torch.distributions.Categorical(logits=LOGITS[1, 4:7]).entropy()
    torch.testing.assert_close(found[1, :3], wanted)
    assert found[1, 3:].eq(0).all() and found[2].eq(0).all()
    barred = LOGITS.clone()
    barred[..., 3:] = -torch.inf
    entropies = rl.completion_entropies(barred, SPANS)
    assert entropies.isfinite().all() and entropies.max() <= 1.1


def test_divergences() -> None:
    reference = torch.randn(3, 8, 9, generator=DRAW)
    found = rl.completion_divergences(LOGITS, reference, SPANS)
    p, q = (torch.distributions.Categorical(logits=x[1, 4:7]) for x in (LOGITS, reference))
    torch.testing.assert_close(found[1, :3], torch.distributions.kl_divergence(p, q))
    assert found[1, 3:].eq(0).all() and found[2].eq(0).all()
    barred = [x.clone() for x in (LOGITS, reference)]
    for x in barred:
        x[..., 3:] = -torch.inf
    assert rl.completion_divergences(*barred, SPANS).isfinite().all()  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"reference_BLV has shape \(3, 8, 8\); it must be \[B = 3, L = 8, V = 9\]"):
        rl.completion_divergences(LOGITS, reference[..., 1:], SPANS)


def test_values_are_those_before_each_token() -> None:
    values = torch.arange(24.0).view(3, 8)
    found = rl.completion_values(values, SPANS)
    assert found.tolist() == [[0, 1, 2, 3, 0], [12, 13, 14, 0, 0], [0] * 5]


def test_means_of_16_bits_count_exactly() -> None:
    ones, lengths = torch.ones(1, 257).bfloat16(), torch.tensor([257])
    for found in (rl.row_mean(ones[0]), rl.token_mean(ones, lengths)):
        assert [float(x) for x in found] == [257, 257]
