"""Kernels of compressed communication on a CPU, in C++ and by the definitions, against the memory's speed.

The 1-bit work of one step at world 2: each rank compresses its gradients' whole length (`worker`), averages and
compresses half of it (`server`), and decodes the whole result (`decode`). The quantizers work on the whole length. The
floor of a case is the time its bytes take at the rate of `bound: add in place`, which reads two buffers and writes one
of them: every pass over memory that the case needs, where bytes that are read and written again count once. Cases take
turns within a round, and ratios are formed within a round. CPU seconds are reported beside wall seconds, since on a
machine that others use too a thread may wait for its turn. Kernels run on one thread, independent of torch's number.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from _report import publish, table

from shardfn import kernels

BOUND = "bound: add in place"
KINDS = ("native", "reference")


class Case(NamedTuple):
    """A kernel call, and the bytes that it must move."""

    run: Callable[[], object]
    num_bytes: float


Cases = dict[str, Case]
Times = dict[str, list[tuple[float, float]]]


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    parts = [f"{args.rounds} rounds"]
    for num in map(int, args.elements.split(",")):
        cases = _cases(-(-num // 16) * 16)
        times = _measure(cases, args.rounds)
        parts += [f"{num} elements", _table(cases, times), _steps(times)]
    parts.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    publish("Kernels", "\n\n".join(parts), out=args.out)


def _cases(num: int) -> Cases:
    x, more, error, out = torch.randn(num), torch.zeros(num), torch.zeros(2, num // 2), torch.zeros(2, num // 2)
    half, server = x.bfloat16(), torch.zeros(num // 2)
    bits, scale = torch.randint(0, 256, (2, num // 16), dtype=torch.uint8), torch.rand(2)
    whole = out.view(1, num)
    numbers = torch.tensor([1e-3, 0.9, 0.01])
    p, mean, square = torch.randn(3, num)
    square.square_()
    cases = {BOUND: Case(lambda: more.add_(x), 12 * num)}
    for kind in KINDS:
        cases |= {
            # x and the error are read, the error written; read and written again, and the bits written
            f"worker, {kind}": Case(lambda: kernels.sign_compress_(x, error, whole=True), (12 + 8 + 1 / 8) * num),
            f"server, {kind}": Case(lambda: kernels.sign_mean_(bits, scale, server), (16 + 3 / 8) * num / 2),
            f"decode, {kind}": Case(lambda: kernels.unpack_signs(bits, scale, out=out), (4 + 1 / 8) * num),
            f"step, {kind}": Case(
                lambda: kernels.preconditioned_step_(p, mean, square, *numbers, eps=1e-8, weight_decay=0.1), 16 * num
            ),
        }
        for b in (8, 4):
            codes, factors = kernels.quantize(x[None], bits=b)
            twice = torch.stack([codes, codes]), torch.stack([factors, factors])
            bf16 = half[None].clone()
            size = b / 8 + 4 / 256
            cases |= {
                f"quantize int{b}, {kind}": Case(lambda b=b: kernels.quantize(x[None], bits=b), (4 + size) * num),
                f"quantize int{b} from bf16, {kind}": Case(
                    lambda b=b: kernels.quantize(half[None], bits=b), (2 + size) * num
                ),
                f"dequantize int{b}, {kind}": Case(
                    lambda b=b, c=codes, f=factors: kernels.dequantize(c, f, num, bits=b, out=whole), (4 + size) * num
                ),
                f"dequantize int{b} to bf16, {kind}": Case(
                    lambda b=b, c=codes, f=factors, into=bf16: kernels.dequantize(c, f, num, bits=b, out=into),
                    (2 + size) * num,
                ),
                f"two summed, int{b}, {kind}": Case(
                    lambda b=b, two=twice: kernels.dequantize_sum_quantize(*two, num, bits=b), 3 * size * num
                ),
            }
    return cases


def _measure(cases: Cases, rounds: int) -> Times:
    times: Times = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, case in cases.items():
            kind = name.rpartition(", ")[2]
            with kernels.implemented_by(kind if kind in KINDS else "reference"):
                wall, cpu = time.perf_counter(), time.thread_time()
                case.run()
                if turn:
                    times[name].append((time.perf_counter() - wall, time.thread_time() - cpu))
    return times


def _table(cases: Cases, times: Times) -> str:
    head = ["case", "wall ms", "GB/s", "floor / wall", "CPU ms", "floor / CPU"]
    rows = []
    for name, taken in times.items():
        wall, cpu = (statistics.median(t[clock] for t in taken) for clock in (0, 1))
        share = cases[name].num_bytes / cases[BOUND].num_bytes
        ratios = [
            statistics.median(share * b[clock] / t[clock] for b, t in zip(times[BOUND], taken, strict=True))
            for clock in (0, 1)
        ]
        rate = cases[name].num_bytes / wall / 1e9
        rows.append(
            [name, f"{wall * 1e3:.1f}", f"{rate:.1f}", f"{ratios[0]:.2f}", f"{cpu * 1e3:.1f}", f"{ratios[1]:.2f}"]
        )
    return table(head, rows)


def _steps(times: Times) -> str:
    rows = []
    for kind in KINDS:
        parts = [times[f"{name}, {kind}"] for name in ("worker", "server", "decode")]
        sums = [tuple(map(sum, zip(*turn, strict=True))) for turn in zip(*parts, strict=True)]
        rows.append([kind, *(f"{statistics.median(s[clock] for s in sums) * 1e3:.1f}" for clock in (0, 1))])
    return table(["1-bit work of a step: worker, server, decode", "wall ms", "CPU ms"], rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", default="33700000", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="", help="Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
