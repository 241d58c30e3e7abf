"""Reports of plans and searches: tables, JSON, and a picture.

A picture of plans, with one bar per plan: memory by kind next to the limit, and the step's time by part.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ._exact import Exact
from ._plan import JobPlan, best_ep, by_ep
from ._search import LongestSequence, SearchResult
from ._states import Setup
from ._time import PlannedTransfer
from ._units import count, gb, gib, seconds, unit_of, with_unit

_KINDS = {
    "params": "this rank's pieces of the parameters",
    "grads": "this rank's pieces of the gradients",
    "optimizer": "this rank's pieces of the optimizer state",
    "gathered window": "whole parameters alive while they are in use or fetched ahead",
    "activations": "kept from the forward of one microbatch",
    "temporaries": "one operation's results in flight, gradients on their way",
    "batch": "the step's input, not counted by the formula",
}


def plan_text(p: JobPlan, exact: Exact | None = None) -> str:
    """Returns a plan as Markdown."""
    s = p.setup
    mesh = ", ".join(f"{k}={v}" for k, v in s.mesh.items())
    head = [
        f"# {s.model} on {s.world} x {s.cluster.device.name}",
        "",
        f"**{p.verdict}.** Step {seconds(p.cost.seconds)}, {p.cost.tokens_per_second:,.0f} tokens/s,"
        f" MFU {p.cost.mfu:.1%}; {p.cost.dominates} dominates.",
        "",
        f"{count(p.num_params)} parameters{_active_share(p)}; mesh {mesh}; ZeRO stage {s.zero.stage}; {s.precision};"
        f" {s.batch} x {s.seq} tokens a rank and step in {s.accumulate} microbatch{'es' * (s.accumulate > 1)};"
        f" remat {'on' if s.remat else 'off'}; global batch {s.tokens:,} tokens.",
    ]
    parts = ["\n".join(head), memory_table(p, exact), _traffic_table(p.cost.transfers, exact), _time_table(p, exact)]
    parts += [experts_text(p)] if p.experts else []
    parts += ["## Notes\n\n" + "\n".join(f"- {n}" for n in (*p.notes, *(exact.notes if exact else ())))]
    return "\n\n".join(parts) + "\n"


def experts_text(p: JobPlan) -> str:
    """Returns the experts of a run on 1, 2, .. of the ranks along dp, the fastest that fits in bold, as Markdown."""
    plans = by_ep(p)
    best = best_ep(plans)
    rows = []
    for each in plans:
        e, name = each.experts, str(each.setup.ep)
        assert e is not None
        link = "" if each.setup.ep == 1 else f"{_expert_bandwidth(each):.4g}"
        sizes = [gb(x) if each.setup.ep > 1 else "" for x in (e.balanced, e.most, e.weights)]
        fits = "yes" if each.fits else "no"
        rows.append(
            (f"**{name}**" if each is best else name, *sizes, link, gib(each.peak), fits, seconds(each.cost.seconds))
        )
    head = ("ep", "tokens, GB", "bound, GB", "or weights, GB", "GB/s", "peak GiB", "fits", "step")
    text = (
        "Bytes of the exchange that each rank sends in a step: of equally busy experts, at most, and if the experts"
        " were gathered along ep instead."
    )
    return f"## Experts on some of the ranks along dp\n\n{text}\n\n{table(head, rows)}"


def _expert_bandwidth(p: JobPlan) -> float:
    return next(t.bandwidth for t in p.cost.transfers if t.axis == "ep") / 1e9


def _active_share(p: JobPlan) -> str:
    return f", {count(p.experts.active)} of them for a token; experts on {p.setup.ep} ranks" if p.experts else ""


def longest_text(setup: Setup, found: Sequence[LongestSequence]) -> str:
    """Returns the longest sequences as Markdown."""
    ranks = setup.world
    body = (
        "Dense()"
        if ranks == 1
        else 'Ulysses("sp", tokens)'
        if ranks <= setup.config.num_heads
        else 'Ring("sp", tokens)'
    )
    rows = [(str(x.settings), f"{x.tokens:,}", f"{-(-x.tokens // ranks):,}", gib(x.peak)) for x in found]
    notes = [
        f"Attention by `nn.{body}`, and `Config(max_len=)` at least that long.",
        "Read off steps on one rank in float32; messages of attention between ranks are not counted.",
    ]
    head = f"# The longest sequence of {setup.model} on {ranks} x {setup.cluster.device.name}"
    footnotes = "\n".join(f"- {n}" for n in notes)
    return f"{head}\n\n{table(('settings', 'tokens', 'a rank', 'GiB'), rows)}\n\n{footnotes}\n"


def longest_json(found: Sequence[LongestSequence]) -> dict[str, Any]:
    """Returns the longest sequences as JSON's types."""
    return {"longest": [dataclasses.asdict(x) for x in found]}


def advice_text(told: Sequence[str]) -> str:
    """Returns advice as the last part of a report, empty without any."""
    return "\n## Advice\n\n" + "\n".join(f"- {line}" for line in told) + "\n" if told else ""


def memory_table(p: JobPlan, exact: Exact | None = None) -> str:
    """Returns the table of memory by kind."""
    measured = exact.memory if exact else {}
    unit = unit_of(max(p.peak, exact.peak if exact else 0))
    kinds = [*p.memory, *(kind for kind in measured if kind not in p.memory)]
    rows = [
        (
            kind,
            unit.of(p.memory.get(kind, 0)),
            *((unit.of(measured.get(kind, 0)),) if exact else ()),
            _KINDS.get(kind, ""),
        )
        for kind in kinds
    ]
    states = p.states.total
    limit = f"limit {with_unit(p.limit)}"
    rows.append(("**peak**", unit.of(p.peak), *((unit.of(exact.peak),) if exact else ()), limit))
    head = ("kind", unit.name, *((f"{unit.name}, captured",) if exact else ()), "what")
    title = "## Memory of the fullest rank\n\n"
    for memory, each in p.outside.items():
        what = f"on the {memory}; {with_unit(p.room[memory])} for each rank"
        captured = ("",) if exact else ()
        rows += [(f"{memory}: {kind}", unit.of(nbytes), *captured, what) for kind, nbytes in each.items()]
    tail = f"\n\nModel states (params + grads + optimizer): {gb(states)} GB = {with_unit(states)}."
    return title + table(head, rows) + tail


def search_text(found: SearchResult, number: int = 10) -> str:
    """Returns the best plans of a search, and why the other plans fail, as Markdown."""
    best = [_plan_row(i + 1, p) for i, p in enumerate(found.best[:number])]
    failed = [(*_setting_names(p), gib(p.peak), gib(p.peak - p.limit), _largest_kind(p)) for p in found.failed]
    names = ("mesh", "stage", "accumulate", "remat")
    parts = [f"# Search: {len(found.best)} of {found.tried} plans fit"]
    if best:
        parts.append(table(("", *names, "peak GiB", "step", "MFU", "tokens/s", "dominates"), best))
    if failed:
        parts.append("## Runs that do not fit, at their smallest")
        parts.append(table((*names, "peak GiB", "too many", "largest kind"), failed))
    if found.skipped:
        parts.append("## Not tried\n\n" + "\n".join(f"- {s}" for s in found.skipped))
    return "\n\n".join(parts) + "\n"


def plan_json(p: JobPlan, exact: Exact | None = None) -> dict[str, Any]:
    """Returns a plan as JSON's types; bytes and seconds."""
    s, c = p.setup, p.cost
    out: dict[str, Any] = {
        "model": s.model,
        "num_params": p.num_params,
        "config": dataclasses.asdict(s.config),
        "mesh": dict(s.mesh),
        "device": s.cluster.device.name,
        "zero": s.zero.stage,
        "precision": s.precision,
        "batch": s.batch,
        "seq": s.seq,
        "accumulate": s.accumulate,
        "remat": s.remat,
        "efficiency": s.efficiency,
        "fits": p.fits,
        "memory": {**p.memory, "peak": p.peak, "limit": p.limit, "model_states": p.states.total},
        "outside": {memory: dict(kinds) for memory, kinds in p.outside.items()},
        "room": dict(p.room),
        "traffic": [dataclasses.asdict(t) for t in c.transfers],
        "time": {
            "compute": c.compute,
            "exposed": c.exposed,
            "tensor": c.tensor,
            "experts": c.experts,
            "pipeline": c.pipeline,
            "update": c.update,
            "moves": c.moves,
            "step": c.seconds,
        },
        "dominates": c.dominates,
        "mfu": c.mfu,
        "tokens_per_second": c.tokens_per_second,
        "notes": list(p.notes),
    }
    if p.experts:
        out |= {"ep": s.ep, "experts": dataclasses.asdict(p.experts), "best_ep": best_ep(by_ep(p)).setup.ep}
    return out | ({"captured": dataclasses.asdict(exact)} if exact else {})


def search_json(found: SearchResult, number: int = 10) -> dict[str, Any]:
    """Returns a search as JSON's types."""
    return {
        "tried": found.tried,
        "fitting": len(found.best),
        "best": [plan_json(p) for p in found.best[:number]],
        "failed": [plan_json(p) for p in found.failed],
        "skipped": list(found.skipped),
    }


def dump(value: dict[str, Any]) -> str:
    """Returns the value as JSON text."""
    return json.dumps(value, indent=2, default=_function_name) + "\n"


def _function_name(value: Any) -> str:
    """Returns the name of a function of a config, or of the function inside a partial."""
    return getattr(getattr(value, "func", value), "__name__", repr(value))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table with columns aligned for reading as text.

    Example:
        >>> print(table(("kind", "n"), [("params", "12")]))
        | kind   | n  |
        | ------ | -- |
        | params | 12 |
    """
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, tuple("-" * w for w in widths))
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in lines)


def _traffic_table(transfers: Sequence[PlannedTransfer], exact: Exact | None) -> str:
    rows = [
        (t.axis, t.what, gb(t.nbytes), f"{t.messages:,}", f"{t.bandwidth / 1e9:.4g}", seconds(t.seconds))
        for t in transfers
    ]
    parts = ["## Traffic that each rank sends in a step"]
    parts.append(table(("axis", "what", "GB", "messages", "GB/s", "time"), rows) if rows else "None: one rank.")
    if exact:
        counted = [(a, what, gb(n)) for a, what, n in exact.traffic]
        parts.append("Captured:\n\n" + table(("axis", "what", "GB"), counted) if counted else "Captured: none.")
    return "\n\n".join(parts)


def _time_table(p: JobPlan, exact: Exact | None) -> str:
    c = p.cost
    rows = [
        ("computation", c.compute, f"forward and backward at {p.setup.efficiency:.0%} of the device's peak"),
        ("waiting", c.exposed, "data-parallel transfers that the computation does not hide"),
        ("tensor-parallel sums", c.tensor, "in the computation's way"),
        *((("exchange of tokens", c.experts, "in the computation's way"),) if p.experts else ()),
        *(
            (("pipeline", c.pipeline, f"{p.setup.schedule}: filling and draining, uneven stages"),)
            if c.pipeline
            else ()
        ),
        ("update", c.update, "the optimizer reads and writes its state"),
        *((("moves", c.moves, "host and disk, as far as the computation does not hide them"),) if c.moves else ()),
        ("**step**", c.seconds, f"{c.model_flops:.3g} floating-point operations of the model"),
    ]
    lines = [(name, seconds(t), f"{t / c.seconds:.1%}", what) for name, t, what in rows]
    parts = ["## Time of a step", table(("part", "time", "share", "what"), lines)]
    if exact:
        parts.append(f"Captured: {seconds(exact.seconds)}, op by op; {exact.flops:.3g} operations of this rank.")
    return "\n\n".join(parts)


def _plan_row(rank: int, p: JobPlan) -> tuple[str, ...]:
    c = p.cost
    figures = (gib(p.peak), seconds(c.seconds), f"{c.mfu:.1%}", f"{c.tokens_per_second:,.0f}", c.dominates)
    return (str(rank), *_setting_names(p), *figures)


def _setting_names(p: JobPlan) -> tuple[str, str, str, str]:
    s = p.setup
    mesh = ",".join(f"{k}={v}" for k, v in s.mesh.items())
    mesh += f", {s.schedule}" if s.axis("pp") > 1 else ""
    return mesh, str(s.zero.stage), str(s.accumulate), "on" if s.remat else "off"


def _largest_kind(p: JobPlan) -> str:
    kind = max(p.memory, key=lambda k: p.memory[k])
    return f"{kind} ({gib(p.memory[kind])})"


# Colour-blind safe (Okabe and Ito 2008).
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00")


def write_chart(plans: Sequence[JobPlan], path: str) -> None:
    """Draws the plans to a file, with the format by the file's ending.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be a picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ValueError("--png needs matplotlib: pip install 'shardfn[train]', or leave --png out.") from e
    figure = Figure(figsize=(12, 2.6 + 0.5 * len(plans)), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    ending = Path(path).suffix.lstrip(".").lower()
    if ending not in known:
        raise ValueError(f"--png {path}: a picture cannot be written as {ending!r}. Use .png.")
    left, right = figure.subplots(1, 2)
    names = [_plan_label(p) for p in plans]
    _stack_bars(left, names, [{k: n / 2**30 for k, n in p.memory.items()} for p in plans])
    left.axvline(plans[0].limit / 2**30, color="black", linestyle="--", label="limit")
    left.set(title=f"Memory of the fullest rank, {plans[0].setup.cluster.device.name}", xlabel="GiB")
    _stack_bars(right, names, [_time_parts(p) for p in plans])
    right.set(title=f"{plans[0].setup.model}: time of a step (estimate)", xlabel="seconds")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncol=4, fontsize=8)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncol=4, fontsize=8)
    figure.savefig(path, dpi=120)


def _stack_bars(axes, names: list[str], bars: list[dict[str, float]]) -> None:
    start = [0.0] * len(bars)
    for colour, part in zip(_COLOURS, bars[0], strict=False):
        widths = [bar[part] for bar in bars]
        axes.barh(names, widths, left=start, label=part, color=colour, height=0.6)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.invert_yaxis()


def _time_parts(p: JobPlan) -> dict[str, float]:
    c = p.cost
    return {
        "computation": c.compute,
        "waiting": c.exposed,
        "tensor-parallel sums": c.tensor,
        "pipeline": c.pipeline,
        "update": c.update,
        "moves": c.moves,
    }


def _plan_label(p: JobPlan) -> str:
    s = p.setup
    mesh = ",".join(f"{k}={v}" for k, v in s.mesh.items())
    return f"{mesh} z{s.zero.stage} k{s.accumulate}{' remat' if s.remat else ''}"
