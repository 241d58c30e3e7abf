"""One iteration of GRPO, rollouts and update, beside TRL's with the generation of transformers; tokens per second.

    python benchmarks/bench_rl.py --trl PYTHON --out benchmarks/results/rl_CPU_YYYYMM.md

PYTHON is an interpreter that has TRL 1.16. Both sides have a Llama of the same shape in float32, prompts and answers of
the same lengths, a reward in Python, and one update a rollout. They take turns, each in a process of its own. TRL's
update is eager, so the row to compare it with is that without jit; compilation falls in the warm iterations.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from _report import publish, table

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

SIZE = {"layers": 4, "width": 256, "heads": 8, "ffn": 768, "vocab": 2048, "prompt": 32, "answer": 64, "prompts": 8}
SMALL = {"layers": 1, "width": 32, "heads": 4, "ffn": 64, "vocab": 64, "prompt": 4, "answer": 8, "prompts": 2}
# Iterations whose times do not count: graphs are captured, and memory is touched for the first time.
WARM = 2
Iteration = dict[str, float]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default="", help="an interpreter that has TRL; empty leaves it out")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side (%(default)s)")
    parser.add_argument("--iterations", type=int, default=5, help="of a process, after the warm ones (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a model of 1 layer, to see that it runs")
    parser.add_argument("--note", default="", help="a sentence below the table, such as what else ran on the machine")
    parser.add_argument("--out", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(_run(json.loads(args.worker))))
        return
    size = {**(SMALL if args.small else SIZE), "n": 8, "threads": 1, "iterations": args.iterations + WARM}
    here = pathlib.Path(__file__)
    commands = {
        "shardfn, exact, jit": ([sys.executable, str(here), "--worker"], {"exact": True, "jit": True}),
        "shardfn, exact": ([sys.executable, str(here), "--worker"], {"exact": True, "jit": False}),
        "shardfn": ([sys.executable, str(here), "--worker"], {"exact": False, "jit": False}),
    }
    if args.trl:
        commands["TRL"] = ([args.trl, str(here.with_name("_trl_grpo.py"))], {})
    found: dict[str, list[list[Iteration]]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, (command, more) in commands.items():
            found[name].append(_of_process([*command, json.dumps({**size, **more})])[WARM:])
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    about = (
        f"{size}; {args.rounds} rounds of a process each, {args.iterations} iterations after {WARM}; medians. A ratio"
        f" is the median of those within a round. Load at the end (1, 5, 15 minutes): {load}."
    )
    publish(
        "Learning from rewards",
        "\n\n".join([about, _table(found), *filter(None, [args.note])]),
        out=args.out,
        data={"iterations": found},
        as_json=args.json,
    )


def _of_process(command: list[str]) -> list[Iteration]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[:2]} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _table(found: dict[str, list[list[Iteration]]]) -> str:
    rates = {name: [_rate(one) for one in rounds] for name, rounds in found.items()}
    rows = []
    for name, rounds in found.items():
        flat = [x for one in rounds for x in one]
        share = statistics.median(x["generation"] / x["all"] for x in flat)
        ratio = "-"
        if "TRL" in rates:
            ratio = f"{statistics.median(a / b for a, b in zip(rates[name], rates['TRL'], strict=True)):.2f}"
        seconds = (f"{statistics.median(x[key] for x in flat):.3f}" for key in ("all", "generation"))
        rows.append([name, f"{statistics.median(rates[name]):.0f}", ratio, *seconds, f"{share:.0%}"])
    return table(["loop", "answer tokens / s", "ratio to TRL", "iteration, s", "generation, s", "its share"], rows)


def _rate(iterations: list[Iteration]) -> float:
    return statistics.median(x["tokens"] / x["all"] for x in iterations)


def _run(size: dict[str, Any]) -> list[Iteration]:
    torch.set_num_threads(size["threads"])
    length, rows = size["prompt"] + size["answer"], size["prompts"] * size["n"]
    config = gpt.Config.llama_like(
        vocab_size=size["vocab"],
        num_layers=size["layers"],
        d_model=size["width"],
        num_heads=size["heads"],
        d_ff=size["ffn"],
        max_len=length,
        batch_invariant=size["exact"],
    )

    def loss(params: Any, batch: Any) -> Any:
        x, advantages = batch
        logits = gpt.apply(config, params, x.ids, at=rl.completion_positions(x.ids, x.spans))
        logprobs = rl.logprobs_at(logits, x.ids, x.spans)
        return rl.grpo(logprobs, x.logprobs, advantages, x.lengths, epsilon_high=0.28)

    inner = sf.jit(loss) if size["jit"] else loss
    step = sf.sharded_step(inner, sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(1e-4)))
    state, model = step.init(gpt.init(config, sf.key(0))), decoder(config)
    limits = limits_of(model, running=rows, buckets=(rows, max(4 * rows, length)))
    engine = Engine(model, sf.unshard(state.params), limits=limits)
    sampling, draw = Sampling(max_tokens=size["answer"], n=size["n"]), torch.Generator().manual_seed(0)
    found = []
    for i in range(size["iterations"]):
        prompts = torch.randint(2, size["vocab"], (size["prompts"], size["prompt"]), generator=draw).tolist()
        start = time.perf_counter()
        engine.update_weights(sf.unshard(state.params))
        x = rl.sample(engine, prompts, sampling, key=sf.fold_in(sf.key(1), i), length=length)
        generated = time.perf_counter()
        x = rl.score(_reward, x).rollout
        state, _ = step(state, (x, rl.group_advantages(x.rewards, size["n"])))
        end = time.perf_counter()
        found.append({"all": end - start, "generation": generated - start, "tokens": int(x.lengths.sum())})
    return found


def _reward(prompt: list[int], answer: list[int]) -> float:
    del prompt
    return sum(token % 2 == 0 for token in answer) / len(answer)


if __name__ == "__main__":
    main()
