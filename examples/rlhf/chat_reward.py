"""A model of rewards from pairs of conversations: of a GPT of train_gpt.py, SmolLM2, or another model.

    python examples/rlhf/chat_reward.py models/smollm2 pairs.jsonl held_out.jsonl --lora 8 --lr 1e-4 --out run

The options are those of chat_sft.py, and the rows those of chat_dpo.py. The model in run/model has a head of its own,
whose first logit is the value; the reward of a conversation is the value at its last token:

    model = chat.load("run/model", mesh)
    scores(model.config, {"reward": model.params}, (ids, lengths))

chat_grpo.py and ppo.py take it by --rewards.

"accuracy" is the part of pairs whose chosen answer has the higher reward, "margin" the mean difference, and "cut" the
part of pairs with a row of more than --length tokens.
"""

import functools

import chat
import torch
import torch.distributed as dist
from chat_dpo import rows
from chat_sft import ADAPTED, Trained, fit, options

import shardfn as sf
from shardfn import rl
from shardfn.models import gpt


def main():
    args = options(__doc__)
    with sf.make_mesh({"dp": -1}) as mesh:
        train(args, mesh)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(args, mesh):
    """The model in {args.out}/model learns to value the chosen answers of args.train above the rejected."""
    model = chat.valued(chat.load(args.model, mesh))
    trained = Trained(model, args.lora, args.seed, (*ADAPTED, "^head$"))
    read = functools.partial(chat.Encoded, encode=functools.partial(chat.pair, model, length=args.length))
    loss = trained.adapt(functools.partial(loss_of, model.config))
    fit(args, mesh, trained, loss, read, functools.partial(rows, length=args.length))


def loss_of(config, params, batch):
    both = [batch[name] for name in ("chosen", "rejected")]
    ids, lengths = [x["ids"] for x in both], [x["prompts"] + x["lengths"] for x in both]
    values = [gpt.apply(config, params, x)[..., 0] for x in ids]
    margins = (rl.last_values(values[0], lengths[0]) - rl.last_values(values[1], lengths[1])).detach()
    metrics = {"accuracy": rl.row_mean((margins > 0).float()), "margin": rl.row_mean(margins)}
    metrics["cut"] = rl.row_mean(torch.maximum(*(x["cut"] for x in both)))
    return rl.pairwise(*values, *ids, *lengths), metrics


def scores(config, params, rows):
    """The reward of each row of (ids, lengths), by the branch "reward" of a state's parameters."""
    ids, lengths = rows
    return rl.last_values(gpt.apply(config, params["reward"], ids)[..., 0], lengths)


if __name__ == "__main__":
    main()
