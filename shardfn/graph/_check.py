"""Checks that ranks cannot deadlock: compares and simulates the order of collectives in the captured steps.

A transfer takes place when every rank of the group has started the transfer. Transfers on the same channel pair by
order. Channels are, for example, the gathers along some axes, the reductions along the same axes, and the loss's
collectives on a group. So ranks of a group must issue the same sequence on each channel, and must not wait for one
another in a circle across channels. Channels are made before a step begins, by all ranks of the mesh together, so all
ranks must use the same channels.

Stages of a pipeline run different programs, and send messages to each other. A send and a receive pair by the two ranks
and the tag, not by order. Each message that is sent must be received, with the same dtype and shape. Either end waits
until the other end has started.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from shardfn import core

from ._transfers import Transfer, is_message, is_wait, start_of, transfers
from ._values import part_of, where_of

_UNEVEN, _EXCHANGES = " uneven", ("all_to_all", "ppermute")
_COMMENT = "  # "
_STAGES = (
    "Every stage must be of the same loss and batch; let no branch on a rank's index decide the results of layers."
)
_REMEDY = (
    "Every rank of a group must issue the same collectives in the same order: let no branch on a rank's own values or"
    " index decide which collective runs, and give ranks batches of equal shapes."
)


def compare_sequences(sequences: Sequence[Sequence[str]], mesh_shape: Mapping[str, int] | None = None) -> None:
    """Checks that the ranks of each group issue the same collectives in the same order on each channel.

    Args:
        sequences: lines of each rank, in rank order. A line describes a transfer: channel, collective, dtype, sizes,
            line of code.
        mesh_shape: axis name -> size. The sizes determine which ranks share a group. Default: all ranks are a group.

    Raises:
        RankError: sequences differ. The message has the first difference, with the ranks, both lines of the user's code
            and the remedy.

    Example:
        >>> a, b = "gather dp: all_gather float32 [3, 3]", "gather dp: all_gather float32 [4, 4]"
        >>> compare_sequences([[a], [a]])
        >>> try:
        ...     compare_sequences([[a], [b]])
        ... except core.RankError as error:
        ...     print(str(error).rpartition(chr(10))[0])
        ranks 0 and 1 differ in collective 1 on channel 'gather dp':
          rank 0: all_gather float32 [3, 3] (line unknown)
          rank 1: all_gather float32 [4, 4] (line unknown)
    """
    if all(_are_same(s, sequences[0]) for s in sequences):
        return
    split = [_split_by_channel(s) for s in sequences]
    channels = dict.fromkeys(c for s in split for c in s)
    for channel in channels:
        for group in _rank_groups(channel.split(" ")[-1], mesh_shape, len(sequences)):
            # Each rank with the first of the group: ranks that agree with the first agree with each other.
            for rank in group[1:]:
                _compare_lines(channel, group[0], split[group[0]].get(channel, []), rank, split[rank].get(channel, []))


def prove_no_hang(gms: Sequence[GraphModule], mesh_shape: Mapping[str, int] | None = None) -> None:
    """Runs the steps of all ranks symbolically and proves that every rank finishes (no deadlock).

    Each rank issues starts and waits in the order of the rank's graph. A wait blocks until all ranks of the group have
    started the transfer. The first start on a channel blocks until all ranks have started on the channel.

    Args:
        gms: step of each rank, in rank order. Ranks with the same program may share an object.
        mesh_shape: axis name -> size. Default: the mesh shape of the first graph.

    Raises:
        RankError: two ranks pair different collectives, or ranks wait for one another. The message has the ranks, the
            nodes and the lines of the user's code.
        ValueError: the number of graphs is not the mesh's.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def f(own):
        ...     return torch.ops.shardfn.wait(torch.ops.shardfn.all_gather_start(own, [3, 3], "dp"))
        >>> gm = make_fx(f, tracing_mode="fake")(torch.ones(3))
        >>> prove_no_hang([gm, gm], {"dp": 2})
    """
    shape = dict(mesh_shape if mesh_shape is not None else gms[0].meta.get("mesh_shape", {}))
    coords = core.all_coords(shape)
    if len(coords) != len(gms):
        raise ValueError(
            f"expected a graph for each of the {len(coords)} ranks of a mesh of {shape}, got {len(gms)} graphs."
            " Pass a graph per rank."
        )
    events = {i: collective_events(gm) for i, gm in {id(gm): gm for gm in gms}.items()}
    compare_events([events[id(gm)] for gm in gms], shape)


class MessageEnd(NamedTuple):
    """End of a message: the other rank's index along the channel's axes, the tag, and dtype and shape as text."""

    sends: bool
    peer: int
    tag: int
    looks: str

    def route(self, own: int) -> tuple[int, int, int]:
        """Returns the sender, the receiver and the tag, the same at both ends."""
        return (own, self.peer, self.tag) if self.sends else (self.peer, own, self.tag)


@dataclasses.dataclass(frozen=True)
class Moment:
    """Start of a transfer (`wait` is False), or the wait. `turn` is the start's number on the channel."""

    channel: str
    turn: int
    wait: bool
    name: str
    where: str
    message: MessageEnd | None = None


@dataclasses.dataclass(frozen=True)
class Events:
    """Transfers of a rank with other ranks, in order, as a value that can be sent.

    Attributes:
        lines: line of each transfer that pairs by order. See `compare_sequences`.
        program: starts and waits.
    """

    lines: list[str]
    program: list[Moment]

    @property
    def text(self) -> str:
        """Returns a text, equal for ranks with equal programs."""
        moments = (f"{e.channel} {e.turn} {e.wait} {e.message or ''}" for e in self.program)
        return "\n".join([*map(_strip_comment, self.lines), *moments])

    @property
    def sends_messages(self) -> bool:
        """Returns whether the program is a pipeline stage's, so that other ranks may run other programs."""
        return any(e.message is not None for e in self.program)


def collective_events(gm: GraphModule) -> Events:
    """Returns the transfers of a rank's step with other ranks, in the order of the graph.

    Example:
        >>> from torch.fx import symbolic_trace
        >>> collective_events(symbolic_trace(lambda x: x + 1)).program
        []
    """
    moves = {t.node: t for t in transfers(gm) if t.num_ranks > 1}
    turns, started, out = collections.Counter[str](), dict[Node, Moment](), list[Moment]()
    for node in gm.graph.nodes:
        if node in moves:
            channel, message = moves[node].channel, _message_end(moves[node])
            started[node] = Moment(channel, turns[channel], False, node.name, _place_text(node), message)
            turns[channel] += 1
            out.append(started[node])
        elif is_wait(node) and start_of(node) in moves:
            begun = started[start_of(node)]
            out.append(dataclasses.replace(begun, wait=True, name=node.name, where=_place_text(node) or begun.where))
    return Events([_format_transfer(t) for t in moves.values() if not is_message(t.node)], out)


def compare_events(events: Sequence[Events], mesh_shape: Mapping[str, int]) -> None:
    """Proves that all ranks finish if each rank runs its `Events`. See `prove_no_hang`.

    Args:
        events: events of each rank, in rank order.
        mesh_shape: axis name -> size.

    Raises:
        RankError: two ranks pair different collectives, or ranks wait for one another.

    Example:
        >>> compare_events([Events([], [])] * 2, {"dp": 2})
    """
    compare_sequences([e.lines for e in events], mesh_shape)
    first = events[0].text
    # Ranks that run the same program make the same channels, and cannot wait for one another: each start comes before
    # the wait on all ranks.
    if any(e is not events[0] and e.text != first for e in events):
        if not any(e.sends_messages for e in events):
            _compare_channels([{m.channel for m in e.program if _is_made(m.channel)} for e in events])
        _compare_messages([e.program for e in events], mesh_shape)
        _Simulation([e.program for e in events], mesh_shape).run()


def _compare_channels(channels: Sequence[set[str]]) -> None:
    """Refuses ranks that would make different channels, as all ranks of the mesh have to make each channel together."""
    odd = next((rank for rank, own in enumerate(channels) if own != channels[0]), None)
    if odd is not None:
        raise core.RankError(
            f"ranks use different channels: rank 0 {sorted(channels[0])}, rank {odd} {sorted(channels[odd])}. {_REMEDY}"
        )


def _compare_messages(programs: Sequence[Sequence[Moment]], shape: Mapping[str, int]) -> None:
    """Refuses a message that only a single rank knows, or whose dtype or shape differs between the two ranks."""
    ends: dict[Any, dict[bool, tuple[int, Moment, str]]] = collections.defaultdict(dict)
    for rank, program in enumerate(programs):
        for moment in program:
            if moment.message is not None and not moment.wait:
                group, own = _coordinates_of(moment.channel, shape, rank)
                by_end = ends[moment.channel, group, moment.message.route(own)]
                by_end[moment.message.sends] = rank, moment, moment.message.looks
    for (channel, _, (_, _, tag)), found in ends.items():
        if len(found) == 2 and found[True][2] == found[False][2]:
            continue
        sides = [f"  rank {r} {'sends' if e else 'receives'} {what} ({m.where})" for e, (r, m, what) in found.items()]
        sides += [] if len(found) == 2 else ["  and no rank is at the other end"]
        raise core.RankError("\n".join([f"stages differ in message {tag} on channel {channel!r}:", *sides, _STAGES]))


def _coordinates_of(channel: str, shape: Mapping[str, int], rank: int) -> tuple[tuple[int, ...], int]:
    """Returns a rank's coordinates outside of the channel's axes, and the rank's index along the channel's axes."""
    names, at, rest, index = channel.split(" ")[-1].split(","), rank, list[int](), 0
    coords: dict[str, int] = {}
    for axis in reversed(list(shape)):
        at, coords[axis] = divmod(at, shape[axis])
    for axis, size in shape.items():
        if axis in names:
            index = index * size + coords[axis]
        else:
            rest.append(coords[axis])
    return tuple(rest), index


def _message_end(t: Transfer) -> MessageEnd | None:
    if not is_message(t.node):
        return None
    peer, tag = t.node.args[-3:-1]
    looks = f"{core.dtype_name(t.dtype)} {list(t.sizes)}"
    return MessageEnd(t.op == "send", int(peer), int(tag), looks)  # pyright: ignore[reportArgumentType]  # fx arguments


def _place_text(node: Node) -> str:
    """Returns the user's line, with the stage and the microbatch in a pipeline."""
    return "; ".join(part for part in (where_of(node), part_of(node)) if part)


def _is_made(channel: str) -> bool:
    """Returns whether a channel is made for the step. The groups of the loss's own collectives exist already."""
    return not channel.startswith("loss")


# Lines.


def _format_transfer(t: Transfer) -> str:
    where = f"{_COMMENT}{t.where}" if t.where else ""
    return f"{t.channel}: {t.op} {core.dtype_name(t.dtype)} {_format_sizes(t)}{where}"


def _format_sizes(t: Transfer) -> str:
    """Returns the sizes that must be equal between ranks, as text.

    "uneven" for an exchange with sizes that differ by rank.
    """
    if t.op in _EXCHANGES:
        received = t.node.args[2 if t.channel.startswith("loss") else 1]
        if len({*t.sizes, *received}) > 1:  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
            return _UNEVEN.strip()
    return f"[{len(t.sizes)} x {t.sizes[0]}]" if len(t.sizes) > 4 and len(set(t.sizes)) == 1 else str(list(t.sizes))


def _are_same(a: Sequence[str], b: Sequence[str]) -> bool:
    return a is b or (len(a) == len(b) and all(_can_agree(x, y) for x, y in zip(a, b, strict=True)))


def _can_agree(a: str, b: str) -> bool:
    """Returns whether two lines may be the same collective. Sizes of an uneven exchange may look even on some rank."""
    a, b = _strip_comment(a), _strip_comment(b)
    uneven = a.endswith(_UNEVEN) or b.endswith(_UNEVEN)
    return a == b or (uneven and _exchange_line(a) is not None and _exchange_line(a) == _exchange_line(b))


def _exchange_line(key: str) -> str | None:
    """Returns the line of an exchange without its sizes, or None for other lines."""
    what = key.removesuffix(_UNEVEN) if key.endswith(_UNEVEN) else key.partition(" [")[0]
    return what if any(f"{op} " in what for op in _EXCHANGES) else None


def _strip_comment(line: str) -> str:
    return line.partition(_COMMENT)[0]


def _split_by_channel(lines: Sequence[str]) -> dict[str, list[str]]:
    split: dict[str, list[str]] = {}
    for line in lines:
        channel, _, rest = line.partition(": ")
        split.setdefault(channel, []).append(rest)
    return split


def _compare_lines(channel: str, rank_a: int, a: Sequence[str], rank_b: int, b: Sequence[str]) -> None:
    for i, (x, y) in enumerate(itertools.zip_longest(a, b), start=1):
        if x is None or y is None or not _can_agree(x, y):
            raise core.RankError(
                f"ranks {rank_a} and {rank_b} differ in collective {i} on channel {channel!r}:\n"
                f"  rank {rank_a}: {_format_line(x)}\n  rank {rank_b}: {_format_line(y)}\n{_REMEDY}"
            )


def _format_line(text: str | None) -> str:
    if text is None:
        return "none; it has issued all of its own"
    what, _, where = text.partition(_COMMENT)
    return f"{what} ({where or 'line unknown'})"


def _rank_groups(axes: str, mesh_shape: Mapping[str, int] | None, count: int) -> list[list[int]]:
    """Returns the groups of ranks along `axes`."""
    if mesh_shape is None:
        return [list(range(count))]
    rows: dict[tuple[int, ...], list[int]] = {}
    names = axes.split(",")
    for rank, coords in enumerate(core.all_coords(mesh_shape)):
        rows.setdefault(tuple(c for n, c in coords.items() if n not in names), []).append(rank)
    return list(rows.values())


# The simulation.


class _Simulation:
    """Simulation of all ranks.

    Each rank runs until blocked. A rank that completes a transfer wakes the waiting ranks.
    """

    def __init__(self, programs: Sequence[Sequence[Moment]], shape: Mapping[str, int]) -> None:
        self._programs, self._at = programs, [0] * len(programs)
        self._axes = {e.channel for p in programs for e in p}
        self._group = {c: self._group_of_rank(c, shape) for c in sorted(self._axes)}
        self._shape = shape
        self._started: dict[Any, int] = collections.Counter()
        # By the event that ranks wait for: a rank advances again only when the event has happened.
        self._blocked: dict[Any, list[int]] = collections.defaultdict(list)

    def run(self) -> None:
        ready = collections.deque(range(len(self._programs)))
        while ready:
            ready.extend(self._advance_rank(ready.popleft()))
        stuck = [r for r, p in enumerate(self._programs) if self._at[r] < len(p)]
        if stuck:
            raise core.RankError(self._describe_deadlock(stuck))

    def _group_of_rank(self, channel: str, shape: Mapping[str, int]) -> dict[int, tuple[int, int]]:
        """Returns the number of each rank's group along the channel's axes, and the group's size."""
        groups = _rank_groups(channel.split(" ")[-1], shape, len(self._programs))
        return {rank: (i, len(group)) for i, group in enumerate(groups) for rank in group}

    def _advance_rank(self, rank: int) -> list[int]:
        """Runs a rank until the rank blocks or ends, and returns the ranks that woke."""
        program, woken = self._programs[rank], list[int]()
        while self._at[rank] < len(program):
            event = program[self._at[rank]]
            need = self._needed_starts(rank, event)
            if need is not None:
                self._blocked[need].append(rank)
                return woken
            if not event.wait:
                woken += self._start_event(rank, event)
            self._at[rank] += 1
        return woken

    def _needed_starts(self, rank: int, event: Moment) -> Any:
        """Returns the key of the starts that the event waits for.

        The key of a group, or of a message's other end. None if past.
        """
        if event.message is not None:
            key = self._end_key(rank, event, not event.message.sends)
            return key if event.wait and not self._started[key] else None
        group, size = self._group[event.channel][rank]
        key = event.channel, group, event.turn
        return key if event.wait and self._started[key] < size else None

    def _end_key(self, rank: int, event: Moment, sends: bool) -> Any:
        """Returns the key of an end of a message in `_started`."""
        assert event.message is not None
        group, own = _coordinates_of(event.channel, self._shape, rank)
        return event.channel, group, event.message.route(own), sends

    def _start_event(self, rank: int, event: Moment) -> list[int]:
        if event.message is not None:
            key = self._end_key(rank, event, event.message.sends)
            self._started[key] += 1
            return self._blocked.pop(key, [])
        group, size = self._group[event.channel][rank]
        key = event.channel, group, event.turn
        self._started[key] += 1
        return self._blocked.pop(key, []) if self._started[key] == size else []

    def _describe_deadlock(self, stuck: Sequence[int]) -> str:
        lines = [f"{len(stuck)} of {len(self._programs)} ranks would wait forever:"]
        for rank in stuck[:8]:
            event = self._programs[rank][self._at[rank]]
            where = event.where or "line unknown"
            turn = f"transfer {event.turn + 1} on channel {event.channel!r}"
            if event.message is not None:
                turn = f"the other end of message {event.message.tag} on channel {event.channel!r}"
            lines.append(f"  rank {rank} at {event.name} waits for {turn} ({where})")
        return "\n".join([*lines, _REMEDY])
