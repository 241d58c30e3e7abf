"""AdamW on the host against the memory's speed: fp32 gradients, and bf16 gradients with a bf16 copy of the parameters.

One element has 28 bytes to move with fp32 gradients (parameter, two moments and gradient are read, all but the gradient
written), and the same number with bf16 gradients and a bf16 copy. Two bounds move the same bytes: `copy` of one buffer
into another, whose writes also read what they overwrite, and `add in place`, the same three buffers written over as
AdamW writes them. Cases take turns within a round, and ratios are formed within a round. CPU seconds are reported
beside wall seconds, since on a machine that others use too a thread may wait for its turn; with several threads they
include idling.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

from _report import publish, table

Cases = dict[str, Callable[[], object]]
Times = dict[str, list[tuple[float, float]]]


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    parts = []
    for threads in map(int, args.threads.split(",")):
        for num in map(int, args.elements.split(",")):
            parts += [f"{threads} thread(s), {num} elements", _table(_measure(num, threads, args.rounds), num)]
    load = f"{args.rounds} rounds; load of the machine at the end: {os.getloadavg()[0]:.1f}"
    publish("Host AdamW", "\n\n".join([load, *parts]), out=args.out)


def _cases(num: int) -> Cases:
    import torch

    from shardfn import optim

    p, mu, nu, g = (torch.rand(num) for _ in range(4))
    half, out = g.bfloat16(), torch.empty(num, dtype=torch.bfloat16).zero_()
    source, target = torch.rand(num * 7 // 2), torch.zeros(num * 7 // 2)
    tx = optim.adamw(1e-3)
    adam, *rest = tx.init([torch.empty(0)])
    state = (adam._replace(mu=[mu], nu=[nu]), *rest)
    apply, pieces, step = optim.inplace(tx), optim.in_pieces(tx, [p]), torch.ones(())

    def fused(g: torch.Tensor) -> None:
        torch._fused_adamw_(
            [p], [g], [mu], [nu], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def in_place() -> None:
        p.add_(g)
        mu.add_(1.0)
        nu.add_(1.0)

    def cast() -> None:
        fused(half.float())
        out.copy_(p)

    def whole() -> None:
        apply([half], state, [p])
        out.copy_(p)

    def rows(size: int) -> None:
        token = pieces.begin(state)
        for i in range(0, num, size):
            cut = slice(i, i + size)
            part = (state[0]._replace(mu=[mu[cut]], nu=[nu[cut]]), *rest)
            pieces.apply(token, [half[cut]], part, [p[cut]])
            out[cut].copy_(p[cut])

    return {
        "bound: copy": lambda: target.copy_(source),
        "bound: add in place": in_place,
        "fp32: torch's kernel": lambda: fused(g),
        "fp32: optim.adamw": lambda: apply([g], state, [p]),
        "bf16: cast whole, kernel, copy out": cast,
        "bf16: optim.adamw, copy out": whole,
        "bf16: in pieces of 2^18, copy out each": lambda: rows(1 << 18),
        "bf16: in pieces of 2^20, copy out each": lambda: rows(1 << 20),
        "bf16: in pieces of 2^22, copy out each": lambda: rows(1 << 22),
    }


def _measure(num: int, threads: int, rounds: int) -> Times:
    import torch

    torch.set_num_threads(threads)
    cases = _cases(num)
    times: Times = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, case in cases.items():
            wall, cpu = time.perf_counter(), time.process_time()
            case()
            if turn:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def _table(times: Times, num: int) -> str:
    head = ["case", "wall ms", "GB/s", "of copy", "of add in place", "CPU ms", "of copy, CPU", "of add in place, CPU"]
    rows = []
    for name, taken in times.items():
        row = [name]
        for clock in (0, 1):
            seconds = statistics.median(t[clock] for t in taken)
            row += [f"{seconds * 1e3:.0f}"] + ([f"{28 * num / seconds / 1e9:.1f}"] if clock == 0 else [])
            for bound in ("bound: copy", "bound: add in place"):
                ratio = statistics.median(b[clock] / t[clock] for b, t in zip(times[bound], taken, strict=True))
                row.append(f"{ratio:.2f}")
        rows.append(row)
    return table(head, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", default="33700001", help="comma-separated")
    parser.add_argument("--threads", default="1,2", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="", help="Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
