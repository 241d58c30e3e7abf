"""Direct preference optimisation on pairs of conversations: a GPT of train_gpt.py, SmolLM2, or another model.

    python examples/rlhf/chat_dpo.py models/smollm2 pairs.jsonl held_out.jsonl --lora 8 --lr 1e-4 --out run
    python examples/rlhf/chat_dpo.py runs/sft/model pairs.jsonl held_out.jsonl --lr 1e-5 --out run

The options are those of chat_sft.py; chat.py lists the columns of rows. The reference is the model at the beginning:
with --lora the frozen weights without adapters, so that there is no second copy. "accuracy" is the part of pairs whose
chosen answer has gained more than the rejected one, as measured by the reference; "cut" that of pairs with a row of
more than --length tokens.
"""

import functools

import chat
import torch
import torch.distributed as dist
from chat_sft import Trained, fit, options

import shardfn as sf
from shardfn import rl
from shardfn.models import gpt


def main():
    args = options(__doc__)
    with sf.make_mesh({"dp": -1}) as mesh:
        model = chat.load(args.model, mesh)
        trained = WithReference(model, args.lora, args.seed)
        read = functools.partial(chat.Encoded, encode=functools.partial(chat.pair, model, length=args.length))
        loss = functools.partial(loss_of, model.config, trained, args.beta)
        fit(args, mesh, trained, loss, read, functools.partial(rows, length=args.length))
    if dist.is_initialized():
        dist.destroy_process_group()


class WithReference(Trained):
    """A whole model needs a copy that does not learn; adapters have one in the weights that they are beside."""

    def __init__(self, model, rank, seed):
        super().__init__(model, rank, seed)
        if not rank:
            self.params = {name: sf.tree_map(copied, model.params) for name in ("policy", "reference")}
            self.specs = dict.fromkeys(self.params, self.specs)
            self.trainable = {"policy": True, "reference": False}

    def both(self, params):
        if self.lora:
            return self.lora.apply(params["base"], params["lora"]), params["base"]
        return params["policy"], params["reference"]

    def result(self, state):
        return super().result(state) if self.lora else sf.unshard(state.params["policy"])


def copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else x  # a deferred leaf is read anew for each use


def loss_of(config, trained, beta, params, batch):
    policy, reference = trained.both(params)
    chosen, rejected = (sums(config, policy, batch[name]) for name in ("chosen", "rejected"))
    with torch.no_grad():
        before = [sums(config, reference, batch[name]) for name in ("chosen", "rejected")]
    margins = beta * ((chosen - before[0]) - (rejected - before[1])).detach()
    metrics = {"accuracy": rl.row_mean((margins > 0).float()), "margin": rl.row_mean(margins)}
    metrics["cut"] = rl.row_mean(torch.maximum(batch["chosen"]["cut"], batch["rejected"]["cut"]))
    return rl.dpo(chosen, rejected, *before, beta=beta), metrics


def sums(config, params, answers):
    """The log probability of each answer."""
    spans = rl.CompletionSpans(answers["prompts"], answers["lengths"], answers["ids"].shape[1])
    return rl.completion_logprobs(gpt.apply(config, params, answers["ids"]), answers["ids"], spans).sum(1)


def rows(pairs, length):
    """A batch of pairs, filled up to one length."""
    return {name: filled([x[i] for x in pairs], length) for i, name in enumerate(("chosen", "rejected"))}


def filled(answers, length):
    ids = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _, _ in answers])
    prompts = torch.tensor([prompt for _, prompt, _ in answers])
    lengths = torch.tensor([len(tokens) for tokens, _, _ in answers]) - prompts
    return {"ids": ids, "prompts": prompts, "lengths": lengths, "cut": torch.tensor([float(x) for _, _, x in answers])}


if __name__ == "__main__":
    main()
