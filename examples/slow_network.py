"""Trains a GPT over a slow network: from `adamw` to `onebit_adam` is one line.

    torchrun --nproc-per-node 2 examples/slow_network.py
    torchrun --nproc-per-node 2 examples/slow_network.py --adamw
    python benchmarks/slow_link.py --ranks 2 --rate 100mbit -- examples/slow_network.py

After the first steps, in which Adam learns how large gradients are, ranks exchange the signs of the momentum: one bit
per element in place of 32. The last command runs it over a real link of 100 Mbit/s; it needs root and iproute2.
"""

import argparse
import functools
import itertools
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

import shardfn as sf
from shardfn.models import gpt

# Rows by which losses are compared: those of single batches differ by more than the gain of a few steps.
HELD_OUT = 24


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    mesh = sf.make_mesh({"dp": -1})
    rank, world = mesh.axis_index("dp"), mesh.axis_size("dp")

    config = gpt.Config.llama_like(
        vocab_size=256, d_ff=None, num_layers=args.layers, d_model=args.dim, num_heads=args.dim // 32, max_len=128
    )
    text = b"".join(path.read_bytes() for path in itertools.islice(sf.data.default_corpus(), 40))
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, 129, 128)
    # The corpus is one file after another, some harder than others: drawn in its order, losses would reflect the files.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out, order = order[:HELD_OUT], order[HELD_OUT:]

    optimizer = sf.optim.onebit_adam(args.lr, freeze_step=args.freeze_step)
    if args.adamw:
        optimizer = sf.optim.adamw(args.lr, weight_decay=0.0)

    step = sf.sharded_step(functools.partial(gpt.loss, config), optimizer, mesh=mesh, batch=sf.P("dp"))
    state = step.init(functools.partial(gpt.init, config), sf.key(0))
    if rank == 0:
        print(f"{gpt.num_params(config):,} parameters on {world} ranks", flush=True)
    # `disable=None` draws no bar where stderr is no terminal: a log gets lines alone.
    with tqdm(total=args.steps, disable=None if rank == 0 else True, unit="step") as bar:
        for n in range(args.steps):
            first = (n * world + rank) * args.batch
            start = time.perf_counter()
            with sf.collectives.count_traffic() as traffic:
                state, metrics = step(state, {"tokens": rows[order[first : first + args.batch]].long()})
            if rank == 0 and n in (0, args.freeze_step + 1):
                tqdm.write(f"step {n + 1}: {traffic.bytes:,} bytes sent, {time.perf_counter() - start:.2f} s")
            if n + 1 in (args.freeze_step, args.steps):
                own = held_out[rank::world][: HELD_OUT // world]
                with torch.no_grad():
                    loss = step.loss(state.params, {"tokens": rows[own].long()})
                if rank == 0:
                    tqdm.write(f"step {n + 1}: loss {loss:.4f} of rows that are held out")
            bar.set_postfix(loss=f"{metrics['loss']:.4f}")
            bar.update()
    if dist.is_initialized():
        dist.destroy_process_group()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--adamw", action="store_true", help="exchange gradients as they are")
    add("--steps", type=int, default=40, help="%(default)s")
    add("--freeze-step", type=int, default=10, help="the last step that is Adam's (%(default)s)")
    add("--batch", type=int, default=2, help="rows of each rank (%(default)s)")
    add("--layers", type=int, default=4, help="%(default)s")
    add("--dim", type=int, default=256, help="%(default)s")
    add("--lr", type=float, default=1e-3, help="%(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
