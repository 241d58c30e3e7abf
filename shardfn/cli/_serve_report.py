"""Reports of plans of servers: tables, JSON, and a picture of the latencies as SVG."""

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ._bench_rates import Slo
from ._plan_serve import ServePlan
from ._report import table
from ._units import gib, of_limit, seconds

_NAMES, _PARTS = ("ttft", "itl", "e2e"), (50, 95, 99)
_TITLES = {"ttft": "time to the first token", "itl": "time between tokens"}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
_WIDTH, _HEIGHT, _EDGE = 360, 220, 50  # of a panel, and around it


def serve_text(plans: Sequence[ServePlan], slos: Sequence[Slo], num: int) -> str:
    """Returns plans of a server as Markdown, the cheapest first.

    Args:
        plans: plans, the cheapest first.
        slos: objectives.
        num: number of requests of the trace.
    """
    best, wanted = plans[0], ", ".join(map(str, slos)) or "no objective"
    s = best.setup
    head = f"# {s.model} served on {s.cluster.device.name}: {num:,} requests, {wanted}"
    if best.found is None:
        need = of_limit(best.memory.total, best.room)
        verdict = (
            f"**Does not fit: {need}, with a cache of one sequence of {s.context} tokens.** Take more ranks of tp."
        )
        return f"{head}\n\n{verdict}\n\n{_memory_table(plans)}\n"
    count = f"{best.replicas} replica{'s' * (best.replicas > 1)} of {s.tp} x {s.cluster.device.name}"
    verdict = f"**{count} meet the objectives.**" if best.meets else f"**{count} do not meet the objectives.**"
    source = "as of the log" if s.times is not None else f"at {s.efficiency:.0%} of the device's rates: an estimate"
    parts = [head, verdict, _memory_table(plans), _latency_table(plans), _count_table(plans)]
    parts += [f"Steps without attention, {source}:\n\n{_bucket_table(best)}", f"    {command_text(best)}"]
    return "\n\n".join(parts) + "\n"


def serve_json(plans: Sequence[ServePlan], slos: Sequence[Slo]) -> dict[str, Any]:
    """Returns plans of a server as JSON's types, in bytes and milliseconds."""
    return {"slos": [str(x) for x in slos], "plans": [_plan_json(p) for p in plans]}


def command_text(p: ServePlan) -> str:
    """Returns the command of the planned server."""
    s = p.setup
    words = [f"shardfn serve {s.model}", *([f"--mesh tp={s.tp}"] if s.tp > 1 else [])]
    words += [f"--replicas {p.replicas}"] if p.replicas > 1 else []
    words += [f"--dtype {s.dtype} --context {s.context} --running {s.running} --budget {s.budget}"]
    return " ".join([*words, f"--cache-gib {p.memory.cache * s.tp / 2**30:.3f}"])


def _plan_json(p: ServePlan) -> dict[str, Any]:
    out: dict[str, Any] = {"tp": p.setup.tp, "memory": p.memory._asdict(), "room": p.room, "fits": p.found is not None}
    if p.found is None:
        return out
    found = p.found
    out |= {"replicas": p.replicas, "devices": p.devices, "meets": p.meets, "seconds": found.seconds}
    out |= {"tokens_per_second": found.tokens / found.seconds, "padding": found.padding}
    out |= {f"p{part}_{name}_ms": found.percentile(name, part) for name in _NAMES for part in _PARTS}
    out |= {"cache": found.cache._asdict(), "command": command_text(p)}
    return out | {"bucket_seconds": {str(bucket): x for bucket, x in p.bucket_seconds.items()}}


def _memory_table(plans: Sequence[ServePlan]) -> str:
    rows = []
    for p in plans:
        m, blocks = p.memory, "" if p.limits is None else f"{p.limits.usable * p.limits.block:,}"
        sizes = gib(m.weights), gib(m.cache), gib(m.step), of_limit(m.total, p.room)
        rows.append((str(p.setup.tp), *sizes, "no" if p.limits is None else "yes", blocks))
    names = ("tp", "weights, GiB", "cache, GiB", "step, GiB", "a rank", "fits", "tokens of the cache")
    return table(names, rows)


def _latency_table(plans: Sequence[ServePlan]) -> str:
    rows = []
    for p in plans:
        if p.found is not None:
            each = [seconds(p.found.percentile(name, part) / 1e3) for name in _NAMES for part in (50, 95)]
            rows.append((str(p.setup.tp), str(p.replicas), str(p.devices), *each, "yes" if p.meets else "no"))
    return table(("tp", "replicas", "devices", *(f"{n} p{x}" for n in _NAMES for x in (50, 95)), "meets"), rows)


def _count_table(plans: Sequence[ServePlan]) -> str:
    rows = []
    for p in plans:
        if (found := p.found) is not None:
            hits = found.cache.hits / max(1, found.cache.queries)
            figures = f"{found.tokens / found.seconds:,.0f}", f"{hits:.1%}", f"{found.cache.preemptions:,}"
            rows.append((str(p.setup.tp), *figures, f"{found.most_running}", f"{found.padding:.1%}"))
    return table(("tp", "tokens/s", "prefix hits", "preemptions", "most running", "padding"), rows)


def _bucket_table(p: ServePlan) -> str:
    return table(("rows", "seconds"), [(str(n), seconds(x)) for n, x in p.bucket_seconds.items()])


def serve_svg(plans: Sequence[ServePlan], slos: Sequence[Slo]) -> str:
    """Returns a picture as SVG: the part of tokens by latency, a line for each plan, dashed lines for objectives."""
    panels = [_draw_panel(plans, slos, name, i * (_WIDTH + 2 * _EDGE)) for i, name in enumerate(_TITLES)]
    size = f'width="{2 * (_WIDTH + 2 * _EDGE)}" height="{_HEIGHT + 2 * _EDGE}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n' + (
        "\n".join([*panels, "</svg>\n"])
    )


def _draw_panel(plans: Sequence[ServePlan], slos: Sequence[Slo], name: str, left: float) -> str:
    found = [(p, p.found) for p in plans if p.found is not None]
    bounds = [slo.ms for slo in slos if slo.name == name]
    most = max([1e-3, *(f.percentile(name, 99) for _, f in found), *(1.1 * x for x in bounds)])

    def place(ms: float, part: float) -> str:
        x, y = left + _EDGE + _WIDTH * min(1.0, ms / most), _EDGE + _HEIGHT * (1 - part / 100)
        return f"{x:.1f},{y:.1f}"

    def write(x: float, y: float, text: str, colour: str = "black") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{html.escape(text)}</text>'

    lines = [f'<rect x="{left + _EDGE}" y="{_EDGE}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="black"/>']
    lines.append(write(left + _EDGE, _EDGE - 8, f"{_TITLES[name]}: percent of tokens by milliseconds"))
    for tick in _list_ticks(most):
        x, y = place(tick, 0).split(",")
        lines.append(write(float(x) - 8, float(y) + 16, f"{tick:g}"))
    lines += [write(left + 16, _EDGE + _HEIGHT * (1 - part / 100) + 4, str(part)) for part in (0, 50, 100)]
    for i, (p, f) in enumerate(found):
        colour = _COLOURS[i % len(_COLOURS)]
        points = " ".join(place(f.percentile(name, part), part) for part in range(1, 101))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f"tp={p.setup.tp} x {p.replicas}"
        lines.append(write(left + _EDGE + _WIDTH - 80, _EDGE + _HEIGHT - 12 - 16 * i, label, colour))
    for x in bounds:
        points = f"{place(x, 0)} {place(x, 100)}"
        lines.append(f'<polyline points="{points}" stroke="black" stroke-dasharray="4"/>')
    return "\n".join(lines)


def _list_ticks(most: float) -> Iterator[float]:
    """Yields four to nine round numbers up to a number."""
    step = 10 ** math.floor(math.log10(most))
    step = next(s for s in (step / 5, step / 2, step) if most / s < 10)
    for i in range(int(most / step) + 1):
        yield round(i * step, 9)
