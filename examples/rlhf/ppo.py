"""The last of three parts: PPO, with rewards by a model. Four models are branches of one state.

    python examples/rlhf/ppo.py --out run
    torchrun --nproc-per-node 2 examples/rlhf/ppo.py --out run --zero 3

The loop is that of ppo_arithmetic.py; a model in the state has the place of its rule. The rule by which pairs were made
is used to evaluate, and never to learn. The critic begins as a copy of the model of rewards.

With --rewards a model of chat_reward.py takes the place of the second part. It reads a problem and its answer as texts,
in its own tokens; so it has learnt from rows such as {"prompt": "3+4=", "chosen": "7.", "rejected": "8."}:

    python examples/rlhf/ppo.py --rewards runs/reward/model --out run
"""

import functools

import chat
import reward_model
import sft
import torch
import torch.distributed as dist
from chat_reward import scores
from grpo_arithmetic import LENGTH, decode
from ppo_arithmetic import CONFIGS, VALUES, train

import shardfn as sf
from shardfn.models import gpt

ROOM = 2 * LENGTH + 2  # tokens of a row for another model: a letter is one as a rule


def main():
    parser = reward_model.arguments(__doc__)
    parser.add_argument("--rewards", default="", help="a model of chat_reward.py, in place of reward_model.py's")
    args = parser.parse_args()
    with sf.make_mesh({"dp": -1}) as mesh:
        say = functools.partial(print, flush=True) if mesh.rank == 0 else lambda *_: None
        actor = sft.train(args, mesh)
        if args.rewards:
            train_by(chat.load(args.rewards, mesh, batch_invariant=True), args, mesh, actor, say)
        else:
            reward, ordered = reward_model.train(args, mesh, actor)
            say(f"pairs in order: {ordered:.0%}")
            models = {"actor": actor, "critic": sf.tree_map(torch.clone, reward), "reward": reward}
            train(args, mesh, models, by_model, say)
    if dist.is_initialized():
        dist.destroy_process_group()


def by_model(step, state, rollout):
    rows = rollout.ids, rollout.prompts + rollout.lengths
    return rollout._replace(rewards=step.apply(functools.partial(scores, VALUES), state, rows))


def train_by(rewards, args, mesh, actor, say):
    """PPO with rewards by a model of other tokens, and a critic that begins with random weights."""
    models = {"actor": actor, "critic": gpt.init(VALUES, sf.key(args.seed + 3)), "reward": rewards.params}
    configs = CONFIGS | {"reward": rewards.config}
    train(args, mesh, models, functools.partial(by_texts, rewards), say, configs)


def by_texts(rewards, step, state, rollout):
    rows = as_rows(rewards, [rollout.tokens(row) for row in range(len(rollout.ids))])
    return rollout._replace(rewards=step.apply(functools.partial(scores, rewards.config), state, rows))


def as_rows(rewards, rollout):
    """Prompts and answers in the tokens of the model of rewards, with its end."""
    ids, lengths = torch.zeros(len(rollout), ROOM, dtype=torch.int64), torch.zeros(len(rollout), dtype=torch.int64)
    for row, texts in enumerate((decode(prompt), decode(answer)) for prompt, answer in rollout):
        [(tokens, _, cut)] = chat.answered(rewards, texts[0], texts[1:], ROOM)
        if cut:
            raise ValueError(f"{''.join(texts)!r} has more than {ROOM} tokens of the model of rewards; raise ROOM.")
        ids[row, : len(tokens)], lengths[row] = torch.tensor(tokens), len(tokens)
    return ids, lengths


if __name__ == "__main__":
    main()
