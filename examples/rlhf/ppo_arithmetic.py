"""The task of grpo_arithmetic.py by PPO: an actor, a critic and a reference, branches of one state.

    python examples/rlhf/ppo_arithmetic.py
    torchrun --nproc-per-node 2 examples/rlhf/ppo_arithmetic.py --zero 3

Each token has a reward: a divergence from the reference, and at the answer's end its score. The critic learns their
sums. Actor and critic are losses of one step, each with an optimizer and a norm to clip of its own.
"""

import dataclasses
import functools

import torch
import torch.distributed as dist
from grpo_arithmetic import CONFIG, LENGTH, SAMPLING, accuracy, encode, imitate, options, order, reward

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, decoder, limits_of
from shardfn.models import gpt

CRITIC = dataclasses.replace(CONFIG, tie_embeddings=False)  # its first logit is the value


def main():
    args = options(__doc__).parse_args()
    mesh = sf.make_mesh({"dp": -1})
    how = {"mesh": mesh, "zero": sf.Zero(stage=args.zero, persist_elements=0)}

    def rule(rate):
        return sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(rate))

    only = {name: {other: other == name for other in ("actor", "critic", "reference")} for name in ("actor", "critic")}
    step = sf.sharded_step(
        {"actor": sf.Objective(of_actor, only["actor"]), "critic": sf.Objective(of_critic, only["critic"])},
        sf.optim.multi_transform(
            {"actor": rule(args.lr), "critic": rule(2 * args.lr)},
            {"actor": "actor", "critic": "critic", "reference": "actor"},
        ),
        trainable={"actor": True, "critic": True, "reference": False},
        has_aux=True,
        **how,
    )
    actor = imitate(gpt.init(CONFIG, sf.key(args.seed)), args, **how)
    critic = gpt.init(CRITIC, sf.key(args.seed + 3))
    state = step.init({"actor": actor, "critic": critic, "reference": sf.tree_map(torch.clone, actor)})

    model, problems = decoder(CONFIG), step.rows(args.prompts)
    limits = limits_of(model, running=64, buckets=(64, 256))
    engine = Engine(model, sf.unshard(state.params["actor"]), mesh=sf.make_mesh(alone=True), limits=limits)
    say = functools.partial(print, flush=True) if mesh.rank == 0 else lambda *_: None
    say(f"right before: {accuracy(engine):.0%}")
    for n in range(args.iterations):
        engine.update_weights(sf.unshard(state.params["actor"]))
        asked = [encode(f"{a}+{b}=") for a, b in order(args.seed, n, args.prompts)[problems]]
        key = sf.fold_in(sf.key(args.seed + 1), n)
        rollout = rl.sample(engine, asked, SAMPLING, key=key, start=problems.start, length=LENGTH)
        rollout = rl.score(reward, rollout, seconds=5.0).rollout
        values, reference = step.apply(before, state, rollout)
        rewards = rl.kl_rewards(rollout.logprobs, reference, rollout.rewards, rollout.lengths, beta=args.beta)
        advantages, returns = rl.gae(rewards, values, rollout.lengths)
        parts = {"advantages": advantages, "values": values, "returns": returns}
        batch = {"rollout": rollout, "reference": reference} | parts
        for epoch in range(args.epochs):
            state, metrics = step(state, {"actor": batch, "critic": batch})
            if epoch == 0 and n % args.every == 0:
                shown = ("actor/reward", "actor/kl", "actor/exact", "critic/loss")
                say(f"iteration {n}: " + ", ".join(f"{name} {float(metrics[name]):.3f}" for name in shown))
    engine.update_weights(sf.unshard(state.params["actor"]))
    say(f"right after: {accuracy(engine):.0%}")
    if dist.is_initialized():
        dist.destroy_process_group()


def logprobs_of(params, rollout):
    where = rollout.prompts, rollout.lengths, rollout.width
    return rl.answer_logprobs(gpt.apply(CONFIG, params, rollout.ids), rollout.ids, *where)


def values_of(params, rollout):
    ids = rollout.ids
    return rl.answer_values(gpt.apply(CRITIC, params, ids)[..., 0], rollout.prompts, rollout.lengths, rollout.width)


def before(params, rollout):
    return values_of(params["critic"], rollout), logprobs_of(params["reference"], rollout)


def of_actor(params, batch):
    rollout = batch["rollout"]
    logprobs = logprobs_of(params["actor"], rollout)
    drawn = rollout.logprobs, rollout.lengths
    metrics = rl.policy_metrics(logprobs, *drawn, reference_BT=batch["reference"]) | rl.rollout_metrics(rollout)
    return rl.ppo_policy(logprobs, rollout.logprobs, batch["advantages"], rollout.lengths), metrics


def of_critic(params, batch):
    values = values_of(params["critic"], batch["rollout"])
    return rl.ppo_value(values, batch["values"], batch["returns"], batch["rollout"].lengths), {}


if __name__ == "__main__":
    main()
