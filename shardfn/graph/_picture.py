"""Pictures of a captured step: compute and transfers over time, and memory. Matplotlib is imported when needed."""

from typing import TYPE_CHECKING, Any

from ._cost import Estimate
from ._memory import KINDS, MemoryAnalysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {
    "compute": "#5b93d3",
    "wait": "#d9d9d9",
    "all_gather": "#e58a3c",
    "psum_scatter": "#6fb35f",
    "psum": "#9a7bc0",
}
_OTHER = "#8a8a8a"


def picture_of_time(found: Estimate) -> "Figure":
    """Draws lanes of compute and waiting, of the transfers along each axes and of moves, over predicted milliseconds.

    Raises:
        ImportError: matplotlib is not installed.
    """
    lanes = ["compute", *dict.fromkeys(e.lane for e in found.events if e.lane not in ("compute", "wait"))]
    figure = _format_height(1.2 + 0.5 * len(lanes))
    axes, known = figure.add_subplot(), set[str]()
    for event in found.events:
        here = event.lane in ("compute", "wait")
        kind = event.lane if here else event.detail.partition(" ")[0]
        row, span = 0 if here else lanes.index(event.lane), (event.start * 1e3, event.seconds * 1e3)
        label = "_" if kind in known else kind
        axes.broken_barh([span], (row - 0.4, 0.8), facecolors=_COLORS.get(kind, _OTHER), label=label)
        known.add(kind)
    axes.set_yticks(range(len(lanes)), [lanes[0], *(x if "->" in x else f"transfers over {x}" for x in lanes[1:])])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, predicted")
    axes.set_title(f"{found.seconds * 1e3:.3g} ms a step, and {found.compute * 1e3:.3g} ms compute")
    if known:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def picture_of_memory(found: MemoryAnalysis) -> "Figure":
    """Draws the bytes alive on the device after each op, with the phases, and next to the curve the peak by kind.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _format_height(3.6)
    over, at_peak = figure.subplots(1, 2, width_ratios=[3, 1])
    mib = [nbytes / (1 << 20) for nbytes in found.timeline]
    over.fill_between(range(len(mib)), mib, color=_COLORS["compute"], alpha=0.5)
    over.axhline(found.peak / (1 << 20), color="black", linewidth=0.8, linestyle="--")
    over.set_ylim(bottom=0)
    for phase, at in found.begins.items():
        over.axvline(at, color="grey", linewidth=0.8, linestyle=":")
        over.text(at, 0, f" {phase}", fontsize=8)
    over.set_xlabel("ops, in the order in which they run")
    over.set_ylabel("MiB alive")
    over.set_title(f"peak {found.peak / (1 << 20):,.3g} MiB in {found.phase} at {found.node}")
    kinds = [kind for kind in KINDS if found.by_kind[kind]]
    at_peak.barh(kinds, [found.by_kind[kind] / (1 << 20) for kind in kinds], color=_COLORS["compute"])
    at_peak.invert_yaxis()
    at_peak.set_xlabel("MiB at the peak")
    return figure


def _format_height(height: float) -> Any:
    try:
        from matplotlib.figure import Figure  # an extra dependency, as slow to import as shardfn
    except ImportError as error:
        raise ImportError(
            "pictures are drawn with matplotlib, which must be installed: pip install 'shardfn[train]'."
        ) from error
    return Figure(figsize=(9, height), layout="constrained")
