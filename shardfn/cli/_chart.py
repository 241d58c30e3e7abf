"""A picture of plans, with one bar per plan: memory by kind next to the limit, and the step's time by part."""

from collections.abc import Sequence
from pathlib import Path

from ._plan import JobPlan

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
    }


def _plan_label(p: JobPlan) -> str:
    s = p.setup
    mesh = ",".join(f"{k}={v}" for k, v in s.mesh.items())
    return f"{mesh} z{s.zero.stage} k{s.accumulate}{' remat' if s.remat else ''}"
