"""GRPO with a rule on the form of answers: a capital letter, one full stop at the end, and then nothing more.

    python examples/rlhf/chat.py models/smollm2
    python examples/rlhf/chat_grpo.py models/smollm2 --lora 8 --out run
    python examples/rlhf/chat_grpo.py models/smollm2 --questions gsm8k.jsonl --tokens 128 --out run

With --questions prompts are rows of a file, as chat.py lists them; where a row has an answer, the reward is whether it
is the last word, as in "The answer is 7."

With --rewards a model of chat_reward.py is the reward, and answers of rows are not read. It is a branch of the state
that does not learn, and it has the tokens and the template of the policy:

    python examples/rlhf/chat_grpo.py models/smollm2 --rewards runs/reward/model --out run

The reference is the model at the beginning, as in chat_dpo.py. With --lora the engine has the sums of weights and
adapters; their products in the training forward are rounded in another order, so ratios begin near 1. Without it the
model is exact, and they begin at 1.
"""

import argparse
import functools
import re

import chat
import torch
import torch.distributed as dist
from chat_dpo import WithReference
from chat_reward import scores

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

QUESTIONS = [
    *(f"What is the capital of {land}?" for land in ("France", "Italy", "Japan", "Peru", "Kenya", "Norway")),
    *(f"What is {a} plus {b}?" for a, b in ((3, 4), (2, 5), (6, 1), (7, 2))),
    *(f"Name a {kind}." for kind in ("colour", "river", "fruit", "planet", "metal", "bird")),
]


def main():
    args = options()
    with sf.make_mesh({"dp": -1}) as mesh:
        model = chat.load(args.model, mesh, batch_invariant=True)
        trained, scored = WithReference(model, args.lora, args.seed), functools.partial(by_rule, model)
        if args.rewards:
            rewards = chat.load(args.rewards, mesh, batch_invariant=True)
            check_same(model, rewards)
            trained.freeze("reward", rewards)
            scored = functools.partial(by_model, rewards)
        train(args, mesh, model, trained, scored)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(args, mesh, model, trained, scored):
    """GRPO; `scored(step, state, rollout, solutions)` is the rollout with its rewards."""
    rule = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(args.lr))
    how = {"specs": trained.specs, "trainable": trained.trainable, "zero": sf.Zero(stage=args.zero), "has_aux": True}
    step = sf.sharded_step(functools.partial(loss, model.config, trained, args.beta), rule, mesh=mesh, **how)
    state, own = step.init(trained.params), step.rows(args.prompts)
    made, sampling = decoder(model.config), Sampling(max_tokens=args.tokens, n=args.answers, stop_tokens=(model.end,))
    rows = chat.Encoded(args.questions, functools.partial(chat.question, model)) if args.questions else None
    questions = list(rows) if rows else [chat.question(model, {"prompt": text}) for text in QUESTIONS]
    length = max(len(prompt) for prompt, _ in questions) + args.tokens
    num = (own.stop - own.start) * args.answers
    limits = limits_of(made, running=max(num, 1), buckets=(max(num, 1), max(4 * num, length)))
    engine = Engine(made, trained.result(state), mesh=sf.make_mesh(alone=True), limits=limits)
    signal = rl.RewardSignal()
    with sf.metrics.Logger(args.out, mesh) as logger:
        for n in range(args.iterations):
            version = engine.update_weights(trained.result(state)) if n else 0
            asked = [questions[(n * args.prompts + i) % len(questions)] for i in range(own.start, own.stop)]
            key = sf.fold_in(sf.key(args.seed), n)
            prompts, solutions = [prompt for prompt, _ in asked], [one for _, one in asked for _ in range(args.answers)]
            rollout = rl.sample(engine, prompts, sampling, key=key, start=own.start, length=length)
            rl.check_versions(rollout, version)
            rollout = scored(step, state, rollout, solutions)
            batch = {"rollout": rollout, "advantages": rl.group_advantages(rollout.rewards, args.answers)}
            for _ in range(args.epochs):
                state, metrics = step(state, batch)
                row = logger.write(int(state.step), metrics)
            signal = signal.update(row["flat"])
            if mesh.rank == 0:
                shown = ("reward", "kl", "ratio", "length", "entropy")
                print(f"iteration {n}: " + ", ".join(f"{name} {row[name]:.3f}" for name in shown), flush=True)
    model.save(f"{args.out}/model", trained.result(state))


def by_rule(model, step, state, rollout, solutions):
    return rl.score(functools.partial(reward, model), rollout, solutions, seconds=5.0).rollout


def by_model(rewards, step, state, rollout, solutions):
    rows = whole(rewards, rollout)
    return rollout._replace(rewards=step.apply(functools.partial(scores, rewards.config), state, rows))


TALK = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def whole(model, rollout):
    """The ids and lengths of conversations as chat_reward.py has them: with the template's tokens behind an end."""
    talk = model.chat(list(TALK), False)
    tail = talk[len(talk) - talk[::-1].index(model.end) :] if model.end in talk else []
    ids, ends = torch.nn.functional.pad(rollout.ids, (0, len(tail))), rollout.prompts + rollout.lengths
    for row in rollout.ended.nonzero()[:, 0].tolist():
        ids[row, ends[row] : ends[row] + len(tail)] = torch.tensor(tail, dtype=ids.dtype)
    return ids, ends + len(tail) * rollout.ended


def check_same(model, rewards):
    """Refuses a model of rewards that would read the ids of a conversation as another one."""
    rl.check_tokenizers(model.vocabulary, rewards.vocabulary)
    ours, theirs = (x.chat(list(TALK), False) for x in (model, rewards))
    if ours != theirs:
        raise ValueError(
            f"the template of the policy writes {model.decode(ours)!r}, and that of the model of rewards"
            f" {model.decode(theirs)!r}; train the model of rewards from a model with the policy's template."
        )


def reward(model, prompt, answer, solution=None):
    """A third for each: a capital letter first, an end within the limit, and one sentence in one line before it.

    With a solution 1 if it is the last word, and else 0.
    """
    ended = answer[-1:] == [model.end]
    text = model.decode(answer[:-1] if ended else answer)
    if solution is not None:
        return float(text.rstrip(" \n.!$").endswith(str(solution)))
    parts = text[:1].isupper(), ended, ended and re.fullmatch(r"[^.!?\n]+\.", text) is not None
    return sum(parts) / len(parts)


def loss(config, trained, beta, params, batch):
    policy, reference = trained.both(params)
    rollout = batch["rollout"]
    logits = gpt.apply(config, policy, rollout.ids)
    logprobs = rl.completion_logprobs(logits, rollout.ids, rollout.spans)
    with torch.no_grad():
        before = rl.completion_logprobs(gpt.apply(config, reference, rollout.ids), rollout.ids, rollout.spans)
        entropies = rl.completion_entropies(logits, rollout.spans)
    drawn = rollout.logprobs, rollout.lengths
    metrics = rl.policy_metrics(logprobs, *drawn, ref_logprobs_BT=before) | rl.rollout_metrics(
        rollout, batch["advantages"]
    )
    metrics["entropy"] = rl.token_mean(entropies, rollout.lengths)
    how = {"beta": beta, "ref_logprobs_BT": before}
    return rl.grpo(logprobs, rollout.logprobs, batch["advantages"], rollout.lengths, **how), metrics


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="as of chat.py")
    add("--questions", help="rows with prompts; default some of its own")
    add("--rewards", default="", help="a model of chat_reward.py, in place of a rule")
    add("--out", default="runs/grpo", help="%(default)s")
    add("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
    add("--iterations", type=int, default=20, help="%(default)s")
    add("--epochs", type=int, default=1, help="updates by each rollout (%(default)s)")
    add("--prompts", type=int, default=8, help="questions of an iteration, of all ranks (%(default)s)")
    add("--answers", type=int, default=4, help="to each question (%(default)s)")
    add("--tokens", type=int, default=16, help="of an answer, at most (%(default)s)")
    add("--beta", type=float, default=0.02, help="weight of the divergence (%(default)s)")
    add("--lr", type=float, default=1e-3, help="%(default)s")
    add("--zero", type=int, default=3, help="stage (%(default)s)")
    add("--seed", type=int, default=0, help="%(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
