"""Texts, stop strings and grammars in an engine: the time of a step with each, beside a step without.

The vocabulary has 49,152 tokens: 256 bytes, and pieces of two to nine letters, digits and signs of JSON.
"""

import argparse
import os
import random
import time
from typing import Any

import torch
from _report import publish, table

from shardfn import core
from shardfn.inference import Engine, Grammar, Limits, Runner, Sampling, decoder
from shardfn.inference._detokenize import detokenizer
from shardfn.inference._matchers import Compiler
from shardfn.models import gpt

VOCAB, CONTEXT = 49152, 256
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "year": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["book", "film", "song"]},
    },
    "required": ["name", "year", "tags", "kind"],
}
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "four stop strings": {"stop": ("\n\n", "Human:", "</answer>", "###")},
    "regular expression": {"grammar": Grammar.regex("[a-z]+( [a-z]+)*")},
    "JSON schema": {"grammar": Grammar.json_schema(SCHEMA)},
}


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    tokens = _vocabulary()
    config = gpt.Config.llama_like(
        vocab_size=VOCAB, num_layers=1, d_model=16, num_heads=2, d_ff=32, max_len=CONTEXT, batch_invariant=True
    )
    model = decoder(config), gpt.init(config, core.key(0))
    limits = Limits(VOCAB, CONTEXT, blocks=600, buckets=(1, 16, 64), running=16)
    runner = Runner(model[0], limits)
    lines = []
    for rows in (1, 16):
        bare = _step(Engine(*model, limits=limits, runner=runner), rows, args.rounds, {})
        lines.append(("no tokenizer", rows, f"{1e3 * bare:.2f}", ""))
        for name, how in KINDS.items():
            engine = Engine(*model, limits=limits, runner=runner, tokenizer=tokens)
            took = _step(engine, rows, args.rounds, how)
            lines.append((name, rows, f"{1e3 * took:.2f}", f"{1e6 * (took - bare) / rows:.0f}"))
    body = [
        f"the least processor time of {args.rounds} steps that draw, one thread; the model has one layer of width 16:"
        " its own time is mostly that of 49,152 logits",
        table(("requests have", "rows", "ms a step", "us a row more"), lines),
        table(("compiled", "ms"), _compiled(tokens)),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f}",
    ]
    publish("Texts and grammars in an engine", "\n\n".join(body), out=args.out)


def _vocabulary() -> list[bytes]:
    rng, found = random.Random(0), {bytes([i]): None for i in range(256)}
    letters = b'etaoinshrdlucmfwygpbvkxqjz0123456789{}":,._-'
    while len(found) < VOCAB:
        found[b" " * rng.randint(0, 1) + bytes(rng.choices(letters, k=rng.randint(2, 9)))] = None
    return list(found)


def _step(engine: Engine, rows: int, rounds: int, how: dict[str, Any]) -> float:
    """The least processor time of a step in which all rows draw; requests that end are replaced."""
    times, added = [], 0
    while len(times) < rounds + 5:
        while engine.stats.counts["running"] + engine.stats.counts["waiting"] < rows:
            sampling = Sampling(max_tokens=100, seed=added, **how)
            engine.add([added % VOCAB, 5], sampling)
            added += 1
            engine.step()
        start = time.process_time()
        engine.step()
        took = time.process_time() - start
        if len(engine.core._tokens_in_flight) == rows:
            times.append(took)
    return min(times[5:])


def _compiled(tokens: list[bytes]) -> list[tuple[str, str]]:
    start = time.process_time()
    compiler = Compiler(detokenizer(tokens), VOCAB)
    lines = [("the vocabulary, once an engine", f"{1e3 * (time.process_time() - start):.0f}")]
    large = {"type": "object", "properties": {f"p{i:04d}": {"type": "string"} for i in range(1900)}}
    for name, grammar in [
        ("regular expression", KINDS["regular expression"]["grammar"]),
        ("JSON schema", KINDS["JSON schema"]["grammar"]),
        ("a schema of 1,900 properties, 61 KB", Grammar.json_schema(large)),
    ]:
        start = time.process_time()
        compiler.compile(grammar, ())
        lines.append((name, f"{1e3 * (time.process_time() - start):.1f}"))
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", help="write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
