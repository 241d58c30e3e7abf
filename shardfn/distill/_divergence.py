"""Divergences of a student's distribution of the next token from a frozen teacher's.

p_S, p_T = softmax(logits / t). B batch, T tokens, V vocabulary.

    forward     KL(p_T, p_S)                   the student covers all tokens of the teacher
    reverse     KL(p_S, p_T)                   the student keeps to tokens of the teacher
    jensen      beta KL(p_T, m) + (1 - beta) KL(p_S, m), with m = beta p_T + (1 - beta) p_S

Hinton et al., Distilling the Knowledge in a Neural Network, 2015, https://arxiv.org/abs/1503.02531
Agarwal et al., On-Policy Distillation of Language Models, 2023, https://arxiv.org/abs/2306.13649 (GKD)
"""

import math
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn.collectives import axis_size, pmax, psum
from shardfn.core import Axes, explains_keywords, raise_all
from shardfn.engine import WeightedMean
from shardfn.nn import rank_range

Direction = Literal["forward", "reverse", "jensen"]

# No probability of float64 is below exp(-745), so such a bound of a log probability changes no divergence.
_LEAST = -1e4


@explains_keywords(
    alpha="beta={value!r}",
    T="temperature={value!r}",
    labels="targets_BT=",
    reduction="nothing: the result is a WeightedMean over the tokens of all ranks",
)
def logits(
    student_BTV: Float[Tensor, "b t v"],
    teacher_BTV: Float[Tensor, "b t v"],
    targets_BT: Int64[Tensor, "b t"] | None = None,
    *,
    direction: Direction = "forward",
    temperature: float = 1.0,
    beta: float | None = None,
    ignore_index: int = -100,
    axis: Axes = None,
    vocab_size: int | None = None,
) -> WeightedMean:
    """Returns the mean over tokens of a divergence of two distributions, times the temperature's square.

    The square keeps the size of gradients: logits divided by t have gradients that are smaller by t twice. TRL leaves
    the square out, and its `beta` of 0 and 1 are "forward" and "reverse".

    Args:
        student_BTV: logits of the student. Divergences of 16-bit logits are computed in float32. With `axis`, the
            rank's classes.
        teacher_BTV: logits of the teacher, without a gradient.
        targets_BT: targets of the language model's loss: tokens with `ignore_index` do not count. None counts all.
        direction: "forward", "reverse" or "jensen", as above.
        temperature: t. Above 1, more of the teacher's less likely tokens count.
        beta: weight of the teacher in "jensen", above 0 and below 1. None is 0.5.
        ignore_index: target without a loss, such as padding.
        axis: mesh axes along which V is cut: five numbers a token cross the mesh. None means a single device.
        vocab_size: V, needed where the axis has several ranks.

    Returns:
        The sum over the counted tokens and their number, both of the dtype of the sum.

    Raises:
        ValueError: logits of other tokens or of another vocabulary than the student's, a teacher that gets a gradient,
            an unknown direction, or a temperature or `beta` out of range.

    Example:
        >>> student, teacher = torch.zeros(1, 2, 4), torch.tensor([[[0.0, 0, 0, 2], [0, 0, 0, 0]]])
        >>> logits(student, teacher).mean()
        tensor(0.2340)
        >>> logits(student, teacher, torch.tensor([[-100, 3]])).mean()
        tensor(0.)
    """
    beta = _check_settings(direction, temperature, beta)
    _check_pair(student_BTV, teacher_BTV, targets_BT)
    if axis_size(axis) > 1:
        _check_block(student_BTV.shape[-1], axis, vocab_size)
    log_s, log_t = _log_softmaxes(student_BTV, teacher_BTV, temperature, axis)
    match direction:
        case "forward":
            value_BTV = _divergence(log_t, log_s)
        case "reverse":
            value_BTV = _divergence(log_s, log_t)
        case "jensen":
            log_s, log_t = log_s.clamp(min=_LEAST), log_t.clamp(min=_LEAST)
            log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
            value_BTV = beta * _divergence(log_t, log_m) + (1 - beta) * _divergence(log_s, log_m)
    value_BT = psum(value_BTV.sum(-1), axis) * temperature**2
    if targets_BT is None:
        return WeightedMean(value_BT.sum(), value_BT.new_full((), value_BT.numel()))
    counts_BT = targets_BT != ignore_index
    return WeightedMean(value_BT.masked_fill(~counts_BT, 0.0).sum(), counts_BT.sum().to(value_BT.dtype))


def check_frozen(who: str, **named: Tensor) -> None:
    """Refuses tensors of a teacher that get a gradient.

    Raises:
        ValueError: names the arguments, and the remedy.
    """
    raise_all(
        ValueError,
        f"{who}: a teacher is frozen:",
        [
            f"{name} requires a gradient. Pass sharded_step(trainable={{'student': True, 'teacher': False}}), or"
            " compute it under torch.no_grad()"
            for name, x in named.items()
            if x.requires_grad
        ],
    )


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Returns p (log p - log q), which is 0 where p is 0, also where both logits are -inf."""
    p = log_p.exp()
    return p * torch.where(p > 0, log_p - log_q, 0.0)


def _log_softmaxes(student: Tensor, teacher: Tensor, temperature: float, axis: Axes) -> tuple[Tensor, Tensor]:
    pair = [x.to(torch.promote_types(x.dtype, torch.float32)) / temperature for x in (student, teacher)]
    if axis_size(axis) == 1:
        log_s, log_t = (x.log_softmax(-1) for x in pair)
        return log_s, log_t
    own = torch.stack([x.logsumexp(-1) for x in pair])
    top = pmax(own.detach(), axis)  # a shift without an effect on the result
    lse = psum((own - top).exp(), axis).log() + top
    log_s, log_t = (x - of[..., None] for x, of in zip(pair, lse.unbind(), strict=True))
    return log_s, log_t


def _check_settings(direction: str, temperature: float, beta: float | None) -> float:
    """Returns the weight of the teacher in the mixture."""
    problems = []
    if direction not in get_args(Direction):
        problems.append(f"direction must be one of {', '.join(map(repr, get_args(Direction)))}, got {direction!r}")
    if not 0 < temperature < math.inf:
        problems.append(
            f"temperature must be above 0 and finite, got {temperature}. For the limit of 0 take the cross entropy"
            " with teacher_BTV.argmax(-1) as targets"
        )
    if beta is not None and direction != "jensen":
        problems.append(f'beta={beta} has an effect only on direction="jensen", got {direction!r}. Leave it out')
    elif beta is not None and not 0 < beta < 1:
        problems.append(f'beta must be above 0 and below 1, got {beta}. The ends are "forward" (0) and "reverse" (1)')
    raise_all(ValueError, "distill.logits:", problems)
    return 0.5 if beta is None else beta


def _check_block(classes: int, axis: Axes, vocab_size: int | None) -> None:
    if vocab_size is None:
        raise ValueError(
            f"distill.logits(axis={axis!r}) needs vocab_size, the number of all classes, got only the {classes}"
            " classes of this rank."
        )
    start, stop = rank_range(vocab_size, axis)
    if classes != stop - start:
        raise ValueError(
            f"distill.logits(axis={axis!r}, vocab_size={vocab_size}) must get the classes {start} to {stop} of this"
            f" rank, got {classes} classes. Pass this rank's block of the logits, as apply(axis={axis!r}) returns it."
        )


def _check_pair(student: Tensor, teacher: Tensor, targets: Any) -> None:
    if student.shape[-1] != teacher.shape[-1]:
        raise ValueError(
            f"distill.logits: the student has {student.shape[-1]} classes and the teacher {teacher.shape[-1]}, with"
            f" shapes {tuple(student.shape)} and {tuple(teacher.shape)}. Both must have the same vocabulary:"
            " rl.check_tokenizers compares tokenizers, and teacher[..., :V] cuts off the padding of the larger table."
        )
    if student.shape != teacher.shape or (targets is not None and targets.shape != student.shape[:-1]):
        raise ValueError(
            f"distill.logits: logits of shapes {tuple(student.shape)} and {tuple(teacher.shape)}, and targets"
            f" {None if targets is None else tuple(targets.shape)}. Each token must have both logits and a target."
        )
    check_frozen("distill.logits", teacher_BTV=teacher)
