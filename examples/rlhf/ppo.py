"""The last of three parts: PPO, with rewards by a model. Four models are branches of one state.

    python examples/rlhf/ppo.py --out run
    torchrun --nproc-per-node 2 examples/rlhf/ppo.py --out run --zero 3

Actor and critic learn, each with an optimizer and a norm to clip of its own; the reference and the model of rewards do
not, and the reference is stored in host memory. The rule by which pairs were made is used to evaluate, and never to
learn. With --out the run resumes anywhere, bit for bit.
"""

import functools

import reward_model
import sft
import torch
import torch.distributed as dist
from grpo_arithmetic import LENGTH, SAMPLING, WIDTH, accuracy, encode, order
from ppo_arithmetic import CONFIG, logprobs_of, of_actor, of_critic, values_of

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, decoder, limits_of
from shardfn.models import gpt

MODELS = ("actor", "critic", "reference", "reward")


def step_of(args, mesh):
    def rule(rate):
        return sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(rate))

    only = {name: {other: other == name for other in MODELS} for name in ("actor", "critic")}
    on_host = sf.tree_map(lambda spec: sf.Sharding(spec, memory_kind="host"), gpt.specs(CONFIG))
    values = gpt.specs(reward_model.VALUES)
    return sf.sharded_step(
        {"actor": sf.Objective(of_actor, only["actor"]), "critic": sf.Objective(of_critic, only["critic"])},
        sf.optim.multi_transform(
            {"actor": rule(args.lr), "critic": rule(2 * args.lr)},
            {name: "critic" if name == "critic" else "actor" for name in MODELS},
        ),
        trainable={name: name in only for name in MODELS},
        specs={"actor": gpt.specs(CONFIG), "critic": values, "reference": on_host, "reward": values},
        mesh=mesh,
        zero=sf.Zero(stage=args.zero, persist_elements=0),
        has_aux=True,
    )


def train(args, mesh, actor, reward, say=print):
    step, clone = step_of(args, mesh), functools.partial(sf.tree_map, torch.clone)
    state = step.init({"actor": actor, "critic": clone(reward), "reference": clone(actor), "reward": reward})
    rows, problems = step.rows(args.prompts * SAMPLING.n), step.rows(args.prompts)
    buffer, done = learnt_from(rl.empty_rollout(rows.stop - rows.start, LENGTH, WIDTH)), 0
    checkpoints = args.out and sf.checkpoint.Manager(f"{args.out}/ppo", mesh=mesh)
    if checkpoints and checkpoints.steps():
        restored = checkpoints.restore({"state": state, "batch": rl.as_global(buffer, mesh, "dp")})
        state, buffer, done = restored.tree["state"], sf.collectives.local(restored.tree["batch"]), restored.user

    model = decoder(CONFIG)
    limits = limits_of(model, running=64, buckets=(64, 256))
    engine = Engine(model, sf.unshard(state.params["actor"]), mesh=sf.make_mesh(alone=True), limits=limits)
    say(f"right before: {accuracy(engine):.0%}")
    logger = args.out and sf.metrics.Logger(args.out, mesh, start=done)
    since = -(-done // args.epochs)  # rollouts, and so versions of the weights, before this process
    for n in range(done, args.iterations * args.epochs):
        iteration, epoch = divmod(n, args.epochs)
        if epoch == 0:
            version = since + engine.update_weights(sf.unshard(state.params["actor"]))
            asked = [encode(f"{a}+{b}=") for a, b in order(args.seed, iteration, args.prompts)[problems]]
            key = sf.fold_in(sf.key(args.seed + 1), iteration)
            drawn = {"key": key, "start": problems.start, "length": LENGTH, "since": since}
            rollout = rl.sample(engine, asked, SAMPLING, **drawn)
            rl.check_versions(rollout, version)
            scores, values, reference = step.apply(before, state, rollout)
            buffer = learnt_from(rollout._replace(rewards=scores), values, reference, args.beta)
        state, metrics = step(state, {"actor": buffer, "critic": buffer})
        shown = ("actor/reward", "actor/kl", "actor/exact", "actor/length", "critic/loss")
        if epoch == 0 and iteration % args.every == 0:
            say(f"iteration {iteration}: " + ", ".join(f"{name} {float(metrics[name]):.3f}" for name in shown))
        if logger:
            logger.write(n + 1, metrics)
            checkpoints.save({"state": state, "batch": rl.as_global(buffer, mesh, "dp")}, n + 1, user=n + 1)
    engine.update_weights(sf.unshard(state.params["actor"]))
    say(f"right after: {accuracy(engine):.0%}")
    for one in (logger, checkpoints):
        if one:
            one.close()


def before(params, rollout):
    """The rewards of answers, and for each token the critic's value and the reference's log probability."""
    values = gpt.apply(reward_model.VALUES, params["reward"], rollout.ids)[..., 0]
    scores = rl.last_values(values, rollout.prompts + rollout.lengths)
    return scores, values_of(params["critic"], rollout), logprobs_of(params["reference"], rollout)


def learnt_from(rollout, values=None, reference=None, beta=0.0):
    """A rollout with the values of its losses; without values, the form to restore one into."""
    values, reference = (torch.zeros_like(rollout.logprobs) if x is None else x for x in (values, reference))
    rewards = rl.kl_rewards(rollout.logprobs, reference, rollout.rewards, rollout.lengths, beta=beta)
    advantages, returns = rl.gae(rewards, values, rollout.lengths)
    of_tokens = {"reference": reference, "values": values, "advantages": advantages, "returns": returns}
    return {"rollout": rollout, **of_tokens}


def main():
    args = reward_model.arguments(__doc__)
    with sf.make_mesh({"dp": -1}) as mesh:
        say = functools.partial(print, flush=True) if mesh.rank == 0 else lambda *_: None
        actor = sft.train(args, mesh)
        reward, ordered = reward_model.train(args, mesh, actor)
        say(f"pairs in order: {ordered:.0%}")
        train(args, mesh, actor, reward, say)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
