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
from chat_reward import scores

import shardfn as sf
from shardfn import rl
from shardfn.inference import Sampling
from shardfn.pretrained import GPTModel, make_policy

QUESTIONS = [
    *(f"What is the capital of {land}?" for land in ("France", "Italy", "Japan", "Peru", "Kenya", "Norway")),
    *(f"What is {a} plus {b}?" for a, b in ((3, 4), (2, 5), (6, 1), (7, 2))),
    *(f"Name a {kind}." for kind in ("colour", "river", "fruit", "planet", "metal", "bird")),
]


def main():
    args = options()
    with sf.make_mesh({"dp": -1}) as mesh:
        model = chat.load(args.model, mesh, batch_invariant=True)
        rewards = chat.load(args.rewards, mesh, batch_invariant=True) if args.rewards else None
        train(args, mesh, model, rewards)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(args, mesh, model, rewards=None):
    """GRPO with rewards by a model, or by the rule."""
    if rewards:
        check_same(model, rewards)
    rows = chat.Encoded(args.questions, functools.partial(chat.question, model)) if args.questions else None
    questions = list(rows) if rows else [chat.question(model, {"prompt": text}) for text in QUESTIONS]
    rule = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(args.lr))
    sampling = Sampling(max_tokens=args.tokens, n=args.answers, stop_tokens=(model.end,))
    length = max(len(prompt) for prompt, _ in questions) + args.tokens
    num = max(-(-args.prompts // mesh.size) * args.answers, 1)
    how = {"lora": args.lora, "beta": args.beta, "zero": sf.Zero(stage=args.zero), "seed": args.seed}
    how |= {"frozen": {"reward": branch(rewards)} if rewards else {}, "mesh": mesh}
    policy, state = make_policy(branch(model), rule, sampling, **how, running=num, buckets=(num, max(4 * num, length)))
    own, signal = policy.step.rows(args.prompts), rl.RewardSignal()
    with sf.metrics.Logger(args.out, mesh) as logger:
        for n in range(args.iterations):
            asked = [questions[(n * args.prompts + i) % len(questions)] for i in range(args.prompts)]
            key = sf.fold_in(sf.key(args.seed), n)
            rollout = policy.sample(state, [prompt for prompt, _ in asked], key, length=length)
            if rewards:
                rollout = rollout._replace(rewards=values(rewards, policy.step, state, rollout))
            else:
                solutions = [one for _, one in asked[own] for _ in range(args.answers)]
                rollout = rl.score(functools.partial(reward, model), rollout, solutions, seconds=5.0).rollout
            for _ in range(args.epochs):
                state, metrics = policy.update(state, rollout)
                row = logger.write(int(state.step), metrics)
            signal = signal.update(metrics["flat"])
            if mesh.rank == 0:
                shown = [name for name in ("reward", "kl", "ratio", "length", "entropy") if name in row]
                print(f"iteration {n}: " + ", ".join(f"{name} {row[name]:.3f}" for name in shown), flush=True)
    model.save(f"{args.out}/model", policy.merge(state))


def branch(model):
    return GPTModel(model.config, model.params)


def values(rewards, step, state, rollout):
    """The rewards of answers by the branch "reward"."""
    return step.apply(functools.partial(scores, rewards.config), state, whole(rewards, rollout))


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
