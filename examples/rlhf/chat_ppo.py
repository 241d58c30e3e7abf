"""The three stages of DeepSpeed-Chat by one command: fine-tuning, a model of rewards, and PPO, with a report.

    python examples/rlhf/chat_ppo.py --out run
    torchrun --nproc-per-node 2 examples/rlhf/chat_ppo.py --out run
    python examples/rlhf/chat_ppo.py --model models/smollm2 --lora 8 --lr 1e-5 --out run

Without --model a small GPT is made. Without files the rows are questions with answers in several forms, and pairs
prefer one sentence with a capital letter and a full stop: "Red." above "red". The state of PPO has four models: the
actor of stage 1, a critic that begins as the model of rewards of stage 2, this model, and the reference in host memory.
The actor has a second loss on --text (--ptx is its weight), and an average over updates (--ema). The weight of the
divergence follows --target.

With --lora, all stages train adapters, and the reference of PPO is the actor without its adapters.

run/report.md has the curves and answers before and after. run/ppo/model and run/average/model are models for chat.py.
The same command continues an interrupted run in any stage, with the numbers of a run without interruption.
"""

import argparse
import json
import pathlib
import random

import chat
import chat_grpo
import chat_reward
import chat_sft
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import rl
from shardfn.inference import Sampling
from shardfn.models import gpt
from shardfn.pretrained import GPTModel, make_ppo

KINDS = {"colour": "red blue green black", "beast": "cat dog fox cow", "fruit": "plum fig pear lime"}
KINDS |= {"metal": "iron gold zinc lead", "bird": "crow owl dove hawk", "tree": "oak elm ash fir"}
FORMS = "{}.", "{}", "{} and {}.", "{}. {}."  # in lower case, too
SMALL = gpt.Config.llama_like(vocab_size=256, num_layers=2, d_model=64, num_heads=4, d_ff=128, max_len=96)
CURVES = {"actor/reward": "reward of the model", "form": "share of the rule that answers obey"}
CURVES |= {"actor/divergence": "divergence, nats a token", "actor/length": "tokens of an answer"}
CURVES |= {"ptx/text": "loss of the text", "critic/loss": "loss of the critic"}


def main():
    args = options()
    with sf.make_mesh({"dp": -1}) as mesh:
        if mesh.rank == 0:
            make_rows(args)
        if not (args.model or sf.checkpoint.steps(f"{args.out}/start/checkpoints")):
            sf.checkpoint.save(f"{args.out}/start/checkpoints", small(args, mesh), 1, at="params")
        of_stages = {"held_out": None, "beta": 0.1, "weights": (1.0, 1.0), "every": args.steps, **vars(args)}
        for stage, (model, rows), run in (
            ("sft", (args.model or f"{args.out}/start", args.rows), chat_sft.train),
            ("reward", (f"{args.out}/sft/model", args.pairs), chat_reward.train),
        ):
            changed = {"model": model, "train": rows[0], "held_out": rows[1], "out": f"{args.out}/{stage}"}
            run(argparse.Namespace(**of_stages | changed | {"lr": args.stage_lr}), mesh)
        train(args, mesh, *(chat.load(f"{args.out}/{x}/model", mesh, batch_invariant=True) for x in ("sft", "reward")))
    if dist.is_initialized():
        dist.destroy_process_group()


def train(args, mesh, actor, rewards):
    """PPO, and the report."""
    chat_grpo.check_same(actor, rewards)
    rule = [sf.optim.warmup_constant_schedule(0.0, rate * args.lr, 10) for rate in (1, 2)]
    rule = [sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(x)) for x in rule]
    asked = [question for question, _ in chat.Encoded(args.questions, lambda row: chat.question(actor, row))]
    sampling = Sampling(max_tokens=args.tokens, n=args.answers, stop_tokens=(actor.end,))
    length, num = max(map(len, asked)) + args.tokens, -(-args.prompts // mesh.size) * args.answers
    ppo, state = make_ppo(
        {"actor": branch(actor), "critic": branch(rewards, copied=True), "reward": branch(rewards)},
        dict(zip(("actor", "critic"), rule, strict=True)),
        sampling,
        mesh=mesh,
        ptx_coef=args.ptx,
        ema=args.ema,
        lora=args.lora,
        seed=args.seed,
        zero=sf.Zero(stage=args.zero, params="device"),
        running=num,
        buckets=(num, max(4 * num, length)),
    )
    policy, beta, done = ppo.policy, args.beta, 0
    text = chat.Encoded(args.text, lambda row: chat.example(actor, row, args.length))
    text = sf.data.ExampleBatches(text, args.batch, lambda rows: as_text(rows, args.length), seed=args.seed)
    texts = sf.data.Cursor(text, args.iterations * args.epochs, mesh)
    samples = [answers(policy.engine, actor, asked)]
    checkpoints = sf.checkpoint.Manager(f"{args.out}/ppo/checkpoints", mesh=mesh, save_every=args.save_every)
    if checkpoints.steps():
        restored = checkpoints.restore(state)
        state, done = restored.tree, restored.step
        beta, texts = restored.user["beta"], texts.at(restored.user["texts"])
    batches = iter(texts)
    with checkpoints, sf.metrics.Logger(f"{args.out}/ppo", mesh, start=done * args.epochs) as logger:
        for n in range(done, args.iterations):
            prompts = [asked[(n * args.prompts + i) % len(asked)] for i in range(args.prompts)]
            rollout = policy.sample(state, prompts, sf.fold_in(sf.key(args.seed), n), length=length)
            rollout = rollout._replace(rewards=ppo.reward(state, *chat_grpo.whole(rewards, rollout)))
            experience = ppo.ppo.experience(policy.step, state, rollout, kl_coef=beta)
            form = torch.tensor([chat_grpo.reward(actor, *rollout.tokens(i)) for i in range(len(rollout.ids))])
            form = form.view(-1, args.answers).mean(1)  # the answers to one question count as one
            extra = {"form": form.mean(), "form_error": form.std() / len(form) ** 0.5, "beta": beta}
            for _ in range(args.epochs):
                state, metrics = ppo.update(state, experience, next(batches) if args.ptx else None)
                row = logger.write(int(state.step), metrics, extra)
            divergence = float(metrics["actor/divergence"])  # of the rollout, in any epoch
            beta = max(rl.follow_divergence(beta, divergence, args.target, rate=0.5), args.beta)
            user = {"beta": beta, "texts": texts.state()}
            checkpoints.save(state, n + 1, user=user, now=n + 1 == args.iterations)
            if mesh.rank == 0 and n % 10 == 0:
                shown = [f"{name} {row[name]:.3f}" for name in CURVES if name in row]
                print(f"iteration {n}: {', '.join(shown)}", flush=True)
    models = {"ppo": policy.merge(state), "average": ppo.average(state)}
    for name, params in models.items():
        actor.save(f"{args.out}/{name}/model", params)
        policy.engine.update_weights(params)
        samples.append(answers(policy.engine, actor, asked))
    if mesh.rank == 0:
        found = logger.rows[:: args.epochs]  # of the weights that have drawn
        report(args, found, [actor.decode(x) for x in asked], ["before", *models], samples)


def branch(model, copied=False):
    return GPTModel(model.config, sf.tree_map(torch.clone, model.params) if copied else model.params)


def as_text(rows, length):
    batch = sf.data.pad(length)([{name: x[name] for name in ("tokens", "labels")} for x in rows])
    return {"tokens": batch["tokens"][:, :-1], "targets": batch["labels"][:, 1:]}


def answers(engine, model, asked):
    """The most probable answers to the first questions."""
    greedy = Sampling(max_tokens=16, temperature=0.0, stop_tokens=(model.end,))
    return [model.decode([i for i in x.tokens if i != model.end]) for x in engine.generate(asked[:6], greedy)]


def report(args, found, questions, names, samples):
    """Writes report.md and curves.svg."""
    from matplotlib.figure import Figure

    shown = [name for name in CURVES if name in found[0]]
    for place, name in zip(Figure((10, 8), layout="constrained").subplots(3, 2).flat, shown, strict=False):
        place.plot([row[name] for row in found], lw=1)
        place.set(xlabel="rollout", ylabel=CURVES[name])
    place.figure.savefig(f"{args.out}/curves.svg")
    last = {name: [sum(x[name] for x in part) / len(part) for part in (found[:5], found[-5:])] for name in shown}
    lines = ["# PPO", "", "| | first 5 rollouts | last 5 |", "|---|---:|---:|"]
    lines += [f"| {CURVES[name]} | {a:.3f} | {b:.3f} |" for name, (a, b) in last.items()]
    lines += ["", "![curves](curves.svg)", "", f"| question | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    cells = [[repr(x) for x in row] for row in zip(questions, *samples, strict=False)]
    lines += [f"| {' | '.join(row)} |" for row in cells]
    pathlib.Path(args.out, "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def small(args, mesh):
    """The weights of the small GPT, whose shape is written."""
    if mesh.rank == 0:
        row = {"model": sf.interop.hf_config(SMALL), "per_head": SMALL.per_head, "tokenizer": "bytes"}
        pathlib.Path(args.out, "start").mkdir(parents=True, exist_ok=True)
        pathlib.Path(args.out, "start/model.json").write_text(json.dumps(row))
    return rl.as_global(gpt.init(SMALL, sf.key(args.seed)), mesh, None)


def make_rows(args):
    """Writes the rows: conversations and texts for stage 1, pairs for stage 2, questions and texts for stage 3."""
    draw, folder = random.Random(args.seed), pathlib.Path(args.out, "rows")
    folder.mkdir(parents=True, exist_ok=True)

    def said(kind, good):
        one, other = draw.sample(KINDS[kind].split(), 2)
        if good:
            return one.capitalize() + "."
        return draw.choice(FORMS[1:]).format(one, other) if draw.random() < 0.5 else FORMS[0].format(one)

    def write(name, num, make):
        rows = [json.dumps(make(draw.choice(list(KINDS)))) for _ in range(num)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")

    def asking(kind):
        return [{"role": "user", "content": f"Name a {kind}."}]

    def messages(kind):
        answer = {"role": "assistant", "content": said(kind, draw.random() < 0.25)}
        return {"messages": [*asking(kind), answer]}

    def pair(kind):
        return {"prompt": asking(kind)} | {
            name: [{"role": "assistant", "content": said(kind, name == "chosen")}] for name in ("chosen", "rejected")
        }

    def text(kind):
        return {"text": f"{draw.choice(KINDS[kind].split())} is a {kind}, as {draw.choice(KINDS[kind].split())} is"}

    for name, num in (("train", 512), ("held_out", 64)):
        write(f"rows_{name}", num, lambda kind: text(kind) if draw.random() < 0.3 else messages(kind))
        write(f"pairs_{name}", num, pair)
    write("text", 512, text)
    (folder / "questions.jsonl").write_text("".join(json.dumps({"prompt": asking(k)}) + "\n" for k in KINDS))


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", default="runs/chat_ppo", help="%(default)s")
    add("--model", default="", help="as of chat.py; default a small one")
    for name, what in (("rows", "of chat_sft.py"), ("pairs", "of chat_reward.py")):
        add(
            f"--{name}",
            nargs=2,
            default=None,
            metavar=("TRAIN", "HELD_OUT"),
            help=f"files {what}; default some made here",
        )
    add("--questions", default="", help="rows with a prompt; default some made here")
    add("--text", default="", help="rows with a text for the second loss; default some made here")
    add("--steps", type=int, default=200, help="of stages 1 and 2 (%(default)s)")
    add("--stage-lr", type=float, default=3e-3, help="of stages 1 and 2 (%(default)s)")
    add("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
    add("--batch", type=int, default=16, help="rows of a step of stages 1 and 2, and of the text (%(default)s)")
    add("--length", type=int, default=64, help="tokens of such a row (%(default)s)")
    add("--iterations", type=int, default=40, help="of PPO (%(default)s)")
    add("--epochs", type=int, default=2, help="updates by each rollout (%(default)s)")
    add("--prompts", type=int, default=24, help="questions of an iteration, of all ranks (%(default)s)")
    add("--answers", type=int, default=4, help="to each question (%(default)s)")
    add("--tokens", type=int, default=12, help="of an answer, at most (%(default)s)")
    add("--lr", type=float, default=3e-4, help="of the actor; twice as much for the critic (%(default)s)")
    add("--beta", type=float, default=1.0, help="least weight of the divergence (%(default)s)")
    add("--target", type=float, default=0.25, help="divergence of a token (%(default)s)")
    add("--ptx", type=float, default=0.5, help="weight of the loss of the text; 0 leaves it out (%(default)s)")
    add("--ema", type=float, default=0.98, help="decay of the average of the actor (%(default)s)")
    add("--save-every", type=int, default=5, help="rollouts between checkpoints of stage 3 (%(default)s)")
    add("--zero", type=int, default=3, help="stage (%(default)s)")
    add("--seed", type=int, default=0, help="%(default)s")
    args, rows = parser.parse_args(), "rows"
    if not (0 <= args.ptx < float("inf") and 0 <= args.ema < 1):  # before stages 1 and 2
        parser.error(f"--ptx must be 0 or more and finite, and --ema in [0, 1), got {args.ptx} and {args.ema}")
    args.rows = args.rows or [f"{args.out}/{rows}/rows_{x}.jsonl" for x in ("train", "held_out")]
    args.pairs = args.pairs or [f"{args.out}/{rows}/pairs_{x}.jsonl" for x in ("train", "held_out")]
    args.questions = args.questions or f"{args.out}/{rows}/questions.jsonl"
    args.text = args.text or f"{args.out}/{rows}/text.jsonl"
    return args


if __name__ == "__main__":
    main()
