"""`nn.moe` beside torch's `grouped_mm`, one product of the same operations, and dense einsums: by processor time.

Ratios are formed within a round, and the order of the cases rotates. Weights are [e, n, k], as Hugging Face's. A layer
is two products with SwiGLU between them, of tokens that all experts share equally: `grouped_mm` as the experts of
transformers use it; einsums with a one-hot tensor [tokens, experts, capacity], which drop nothing here.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _report import publish, table
from torch import Tensor

from shardfn.nn import moe

# Experts, inputs, outputs, rows of an expert.
PRODUCTS = ((64, 512, 512, 2), (64, 512, 512, 32), (64, 256, 256, 128), (8, 512, 1024, 256))
# Tokens, choices, width, width of an expert, experts.
LAYERS = ((4096, 2, 256, 256, 64), (1024, 2, 512, 1024, 8), (1024, 2, 512, 512, 64))
# Multiply-adds of one timed sample.
WORK = 5e8


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ratios = ("torch / ours", "quartiles", "ours / one product", "quartiles", "GF/s")
    products = [
        _product_line(*size, backward=backward, rounds=args.rounds) for size in PRODUCTS for backward in (False, True)
    ]
    layers = [_layer_line(*size, rounds=args.rounds) for size in LAYERS]
    body = [
        f"{args.rounds} rounds, {args.threads} thread{'s' if args.threads > 1 else ''}, float32; medians of ratios of"
        " processor time",
        table(("e, k, n, rows of an expert", "passes", *ratios), products),
        "a layer, forward and backward",
        table(
            ("tokens, choices, D, F, e", "grouped_mm / ours", "quartiles", "einsum / ours", "quartiles", "ms"), layers
        ),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f}",
    ]
    publish("Grouped products", "\n\n".join(body), out=args.out)


def _product_line(e: int, k: int, n: int, rows: int, *, backward: bool, rounds: int) -> tuple[str, ...]:
    x, w, dy = torch.randn(e * rows, k), torch.randn(e, n, k), torch.randn(e * rows, n)
    counts = torch.full((e,), rows)
    offs, one = counts.cumsum(0).int(), torch.randn(n, k)
    calls: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
        "ours": (lambda x, w: moe.grouped(x, w, counts, True), w),
        "torch": (lambda x, w: F.grouped_mm(x, w.mT, offs=offs), w),
        "one": (F.linear, one),
    }
    cases = {name: _passes(f, (x, weight), dy, backward=backward) for name, (f, weight) in calls.items()}
    flops = 2 * e * rows * k * n * (3 if backward else 1)
    times = _times(cases, max(1, int(WORK / flops)), rounds)
    middle, spread = _ratio(times["torch"], times["ours"])
    above, above_spread = _ratio(times["ours"], times["one"])
    passes = "forward and backward" if backward else "forward"
    speed = flops / statistics.median(times["ours"]) / 1e9
    return f"{e}, {k}, {n}, {rows}", passes, middle, spread, above, above_spread, f"{speed:.0f}"


def _layer_line(s: int, k: int, d: int, f: int, e: int, *, rounds: int) -> tuple[str, ...]:
    x, dy = torch.randn(s, d), torch.randn(s, d)
    up, down = torch.randn(e, 2 * f, d) / d**0.5, torch.randn(e, d, f) / f**0.5
    # Choice j of token t is one of the experts in turn, so that each has s k / e rows.
    chosen = (torch.arange(s)[:, None] + torch.arange(k) * (e // k)) % e
    weights = torch.rand(s, k)
    leaves = (x, up, down, weights)
    run = {"ours": _ours, "torch": _torchs, "einsum": _einsums}
    cases = {
        name: _passes(lambda *given, layer=layer: layer(*given, chosen), leaves, dy, backward=True)
        for name, layer in run.items()
    }
    times = _times(cases, 1, rounds)
    ms = f"{1e3 * statistics.median(times['ours']):.0f}"
    both = (*_ratio(times["torch"], times["ours"]), *_ratio(times["einsum"], times["ours"]))
    return f"{s}, {k}, {d}, {f}, {e}", *both, ms


def _ours(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    p, counts = moe.permutation(chosen, len(up))
    gate, linear = moe.grouped(moe.dispatch(x, p), up, counts, True).chunk(2, -1)
    return moe.combine(moe.grouped(F.silu(gate) * linear, down, counts, True), p, weights)


def _torchs(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    s, k = chosen.shape
    experts, order = chosen.flatten().sort()
    offs = torch.histc(experts.float(), bins=len(up), min=0, max=len(up) - 1).cumsum(0, dtype=torch.int32)
    gate, linear = F.grouped_mm(x[order // k], up.mT, offs=offs).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * linear, down.mT, offs=offs) * weights.flatten()[order, None]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return y[places].view(s, k, -1).sum(1)


def _einsums(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    s, k = chosen.shape
    e = len(up)
    hits = F.one_hot(chosen, e).sum(1)
    place = hits.cumsum(0) - 1
    mask = F.one_hot(place.clamp(min=0), s * k // e).float() * hits[..., None]
    factors = torch.zeros(s, e).scatter(1, chosen, weights)
    rows = torch.einsum("sec,sd->ecd", mask, x)
    gate, linear = torch.einsum("ecd,efd->ecf", rows, up).chunk(2, -1)
    y = torch.einsum("ecf,edf->ecd", F.silu(gate) * linear, down)
    return torch.einsum("sec,ecd->sd", mask * factors[..., None], y)


def _passes(f: Callable[..., Tensor], operands: tuple[Tensor, ...], dy: Tensor, *, backward: bool) -> Callable[[], Any]:
    if not backward:
        return lambda: f(*operands)
    leaves = [x.clone().requires_grad_() for x in operands]
    return lambda: torch.autograd.grad(f(*leaves), leaves, dy)


def _times(cases: dict[str, Callable[[], Any]], num: int, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            for _ in range(num):
                cases[name]()
            if turn:
                times[name].append((time.process_time() - start) / num)
    return times


def _ratio(over: list[float], under: list[float]) -> tuple[str, str]:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
