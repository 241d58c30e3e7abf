"""Tokens a second of embeddings: `sf.LLM.embed` beside sentence-transformers, on the same weights and texts.

The model is a Llama of transformers with random weights, as the decoder of many embedding models is, with a tokenizer
of words. Both sides get texts, and return an embedding of each: the state of the last token, or the mean of all. They
take turns in one process of one thread. sentence-transformers sorts texts by length and pads batches of `--batch`.
Processor seconds and their ratios are formed within a turn, and the embeddings are compared. Needs
sentence-transformers in the interpreter; without it only the engine is measured.

    python benchmarks/bench_embed.py --out benchmarks/results/embed.md
"""

import argparse
import importlib.util
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from _report import publish, table

import shardfn as sf

VOCAB = 4096
POOLING = {"last": "lasttoken", "mean": "mean"}


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    draw = random.Random(0)
    texts = [
        " ".join(f"w{draw.randrange(VOCAB - 2)}" for _ in range(draw.randint(args.least, args.most)))
        for _ in range(args.texts)
    ]
    tokens = sum(len(text.split()) for text in texts)
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
        f"{args.texts} texts of {args.least} to {args.most} tokens, {tokens:,} in all; {args.layers} layers of width"
        f" {args.width}, float32, one thread; {args.turns} turns after one that warms up."
    )
    publish("Embeddings", f"{about}\n\n{table(head, rows)}", out=args.out)


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


def measure(place: str, texts: list[str], tokens: int, pooling: str, args: argparse.Namespace) -> list[list[Any]]:
    """A row of the table for each side."""
    llm = sf.LLM(place, context=512, running=args.running)
    sides: dict[str, Callable[[], torch.Tensor]] = {"shardfn": lambda: llm.embed(texts, pooling, normalize=False)}
    if importlib.util.find_spec("sentence_transformers"):
        theirs = _sentence_transformer(place, pooling, args.width)
        sides["sentence-transformers"] = lambda: theirs.encode(
            texts, batch_size=args.batch, convert_to_tensor=True, show_progress_bar=False
        )
    found: dict[str, list[float]] = {name: [] for name in sides}
    out: dict[str, torch.Tensor] = {}
    for turn in range(args.turns + 1):
        for name, run in sides.items():
            start = time.process_time()
            out[name] = run()
            if turn:
                found[name].append(time.process_time() - start)
    rows = []
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        ratios = [a / b for a, b in zip(found["shardfn"], seconds, strict=True)]
        ratio = "" if name == "shardfn" else f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        off = "" if name == "shardfn" else f"{(out['shardfn'].cpu() - out[name].cpu()).abs().max():.1e}"
        rows.append([pooling, name, f"{tokens / middle:,.0f}", f"{middle:.2f}", ratio, off])
        print(rows[-1], flush=True)
    return rows


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
    parser.add_argument("--running", type=int, default=32, help="texts at a time in the engine")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", default="", help="Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
