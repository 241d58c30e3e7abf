"""Assigns layers to stages where layers, embedding and head cost unequally."""

from collections.abc import Sequence


def balance(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Returns the number of layers of each stage, in order, such that the most expensive stage costs least.

    Ties are broken by the least sum of squares of the stages' costs, the most even cut, and then by fewer layers in
    earlier stages. Every stage has a layer.

    Args:
        costs: costs of the layers, for example the number of parameters, or the seconds of a forward and backward.
        num_stages: number of stages.
        first: extra cost of the first stage, for the embedding.
        last: extra cost of the last stage, for the head.

    Raises:
        ValueError: there are fewer layers than stages, or a cost is negative or not finite.

    Example:
        >>> balance([1.0] * 10, 4)
        (2, 2, 3, 3)
        >>> balance([1.0] * 10, 4, last=2.0)
        (3, 3, 3, 1)
        >>> balance([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2)
        (1, 5)
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut in {num_stages} stages, each with a layer.")
    wrong = [c for c in (*costs, first, last) if not 0 <= c < float("inf")]
    if wrong:
        raise ValueError(f"costs must be finite and not negative, got {wrong}.")
    sums = [0.0]
    for c in costs:
        sums.append(sums[-1] + c)

    def stage_cost(stage: int, start: int, stop: int) -> float:
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return sums[stop] - sums[start] + extra

    worst = _find_least(len(costs), num_stages, stage_cost, max, float("inf"))[0]
    return _find_least(len(costs), num_stages, stage_cost, lambda a, b: a + b * b, worst)[1]


def _find_least(num: int, num_stages: int, cost, join, limit: float) -> tuple[float, tuple[int, ...]]:  # pyright: ignore
    """Returns the least cost, joined stage by stage, and the cut, among cuts whose stages each cost at most `limit`.

    Dynamic programming over stages: `best` maps the number of layers used so far to the least cost and the best cut.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        left = num_stages - stage - 1
        for start, (so_far, cut) in best.items():
            for stop in range(start + 1, num - left + 1):
                one = cost(stage, start, stop)
                if one > limit:
                    break
                made = join(so_far, one), (*cut, stop - start)
                after[stop] = min(after.get(stop, made), made)
        best = after
    return best[num]
