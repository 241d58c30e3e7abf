"""The part of `bench_gpu.py` on generating: the law of company, decodes and prompts beside transformers' `generate`."""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf
from shardfn import interop
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

SIZES = {
    "cuda": {"vocab_size": 32000, "num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 2048, "max_len": 2048},
    "cpu": {"vocab_size": 128, "num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128, "max_len": 96},
}


def generate(device: str) -> dict[str, Any]:
    """Tokens a second of decodes and of prompts, as quartiles, and whether company changes a bit."""
    torch.manual_seed(0)
    config = gpt.Config.llama_like(**SIZES[device], exact=True)
    params = gpt.init(config, sf.key(0))
    made, mesh = decoder(config), sf.make_mesh({"tp": 1}, device=device)
    buckets = (1, 8, 32, 256) if device == "cuda" else (1, 4, 16)
    running = 31 if device == "cuda" else 4
    limits = limits_of(made, running=running, buckets=buckets)
    start = time.perf_counter()
    engine = Engine(made, params, mesh=mesh, limits=limits)
    engine.warm_up()
    out: dict[str, Any] = {"start, s": round(time.perf_counter() - start, 2), "memory": str(engine.memory())}
    length, new = config.max_len // 4, config.max_len // 16
    prompts = torch.randint(config.vocab_size, (running, length)).tolist()
    how = Sampling(max_tokens=new, temperature=0.0)
    together, alone = engine.generate(prompts, how), [engine.generate([p], how)[0] for p in prompts[:3]]
    out["equal bits alone and together"] = together[:3] == alone
    theirs = _transformers(config, params, device)
    for num in (1, running):
        fresh = iter(torch.randint(config.vocab_size, (100, num, length)).tolist())  # no prefix is known
        calls = {"shardfn": functools.partial(_ours, engine, fresh), "transformers": functools.partial(theirs, fresh)}
        for name, call in calls.items():
            prompt, whole = _quartiles(call, 1), _quartiles(call, new + 1)
            out[f"{num} sequences, {name}"] = {
                "prompt tokens/s": round(num * length / prompt[1], 1),
                "decoded tokens/s": round(num * new / max(whole[1] - prompt[1], 1e-9), 1),
                "seconds of prompts": prompt,
                "seconds of both": whole,
            }
    return out


def _ours(engine: Engine, fresh: Any, new: int) -> None:
    engine.generate(next(fresh), Sampling(max_tokens=new, temperature=0.0))


def _transformers(config: Any, params: Any, device: str) -> Callable[[Any, int], None]:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        interop.gpt_to_hf(directory, config, params)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(device)

    def run(fresh: Any, new: int) -> None:
        ids = torch.tensor(next(fresh), device=device)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return run


def _quartiles(call: Callable[[int], None], new: int, rounds: int = 5) -> list[float]:
    """Of seconds, after a warm call; results are on the CPU when a call of shardfn ends."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call(new)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return [round(x, 5) for x in statistics.quantiles(times[1:], n=4)]
