"""Weights in codes beside float32: processor time of one thread, and perplexity.

A pass runs `kernels.row_linear` over all weights of linear layers of a GPT once, as a step of decoding does: 8 layers,
width 512, inner 1408, vocabulary 8192, 29.9M weights, 119 MB in float32, more than the caches hold. The order of the
cases rotates; ratios are formed within a round. A ratio above 1 means that codes are faster.

Then whole engines decode `--steps` tokens of 1 and of more sequences, in turns, with all parts of a step beside linear
layers: 12 layers, width 1024, inner 2816, 171M parameters. A quiet machine needs a minute for both:

    python benchmarks/bench_codes.py --rounds 15 --rows 1 8 16

With `--run DIRECTORY` and with `--gguf FILE --text FILE... --learnt FILE...` the perplexity of a model in codes by
several coders and policies (`_codes_perplexity.py`). By the law of the engine these are the logits that it computes
from the codes.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from _codes_perplexity import of_gguf, of_run
from _report import publish, table

import shardfn as sf
from shardfn import kernels
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

LAYER = ((512, 512),) * 4 + ((1408, 512),) * 2 + ((512, 1408),)
SHAPES = LAYER * 8 + ((8192, 512),)
CODES: tuple[kernels.Quantization | None, ...] = (None, "int8", "int4")
PASSES: tuple[kernels.Codes | None, ...] = (*CODES, "int4_wide")
REPEATS = 10  # passes of a time: clocks of some machines have steps of milliseconds
# Codes whose values equal those of files.
FILES = {
    "int8": "GGUF Q8_0 and Q5_0, AWQ, 8-bit and asymmetric GPTQ and compressed-tensors",
    "int4": "GGUF Q4_1 and Q4_0, symmetric GPTQ and compressed-tensors in 4 bits",
    "int4_wide": "GGUF Q4_K",
}


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body = [] if args.rounds == 0 else _speed(args.rounds, args.rows) + _engines(args.steps, args.rows)
    if args.run:
        body += of_run(args.run, args.held_out)
    if args.gguf:
        body += of_gguf(args.gguf, args.learnt, args.text, args.tokens, args.length)
    body.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    publish("Weights in codes", "\n\n".join(body), out=args.out)


def _speed(rounds: int, rows: Sequence[int]) -> list[str]:
    weights = [torch.randn(shape) for shape in SHAPES]
    packed = {codes: [_pack(w, codes) for w in weights] for codes in PASSES}
    size = {codes: sum(x.nbytes for x in held) / 1e6 for codes, held in packed.items()}
    lines = [_line(packed, m, rounds) for m in rows]
    head = ("rows", "float32, ms", *(x for name in PASSES[1:] for x in (f"{name}, ratio", "quartiles")))
    told = ", ".join(f"{name or 'float32'} {mb:.1f} MB" for name, mb in size.items())
    files = "\n".join(f"- {name}: {about}" for name, about in FILES.items())
    return [
        f"{rounds} rounds; a pass over {told}; medians of processor time",
        table(head, lines),
        f"Files with the values of codes; weights of other formats are decoded to floats:\n\n{files}",
    ]


def _pack(weight: torch.Tensor, codes: kernels.Codes | None) -> torch.Tensor:
    if codes != "int4_wide":
        return kernels.pack_rows(weight, codes)
    blocks = kernels.quantize_blocks(weight, "int4").view(len(weight), -1, kernels.BLOCK_BYTES["int4"])
    heads = blocks[..., :4].contiguous().view(torch.float16).float().view(torch.uint8)  # scale and least value
    return kernels.pack_blocks(torch.cat([heads, blocks[..., 4:]], -1).flatten(1), weight.shape[1])


@torch.no_grad()
def _engines(steps: int, rows: Sequence[int]) -> list[str]:
    config = gpt.Config.llama_like(
        vocab_size=8192, num_layers=12, d_model=1024, num_heads=16, d_ff=2816, max_len=steps + 64, batch_invariant=True
    )
    params, most = gpt.init(config, sf.key(0)), max(rows)
    engines = {}
    for codes in CODES:
        made = decoder(config, quantization=codes)
        buckets = tuple(sorted({*rows, 64}))
        engines[codes] = Engine(made, params, limits=limits_of(made, running=most, buckets=buckets))
        engines[codes].warm_up()
    head = ("sequences", "float32, ms", "tokens/s", "int8, ratio", "quartiles", "int4, ratio", "quartiles")
    lines = [_decoded(engines, m, steps) for m in rows]
    num = gpt.num_params(config) / 1e6
    return [
        f"Steps of whole engines of {num:.0f}M parameters, {steps} each in turns; medians of processor time",
        table(head, lines),
    ]


def _decoded(engines: Any, m: int, steps: int) -> tuple[str, ...]:
    """Steps in which m sequences have one token each."""
    for engine in engines.values():
        for i in range(m):
            engine.add([1 + i, 2, 3], Sampling(max_tokens=steps + 8, seed=i))
        for _ in range(4):  # prompts, and first steps
            engine.step()
    times: dict[Any, list[float]] = {codes: [] for codes in CODES}
    for turn in range(steps):
        for codes in CODES[turn % 3 :] + CODES[: turn % 3]:
            start = time.process_time()
            engines[codes].step()
            times[codes].append(time.process_time() - start)
    for engine in engines.values():
        while not engine.idle:
            engine.step()
    milliseconds, *ratios = _ratios(times, CODES)
    return str(m), milliseconds, f"{m / statistics.median(times[None]):.0f}", *ratios


def _line(packed: Any, m: int, rounds: int) -> tuple[str, ...]:
    inputs = {k: torch.randn(m, k) for k in (512, 1408)}
    times: dict[Any, list[float]] = {codes: [] for codes in PASSES}
    for turn in range(rounds + 1):
        for codes in PASSES[turn % 4 :] + PASSES[: turn % 4]:
            start = time.process_time()
            for _ in range(REPEATS):
                for (n, k), w in zip(SHAPES, packed[codes], strict=True):
                    kernels.row_linear(inputs[k], w, n)
            if turn:
                times[codes].append((time.process_time() - start) / REPEATS)
    return str(m), *_ratios(times, PASSES)


def _ratios(times: dict[Any, list[float]], kinds: Sequence[Any]) -> list[str]:
    """Milliseconds in float32, then the ratio of each kind of codes with its quartiles."""
    out = [f"{statistics.median(times[None]) * 1e3:.2f}"]
    for codes in kinds[1:]:
        low, middle, high = statistics.quantiles([a / b for a, b in zip(times[None], times[codes], strict=True)], n=4)
        out += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
    return out


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--steps", type=int, default=60, help="of decoding, by each engine")
    parser.add_argument("--run", default="", help="directory of a run of examples/train_gpt.py with checkpoints")
    parser.add_argument("--held-out", type=int, default=128, help="rows of the run's held-out text")
    parser.add_argument("--gguf", default="")
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--learnt", nargs="*", default=[], help="texts from which coders learn the inputs of layers")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
