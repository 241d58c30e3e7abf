"""The longest sequence in a budget of tensor bytes: a plain loop of transformers beside shardfn, on one rank and four.

The budget is the plain loop's peak (Llama, SDPA, AdamW, float32) in a step of `--loop` tokens. With
its gradient checkpointing the loop is run at the length that two shorter steps predict. shardfn has the settings that
`shardfn plan --longest` gives for the budget, and makes one step each of `--times` the loop's length on one rank, of
the length that the plan calls the longest (with `--limit`), and of `--many` the loop's length on `--ranks` ranks. Bytes
are tensors alive on the device, counted by `memory.ledger` for all alike; tensors that wait on the host are counted
apart. Times are seconds of the processor.
"""

import argparse
import functools
import statistics
import time
from typing import Any, NamedTuple

import torch
from _pairs import Group
from _report import publish, table

import shardfn as sf
from shardfn import memory, nn, optim
from shardfn.cli import MLP_WIDTH, LongSettings, Setup, longest, peak_bytes
from shardfn.graph import cluster
from shardfn.models import gpt
from shardfn.transforms import policies

MIB = 2**20
SHAPE = {"vocab_size": 32000, "num_layers": 2, "d_model": 128, "num_heads": 4, "d_ff": 384}


class Counted(NamedTuple):
    """Costs of a step: bytes at the peak on the device and on the host, and seconds of the processor."""

    device: int
    host: int
    seconds: float


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
            model.activation_checkpointing_enable({"use_reentrant": False})
        tx = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            tx.step()
            tx.zero_grad()
    return book.peak("device")


def step_of(tokens: int, settings: LongSettings | None, ranks: int = 1) -> tuple[Any, Any, gpt.Config, sf.Mesh]:
    """A step of the same shape with the settings, or the plain one without any; a function makes its state."""
    mesh = sf.make_mesh({"sp": ranks}, device="cpu")
    body = nn.Ulysses("sp", tokens) if ranks > 1 else nn.Dense()
    n = None if settings is None else settings.loss_tile
    config = gpt.Config.llama_like(**SHAPE, max_len=tokens, attention=body, loss_tile=n)
    tiles = -(-tokens // (ranks * MLP_WIDTH))
    tile = functools.partial(sf.tiled, tiles=tiles) if settings and settings.tiled_mlp else None
    plain: Any = functools.partial(gpt.loss, config, tile=tile)
    loss: Any = plain if settings is None else functools.partial(plain, wrap=sf.remat)
    if settings and settings.offload:
        loss = sf.offload(loss, policies.offload_larger_than(1 << 16), window=1 << 20)
    cut: dict[str, Any] = {"batch": sf.P(None, "sp"), "zero": sf.Zero(3, axis="sp")} if ranks > 1 else {}
    step = sf.sharded_step(loss, optim.adamw(1e-3), mesh=mesh, specs=gpt.specs(config), **cut)
    return step, functools.partial(step.init, functools.partial(gpt.init, config), sf.key(0)), config, mesh


def step_peak(tokens: int, settings: LongSettings, ranks: int = 1) -> Counted:
    """The costs of one step on this rank."""
    g = torch.Generator().manual_seed(0)
    rows = {"tokens": torch.randint(SHAPE["vocab_size"], (1, tokens + 1), generator=g)}
    with memory.ledger() as book:
        step, init, config, mesh = step_of(tokens, settings, ranks)
        own = gpt.cut_sequences(config, rows, mesh) if ranks > 1 else rows
        state = init()
        start = time.process_time()
        _, metrics = step(state, own)
        assert metrics["loss"].isfinite()
    return Counted(book.peak("device"), book.peak("host"), time.process_time() - start)


def serve(rank: int, world: int) -> Any:
    """A rank's answer to (tokens, settings)."""
    del rank
    return lambda asked: step_peak(*asked, ranks=world)


def time_ratio(tokens: int, settings: LongSettings, rounds: int) -> tuple[float, ...]:
    """Quartiles of the step's processor seconds by the settings over those without tiles (remat in both), in turns."""
    rows = {"tokens": torch.randint(SHAPE["vocab_size"], (1, tokens + 1))}
    steps = [step_of(tokens, s)[:2] for s in (LongSettings(), settings)]
    states, ratios = [init() for _, init in steps], []
    for _ in range(rounds + 1):
        taken = []
        for i, (step, _) in enumerate(steps):
            start = time.process_time()
            states[i], _ = step(states[i], rows)
            taken.append(time.process_time() - start)
        ratios.append(taken[1] / taken[0])
    return tuple(statistics.quantiles(ratios[1:], n=4))


def setup_of(ranks: int) -> Setup:
    """The run as the plan knows it."""
    config = gpt.Config.llama_like(**SHAPE, max_len=1 << 20)
    return Setup("llama tiny", config, {"dp": ranks}, cluster("cpu"), sf.Zero(3 * (ranks > 1)), "fp32-adam")


def loop_rows(tokens: int) -> tuple[int, list[list[str]]]:
    """The budget, and the rows of the loop, with its checkpointing, too."""
    budget, halves = loop_peak(tokens, False), [loop_peak(n, True) for n in (tokens // 2, tokens)]
    slope = (halves[1] - halves[0]) / (tokens - tokens // 2)
    saved = tokens + int((budget - halves[1]) / slope)
    told = ("loop", tokens, budget), ("loop, checkpointing", saved, loop_peak(saved, True))
    return budget, [[name, "1", str(n), mib(x), "", "", "", f"{n / tokens:.2f}"] for name, n, x in told]


def step_row(ranks: int, tokens: int, settings: LongSettings, loop: int) -> list[str]:
    """A step beside its plan: the rank with the highest peak."""
    if ranks == 1:
        found = step_peak(tokens, settings)
    else:
        group = Group(serve, ranks).ready()
        found = max(group.ask((tokens, settings)))
        group.close()
    planned = peak_bytes(setup_of(ranks), settings, tokens)
    told = f"{mib(planned)} ({planned / found.device - 1:+.1%})"
    row = [f"shardfn: {settings}", str(ranks), str(tokens), mib(found.device), told, mib(found.host)]
    row += [f"{found.seconds:.0f}", f"{tokens / loop:.2f}"]
    print(row, flush=True)
    return row


def mib(x: int) -> str:
    return f"{x / MIB:.1f}"


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    budget, rows = loop_rows(args.loop)
    plans = {ranks: longest(setup_of(ranks), limit=budget) for ranks in (1, args.ranks)}
    kinds, many = [x.settings for x in plans[1]], plans[args.ranks][-1].settings
    runs = [(1, 4 * args.loop, s) for s in kinds[1:-1]] + [(1, args.times * args.loop, kinds[-1])]
    runs += [(1, plans[1][-1].tokens, kinds[-1])] if args.limit else []
    runs += [(args.ranks, args.many * args.loop, many)] if args.many else []
    rows += [step_row(*run, args.loop) for run in runs]
    head = ["run", "ranks", "tokens", "peak, MiB", "planned", "host, MiB", "CPU s a rank", "of the loop's length"]
    found = [[str(x.settings), ranks, x.tokens, mib(x.peak)] for ranks, plan in plans.items() for x in plan]
    low, middle, high = time_ratio(args.loop, kinds[-2], args.rounds)
    config = gpt.Config.llama_like(**SHAPE, max_len=1)
    body = [
        f"Budget {mib(budget)} MiB a rank; {SHAPE}; {gpt.num_params(config):,} parameters; float32, AdamW.",
        table(head, rows),
        "What the plan calls the longest in that budget:",
        table(["settings", "ranks", "tokens", "MiB"], found),
        f"Processor seconds of a step of {args.loop} tokens, {kinds[-2]}, over sf.remat alone: {middle:.2f} ({low:.2f}"
        f" to {high:.2f}; median and quartiles of {args.rounds} pairs in turns).",
    ]
    publish("The longest sequence in a budget", "\n\n".join(body), out=args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", type=int, default=1024, help="tokens at which the plain loop fills the budget")
    parser.add_argument("--times", type=int, default=12, help="how much longer a step on one rank is")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--many", type=int, default=45, help="how much longer a step on several ranks is; 0 is none")
    parser.add_argument("--limit", action="store_true", help="also a step of what the plan calls the longest")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="", help="Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
