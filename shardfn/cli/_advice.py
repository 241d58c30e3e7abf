"""Advice on a run, in words. Each piece of advice is a plan with one changed setting, and has figures."""

import dataclasses
from collections.abc import Iterator

from ._plan import JobPlan, plan
from ._states import Setup
from ._units import of_limit

_FACTORS = (2, 4, 8, 16, 32, 64)
# Below this part of the best plan a plan is not worth a larger batch. Above, the smallest batch is taken.
_NEAR = 0.9


def advice(made: JobPlan) -> tuple[str, ...]:
    """Returns changes by which a run fits, or is faster by at least a tenth, empty without any."""
    return _suggest_fit(made) if not made.fits else _suggest_speed(made)


def _suggest_fit(made: JobPlan) -> tuple[str, ...]:
    s = made.setup
    tried = [(" and ".join(words), p) for words, setup in _smaller_setups(s) for p in [plan(setup)] if p.fits]
    if tried:
        words, p = tried[0]
        return (f"{_make_sentence(words)}: then it takes {of_limit(p.peak, p.limit)}.",)
    return (
        "No stage, number of microbatches or --remat makes it fit on this mesh: take more ranks (--mesh), a larger"
        " --device, or let shardfn plan --search find how many microbatches and ranks along tp it takes.",
    )


def _smaller_setups(s: Setup) -> Iterator[tuple[list[str], Setup]]:
    """Yields settings that take less memory, the cheapest change first."""
    for stage in range(s.zero.stage, 4):
        for k in dict.fromkeys((s.accumulate, s.batch)):
            for remat in (s.remat,) if s.remat else (False, True):
                words = [f"take --zero {stage}"] if stage != s.zero.stage else []
                words += [f"--accumulate {k}"] if k != s.accumulate else []
                words += ["--remat"] if remat != s.remat else []
                if words:
                    zero = dataclasses.replace(s.zero, stage=stage)
                    yield words, dataclasses.replace(s, zero=zero, accumulate=k, remat=remat)


def _suggest_speed(made: JobPlan) -> tuple[str, ...]:
    s, cost = made.setup, made.cost
    if cost.dominates == "computation" and cost.mfu > 0.5 * s.efficiency:
        return ()
    found = []
    for factor in _FACTORS:
        # Larger microbatches first: transfers of stage 3 are made again for each microbatch.
        for k in (s.accumulate, s.accumulate * factor):
            p = plan(dataclasses.replace(s, batch=s.batch * factor, accumulate=k))
            if p.fits:
                found.append(p)
    best = max((p.cost.mfu for p in found), default=0.0)
    if best < 1.1 * cost.mfu:
        return ()
    p = next(p for p in found if p.cost.mfu >= _NEAR * best)
    words = f"--batch {p.setup.batch}" + (f" --accumulate {p.setup.accumulate}" if p.setup.accumulate > 1 else "")
    why = {
        "waiting for data-parallel transfers": "the transfers of a step take as long for a few tokens as for many",
        "the pipeline": "more microbatches fill the pipeline",
        "the optimizer's memory traffic": "the update takes as long for a few tokens as for many",
    }.get(cost.dominates, "the work that a step does once takes as long for a few tokens as for many")
    return (
        f"Raise --batch: {why}. With {words} MFU is {p.cost.mfu:.1%} instead of {cost.mfu:.1%}, at"
        f" {of_limit(p.peak, p.limit)}; a global batch is {p.setup.tokens:,} tokens then, not {s.tokens:,}.",
    )


def _make_sentence(words: str) -> str:
    return "Take" + words.removeprefix("take") if words.startswith("take") else f"Take {words}"
