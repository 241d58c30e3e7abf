"""Covers `partition` of models of Hugging Face that write in place through views: each equals one device."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import assert_parity, distributed

transformers = pytest.importorskip("transformers")

from architectures import ZOO  # noqa: E402  # beside this file; needs transformers
from tiny_configs import tiny  # noqa: E402
from tiny_inputs import inputs  # noqa: E402

NAMES = """
    BartForConditionalGeneration DeepseekV3ForCausalLM FalconForCausalLM KimiLinearForCausalLM
    Qwen3NextForCausalLM Swinv2ForImageClassification T5ForConditionalGeneration WhisperForConditionalGeneration
""".split()
ROWS = re.compile(r"(q_proj|k_proj|v_proj|gate_proj|up_proj|fc1|wi|\.q|\.k|\.v|q_b_proj|kv_b_proj)\.(weight|bias)$")
COLUMNS = re.compile(r"(o_proj|out_proj|down_proj|fc2|wo|\.o)\.weight$")


def spec(name: str, x: Tensor) -> P:
    if ROWS.search(name):
        return P("tp")
    return P(None, "tp") if COLUMNS.search(name) and x.ndim == 2 else P()


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@distributed(world=2, timeout=600)
def test_a_model_that_writes_in_place_equals_one_device(name: str) -> None:
    torch.set_num_threads(1)
    entry, kind = ZOO[name], getattr(transformers, name)
    torch.manual_seed(0)
    model: Any = kind(tiny(kind.config_class, entry.config)).to(entry.dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    params, apply = sf.from_module(model)
    batches = [inputs(model, entry.inputs, seed, entry.images) for seed in range(2)]

    def loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return apply(params, **batch).loss

    specs = {path: spec(path, x) for path, x in params.items()}
    how: dict[str, Any] = {"mesh": sf.make_mesh({"tp": 2}), "specs": specs, "batch": P(), "reference": loss}
    assert_parity(sf.partition(loss), sf.optim.sgd(0.1), params, batches, **how)
