"""The forms of a loss, and the result of one evaluation.

`loss(params, batch)` or `loss(params, batch, key)` returns a 0-d tensor; `(loss, aux)` with `has_aux=True`. The loss
itself may be a `WeightedMean` when ranks or microbatches hold unequal numbers of terms.
"""

import contextlib
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.capture import mark
from shardfn.collectives import AxisTypeError, current_axis_types
from shardfn.core import PyTree

from ._error_context import noting_leaves

Loss = Callable[..., Any]


class WeightedMean(NamedTuple):
    """Mean of unevenly spread terms: `sum(total) / sum(weight)` over microbatches and ranks.

    In the result of a loss the weight, for example a number of tokens, is a constant: a weight that requires a gradient
    is refused, since such a gradient needs the sums of all ranks. `step.loss` differentiates weights.

    Example:
        >>> WeightedMean(torch.tensor(6.0), torch.tensor(3)).mean()
        tensor(2.)
    """

    total: Tensor
    weight: Any

    def mean(self) -> Tensor:
        """Returns total / weight on only this rank."""
        return self.total / self.weight


class Value(NamedTuple):
    """Result of an evaluation: the tensor to differentiate, the weight (None: equal weights), and the aux values."""

    total: Tensor
    weight: Tensor | None
    aux: dict[str, WeightedMean]


def totals(values: Sequence[Value]) -> tuple[Tensor, Tensor | None]:
    """Returns the sums of microbatches' losses and, if there are any, of their weights."""
    total = torch.stack([v.total for v in values]).sum()
    weights = [v.weight for v in values if v.weight is not None]
    return total, torch.stack(weights).sum() if weights else None


class NoGradientError(ValueError):
    """Error of a loss through which no trainable leaf gets a gradient, on any rank."""

    def __init__(self, paths: Sequence[str]) -> None:
        shown = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
        super().__init__(
            "the loss has no gradient: no microbatch of any rank gives one to a trainable leaf (torch: element 0 of"
            f" tensors does not require grad). It is a constant, detached, made under no_grad, or uses none of {shown}"
            " (a module is called through them: apply(params, ...), not module(...))."
            " Compute it from the parameters that the loss is given, without detach(), item() or no_grad(); leaves that"
            " are to stay as they are take sharded_step(trainable=False), which may be a tree."
        )


@contextlib.contextmanager
def naming_used_up() -> Iterator[None]:
    """Explains, for the derivative of a loss, why the graph may be gone.

    Raises:
        ValueError: the cause of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise ValueError(
            "the graph of the loss is used up: the loss called backward() or autograd.grad() itself, or returned a"
            " tensor that an earlier step has made. Return the loss alone. The step differentiates it."
        ) from error


def evaluate(loss: Loss, params: PyTree, args: tuple[Any, ...], has_aux: bool) -> Value:
    """Calls the loss and checks the result. The weight and aux are constants.

    Raises:
        TypeError: the loss is not a tensor, or aux is not a dict of scalars.
        ValueError: the loss is not 0-d, or its weight requires a gradient.
    """
    value = called(loss, params, args, has_aux)
    refuse_gradient_of(value.weight)
    mark(value.total, "result", "the loss")
    for name, x in value.aux.items():
        mark(x.total, "result", f"aux[{name!r}]")
    aux = {k: WeightedMean(x.total.detach(), x.weight.detach()) for k, x in value.aux.items()}
    return Value(value.total, None if value.weight is None else value.weight.detach(), aux)


def refuse_gradient_of(weight: Tensor | None) -> None:
    """Refuses a weight that requires a gradient: the step's gradient would leave the weight out.

    Raises:
        ValueError: the weight requires a gradient. The message lists the remedies.
    """
    if weight is not None and weight.requires_grad:
        raise ValueError(
            "the weight of the loss's WeightedMean requires a gradient, which a step does not take: it needs the sums"
            " of all ranks. If the weight is meant as a constant, pass weight.detach(). If not, return a plain mean in"
            " which it is differentiated: total / weight on one device; n * total / sf.pvary(sf.psum(weight, 'dp'),"
            " 'dp') on n ranks that cut the batch along 'dp'."
        )


def refuse_negative(weight: Tensor | float | None) -> None:
    """Refuses a `WeightedMean` with a negative weight: the gradient would point the other way.

    A tensor on a device is read back, with a wait.

    Raises:
        ValueError: the weight is negative. The message explains weights.
    """
    if weight is not None and float(weight) < 0:
        raise ValueError(
            f"the weight of the loss's WeightedMean must be at least 0, got {float(weight):g}. The weight is the number"
            " of terms in the total, or the sum of the terms' weights. Return WeightedMean(total, weight), in this"
            " order."
        )


def called(loss: Loss, params: PyTree, args: tuple[Any, ...], has_aux: bool) -> Value:
    """Returns the result of the loss, checked, with the graph. See `evaluate`."""
    with noting_leaves(params, args[:1]):
        out = loss(params, *args)
    aux: Any = {}
    if has_aux:
        if not (isinstance(out, tuple) and len(out) == 2) or isinstance(out, WeightedMean):
            raise TypeError(
                f"with has_aux=True the loss must return (loss, aux), got {type(out).__name__}. Return a dict of the"
                " values that join the metrics beside it, or drop has_aux=True."
            )
        out, aux = out
    weight = None
    if isinstance(out, WeightedMean):
        if not isinstance(out.weight, Tensor):
            refuse_negative(out.weight)
        weight = torch.as_tensor(out.weight, device=out.total.device)
        out = out.total
    if isinstance(out, tuple):
        raise TypeError(f"the loss returned a tuple of {len(out)}. Did you mean has_aux=True?")
    if not isinstance(out, Tensor):
        raise TypeError(
            f"the loss must return a 0-d tensor or a WeightedMean, got {type(out).__name__}.{_loss_hint(out)}"
        )
    for name, x in (("loss", out), ("weight", weight)):
        if x is not None and x.shape != ():
            raise ValueError(f"the {name} must be a 0-d tensor, got shape {tuple(x.shape)}. Take its mean or sum.")
    out, weight = varying_along("the loss", out), None if weight is None else varying_along("the loss's weight", weight)
    if not out.is_floating_point():
        raise TypeError(
            f"the loss must be a floating-point tensor, got {out.dtype}. Counts have no gradient: return a mean"
            " computed from the parameters, and counts as aux."
        )
    return Value(out, weight, _check_aux(aux, out))


def varying_along(name: str, x: Tensor, axes: tuple[str, ...] = (), otherwise: str = "") -> Tensor:
    """Returns the result of a loss or a stage as a value that varies along the batch's axes and `axes`.

    Args:
        name: the value, in words.
        x: the value.
        axes: more axes along which the value may vary. A step averages a loss only over the batch's axes.
        otherwise: another remedy, at the end of the message.

    Raises:
        AxisTypeError: the value varies along other axes, so that ranks with the same rows return different values.
    """
    mode = current_axis_types(begin=False)
    if mode is None:
        return x
    rest = [a for a in mode.axes_of(x) if a not in (*mode.batch, *axes)]
    if rest:
        named = ", ".join(map(repr, rest))
        raise AxisTypeError(
            f"{name} varies along {named}{mode.origin(x)}, and must be the same on all ranks there, which have the"
            f" same rows. Sum the ranks' parts where they are complete, with sf.psum(x, {named}), before"
            " anything that is not linear. Use sf.all_gather_invariant where all ranks use the gathered values in the"
            f" same way, and no sf.pvary.{otherwise}"
        )
    return mode.cast(x, (*mode.batch, *axes))


def _loss_hint(out: Any) -> str:
    """Returns a remedy for a loss that is not a tensor."""
    if out is None:
        return " Is there a return at its end?"
    if isinstance(out, numbers.Number):
        return " A number has no gradient: leave out item(), float() and numpy()."
    if isinstance(out, list):
        return " Return one tensor: their sum, or their mean."
    if isinstance(getattr(out, "loss", None), Tensor) or (isinstance(out, Mapping) and "loss" in out):
        return " Return its loss: out.loss, or out['loss']."
    return ""


def _check_aux(aux: Any, like: Tensor) -> dict[str, WeightedMean]:
    if not isinstance(aux, dict):
        raise TypeError(f"aux must be a dict of scalars, which join the metrics, got {type(aux).__name__}.")
    out = {}
    for key, value in aux.items():
        name = f"aux[{key!r}]"
        pair = value if isinstance(value, WeightedMean) else WeightedMean(value, 1.0)
        if not isinstance(pair.total, Tensor | numbers.Number):
            raise TypeError(f"{name} must be a 0-d tensor, a number or a WeightedMean, got a {type(value).__name__}.")
        total = torch.as_tensor(pair.total, device=like.device)
        weight = torch.as_tensor(pair.weight, device=like.device)
        if total.shape != () or weight.shape != ():
            raise ValueError(f"{name} must be 0-d, got shape {tuple(total.shape)}. Reduce it inside the loss.")
        out[key] = WeightedMean(varying_along(name, total), varying_along(name, weight))
    return out
