"""Linear layers of a decode step on one thread, on two that are made for each call, and on two of the process's pool.

A sample is all products of one step of a Llama of 34M parameters by `row_linear`. Times are of the clock on the wall;
ratios are formed within a round, in which the order of the cases rotates. A ratio above 1 means faster than one thread.
On a busy machine the fastest rounds, in ms, are those that were hardly interrupted.
"""

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable

import torch
from _report import publish, table
from torch import Tensor

from shardfn import kernels
from shardfn.kernels import _build, _row_linear

LAYER = [(512, 512)] * 4 + [(512, 1408)] * 2 + [(1408, 512)]
STEP = LAYER * 8 + [(512, 8192)]
ROWS = (1, 2, 4, 8, 16, 32, 64)
# The header before there was a pool.
NEW_THREADS = """
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

template <typename Run>
void share(int64_t parts, int64_t threads, Run run) {
    std::atomic<int64_t> next(0);
    auto work = [&] {
        for (int64_t part; (part = next++) < parts;) run(part);
    };
    std::vector<std::thread> others;
    try {
        for (int64_t t = 1; t < threads && t < parts; ++t) others.emplace_back(work);
    } catch (const std::exception&) {
    }
    work();
    for (auto& other : others) other.join();
}
"""
KINDS = "pp" + "i" * 6
Product = Callable[[Tensor, Tensor, Tensor], None]


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.manual_seed(0)
    weights = [kernels.pack_rows(torch.randn(n, k)) for k, n in STEP]
    pool = _build.function(_row_linear._SOURCE, "row_linears", KINDS)
    cases = {"alone": _product(pool, 1), "new": _product(_of_new_threads(), 2), "pool": _product(pool, 2)}
    lines = [_line(m, weights, cases, args.rounds) for m in ROWS]
    head = (
        "rows",
        "one, ms",
        "new, ms",
        "pool, ms",
        "new",
        "quartiles",
        "pool",
        "quartiles",
        "fastest: one",
        "new",
        "pool",
    )
    body = [
        f"{args.rounds} rounds, medians, and the fastest; ratios are one thread's time by that of two",
        table(head, lines),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f}",
    ]
    publish("Threads of exact linear layers", "\n\n".join(body), out=args.out)


def _of_new_threads() -> Callable[..., None]:
    room = pathlib.Path(_build.__file__).parent
    kernel = room / _row_linear._SOURCE
    with tempfile.TemporaryDirectory() as folder:
        paths = [kernel, *kernel.parent.glob("*.h"), *room.glob("*.h")]
        source, *headers = (pathlib.Path(folder, path.relative_to(room)) for path in paths)
        source.parent.mkdir()
        for copy, path in zip((source, *headers), paths, strict=True):
            copy.write_text(NEW_THREADS if path.name == "_threads.h" else path.read_text())
        flags = ("-O2", "-ffp-contract=fast", "-pthread", "-Wno-psabi", f"-march=x86-64-v{kernels.generation()}")
        run = kernels.build("bench-threads", source, *headers, flags=flags).row_linears
    run.argtypes, run.restype = [_build._KINDS[kind] for kind in KINDS], None
    return run


def _product(run: Callable[..., None], threads: int) -> Product:
    def product(x: Tensor, packed: Tensor, y: Tensor) -> None:
        layer = array("q", (packed.data_ptr(), 0, y.data_ptr(), y.shape[1]))  # one, without a bias
        run(x.data_ptr(), layer.buffer_info()[0], 1, *x.shape, 8, 0, threads)  # float32 in 8 chunks

    return product


def _line(m: int, weights: list[Tensor], cases: dict[str, Product], rounds: int) -> tuple[str, ...]:
    values = [(torch.randn(m, k), w, torch.empty(m, n)) for (k, n), w in zip(STEP, weights, strict=True)]
    wall: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(rounds + 1):
        for name in names[turn % 3 :] + names[: turn % 3]:
            start = time.perf_counter()
            for value in values:
                cases[name](*value)
            if turn:
                wall[name].append((time.perf_counter() - start) * 1e3)
    middle = {name: statistics.median(times) for name, times in wall.items()}
    out = [str(m), *(f"{middle[name]:.2f}" for name in names)]
    for name in names[1:]:
        ratios = [a / b for a, b in zip(wall["alone"], wall[name], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        out += [f"{median:.2f}", f"{low:.2f} to {high:.2f}"]
    return *out, *(f"{min(wall[name]):.2f}" for name in names)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
