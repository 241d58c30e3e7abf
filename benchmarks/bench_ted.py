"""Experts over slow networks: dealt tokens and kept collectives at tp 2 x ep 2, and exchanges over two networks.

Four ranks on two nodes of two ranks (`slow_link.py`): ranks of a node share memory, and nodes share a link.

    switches    a GPT with experts under remat, tp inside a node, ep between nodes at 1 Gbit/s. Seconds of a step with
                neither switch, with dealt tokens (`AllToAll(dealt="tp")`), with kept collectives
                (`policies.save_collectives`), and with both. The third switch of TED, the tiled update, is no option:
                every update of 16-bit gradients goes by tiles (`tests/optim/test_tiled_update.py`).
    networks    a small exchange over ("node", "gpu") with 0.2 ms between nodes: one hop beside two. Without the queue
                netem in the kernel there is no delay, and the table has only the cost of the messages themselves.

    python benchmarks/bench_ted.py --out benchmarks/results/ted.md

Variants take turns in one set of processes; tables have the median of the rounds, and the median of the ratios of each
round. Needs root and iproute2, see `slow_link.py`.

References: Singh et al., A Hybrid Tensor-Expert-Data Parallelism Approach, 2023, https://arxiv.org/abs/2303.06318
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from _pairs import Group
from _report import publish, table
from slow_link import Link, Unavailable, why_unavailable

RANKS, NODE = 4, 2
SWITCHES = {"neither": (False, False), "dealt": (True, False), "kept": (False, True), "both": (True, True)}
HOPS = {"one hop": False, "two hops": True}
Answer = tuple[float, dict[str, int]]


def main() -> None:
    """Measures both parts and prints their tables."""
    args = _arguments()
    if reason := why_unavailable():
        print(f"skipped: {reason}")
        return
    parts, data = [f"{args.rounds} rounds of {args.steps} steps, one thread a rank, {vars(args)}."], dict[str, Any]()
    if "switches" in args.parts:
        with Link(RANKS, args.rate, per_node=NODE) as link:
            found = _measure(serve_steps, list(SWITCHES), args, args.steps, link)
        data["switches"] = found
        parts += [f"## Switches, {args.rate} between nodes", _table(found, "neither")]
    if "networks" in args.parts:
        found, delay = _measure_networks(args)
        data["networks"] = found
        parts += [f"## Exchange of {args.tokens} tokens a rank, {delay}", _table(found, "one hop")]
    publish("Experts over slow networks", "\n\n".join(parts), out=args.out, data=data, as_json=args.json)


def _measure(serve: Any, names: list[str], args: argparse.Namespace, num: int, link: Link) -> dict[str, Any]:
    """Returns by variant the seconds of each round, and the bytes that the node of rank 0 sends in a step."""
    group = Group(serve, RANKS, (args,), link=link).ready(200)
    try:
        found: dict[str, Any] = {name: {"seconds": [], "sent": {}} for name in names}
        for name in names:
            group.ask((name, 1))  # captures, and the first use of the links
        for turn in range(args.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                answers: list[Answer] = group.ask((name, num))
                found[name]["seconds"].append(max(seconds for seconds, _ in answers))
                keys = {axes for _, sent in answers for axes in sent}
                found[name]["sent"] = {axes: sum(sent.get(axes, 0) for _, sent in answers) for axes in sorted(keys)}
        return found
    finally:
        group.close()


def _measure_networks(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Returns the times of exchanges, and the delay between nodes: none where the kernel has no netem."""
    try:
        with Link(RANKS, "unlimited", per_node=NODE, delay=args.delay) as link:
            return _measure(serve_exchanges, list(HOPS), args, args.exchanges, link), f"{args.delay} between nodes"
    except Unavailable as error:
        print(error)
        with Link(RANKS, "unlimited", per_node=NODE) as link:
            found = _measure(serve_exchanges, list(HOPS), args, args.exchanges, link)
            return found, f"without a delay, as the kernel cannot delay packets ({args.delay} was asked for)"


def _table(found: dict[str, Any], base: str) -> str:
    axes = sorted({a for part in found.values() for a in part["sent"]})
    rows = []
    for name, part in found.items():
        ratios = [b / a for a, b in zip(part["seconds"], found[base]["seconds"], strict=True)]
        sent = [f"{part['sent'].get(a, 0) / 1e6:.3f}" for a in axes]
        rows.append([name, f"{statistics.median(part['seconds']):.5f}", f"{statistics.median(ratios):.3f}", *sent])
    return table(["variant", "median s", f"{base} / variant", *(f"MB along {a}, all ranks" for a in axes)], rows)


def _counted(run: Callable[[], Any], num: int) -> Answer:
    import torch.distributed as dist

    import shardfn as sf

    dist.barrier()
    with sf.count_traffic() as traffic:
        start = time.perf_counter()
        for _ in range(num):
            run()
        seconds = time.perf_counter() - start
    sent: dict[str, int] = {}
    for (_, axes), (_, nbytes) in traffic.by_op.items():
        sent[",".join(axes)] = sent.get(",".join(axes), 0) + nbytes // num
    return seconds / num, sent


def serve_steps(rank: int, world: int, args: argparse.Namespace) -> Callable[[Any], Answer]:
    """Builds a step of each variant. The answer to (name, num) is the seconds and bytes of a step over num steps."""
    import torch

    import shardfn as sf
    from shardfn.models import gpt, moe
    from shardfn.nn import moe as layers

    mesh = sf.make_mesh({"ep": world // NODE, "tp": NODE}, device="cpu")

    def build(dealt: bool, kept: bool) -> Callable[[], None]:
        exchange = layers.AllToAll("ep", dealt="tp" if dealt else None)
        experts = moe.Experts(num=8, top_k=2, d_ff=args.d_ff, axes="ep", exchange=exchange)
        sizes: dict[str, Any] = {"vocab_size": 256, "num_layers": args.layers, "d_model": args.width, "num_heads": 8}
        config = moe.mixtral_like(**sizes, num_kv_heads=8, d_ff=args.d_ff, max_len=args.length, experts=experts)
        policy = sf.policies.save_collectives if kept else None
        loss = functools.partial(gpt.loss, config, axis="tp", wrap=functools.partial(sf.remat, policy=policy))
        step = sf.sharded_step(
            sf.jit(loss, backend="graph") if args.jit else loss,
            sf.optim.sgd(1e-3),
            mesh=mesh,
            specs=gpt.specs(config, tp="tp"),
            batch=sf.P("ep"),
        )
        made = torch.Generator().manual_seed(mesh.coords["ep"])
        batch = {"tokens": torch.randint(256, (args.batch, args.length + 1), generator=made)}
        state = [step.init(gpt.init(config, sf.key(0)))]

        def run() -> None:
            state[0], _ = step(state[0], batch)

        return run

    steps = {name: build(*switches) for name, switches in SWITCHES.items()}
    return lambda request: _counted(steps[request[0]], request[1])


def serve_exchanges(rank: int, world: int, args: argparse.Namespace) -> Callable[[Any], Answer]:
    """Builds a layer of each variant. The answer to (name, num) is the seconds and bytes of a layer, over num."""
    import torch

    import shardfn as sf
    from shardfn.nn import moe as layers

    mesh = sf.make_mesh({"node": world // NODE, "gpu": NODE}, device="cpu")
    made = torch.Generator().manual_seed(rank)
    x, scores = torch.randn(args.tokens, 16, generator=made), torch.randn(args.tokens, 8, generator=made)
    leaves = {"w_gate_up": torch.ones(8 // world, 2, 4, 16), "w_down": torch.ones(8 // world, 16, 4)}

    def build(hierarchical: bool) -> Callable[[], None]:
        exchange = layers.AllToAll(("node", "gpu"), hierarchical=hierarchical)

        def run() -> None:
            with torch.no_grad(), sf.collectives.bind_mesh(mesh):
                layers.apply(layers.swiglu_experts, leaves, x, layers.top_k(scores, 2), exchange=exchange)

        return run

    runs = {name: build(hierarchical) for name, hierarchical in HOPS.items()}
    return lambda request: _counted(runs[request[0]], request[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["switches", "networks"], default=["switches", "networks"])
    parser.add_argument("--rate", default="1gbit", help="of the links of the switches")
    parser.add_argument("--delay", default="0.2ms", help="of the links of the networks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of a variant in a round")
    parser.add_argument("--exchanges", type=int, default=100, help="exchanges of a variant in a round")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--d-ff", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="rows of a node")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a rank in an exchange over two networks")
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--out", default="")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
