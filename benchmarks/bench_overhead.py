"""The cost of Python per leaf and step, under a process group that moves nothing: seconds, calls, collections.

The model is a chain of tiny leaves, each gathered for itself (`persist_elements=0`, `bucket_bytes=0`), or with
`--model gpt` the small GPT of `_model.py` as it comes. On torch's fake process group of two ranks the difference to the
plain step is the machinery: lazy leaves, hooks, the schedule, the calls into the process group. The values computed are
meaningless, since the fake group delivers nothing.

Seconds are the processor's, of this thread, so other programs count less; calls of functions are counted, and are the
same on any machine. Collections are those of Python's collector that begin inside a step.
"""

import argparse
import cProfile
import functools
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _model import ADAMW, Model, Size, batches, params
from _model import loss as gpt_loss
from _report import publish, table
from torch import Tensor

from shardfn.core import tree_leaves

WIDTH = 16
TINY = Size(num_layers=8, d_model=64, num_heads=4, tokens=32, vocab=512, batch=4)
Steps = dict[str, Callable[[], Any]]


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    names, leaves = ("plain", *args.stages), args.leaves
    if args.model == "gpt":
        leaves = len(tree_leaves(params(TINY)))
        steps = {name: _plain_gpt() if name == "plain" else _sharded_gpt(name) for name in names}
    else:
        steps = {name: _plain(leaves) if name == "plain" else _sharded(leaves, int(name)) for name in names}
    taken, started = _interleaved(steps, args.steps)
    calls = {name: _calls(step) for name, step in steps.items()}
    rows = []
    for name, seconds in taken.items():
        low, mid, high = (1e3 * x for x in statistics.quantiles(seconds, n=4))
        extra = statistics.median(a - b for a, b in zip(seconds, taken["plain"], strict=True)) / leaves
        label = "plain step" if name == "plain" else f"stage {name}"
        best = f"{(min(seconds) - min(taken['plain'])) / leaves * 1e6:.1f}"
        ratio = statistics.median(a / b for a, b in zip(seconds, taken["plain"], strict=True))
        cells = [f"{mid:.2f}", f"{low:.2f} .. {high:.2f}", f"{ratio:.2f}", f"{extra * 1e6:.1f}", best]
        rows.append([label, *cells, f"{calls[name]:.0f}", f"{started[name] / args.steps:.2f}"])
    head = ["step", "median ms", "quartiles", "/ plain", "us per leaf above plain", "of the best steps"]
    head += ["calls a step", "collections a step"]
    what = f"{TINY}" if args.model == "gpt" else f"leaves of {WIDTH} elements"
    note = f"{leaves} leaves, {what}, fake group of 2 ranks, {args.steps} steps, processor seconds"
    publish("Overhead", f"{note}\n\n{table(head, rows)}", out=args.out, data={"seconds": taken}, as_json=args.json)
    if args.profile:
        _show(steps[args.profile])


def loss(params: dict[str, list[Tensor]], batch: dict[str, Tensor]) -> Tensor:
    """x <- x * w for every leaf w; every product saves its leaf for the backward."""
    x = batch["x"]
    for w in params["w"]:
        x = x * w
    return x.sum()


def _plain(leaves: int) -> Callable[[], Any]:
    params = {"w": [torch.ones(WIDTH, requires_grad=True) for _ in range(leaves)]}
    optimizer = torch.optim.AdamW(params["w"], fused=True, **ADAMW)

    def step() -> None:
        loss(params, {"x": torch.ones(2, WIDTH)}).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _plain_gpt() -> Callable[[], Any]:
    model, data = Model(TINY), batches(TINY, 0, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step() -> None:
        model(next(data)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _sharded(leaves: int, stage: int) -> Callable[[], Any]:
    import shardfn as sf

    zero = sf.Zero(stage=stage, persist_elements=0, travel=sf.Travel(bucket_bytes=0))
    take = sf.sharded_step(loss, _adamw(), mesh=_mesh(), batch=sf.P("dp"), zero=zero)
    state = take.init({"w": [torch.ones(WIDTH) for _ in range(leaves)]})
    return _stepping(take, state, lambda: {"x": torch.ones(2, WIDTH)})


def _sharded_gpt(name: str) -> Callable[[], Any]:
    import shardfn as sf

    stage, _, backend = name.partition("=")
    f: Any = sf.jit(gpt_loss(TINY), backend=backend) if backend else gpt_loss(TINY)
    take = sf.sharded_step(f, _adamw(), mesh=_mesh(), batch=sf.P("dp"), zero=sf.Zero(stage=int(stage)))
    data = batches(TINY, 0, 2)
    return _stepping(take, take.init(params(TINY)), lambda: {"tokens": next(data)})


def _stepping(take: Any, state: Any, batch: Callable[[], Any]) -> Callable[[], Any]:
    def step() -> None:
        nonlocal state
        state, _ = take(state, batch())

    return step


def _adamw() -> Any:
    import shardfn as sf

    b1, b2 = ADAMW["betas"]
    return sf.optim.adamw(ADAMW["lr"], b1=b1, b2=b2, eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])


@functools.cache
def _mesh() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import shardfn as sf

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    real = sf.Mesh.new_group  # the control plane asks for gloo, which cannot run on a fake store
    sf.Mesh.new_group = lambda self, axes, backend=None: real(self, axes)
    sf.Mesh.group_for_good = lambda self: dist.new_group([0, 1])  # pyright: ignore[reportAttributeAccessIssue]
    return sf.make_mesh({"dp": 2}, device="cpu")


def _interleaved(steps: Steps, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every step in every round, and collections that began in it; three rounds warm up."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    started, now = dict.fromkeys(steps, 0), ""

    def count(phase: str, info: Any) -> None:
        del info
        if now and phase == "start":
            started[now] += 1

    gc.callbacks.append(count)
    for turn in range(rounds + 3):
        for name, step in steps.items():
            now = name if turn >= 3 else ""
            start = time.thread_time()
            step()
            seconds, now = time.thread_time() - start, ""
            if turn >= 3:
                taken[name].append(seconds)
    gc.callbacks.remove(count)
    return taken, started


def _calls(step: Callable[[], Any]) -> float:
    """Calls of functions, of Python and of C, in one step."""
    profile = cProfile.Profile()
    profile.runcall(step)
    return sum(of.callcount for of in profile.getstats())


def _show(step: Callable[[], Any]) -> None:
    profile = cProfile.Profile(time.thread_time)
    for _ in range(10):
        profile.runcall(step)
    pstats.Stats(profile).sort_stats("tottime").print_stats(40).sort_stats("cumtime").print_stats("shardfn", 60)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("chain", "gpt"), default="chain")
    parser.add_argument("--leaves", type=int, default=200)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stages", default="0,1,2,3", help="of --model gpt, 3=graph too: a back end of jit")
    parser.add_argument("--profile", default="", help="the step whose profile is printed, a name of --stages")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    args = parser.parse_args()
    args.stages = args.stages.split(",")
    return args


if __name__ == "__main__":
    main()
