"""The search: of all ways to run a global batch on a mesh's ranks, those that fit, fastest first. Deterministic."""

import dataclasses
import itertools
from collections.abc import Iterator

from ._plan import Plan, plan, problems
from ._states import Setup


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: plans that fit, fastest first; of equally fast ones the smaller first.
        failed: of each (tp, stage) or (tp, stage, remat) none of whose plans fits, the smallest plan.
        tried: how many plans were made.
        skipped: why whole families were not tried.
    """

    best: tuple[Plan, ...]
    failed: tuple[Plan, ...]
    tried: int
    skipped: tuple[str, ...]


def search(setup: Setup) -> Found:
    """Tries every ZeRO stage, accumulation, remat and, if the mesh names tp, every split of its ranks in dp x tp.

    The global batch (batch x dp of `setup`), sequence, precision, device and the number of ranks stay as they are.

    Raises:
        ValueError: the settings that stay are out of range.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("gpt2-xl", parse_model("gpt2-xl"), {"dp": 8}, cluster("a100-40"), Zero(), batch=8)
        >>> found = search(run)
        >>> found.best[0].fits, found.tried
        (True, 32)
    """
    plan(setup)
    skipped: list[tuple[int, str]] = []
    plans = [plan(candidate) for candidate in _candidates(setup, skipped)]
    fitting = sorted((p for p in plans if p.fits), key=_order)
    return Found(tuple(fitting), _failed(plans, fitting), len(plans), _merged(skipped))


def _failed(plans: list[Plan], fitting: list[Plan]) -> tuple[Plan, ...]:
    """The smallest plan of each family that does not fit; one for both settings of remat where neither fits."""
    good, good_stages = {_family(p) for p in fitting}, {_family(p)[:2] for p in fitting}
    smallest: dict[tuple[int, ...], Plan] = {}
    for p in sorted(plans, key=lambda p: (p.peak, _order(p))):
        family = _family(p)
        if family not in good:
            smallest.setdefault(family if family[:2] in good_stages else family[:2], p)
    return tuple(smallest[f] for f in sorted(smallest))


def _merged(skipped: list[tuple[int, str]]) -> tuple[str, ...]:
    """One line a reason."""
    reasons: dict[str, list[int]] = {}
    for tp, reason in skipped:
        reasons.setdefault(reason, []).append(tp)
    return tuple(f"tp={', '.join(map(str, tps))}: {reason}" for reason, tps in reasons.items())


def _candidates(setup: Setup, skipped: list[tuple[int, str]]) -> Iterator[Setup]:
    rows = setup.batch * setup.axis("dp")
    for tp in _divisors(setup.world) if "tp" in setup.mesh else [1]:
        dp = setup.world // tp
        mesh = {name: {"dp": dp, "tp": tp}[name] for name in setup.mesh}
        base = dataclasses.replace(setup, mesh=mesh, batch=max(1, rows // dp), accumulate=1)
        if tp > setup.cluster.per_node:
            skipped.append((tp, f"more than the {setup.cluster.per_node} ranks of a node"))
        elif rows % dp:
            skipped.append((tp, f"its ranks along dp do not divide the global batch of {rows} sequences"))
        elif problems(base):
            skipped.append((tp, "; ".join(problems(base))))
        else:
            yield from _of_mesh(base)


def _of_mesh(base: Setup) -> Iterator[Setup]:
    for stage, k, remat in itertools.product(range(4), _divisors(base.batch), (False, True)):
        zero = dataclasses.replace(base.zero, stage=stage)
        yield dataclasses.replace(base, zero=zero, accumulate=k, remat=remat)


def _order(p: Plan) -> tuple[float, int, int, int, bool, int]:
    s = p.setup
    return p.cost.seconds, p.peak, s.zero.stage, s.accumulate, s.remat, s.axis("tp")


def _family(p: Plan) -> tuple[int, int, int]:
    return p.setup.axis("tp"), p.setup.zero.stage, int(p.setup.remat)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
