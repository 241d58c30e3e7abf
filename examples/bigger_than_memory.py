"""Trains a GPT whose states are several times larger than the memory the program allows itself.

    python examples/bigger_than_memory.py
    python examples/bigger_than_memory.py --memory-mb 700 --layers 21 --steps 10 --directory /mnt/fast_disk

Parameters, gradients and the optimizer's state are files; a window of layers and three chunks of the update are in
memory at any time. The limit is the kernel's (RLIMIT_DATA: heap, stacks and private mappings, the interpreter's and
torch's own 270 MB included), so a program that needs more ends with an allocation error. Kill it and start it again: it
goes on after the last step that it finished.
"""

import argparse
import functools
import itertools
import pathlib
import re
import resource
import tempfile

import torch
from tqdm import tqdm

import shardfn as sf
from shardfn.models import gpt


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    sf.memory.return_freed_pages()
    if args.memory_mb:
        resource.setrlimit(resource.RLIMIT_DATA, (args.memory_mb << 20, args.memory_mb << 20))

    # The model: bytes of text in, bytes of text out.
    size = {"num_layers": args.layers, "d_model": args.dim, "num_heads": args.dim // 64, "max_len": args.length}
    config = gpt.Config.llama_like(vocab_size=256, d_ff=None, **size)
    files = args.data or sf.data.default_corpus()
    text = b"".join(path.read_bytes() for path in itertools.islice(files, 20))
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, args.length + 1, args.length)

    # The step: this call alone places its states.
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        directory = args.directory or scratch
        kinds = {"params": "disk", "grads": "disk", "optimizer": "disk", "directory": str(directory)}
        zero = sf.Zero.flat(
            stage=3, persist_elements=2048, prefetch_bytes=16 << 20, chunk_bytes=args.chunk_mb << 20, **kinds
        )
        if args.in_memory:
            zero = sf.Zero(stage=3, persist_elements=2048)
        step = sf.sharded_step(
            functools.partial(gpt.loss, config, wrap=sf.remat),
            sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(args.lr)),
            mesh=sf.make_mesh({"dp": -1}),
            zero=zero,
        )
        model = functools.partial(gpt.init, config), sf.key(0)
        begun = not args.in_memory and (pathlib.Path(directory) / "rank0").exists()
        with sf.memory.ledger() as book:
            state = step.resume(*model) if begun else step.init(*model)
            states = 12 * gpt.num_params(config)
            limit = f"{args.memory_mb / 1e3:.2f} GB" if args.memory_mb else "no limit"
            print(f"{gpt.num_params(config):,} parameters, {states / 1e9:.2f} GB of states, {limit} of memory")
            first = int(state.step)
            # `disable=None` draws no bar where stderr is no terminal; there each step, which takes seconds, is a line.
            bar = tqdm(range(first, args.steps), initial=first, total=args.steps, unit="step", disable=None)
            for n in bar:
                batch = {"tokens": rows[n * args.batch : (n + 1) * args.batch].long()}
                state, metrics = step(state, batch)
                bar.set_postfix(loss=f"{metrics['loss']:.4f}", resident=f"{resident('VmHWM'):,} MB")
                if args.verbose or bar.disable:
                    tqdm.write(f"step {n + 1} loss {metrics['loss'].item():.9g}")
        print(book.table())
        print(f"most resident memory: {resident('VmHWM'):,} MB; states: {states >> 20:,} MB")
        del state
        step.close()


def resident(field):
    """Megabytes of this process, as the kernel counts them."""
    found = re.search(rf"{field}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())
    return int(found[1]) // 1024


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--memory-mb", type=int, default=700, help="RLIMIT_DATA; 0 for none (%(default)s)")
    add("--layers", type=int, default=21)
    add("--dim", type=int, default=1024)
    add("--batch", type=int, default=2)
    add("--length", type=int, default=64)
    add("--steps", type=int, default=5)
    add("--lr", type=float, default=3e-4)
    add("--chunk-mb", type=int, default=16)
    add("--threads", type=int, default=2)
    add("--data", nargs="+", type=pathlib.Path, help="text files (the Python standard library)")
    add("--directory", type=pathlib.Path, help="where the states stay, to go on from; by default they are removed")
    add("--scratch", type=pathlib.Path, help="where the default directory is made")
    add("--in-memory", action="store_true", help="keep everything in memory, for comparison")
    add("--verbose", action="store_true", help="print every loss")
    return parser.parse_args()


if __name__ == "__main__":
    main()
