"""Python bytecodes of a bound call, an eager step and a captured step: a count, the same on any machine under any load.

    python benchmarks/bench_bytecodes.py --leaves 20 120
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_bytecodes.py

Bytecodes of the first rank's main thread are counted, of a call after several others, without those of torch's own
Python. The difference between two numbers of leaves, divided by theirs, is the cost of a leaf.
"""

import argparse
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

ROOT = str(pathlib.Path(sf.__file__).parent)


def count_bytecodes(call: Callable[[], Any]) -> int:
    """Returns the number of bytecodes of this package that a call runs in this thread."""
    num = 0

    def follow_frame(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num
        del arg
        if event == "call":
            if not frame.f_code.co_filename.startswith(ROOT):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return follow_frame

    sys.settrace(follow_frame)
    try:
        call()
    finally:
        sys.settrace(None)
    return num


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


def count_bound(leaves: int, mesh: sf.Mesh) -> int:
    """Returns the bytecodes of a bound call."""
    f = sf.sharded(sf.jit(decode, backend="graph"), mesh=mesh, in_specs=(P(),), out_specs=(None, P()), donate=1)
    params, x = f.init([torch.randn(8) for _ in range(leaves)]), torch.randn(8)
    cache = [GlobalTensor(torch.zeros(8), torch.Size([8]), P(), mesh) for _ in range(2)]
    bound = f.bind(params, cache, x)
    for _ in range(4):
        _, cache = bound(params, cache, x)
    return count_bytecodes(lambda: bound(params, cache, x))


def count_step(leaves: int, mesh: sf.Mesh, stage: int, *, jitted: bool) -> int:
    """Returns the bytecodes of a step."""
    zero = sf.Zero(stage=stage, persist_elements=0)
    f = sf.jit(loss, backend="graph") if jitted else loss
    step = sf.sharded_step(f, sf.optim.adamw(1e-3), mesh=mesh, zero=zero, batch=P("dp"))
    state, x = step.init([torch.randn(8) for _ in range(leaves)]), torch.randn(4, 8)
    for _ in range(4):
        state, _ = step(state, x)
    return count_bytecodes(lambda: step(state, x))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs=2, default=[20, 120])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    few, many = parser.parse_args().leaves
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    rows: dict[str, Callable[[int], int]] = {"bound call": lambda n: count_bound(n, mesh)}
    for stage in range(4):
        for jitted in (False, True):
            name = f"{'captured' if jitted else 'eager'} step, stage {stage}"
            rows[name] = lambda n, s=stage, j=jitted: count_step(n, mesh, s, jitted=j)
    say = print if mesh.rank == 0 else lambda text: None
    say(f"torch {torch.__version__}, Python {platform.python_version()}, {mesh.size} ranks; bytecodes of shardfn")
    say(f"| call | {few} leaves | {many} leaves | a leaf |\n|---|---|---|---|")
    for name, count in rows.items():
        a, b = count(few), count(many)
        say(f"| {name} | {a} | {b} | {(b - a) / (many - few):.1f} |")


if __name__ == "__main__":
    main()
