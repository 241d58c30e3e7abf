"""Trains unmodified Hugging Face models with ZeRO-3: the same file under `python` and under `torchrun`.

    python examples/huggingface.py --model gpt2
    torchrun --nproc-per-node 2 examples/huggingface.py --model llama
    python examples/huggingface.py --model llama --plain

`plain` is the loop one writes without shardfn, `sharded` the same loop with it: nine lines, marked. Both print the same
losses (up to rounding), on any number of ranks that divides the batch. The models are small and random; they learn the
bytes of Python's standard library. `model.load_state_dict(sf.unshard(state.params), strict=False)` puts trained weights
back into the module.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardfn as sf


def plain(model, batches, steps, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for n, batch in enumerate(batches.iterate(0, steps)):
        loss = model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(n, loss)


def sharded(model, batches, steps, lr):
    def loss(params, batch):  # shardfn
        return apply(params, input_ids=batch["tokens"], labels=batch["tokens"]).loss  # shardfn

    mesh = sf.make_mesh({"dp": -1}, device="cpu")  # shardfn
    params, apply = sf.from_module(model)  # shardfn
    step = sf.sharded_step(loss, sf.optim.adamw(lr), mesh=mesh, zero=sf.Zero(stage=3))  # shardfn
    state = step.init(params)  # shardfn
    for n, batch in enumerate(batches.iterate(0, steps, rank=mesh.rank, world=mesh.size)):  # shardfn
        state, metrics = step(state, batch)  # shardfn
        report(n, metrics["loss"])  # shardfn


def llama():
    """Grouped heads, rotary positions (buffers), an output layer of its own."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, use_cache=False, **sizes, **heads))


def gpt2():
    """Learned positions, biases; the output layer is the embedding."""
    sizes = {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 128}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    rest = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes, **off, **rest))


def report(n, loss):
    if os.environ.get("RANK", "0") == "0":
        print(f"step {n} loss {loss.item():.5f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--plain", action="store_true", help="the loop without shardfn (one process)")
    parser.add_argument("--steps", type=int, default=60, help="%(default)s")
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch (%(default)s)")
    parser.add_argument("--length", type=int, default=64, help="bytes a row predicts (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="%(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on all ranks
    model = {"llama": llama, "gpt2": gpt2}[args.model]()
    with tempfile.TemporaryDirectory() as folder:
        files = sf.data.default_corpus()[:100]
        source = sf.data.encode_files(files, f"{folder}/tokens.bin", sf.data.ByteTokenizer())
        batches = sf.data.Batches(source, args.batch, args.length)
        (plain if args.plain else sharded)(model, batches, args.steps, args.lr)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
