"""The task of grpo_arithmetic.py by PPO, with rewards by a rule: an actor, a critic and a reference in one state.

    python examples/rlhf/ppo_arithmetic.py --out run
    torchrun --nproc-per-node 2 examples/rlhf/ppo_arithmetic.py --out run --zero 3

Each token has a reward: minus its divergence from the reference, times beta, and at the answer's end its score. The
critic learns their sums. Actor and critic are losses of one step, each with an optimizer and a norm to clip of its own;
the reference is stored in host memory. Beta follows the divergence, so that it stays near --target. With --out the run
resumes anywhere, bit for bit.
"""

import dataclasses
import functools

import sft
import torch
import torch.distributed as dist
from grpo_arithmetic import CONFIG, LENGTH, SAMPLING, WIDTH, accuracy, encode, options, order, reward

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, decoder, limits_of
from shardfn.models import gpt

VALUES = dataclasses.replace(CONFIG, tie_embeddings=False)  # its first logit is the value
CONFIGS = {"actor": CONFIG, "critic": VALUES, "reference": CONFIG, "reward": VALUES}
LEARNING = "actor", "critic"
LOSSES = rl.PPO(functools.partial(gpt.apply, CONFIG), lambda params, ids: gpt.apply(VALUES, params, ids)[..., 0])
SHOWN = "actor/reward", "actor/divergence", "actor/exact", "actor/length", "actor/entropy", "critic/loss"


def main():
    args = arguments(__doc__).parse_args()
    with sf.make_mesh({"dp": -1}) as mesh:
        models = {"actor": sft.train(args, mesh), "critic": gpt.init(VALUES, sf.key(args.seed + 3))}
        train(args, mesh, models, by_rule)
    if dist.is_initialized():
        dist.destroy_process_group()


def by_rule(step, state, rollout):
    return rl.score(reward, rollout, seconds=5.0).rollout


def train(args, mesh, models, scored, say=None, configs=CONFIGS):
    """PPO from an actor, a critic and other models that do not learn.

    `scored(step, state, rollout)` is the rollout with its rewards, and `configs` has the shape of each model.
    """
    say = say or (functools.partial(print, flush=True) if mesh.rank == 0 else lambda *_: None)
    models = models | {"reference": sf.tree_map(torch.clone, models["actor"])}
    step = step_of(args, mesh, models, configs)
    state, beta, done = step.init(models), args.beta, 0
    rows, problems = step.rows(args.prompts * SAMPLING.n), step.rows(args.prompts)
    empty = rl.empty_rollout(rows.stop - rows.start, LENGTH, WIDTH)
    buffer = rl.Experience(empty, *(torch.zeros_like(empty.logprobs) for _ in rl.Experience._fields[1:]))
    checkpoints = args.out and sf.checkpoint.Manager(f"{args.out}/ppo", mesh=mesh)
    if checkpoints and checkpoints.steps():
        restored = checkpoints.restore({"state": state, "batch": rl.as_global(buffer, mesh, "dp")})
        state, buffer = restored.tree["state"], sf.collectives.local(restored.tree["batch"])
        done, beta = restored.user["done"], restored.user["beta"]

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
            rollout = scored(step, state, rollout)
            buffer = LOSSES.experience(step, state, rollout, kl_coef=beta)
        state, metrics = step(state, {"actor": buffer, "critic": buffer})
        if epoch == 0:  # the weights that have drawn: later epochs have others
            if iteration % args.every == 0:
                say(f"iteration {iteration}: " + ", ".join(f"{name} {float(metrics[name]):.3f}" for name in SHOWN))
            # Not below --beta: one that has shrunk for long is late when the divergence grows.
            beta = max(rl.follow_divergence(beta, float(metrics["actor/divergence"]), args.target, rate=0.5), args.beta)
        if logger:
            logger.write(n + 1, metrics, {"beta": beta})
            tree = {"state": state, "batch": rl.as_global(buffer, mesh, "dp")}
            checkpoints.save(tree, n + 1, user={"done": n + 1, "beta": beta})
    engine.update_weights(sf.unshard(state.params["actor"]))
    say(f"right after: {accuracy(engine):.0%}")
    for one in (logger, checkpoints):
        if one:
            one.close()


def step_of(args, mesh, models, configs=CONFIGS):
    def rule(rate):
        # Adam's first updates have the full rate for every weight and any gradient; the critic knows nothing yet.
        schedule = sf.optim.warmup_constant_schedule(0.0, rate, args.warmup)
        return sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(schedule))

    plain = {name: gpt.specs(configs[name]) for name in models}
    on_host = sf.tree_map(lambda spec: sf.Sharding(spec, memory_kind="host"), plain["reference"])
    return sf.sharded_step(
        LOSSES.objectives(models),
        sf.optim.multi_transform(
            {"actor": rule(args.lr), "critic": rule(2 * args.lr)},
            {name: "critic" if name == "critic" else "actor" for name in models},
        ),
        trainable={name: name in LEARNING for name in models},
        specs=plain | {"reference": on_host},
        mesh=mesh,
        zero=sf.Zero(stage=args.zero, persist_elements=0),
        has_aux=True,
    )


def arguments(text):
    parser = options(text)
    parser.set_defaults(beta=0.2)
    parser.add_argument("--warmup", type=int, default=20, help="updates until the full rate (%(default)s)")
    parser.add_argument("--target", type=float, default=0.2, help="of the divergence of a token (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
