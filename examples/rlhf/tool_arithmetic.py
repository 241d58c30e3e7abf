"""Teaches a small GPT to add with a calculator: its answers call a tool, whose results they go on from.

    python examples/rlhf/tool_arithmetic.py
    torchrun --nproc-per-node 2 examples/rlhf/tool_arithmetic.py

An answer to "47+38=" may be "[47+38]85.": behind "]" a function in Python puts the sum of the last "[", in a process of
its own and within a second; the model has drawn all other letters, and learns from them alone. The sums are too many to
know by heart after some examples, so rewards rise as the model learns to ask for the right one.
"""

import argparse
import functools

import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

TEXT = "0123456789+=.[]?"  # "." ends an answer, "]" calls the tool, "?" is its result if it fails
LENGTH = 24  # tokens of a row
CONFIG = gpt.Config.llama_like(
    vocab_size=len(TEXT), num_layers=2, d_model=64, num_heads=4, d_ff=128, max_len=LENGTH, batch_invariant=True
)
SAMPLING = Sampling(max_tokens=10, n=8, stop_tokens=(TEXT.index("."),))


def main():
    args = options().parse_args()
    mesh = sf.make_mesh({"dp": -1})
    tx = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(args.lr))
    step = sf.sharded_step(loss, tx, mesh=mesh, has_aux=True)
    state = step.init(imitate(gpt.init(CONFIG, sf.key(args.seed)), args, mesh))
    problems = step.rows(args.prompts)

    model = decoder(CONFIG)
    limits = limits_of(model, running=64, block=4, buckets=(64, 256))
    engine = Engine(model, sf.unshard(state.params), mesh=sf.make_mesh(alone=True), limits=limits)
    say = functools.partial(print, flush=True) if mesh.rank == 0 else lambda *_: None
    signal = rl.RewardSignal()
    for iteration in range(args.iterations):
        version = engine.update_weights(sf.unshard(state.params))
        asked = [encode(f"{a}+{b}=") for a, b in drawn(args.seed, iteration, args.prompts)[problems]]
        key = sf.fold_in(sf.key(args.seed + 1), iteration)
        how = {"call_tokens": (TEXT.index("]"),), "failed": encode("?"), "calls": 2, "seconds": 1.0}
        found = rl.converse(engine, asked, SAMPLING, calculator, key=key, start=problems.start, length=LENGTH, **how)
        rl.check_versions(found.rollout, version)
        rollout = rl.score(reward, found.rollout, seconds=1.0).rollout
        batch = {"rollout": rollout, "calls": found.calls, "failed": found.failed}
        state, metrics = step(state, batch | {"advantages": rl.group_advantages(rollout.rewards, SAMPLING.n)})
        signal = signal.update(metrics["flat"])
        if iteration % args.every == 0 or iteration == args.iterations - 1:
            shown = ("reward", "exact", "calls", "calls_raised", "length")
            prompt, answer = map(decode, rollout.tokens(0))
            say(f"iteration {iteration}: " + ", ".join(f"{x} {float(metrics[x]):.3f}" for x in shown), prompt + answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def calculator(prompt, answer):
    a, b = decode(answer).rpartition("[")[2].rstrip("]").split("+")
    return encode(str(int(a) + int(b)))


def reward(prompt, answer):
    a, b = decode(prompt).rstrip("=").split("+")
    return float(decode(answer).rpartition("]")[2] == f"{int(a) + int(b)}.")


def loss(params, batch):
    rollout = batch["rollout"]
    logits = gpt.apply(CONFIG, params, rollout.ids)
    logprobs = rl.completion_logprobs(logits, rollout.ids, rollout.spans)  # of the letters that the model drew
    metrics = rl.policy_metrics(logprobs, rollout.logprobs, rollout.lengths) | rl.rollout_metrics(
        rollout, batch["advantages"]
    )
    metrics |= rl.call_metrics(batch["calls"], batch["failed"])
    return rl.grpo(logprobs, rollout.logprobs, batch["advantages"], rollout.lengths), metrics


def imitate(params, args, mesh):
    """A few steps on right answers, so that some draws are right."""
    step = sf.sharded_step(functools.partial(gpt.loss, CONFIG), sf.optim.adamw(3e-3), mesh=mesh)
    state = step.init(params)
    for n in range(args.imitate):
        asked = drawn(args.seed + 2, n, 64)[step.rows(64)]
        lines = [encode(f"{a}+{b}=[{a}+{b}]{a + b}.") for a, b in asked]
        tokens = torch.tensor([line + [0] * (LENGTH - len(line)) for line in lines])
        # The prompt and the result, which is behind "]", are not the model's.
        counted = torch.tensor([[6 <= i < 13 or i == len(line) - 1 for i in range(1, LENGTH)] for line in lines])
        targets = tokens[:, 1:].masked_fill(~counted, -100)
        state, _ = step(state, {"tokens": tokens[:, :-1], "targets": targets})
    return sf.unshard(state.params)


def drawn(seed, n, num):
    """Problems of two digits each, the same on all ranks."""
    draws = sf.core.uniform(sf.fold_in(sf.key(seed), n), (num, 2))
    return [(a, b) for a, b in (10 + 90 * draws).long().tolist()]


def encode(text):
    return [TEXT.index(letter) for letter in text]


def decode(ids):
    return "".join(TEXT[i] for i in ids)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--iterations", type=int, default=40, help="%(default)s")
    add("--prompts", type=int, default=32, help="problems of an iteration, of all ranks (%(default)s)")
    add("--imitate", type=int, default=40, help="steps on right answers before (%(default)s)")
    add("--lr", type=float, default=1e-3, help="%(default)s")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--every", type=int, default=10, help="iterations between lines (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
