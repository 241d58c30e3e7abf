"""Point to point: `ppermute`."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from shardfn.core import Axes, raise_all

from ._axis_group import axis_group_along
from ._call_sites import recording
from ._primitive import Call, bind, start


def ppermute(x: Shaped[Tensor, "..."], axis: Axes, perm: Sequence[tuple[int, int]]) -> Shaped[Tensor, "..."]:
    """Sends `x` from each source to a destination. A rank that receives nothing gets zeros: `V -> V`.

        NCCL: send / recv.  Slow spec: `out = zeros; out[dst] = blocks[src] for src, dst in perm`.

        [A] [B] [C]  =>  [0] [A] [B]        with perm = [(0, 1), (1, 2)]

    Transpose: `ppermute` with every pair reversed.

    When: a ring (such as attention over sequence blocks), a pipeline's hand-over, a halo.

    Args:
        x: of one shape on all ranks.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 have a single index 0: `[(0, 0)]`,
            the form of every ring there, is the identity, and `[]`, the form of every shift, gives zeros.
        perm: pairs (source, destination) of indices along `axis`. The same list on all ranks.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: unknown axis, an index out of range, or two pairs with one source or one destination.

    Example:
        >>> ppermute(torch.tensor([1, 2]), "pp", [(0, 0)])
        tensor([1, 2])
        >>> ppermute(torch.tensor([1, 2]), "pp", [])
        tensor([0, 0])
    """
    line = axis_group_along(axis)
    pairs = tuple((int(src), int(dst)) for src, dst in perm)
    _check_pairs(pairs, 1 if line is None else line.size)
    if line is not None:
        return bind(x, Call("ppermute", line, perm=pairs))
    # Not zeros_like: the result is a function of x, with gradient zero, on one rank as on many.
    return x if pairs else x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)


def ppermute_start(x: Shaped[Tensor, "..."], axis: Axes, perm: Sequence[tuple[int, int]]) -> Callable[[], Tensor]:
    """Starts a `ppermute` of a plain tensor that is not differentiated. The result waits for the transfer.

    In a capture the tensor is sent and waited for at once: the passes over the graph decide on overlap.

    Args:
        x: of one shape on all ranks, not to be written before the wait.
        axis: see `ppermute`.
        perm: see `ppermute`.

    Raises:
        ValueError: as `ppermute`.

    Example:
        >>> ppermute_start(torch.tensor([1, 2]), "pp", [(0, 0)])()
        tensor([1, 2])
    """
    line = axis_group_along(axis)
    if line is None or recording():
        here = ppermute(x, axis, perm)
        return lambda: here
    pairs = tuple((int(src), int(dst)) for src, dst in perm)
    _check_pairs(pairs, line.size)
    return start(x, Call("ppermute", line, perm=pairs))


def _check_pairs(pairs: tuple[tuple[int, int], ...], n: int) -> None:
    known = f"Use 0 to {n - 1}" if n > 1 else "A single rank has only index 0"
    problems = [f"{p}: an index is out of range. {known}" for p in pairs if not all(0 <= i < n for i in p)]
    for side, word in ((0, "source"), (1, "destination")):
        ends = [p[side] for p in pairs]
        problems += [f"{word} {i} must occur in one pair, got {ends.count(i)}" for i in set(ends) if ends.count(i) > 1]
    raise_all(ValueError, f"ppermute: perm={list(pairs)} is no permutation of {n} rank{'s' * (n > 1)}:", problems)
