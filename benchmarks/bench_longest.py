"""The longest sequence in a budget of tensor bytes: a plain loop of transformers beside shardfn, on one rank.

The budget is what the plain loop (Llama, SDPA, AdamW, float32) has alive at the peak of a step of `--loop` tokens. With
its gradient checkpointing the loop is run at the length that two shorter steps predict. shardfn is planned by
`shardfn plan --longest`, and run at `--times` the loop's length, since a step of the longest is a matter of hours here;
the plan's bytes for that length stand beside those counted. Bytes are tensors alive on the device, counted by
`memory.ledger`; what waits on the host is told apart.
"""

import argparse
import functools
import time
from typing import Any

import torch
from _report import publish, table

import shardfn as sf
from shardfn import memory, nn, optim
from shardfn.cli import MLP_WIDTH, LongSettings, Setup, longest, peak_bytes
from shardfn.graph import cluster
from shardfn.models import gpt
from shardfn.transforms import policies

MIB = 2**20
SHAPE = {"vocab_size": 32000, "num_layers": 2, "d_model": 128, "num_heads": 4, "d_ff": 384}
SETTINGS = (LongSettings(256), LongSettings(64, tiled_mlp=True), LongSettings(16, tiled_mlp=True, offload=True))


def loop_peak(tokens: int, checkpointing: bool) -> int:
    """Bytes at the peak of two steps of transformers' Llama."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=SHAPE["vocab_size"],
        num_hidden_layers=SHAPE["num_layers"],
        hidden_size=SHAPE["d_model"],
        intermediate_size=SHAPE["d_ff"],
        num_attention_heads=SHAPE["num_heads"],
        use_cache=False,
        attn_implementation="sdpa",
        max_position_embeddings=1 << 20,
    )
    ids = torch.randint(SHAPE["vocab_size"], (1, tokens))
    with memory.ledger() as book:
        model = transformers.LlamaForCausalLM(config)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        tx = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            tx.step()
            tx.zero_grad()
    return book.peak("device")


def step_of(tokens: int, settings: LongSettings | None) -> tuple[Any, Any]:
    """A step of the same shape by the settings, or as it is without any; its state is made when it is called first."""
    n = None if settings is None else settings.loss_tile
    config = gpt.Config.llama_like(**SHAPE, max_len=tokens, attention=nn.Dense(), loss_tile=n)
    tile = functools.partial(sf.tiled, tiles=-(-tokens // MLP_WIDTH)) if settings and settings.tiled_mlp else None
    plain: Any = functools.partial(gpt.loss, config, tile=tile)
    loss: Any = plain if settings is None else functools.partial(plain, wrap=sf.remat)
    if settings and settings.offload:
        loss = sf.offload(loss, policies.offload_larger_than(1 << 16), window=1 << 20)
    step = sf.sharded_step(loss, optim.adamw(1e-3), mesh=sf.make_mesh({"dp": 1}, device="cpu"))
    return step, functools.partial(step.init, functools.partial(gpt.init, config), sf.key(0))


def step_peak(tokens: int, settings: LongSettings) -> tuple[int, int, float]:
    """Bytes at the peak of one step, those on the host, and seconds."""
    rows = {"tokens": torch.randint(SHAPE["vocab_size"], (1, tokens + 1))}
    with memory.ledger() as book:
        step, init = step_of(tokens, settings)
        state = init()
        start = time.perf_counter()
        step(state, rows)
    return book.peak("device"), book.peak("host"), time.perf_counter() - start


def time_ratio(tokens: int, settings: LongSettings, rounds: int) -> float:
    """The median of step times by the settings over those without tiles (remat in both), in turns."""
    rows = {"tokens": torch.randint(SHAPE["vocab_size"], (1, tokens + 1))}
    steps = [step_of(tokens, s) for s in (LongSettings(), settings)]
    states, ratios = [init() for _, init in steps], []
    for _ in range(rounds + 1):
        taken = []
        for i, (step, _) in enumerate(steps):
            start = time.perf_counter()
            states[i], _ = step(states[i], rows)
            taken.append(time.perf_counter() - start)
        ratios.append(taken[1] / taken[0])
    return sorted(ratios[1:])[rounds // 2]


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    config = gpt.Config.llama_like(**SHAPE, max_len=1 << 20)
    setup = Setup("llama tiny", config, {"dp": 1}, cluster("cpu"), sf.Zero(0), "fp32-adam")
    budget, halves = loop_peak(args.loop, False), [loop_peak(n, True) for n in (args.loop // 2, args.loop)]
    slope = (halves[1] - halves[0]) / (args.loop - args.loop // 2)
    saved = args.loop + int((budget - halves[1]) / slope)
    rows = [
        ["loop", args.loop, f"{budget / MIB:.1f}", "", "", "1.00"],
        ["loop, checkpointing", saved, f"{loop_peak(saved, True) / MIB:.1f}", "", "", f"{saved / args.loop:.2f}"],
    ]
    runs = [(s, args.loop * n) for s, n in zip(SETTINGS, (2, 4, args.times), strict=True)]
    for settings, tokens in runs:
        planned = peak_bytes(setup, settings, tokens)
        peak, host, seconds = step_peak(tokens, settings)
        rows.append(
            [
                f"shardfn: {settings} ({seconds:.0f} s)",
                tokens,
                f"{peak / MIB:.1f}",
                f"{planned / MIB:.1f} ({planned / peak - 1:+.1%})",
                f"{host / MIB:.1f}",
                f"{tokens / args.loop:.2f}",
            ]
        )
        print(rows[-1], flush=True)
    found = [[str(x.settings), x.tokens, f"{x.peak / MIB:.1f}"] for x in longest(setup, limit=budget)]
    ratio = time_ratio(args.loop, LongSettings(256, tiled_mlp=True), args.rounds)
    body = "\n\n".join(
        [
            f"Budget {budget / MIB:.1f} MiB; {SHAPE}; {gpt.num_params(config):,} parameters; float32, AdamW, one rank.",
            table(["run", "tokens", "peak, MiB", "planned", "host, MiB", "of the loop's length"], rows),
            "What the plan calls the longest in that budget (not run):",
            table(["settings", "tokens", "MiB"], found),
            f"Step of {args.loop} tokens, loss and MLP in tiles over neither, remat in both: {ratio:.2f} (median of"
            f" {args.rounds} pairs in turns).",
        ]
    )
    publish("The longest sequence in a budget", body, out=args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", type=int, default=1024, help="tokens at which the plain loop fills the budget")
    parser.add_argument("--times", type=int, default=12, help="how much longer shardfn's longest run is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="", help="Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
