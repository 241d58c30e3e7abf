"""Draws of a step's rows, from logits to tokens: penalties, biases, forbidden tokens, then temperature and filters."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import kernels
from shardfn.core import save_inputs
from shardfn.memory import capturing

from ._plan import StepPlan
from ._requests import MOST_TOP
from ._tensors import StepTensors

Processor = Callable[[list[int], list[int], Tensor], Tensor]
Top = tuple[tuple[int, float], ...]  # tokens and their log probabilities, the most probable first


class LogitsEdit(NamedTuple):
    """Change of the logits of a single row.

    Attributes:
        row: number of the row.
        name: name of the request, for messages.
        processors: processors with their names, in order.
        prompt: tokens of the prompt.
        output: drawn tokens before the row's place.
    """

    row: int
    name: str
    processors: Sequence[tuple[str, Processor]]
    prompt: list[int]
    output: list[int]


def draw_tokens(logits_RV: Tensor, step: StepTensors, edited_RV: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns tokens of the rows, and their log probabilities under the raw logits.

    A row that scores a token has the most probable token, and the log probability of the scored one.

    Args:
        logits_RV: raw logits.
        step: tensors of the step.
        edited_RV: logits that tokens are drawn from, in place of the raw logits, for example after a processor.
    """
    given = widen_floats(logits_RV)
    changed = given if edited_RV is None else edited_RV
    if step.penalties is not None:
        changed = kernels.penalise(changed, **step.penalties)
    if step.biases is not None:
        changed = changed.scatter_add(1, step.biases.tokens, step.biases.values.to(changed.dtype))
    if step.allowed is not None:
        changed = torch.where(step.allowed, changed, -torch.inf)
    uniforms = kernels.draw_uniforms(step.keys, step.places)
    tokens, logprobs = kernels.draw(changed, uniforms, **step.draw, targets=step.targets)
    if changed is not given:  # log probabilities are those of the raw logits
        _, logprobs = kernels.draw(given, uniforms, **step.draw, targets=tokens)
    scored = (step.targets >= 0) & (tokens >= 0)  # a row without finite logits keeps its -1
    return torch.where(scored, given.argmax(-1), tokens), logprobs


def edit_logits(logits: Float[Tensor, "rows vocab"], edits: Sequence[LogitsEdit]) -> Float[Tensor, "rows vocab"]:
    """Returns logits in the dtype of draws, with the edits of some rows.

    Raises:
        ValueError: a processor returns another shape or dtype. The message names the processor and the request.

    Example:
        >>> f = lambda prompt, output, logits: logits + len(output)
        >>> edit_logits(torch.zeros(1, 3), [LogitsEdit(0, "a", [("f", f)], [5], [6, 7])])
        tensor([[2., 2., 2.]])
    """
    logits = widen_floats(logits).clone()
    for edit in edits:
        row = logits[edit.row].clone()
        for name, processor in edit.processors:
            found = processor(edit.prompt[:], edit.output[:], row)
            if not isinstance(found, Tensor) or (found.shape, found.dtype) != (row.shape, row.dtype):
                what = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(
                    f"logits processor {name!r} must return a tensor {tuple(row.shape)} of {row.dtype}, as it gets, got"
                    f" {what} for request {edit.name!r}."
                )
            row = found
        logits[edit.row] = row
    return logits


def find_top(logits_RV: Tensor, step: StepTensors) -> tuple[Tensor, ...]:
    """Returns the most probable tokens of the rows of an extended step, under the raw logits."""
    if step.biases is None:
        return ()
    return kernels.top_logprobs(widen_floats(logits_RV), min(MOST_TOP, logits_RV.shape[1]))


def read_tops(plan: StepPlan, top: tuple[Tensor, ...]) -> list[Top]:
    """Returns the most probable tokens that each row wants, without tokens that the model excludes."""
    if plan.histories is None or not any(one.top_logprobs for one in plan.sampling):
        return []
    rows = zip(plan.sampling, *(x[: plan.num_rows].tolist() for x in top), strict=True)
    return [
        tuple([pair for pair in zip(*found, strict=True) if pair[1] > -math.inf][: how.top_logprobs])
        for how, *found in rows
    ]


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
