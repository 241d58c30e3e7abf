"""Covers the law of inference on a GPU: a row's bits, and a request's, are those that it has alone. Never run so far.

Bits are those of one kind of device: they are not compared with a CPU's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import kernels
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

ROWS = (*range(1, 66), 256, 768)
WIDTHS = [77, 512]


def _linear(k: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
    packed = kernels.pack_rows(torch.randn(130, k).to(dtype).cuda())
    return lambda x: kernels.row_linear(x, packed, 130)


def _norm(k: int) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(k).cuda()
    return lambda x: kernels.row_norm(x, weight, eps=1e-5, centered=False)


OPS: dict[str, Callable[[int], Callable[[Tensor], Tensor]]] = {
    "row_linear": _linear,
    "row_linear of bfloat16": lambda k: _linear(k, torch.bfloat16),
    "row_norm": _norm,
    "gelu": lambda _: kernels.gelu,
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", list(OPS))
def test_a_row_has_its_bits_alone(op: str, width: int) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    x, run = torch.randn(768, width).cuda(), OPS[op](width)
    whole = run(x)
    for rows in ROWS:
        assert torch.equal(run(x[-rows:].contiguous()), whole[-rows:]), rows


@pytest.mark.parametrize("changes", [{}, {"window": 5}, {"num_kv_heads": 2}], ids=["plain", "window", "grouped"])
def test_a_request_has_its_bits_alone(changes: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    sizes = {"vocab_size": 97, "num_layers": 2, "d_model": 96, "num_heads": 4, "d_ff": 133, "max_len": 64}
    config = gpt.Config.llama_like(**(sizes | changes), exact=True)
    made = decoder(config)
    limits = limits_of(made, running=8, buckets=(1, 4, 16), block=4)
    one = Engine(made, gpt.init(config, sf.key(0)), mesh=sf.make_mesh({"tp": 1}, device="cuda"), limits=limits)
    prompts = torch.randint(97, (9, 23), generator=torch.Generator().manual_seed(1)).tolist()
    how = [Sampling(max_tokens=12, temperature=i % 2 * 1.3, seed=i, prompt_logprobs=True) for i in range(9)]
    together = one.generate(prompts, how)
    for prompt, own, want in zip(prompts, how, together, strict=True):
        assert one.generate([prompt], own) == [want]
