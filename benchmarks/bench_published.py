"""Published speed-ups by counts and the cost model: bytes of a captured step, its predicted time, lengths that fit.

Nothing is timed, so the tables are the same on a busy machine. Steps are captured on meshes of ranks that do not exist
(`make_mesh(abstract=True)`), or planned by formula (`shardfn plan`). Walls of the same steps behind real slow links are
those of `bench_slow_network.py` and `bench_ulysses.py`.

    zero++       stage 3 with each of ZeRO++'s fields, on the small mesh of the benchmark and on 24 nodes of 16 V100
    3d           data, tensor and pipeline parallelism alone and together, on slow links
    ulysses      Ulysses beside Megatron's sequence parallelism on 8 ranks: bytes, time at 1 Gbit/s, longest sequences
    sparse       longest sequences of dense, tiled and block-sparse attention in one budget
    superlinear  tokens/s of a rank in a fixed memory, on 1 to 64 ranks, with the batch that fits each
    ted          the largest base model with 16 experts on 128 V100, by the degree of tensor parallelism
    switches     TED's dealt tokens and kept collectives, alone and together, on slow links
    offload      tokens/s with states on the device, the host and the disk, with the batch that fits each

    python benchmarks/bench_published.py --part zero++ --out benchmarks/results/FILE.md

Ranks of the small meshes are cores of `--rate` operations a second.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _model import FULL
from _peers import adamw
from _report import publish, table

import shardfn as sf
from shardfn import nn
from shardfn.cli import JobPlan, Setup, parse_model, plan
from shardfn.graph import Cluster, Device, Link, cluster
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers

MIB, GBIT = 2**20, 1e9 / 8
RATES = {"100 Mbit/s": GBIT / 10, "300 Mbit/s": 0.3 * GBIT, "1 Gbit/s": GBIT, "3 Gbit/s": 3 * GBIT}
FIELDS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "hpZ": {"secondary_axis": "gpu"},
    "qwZ": {"gather": "int8"},
    "qgZ": {"reduce": "int4"},
    "all three": {"secondary_axis": "gpu", "gather": "int8", "reduce": "int4"},
}
DENSE = 16384  # tokens of the longest sequence with a dense mask
Part = Callable[[argparse.Namespace], str]


def cores(args: argparse.Namespace, per_node: int, between: float) -> Cluster:
    """Cores of a CPU: ranks of a node share memory, and each has its share of the node's link."""
    device = Device("core", 12 << 30, {"float32": args.rate, "bfloat16": args.rate}, 8e9)
    return Cluster(device, per_node, Link(4e9, 2e-5), Link(between / per_node, 1e-4), Link(4e9, 1e-5), Link(1e9, 1e-4))


def volta(name: str) -> Cluster:
    """A cluster of V100 whose 16 bits are float16: steps are captured in bfloat16, which V100 do not have."""
    box = cluster(name)
    flops = {**box.device.flops, "bfloat16": box.device.flops["float16"]}
    return dataclasses.replace(box, device=dataclasses.replace(box.device, flops=flops))


def captured(config: gpt.Config, sizes: dict[str, int], zero: sf.Zero, rows: int, *, bf16: bool = False) -> Any:
    """A step of stage 3 on ranks that do not exist."""
    mesh = sf.make_mesh(sizes, device="cpu", abstract=True)
    loss: Any = functools.partial(gpt.loss, config)
    loss = sf.mixed_precision(loss, sf.Policy.bf16(reduce=torch.bfloat16)) if bf16 else loss
    step = sf.sharded_step(
        sf.jit(loss), adamw(), mesh=mesh, specs=gpt.specs(config), batch=sf.P(tuple(sizes)), zero=zero
    )
    batch = {"tokens": torch.empty(rows, config.max_len + 1, dtype=torch.int64, device="meta")}
    return step.lower(sf.eval_shape(lambda: gpt.init(config, sf.key(0))), batch)


def zero_plus_plus(args: argparse.Namespace) -> str:
    """Bytes between nodes and the predicted step of each field."""
    small = dataclasses.replace(FULL, num_layers=4, tokens=64, batch=4)
    large = gpt.Config(50304, 4, 6144, 48, max_len=1024)
    parts = []
    for name, config, sizes, rows, bf16 in (
        (
            "4 of the benchmark's 8 layers, float32, 2 nodes of 2 cores, one row of 64 tokens a rank",
            small.config,
            (2, 2),
            1,
            False,
        ),
        (
            "4 of the 40 layers of a GPT of 18B, 16 bits, 24 nodes of 16 V100, one row of 1,024 tokens a rank",
            large,
            (24, 16),
            1,
            True,
        ),
    ):
        mesh: dict[str, int] = dict(zip(("node", "gpu"), sizes, strict=True))
        found, axes = {}, tuple(mesh)
        for field, options in FIELDS.items():
            zero = sf.Zero.flat(stage=3, axis=axes, **options)
            found[field] = captured(config, mesh, zero, rows, bf16=bf16)
        if bf16:
            box = volta("v100-32")
            rates = {f"{n} Gbit/s a node": n * GBIT for n in (25, 100, 400)}
            made = {k: dataclasses.replace(box, per_node=16, between=Link(x / 16, 1e-5)) for k, x in rates.items()}
        else:
            made = {k: cores(args, 2, x) for k, x in RATES.items()}
        parts += [f"## {name}: {gpt.num_params(config):,} parameters", _speed_table(found, made, mesh, "node")]
    return "\n\n".join(parts)


def _speed_table(found: dict[str, Any], clusters: dict[str, Cluster], mesh: dict[str, int], far: str) -> str:
    rows, times = [], {}
    for name, lowered in found.items():
        traffic = lowered.cost_analysis().traffic
        times[name] = [lowered.estimate(box).seconds for box in clusters.values()]
        sent = f"{traffic.across(far, mesh) / 1e6:,.2f}"
        first = times[next(iter(found))]
        rows.append([name, sent, *(f"{t:.3g} ({a / t:.2f})" for a, t in zip(first, times[name], strict=True))])
    return table(["fields", "MB a rank between nodes", *(f"{k}: s ({next(iter(found))} / it)" for k in clusters)], rows)


def three_d(args: argparse.Namespace) -> str:
    """The plan of 8 and of 64 ranks, along one axis and along three."""
    meshes = {
        "dp alone, stage 3": ({"dp": 8}, 3),
        "dp alone, stage 1": ({"dp": 8}, 1),
        "tp alone": ({"tp": 8}, 0),
        "pp 2 x dp 2 x tp 2, stage 1": ({"pp": 2, "dp": 2, "tp": 2}, 1),
        "pp 4 x tp 2": ({"pp": 4, "tp": 2}, 0),
    }
    parts = []
    small = FULL.config
    clusters = {k: cores(args, 2, RATES[k]) for k in ("100 Mbit/s", "1 Gbit/s")}
    parts += [
        f"## The benchmark's GPT, {gpt.num_params(small):,} parameters, float32, 4 nodes of 2 cores, 32 rows of 256"
    ]
    parts.append(_planned("gpt", small, meshes, clusters, rows=32, seq=256, precision="fp32-adam", how=8))
    large = parse_model("gpt:num_layers=48,d_model=1600,num_heads=25,vocab_size=50304,max_len=1024,tie_embeddings=true")
    box = cluster("v100-32")
    on_slow = {
        f"{n} Gbit/s a node": dataclasses.replace(box, per_node=4, between=Link(n * GBIT / 4, 2e-5)) for n in (4, 40)
    }
    meshes = {
        "dp alone, stage 3": ({"dp": 16}, 3),
        "dp alone, stage 1": ({"dp": 16}, 1),
        "tp alone": ({"tp": 16}, 0),
        "pp 4 x dp 2 x tp 2, stage 1": ({"pp": 4, "dp": 2, "tp": 2}, 1),
        "pp 4 x tp 4": ({"pp": 4, "tp": 4}, 0),
        "pp 4 x dp 4, stage 1": ({"pp": 4, "dp": 4}, 1),
    }
    parts += [f"## GPT-2 of {gpt.num_params(large):,} parameters, 16 bits, 4 nodes of 4 V100, 128 rows of 1,024"]
    parts.append(_planned("gpt2-xl", large, meshes, on_slow, rows=128, seq=1024, precision="fp16-adam", how=16))
    return "\n\n".join(parts)


def _planned(
    name: str,
    config: gpt.Config,
    meshes: dict[str, tuple[dict[str, int], int]],
    clusters: dict[str, Cluster],
    *,
    rows: int,
    seq: int,
    precision: str,
    how: int,
) -> str:
    """A row of the table for each mesh: the plan's time, its largest part, and the slowest over it."""
    made: dict[str, list[JobPlan]] = {}
    for label, (mesh, stage) in meshes.items():
        own, num = rows // mesh.get("dp", 1), how if "pp" in mesh else 1
        for box in clusters.values():
            setup = Setup(name, config, mesh, box, sf.Zero(stage), precision, own, seq, min(num, own), remat=True)
            made.setdefault(label, []).append(plan(setup))
    three = next(label for label in meshes if label.startswith("pp") and "dp" in label and "tp" in label)
    out = []
    for label, plans in made.items():
        cells = [
            f"{p.cost.seconds:.3g}, {p.cost.dominates} ({p.cost.seconds / mine.cost.seconds:.2f})"
            for p, mine in zip(plans, made[three], strict=True)
        ]
        out.append([label, f"{plans[0].peak / MIB:,.0f}", *cells])
    return table(["mesh", "MiB a rank", *(f"{k}: s, largest part (over {three})" for k in clusters)], out)


def ulysses(args: argparse.Namespace) -> str:
    """Bytes and predicted time at 1 Gbit/s a rank on 8 ranks, and the longest sequence in a budget."""
    sizes: dict[str, Any] = {"vocab_size": 256, "num_layers": 2, "d_model": 512, "num_heads": 8}
    box = cores(args, 1, GBIT)
    found: dict[tuple[str, int], Any] = {}
    rows, peaks = [], {}
    for tokens in (4096, 16384, 65536):
        for kind in ("Ulysses", "Megatron"):
            found[kind, tokens] = lowered = _long_step(kind, 8, tokens, sizes)
            peaks[kind, tokens] = lowered.memory_analysis().peak
        for kind in ("Ulysses", "Megatron"):
            lowered, sent = found[kind, tokens], 0
            for (op, _), (_, nbytes) in lowered.cost_analysis().transfers.items():
                sent += (
                    nbytes
                    if op in {"Ulysses": ("all_to_all",), "Megatron": ("all_gather", "psum_scatter")}[kind]
                    else 0
                )
            times = {k: found[k, tokens].estimate(box).seconds for k in ("Ulysses", "Megatron")}
            ratio = f"{times['Megatron'] / times['Ulysses']:.2f}" if kind == "Ulysses" else ""
            rows.append(
                [kind, tokens, f"{sent / MIB:.1f}", f"{peaks[kind, tokens] / MIB:.1f}", f"{times[kind]:.3g}", ratio]
            )
    head = ["", "tokens", "MiB of activations a rank", "peak MiB", "predicted s", "Megatron's over Ulysses'"]
    longest = []
    for budget in (peaks["Megatron", 4096], peaks["Megatron", 16384]):
        lengths = {kind: _longest(peaks, kind, budget) for kind in ("Ulysses", "Megatron")}
        longest.append(
            [
                f"{budget / MIB:.1f}",
                *(f"{n:,}" for n in lengths.values()),
                f"{lengths['Ulysses'] / lengths['Megatron']:.2f}",
            ]
        )
    return "\n\n".join(
        [
            f"{sizes}, 8 ranks, float32, one sequence, no recomputation; links of 1 Gbit/s a rank",
            table(head, rows),
            "The longest sequence in the bytes that Megatron's step of 4,096 and of 16,384 tokens has at its peak, on"
            " the line through the peaks of the two nearest lengths:",
            table(["budget MiB", "Ulysses", "Megatron", "ratio"], longest),
        ]
    )


def _longest(peaks: dict[tuple[str, int], int], kind: str, budget: int) -> int:
    points = sorted((n, peak) for (k, n), peak in peaks.items() if k == kind)
    for (a, low), (b, high) in itertools.pairwise(points):
        if budget <= high or b == points[-1][0]:
            return int(a + (b - a) * (budget - low) / (high - low))
    raise AssertionError(kind)


def _long_step(kind: str, world: int, tokens: int, sizes: dict[str, Any]) -> Any:
    axis = "sp" if kind == "Ulysses" else "tp"
    body = nn.Ulysses("sp", tokens) if kind == "Ulysses" else nn.Dense()
    config = gpt.Config(**sizes, max_len=tokens, attention=body)
    mesh = sf.make_mesh({axis: world}, device="cpu", abstract=True)
    how: dict[str, Any] = {"batch": sf.P(None, "sp"), "zero": sf.Zero(3, axis="sp"), "specs": gpt.specs(config)}
    loss: Any = functools.partial(gpt.loss, config)
    if kind == "Megatron":
        how = {"batch": sf.P(), "specs": gpt.specs(config, tp="tp")}
        loss = functools.partial(loss, axis="tp", sequence=True)
    step = sf.sharded_step(sf.jit(loss), sf.optim.sgd(1e-3), mesh=mesh, **how)
    rows = {"tokens": torch.empty(1, tokens + 1, dtype=torch.int64, device="meta")}
    if kind == "Ulysses":
        own = {"dtype": torch.int64, "device": "meta"}
        rows = {"tokens": torch.empty(1, tokens // world, **own), "targets": torch.empty(1, tokens // world, **own)}
    return step.lower(sf.eval_shape(lambda: gpt.init(config, sf.key(0))), rows)


def sparse(args: argparse.Namespace) -> str:
    """Peaks and operations of a training step by kind of attention, and the longest length in one budget."""
    del args
    key = sf.key(0)
    sizes: dict[str, Any] = {"vocab_size": 256, "num_layers": 2, "d_model": 128, "num_heads": 2, "tie_embeddings": True}
    layouts: dict[str, Any] = {
        "a dense mask, nn.Dense": (nn.Dense(), lambda T: nn.layouts.fixed(T, block=64, attention="unidirectional")),
        "nn.Blockwise, all pairs": (nn.Blockwise(), None),
        "fixed, windows of 4 blocks": (
            nn.BlockSparse(),
            lambda T: nn.layouts.fixed(T, block=64, attention="unidirectional"),
        ),
        "bigbird, 2 random blocks": (nn.BlockSparse(), lambda T: nn.layouts.bigbird(T, block=64, random=(2, key))),
    }
    peaks: dict[tuple[str, int], int] = {}
    work: dict[tuple[str, int], int] = {}
    for name, (body, layout) in layouts.items():
        for tokens in (4096, DENSE) if "dense mask" in name else (2048, 4096):
            step = _sparse_step(sizes, tokens, body, layout)
            peaks[name, tokens], work[name, tokens] = step.memory_analysis().peak, step.cost_analysis().flops
    budget = peaks["a dense mask, nn.Dense", DENSE]
    rows = []
    for name in layouts:
        if "dense mask" in name:
            length = DENSE
        else:
            a, b = peaks[name, 2048], peaks[name, 4096]
            length = int(2048 + 2048 * (budget - a) / (b - a)) // 64 * 64
        rows.append(
            [
                name,
                f"{peaks[name, 4096] / MIB:.1f}",
                f"{work[name, 4096] / 1e9:.2f}",
                f"{length:,}",
                f"{length / DENSE:.1f}",
            ]
        )
    longest = "fixed, windows of 4 blocks"
    body, layout = layouts[longest]
    length = int(rows[2][3].replace(",", ""))
    checked = _sparse_step(sizes, length, body, layout).memory_analysis().peak
    return "\n\n".join(
        [
            f"{sizes}; one sequence, float32, AdamW, `sf.remat`, blocks of 64, layouts of one direction but bigbird's",
            table(
                ["attention", "peak MiB at 4,096", "GFLOP at 4,096", "longest in the budget", "of the dense length"],
                rows,
            ),
            f"The budget is the peak of a dense mask at {DENSE:,} tokens, {budget / MIB:.1f} MiB. Lengths are on the"
            f" line through the peaks at 2,048 and 4,096 tokens. Captured at {length:,} tokens, {longest} has its peak"
            f" at {checked / MIB:.1f} MiB ({checked / budget - 1:+.1%} of the budget).",
        ]
    )


def _sparse_step(sizes: dict[str, Any], tokens: int, body: Any, layout: Any) -> Any:
    config = gpt.Config(**sizes, max_len=tokens, attention=body, layout=layout, position="rope", loss_tile=256)
    loss = functools.partial(gpt.loss, config, wrap=sf.remat)
    step = sf.sharded_step(
        sf.jit(loss), sf.optim.adamw(1e-3), mesh=sf.make_mesh({"dp": 1}, device="cpu", abstract=True)
    )
    rows = {"tokens": torch.empty(1, tokens + 1, dtype=torch.int64, device="meta")}
    return step.lower(sf.eval_shape(lambda: gpt.init(config, sf.key(0))), rows)


def superlinear(args: argparse.Namespace) -> str:
    """Tokens a second of a rank on more and more ranks, each with the largest batch that fits."""
    del args
    parts = []
    for name, model, device, stage in (
        (
            "GPT of 10B on V100 of 32 GB",
            "gpt:num_layers=50,d_model=4096,num_heads=32,vocab_size=50304,max_len=1024",
            "v100-32",
            2,
        ),
        ("GPT of 1.5B on V100 of 32 GB", "gpt2-xl", "v100-32", 2),
    ):
        config, rows, first = parse_model(model), [], 0.0
        for world in (1, 2, 4, 8, 16, 32, 64, 128, 256, 400):
            best = None
            for batch in _batches():
                setup = Setup(
                    model, config, {"dp": world}, cluster(device), sf.Zero(stage), "fp16-adam", batch, 1024, remat=True
                )
                found = plan(setup)
                if not found.fits:
                    break
                best = found
            if best is None:
                rows.append([world, "", "does not fit", "", ""])
                continue
            rate = best.cost.tokens_per_second / world
            first = first or rate
            flops = best.cost.model_flops / best.cost.seconds / world / 1e12
            rows.append([world, best.setup.batch, f"{rate:,.0f}", f"{flops:.1f}", f"{rate / first:.2f}"])
        head = ["ranks", "rows a rank", "tokens/s a rank", "TFLOP/s a rank", "of the first that fits"]
        parts += [f"## {name}, stage {stage}, recomputation", table(head, rows)]
    return "\n\n".join(parts)


def _batches() -> Iterator[int]:
    yield from range(1, 17)
    yield from range(20, 513, 4)


def offload(args: argparse.Namespace) -> str:
    """Tokens a second with states in each memory, with the largest batch that fits."""
    del args
    homes: dict[str, dict[str, Any]] = {
        "on the device": {},
        "optimizer and gradients on the host": {"grads": "host", "optimizer": "host"},
        "all on the host, stage 3": {"params": "host", "grads": "host", "optimizer": "host"},
        "all on disk, stage 3": {"params": "disk", "grads": "disk", "optimizer": "disk", "disk": sf.Disk("/disk")},
    }
    rows = []
    for label, model in (
        ("1.4B", "gpt:num_layers=40,d_model=1664,num_heads=16"),
        ("10B", "gpt:num_layers=50,d_model=4096,num_heads=32"),
    ):
        config, first = parse_model(f"{model},vocab_size=50304,max_len=1024"), 0.0
        for home, fields in homes.items():
            best = None
            for batch in _batches():
                zero = sf.Zero(3 if "params" in fields else 2, **fields)
                box = cluster("v100-32")
                setup = Setup(label, config, {"dp": 1}, box, zero, "fp16-adam", batch, 1024, remat=True)
                found = plan(setup)
                if not found.fits:
                    break
                best = found
            if best is None:
                rows.append([label, home, "", "does not fit", "", "", ""])
                continue
            rate = best.cost.tokens_per_second
            first = first or rate
            flops = best.cost.model_flops / best.cost.seconds / 1e12
            rows.append(
                [
                    label,
                    home,
                    best.setup.batch,
                    f"{rate:,.0f}",
                    f"{flops:.1f}",
                    f"{rate / first:.2f}",
                    best.cost.dominates,
                ]
            )
    head = ["model", "states", "rows", "tokens/s", "TFLOP/s", "of the first that fits", "largest part"]
    return "One V100 of 32 GB, recomputation, 16 bits, rows of 1,024 tokens, the most rows that fit.\n\n" + table(
        head, rows
    )


def switches(args: argparse.Namespace) -> str:
    """Bytes and the predicted step with dealt tokens and kept collectives, under recomputation."""
    route = functools.partial(layers.top_k, renormalise=False)
    small: dict[str, Any] = {"num_layers": 2, "d_model": 256, "num_heads": 8, "max_len": 128}
    large: dict[str, Any] = {"num_layers": 4, "d_model": 4096, "num_heads": 32, "max_len": 2048}
    parts = []
    for title, sizes, rule, mesh, rows, bf16 in (
        (
            "The model of `bench_ted.py`, 2 nodes of 2 cores",
            small,
            functools.partial(moe.Experts, num=8, top_k=2, d_ff=128),
            (2, 2),
            8,
            False,
        ),
        (
            "4 of the 32 layers of TED's 6.7B base, 64 V100 on nodes of 4",
            large,
            functools.partial(moe.Experts, num=16, top_k=1, every=2, route=route),
            (16, 4),
            1,
            True,
        ),
    ):
        names: dict[str, int] = dict(zip(("ep", "tp"), mesh, strict=True))
        found: dict[str, Any] = {}
        for name, (dealt, kept) in SWITCHES.items():
            exchange = layers.AllToAll("ep", dealt="tp" if dealt else None)
            experts = rule(axes="ep", exchange=exchange)
            config = gpt.Config(vocab_size=256 if not bf16 else 50304, experts=experts, position="rope", **sizes)
            policy = sf.policies.save_collectives if kept else None
            loss: Any = functools.partial(gpt.loss, config, axis="tp", wrap=functools.partial(sf.remat, policy=policy))
            loss = sf.mixed_precision(loss, sf.Policy.bf16(reduce=torch.bfloat16)) if bf16 else loss
            step = sf.sharded_step(
                sf.jit(loss),
                sf.optim.sgd(1e-3),
                mesh=sf.make_mesh(names, device="cpu", abstract=True),
                specs=gpt.specs(config, tp="tp"),
                batch=sf.P("ep"),
            )
            batch = {"tokens": torch.empty(rows, config.max_len + 1, dtype=torch.int64, device="meta")}
            found[name] = step.lower(sf.eval_shape(lambda c=config: gpt.init(c, sf.key(0))), batch)
        if bf16:
            box = volta("v100-16")
            clusters = {
                f"{n} GB/s a rank": dataclasses.replace(box, per_node=4, between=Link(n * 1e9, 1e-5))
                for n in (1, 3, 12)
            }
        else:
            clusters = {k: cores(args, 2, x) for k, x in RATES.items()}
        parts += [f"## {title}", _speed_table(found, clusters, names, "ep")]
    return "\n\n".join(parts)


SWITCHES = {"neither": (False, False), "dealt": (True, False), "kept": (False, True), "both": (True, True)}


def ted(args: argparse.Namespace) -> str:
    """The largest base model with 16 experts in every second layer that fits, by the degree of tensor parallelism."""
    del args
    rows, first = [], 0
    for tp in (1, 2, 4, 8):
        best = None
        for width in range(512, 16385, 128):
            text = (
                f"gpt:num_layers=32,d_model={width},num_heads={width // 64},vocab_size=50304,max_len=2048,stacked=true"
            )
            base = parse_model(text)
            experts = moe.Experts(num=16, every=2, top_k=1, route=functools.partial(layers.top_k, renormalise=False))
            config = dataclasses.replace(base, experts=experts)
            mesh, box = {"dp": 128 // tp, "tp": tp}, cluster("v100-16")
            setup = Setup(
                "ted", config, mesh, box, sf.Zero(1), "fp16-adam", 1, 2048, remat=True, ep=16 if tp < 16 else 8
            )
            found = plan(setup)
            if not found.fits:
                break
            best = found, gpt.num_params(base), width
        if best is None:
            rows.append([tp, "none fits", "", "", "", ""])
            continue
        found, size, width = best
        first = first or size
        most = f"{found.num_params / 1e9:,.1f}"
        rows.append([tp, width, f"{size / 1e9:.2f}", most, f"{found.peak / 2**30:.2f}", f"{size / first:.1f}"])
    head = ["tp", "width", "base, 1e9", "with experts, 1e9", "GiB of a device", "base over that of tp 1"]
    about = (
        "128 V100 of 16 GB, 32 layers, 16 experts in every second layer on ep 16, stage 1, 16 bits, recomputation, one"
        " row of 2,048 tokens a rank."
    )
    return f"{about}\n\n{table(head, rows)}"


PARTS: dict[str, tuple[str, Part]] = {
    "zero++": ("ZeRO++ on slow links, by counts", zero_plus_plus),
    "3d": ("Three dimensions on slow links, by the plan", three_d),
    "ulysses": ("Ulysses and Megatron on 8 ranks, by counts", ulysses),
    "sparse": ("The longest sparse sequences, by counts", sparse),
    "superlinear": ("Tokens a second of a rank in a fixed memory, by the plan", superlinear),
    "switches": ("TED's switches on slow links, by counts", switches),
    "ted": ("The largest base model with experts, by the plan", ted),
    "offload": ("States on the device, the host and the disk, by the plan", offload),
}


def main() -> None:
    """Prints and writes the table of one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--rate", type=float, default=5e10, help="operations a second of a core (%(default)g)")
    parser.add_argument("--out", default="", help="Markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    title, part = PARTS[args.part]
    publish(title, part(args), out=args.out)


if __name__ == "__main__":
    main()
