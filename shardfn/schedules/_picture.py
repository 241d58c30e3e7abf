"""Pictures of timelines: text for a terminal, and SVG for a page."""

import math

from ._timeline import Span, Timeline

# Forward, backward and weights. The second chunk of a rank is darker.
_COLORS = {
    "forward": ("#a8c8ec", "#5b93d3"),
    "backward": ("#f7c59f", "#e58a3c"),
    "weights": ("#b9dfb0", "#6fb35f"),
}
_ROW, _TOP, _LEFT = 24, 30, 58


def as_picture(run: Timeline, unit: float | None = None) -> str:
    """Returns a picture in text, a line per rank: time runs to the right, dots are idle, dashes continue an action.

    Args:
        run: timeline.
        unit: time of a column. Default: the duration of the shortest action.

    Example:
        >>> from shardfn.schedules import one_f_one_b, timeline
        >>> print(as_picture(timeline(one_f_one_b(2, 3))))
        1f1b: 2 ranks, 3 microbatches, 25.0% idle
        0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --
        1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..
    """
    spans = [span for row in run.ranks for span in row]
    unit = unit or min(span.end - span.start for span in spans)
    width = max(len(str(span.action)) for span in spans)
    num = math.ceil(run.makespan / unit - 1e-9)
    lines = [_span_title(run)]
    for rank, row in enumerate(run.ranks):
        cells = ["." * width] * num
        for span in row:
            first = round(span.start / unit)
            for i in range(first, max(first + 1, round(span.end / unit))):
                cells[i] = (str(span.action) if i == first else "").ljust(width, " " if i == first else "-")
        lines.append(f"{rank}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def as_svg(run: Timeline, width: int = 900) -> str:
    """Returns the picture as an SVG document `width` pixels wide.

    Example:
        >>> from shardfn.schedules import gpipe, timeline
        >>> as_svg(timeline(gpipe(2, 2))).startswith("<svg ")
        True
    """
    scale = (width - _LEFT - 10) / run.makespan
    height = _TOP + _ROW * len(run.ranks) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="4" y="17" font-size="13">{_span_title(run)}</text>',
    ]
    for rank, row in enumerate(run.ranks):
        top = _TOP + _ROW * rank
        out.append(f'<text x="4" y="{top + 14}">rank {rank}</text>')
        out += [_span_box(span, top, scale) for span in row]
    return "\n".join([*out, "</svg>", ""])


def _span_title(run: Timeline) -> str:
    of = run.schedule
    return f"{of.name}: {of.num_ranks} ranks, {of.num_microbatches} microbatches, {run.bubble:.1%} idle"


def _span_box(span: Span, top: int, scale: float) -> str:
    x, wide = _LEFT + span.start * scale, (span.end - span.start) * scale
    color = _COLORS[span.action.kind][span.action.chunk % 2]
    label = f'<text x="{x + wide / 2:.1f}" y="{top + 14}" text-anchor="middle">{span.action.microbatch}</text>'
    rect = f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{_ROW - 4}" fill="{color}" stroke="#555"/>'
    return rect + (label if wide > 8 else "")
