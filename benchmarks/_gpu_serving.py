"""The parts of `bench_gpu.py` about inference and experts, beside transformers and torch's grouped product."""

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from _gpu_timing import Figures, Step, fresh, peak, seconds, soft
from torch import Tensor

from shardfn.core import make_mesh
from shardfn.inference import Engine, Sampling, hf_decoder, limits_of
from shardfn.nn import moe

# A Llama of 135M parameters, and one for a CPU.
LLAMA = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SMALL = LLAMA | {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Experts, width, and rows of an expert.
EXPERTS, WIDTH, ROWS = 64, 1024, (16, 64, 256, 1024)


def serving(device: str) -> Figures:
    """Seconds of prompts, and of further tokens, of the engine and of transformers' `generate`; quartiles of three."""
    out: Figures = {}
    for dtype, exact in (("float32", True), ("bfloat16", True), ("bfloat16", False)):
        name = f"shardfn, {'exact' if exact else 'layers of torch'}, {dtype}"
        out[name] = _of(device, functools.partial(_engine, device, dtype, exact))
    for dtype in DTYPES:
        out[f"transformers, {dtype}"] = _of(device, functools.partial(_transformers, device, dtype))
    return out


def grouped(device: str) -> Figures:
    """Seconds of grouped products in bfloat16, forward and with both gradients, beside torch's `grouped_mm`."""
    experts, width, rows = (EXPERTS, WIDTH, ROWS) if device == "cuda" else (4, 64, (16,))
    out: Figures = {}
    for each in rows:
        counts = torch.full((experts,), each, device=device)
        x = torch.randn(experts * each, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(experts, width, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        offsets = counts.cumsum(0).int()
        calls = {
            "shardfn": functools.partial(moe.grouped, x, w, counts, True),
            "torch": functools.partial(_grouped_mm, x, w, offsets),
        }
        for name, call in calls.items():
            out[f"{each} rows, {name}"] = soft(functools.partial(seconds, device, call))
            both = functools.partial(_gradients, call, (x, w))
            out[f"{each} rows, {name}, with gradients"] = soft(functools.partial(seconds, device, both))
    return out


def _grouped_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(x, w.mT, offs=offsets)


def _gradients(call: Step, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call().float().sum(), inputs)


def _of(device: str, build: Any) -> Any:
    """A peer's figures; its errors as a text."""
    sizes = ((1, 128, 64), (8, 128, 64), (32, 128, 64), (4, 1024, 1)) if device == "cuda" else ((2, 16, 3), (2, 40, 1))

    def measure() -> Figures:
        generate = build()
        out: Figures = {}
        for num, length, new in sizes:
            prompts = torch.randint(500, (num, length), generator=torch.Generator().manual_seed(0)).tolist()
            for tokens in sorted({1, new}):
                call = functools.partial(generate, prompts, tokens)
                out[f"{num} x {length} + {tokens}"] = seconds(device, call, rounds=3)
        return out | {"peak": peak(device)}

    with fresh(device):
        return soft(measure)


def _model(device: str, dtype: str) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(LLAMA if device == "cuda" else SMALL))
    return transformers.LlamaForCausalLM(config).eval().to(device, DTYPES[dtype])


def _engine(device: str, dtype: str, exact: bool) -> Any:
    decoder, params = hf_decoder(_model(device, dtype), batch_invariant=exact)
    buckets = (1, 8, 32, 256, 1024) if device == "cuda" else (2, 64)
    limits = limits_of(decoder, context=1280, running=32, buckets=buckets, cache_dtype=dtype, cache_bytes=2 << 30)
    engine = Engine(decoder, params, mesh=make_mesh({}, device=device, alone=True), limits=limits)
    engine.warm_up()

    def generate(prompts: list[list[int]], new: int) -> None:
        engine.update_weights(params)  # no prefix of an earlier call is known
        engine.generate(prompts, Sampling(max_tokens=new, temperature=0.0))

    return generate


def _transformers(device: str, dtype: str) -> Any:
    model = _model(device, dtype)

    def generate(prompts: list[list[int]], new: int) -> None:
        given = torch.tensor(prompts, device=device)
        how = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        model.generate(given, attention_mask=torch.ones_like(given), **how)

    return generate
