"""Teaches a small GPT to add digits: first a little by examples, then by rewards alone (GRPO).

    python examples/rlhf/grpo_arithmetic.py
    torchrun --nproc-per-node 2 examples/rlhf/grpo_arithmetic.py --zero 3
    python examples/rlhf/grpo_arithmetic.py --behind 1

The engine draws 8 answers to each of 32 problems, a function in Python rewards the right ones, and the step learns from
the differences within each 8. As the model is exact, the ratios of a first epoch are 1 to the last bit: "exact" in the
log. With --out, the run writes metrics.jsonl and checkpoints, from which the same command goes on, bit for bit.

With --behind 1 a thread draws the next answers while the step learns from the last ones. So answers are of weights that
are one iteration older than those that begin to learn from them; each token counts by the ratio of its probabilities
under both, up to 2.
"""

import argparse
import concurrent.futures
import functools

import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

TEXT = "0123456789+=."  # "." ends an answer
CONFIG = gpt.Config.llama_like(
    vocab_size=len(TEXT),
    num_layers=2,
    d_model=64,
    num_heads=4,
    d_ff=128,
    max_len=16,
    tie_embeddings=True,
    batch_invariant=True,
)
PROBLEMS = [(a, b) for a in range(10) for b in range(10)]
WIDTH, LENGTH = 3, 7  # tokens of the longest answer, and of its row
SAMPLING = Sampling(max_tokens=WIDTH, n=8, stop_tokens=(TEXT.index("."),))


def main():
    parser = options(__doc__)
    parser.add_argument(
        "--behind", type=int, default=0, choices=(0, 1), help="iterations of older weights (%(default)s)"
    )
    args = parser.parse_args()
    mesh = sf.make_mesh({"dp": -1})
    zero = {"mesh": mesh, "zero": sf.Zero(stage=args.zero, persist_elements=0)}
    step = sf.sharded_step(
        functools.partial(loss, args.beta),
        sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(args.lr)),
        trainable={"actor": True, "reference": False},
        has_aux=True,
        **zero,
    )
    actor = gpt.init(CONFIG, sf.key(args.seed))
    rows, problems = step.rows(args.prompts * SAMPLING.n), step.rows(args.prompts)
    state, held, done = step.init(both(actor)), empty(rows.stop - rows.start, args.behind), 0
    checkpoints = args.out and sf.checkpoint.Manager(f"{args.out}/checkpoints", mesh=mesh)
    if checkpoints and checkpoints.steps():
        restored = checkpoints.restore({"state": state, "held": rl.as_global(held, mesh, "dp")})
        state, held, done = restored.tree["state"], sf.collectives.local(restored.tree["held"]), restored.user
    else:
        state = step.init(both(imitate(actor, args, **zero)))

    # An engine for each rank, which draws the answers to its own problems.
    model = decoder(CONFIG)
    limits = limits_of(model, running=64, buckets=(64, 256))
    engine = Engine(model, sf.unshard(state.params["actor"]), mesh=sf.make_mesh(alone=True), limits=limits)
    say = functools.partial(print, flush=True) if mesh.rank == 0 else lambda *_: None
    say(f"right before: {accuracy(engine):.0%}")
    logger = args.out and sf.metrics.Logger(args.out, mesh, start=done)
    since = -(-done // args.epochs)  # versions of the weights before this process

    def draw(iteration):
        asked = order(args.seed, iteration, args.prompts)[problems]
        key = sf.fold_in(sf.key(args.seed + 1), iteration)
        how = {"key": key, "start": problems.start, "length": LENGTH, "since": since}
        return rl.sample(engine, [encode(f"{a}+{b}=") for a, b in asked], SAMPLING, **how)

    engine.warm_up()  # so that no graph is captured beside a step
    beside = concurrent.futures.ThreadPoolExecutor(1)
    coming, signal = beside.submit(held.get, "coming") if done else None, rl.RewardSignal()
    for n in range(done, args.iterations * args.epochs):
        iteration, epoch = divmod(n, args.epochs)
        if epoch == 0:
            rollout = coming.result() if args.behind and coming else None
            version = since + engine.update_weights(sf.unshard(state.params["actor"]))
            rollout = draw(iteration) if rollout is None else rollout
            rl.check_versions(rollout, version, behind=args.behind)
            # Rewards are computed in forks, and so before a thread draws.
            held["rollout"] = rollout = rl.score(reward, rollout, seconds=5.0).rollout
            coming = beside.submit(draw, iteration + 1) if args.behind else None
            held["old"] = step.apply(old_logprobs, state, rollout) if args.behind else rollout.logprobs
        batch = {"advantages": rl.group_advantages(held["rollout"].rewards, SAMPLING.n)}
        state, metrics = step(state, batch | {name: held[name] for name in ("rollout", "old")})
        signal = signal.update(metrics["flat"]) if epoch == 0 else signal
        shown = ("reward", "kl", "exact", "weight", "entropy", "length", "missing")
        if epoch == 0 and iteration % args.every == 0:
            say(f"iteration {iteration}: " + ", ".join(f"{name} {float(metrics[name]):.3f}" for name in shown))
        if logger:
            logger.write(n + 1, metrics)
            # A checkpoint has the next answers, and so waits for them; an iteration's end would wait for them anyway.
            if not args.behind or epoch == args.epochs - 1:
                held |= {"coming": coming.result()} if args.behind else {}
                checkpoints.save({"state": state, "held": rl.as_global(held, mesh, "dp")}, n + 1, user=n + 1)
    beside.shutdown()
    engine.update_weights(sf.unshard(state.params["actor"]))
    say(f"right after: {accuracy(engine):.0%}")
    for one in (logger, checkpoints):
        if one:
            one.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def both(actor):
    return {"actor": actor, "reference": sf.tree_map(torch.clone, actor)}


def empty(rows, behind):
    """The form of the answers that a checkpoint has: those that are learnt from, and those that come next."""
    held = {"rollout": rl.empty_rollout(rows, LENGTH, WIDTH), "old": torch.zeros(rows, WIDTH)}
    return held | ({"coming": rl.empty_rollout(rows, LENGTH, WIDTH)} if behind else {})


def old_logprobs(params, rollout):
    return rl.completion_logprobs(gpt.apply(CONFIG, params["actor"], rollout.ids), rollout.ids, rollout.spans)


def loss(beta, params, batch):
    rollout, old = batch["rollout"], batch["old"]
    logits = gpt.apply(CONFIG, params["actor"], rollout.ids)
    logprobs = rl.completion_logprobs(logits, rollout.ids, rollout.spans)
    with torch.no_grad():
        reference = rl.completion_logprobs(
            gpt.apply(CONFIG, params["reference"], rollout.ids), rollout.ids, rollout.spans
        )
        entropies = rl.completion_entropies(logits, rollout.spans)
    how = {
        "ref_logprobs_BT": reference,
        "sampling_logprobs_BT": rollout.logprobs,
    }  # equal to `old` for the newest weights
    metrics = rl.policy_metrics(logprobs, old, rollout.lengths, **how) | rl.rollout_metrics(
        rollout, batch["advantages"]
    )
    metrics["entropy"] = rl.token_mean(entropies, rollout.lengths)
    return rl.grpo(logprobs, old, batch["advantages"], rollout.lengths, beta=beta, **how), metrics


def reward(prompt, answer):
    a, b = decode(prompt).rstrip("=").split("+")
    return float(decode(answer) == f"{int(a) + int(b)}.")


def imitate(actor, args, **zero):
    """A few steps on right answers, so that some draws are right."""
    step = sf.sharded_step(functools.partial(gpt.loss, CONFIG), sf.optim.adamw(3e-3), **zero)
    state = step.init(actor)
    for n in range(args.imitate):
        asked = order(args.seed + 2, n, 64)[step.rows(64)]
        lines = [encode(f"{a}+{b}={a + b}.") for a, b in asked]
        tokens = torch.tensor([line + [0] * (LENGTH - len(line)) for line in lines])
        counted = torch.tensor([[4 <= i < len(line) for i in range(1, LENGTH)] for line in lines])
        targets = tokens[:, 1:].masked_fill(~counted, -100)
        state, _ = step(state, {"tokens": tokens[:, :-1], "targets": targets})
    return sf.unshard(state.params)


def order(seed, n, num):
    """The problems of an iteration, the same on all ranks."""
    draws = sf.core.uniform(sf.fold_in(sf.key(seed), n), (num,))
    return [PROBLEMS[i] for i in (draws * len(PROBLEMS)).long().tolist()]


def accuracy(engine):
    asked = [encode(f"{a}+{b}=") for a, b in PROBLEMS]
    greedy = Sampling(max_tokens=WIDTH, temperature=0.0, stop_tokens=SAMPLING.stop_tokens)
    found = engine.generate(asked, greedy)
    return sum(reward(prompt, one.tokens) for prompt, one in zip(asked, found, strict=True)) / len(asked)


def encode(text):
    return [TEXT.index(letter) for letter in text]


def decode(ids):
    return "".join(TEXT[i] for i in ids)


def options(text):
    """The arguments of all examples here."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--iterations", type=int, default=100, help="%(default)s")
    add("--epochs", type=int, default=2, help="updates by each rollout (%(default)s)")
    add("--prompts", type=int, default=32, help="problems of an iteration, of all ranks (%(default)s)")
    add("--imitate", type=int, default=60, help="steps on right answers before (%(default)s)")
    add("--beta", type=float, default=0.01, help="weight of the divergence from the model before (%(default)s)")
    add("--lr", type=float, default=1e-3, help="%(default)s")
    add("--zero", type=int, default=0, help="stage (%(default)s)")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--every", type=int, default=10, help="iterations between lines (%(default)s)")
    add("--out", default="", help="a directory for metrics and checkpoints")
    return parser


if __name__ == "__main__":
    main()
