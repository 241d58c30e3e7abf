"""Schedules: the forwards and backwards of a step's microbatches, in order, as a list.

    accumulation(2) == F0 B0 F1 B1

All ranks run one list, and agree on it before the first transfer: each action is a phase of the order of use. A list
may keep any number of forwards open, and close them in any order, at the cost of activation memory.
"""

from collections import Counter
from collections.abc import Sequence

from shardfn.core import raise_all
from shardfn.schedules import Action, Actions, as_text


def accumulation(num_microbatches: int) -> Actions:
    """Returns each backward right after its forward, so that one microbatch's activations are alive at a time.

    Example:
        >>> as_text(accumulation(2))
        'F0 B0 F1 B1'
    """
    return tuple(Action(kind, k) for k in range(num_microbatches) for kind in ("forward", "backward"))


def check_schedule(schedule: Sequence[Action], num_microbatches: int) -> None:
    """Refuses a list that is not the schedule of a step with this number of microbatches.

    Raises:
        ValueError: lists the actions that are missing, repeated, of no microbatch, or before their forward.
    """
    counts = Counter(schedule)
    wanted = dict.fromkeys(accumulation(num_microbatches))
    problems = [f"{a} is there {counts[a]} times, not once" for a in wanted if counts[a] != 1]
    problems += [f"{a} is of no microbatch" for a in counts if a not in wanted]
    at = {a: i for i, a in reversed([*enumerate(schedule)])}
    for k in range(num_microbatches):
        f, b = Action("forward", k), Action("backward", k)
        if f in at and b in at and at[b] < at[f]:
            problems.append(f"{b} comes before {f}")
    raise_all(ValueError, f"the schedule {as_text(schedule)} is no step of {num_microbatches} microbatches:", problems)
