"""Puts an unmodified Hugging Face Llama on tp x dp: the same file under `python` and under `torchrun`.

    python examples/huggingface_tp.py --plain
    torchrun --nproc-per-node 2 examples/huggingface_tp.py --tp 2
    torchrun --nproc-per-node 4 examples/huggingface_tp.py --tp 2

`plain` is the loop for one device, `sharded` the same loop with nine lines of shardfn, marked. The specs cut parameters
along `tp`; `partition` derives the messages. Both print the same losses, up to rounding.
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardfn as sf

# Cuts along tp: `o_proj` and `down_proj`, whose results are summed, by columns, norms not at all, all others by rows.
CUT = {"o_proj": sf.P(None, "tp"), "down_proj": sf.P(None, "tp"), "norm": sf.P(), "": sf.P("tp")}  # shardfn


def plain(model, batches, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for n, batch in enumerate(batches):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(n, loss)


def sharded(model, batches, lr, tp):
    mesh = sf.make_mesh({"dp": -1, "tp": tp}, device="cpu")  # shardfn
    params, apply = sf.from_module(model)  # shardfn
    specs = {name: next(spec for part, spec in CUT.items() if part in name) for name in params}  # shardfn
    loss = sf.partition(lambda p, batch: apply(p, input_ids=batch, labels=batch).loss)  # shardfn
    step = sf.sharded_step(loss, sf.optim.adamw(lr), mesh=mesh, specs=specs, batch=sf.P("dp"))  # shardfn
    state = step.init(params)  # shardfn
    for n, batch in enumerate(batches):
        state, metrics = step(state, batch.chunk(mesh.shape["dp"])[mesh.coords["dp"]])  # shardfn
        report(n, metrics["loss"])  # shardfn


def report(n, loss):
    if os.environ.get("RANK", "0") == "0":
        print(f"step {n} loss {loss.item():.5f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="the loop without shardfn (one process)")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="%(default)s")
    parser.add_argument("--lr", type=float, default=3e-3, help="%(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on all ranks
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 256, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, use_cache=False, **sizes, **heads))
    text = torch.arange(8 * 32).remainder(97).view(8, 32)
    batches = [text.roll(n, 0) + n % 7 for n in range(args.steps)]
    if args.plain:
        plain(model, batches, args.lr)
    else:
        sharded(model, batches, args.lr, args.tp)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
