"""Python bytecodes of a bound call, a decode step, an eager step and a captured step: equal counts under any load.

    python benchmarks/bench_bytecodes.py --leaves 20 120
    python benchmarks/bench_bytecodes.py --functions 20 --only decode
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_bytecodes.py

Bytecodes of the first rank's main thread are counted, of a call after several others, without those of torch's own
Python. The difference between two numbers of leaves, divided by theirs, is the cost of a leaf. A decode step is one of
an engine of 8 layers, with 1 and 32 sequences. `--functions` lists the functions with the most bytecodes.
"""

import argparse
import collections
import pathlib
import platform
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.collectives import GlobalTensor
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

Counts = collections.Counter[str]
ROOT = str(pathlib.Path(sf.__file__).parent)


def count_bytecodes(call: Callable[[], Any]) -> Counts:
    """Returns the number of bytecodes of each function of this package in a call, in this thread."""
    found: Counts = collections.Counter()

    def follow_frame(frame: FrameType, event: str, arg: Any) -> Any:
        del arg
        code = frame.f_code
        if event == "call":
            if not code.co_filename.startswith(ROOT):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            found[f"{code.co_filename[len(ROOT) + 1 :]}:{code.co_qualname}"] += 1
        return follow_frame

    sys.settrace(follow_frame)
    try:
        call()
    finally:
        sys.settrace(None)
    return found


def decode(params: list[Tensor], cache: list[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A cache of two leaves, written in place."""
    for w in params:
        x = torch.tanh(x * w)
    for c in cache:
        c.add_(x)
    return x, cache


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    """Multiplies by each leaf."""
    for w in params:
        x = torch.tanh(x * w)
    return x.square().mean()


def count_bound(leaves: int, mesh: sf.Mesh) -> Counts:
    """Returns the bytecodes of a bound call."""
    f = sf.sharded(sf.jit(decode, backend="graph"), mesh=mesh, in_specs=(P(),), out_specs=(None, P()), donate=1)
    params, x = f.init([torch.randn(8) for _ in range(leaves)]), torch.randn(8)
    cache = [GlobalTensor(torch.zeros(8), torch.Size([8]), P(), mesh) for _ in range(2)]
    bound = f.bind(params, cache, x)
    for _ in range(4):
        _, cache = bound(params, cache, x)
    return count_bytecodes(lambda: bound(params, cache, x))


def count_step(leaves: int, mesh: sf.Mesh, stage: int, *, jitted: bool) -> Counts:
    """Returns the bytecodes of a step."""
    zero = sf.Zero(stage=stage, persist_elements=0)
    f = sf.jit(loss, backend="graph") if jitted else loss
    step = sf.sharded_step(f, sf.optim.adamw(1e-3), mesh=mesh, zero=zero, batch=P("dp"))
    state, x = step.init([torch.randn(8) for _ in range(leaves)]), torch.randn(4, 8)
    for _ in range(4):
        state, _ = step(state, x)
    return count_bytecodes(lambda: step(state, x))


def count_decode(num: int, mesh: sf.Mesh) -> Counts:
    """Returns the bytecodes of a step of an engine that decodes a number of sequences."""
    sizes = {"vocab_size": 64, "num_layers": 8, "d_model": 32, "num_heads": 4, "d_ff": 64, "max_len": 256}
    model = decoder(gpt.Config.llama_like(**sizes, batch_invariant=True))
    params = gpt.init(gpt.Config.llama_like(**sizes, batch_invariant=True), sf.key(0))
    engine = Engine(model, params, mesh=mesh, limits=limits_of(model, running=32, buckets=(1, 32, 64)))
    for _ in range(num):
        engine.add([7] * 4, Sampling(max_tokens=100, temperature=0.0))
    while engine.stats.counts["waiting"]:
        engine.step()
    for _ in range(32):
        engine.step()
    return count_bytecodes(engine.step)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs=2, default=[20, 120])
    parser.add_argument("--functions", type=int, default=0, help="functions to list for each call")
    parser.add_argument("--only", default="", help="calls whose names contain this")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = parser.parse_args()
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    rows: dict[str, Callable[[int], Counts]] = {"bound call": lambda n: count_bound(n, mesh)}
    for stage in range(4):
        for jitted in (False, True):
            name = f"{'captured' if jitted else 'eager'} step, stage {stage}"
            rows[name] = lambda n, s=stage, j=jitted: count_step(n, mesh, s, jitted=j)
    tables = {"leaf": (args.leaves, rows)}
    if mesh.size == 1:
        tables["sequence"] = (1, 32), {"decode step": lambda n: count_decode(n, mesh)}
    say = print if mesh.rank == 0 else lambda *text, **how: None
    say(f"torch {torch.__version__}, Python {platform.python_version()}, {mesh.size} ranks; bytecodes of shardfn")
    for noun, ((few, many), calls) in tables.items():
        chosen = {name: count for name, count in calls.items() if args.only in name}
        say(f"| call | {few} | {many} | a {noun} |\n|---|---|---|---|" if chosen else "", end="\n" if chosen else "")
        for name, count in chosen.items():
            a, b = count(few), count(many)
            say(f"| {name} | {a.total()} | {b.total()} | {(b.total() - a.total()) / (many - few):.1f} |")
            for function, most in b.most_common(args.functions):
                say(f"| - {function} | {a[function]} | {most} | |")


if __name__ == "__main__":
    main()
