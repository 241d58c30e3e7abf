"""Values that a recomputation must repeat, such as the experts that tokens have chosen."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.fx.node import has_side_effect

from ._ambient import Ambient

Sees = Callable[[Tensor, str], None]
_SEEING = Ambient[Sees]("sees values that a recomputation must repeat", by_thread=True)


class FirstRun:
    """Values of a function's first run that later runs must repeat.

    Example:
        >>> run = FirstRun()
        >>> with run.noted():
        ...     check_recompute(torch.tensor([1, 2]), "blocks.0: choices")
        >>> with run.repeated():
        ...     check_recompute(torch.tensor([1, 2]), "blocks.0: choices")
    """

    def __init__(self) -> None:
        self._values: list[Tensor] = []

    def noted(self) -> AbstractContextManager[Any]:
        """Notes values while the function runs for the first time."""
        return _SEEING.bound(lambda x, name: self._values.append(x))

    def repeated(self) -> AbstractContextManager[Any]:
        """Compares values while the function runs again. A difference is a RuntimeError."""
        before = iter(self._values)
        return _SEEING.bound(lambda x, name: _compare_values(next(before, None), x, name))


def check_recompute(x: Shaped[Tensor, "..."], name: str) -> None:
    """Requires that a recomputation of the functions around has the same `x` here, without a gradient.

    The functions are under `remat`, or under `torch.utils.checkpoint` on a mesh or in a step (activation
    checkpointing).

    Args:
        x: values to compare, in a capture by an operation of the graph.
        name: beginning of the error of a difference.

    Example:
        >>> check_recompute(torch.ones(2), "mask")  # no function around is recomputed
    """
    for sees in _SEEING.all if _SEEING else ():
        sees(x.detach(), name)


def _compare_values(before: Tensor | None, x: Tensor, name: str) -> None:
    if before is None or before.shape != x.shape:
        raise RuntimeError(_difference_text(name, ""))
    torch.ops.shardfn.check_recompute(before, x, name)


def _difference_text(name: str, places: str) -> str:
    return (
        f"{name} differ{places} between the forward and its recomputation, whose gradients would be those of another"
        " function. Draw by keys, and use nothing that changes in between."
    )


# One operation without a result: a policy by the operations of a forward does not count the comparison.
_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")
_LIBRARY.define("check_recompute(Tensor before, Tensor x, str name) -> ()")


def _compare_recompute(before: Tensor, x: Tensor, name: str) -> None:
    """Raises RuntimeError if values differ. On a GPU the program ends later, without a wait."""
    if x.is_cuda:
        torch._assert_async((before == x).all(), _difference_text(name, ""))
    elif not torch.equal(before, x):
        raise RuntimeError(_difference_text(name, f" in {int((before != x).sum())} of {x.numel()} places"))


_LIBRARY.impl("check_recompute", _compare_recompute, "CompositeExplicitAutograd")


@torch.library.register_fake("shardfn::check_recompute", lib=_LIBRARY)
def _(before: Tensor, x: Tensor, name: str) -> None:
    del before, x, name


# The result has no use, so that dead code would be removed.
has_side_effect(torch.ops.shardfn.check_recompute.default)
