"""Ulysses beside Megatron's sequence parallelism on a slow link: seconds of a step, and bytes beside their theory.

A GPT whose tokens are cut throughout ("sp": `nn.Ulysses`, leaves sharded by ZeRO 3), and the same one whose layers are
cut, and whose tokens are between them ("tp" with `sequence=True`): an all_gather in front of attention and MLP, a
reduce_scatter behind each. With T tokens, h features, L layers and P ranks, a rank sends, in elements of both passes,

    Ulysses     8 L T h / P (P - 1) / P      and 3 times the parameters, for every T
    Megatron    (8 L + 4) T h (P - 1) / P    4 of them for embedding and output layer; none for parameters that are cut

at `--tokens` tokens and at four times that number, on `--ranks` ranks. Both take turns within a round, in the same
processes, and ratios are formed within a round. Needs root and iproute2, see `slow_link.py`.
"""

import argparse
import collections
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _pairs import Group
from _report import publish, table
from slow_link import Link, describe, why_unavailable

ULYSSES, MEGATRON = "Ulysses", "Megatron"
# Collectives that move activations; the others move parameters and gradients.
OF_TOKENS = {ULYSSES: ("all_to_all",), MEGATRON: ("all_gather", "psum_scatter")}
Sizes = dict[str, Any]
Found = tuple[float, float, dict[str, int], float]


def step_of(kind: str, world: int, tokens: int, sizes: Sizes) -> Callable[[], tuple[float, dict[str, int]]]:
    """A step that returns its loss and the bytes that this rank has sent, by collective."""
    import shardfn as sf
    from shardfn import nn, optim
    from shardfn.models import gpt

    g = torch.Generator().manual_seed(0)
    rows = {"tokens": torch.randint(sizes["vocab_size"], (1, tokens + 1), generator=g)}
    axis = "sp" if kind == ULYSSES else "tp"
    body = nn.Ulysses("sp", tokens, nn.Blockwise()) if kind == ULYSSES else nn.Blockwise()
    config, mesh = gpt.Config(**sizes, max_len=tokens, attention=body), sf.make_mesh({axis: world}, device="cpu")
    how: dict[str, Any] = {"batch": sf.P(None, "sp"), "zero": sf.Zero(3, axis="sp"), "specs": gpt.specs(config)}
    loss: Any = functools.partial(gpt.loss, config)
    if kind == MEGATRON:
        how = {"batch": sf.P(), "specs": gpt.specs(config, tp="tp")}
        loss = functools.partial(loss, axis="tp", sequence=True)
    step = sf.sharded_step(loss, optim.sgd(1e-3), mesh=mesh, **how)
    own = gpt.cut_sequences(config, rows, mesh) if kind == ULYSSES else rows
    state: Any = step.init(functools.partial(gpt.init, config), sf.key(0))

    def run() -> tuple[float, dict[str, int]]:
        nonlocal state
        with sf.count_traffic() as traffic:
            state, metrics = step(state, own)
        sent = collections.Counter[str]()
        for (op, _), (_, nbytes) in traffic.by_op.items():
            sent[op] += nbytes
        return float(metrics["loss"]), dict(sent)

    return run


def serve(rank: int, world: int, lengths: tuple[int, ...], sizes: Sizes) -> Callable[[tuple[str, int]], Found]:
    """A rank's seconds, bytes by collective, and loss."""
    import torch.distributed as dist

    del rank
    steps = {(kind, n): step_of(kind, world, n, sizes) for n in lengths for kind in OF_TOKENS}

    def answer(asked: tuple[str, int]) -> Found:
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        loss, sent = steps[asked]()
        return time.perf_counter() - start, time.process_time() - busy, sent, loss

    return answer


def theory(kind: str, world: int, tokens: int, sizes: Sizes) -> int:
    """Bytes of activations that a rank sends in a step."""
    one, layers = tokens * sizes["d_model"] * 4 * (world - 1) // world, sizes["num_layers"]
    return 8 * layers * one // world if kind == ULYSSES else (8 * layers + 4) * one


def rows_of(group: Group, world: int, lengths: tuple[int, ...], sizes: Sizes, rounds: int) -> list[list[str]]:
    """A row for each length and kind."""
    out = []
    for tokens in lengths:
        found: dict[str, list[list[Found]]] = {kind: [] for kind in OF_TOKENS}
        for n in range(rounds + 1):
            for kind in sorted(found, reverse=bool(n % 2)):
                answers = group.ask((kind, tokens))
                if n:
                    found[kind].append(answers)
        losses = {kind: found[kind][0][0][3] for kind in found}
        seconds = {kind: [max(x[0] for x in answers) for answers in found[kind]] for kind in found}
        ratios = [a / b for a, b in zip(seconds[MEGATRON], seconds[ULYSSES], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        for kind in OF_TOKENS:
            sent = found[kind][-1][0][2]
            told = sum(sent.get(op, 0) for op in OF_TOKENS[kind])
            planned = theory(kind, world, tokens, sizes)
            row = [f"{kind}, {world} ranks", str(tokens), f"{statistics.median(seconds[kind]):.2f}"]
            row += [f"{statistics.median(x[0][1] for x in found[kind]):.2f}", mib(told), mib(planned)]
            row += [f"{told / planned - 1:+.0%}", mib(sum(sent.values()) - told), f"{losses[kind]:.4f}"]
            out.append([*row, f"{middle:.2f} ({low:.2f} to {high:.2f})" if kind == ULYSSES else ""])
    return out


def mib(x: int) -> str:
    return f"{x / 2**20:.2f}"


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    if reason := why_unavailable():
        print(f"skipped: {reason}")
        return
    sizes: Sizes = {"vocab_size": 256, "num_layers": args.layers, "d_model": args.width, "num_heads": args.heads}
    lengths = args.tokens, 4 * args.tokens
    rows, told = [], []
    for world in args.ranks:
        with Link(world, args.rate) as link:
            told.append(describe(link.check()))
            group = Group(serve, world, (lengths, sizes), link=link).ready()
            rows += rows_of(group, world, lengths, sizes, args.rounds)
            group.close()
    head = ["", "tokens", "seconds", "CPU s, rank 0", "MiB of activations", "theory", "beside it", "MiB of parameters"]
    head += ["loss", "Megatron's seconds over Ulysses'"]
    about = f"{sizes}; float32, one sequence a step, ranks of one thread, {args.rounds} rounds; bytes that rank 0 sends"
    publish(f"Ulysses and Megatron at {args.rate}", "\n\n".join([about, *told, table(head, rows)]), out=args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=lambda x: [int(n) for n in x.split(",")], default=[2, 4])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="", help="Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
