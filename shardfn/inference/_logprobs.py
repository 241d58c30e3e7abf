"""Log probabilities of tokens by the expression of the engine's draws, with a derivative."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import kernels
from shardfn.core import save_inputs
from shardfn.memory import capturing


def logprobs(logits: Float[Tensor, "*batch vocab"], tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Returns the log probabilities of tokens, with the bits that an engine returns for these logits.

    The derivative is the derivative of `log_softmax`, whose values are within rounding.

    Args:
        logits: logits as from `gpt.apply` at the position before each token. 16-bit logits are widened to float32.
        tokens: ids.

    Raises:
        ValueError: a token is outside the vocabulary.

    Example:
        >>> logprobs(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor([-0.6931])
    """
    rows, targets = widen_floats(logits).flatten(0, -2), tokens.flatten().long()
    if tokens.numel() and not capturing() and not 0 <= int(targets.min()) <= int(targets.max()) < rows.shape[1]:
        raise ValueError(
            f"tokens are from {int(targets.min())} to {int(targets.max())}, and there are {rows.shape[1]} logits."
        )
    return _LogProbs.apply(rows, targets).view(tokens.shape)  # pyright: ignore[reportAttributeAccessIssue]


def widen_floats(logits: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Returns logits in the dtype in which an engine draws tokens: float32, or float64 of float64.

    Args:
        logits: logits of any floating-point dtype.

    Example:
        >>> widen_floats(torch.tensor([0.5], dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _LogProbs(torch.autograd.Function):
    """(x, token) -> log softmax(x)[token], a row each.

    backward  dx = g (1[token] - softmax(x))
    jvp       t[token] - sum of t softmax(x)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, tokens: Tensor) -> Tensor:
        none, one = x.new_zeros(len(x), dtype=torch.float64), x.new_ones(len(x), dtype=torch.float64)
        # A captured program refuses a token below 0 when it runs: the kernel draws at -1.
        targets = torch.where(tokens < 0, -2, tokens)
        how = {"temperature": none, "top_k": none.long(), "top_p": one, "min_p": none}
        return kernels.draw(x, none, **how, targets=targets)[1]

    setup_context = staticmethod(save_inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (g,), (x, tokens) = grad_outputs, ctx.saved_tensors
        return (-g[:, None] * x.softmax(-1)).scatter_add(-1, tokens[:, None], g[:, None]), None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (x, tokens), t = ctx.saved_tensors, grad_inputs[0]
        return t.gather(-1, tokens[:, None])[:, 0] - (t * x.softmax(-1)).sum(-1)
