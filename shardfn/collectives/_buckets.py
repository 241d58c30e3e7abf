"""Parts that compressed collectives share: checks before any message, and buckets under way while others start."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardfn._torch import forward_level, is_functorch_wrapped_tensor
from shardfn.core import PyTree, raise_all

# Elements of a single message: half a megabyte at one bit each.
BUCKET = 1 << 22


def buckets(leaves: Sequence[Any], size: int) -> list[list[Any]]:
    """Returns buckets of neighbours, each of `size` elements at most, without empty leaves."""
    out: list[list[Any]] = []
    room = 0
    for leaf in leaves:
        if leaf.cut.n == 0:
            continue
        if leaf.cut.n > room or not out:
            out.append([])
            room = size
        out[-1].append(leaf)
        room -= leaf.cut.n
    return out


def staggered(runs: Sequence[Iterator[None]]) -> None:
    """Runs each iterator to the end, a stage at a time.

    One more starts, then all started iterators go on, youngest first.

    So every message that can be sent is sent before any run waits only to receive.
    """
    # The order depends on the number of runs and on their stops, never on arrivals. So the order is equal on all ranks,
    # and messages need no names.
    under_way: collections.deque[Iterator[None]] = collections.deque()
    waiting = collections.deque(runs)
    while waiting or under_way:
        if waiting:
            under_way.append(waiting.popleft())
        for run in list(under_way)[::-1]:
            if next(run, under_way) is under_way:
                under_way.remove(run)


def padded(flat: Tensor, size: int) -> Tensor:
    """Returns `flat` with zeros behind."""
    return flat if flat.numel() == size else torch.nn.functional.pad(flat, (0, size - flat.numel()))


def check_leaves(op: str, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raises unless every leaf is a floating point tensor without a gradient."""
    bad = [f"{path} is {_describe_kind(x)}" for path, x in zip(paths, leaves, strict=True)
           if not (isinstance(x, Tensor) and x.is_floating_point())]  # fmt: skip
    raise_all(TypeError, f"{op} takes floating point tensors:", bad)
    bad = [f"{path} of shape {tuple(x.shape)}" for path, x in zip(paths, leaves, strict=True) if _is_followed(x)]
    raise_all(
        NotImplementedError,
        f"{op} is no linear function and has no derivative, nor is it mapped by vmap. Call it outside of torch.func and"
        " under torch.no_grad(), or pass x.detach(), for",
        bad,
    )


def _describe_kind(x: Any) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else repr(x)


def _is_followed(x: Tensor) -> bool:
    if is_functorch_wrapped_tensor(x) or (x.requires_grad and torch.is_grad_enabled()):
        return True
    return forward_level() >= 0 and forward_ad.unpack_dual(x).tangent is not None


def matched(op: str, treedef: Any, state: PyTree) -> list[Any]:
    """Returns the state of each leaf.

    Raises:
        ValueError: the state is of another tree.
    """
    try:
        return treedef.flatten_up_to(state)
    except ValueError as error:
        raise ValueError(
            f"{op}: the state must be of this tree's structure. Make it by compressed_init. {error}"
        ) from error


def misfit(op: str, ranks: int) -> str:
    """Returns the first line of an error that lists states of another size."""
    return (
        f"{op} over {ranks} rank{'s' * (ranks > 1)}: a state that does not fit. compressed_init makes one that does,"
        " and recut_residuals one for another number of ranks:"
    )
