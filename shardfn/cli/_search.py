"""The search: all ways to run a global batch on a number of ranks that fit, fastest first. Deterministic."""

import dataclasses
import itertools
from collections.abc import Iterator

from shardfn.core import progress

from ._pipeline import pipeline_problems
from ._plan import JobPlan, plan, problems
from ._states import Setup

# The schedules that a search tries.
SEARCHED = ("1f1b", "interleaved", "zb-h1")


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: plans that fit, the fastest first, and the smaller first among equally fast plans.
        failed: smallest plan of each (tp, pp, stage) or (tp, pp, stage, remat) with no plan that fits.
        tried: number of plans made.
        skipped: reasons why some combinations were not tried.
    """

    best: tuple[JobPlan, ...]
    failed: tuple[JobPlan, ...]
    tried: int
    skipped: tuple[str, ...]


def search(setup: Setup) -> SearchResult:
    """Tries every ZeRO stage, accumulation, remat and, if the mesh names tp or pp, every split of the ranks.

    Along pp the schedules of `SEARCHED` are tried, with each accepted number of microbatches.

    The global batch (batch x dp of `setup`), sequence, precision, device and the number of ranks stay fixed.

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
    skipped: list[tuple[str, str]] = []
    candidates = list(_list_candidates(setup, skipped))
    plans = [plan(candidate) for candidate in progress(candidates, desc="planning", unit="plan", part=True)]
    fitting = sorted((p for p in plans if p.fits), key=_sort_key)
    return SearchResult(tuple(fitting), _smallest_failures(plans, fitting), len(plans), _merge_reasons(skipped))


def _smallest_failures(plans: list[JobPlan], fitting: list[JobPlan]) -> tuple[JobPlan, ...]:
    """Returns the smallest plan of each combination in which none fits.

    A single plan for both settings of remat if neither fits.
    """
    good, good_stages = {_plan_family(p) for p in fitting}, {_plan_family(p)[:3] for p in fitting}
    smallest: dict[tuple[int, ...], JobPlan] = {}
    for p in sorted(plans, key=lambda p: (p.peak, _sort_key(p))):
        family = _plan_family(p)
        if family not in good:
            smallest.setdefault(family if family[:3] in good_stages else family[:3], p)
    return tuple(smallest[f] for f in sorted(smallest))


def _merge_reasons(skipped: list[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the reasons, each once."""
    reasons: dict[str, list[str]] = {}
    for mesh, reason in skipped:
        reasons.setdefault(reason, []).append(mesh)
    return tuple(f"{'; '.join(meshes)}: {reason}" for reason, meshes in reasons.items())


def _list_candidates(setup: Setup, skipped: list[tuple[str, str]]) -> Iterator[Setup]:
    rows = setup.batch * setup.axis("dp")
    for tp in _list_divisors(setup.world) if "tp" in setup.mesh else [1]:
        if tp > setup.cluster.per_node:
            skipped.append((f"tp={tp}", f"more than the {setup.cluster.per_node} ranks of a node"))
            continue
        for pp in _list_divisors(setup.world // tp) if "pp" in setup.mesh else [1]:
            yield from _split_mesh(setup, rows, tp, pp, skipped)


def _split_mesh(setup: Setup, rows: int, tp: int, pp: int, skipped: list[tuple[str, str]]) -> Iterator[Setup]:
    dp = setup.world // tp // pp
    mesh = {name: {"dp": dp, "tp": tp, "pp": pp}[name] for name in setup.mesh}
    base = dataclasses.replace(setup, mesh=mesh, batch=max(1, rows // dp), accumulate=1, schedule="1f1b")
    name_of_mesh = ",".join(f"{name}={size}" for name, size in mesh.items() if name != "dp")
    if rows % dp:
        skipped.append((name_of_mesh, f"the ranks along dp do not divide the global batch of {rows} sequences"))
    elif problems(base):
        skipped.append((name_of_mesh, "; ".join(problems(base))))
    else:
        yield from _vary_mesh(base)


def _vary_mesh(base: Setup) -> Iterator[Setup]:
    schedules = SEARCHED if base.axis("pp") > 1 else SEARCHED[:1]
    choices = itertools.product(schedules, _list_divisors(base.batch))
    for schedule, k in choices:
        run = dataclasses.replace(base, accumulate=k, schedule=schedule)
        if pipeline_problems(run):
            continue
        for stage, remat in itertools.product(range(4), (False, True)):
            yield dataclasses.replace(run, zero=dataclasses.replace(base.zero, stage=stage), remat=remat)


def _sort_key(p: JobPlan) -> tuple[float, int, int, int, bool, int, int]:
    s = p.setup
    return p.cost.seconds, p.peak, s.zero.stage, s.accumulate, s.remat, s.axis("tp"), s.axis("pp")


def _plan_family(p: JobPlan) -> tuple[int, int, int, int]:
    return p.setup.axis("tp"), p.setup.axis("pp"), p.setup.zero.stage, int(p.setup.remat)


def _list_divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
