"""Draws the pictures of docs/a_step.md from captured steps, and that of docs/memory.md: python docs/make_figures.py

A GPT of 4 blocks and width 1024 is lowered for 32 ranks that do not exist; its graph gives live memory and transfers,
and the cost model of an H100 cluster their times.
"""

import functools
import pathlib

import torch

import shardfn as sf
from shardfn.graph import Estimate, cluster, storage_of, tensors_in, transfers
from shardfn.models import gpt
from shardfn.transforms import Lowered

OUT = pathlib.Path(__file__).parent / "figures"
LEAF = "params['blocks'][1]['w_up']"
COLORS = {
    "compute": "#5b93d3",
    "all_gather": "#e58a3c",
    "psum_scatter": "#6fb35f",
    "psum": "#9a7bc0",
    "wait": "#d9d9d9",
}
STAGES = {0: "#9a7bc0", 1: "#6fb35f", 2: "#e58a3c", 3: "#5b93d3"}
WIDTH, LEFT, RIGHT = 900, 128, 20


def lowered(stage: int, prefetch: int | None = 32 << 20) -> Lowered:
    """The step at a ZeRO stage."""
    config = gpt.Config(vocab_size=8192, num_layers=4, d_model=1024, num_heads=16, max_len=1024)
    mesh = sf.make_mesh({"dp": 32}, abstract=True)
    loss = sf.jit(functools.partial(gpt.loss, config), backend="graph", prefetch=prefetch, bucket=1 << 20)
    step = sf.sharded_step(loss, sf.optim.adamw(1e-3), mesh=mesh, zero=sf.Zero(stage=stage))
    params = sf.eval_shape(functools.partial(gpt.init, config), sf.key(0))
    return step.lower(params, {"tokens": torch.empty(1, 1025, dtype=torch.int64, device="meta")})


class Picture:
    """Lines of an SVG document."""

    def __init__(self, height: int, title: str) -> None:
        self.height = height
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
            f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        ]
        self.text(8, 20, title, size=14)

    def text(self, x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> None:
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>')

    def box(self, x: float, y: float, wide: float, high: float, color: str) -> None:
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0.6):.1f}" height="{high}" fill="{color}"/>'
        )

    def line(self, points: list[tuple[float, float]], color: str, width: float = 1.0, dashes: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>')

    def save(self, name: str) -> None:
        OUT.mkdir(exist_ok=True)
        (OUT / name).write_text("\n".join([*self.lines, "</svg>", ""]))


def kind_of(low: Lowered) -> dict[str, str]:
    """Node -> the collective that it starts."""
    return {t.node.name: t.op for t in transfers(low.gm)}


def boundaries(low: Lowered) -> list[int]:
    """Positions in the graph at which the forward, the backward and the update begin, and its end."""
    nodes = list(low.gm.graph.nodes)
    marks = [node.meta.get("phase") for node in nodes]
    ops = [i for i, node in enumerate(nodes) if node.op == "call_function"]
    last = max(i for i, mark in enumerate(marks) if mark == "backward")
    return [ops[0], marks.index("backward"), last + 1, len(nodes)]


def memory() -> None:
    """Live memory of a rank over a step, at the four stages."""
    picture = Picture(330, "Bytes alive on one of 32 ranks over a step, by ZeRO stage")
    top, bottom, parts = 44.0, 292.0, 3
    lows = {stage: lowered(stage) for stage in STAGES}
    most = max(max(low.memory_analysis().timeline) for low in lows.values())
    part = (WIDTH - LEFT - RIGHT) / parts
    for i, phase in enumerate(("forward", "backward", "update")):
        picture.text(LEFT + part * (i + 0.5), 316, phase, anchor="middle")
        picture.line([(LEFT + part * i, top), (LEFT + part * i, bottom)], "#bbb", dashes="3 3")
    step = 500 << 20
    for n in range(most // step + 1):
        y = bottom - n * step / most * (bottom - top)
        picture.text(LEFT - 8, y + 4, f"{n * step >> 20} MiB", anchor="end")
        picture.line([(LEFT, y), (WIDTH - RIGHT, y)], "#ddd")
    for stage, low in lows.items():
        alive, ends = low.memory_analysis().timeline, boundaries(low)
        points = []
        for i in range(parts):
            span = alive[ends[i] : ends[i + 1]]
            for k, nbytes in enumerate(span):
                x = LEFT + part * (i + k / len(span))
                points.append((x, bottom - nbytes / most * (bottom - top)))
        picture.line(points, STAGES[stage], 1.6)
        picture.box(LEFT + 2.2 * part, top + 42 + 18 * stage, 12, 10, STAGES[stage])
        picture.text(LEFT + 2.2 * part + 18, top + 51 + 18 * stage, f"stage {stage}: peak {max(alive) >> 20} MiB")
    picture.save("memory.svg")


def lanes(picture: Picture, top: float, title: str, found: Estimate, kinds: dict[str, str], most: float) -> None:
    """One timeline: the lane that computes, and the lane of the transfers."""
    scale = (WIDTH - LEFT - RIGHT) / most
    picture.text(8, top + 14, f"{title}: {found.seconds * 1e3:.1f} ms a step", size=13)
    for row, name in enumerate(("compute", "transfers")):
        picture.text(8, top + 40 + 26 * row, name)
    for event in found.events:
        row = event.lane not in ("compute", "wait")
        kind = kinds.get(event.name, event.lane) if row else event.lane
        picture.box(LEFT + event.start * scale, top + 26 + 26 * row, event.seconds * scale, 20, COLORS[kind])


def schedule() -> None:
    """When a step computes and when it sends, with and without prefetch."""
    link = cluster("h100")
    runs = {"no prefetch": lowered(3, None), "prefetch of 32 MiB": lowered(3)}
    found = {name: low.estimate(link) for name, low in runs.items()}
    most = max(e.seconds for e in found.values())
    picture = Picture(238, "A ZeRO-3 step on 32 H100 in 4 nodes, as the cost model sees it")
    for i, (name, low) in enumerate(runs.items()):
        lanes(picture, 34 + 84 * i, name, found[name], kind_of(low), most)
    for i, (kind, color) in enumerate(COLORS.items()):
        picture.box(LEFT + 130 * i, 212, 12, 12, color)
        picture.text(LEFT + 130 * i + 18, 222, kind)
    picture.save("schedule.svg")


def alive(low: Lowered, node: torch.fx.Node) -> int:
    """Position of the last node that reads the memory of a node's result."""
    nodes = list(low.gm.graph.nodes)
    mine = {storage_of(t) for t in tensors_in(node.meta["val"])}
    users = [
        i
        for i, other in enumerate(nodes)
        if any(storage_of(t) in mine for a in other.all_input_nodes for t in tensors_in(a.meta.get("val")))
    ]
    return max(users)


def leaf() -> None:
    """The way of one leaf through a step: its live parts, and when."""
    low = lowered(3)
    nodes = list(low.gm.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    ends = boundaries(low)
    part = (WIDTH - LEFT - RIGHT - 20) / 3
    picture = Picture(238, f"{LEAF}, 4096 x 1024, on one of 32 ranks, over a step at stage 3")

    def x(i: int) -> float:
        n = max(k for k in range(3) if ends[k] <= i)
        return LEFT + 20 + part * (n + (i - ends[n]) / (ends[n + 1] - ends[n]))

    for i, phase in enumerate(("forward", "backward", "update")):
        picture.text((x(ends[i]) + x(ends[i + 1])) / 2, 228, phase, anchor="middle")
        picture.line([(x(ends[i]), 36), (x(ends[i]), 212)], "#bbb", dashes="3 3")
    rows = ("own part, 512 KiB", "being gathered", "whole, 16 MiB", "gradient reduced", "moments, 1 MiB")
    for row, name in enumerate(rows):
        picture.text(8, 56 + 36 * row, name)
    picture.box(x(ends[0]), 42, x(ends[3]) - x(ends[0]), 20, "#b8cfe8")
    picture.box(x(ends[0]), 186, x(ends[3]) - x(ends[0]), 20, "#d8c8ea")
    for move in transfers(low.gm):
        if LEAF not in move.leaves or move.wait is None:
            continue
        start, wait = at[move.node], at[move.wait]
        row = 1 if move.op == "all_gather" else 3
        picture.box(x(start), 42 + 36 * row, x(wait) - x(start), 20, COLORS[move.op])
        if row == 1:
            picture.box(x(wait), 114, x(alive(low, move.wait)) - x(wait), 20, "#5b93d3")
    picture.save("leaf.svg")


def ledger() -> None:
    """The memory of an eager step on one CPU, as a ledger sees it."""
    config = gpt.Config(vocab_size=512, num_layers=3, d_model=128, num_heads=4, max_len=64)
    step = sf.sharded_step(functools.partial(gpt.loss, config), sf.optim.adamw(1e-3))
    state = step.init(gpt.init(config, sf.key(0)))
    batch = {"tokens": torch.arange(4 * 65).view(4, 65) % 512}
    with sf.memory.ledger("cpu", timeline=True) as book:
        book.count(state, "device")
        state, _ = step(state, batch)
    OUT.mkdir(exist_ok=True)
    book.plot(OUT / "ledger.svg")


if __name__ == "__main__":
    memory()
    ledger()
    schedule()
    leaf()
