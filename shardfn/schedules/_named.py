"""Schedules by name: generators with a chunk or several chunks a rank.

Schedules of a single chunk a rank: GPipe, 1F1B and ZB-H1. p ranks, m microbatches.

Schedules of several chunks a rank: interleaved 1F1B, ZB-V and DualPipeV. p ranks, m microbatches, v chunks.
"""

import collections
from collections.abc import Callable, Mapping

from shardfn.core import did_you_mean

from ._schedule import Action, Actions, Kind, PipelineSchedule, loop_stages, v_stages


def gpipe(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Returns all forwards, then all backwards: (p - 1) / (m + p - 1) of the time is idle, and m microbatches are held.

    Example:
        >>> print(gpipe(2, 2).as_text())
        gpipe, 2 microbatches
        rank 0, stages (0,): F0 F1 B0 B1
        rank 1, stages (1,): F0 F1 B0 B1

    References: Huang et al., GPipe, 2018, https://arxiv.org/abs/1811.06965
    """
    check_numbers("gpipe", num_ranks, num_microbatches)
    row = tuple(Action(kind, k) for kind in ("forward", "backward") for k in range(num_microbatches))
    return PipelineSchedule("gpipe", num_microbatches, loop_stages(num_ranks, 1), (row,) * num_ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Returns 1F1B, a forward and a backward in turn: idle as GPipe, but rank r holds only min(m, p - r) microbatches.

    Example:
        >>> print(one_f_one_b(2, 3).as_text())
        1f1b, 3 microbatches
        rank 0, stages (0,): F0 F1 B0 F2 B1 B2
        rank 1, stages (1,): F0 B0 F1 B1 F2 B2

    References: Narayanan et al., PipeDream-Flush, 2020, https://arxiv.org/abs/2006.09503
    """
    check_numbers("1f1b", num_ranks, num_microbatches)
    rows = (_list_actions(num_ranks - rank - 1, num_microbatches) for rank in range(num_ranks))
    return PipelineSchedule("1f1b", num_microbatches, loop_stages(num_ranks, 1), tuple(rows))


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Returns 1F1B whose Ws wait. With enough microbatches (p - 1) (F + B - W) is idle, and at most p are held.

    Rank r does a W r microbatches after the B. So each B, for which the ranks before wait, runs early, and the
    remaining Ws fill the end of the pipeline.

    Example:
        >>> print(zero_bubble_h1(2, 3).as_text())
        zb-h1, 3 microbatches
        rank 0, stages (0,): F0 F1 B0 W0 F2 B1 W1 B2 W2
        rank 1, stages (1,): F0 B0 F1 B1 W0 F2 B2 W1 W2

    References: Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241
    """
    check_numbers("zb-h1", num_ranks, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        row: list[Action] = []
        for action in _list_actions(num_ranks - rank - 1, num_microbatches):
            row.append(action)
            if action.kind == "backward" and action.microbatch >= rank:
                row.append(Action("weights", action.microbatch - rank))
        left = range(max(0, num_microbatches - rank), num_microbatches)
        rows.append((*row, *(Action("weights", k) for k in left)))
    return PipelineSchedule("zb-h1", num_microbatches, loop_stages(num_ranks, 1), tuple(rows))


def check_numbers(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Refuses numbers of ranks or microbatches below 1.

    Raises:
        ValueError: a number is below 1.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ValueError(
            f"the schedule {name} must have a rank and a microbatch at least, got {num_ranks} and {num_microbatches}."
        )


def _list_actions(warmup: int, m: int) -> Actions:
    warmup = min(warmup, m)
    row = [Action("forward", k) for k in range(warmup)]
    for k in range(m):
        row += [Action("forward", k + warmup)] if k + warmup < m else []
        row.append(Action("backward", k))
    return tuple(row)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> PipelineSchedule:
    """Returns 1F1B of v chunks a rank: (p - 1) / (v m + p - 1) of the time is idle, for v times the transfers.

    Microbatches go through a chunk p at a time. Rank 0 holds v p + p - 1 microbatches, each through a single chunk. For
    example, with p = 4 ranks, v = 2 chunks and m = 8 microbatches 3/19 of the time is idle.

    Raises:
        ValueError: p does not divide m.

    Example:
        >>> print(interleaved(2, 2).as_text())
        interleaved, 2 microbatches
        rank 0, stages (0, 2): F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1
        rank 1, stages (1, 3): F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1

    References: Narayanan et al., Efficient Large-Scale Language Model Training, 2021, https://arxiv.org/abs/2104.04473
    """
    p, m, v = num_ranks, num_microbatches, num_chunks
    check_numbers("interleaved", p, m)
    if v < 1 or m % p:
        raise ValueError(
            f"the interleaved schedule needs at least 1 chunk and a multiple of {p} microbatches, the number of ranks,"
            f" got {m} microbatches and {v} chunks. Use {-(-m // p) * p} microbatches, or '1f1b'."
        )
    rows = []
    for rank in range(p):
        forwards = [_find_turn("forward", i, p, v) for i in range(m * v)]
        backwards = [_find_turn("backward", i, p, v) for i in range(m * v)]
        warmup = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
        # Then a forward and a backward alternate. After the last forward the slice is empty.
        row = forwards[:warmup]
        for i, backward in enumerate(backwards):
            row += forwards[warmup + i : warmup + i + 1]
            row.append(backward)
        rows.append(tuple(row))
    return PipelineSchedule("interleaved", m, loop_stages(p, v), tuple(rows))


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Returns ZB-V, two chunks a rank, down the ranks and up again.

    If F = B = W, only p - 1 Fs and Ws at the ends are idle.

    A rank holds 2 p half microbatches, as much memory as 1F1B needs on rank 0.

    References: Qi et al., Pipeline Parallelism with Controllable Memory, 2024, https://arxiv.org/abs/2405.15362
    """
    p, m = num_ranks, num_microbatches
    check_numbers("zb-v", p, m)
    rows = (_zero_bubble_v(rank, p, max(m, 2 * p - 1)) for rank in range(p))
    # With fewer microbatches the schedule is the schedule of 2 p - 1 without the actions of microbatches beyond m.
    kept = tuple(tuple(a for a in row if a.microbatch < m) for row in rows)
    return PipelineSchedule("zb-v", m, v_stages(p), kept)


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Returns DualPipeV, two chunks a rank as in ZB-V, with forwards of a chunk next to backwards of the other chunk.

    Such a pair can hide the transfers of an action behind the arithmetic of the other action. Only the backwards at the
    two ends are split.

    Raises:
        ValueError: there are fewer than 2 p microbatches.

    References: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437, and the cut-in-half
        form of its schedule, https://github.com/deepseek-ai/DualPipe
    """
    p, m = num_ranks, num_microbatches
    check_numbers("dualpipe-v", p, m)
    if m < 2 * p:
        raise ValueError(f"the schedule dualpipe-v of {p} ranks needs {2 * p} microbatches or more, got {m}.")
    return PipelineSchedule("dualpipe-v", m, v_stages(p), tuple(_dual_pipe_v(rank, p, m) for rank in range(p)))


def _find_turn(kind: Kind, i: int, p: int, v: int) -> Action:
    """Returns the i-th forward, or backward, of a rank.

    A rank takes p microbatches through a chunk, then the same microbatches through the next chunk.
    """
    rounds, within = divmod(i, p * v)
    chunk, k = divmod(within, p)
    return Action(kind, rounds * p + k, chunk if kind == "forward" else v - 1 - chunk)


class _RankList:
    """Builds the list of a rank's actions. Each kind of action of a chunk takes the microbatches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        # The microbatch that an action of this kind and chunk takes next. All earlier microbatches are in the list.
        self._next: collections.Counter[tuple[Kind, int]] = collections.Counter()
        # The Ws of split backwards that are not in the list yet, the oldest first.
        self._open: collections.deque[Action] = collections.deque()

    def add(self, kind: Kind, chunk: int, times: int = 1) -> None:
        for _ in range(times):
            self.actions.append(Action(kind, self._next[kind, chunk], chunk))
            self._next[kind, chunk] += 1

    def split(self, chunk: int) -> None:
        """Adds a backward whose W comes later."""
        self.add("backward", chunk)
        self._open.append(self.actions[-1]._replace(kind="weights"))

    def weights(self) -> None:
        """Adds the oldest W that is left."""
        self.actions.append(self._open.popleft())

    def weights_of(self, chunk: int) -> None:
        """Adds the oldest W of a chunk that is left."""
        oldest = next(a for a in self._open if a.chunk == chunk)
        self._open.remove(oldest)
        self.actions.append(oldest)

    def left(self, chunk: int) -> int:
        return sum(a.chunk == chunk for a in self._open)

    def count(self, kind: Kind, chunk: int) -> int:
        return self._next[kind, chunk]


def _zero_bubble_v(rank: int, p: int, m: int) -> Actions:
    row = _RankList()
    row.add("forward", 0, 2 * (p - rank) - 1)
    for _ in range(rank):
        row.add("forward", 1)
        row.add("forward", 0)
    for _ in range(p - rank):
        row.add("forward", 1)
        row.split(1)
        row.weights()
    # From here on a half microbatch leaves for each half that enters, so that no more than 2 p are held.
    while row.count("forward", 1) < m:
        if row.count("forward", 0) < m:
            row.add("forward", 0)
        row.split(0)
        row.weights()
        row.add("forward", 1)
        row.split(1)
        row.weights()
    for _ in range(rank):
        row.split(0)
        row.split(1)
    for _ in range(p - rank):
        row.split(0)
        row.weights_of(0)
    for chunk in (1, 0):
        for _ in range(row.left(chunk)):
            row.weights_of(chunk)
    return tuple(row.actions)


def _dual_pipe_v(rank: int, p: int, m: int) -> Actions:
    row, after = _RankList(), p - rank - 1
    row.add("forward", 0, 2 * after)
    for _ in range(rank + 1):
        row.add("forward", 0)
        row.add("forward", 1)
    for _ in range(after):
        row.split(1)
        row.weights()
        row.add("forward", 1)
    for _ in range(m - 2 * p + rank + 1):
        row.add("forward", 0)
        row.add("backward", 1)
        row.add("forward", 1)
        row.add("backward", 0)
    for _ in range(after):
        row.add("backward", 1)
        row.add("forward", 1)
        row.add("backward", 0)
    for i in range(rank + 1):
        row.add("backward", 1 - i % 2)
    for i in range(rank + 1, 2 * (rank + 1)):
        row.split(1 - i % 2)
    for _ in range(after):
        row.weights()
        row.split(0)
    for _ in range(rank + 1):
        row.weights()
    return tuple(row.actions)


SCHEDULES: Mapping[str, Callable[[int, int], PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
    "dualpipe-v": dual_pipe_v,
}
"""By name, from the numbers of ranks and microbatches to the schedule; of two chunks where it is of several."""


def named_schedule(name: str, num_chunks: int = 1) -> Callable[[int, int], PipelineSchedule]:
    """Returns the schedule with this name and number of chunks, as a function of the numbers of ranks and microbatches.

    Raises:
        ValueError: the name is unknown (such as "gpipe2"), or the schedule has another number of chunks.

    Example:
        >>> named_schedule("interleaved", 3)(2, 4).num_chunks
        3
        >>> named_schedule("zb-v", 2)(2, 4).turns
        True
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} must be one of {', '.join(SCHEDULES)}.{did_you_mean(name, SCHEDULES)}")
    if name == "interleaved" and num_chunks > 1:
        return lambda num_ranks, num_microbatches: interleaved(num_ranks, num_microbatches, num_chunks)
    own = SCHEDULES[name](2, 4).num_chunks
    if own != num_chunks or name == "interleaved":
        allowed = "two chunks or more" if name == "interleaved" else f"num_chunks={own}"
        raise ValueError(
            f"schedule={name!r} with num_chunks={num_chunks}: the schedule must have {allowed}. For several"
            " chunks use 'interleaved'."
        )
    return SCHEDULES[name]
