"""Loss curves of compressed training beside those of its uncompressed parents: same data, same seed, same steps.

    python benchmarks/bench_compressed_curves.py --plot benchmarks/results/compressed_curves

A small GPT learns Python from the standard library's sources on 4 ranks. Each optimizer is compressed after 15 % of the
steps, and compared with its parent by the loss on held-out text at the end. `onebit_adam, no feedback` is the negative
control: errors of compression are dropped. ZeRO++ is compared with ZeRO-3. `adam, reordered` changes nothing but the
last bits (the gradient of each batch is summed in two halves): how far two runs drift apart by rounding alone.
"""

import argparse
import functools
import json
import pathlib
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

from _pairs import Group
from _report import publish, table

WINDOW = 50
NODES = {"node": 2, "gpu": 2}
# name -> (parent, mesh)
CASES = {
    "adam": ("", "dp"),
    "adam, reordered": ("adam", "dp"),
    "onebit_adam": ("adam", "dp"),
    "onebit_adam, ZeRO 1": ("adam", "dp"),
    "onebit_adam, no feedback": ("adam", "dp"),
    "zero_one_adam": ("adam", "dp"),
    "apmsqueeze, int4": ("adam", "dp"),
    "lamb": ("", "dp"),
    "onebit_lamb": ("lamb", "dp"),
    "ZeRO 3": ("", "nodes"),
    "ZeRO++ qwZ": ("ZeRO 3", "nodes"),
    "ZeRO++ qgZ": ("ZeRO 3", "nodes"),
    "ZeRO++": ("ZeRO 3", "nodes"),
}


def main() -> None:
    args = _arguments()
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        _write_tokens(pathlib.Path(folder) / "tokens.bin")
        for name in args.cases:
            kept = pathlib.Path(args.keep or folder) / f"{re.sub('[^a-z0-9]+', '_', name.lower())}_{args.steps}.json"
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                start = time.monotonic()
                group = Group(serve, 4, (name, args, f"{folder}/tokens.bin")).ready()
                kept.write_text(json.dumps(group.ask(args.steps)[0]))
                group.close()
                print(f"{name}: after {time.monotonic() - start:.0f} s", flush=True)
            runs[name] = json.loads(kept.read_text())
    publish("Loss curves of compressed training", _body(args, runs), out=args.out, data=runs, as_json=args.json)
    if args.plot:
        _plot(args, runs)


def serve(rank: int, world: int, name: str, args: argparse.Namespace, tokens: str) -> Callable[[int], dict[str, Any]]:
    """Builds one run; its answer is the result."""
    import torch

    import shardfn as sf
    from shardfn.models import gpt

    axes = ("node", "gpu") if CASES[name][1] == "nodes" else ("dp",)
    mesh = sf.make_mesh(dict(NODES) if len(axes) == 2 else {"dp": world})
    size = {"num_layers": args.layers, "d_model": args.dim, "num_heads": args.heads, "max_len": args.length}
    config = gpt.Config.llama_like(vocab_size=256, d_ff=None, tie_embeddings=True, **size)
    data = sf.data.Batches(sf.data.TokenFile.open(tokens), args.batch, args.length, args.seed)
    train, held_out = data.split(0.02)
    loss = functools.partial(gpt.loss, config)
    step = sf.sharded_step(
        sf.accumulate(loss, 2) if "reordered" in name else loss,
        _optimizer(name, args),
        mesh=mesh,
        batch=sf.P(axes if len(axes) == 2 else "dp"),
        zero=_zero(name),
    )
    state = step.init(functools.partial(gpt.init, config), sf.key(args.seed))

    def answer(steps: int) -> dict[str, Any]:
        nonlocal state
        losses = []
        for n in range(steps):
            state, metrics = step(state, train(n, rank=rank, world=world))
            losses.append(metrics["loss"])
        found = []
        for n in range(args.held_out):
            batch = held_out(n, rank=rank, world=world)
            found.append(step.apply(lambda p, b: sf.pmean(loss(p, b), axes), state, batch))
        mean = float(torch.stack(found).mean())
        return {"loss": [round(float(x), 5) for x in losses], "held_out": mean, "parameters": gpt.num_params(config)}

    return answer


def _optimizer(name: str, args: argparse.Namespace) -> Any:
    import shardfn as sf
    from shardfn.collectives import int4

    frozen = int(0.15 * args.steps)
    rate = sf.optim.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 20, args.steps, args.lr / 10)
    lamb = sf.optim.warmup_cosine_decay_schedule(0.0, args.lamb_lr, args.steps // 20, args.steps, args.lamb_lr / 10)
    # A variance of the last 20 steps at the freeze would be a poor one to keep: b2 is such that it is of the last 300.
    how: dict[str, Any] = {"b2": args.b2}
    # 0/1 Adam takes fewer gradients into it: with the same b2 those of the first steps would still be most of it.
    rare: dict[str, Any] = {"b2": args.rare_b2, "var_update_scaler": max(1, frozen // args.rare)}
    return {
        "onebit_adam": lambda: sf.optim.onebit_adam(rate, freeze_step=frozen, feedback="no" not in name, **how),
        "zero_one_adam": lambda: sf.optim.zero_one_adam(
            rate,
            var_freeze_step=frozen,
            local_step_scaler=args.steps // 4,
            local_step_clipper=4,
            **rare,
        ),
        "apmsqueeze": lambda: sf.optim.apmsqueeze(rate, freeze_step=frozen, compressor=int4(), **how),
        "lamb": lambda: sf.optim.lamb(lamb, **how),
        "onebit_lamb": lambda: sf.optim.onebit_lamb(lamb, freeze_step=frozen, coeff_beta=args.coeff_beta, **how),
    }.get(name.split(",")[0], lambda: sf.optim.adam(rate, **how))()


def _zero(name: str) -> Any:
    import shardfn as sf

    near: dict[str, Any] = {"stage": 3, "axis": ("node", "gpu"), "persist_elements": 512}
    more: dict[str, dict[str, Any]] = {
        "ZeRO 3": near,
        "ZeRO++ qwZ": near | {"gather": "int8"},
        "ZeRO++ qgZ": near | {"reduce": "int4", "secondary_axis": "gpu"},
        "ZeRO++": near | {"gather": "int8", "reduce": "int4", "secondary_axis": "gpu"},
        "onebit_adam, ZeRO 1": {"stage": 1},
    }
    return sf.Zero.flat(**more.get(name, {}))


def _body(args: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> str:
    size = f"{next(iter(runs.values()))['parameters']:,} parameters, {args.layers} layers of {args.dim}"
    head = ["run", "parent", "held-out loss", "to its parent", f"training loss, last {WINDOW}", "to its parent"]
    rows = []
    for name, run in runs.items():
        parent = runs.get(CASES[name][0])
        last, off = _last(run), ["", ""]
        if parent:
            pairs = (run["held_out"], parent["held_out"]), (last, _last(parent))
            off = [f"{100 * (a / b - 1):+.2f} %" for a, b in pairs]
        rows.append([name, CASES[name][0], f"{run['held_out']:.4f}", off[0], f"{last:.4f}", off[1]])
    note = f"{args.steps} steps, 4 ranks, batch {args.batch} x {args.length} bytes, {size}; {vars(args)}"
    return f"{note}\n\n{table(head, rows)}"


def _last(run: dict[str, Any]) -> float:
    tail = run["loss"][-WINDOW:]
    return sum(tail) / len(tail)


def _plot(args: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    for parent in [name for name in runs if not CASES[name][0]]:
        family = [n for n in runs if n == parent or CASES[n][0] == parent]
        axes = Figure(figsize=(8, 5), layout="constrained").subplots()
        for name in family:
            losses = runs[name]["loss"]
            means = [sum(losses[i : i + WINDOW]) / len(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]
            axes.plot(
                range(0, len(losses), WINDOW), means, lw=1, label=f"{name}: {runs[name]['held_out']:.3f} held out"
            )
        if parent != "ZeRO 3":
            axes.axvline(int(0.15 * args.steps), color="gray", lw=0.7, ls=":")
        axes.set(xlabel="step", ylabel="nats per byte", title=f"{parent}, and compressed")
        axes.set_yscale("log")
        axes.legend()
        file = pathlib.Path(f"{args.plot}_{parent.replace(' ', '').lower()}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        axes.figure.savefig(file, dpi=120)


def _write_tokens(path: pathlib.Path) -> None:
    import shardfn as sf

    sf.data.encode_files(sf.data.default_corpus(), path, sf.data.ByteTokenizer())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", type=lambda x: x.split(";"), default=list(CASES), help="separated by ;")
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=16)
    add("--length", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--dim", type=int, default=96)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=3e-3)
    add("--lamb-lr", type=float, default=1e-2)
    add("--b2", type=float, default=0.997)
    add("--rare-b2", type=float, default=0.99, help="of 0/1 Adam, whose variance is of fewer gradients")
    add(
        "--rare", type=int, default=2, help="1 / of the steps before the freeze after which 0/1 Adam halves its updates"
    )
    add("--coeff-beta", type=float, default=0.99, help="of 1-bit LAMB: its trust ratios are means of 100 steps")
    add("--held-out", type=int, default=32, help="batches")
    add("--seed", type=int, default=0)
    add("--keep", default="", help="folder of finished runs, which are not run again")
    add("--plot", default="", help="beginning of the names of PNG files")
    add("--out", default="", help="Markdown file")
    add("--json", action="store_true", help="also the raw numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
