"""Draws docs/figures/peers.svg, the picture of README, from the published results: python docs/make_peers.py"""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
TIMES, PEAKS = RESULTS / "step_time_peers_epyc2_202611.md", RESULTS / "memory_peers_epyc2_202611.md"
NAMES = {
    "ddp": "DDP",
    "shardfn0": "shardfn, stage 0",
    "deepspeed1": "DeepSpeed, stage 1",
    "shardfn1": "shardfn, stage 1",
    "deepspeed2": "DeepSpeed, stage 2",
    "shardfn2": "shardfn, stage 2",
    "deepspeed3": "DeepSpeed, stage 3",
    "fsdp2": "FSDP2",
    "shardfn3": "shardfn, stage 3",
}
WIDTH, ROW, TOP, LEFT, MIDDLE = 900, 24, 52, 140, 500


def rows(path: pathlib.Path) -> dict[str, list[str]]:
    """Peer -> the cells of its row in the first table."""
    lines = [line.strip("| \n").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines if cells[0] in NAMES}


def ratios(path: pathlib.Path) -> dict[str, tuple[float, float, float]]:
    """Peer -> median and quartiles of its step time, in those of DDP."""
    found = {}
    for peer, cells in rows(path).items():
        low, high = map(float, re.split(r" \.\. ", cells[4]))
        found[peer] = (float(cells[3]), low, high)
    return found


def picture(times: dict[str, tuple[float, float, float]], peaks: dict[str, float]) -> str:
    """Two columns of bars; thin lines are quartiles."""
    height = TOP + ROW * len(NAMES) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">Step time, relative to DDP</text>',
        f'<text x="{MIDDLE + 40}" y="20" font-size="14">Peak tensor memory per rank, MiB</text>',
        f'<text x="{LEFT}" y="38" fill="#666">median and quartiles; shorter is better</text>',
        f'<text x="{MIDDLE + 40}" y="38" fill="#666">shorter is better</text>',
    ]
    times_scale = (MIDDLE - LEFT - 60) / max(high for _, _, high in times.values())
    peaks_scale = (WIDTH - MIDDLE - 110) / max(peaks.values())
    for row, (peer, name) in enumerate(NAMES.items()):
        y = TOP + ROW * row
        color = "#5b93d3" if peer.startswith("shardfn") else "#b0b0b0"
        lines.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
        median, low, high = (times_scale * value for value in times[peer])
        lines.append(f'<rect x="{LEFT}" y="{y + 2}" width="{median:.1f}" height="16" fill="{color}"/>')
        lines.append(
            f'<path d="M{LEFT + low:.1f},{y + 10}H{LEFT + high:.1f}M{LEFT + low:.1f},{y + 6}v8'
            f'M{LEFT + high:.1f},{y + 6}v8" stroke="#222" fill="none"/>'
        )
        lines.append(f'<text x="{LEFT + high + 6:.1f}" y="{y + 14}">{times[peer][0]:.2f}</text>')
        wide = peaks_scale * peaks[peer]
        lines.append(f'<rect x="{MIDDLE + 40}" y="{y + 2}" width="{wide:.1f}" height="16" fill="{color}"/>')
        lines.append(f'<text x="{MIDDLE + 46 + wide:.1f}" y="{y + 14}">{peaks[peer]:.0f}</text>')
    y = height - 10
    lines.append(
        f'<text x="8" y="{y}" fill="#666">GPT of 33.7M parameters, float32, AdamW; 2 gloo ranks of one thread on one'
        " 2-core AMD EPYC machine; torch 2.13.0+cpu</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    peaks = {peer: float(cells[0]) for peer, cells in rows(PEAKS).items()}
    (ROOT / "docs/figures/peers.svg").write_text(picture(ratios(TIMES), peaks))
