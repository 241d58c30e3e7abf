"""Log probabilities of tokens by the expression of draws: derivatives under all transforms, and mistakes."""

import pytest
import torch

from shardfn.inference import logprobs

DRAW = torch.Generator().manual_seed(0)
LOGITS, TOKENS = torch.randn(4, 3, 9, generator=DRAW), torch.randint(0, 9, (4, 3), generator=DRAW)
TANGENT, COTANGENT = torch.randn(4, 3, 9, generator=DRAW), torch.randn(4, 3, generator=DRAW)


def plain(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, TOKENS[..., None])[..., 0]


def exact(logits: torch.Tensor) -> torch.Tensor:
    return logprobs(logits, TOKENS)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_derivatives_are_those_of_log_softmax() -> None:
    torch.testing.assert_close(exact(LOGITS), plain(LOGITS))
    pairs = [torch.func.vjp(f, LOGITS)[1](COTANGENT)[0] for f in (exact, plain)]
    torch.testing.assert_close(*pairs)
    torch.testing.assert_close(*(torch.func.jvp(f, (LOGITS,), (TANGENT,))[1] for f in (exact, plain)))

    def of_gradient(f: object) -> torch.Tensor:
        x = LOGITS.clone().requires_grad_()
        (g,) = torch.autograd.grad((f(x) * COTANGENT).sum(), x, create_graph=True)  # pyright: ignore[reportCallIssue]
        return torch.autograd.grad((g * TANGENT).sum(), x)[0]

    torch.testing.assert_close(of_gradient(exact), of_gradient(plain))


def test_a_batch_of_no_tokens() -> None:
    assert logprobs(LOGITS[:0], TOKENS[:0]).shape == (0, 3)


@pytest.mark.parametrize("token", [-1, 9])
def test_tokens_outside_of_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"tokens are from {min(token, 0)} to .*there are 9 logits"):
        logprobs(LOGITS[0], torch.tensor([0, token, 1]))
