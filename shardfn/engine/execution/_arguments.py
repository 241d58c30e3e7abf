"""`Argument`: a leaf of the arguments of a sharded function; `Donated`: a result in the place of a donated argument.

A donated leaf may be kept on the host or on disk, as parameters may: the function sees a copy on the device, and the
result that takes its place is written to the memory of the leaf. Where `in_specs` has a `Sharding` on the host, the
function sees the leaf there, and moves the parts that it needs itself.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import P, raise_all
from shardfn.state import fetch, lies_on_device, succeed


class Argument(NamedTuple):
    """A leaf of the arguments beyond the first.

    Attributes:
        path: where it is among the arguments.
        given: the value that the caller passed.
        spec: spec of a sharded leaf, or None for other leaves.
        donated: whether the function may overwrite its memory.
        position: number of the argument, from 0 on.
        block: the copy on the device of a block that is kept elsewhere, or None before, and for the others.
        on_host: whether the function sees the block in the memory of the host.
    """

    path: str
    given: Any
    spec: P | None
    donated: bool
    position: int = 0
    block: Tensor | None = None
    on_host: bool = False

    @property
    def seen(self) -> Any:
        """Returns the value that the function sees: this rank's block, or the value that was passed."""
        if self.block is not None:
            return self.block
        return self.given.local if self.spec is not None else self.given

    @property
    def away(self) -> bool:
        """Returns whether its block is kept elsewhere than on the device."""
        return self.spec is not None and not lies_on_device(self.given)

    @property
    def moves(self) -> bool:
        """Returns whether the function sees a copy on the device of a block that is kept elsewhere."""
        return self.away and not self.on_host

    def moved(self, device: torch.device) -> "Argument":
        """The same leaf with its block on the device."""
        return self._replace(block=on_device(self.given, device)) if self.moves else self


def on_device(x: GlobalTensor, device: torch.device) -> Tensor:
    """Returns a copy on the device of a block that is kept on the host or on disk."""
    return fetch(x.held, x.memory_kind, device)


def refuse_away(arguments: Sequence[Argument]) -> None:
    """Refuses arguments kept elsewhere than on the device, for a call that torch follows or transforms.

    Raises:
        ValueError: lists them.
    """
    raise_all(
        ValueError,
        "a call that is differentiated or transformed takes arguments from the device alone; reshard these to it, or"
        " call under torch.no_grad():",
        [f"{a.path} is kept at {a.given.memory_kind!r}" for a in arguments if a.away],
    )


def taking_the_place_of(given: GlobalTensor, x: Tensor) -> GlobalTensor:
    """Returns a result as the successor of a donated leaf: with the same shape, spec and memory.

    Host memory is written over, unless the result is in it already. On disk it is a new value, and the file of the
    value before is used again.
    """
    return given.with_block(succeed(given.held, given.memory_kind, x))


@dataclasses.dataclass(frozen=True)
class Donated:
    """An entry of `out_specs`: the result takes the place of a donated argument, leaf by leaf.

    It has the shapes, specs and memory kinds of that argument, so ranks exchange no shapes, and a cache on the host or
    on disk returns there. Use a `P` where the function returns blocks of another shape.

    Args:
        argument: position, as in `donate`. The first argument is 0.

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
    """Returns, for each leaf of a result, the donated leaf of an argument that it overwrites, or None.

    Args:
        entries: entry of `out_specs` for each leaf.
        paths: paths of the leaves.
        leaves: the result.
        arguments: the leaves of the arguments.

    Raises:
        ValueError: result and argument have other leaves, or leaves of other shapes or dtypes. The message lists them.
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
    raise_all(
        ValueError,
        head,
        [_describe_difference(path, x, a) for path, x, a in named if a is not None and _differs_from(x, a)],
    )
    return owners


def _differs_from(x: Any, a: Argument) -> bool:
    return not isinstance(x, Tensor) or (x.shape, x.dtype) != (a.given.held.shape, a.given.dtype)


def _describe_difference(path: str, x: Any, a: Argument) -> str:
    found = f"a block {tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
    given: GlobalTensor = a.given
    wanted = f"{tuple(given.held.shape)} of {given.dtype}"
    return f"{path} is {found}, and {a.path} has {wanted}; return that, or give the result a P in out_specs"
