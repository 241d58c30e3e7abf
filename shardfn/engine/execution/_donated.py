"""`Donated`: an entry of `out_specs` for a result that takes the place of a donated argument."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import raise_all

from ._argument import Argument


@dataclasses.dataclass(frozen=True)
class Donated:
    """An entry of `out_specs`: the result takes the place of a donated argument, leaf by leaf.

    It has the shapes, specs and memory kinds of that argument, so ranks exchange no shapes, and a cache on the host or
    on disk returns there. Use a `P` where the function returns blocks of another shape.

    Args:
        argument: its position, as in `donate`; the first argument is 0.

    Example:
        >>> import torch
        >>> from shardfn import P, sharded
        >>> from shardfn.collectives import GlobalTensor
        >>> push = sharded(lambda w, cache: cache.add_(w), in_specs=(P(),), out_specs=Donated(1), donate=1)
        >>> cache = GlobalTensor(torch.zeros(2), torch.Size([2]), P(), push.mesh, "host")
        >>> cache = push(push.init(torch.tensor(3.0)), cache)
        >>> cache.full_tensor(), cache.memory_kind
        (tensor([3., 3.]), 'host')
    """

    argument: int


def check_donated(entries: Sequence[Any], donate: Sequence[int]) -> None:
    """Refuses entries of `out_specs` whose argument is not donated, or has a successor already.

    Raises:
        ValueError: names them.
    """
    named = collections.Counter(x.argument for x in entries if isinstance(x, Donated))
    problems = [f"Donated({k}), but donate={tuple(donate)}; add {k} to donate=" for k in named if k not in donate]
    problems += [f"Donated({k}) {n} times; name an argument once" for k, n in named.items() if n > 1]
    raise_all(ValueError, "out_specs has results in the place of arguments:", problems)


def owners_of(
    entries: Sequence[Any], paths: Sequence[str], leaves: Sequence[Any], arguments: Sequence[Argument]
) -> list[Argument | None]:
    """For each leaf of a result, the leaf of an argument whose place it takes.

    Args:
        entries: for each leaf, its entry of `out_specs`.
        paths: those of the leaves.
        leaves: the result.
        arguments: the leaves of the arguments.

    Raises:
        ValueError: result and argument have other leaves, or leaves of other shapes or dtypes; lists them.
    """
    of = {k: [a for a in arguments if a.position == k] for k in {x.argument for x in entries if isinstance(x, Donated)}}
    counts = collections.Counter(x.argument for x in entries if isinstance(x, Donated))
    uneven = {k: len(own) for k, own in of.items() if counts[k] != len(own)}
    lines = [f"Donated({k}) covers {counts[k]}, and args[{k}] has {n}; return its tree" for k, n in uneven.items()]
    raise_all(ValueError, "out_specs has results in the place of arguments, with other numbers of leaves:", lines)
    rest = {k: iter(own) for k, own in of.items()}
    owners = [next(rest[x.argument]) if isinstance(x, Donated) else None for x in entries]
    named = zip(paths, leaves, owners, strict=True)
    head = "results in the place of arguments must have their shapes and dtypes:"
    raise_all(ValueError, head, [_unlike(path, x, a) for path, x, a in named if a is not None and _differs(x, a)])
    return owners


def _differs(x: Any, a: Argument) -> bool:
    return not isinstance(x, Tensor) or (x.shape, x.dtype) != (a.given.held.shape, a.given.dtype)


def _unlike(path: str, x: Any, a: Argument) -> str:
    found = f"a block {tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
    given: GlobalTensor = a.given
    wanted = f"{tuple(given.held.shape)} of {given.dtype}"
    return f"{path} is {found}, and {a.path} has {wanted}; return that, or give the result a P in out_specs"
