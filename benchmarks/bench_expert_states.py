"""Experts that are left out, and experts that wait on the host: loss, bytes read by a decode, bytes of a device.

    prune    a small model is trained on the standard library's sources, pruned by use to half of its experts, and
             trained on for a while, as the whole model is. Losses of validation, and bytes of weights that a decode
             step of several sequences reads: each expert that a token chooses is read once.
    memory   device memory of models with 1, 2, 4 and 8 times `--most-experts`, on 4 ranks along ep at stage 2, with the
             states of experts on the host, beside the first one with all states on the device. Peaks are of captured
             steps on ranks that do not exist, and with `--measure` also of steps on 4 processes (`memory.ledger`).

    python benchmarks/bench_expert_states.py --parts prune memory --measure --out FILE.md

References: Kim et al., Scalable and Efficient MoE Training for Multitask Multilingual Models, 2021,
https://arxiv.org/abs/2109.10465 (Z-code)
"""

import argparse
import functools
import pathlib
import statistics
import tempfile
from typing import Any

import torch
from _pairs import Group
from _report import publish, table

import shardfn as sf
from shardfn import memory, optim
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers

MIB, RANKS = 2**20, 4
ROUTE = functools.partial(layers.top_k, renormalise=False)


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    parts = []
    for name in args.parts:
        parts += [f"## {name}", {"prune": prune, "memory": more_experts}[name](args)]
    publish("Experts left out, and experts on the host", "\n\n".join(parts), out=args.out)


def prune(args: argparse.Namespace) -> str:
    """The table of losses by seed, and the bytes of a decode step."""
    rows, reads = [], []
    with tempfile.TemporaryDirectory() as place:
        text = pathlib.Path(place) / "tokens.bin"
        sf.data.encode_files(sf.data.default_corpus(), text, sf.data.ByteTokenizer())
        for seed in range(args.seeds):
            found = _pruned(args, sf.data.TokenFile.open(text), seed)
            rows.append([seed, *(f"{x:.4f}" for x in found[0]), f"{100 * (found[0][1] / found[0][0] - 1):+.2f} %"])
            rows[-1].append(f"{100 * (found[0][3] / found[0][2] - 1):+.2f} %")
            reads.append(found[1])
            print(rows[-1], reads[-1], flush=True)
    more = f"{args.more} steps more"
    head = ["seed", "whole", "pruned", f"whole, {more}", f"pruned, {more}", "pruned / whole", "after these steps"]
    lines = [
        [batch, *(f"{statistics.mean(x[k] for x in each):.2f}" for k in range(2)), *_bytes_of(each)]
        for batch, each in zip(args.decodes, zip(*reads, strict=True), strict=True)
    ]
    read = ["sequences", "experts read, whole", "pruned", "MiB read, whole", "pruned", "pruned / whole"]
    return "\n\n".join(
        [
            f"{args.layers} layers, {args.experts} experts in each of {len(_config(args).expert_layers)}, of which"
            f" {args.experts // 2} stay; top-1, width {args.width}; {args.steps} steps of 16 rows of 32 bytes.",
            table(head, rows),
            "Weights that a step of decoding reads in all layers, with the experts that tokens of validation choose:",
            table(read, lines),
        ]
    )


def _bytes_of(each: Any) -> list[str]:
    whole, small = (statistics.mean(x[k] for x in each) for k in (2, 3))
    return [f"{whole / MIB:.3f}", f"{small / MIB:.3f}", f"{small / whole:.2f}"]


def _config(args: argparse.Namespace) -> gpt.Config:
    experts = moe.Experts(num=args.experts, top_k=1, every=2, d_ff=args.width, route=ROUTE, balance=0.01)
    sizes: dict[str, Any] = {"num_layers": args.layers, "d_model": args.dim, "num_heads": 4, "max_len": 32}
    return gpt.Config.llama_like(vocab_size=256, d_ff=args.width, tie_embeddings=True, experts=experts, **sizes)


def _pruned(args: argparse.Namespace, text: Any, seed: int) -> tuple[list[float], list[tuple[float, ...]]]:
    """Losses of validation of the four models, and for each number of sequences the experts and bytes that are read."""
    training, validation = sf.data.Batches(text, 16, 32, seed).split(0.02)
    held_out = [validation(i) for i in range(12)]
    config = _config(args)

    def train(config: gpt.Config, params: Any, first: int, num: int, peak: float) -> Any:
        schedule = optim.warmup_cosine_decay_schedule(0.0, peak, num // 20 + 1, num + 1, peak / 10)
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, b2=0.95, weight_decay=0.1))
        step = sf.sharded_step(sf.jit(functools.partial(gpt.loss, config), backend="graph"), tx)
        state = step.init(params)
        for n in range(num):
            state, _ = step(state, training(first + n))
        return sf.unshard(state.params)

    @torch.no_grad()
    def evaluate(config: gpt.Config, params: Any) -> float:
        losses = []
        for batch in held_out:
            logits = gpt.apply(config, params, batch["tokens"][:, :-1])
            losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten()))
        return float(torch.stack(losses).mean())

    params = train(config, gpt.init(config, sf.key(seed)), 0, args.steps, 3e-3)
    with torch.no_grad():
        routes = [gpt.choices(config, params, training(args.steps + i)["tokens"][:, :-1]) for i in range(12)]
        each = zip(*(moe.count_choices(r, config.num_experts) for r in routes), strict=True)
        counts = [torch.stack(x).sum(0) for x in each]
        small, own = moe.prune_experts(config, params, moe.most_used(counts, args.experts // 2))
    losses = [evaluate(config, params), evaluate(small, own)]
    start = args.steps + 12
    losses += [evaluate(c, train(c, p, start, args.more, 1e-3)) for c, p in ((config, params), (small, own))]
    return losses, [_reads(config, params, small, own, held_out, batch) for batch in args.decodes]


@torch.no_grad()
def _reads(
    config: gpt.Config, params: Any, small: gpt.Config, own: Any, batches: list[Any], num: int
) -> tuple[float, ...]:
    """Experts and bytes that a decode step of `num` sequences reads, of the whole model and of the pruned one."""
    out = []
    for c, p in ((config, params), (small, own)):
        routes = torch.cat([gpt.choices(c, p, b["tokens"][:, :-1]) for b in batches])[..., 0]  # [rows, T, layers]
        steps = routes[: len(routes) // num * num].unflatten(0, (-1, num)).transpose(1, 2).flatten(0, 1)
        distinct = [len(set(step[:, m].tolist())) for step in steps for m in range(steps.shape[-1])]
        read = statistics.mean(distinct) * steps.shape[-1]
        expert = sum(x[0].numel() for n, x in p["blocks"][c.expert_layers[0]].items() if n.startswith("e_"))
        rest = sum(x.numel() for x in sf.core.tree_leaves(p)) - sum(c.num_experts) * expert
        out.append((read, 4 * (rest + read * expert)))
    (a, b), (c, d) = out
    return a, c, b, d


def more_experts(args: argparse.Namespace) -> str:
    """The peak of a rank's device by the number of experts, with their states on the device and on the host."""
    rows, budget = [], 0
    for num, host in [(args.most_experts, False), *((args.most_experts * k, True) for k in (1, 2, 4, 8))]:
        config = _many(args, num)
        analysis = _step(config, host, abstract=True).memory_analysis()
        budget = budget or analysis.peak
        told = ""
        if args.measure and (not host or num == 8 * args.most_experts):
            group = Group(serve, RANKS, (args, num, host)).ready(300)
            told = f"{max(group.ask(None)) / MIB:.1f}"
            group.close()
        where = "host" if host else "device"
        size = gpt.num_params(config)
        cells = [f"{x / MIB:.1f}" for x in (analysis.by_memory["device"], analysis.by_memory.get("host", 0))]
        rows.append([where, num, f"{size:,}", *cells, f"{analysis.peak / budget:.2f}", told])
        print(rows[-1], flush=True)
    head = [
        "states of experts",
        "experts of a layer",
        "parameters",
        "device MiB",
        "host MiB",
        "of the first",
        "measured",
    ]
    return f"{RANKS} ranks along ep, stage 2, AdamW, float32, `sf.remat`.\n\n" + table(head, rows)


def _many(args: argparse.Namespace, num: int) -> gpt.Config:
    del args
    experts = moe.Experts(num=num, top_k=1, d_ff=256, route=ROUTE, axes="ep", exchange=layers.AllToAll("ep"))
    sizes: dict[str, Any] = {"vocab_size": 256, "num_layers": 16, "d_model": 128, "num_heads": 4, "max_len": 32}
    return gpt.Config.llama_like(d_ff=256, tie_embeddings=True, experts=experts, **sizes)


def _step(config: gpt.Config, host: bool, *, abstract: bool) -> Any:
    mesh: Any = sf.make_mesh({"ep": RANKS}, device="cpu", abstract=abstract)
    specs = gpt.specs(config)
    if host:
        for block in specs["blocks"]:
            block |= {n: sf.Sharding(x, "host") for n, x in block.items() if n.startswith("e_")}
    states: dict[str, Any] = {"grads": "host", "optimizer": "host"} if host else {}
    loss: Any = functools.partial(gpt.loss, config, wrap=sf.remat)
    step = sf.sharded_step(
        sf.jit(loss, backend="graph"),
        optim.adamw(1e-3),
        mesh=mesh,
        specs=specs,
        batch=sf.P("ep"),
        zero=sf.Zero(stage=2, axis="ep", **states),
    )
    if not abstract:
        return step
    batch = {"tokens": torch.empty(4, config.max_len + 1, dtype=torch.int64, device="meta")}
    return step.lower(sf.eval_shape(lambda: gpt.init(config, sf.key(0))), batch)


def serve(rank: int, world: int, args: argparse.Namespace, num: int, host: bool) -> Any:
    """A rank's bytes of tensors on the device at the peak of two steps."""
    del world
    config = _many(args, num)

    def answer(_: Any) -> int:
        tokens = torch.randint(256, (4, config.max_len + 1), generator=torch.Generator().manual_seed(rank))
        with memory.ledger() as book:
            step = _step(config, host, abstract=False)
            state: Any = step.init(functools.partial(gpt.init, config), sf.key(0))
            for _ in range(2):
                state, _ = step(state, {"tokens": tokens})
        return book.peak("device")

    return answer


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["prune", "memory"], default=["prune", "memory"])
    parser.add_argument("--experts", type=int, default=16, help="of a layer of the pruned model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--more", type=int, default=100, help="steps after pruning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 4, 16], help="sequences of a decode step")
    parser.add_argument("--most-experts", type=int, default=32, help="of a layer of the model that fills the device")
    parser.add_argument("--measure", action="store_true", help="also a step on 4 processes")
    parser.add_argument("--out", default="", help="Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
