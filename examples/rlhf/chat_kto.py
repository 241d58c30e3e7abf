"""Kahneman-Tversky optimisation on single answers that are wanted or not: a GPT of train_gpt.py, SmolLM2, or another.

    python examples/rlhf/chat_kto.py models/smollm2 judged.jsonl held_out.jsonl --lora 8 --lr 1e-4 --out run

The options are those of chat_sft.py; chat.py lists the columns of rows; the reference is that of chat_dpo.py. An answer
counts by its gain, the log probability less that of the reference, beyond z: the mean gain of answers to other prompts,
as each prompt is also read with the completion of the next row that has another prompt. So z is that of the batch, on
any number of ranks. With more answers of one kind, give --weights that make up for it. "wanted" and "other" are the
mean gains of both kinds, "z" is that number, and "cut" the part of answers of more than --length tokens.
"""

import functools

import chat
import torch
import torch.distributed as dist
from chat_dpo import WithReference, filled, sums
from chat_sft import fit, options

import shardfn as sf
from shardfn import rl


def main():
    args = options(__doc__)
    with sf.make_mesh({"dp": -1}) as mesh:
        model = chat.load(args.model, mesh)
        trained = WithReference(model, args.lora, args.seed)
        read = functools.partial(Judged, encode=functools.partial(chat.judged, model, length=args.length))
        loss = functools.partial(loss_of, model.config, trained, args.beta, tuple(args.weights))
        fit(args, mesh, trained, loss, read, functools.partial(rows, length=args.length))
    if dist.is_initialized():
        dist.destroy_process_group()


class Judged(chat.Encoded):
    """Rows of single answers, each with the completion of another prompt beside its own."""

    def encoded(self, index):
        row = self.rows[index]
        (own, wanted), (other, _) = self.encode(row), self.encode({**row, "completion": self.other(index)})
        return own, other, wanted

    def other(self, index):
        for further in range(index + 1, index + len(self.rows)):
            row = self.rows[further % len(self.rows)]
            if row["prompt"] != self.rows[index]["prompt"]:
                return row["completion"]
        raise ValueError("all rows have its prompt, and z is the mean gain of answers to other prompts; add some.")


def loss_of(config, trained, beta, weights, params, batch):
    policy, reference = trained.both(params)
    own, wanted = sums(config, policy, batch["own"]), batch["wanted"]
    with torch.no_grad():
        before = sums(config, reference, batch["own"])
        gains = sums(config, policy, batch["other"]) - sums(config, reference, batch["other"])
        z = sf.psum(gains.sum(), "dp") / sf.psum(gains.new_tensor(len(gains)), "dp")
    gain = (own - before).detach()
    kinds = {"wanted": wanted.to(gain.dtype), "other": (~wanted).to(gain.dtype)}
    metrics = {name: sf.WeightedMean((kind * gain).sum(), kind.sum()) for name, kind in kinds.items()}
    metrics |= {"z": rl.row_mean(gains), "cut": rl.row_mean(batch["own"]["cut"])}
    how = {"desirable_weight": weights[0], "undesirable_weight": weights[1]}
    return rl.kto(own, before, wanted, z, beta=beta, **how), metrics


def rows(answers, length):
    """A batch of answers, filled up to one length."""
    own, other, wanted = zip(*answers, strict=True)
    return {"own": filled(own, length), "other": filled(other, length), "wanted": torch.tensor(wanted)}


if __name__ == "__main__":
    main()
