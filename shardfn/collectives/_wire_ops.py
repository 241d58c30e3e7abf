"""The step's own transfers as torch ops, so that a captured graph holds each transfer as a node.

    all_gather_start(own, sizes, axes)         -> handle [sum(sizes)]      [A] [B] => [A, B]
    all_gather_into_start(into, own, sizes, axes) -> handle [0]            the same, into a tensor that exists
    psum_scatter_start(flat, sizes, index, axes)  -> handle [sizes[index]] sums in rank order, keeps the own block
    all_to_all_start(flat, sizes, index, axes) -> handle [ranks * sizes[index]]  block r to rank r, of all one for this
    psum_start(parts, axes)                    -> handle [sum of numels]   packs, and sums whole
    wait(handle)                               -> the value
    pvary(x, axes)                             -> x, which is the same on all ranks and counts as varying from now on
    stop_unless(flag, carried)                 -> ends the program with `StoppedError` if the flag is false

While a program is captured the sizes are written as runs, [count, size, count, size, ...], since a tracer's work on
each of a thousand numbers takes longer than the rest. `with_sizes` puts the numbers back as `Sizes`.

A handle represents the value, and is in flight until `wait`. Only the value may be read. All tensors but `into` are
flat. `axes` are mesh axes joined by commas. The bound mesh chooses the communicator, so that a graph runs on any wire.
The inputs of a transfer must not be written before the transfer's `wait`. The op keeps the inputs alive until the
`wait`.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from shardfn import core
from shardfn.collectives.transport import Channels

_LIBRARY = torch.library.Library("shardfn", "DEF")
_LIBRARY.define("all_gather_start(Tensor own, int[] sizes, str axes) -> Tensor")
_LIBRARY.define("all_gather_into_start(Tensor(a!) into, Tensor own, int[] sizes, str axes) -> Tensor")
_LIBRARY.define("psum_scatter_start(Tensor flat, int[] sizes, int index, str axes) -> Tensor")
_LIBRARY.define("all_to_all_start(Tensor flat, int[] sizes, int index, str axes) -> Tensor")
_LIBRARY.define("all_to_all_start.runs(Tensor flat, int[] runs, int index, str axes) -> Tensor")
_LIBRARY.define("all_gather_start.runs(Tensor own, int[] runs, str axes) -> Tensor")
_LIBRARY.define("all_gather_into_start.runs(Tensor(a!) into, Tensor own, int[] runs, str axes) -> Tensor")
_LIBRARY.define("psum_scatter_start.runs(Tensor flat, int[] runs, int index, str axes) -> Tensor")
_LIBRARY.define("psum_start(Tensor[] parts, str axes) -> Tensor")
_LIBRARY.define("wait(Tensor(a) handle) -> Tensor(a)")
_LIBRARY.define("pvary(Tensor(a) x, str axes) -> Tensor(a)")
_LIBRARY.define("stop_unless(Tensor flag, Tensor[] carried) -> ()")

# By storage of the handle: the transfers in flight. The handle is kept next to the transfer, so that no other tensor
# can get the address, the key, before `wait`. Graphs that run on other threads have separate maps.
_IN_FLIGHT = core.OfProgram[dict[int, tuple[Tensor, core.Pending[Tensor]]]]("transfers between ranks in flight", dict)
_CHANNELS = core.Ambient[Any]("channels of a captured graph that runs")


class StoppedError(Exception):
    """A program ended at a `stop_unless`, before any later op was run.

    Attributes:
        carried: the tensors passed to the op.
    """

    def __init__(self, carried: Sequence[Tensor]) -> None:
        super().__init__("the program stopped")
        self.carried = list(carried)


@contextlib.contextmanager
def bind_channels(channels: "Channels | Any") -> Iterator[None]:
    """Binds the communicators that the ops use while a captured graph runs.

    At the end of the context all sends have left. After an error, transfers without a `wait` are forgotten.
    """
    try:
        with _CHANNELS.bound(channels):
            yield
            channels.flush()
    finally:
        _IN_FLIGHT.here().clear()


def channels_of_graph() -> Any:
    """Returns the communicators that are bound."""
    return _CHANNELS.innermost()


def under_way(handle: Tensor, pending: core.Pending[Tensor]) -> Tensor:
    """Remembers a transfer by the handle."""
    _IN_FLIGHT.here()[handle.untyped_storage()._cdata] = (handle, pending)
    return handle


def ended(handle: Tensor) -> core.Pending[Tensor]:
    """Returns the transfer of a handle, and forgets the handle."""
    return _IN_FLIGHT.here().pop(handle.untyped_storage()._cdata)[1]


def _split_axes(axes: str) -> tuple[str, ...]:
    return tuple(axes.split(","))


# all_gather


def _start_all_gather(own: Tensor, sizes: Sequence[int], axes: str) -> Tensor:
    out = own.new_empty(sum(sizes))
    pending = channels_of_graph().gather(_split_axes(axes)).all_gather(own, sizes, out, settled=True)
    return under_way(out, pending)


def _start_all_gather_into(into: Tensor, own: Tensor, sizes: Sequence[int], axes: str) -> Tensor:
    pending = channels_of_graph().gather(_split_axes(axes)).all_gather(own, sizes, into, settled=True)
    return under_way(own.new_empty(0), pending)


# psum_scatter


def _psum_scatter_start(flat: Tensor, sizes: Sequence[int], index: int, axes: str) -> Tensor:
    pending = channels_of_graph().reduce(_split_axes(axes)).reduce_scatter(flat, sizes)
    return under_way(flat.new_empty(0), pending)


# all_to_all


def _start_all_to_all(flat: Tensor, sizes: Sequence[int], index: int, axes: str) -> Tensor:
    pending = channels_of_graph().reduce(_split_axes(axes)).all_to_all(flat, sizes)
    return under_way(flat.new_empty(0), pending)


# psum


def _psum_start(parts: Sequence[Tensor], axes: str) -> Tensor:
    flat = torch.cat([p.reshape(-1) for p in parts])
    return under_way(flat, channels_of_graph().reduce(_split_axes(axes)).all_reduce(flat))


# wait


def _wait_handle(handle: Tensor) -> Tensor:
    kept, pending = _IN_FLIGHT.here().pop(handle.untyped_storage()._cdata)
    value = pending.result()
    return kept if value.data_ptr() == kept.data_ptr() else value


# pvary


def _run_pvary(x: Tensor, axes: str) -> Tensor:
    return x.view_as(x)


# stop_unless


def _stop_unless(flag: Tensor, carried: Sequence[Tensor]) -> None:
    if not bool(flag):
        raise StoppedError(carried)


for _name, _impl in (
    ("stop_unless", _stop_unless),
    ("pvary", _run_pvary),
    ("all_gather_start", _start_all_gather),
    ("all_gather_into_start", _start_all_gather_into),
    ("psum_scatter_start", _psum_scatter_start),
    ("all_to_all_start", _start_all_to_all),
    ("psum_start", _psum_start),
    ("wait", _wait_handle),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")


@torch.library.register_fake("shardfn::all_gather_start", lib=_LIBRARY)
def _(own: Tensor, sizes: Sequence[int], axes: str) -> Tensor:
    return own.new_empty(sum(sizes))


@torch.library.register_fake("shardfn::all_gather_into_start", lib=_LIBRARY)
def _(into: Tensor, own: Tensor, sizes: Sequence[int], axes: str) -> Tensor:
    return own.new_empty(0)


@torch.library.register_fake("shardfn::psum_scatter_start", lib=_LIBRARY)
def _(flat: Tensor, sizes: Sequence[int], index: int, axes: str) -> Tensor:
    return flat.new_empty(sizes[index])


@torch.library.register_fake("shardfn::all_to_all_start", lib=_LIBRARY)
def _(flat: Tensor, sizes: Sequence[int], index: int, axes: str) -> Tensor:
    return flat.new_empty(len(sizes) * sizes[index])


@torch.library.register_fake("shardfn::all_to_all_start.runs", lib=_LIBRARY)
def _(flat: Tensor, runs: Sequence[int], index: int, axes: str) -> Tensor:
    return flat.new_empty(sum(n for n, _ in _pair_runs(runs)) * _size_at(runs, index))


@torch.library.register_fake("shardfn::all_gather_start.runs", lib=_LIBRARY)
def _(own: Tensor, runs: Sequence[int], axes: str) -> Tensor:
    return own.new_empty(sum(n * size for n, size in _pair_runs(runs)))


@torch.library.register_fake("shardfn::all_gather_into_start.runs", lib=_LIBRARY)
def _(into: Tensor, own: Tensor, runs: Sequence[int], axes: str) -> Tensor:
    return own.new_empty(0)


@torch.library.register_fake("shardfn::psum_scatter_start.runs", lib=_LIBRARY)
def _(flat: Tensor, runs: Sequence[int], index: int, axes: str) -> Tensor:
    return flat.new_empty(_size_at(runs, index))


@torch.library.register_fake("shardfn::psum_start", lib=_LIBRARY)
def _(parts: Sequence[Tensor], axes: str) -> Tensor:
    return parts[0].new_empty(sum(p.numel() for p in parts))


@torch.library.register_fake("shardfn::pvary", lib=_LIBRARY)
def _(x: Tensor, axes: str) -> Tensor:
    return x.view_as(x)


@torch.library.register_fake("shardfn::stop_unless", lib=_LIBRARY)
def _(flag: Tensor, carried: Sequence[Tensor]) -> None:
    del flag, carried


# Ops that must not be removed although the values have no user.
has_side_effect(torch.ops.shardfn.stop_unless.default)
has_side_effect(torch.ops.shardfn.all_gather_into_start.default)


@torch.library.register_fake("shardfn::wait", lib=_LIBRARY)
def _(handle: Tensor) -> Tensor:
    return handle


def as_runs(sizes: Sequence[int]) -> list[int]:
    """Returns sizes as runs, such as [3, 8] for [8, 8, 8].

    Example:
        >>> as_runs([4, 4, 4, 1])
        [3, 4, 1, 1]
    """
    return [x for size, same in itertools.groupby(sizes) for x in (len(list(same)), size)]


class Sizes(Sequence[int]):
    """Sizes of the blocks of many ranks, kept as runs: a single constant in copies of a graph.

    Example:
        >>> sizes = Sizes((3, 4, 1, 1))
        >>> sizes, sizes[2], sum(sizes)
        ([4, 4, 4, 1], 4, 13)
    """

    __slots__ = ("_runs",)

    def __init__(self, runs: Sequence[int]) -> None:
        self._runs = tuple(runs)

    def __len__(self) -> int:
        return sum(self._runs[::2])

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(size, n) for n, size in _pair_runs(self._runs))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return self._runs == other._runs if isinstance(other, Sizes) else list(self) == other

    def __hash__(self) -> int:
        return hash(self._runs)

    def __repr__(self) -> str:
        return repr(list(self))


def with_sizes(gm: torch.fx.GraphModule) -> None:
    """Replaces runs by `Sizes` in a captured program."""
    for node in gm.graph.nodes:
        if getattr(node.target, "_overloadname", "") == "runs" and node.target.namespace == "shardfn":
            at = next(i for i, a in enumerate(node.args) if isinstance(a, list))
            node.args = (*node.args[:at], Sizes(node.args[at]), *node.args[at + 1 :])
            node.target = getattr(torch.ops.shardfn, node.target._opname).default


def in_runs(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Returns the op and the arguments by which a call with `Sizes` is traced: in the form before `with_sizes`.

    Example:
        >>> gather = torch.ops.shardfn.all_gather_start.default
        >>> in_runs(gather, (torch.ones(1), Sizes((2, 1)), "dp"))[1][1:]
        ([2, 1], 'dp')
    """
    if not any(isinstance(a, Sizes) for a in args):
        return target, args
    return getattr(torch.ops.shardfn, target._opname).runs, tuple(
        list(a._runs) if isinstance(a, Sizes) else a for a in args
    )


def _pair_runs(runs: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(runs[::2], runs[1::2], strict=True))


def _size_at(runs: Sequence[int], index: int) -> int:
    for n, size in _pair_runs(runs):
        if index < n:
            return size
        index -= n
    raise IndexError(index)
