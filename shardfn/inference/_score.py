"""Log probabilities of tokens by the expression of the engine's draws."""

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from shardfn import kernels


def logprobs(logits: Float[Tensor, "*batch vocab"], tokens: Int[Tensor, "*batch"]) -> Float32[Tensor, "*batch"]:
    """The log probabilities of tokens, with the bits that an engine returns for these logits; without a derivative.

    Those of `log_softmax`, which has one, are within its rounding.

    Args:
        logits: as from `gpt.apply` at the position before each token.
        tokens: ids.

    Raises:
        ValueError: a token is outside the vocabulary.

    Example:
        >>> logprobs(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor([-0.6931])
    """
    rows, num = logits.detach().float().flatten(0, -2), tokens.numel()
    none, one = torch.zeros(num, dtype=torch.float64), torch.ones(num, dtype=torch.float64)
    how = {"temperature": none, "top_k": none.long(), "top_p": one, "min_p": none}
    how = {name: x.to(rows.device) for name, x in how.items()}
    targets = tokens.flatten().long()
    if num and not 0 <= int(targets.min()) <= int(targets.max()) < rows.shape[1]:
        raise ValueError(
            f"tokens are from {int(targets.min())} to {int(targets.max())}, and there are {rows.shape[1]} logits."
        )
    _, found = kernels.draw(rows, none.to(rows.device), **how, targets=targets)
    return found.view(tokens.shape)
