"""The inference engine beside transformers' `generate` and continuous batching, on the same weights.

    python benchmarks/bench_engine.py --out benchmarks/results/engine.md

A Llama of 8 layers, width 512 and 33.7M parameters, float32. Parts:

    decode  time of a step of one, eight and 32 sequences, over the time to read weights and cache once by `sum()`
    trace   200 requests, prompts of 16 to 256 tokens and 16 to 128 new ones, drawn from a seed; over transformers'
            batches of 8 in order of arrival (padded), and over its continuous batching
    split   the 95th percentile of the time between tokens of running sequences while prompts of 1,800 tokens arrive,
            with budgets of 64 rows and of 2,048, which leaves prompts whole
    start   capture of the graphs of all buckets
    share   the part of a step, of one sequence and of 32, that is outside of products, attention and norms: for this
            model, and for transformers' Llama of the same sizes

Peers take turns within a round; ratios are formed within it.
"""

import argparse
import collections
import contextlib
import ctypes
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _report import publish, table

from shardfn import core, interop
from shardfn.inference import Engine, Runner, Sampling, decoder, hf_decoder, limits_of
from shardfn.kernels import KernelCall, KernelOp, _chain, _op
from shardfn.models import gpt

CONFIG = gpt.Config.llama_like(
    vocab_size=8192, num_layers=8, d_model=512, num_heads=8, d_ff=1408, max_len=2048, batch_invariant=True
)
MODEL = decoder(CONFIG)
# Multiply-adds and additions of one token, without attention.
FLOPS = 59.8e6
GREEDY = 0.0


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    params = gpt.init(CONFIG, core.key(0))
    parts = {"decode": decode_part, "trace": trace_part, "split": split_part, "start": start_part, "share": share_part}
    body = [f"{args.threads} threads (transformers {args.peer_threads}), {args.rounds} rounds, float32, exact mode"]
    body += [f"## {name}\n\n{parts[name](params, args)}" for name in args.parts]
    publish("The inference engine", "\n\n".join(body), out=args.out)


def decode_part(params: Any, args: argparse.Namespace) -> str:
    """Steps of running sequences alone, over a read floor."""
    limits = limits_of(MODEL, context=512, running=32, buckets=(1, 8, 32, 64, 256))
    engine = Engine(MODEL, params, limits=limits)
    weights = core.tree_leaves(engine.core.weights)
    rows = []
    for num in (1, 8, 32):
        times: dict[str, list[float]] = {"step": [], "floor": []}
        for _ in range(args.rounds):
            names = [engine.add([7] * 100, Sampling(max_tokens=60, temperature=GREEDY, seed=i)) for i in range(num)]
            while engine.stats.counts["waiting"]:
                engine.step()
            for _ in range(8):
                engine.step()
            times["step"].append(_timed(engine.step, 20))
            cache = [torch.zeros(num * 130 * 2 * CONFIG.kv_heads * CONFIG.head_dim) for _ in range(CONFIG.num_layers)]
            read = [x.local for x in weights if x.local.ndim > 1] + cache
            times["floor"].append(_timed(lambda read=read: [x.sum() for x in read], 5))
            for name in names:
                engine.cancel(name)
            while not engine.idle:
                engine.step()
        low, mid, high = _quartiles([a / b for a, b in zip(times["step"], times["floor"], strict=True)])
        step, floor = (statistics.median(times[name]) * 1e3 for name in ("step", "floor"))
        rows.append([num, f"{step:.2f}", f"{floor:.2f}", f"{mid:.2f}", f"{low:.2f} .. {high:.2f}"])
    return table(["sequences", "step, ms", "read floor, ms", "ratio", "quartiles"], rows)


def requests(num: int) -> list[tuple[list[int], int]]:
    """A trace of prompts and numbers of new tokens, from a seed."""
    draw = random.Random(0)
    return [
        ([draw.randrange(10, 8000) for _ in range(draw.randint(16, 256))], draw.randint(16, 128)) for _ in range(num)
    ]


def trace_part(params: Any, args: argparse.Namespace) -> str:
    """All requests of the trace, by each peer in turn."""
    trace = requests(args.requests)
    limits = limits_of(MODEL, context=512, running=32, buckets=(1, 4, 8, 16, 32, 64, 128, 256))
    runner = Runner(MODEL, limits)
    Engine(MODEL, params, limits=limits, runner=runner).warm_up()
    padding: list[float] = []

    def ours() -> int:
        engine = Engine(MODEL, params, limits=limits, runner=runner)
        samplings = [Sampling(max_tokens=n, temperature=GREEDY) for _, n in trace]
        made = engine.generate([prompt for prompt, _ in trace], samplings)
        padding.append(engine.stats.padding)
        return sum(len(one.tokens) for one in made)

    peers: dict[str, Callable[[], int]] = {"shardfn": ours}
    if args.peers:
        peers |= transformers_peers(params, trace)
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    drawn = sum(n for _, n in trace)
    for _ in range(args.rounds_of_trace):
        for name, run in peers.items():
            torch.set_num_threads(args.threads if name == "shardfn" else args.peer_threads)
            start = time.perf_counter()
            made = run()
            seconds[name].append(time.perf_counter() - start)
            assert made == drawn, (name, made, drawn)
    torch.set_num_threads(args.threads)
    rate = _rate()
    tokens = drawn + sum(len(prompt) for prompt, _ in trace)
    roof = tokens * FLOPS / rate
    rows = []
    for name, x in seconds.items():
        middle, ratio = statistics.median(x), statistics.median(map(float.__truediv__, x, seconds["shardfn"]))
        rows.append([name, f"{middle:.1f}", f"{drawn / middle:.0f}", f"{roof / middle:.2f}", f"{ratio:.2f}"])
    head = ["peer", "s", "new tokens / s", "of the roof", "time over shardfn's"]
    note = (
        f"{len(trace)} requests, {drawn} new tokens, {tokens} in all; the roof is {tokens} x {FLOPS / 1e6:.1f} MFLOP"
        f" at {rate / 1e9:.0f} GF/s, measured over this model's linear layers with 256 rows; padding"
        f" {100 * statistics.median(padding):.1f}% of rows."
    )
    return note + "\n\n" + table(head, rows)


def transformers_peers(params: Any, trace: list[tuple[list[int], int]]) -> dict[str, Callable[[], int]]:
    """transformers on the same weights: static batches of 8, and continuous batching."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    directory = tempfile.mkdtemp()
    interop.gpt_to_hf(directory, CONFIG, params)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def static() -> int:
        made = 0
        for at in range(0, len(trace), 8):
            group = trace[at : at + 8]
            longest, most = max(len(p) for p, _ in group), max(n for _, n in group)
            ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in group])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in group])
            with torch.inference_mode():
                options = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": False, "pad_token_id": 0}
                model.generate(ids, attention_mask=mask, **options)
            made += sum(n for _, n in group)
        return made

    def continuous() -> int:
        config = GenerationConfig(
            max_new_tokens=max(n for _, n in trace), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        for i, (prompt, n) in enumerate(trace):
            manager.add_request(prompt, request_id=str(i), max_new_tokens=n)
        made, done = 0, 0
        while done < len(trace):
            result = manager.get_result(timeout=60)
            if result is not None and result.is_finished():
                made, done = made + len(result.generated_tokens), done + 1
        manager.stop(block=True)
        return made

    return {"transformers, static 8": static, "transformers, continuous": continuous}


def split_part(params: Any, args: argparse.Namespace) -> str:
    """The time between tokens of running sequences, while long prompts arrive."""
    rows, found = [], {}
    for budget in (64, 2048):
        buckets = (8, 16, 64) if budget == 64 else (8, 16, 2048)
        limits = limits_of(MODEL, context=2048, running=12, buckets=buckets, cache_bytes=1 << 31)
        engine = Engine(MODEL, params, limits=limits)
        engine.warm_up()
        for i in range(8):
            engine.add([9 + i] * 20, Sampling(max_tokens=200, temperature=GREEDY), name=f"short{i}")
        for _ in range(10):
            engine.step()
        gaps, last = [], time.perf_counter()
        for i in range(3):
            engine.add([100 + i] * 1800, Sampling(max_tokens=2, temperature=GREEDY), name=f"long{i}")
        while any(name.startswith("long") for name in engine.core.requests):
            told = engine.step()
            now = time.perf_counter()
            gaps += [now - last] * sum(token.name.startswith("short") for token in told)
            last = now
        found[budget] = statistics.quantiles(gaps, n=20)[-1]
        rows.append([budget, len(gaps), f"{1e3 * statistics.median(gaps):.1f}", f"{1e3 * found[budget]:.1f}"])
    return (
        table(["budget, rows", "gaps", "median, ms", "95th percentile, ms"], rows)
        + f"\n\nSplit over whole: {found[64] / found[2048]:.2f}"
    )


def start_part(params: Any, args: argparse.Namespace) -> str:
    """Capture of all default buckets."""
    del args
    engine = Engine(MODEL, params, limits=limits_of(MODEL, context=512))
    start = time.perf_counter()
    engine.warm_up()
    return f"{len(engine.limits.buckets)} buckets captured in {time.perf_counter() - start:.1f} s; {engine.memory()}"


def share_part(params: Any, args: argparse.Namespace) -> str:
    """Seconds of a step by kernels, and outside of all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    served = hf_decoder(LlamaForCausalLM(LlamaConfig(vocab_size=8192, **sizes)).eval(), batch_invariant=True)
    rows = []
    for name, (model, weights) in {"models.gpt": (MODEL, params), "transformers": served}.items():
        limits = limits_of(model, context=512, running=32, buckets=(1, 32, 256))
        engine = Engine(model, weights, limits=limits)
        for num in (1, 32):
            names = [engine.add([7] * 100, Sampling(max_tokens=400, temperature=GREEDY)) for _ in range(num)]
            while engine.stats.counts["waiting"] or engine.step()[-1:] == []:
                engine.step()
            found = [_parts(engine) for _ in range(args.rounds * 10)]
            for one in names:
                engine.cancel(one)
            while not engine.idle:
                engine.step()
            middle = [statistics.median(x) for x in zip(*found, strict=True)]
            low, mid, high = _quartiles([100 * x[-1] / x[0] for x in found])
            rows.append([name, num, *(f"{1e3 * x:.3f}" for x in middle), f"{mid:.1f}", f"{low:.1f} .. {high:.1f}"])
    head = ["model", "sequences", "step, ms", *_KERNELS, "other kernels", "outside of the three", "%", "quartiles"]
    return table(head, rows)


# Files of kernels that are products, attention and norms.
_KERNELS = {
    "products": ("_row_linear", "_integer_linear", "_grouped_product"),
    "attention": ("_ragged_attention",),
    "norms": ("_row_norm",),
}


def _parts(engine: Engine) -> list[float]:
    """Seconds of a step; of the next one, those of each kind of kernel and of others; the first without the kinds."""
    start = time.perf_counter()
    engine.step()
    whole = time.perf_counter() - start
    with _timed_kernels() as seconds:
        engine.step()
    kinds = [sum(seconds.get(file, 0.0) for file in files) for files in _KERNELS.values()]
    return [whole, *kinds, sum(seconds.values()) - sum(kinds), whole - sum(kinds)]


# Address of a function that chains call -> file of its kernel.
_FILES: dict[int, str] = {}


@contextlib.contextmanager
def _timed_kernels() -> Iterator[dict[str, float]]:
    """Seconds by file of the kernels that run in it."""
    seconds: dict[str, float] = collections.defaultdict(float)
    find, run = _op._find_implementation, _chain._load_runner

    def timed(op: KernelOp, kind: str, dtype: torch.dtype) -> Callable[..., Any]:
        kernel = find(op, kind, dtype)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return kernel(*args, **kwargs)
            finally:
                seconds[pathlib.Path(op.source or "").stem] += time.perf_counter() - start

        return call

    def one_by_one(program: int, calls: int, bases: int) -> int:
        for _ in range(calls):
            address, num = (ctypes.c_int64.from_address(program + 8 * i).value for i in range(2))
            start = time.perf_counter()
            if run()(program, 1, bases):
                return 1
            seconds[_FILES[address]] += time.perf_counter() - start
            program += 8 * (2 + 2 * num)
        return 0

    _op._find_implementation, _chain._load_runner = timed, lambda: one_by_one
    try:
        yield seconds
    finally:
        _op._find_implementation, _chain._load_runner = find, run


def _noted(call: KernelCall) -> int:
    """Returns the address of a function, and notes the file of the kernel."""
    address = _ADDRESS(call)
    _FILES[address] = pathlib.Path(call.source).stem
    return address


_ADDRESS, _chain._find_address = _chain._find_address, _noted


def _rate() -> float:
    """Multiply-adds and additions a second of the model's linear layers with 256 rows, by torch."""
    shapes = [(512, 512)] * 4 + [(512, 1408)] * 2 + [(1408, 512)]
    pairs = [(torch.randn(256, k), torch.randn(n, k)) for k, n in shapes]
    seconds = min(_timed(lambda: [torch.nn.functional.linear(x, w) for x, w in pairs], 5) for _ in range(7))
    return sum(2 * 256 * k * n for k, n in shapes) / seconds


def _timed(run: Callable[[], object], times: int) -> float:
    run()
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, mid, high


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda x: x.split(","), default=["decode", "trace", "split", "start"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rounds-of-trace", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
