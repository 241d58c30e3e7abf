"""The cost of states on disk: the rate of the update, a step beside its compute and its I/O, and memory under a limit.

`update`: the update of a bf16 model whose master copies and moments (12 bytes a parameter) are on disk, against one
thread that reads and writes the same number of bytes from and to files of its own with O_DIRECT; in turns, one process.
The step may be skipped, so nothing of the update runs beside the backward.
`overlap`: whole steps with all states on disk, for several batch sizes, beside the same steps with all states in memory
(compute), beside the bytes that they moved at the plain rate of the same run (I/O; reads at the rate of reading, writes
at that of writing), and beside the floor: the steps in memory with a thread that moves those bytes, until both have
ended. On a machine with few cores, compute and I/O share them, and the floor is above their maximum.
`--optimizer`: AdamW; AdamW behind a clip by the global norm, which forbids an update beside the backward; both delayed.
`memory`: examples/bigger_than_memory.py under RLIMIT_DATA and without, and the largest model that trains under that
limit in memory.
"""

import argparse
import contextlib
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any
from unittest import mock

import torch
from _report import publish, table
from bench_disk import _Plain

import shardfn as sf
from shardfn.engine.execution import _update

MIB = 1 << 20
CLIPPED = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(1e-4))
OPTIMIZERS = {
    "adamw": lambda: sf.optim.adamw(1e-4),
    "clipped": lambda: CLIPPED,
    "delayed": lambda: sf.optim.delayed(CLIPPED),
}
WARM = 2  # turns that do not count: files are made, orders learnt
EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "bigger_than_memory.py"


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    sections, data = [], {}
    for name in args.cases.split(","):
        text, found = {"update": _update_rate, "overlap": _overlap, "memory": _memory}[name](args)
        sections.append(f"## {name}\n\n{text}")
        data[name] = found
    publish("States on disk", "\n\n".join(sections), out=args.out, data=data, as_json=args.json)


def _loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.float().square().mean()


def _step(args: argparse.Namespace, zero: sf.Zero, policy: sf.Policy | None, **options: Any) -> tuple[Any, Any]:
    loss = _loss if policy is None else sf.mixed_precision(_loss, policy)
    step = sf.sharded_step(loss, OPTIMIZERS[args.optimizer](), mesh=sf.make_mesh({"dp": 1}), zero=zero, **options)
    draw = torch.Generator().manual_seed(0)
    width = args.width
    params = [torch.randn(width, width, generator=draw) / width**0.5 for _ in range(args.layers)]
    return step, step.init(params)


def _plain(place: pathlib.Path, nbytes: int, chunk: int) -> _Plain:
    count = 8
    size = argparse.Namespace(buffered=False, value=max(1, nbytes // count // MIB), values=count)
    return _Plain(place / "plain", size, chunk)


def _update_rate(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    psi, chunk = args.layers * args.width**2, args.chunk * MIB
    taken: dict[str, list[float]] = {"plain": [], "update": []}
    inner = _update.stream

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        out = inner(*args)
        taken["update"].append(time.perf_counter() - start)
        return out

    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        zero = sf.Zero(
            2,
            persist_elements=0,
            grads="host",
            optimizer="disk",
            pace=sf.Pace(chunk_bytes=chunk),
            disk=sf.Disk(place + "/pool"),
        )
        step, state = _step(args, zero, sf.Policy.bf16(reduce=torch.bfloat16), skip_nonfinite=True)
        plain = _plain(pathlib.Path(place), 12 * psi, chunk)
        with mock.patch.object(_update, "stream", timed):
            for _ in range(args.rounds + 2):
                state, _ = step(state, torch.ones(1, args.width))
                start = time.perf_counter()
                plain.turn()
                taken["plain"].append(time.perf_counter() - start)
        del state
        step.close()
    pairs = list(zip(taken["plain"], taken["update"], strict=True))[2:]  # the first turns allocate
    ratios = sorted(a / b for a, b in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    rate = [24 * psi / 1e6 / statistics.median(x) for x in zip(*pairs, strict=True)]
    head = ["parameters", "moved a turn", "plain MB/s", "update MB/s", "update / plain", "quartiles"]
    row = [f"{psi:,}", f"{24 * psi / 1e9:.2f} GB", f"{rate[0]:.0f}", f"{rate[1]:.0f}", f"{middle:.2f}"]
    return table(head, [[*row, f"{low:.2f} to {high:.2f}"]]), {"turns": pairs, "psi": psi}


def _overlap(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    psi, chunk = args.layers * args.width**2, args.chunk * MIB
    rows, data = [], []
    for batch in map(int, args.batches.split(",")):
        x = torch.ones(batch, args.width)
        with tempfile.TemporaryDirectory(dir=args.directory) as place:
            kinds: dict[str, Any] = {
                "params": "disk",
                "grads": "disk",
                "optimizer": "disk",
                "directory": place + "/pool",
            }
            away, there = _step(
                args,
                sf.Zero.flat(stage=3, persist_elements=0, prefetch_bytes=16 * MIB, chunk_bytes=chunk, **kinds),
                None,
            )
            near, here = _step(args, sf.Zero(3, persist_elements=0), None)
            plain = _plain(pathlib.Path(place), 12 * psi, chunk)
            read, written, book = 0, 0, None
            turns = []
            for turn in range(args.rounds + WARM):
                # A ledger looks at every operation, so only the turns that do not count are counted.
                with sf.memory.ledger() if turn < WARM else contextlib.nullcontext(book) as book:
                    start = time.perf_counter()
                    there, _ = away(there, x)
                    times = [time.perf_counter() - start]
                read, written = book.moved("disk", "host"), book.moved("host", "disk")
                start = time.perf_counter()
                here, _ = near(here, x)
                times.append(time.perf_counter() - start)
                reading, writing = plain.turn()
                times.append((reading * read + writing * written) / (12 * psi))
                moving = threading.Thread(target=plain.turn, args=((read + written) / (24 * psi),))
                start = time.perf_counter()
                moving.start()
                here, _ = near(here, x)
                moving.join()
                times.append(time.perf_counter() - start)
                turns.append(times)
            del there, here
            away.close()
        step, compute, io, floor = (statistics.median(t) for t in zip(*turns[WARM:], strict=True))
        ratios = [
            statistics.median(t) for t in zip(*((s / max(c, i), s / f) for s, c, i, f in turns[WARM:]), strict=True)
        ]
        seconds = [f"{t:.2f}" for t in (compute, io, floor, step)]
        rows.append([batch, f"{(read + written) / 1e9:.2f}", *seconds, *(f"{r:.2f}" for r in ratios)])
        data.append({"batch": batch, "turns": turns, "read": read, "written": written})
    head = [
        "rows",
        "moved, GB",
        "compute, s",
        "I/O, s",
        "floor, s",
        "step, s",
        "step / max(compute, I/O)",
        "step / floor",
    ]
    return table(head, rows), {"cases": data}


def _memory(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    runs = [
        ("on disk, limited", ["--memory-mb", str(args.memory)]),
        ("on disk", ["--memory-mb", "0"]),
        ("in memory", ["--memory-mb", "0", "--in-memory"]),
    ]
    rows, losses = [], {}
    for name, options in runs:
        out = _example(args, ["--layers", str(args.example_layers), "--steps", "3", "--verbose", *options])
        losses[name] = re.findall(r"step \d+ loss (\S+)", out)
        found = re.search(r"([\d,]+) parameters, (\S+) GB of states.*most resident memory: ([\d,]+) MB", out, re.S)
        rows.append([name, *(found.groups() if found else ("failed", "", "")), " ".join(losses[name])])
    largest = 0
    for layers in range(1, 12):
        out = _example(args, ["--layers", str(layers), "--steps", "2", "--in-memory", "--memory-mb", str(args.memory)])
        found = re.search(r"([\d,]+) parameters", out)
        if "most resident" not in out or found is None:
            break
        largest = int(found[1].replace(",", ""))
    on_disk = int(rows[0][1].replace(",", "")) if rows[0][1] != "failed" else 0
    text = table(["run", "parameters", "states, GB", "VmHWM, MB", "losses"], rows)
    same = "equal" if len({tuple(x) for x in losses.values()}) == 1 else "NOT equal"
    text += (
        f"\n\nLosses of the runs: {same}. Under a limit of {args.memory} MB of data the largest model that trains with"
        f" its states in memory has {largest:,} parameters; on disk {on_disk:,} were trained,"
        f" {on_disk / max(largest, 1):.0f} times as many."
    )
    return text, {"losses": losses, "largest_in_memory": largest}


def _example(args: argparse.Namespace, options: list[str]) -> str:
    place = ["--scratch", args.directory] if args.directory else []
    command = [sys.executable, str(EXAMPLE), "--threads", str(args.threads), *place, *options]
    out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    return out.stdout + out.stderr


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--cases", default="update,overlap,memory")
    add("--directory", default=None, help="where the files go; the system's temporary directory")
    add("--layers", type=int, default=24)
    add("--width", type=int, default=1024)
    add("--chunk", type=int, default=16, help="MiB")
    add("--batches", default="64,512,2048", help="rows, for `overlap`")
    add("--optimizer", default="adamw", choices=OPTIMIZERS, help="for `overlap`")
    add("--rounds", type=int, default=6)
    add("--threads", type=int, default=1, help="of compute; a rank has one")
    add("--memory", type=int, default=700, help="MB, for `memory`")
    add("--example-layers", type=int, default=21)
    add("--out", default="", help="Markdown file")
    add("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
