"""Schedules of a single chunk a rank: GPipe, 1F1B and ZB-H1. p ranks, m microbatches."""

from ._schedule import Action, Actions, PipelineSchedule, loop_stages


def gpipe(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Returns all forwards, then all backwards: (p - 1) / (m + p - 1) of the time is idle, and m microbatches are held.

    Example:
        >>> print(gpipe(2, 2).as_text())
        gpipe, 2 microbatches
        rank 0, stages (0,): F0 F1 B0 B1
        rank 1, stages (1,): F0 F1 B0 B1

    References:
        Huang et al., GPipe, 2018, https://arxiv.org/abs/1811.06965
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

    References:
        Narayanan et al., PipeDream-Flush, 2020, https://arxiv.org/abs/2006.09503
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

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241
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
