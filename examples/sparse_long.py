"""Trains small models on sequences of thousands of tokens, with block-sparse attention: one like GPT, one like BERT.

    python examples/sparse_long.py
    python examples/sparse_long.py --model bert --length 8192 --steps 5
    python examples/sparse_long.py --attention dense
    torchrun --nproc-per-node 2 examples/sparse_long.py

GPT attends by the fixed pattern of Sparse Transformers, half of the heads to other blocks than the rest; BERT by a
window, a global block and random ones, as BigBird does, and learns to predict masked bytes. By default (without --data)
it reads the sources of Python's standard library. All attention computes the same numbers but for rounding:
`--attention dense` is slower, and needs memory for all pairs.
"""

import argparse
import functools
import pathlib
import tempfile
import time

import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import nn
from shardfn.models import gpt

MASKED = 256  # the id of a byte that is to be predicted
ATTENTION = {"sparse": nn.BlockSparse(), "blockwise": nn.Blockwise(), "dense": nn.Dense()}


def main():
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    mesh = sf.make_mesh({"dp": -1})
    rank, world = mesh.axis_index("dp"), mesh.axis_size("dp")

    # The layout for the given number of tokens: the pattern of each head, and its density.
    block, heads = args.block, args.heads
    layouts = {
        "gpt": functools.partial(
            nn.layouts.fixed, block=block, num_heads=heads, num_patterns=2, attention="unidirectional", padded=True
        ),
        "bert": functools.partial(nn.layouts.bigbird, block=block, num_heads=heads, random=(1, sf.key(1)), padded=True),
    }
    size = {"num_layers": args.layers, "d_model": args.dim, "num_heads": heads, "max_len": args.length}
    config = gpt.Config.llama_like(
        vocab_size=257,
        d_ff=None,
        tie_embeddings=True,
        attention=ATTENTION[args.attention],
        layout=layouts[args.model],
        causal=args.model == "gpt",
        loss_tile=1024,
        **size,
    )
    loss = functools.partial(gpt.loss, config)

    step = sf.sharded_step(
        loss,
        sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(args.lr)),
        mesh=mesh,
        zero=sf.Zero(stage=3),
    )
    state = step.init(functools.partial(gpt.init, config), sf.key(0))

    say = functools.partial(print, flush=True) if mesh.rank == 0 else lambda *_: None
    blocks = config.layout(args.length).blocks
    say(f"{gpt.num_params(config):,} parameters, {args.length} tokens, {blocks.mean():.1%} of the blocks of attention")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tokens.bin"
        sf.data.encode_files(args.data or sf.data.default_corpus(), path, sf.data.ByteTokenizer())
        batches = sf.data.Batches(sf.data.TokenFile.open(path), args.batch or mesh.size, args.length)
        for n in range(args.steps):
            batch = batches(n, rank=rank, world=world)
            begin = time.monotonic()
            state, metrics = step(state, batch if config.causal else masked(batch))
            seconds = time.monotonic() - begin
            say(f"step {n + 1}: loss {metrics['loss']:.4f}, {batches.batch_size * args.length / seconds:,.0f} tokens/s")
    if dist.is_initialized():
        dist.destroy_process_group()


def masked(batch, share=0.15):
    """Tokens, some of them masked, and the masked ones as targets: a function of the sample's number."""
    tokens = batch["tokens"][:, :-1]
    keys = [sf.fold_in(sf.key(2), int(i)) for i in batch["index"]]
    chosen = torch.stack([sf.core.uniform(key, tokens.shape[1:]) < share for key in keys])
    return {
        "tokens": tokens.masked_fill(chosen, MASKED),
        "targets": tokens.masked_fill(~chosen, -100),
        "index": batch["index"],
    }


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=("gpt", "bert"), default="gpt", help="%(default)s")
    add("--attention", choices=tuple(ATTENTION), default="sparse", help="%(default)s")
    add("--length", type=int, default=8192, help="tokens a row (%(default)s)")
    add("--block", type=int, default=64, help="tokens a block (%(default)s)")
    add("--batch", type=int, help="rows of the global batch (one for each rank)")
    add("--steps", type=int, default=10, help="%(default)s")
    add("--layers", type=int, default=2, help="%(default)s")
    add("--dim", type=int, default=128, help="%(default)s")
    add("--heads", type=int, default=4, help="%(default)s")
    add("--lr", type=float, default=3e-3, help="%(default)s")
    add("--threads", type=int, help="of torch")
    add("--data", nargs="+", type=pathlib.Path, metavar="PATH", help="text files (the Python standard library)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
