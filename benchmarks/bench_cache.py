"""A cache in fewer bytes beside one in float32: KL divergence and perplexity on a text.

    python benchmarks/bench_cache.py MODEL --text FILE... --tokens N --out FILE

MODEL is a directory of Hugging Face. Rows of `--length` tokens are whole prompts: each token reads the rounded keys and
values of all tokens before it, and its own.
"""

import argparse
import os
import pathlib
from collections.abc import Sequence

import torch
import transformers
from _report import publish, table
from torch import Tensor

from shardfn.core import tree_map
from shardfn.inference import decoder, limits_of
from shardfn.inference._cache import DTYPES, make_single_bodies
from shardfn.interop import gpt_from_hf
from shardfn.models import gpt


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    text = "\n".join(pathlib.Path(x).read_text() for x in args.text)
    ids = torch.tensor(tokenizer(text)["input_ids"][: args.tokens]).view(-1, args.length)
    config, params = gpt_from_hf(args.model, dtype=torch.float32, batch_invariant=True)
    packed = gpt.pack(config, tree_map(lambda x: x.full(), params))
    logs = {name: torch.stack([_log_probabilities(config, packed, row, name) for row in ids]) for name in DTYPES}
    lines = [_line(config, name, logs, ids) for name in DTYPES]
    body = [
        f"{ids.numel()} tokens of {', '.join(args.text)}, in rows of {args.length}; heads of {config.head_dim}",
        table(("cache", "bytes a token", "mean KL", "largest KL", "same argmax", "perplexity", "change"), lines),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    ]
    publish("Caches in fewer bytes", "\n\n".join(body), out=args.out)


@torch.no_grad()
def _log_probabilities(config: gpt.Config, packed: gpt.Params, ids_T: Tensor, dtype: str) -> Tensor:
    at_T = torch.arange(len(ids_T), dtype=torch.int32)
    bodies = make_single_bodies(decoder(config).cache, len(ids_T), dtype=dtype)
    return gpt.decode(config, packed, ids_T, at_T, at_T, bodies).logits.log_softmax(-1)


def _line(config: gpt.Config, name: str, logs: dict[str, Tensor], ids: Tensor) -> Sequence[str]:
    want, got = logs["float32"], logs[name]
    kl = (want.exp() * (want - got)).sum(-1)
    same = (want.argmax(-1) == got.argmax(-1)).float().mean()
    first, own = (float(-x[:, :-1].gather(-1, ids[:, 1:, None]).mean()) for x in (want, got))
    layout = decoder(config).cache
    limits = limits_of(decoder(config), cache_dtype=name)
    nbytes = layout.num_bytes(limits) // (limits.blocks * limits.block)
    perplexity, change = torch.tensor(own).exp(), torch.tensor(own - first).expm1()
    figures = f"{kl.mean():.2e}", f"{kl.max():.2e}", f"{same:.4f}", f"{perplexity:.4f}", f"{change:+.4%}"
    return name, str(nbytes), *figures


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
