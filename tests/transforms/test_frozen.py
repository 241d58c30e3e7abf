"""Covers the effects of a step, as text that is kept: its program, bytes, peak memory and transfers.

The order of transfers is that of the program. Those of an eager step are counted: a gather after an update starts when
its rows are there, so that its place among the others is a matter of time.

Five cases are kept in full, `frozen/<case>.txt`, for reading. For the others `frozen/facts.txt` has the ops by kind,
the bytes, the peak memory and a hash of the order in which transfers start and are waited for. Refactoring changes none
of these; a change of the step shows all its effects here. After reading the differences, write them anew:

    python tests/transforms/test_frozen.py                    # all cases
    python tests/transforms/test_frozen.py zero3              # those whose name has "zero3"
    python tests/transforms/test_frozen.py --show zero3_lamb  # prints the text, to compare with another commit's
"""

import contextlib
import functools
import hashlib
import math
import pathlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import Traffic
from shardfn.collectives.transport._transfers import _COUNTERS
from shardfn.testing import distributed

FROZEN = pathlib.Path(__file__).parent / "frozen"
LAYERS, WIDTH, ROWS = 4, 6, 8
# Thresholds that the leaves below fall on both sides of.
ODD: dict[str, Any] = {"persist_elements": 4, "bucket_bytes": 128, "prefetch_bytes": 300}
DP, GRID = MappingProxyType({"dp": 2}), MappingProxyType({"node": 2, "dp": 2})


class Case(NamedTuple):
    """One step: the rule, the transform of the loss, the optimizer, the mesh, the options of `jit`."""

    zero: Mapping[str, Any] = MappingProxyType({"stage": 3})
    wrap: str = ""
    optimizer: str = "adamw"
    mesh: Mapping[str, int] = DP
    stacked: bool = False
    schedule: Mapping[str, Any] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})


HOST = {"params": "host", "grads": "host", "optimizer": "host"}
DISK = {"params": "disk", "optimizer": "disk"}
NODES: dict[str, Any] = {"stage": 3, "axis": ("node", "dp")}
CASES: dict[str, Case] = {
    **{f"zero{n}": Case({"stage": n}) for n in range(4)},
    **{f"zero{n}_accumulate": Case({"stage": n}, wrap="accumulate") for n in range(4)},
    **{f"zero{n}_accumulate_once": Case({"stage": n, "accumulate": "once"}, wrap="accumulate") for n in (1, 2, 3)},
    **{f"zero{n}_clip": Case({"stage": n}, optimizer="clip") for n in (0, 1, 3)},
    **{f"zero{n}_bf16": Case({"stage": n}, wrap="bf16") for n in (0, 2, 3)},
    **{f"zero{n}_stacked": Case({"stage": n}, stacked=True) for n in (2, 3)},
    "zero3_three_ranks": Case(mesh={"dp": 3}),
    "zero3_alone": Case(mesh={"dp": 1}),
    "zero3_lamb": Case(optimizer="lamb"),
    "zero3_remat": Case(wrap="remat"),
    "zero3_stacked_remat": Case(wrap="remat", stacked=True),
    "zero3_stacked_accumulate": Case(wrap="accumulate", stacked=True),
    "zero3_frozen": Case(options={"trainable": {"blocks": False, "in": True, "out": True, "scale": True}}),
    "zero3_skip": Case(options={"skip_nonfinite": True}),
    "zero3_unscheduled": Case(schedule={"prefetch": None, "bucket": None, "reductions": None, "donate": False}),
    "zero3_host": Case({"stage": 3, **HOST}),
    "zero2_host": Case({"stage": 2, "grads": "host", "optimizer": "host"}),
    "zero3_host_stacked": Case({"stage": 3, **HOST}, stacked=True),
    "zero3_host_clip_bf16": Case({"stage": 3, **HOST}, wrap="bf16", optimizer="clip"),
    "zero3_disk": Case({"stage": 3, **DISK}),
    "zero1_grid": Case({"stage": 1, "axis": ("node", "dp")}, mesh=GRID),
    "zero3_grid": Case(NODES, mesh=GRID),
    "zero3_grid_near": Case({"stage": 3, "axis": "dp"}, mesh=GRID),
    "zero3_secondary": Case(NODES | {"secondary_axis": "dp"}, mesh=GRID),
    "zero3_codes": Case(
        NODES | {"secondary_axis": "dp", "gather": "int8", "reduce": "int4", "block_elements": 16}, mesh=GRID
    ),
    "zero3_int8": Case({"stage": 3, "gather": "int8", "reduce": "int8", "block_elements": 16}),
    "zero1_onebit": Case({"stage": 1}, optimizer="onebit"),
    "zero3_onebit": Case(optimizer="onebit"),
}
IN_FULL = ("zero0", "zero1", "zero3", "zero3_stacked", "zero3_host")
DAILY = ("zero0", "zero2_accumulate", "zero3_stacked")


def _params(stacked: bool) -> Any:
    g = torch.Generator().manual_seed(0)
    layers = LAYERS if stacked else 2
    w = torch.randn(layers, WIDTH, WIDTH + 1, generator=g) / 3
    gain = torch.randn(layers, WIDTH, generator=g)
    ends = {
        "in": torch.randn(5, WIDTH, generator=g),
        "out": torch.randn(WIDTH, 3, generator=g),
        "scale": torch.ones(()),
    }
    if stacked:
        return {"blocks": {"w": w, "gain": gain}, **ends}
    return {"blocks": [{"w": w[i].clone(), "gain": gain[i].clone()} for i in range(layers)], **ends}


def _block(h: Tensor, p: Any) -> tuple[Tensor, None]:
    """Uses `w` twice, so that the backward gathers for two ops."""
    return h + torch.tanh(h * p["gain"] @ p["w"]) @ p["w"].t(), None


def _loss(wrap: str, params: Any, batch: dict[str, Tensor]) -> Tensor:
    block = sf.remat(_block) if wrap == "remat" else _block
    h = batch["x"] @ params["in"]
    if isinstance(params["blocks"], dict):
        h, _ = sf.scan(block, h, params["blocks"])
    else:
        for p in params["blocks"]:
            h, _ = block(h, p)
    return ((h @ params["out"] * params["scale"] - batch["y"]) ** 2).mean()


def _optimizer(name: str) -> Any:
    clipped = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    onebit = optim.onebit_adam(1e-2, freeze_step=1)
    return {"adamw": optim.adamw(1e-2), "clip": clipped, "lamb": optim.lamb(1e-2), "onebit": onebit}[name]


def _step(case: Case, mesh: Any, directory: str, *, jit: bool) -> Any:
    loss: Any = functools.partial(_loss, case.wrap)
    if case.wrap == "accumulate":
        loss = sf.accumulate(loss, 2)
    if case.wrap == "bf16":
        loss = sf.mixed_precision(loss, sf.Policy.bf16())
    if jit:
        loss = sf.jit(loss, backend="graph", **case.schedule)
    where = {"directory": directory} if "disk" in case.zero.values() else {}
    specs: Any = sf.P()
    if case.stacked:
        specs = {"blocks": sf.Sharding(sf.P(), stacked=True), "in": sf.P(), "out": sf.P(), "scale": sf.P()}
    zero = sf.Zero.flat(**{**ODD, **case.zero, **where})
    options = {"mesh": mesh, "specs": specs, "batch": sf.P(mesh.axis_names), "zero": zero, **case.options}
    return sf.sharded_step(loss, _optimizer(case.optimizer), **options)


def _batch(n: int, share: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(100 + n)
    return {"x": torch.randn(ROWS // share, 5, generator=g), "y": torch.randn(ROWS // share, 3, generator=g)}


def program(case: Case) -> str:
    """The captured and scheduled step, its messages and its memory, for ranks that do not exist."""
    mesh = sf.make_mesh(case.mesh, device="cpu", abstract=True)
    step = _step(case, mesh, "nowhere", jit=True)
    state = sf.eval_shape(step.init, functools.partial(_params, case.stacked))
    out = []
    for phase in _phases(case):
        lowered = step.lower(state, _batch(0, mesh.size), **({} if phase is None else {"phase": phase}))
        cost, memory = lowered.cost_analysis(), lowered.memory_analysis()
        title = "" if phase is None else f" in phase {phase.name}"
        out.append(f"== program{title}\n{canonical(lowered.as_text())}")
        sent = "\n".join(f"{op} {axes}: {n} calls, {b} bytes" for (op, axes), (n, b) in sorted(cost.transfers.items()))
        out.append(f"== sent{title}\n{sent}\nflops {cost.flops}")
        held = "\n".join(f"{kind}: {n}" for kind, n in sorted(memory.by_kind.items()))
        out.append(f"== peak{title}\n{memory.peak} bytes, of which\n{held}")
    return "\n".join(out)


def _phases(case: Case) -> list[Any]:
    onebit = [optim.Phase("warmup", False), optim.Phase("switch", True), optim.Phase("compressed", True)]
    return onebit if case.optimizer == "onebit" else [None]


NAME = re.compile(r"^([A-Za-z_]\w*): ", re.M)


def canonical(text: str) -> str:
    """Names of nodes by their order, and no lines of source: neither changes the effects of a step."""
    names = {name: f"%{i}" for i, name in enumerate(dict.fromkeys(NAME.findall(text)))}
    lines = []
    for line in text.splitlines():
        code = line.partition("  # ")[0]
        lines.append(re.sub(r"(?<![\w.'])[A-Za-z_]\w*(?![\w(])", lambda m: names.get(m[0], m[0]), code))
    return "\n".join(lines)


class Log(Traffic):
    """A counter that keeps each transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def add(self, op: str, axes: tuple[str, ...], sent: int, dtype: torch.dtype | None) -> None:
        """Notes one collective."""
        kind = "" if dtype is None else f" of {str(dtype).removeprefix('torch.')}"
        self.lines.append(f"{op} {','.join(axes)}: {sent} bytes{kind}")


def logged() -> contextlib.AbstractContextManager[Any]:
    return _COUNTERS.bound(Log())


def _transfers(name: str) -> str:
    """The transfers of two eager steps, the second in the order that the first has taught; run on every rank."""
    case = CASES[name]
    mesh = sf.make_mesh(case.mesh, device="cpu")
    with tempfile.TemporaryDirectory() as directory:
        step = _step(case, mesh, directory, jit=False)
        state = step.init(_params(case.stacked))
        out = []
        for n in range(3 if case.optimizer == "onebit" else 2):
            with logged() as log:
                state, _ = step(state, _batch(n, mesh.size))
            counted = [f"{count} x {line}" for line, count in sorted(Counter(log.lines).items())]
            out.append(f"== eager step {n}\n" + "\n".join(counted or ["nothing"]))
        del state
        step.close()
    return "\n".join(out)


@distributed(world=[1, 2, 3, 4], timeout=120)
def _eager(name: str, world: int) -> str:
    assert world == _ranks(name)
    return _transfers(name)


def _ranks(name: str) -> int:
    return math.prod(CASES[name].mesh.values())


def described(name: str) -> str:
    """The text of a case. Eager transfers are those of rank 0; the program is the same seen from any rank."""
    (first, *_) = _eager(name, world=_ranks(name))
    return f"{program(CASES[name])}\n{first}\n"


NODE = re.compile(r"^(%\d+): .*? = (.*)$", re.M)
KIND = re.compile(r"start \w+( -> \w+)?|[\w.]+")


def facts(text: str) -> dict[str, list[str]]:
    """For each part of a text, by its title, the items that are kept in `facts.txt`."""
    out: dict[str, list[str]] = {}
    for part in text.removeprefix("== ").split("\n== "):
        title, *lines = part.strip().split("\n")
        if title.startswith("program"):
            codes = NODE.findall(part)
            kinds = Counter(found[0] for _, code in codes if (found := KIND.match(code)))
            out[title.replace("program", "ops")] = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
            out[title.replace("program", "order")] = [_order(codes)]
        else:
            out[title] = lines
    return out


def _order(codes: list[tuple[str, str]]) -> str:
    """A hash of the transfers' starts and waits, whose operands are numbered among these alone."""
    order, at = list[str](), dict[str, int]()
    for node, code in codes:
        if code.startswith(("start ", "wait(", "shardfn_memory.wait(")):
            at[node] = len(order)
            order.append(re.sub(r"%\d+", lambda m: str(at.get(m[0], "")), code))
    return f"{hashlib.sha256(chr(10).join(order).encode()).hexdigest()[:16]} of {len(order)} starts and waits"


def changed(old: dict[str, list[str]], new: dict[str, list[str]]) -> list[str]:
    """The differences, a line for each part."""
    out = []
    for title in {**old, **new}:
        before, after = old.get(title, []), new.get(title, [])
        gone, come = ([x for x in a if x not in b] for a, b in ((before, after), (after, before)))
        if gone or come:
            out.append(f"{title}: {'; '.join(gone) or 'nothing'} -> {'; '.join(come) or 'nothing'}")
    return out


def _read_facts() -> dict[str, dict[str, list[str]]]:
    out: dict[str, dict[str, list[str]]] = {}
    for block in (FROZEN / "facts.txt").read_text().strip().split("\n\n"):
        name, *lines = block.split("\n")
        parts = (line.strip().partition(" | ") for line in lines)
        out[name] = {title: items.split("; ") for title, _, items in parts}
    return out


def _write_facts(kept: dict[str, dict[str, list[str]]]) -> None:
    blocks = []
    for name in CASES:
        if name in kept:
            lines = [f"    {title} | {'; '.join(items)}" for title, items in kept[name].items()]
            blocks.append("\n".join([name, *lines]))
    (FROZEN / "facts.txt").write_text("\n\n".join(blocks) + "\n")


def _kept(name: str) -> Any:
    return pytest.param(name, marks=[] if name in DAILY else [pytest.mark.nightly])


@pytest.mark.day("zero0")
@pytest.mark.parametrize("name", [_kept(name) for name in CASES])
def test_a_step_equals_its_frozen_program(name: str) -> None:
    text = described(name)
    if name in IN_FULL:
        assert text == (FROZEN / f"{name}.txt").read_text()
        return
    differences = changed(_read_facts()[name], facts(text))
    assert not differences, "\n".join([f"{name} has changed (kept -> now):", *differences])


def test_every_case_is_kept() -> None:
    assert sorted(f.stem for f in FROZEN.glob("*.txt")) == sorted([*IN_FULL, "facts"])
    assert [*_read_facts()] == [name for name in CASES if name not in IN_FULL]


def test_a_changed_op_is_shown_by_its_kind_and_a_changed_order_by_its_hash() -> None:
    text = (FROZEN / "zero3_host.txt").read_text()
    kept = facts(text)
    assert changed(kept, kept) == []
    (tanh,) = [x for x in kept["ops"] if x.endswith("aten.tanh_")]
    assert changed(kept, facts(text.replace("aten.tanh_(", "aten.tanh("))) == [f"ops: {tanh} -> {tanh[:-1]}"]
    peak = kept["peak"][0]
    assert changed(kept, facts(text.replace(peak, "1 bytes"))) == [f"peak: {peak} -> 1 bytes"]
    first, second = (
        line for line in text.split("\n") if "start host -> device((%4))" in line or "device((%0))" in line
    )
    swapped = text.replace(f"{first}\n", "").replace(second, f"{second}\n{first}")
    (line,) = changed(kept, facts(swapped))
    assert line.startswith("order: ") and line.count("starts and waits") == 2


def _write(names: list[str]) -> None:
    for name in names:
        text = described(name)
        if name in IN_FULL:
            (FROZEN / f"{name}.txt").write_text(text)
        else:
            _write_facts({**_read_facts(), name: facts(text)})
        print(name, flush=True)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--show"]
    wanted = [name for name in CASES if all(part in name for part in words)]
    if "--show" in sys.argv:
        print(*map(described, wanted), sep="\n")
    else:
        _write(wanted)
