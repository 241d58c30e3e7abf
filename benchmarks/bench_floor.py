"""The floor of a step: the model's arithmetic at this machine's GEMM rate, and each stage's bytes at gloo's rate.

Both ranks are busy at once with one thread each, as in a step. GEMMs are measured at the model's own shapes, forward
and both transposes of the backward. The wire is measured as an exchange of blocks with send and recv, the cheapest
thing that gloo does, over loopback. On a CPU the wire takes cycles from the same cores, so the truth lies between the
larger of the two times (everything overlaps) and their sum (nothing does). Norms, GELU and the loss are left out.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from _model import ADAMW, FULL, num_params
from _pairs import Group
from _report import publish, table

Rates = dict[str, Any]


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    group = Group(serve, args.world).ready()
    ranks = group.ask(args.seconds)
    group.close()
    _report(args, ranks)


def gemms() -> list[tuple[str, int, int, int]]:
    """The model's matrix products of one forward: (name, fan in, fan out, how often)."""
    d, n = FULL.d_model, FULL.num_layers
    shapes = [("q k v o", d, d, 4 * n), ("up", d, 4 * d, n), ("down", 4 * d, d, n)]
    return [*shapes, ("head", d, FULL.vocab, 1)]


def serve(rank: int, world: int) -> Callable[[float], Rates]:
    """The answer to s is this rank's rates, each measured for about s seconds."""
    tokens = FULL.batch * FULL.tokens // world

    def answer(seconds: float) -> Rates:
        found: Rates = {"gemm": {}, "wire": {}}
        for name, m, n, _ in gemms():
            found["gemm"][name] = _gemm(tokens, m, n, seconds)
        found["attention"] = _attention(FULL.batch // world, seconds)
        found["adamw"] = _adamw(seconds)
        if world > 1:
            for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24):
                found["wire"][size] = _wire(rank, world, size, seconds)
            for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
                found[name] = _collective(name, world, 1 << 22, seconds)
        return found

    return answer


def _gemm(tokens: int, m: int, n: int, seconds: float) -> float:
    import torch

    x, w, y = torch.randn(tokens, m), torch.randn(n, m), torch.randn(tokens, n)

    def work() -> None:
        torch.nn.functional.linear(x, w)  # forward
        torch.mm(y, w)  # gradient of the input
        torch.mm(y.t(), x)  # gradient of the weight

    return 6.0 * tokens * m * n / _seconds(work, seconds)


def _attention(rows: int, seconds: float) -> float:
    """Seconds of one layer's attention, forward and backward."""
    import torch

    shape = (rows, FULL.num_heads, FULL.tokens, FULL.d_model // FULL.num_heads)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def work() -> None:
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(o, (q, k, v), o)

    return _seconds(work, seconds)


def _adamw(seconds: float) -> float:
    """Parameters per second of torch's fused AdamW."""
    import torch

    p = torch.nn.Parameter(torch.randn(1 << 23))
    p.grad = torch.randn(1 << 23)
    optimizer = torch.optim.AdamW([p], fused=True, **ADAMW)
    return p.numel() / _seconds(optimizer.step, seconds)


def _wire(rank: int, world: int, size: int, seconds: float) -> float:
    """Bytes per second that a rank sends while it receives at that rate: 16 MiB in blocks of `size`, all in flight."""
    import torch
    import torch.distributed as dist

    blocks = max(1, (1 << 24) // size)
    out = [torch.zeros(size // 4) for _ in range(blocks)]
    into = [torch.zeros(size // 4) for _ in range(blocks)]

    def work() -> None:
        works = [dist.irecv(t, (rank - 1) % world, tag=i) for i, t in enumerate(into)]
        works += [dist.isend(t, (rank + 1) % world, tag=i) for i, t in enumerate(out)]
        for pending in works:
            assert pending is not None
            pending.wait()

    return blocks * size / _seconds(work, seconds, together=True)


def _collective(name: str, world: int, size: int, seconds: float) -> float:
    """Bytes per second of a collective on a full tensor of `size` bytes, by its ring volume."""
    import torch
    import torch.distributed as dist

    whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // world)
    volume = size * (world - 1) / world * (2 if name == "all_reduce" else 1)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    }
    return volume / _seconds(calls[name], seconds, together=True)


def _seconds(work: Callable[[], Any], budget: float, *, together: bool = False) -> float:
    """Median seconds of one call; `together` fixes the number of calls, so that all ranks make the same."""
    import statistics

    import torch.distributed as dist

    work()
    dist.barrier()
    taken: list[float] = []
    while len(taken) < 20 if together else sum(taken) < budget or len(taken) < 5:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _report(args: argparse.Namespace, ranks: list[Rates]) -> None:
    world, psi = args.world, num_params(FULL)
    tokens = FULL.batch * FULL.tokens // world
    slow = {name: min(r["gemm"][name] for r in ranks) for name in ranks[0]["gemm"]}
    rows, arithmetic = [], 0.0
    for name, m, n, times in gemms():
        flops = 6.0 * tokens * m * n * times
        arithmetic += flops / slow[name]
        rows.append([name, f"{flops / 1e9:.2f}", f"{slow[name] / 1e9:.1f}", f"{flops / slow[name]:.4f}"])
    attention = max(r["attention"] for r in ranks) * FULL.num_layers
    rows.append(["attention", "", "", f"{attention:.4f}"])
    parts = [table(["product", "GFLOP a rank and step", "GFLOP/s", "s"], rows)]
    adamw = min(r["adamw"] for r in ranks)
    wire = max((min(r["wire"][s] for r in ranks) for s in ranks[0]["wire"]), default=float("inf"))
    if world > 1:
        parts.append(_wire_table(ranks))
    floors = []
    for stage in range(4):
        sent = 4.0 * psi * (world - 1) / world * (3 if stage == 3 else 2)
        update = psi / (world if stage else 1) / adamw
        compute = arithmetic + attention + update
        times = [arithmetic + attention, update, sent / wire, max(compute, sent / wire), compute + sent / wire]
        floors.append([stage, f"{sent / 1e6:.0f}", *(f"{t:.4f}" for t in times)])
    head = [
        "stage",
        "MB sent a rank",
        "model s",
        "AdamW s",
        "wire s",
        "floor: overlapped",
        "floor: in sequence",
    ]
    parts.append(table(head, floors))
    note = f"World {world}, one thread a rank; {FULL}"
    publish("Floor of a step", "\n\n".join([note, *parts]), out=args.out, data={"ranks": ranks}, as_json=args.json)


def _wire_table(ranks: list[Rates]) -> str:
    rows = [[f"send + recv, {s >> 10} KiB blocks", min(r["wire"][s] for r in ranks)] for s in ranks[0]["wire"]]
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    rows += [[f"{n} of 4 MiB, ring volume", min(r[n] for r in ranks)] for n in names]
    return table(["wire", "MB/s sent a rank"], [[name, f"{rate / 1e6:.0f}"] for name, rate in rows])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each rate is measured")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw rates")
    return parser.parse_args()


if __name__ == "__main__":
    main()
