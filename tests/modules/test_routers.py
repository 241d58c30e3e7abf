"""Covers shardfn/modules/_checks.py: a warning of balance losses over a rank's own rows."""

import warnings
from typing import Any

import pytest
import torch

import shardfn as sf

transformers = pytest.importorskip("transformers")


def _model(**options: Any) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "use_cache": False}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=16, **sizes, **heads, **options))


def test_from_module_warns_of_a_balance_loss() -> None:
    with pytest.warns(UserWarning, match=r"router_aux_loss_coef=0.01\).*not that of the global batch"):
        sf.from_module(_model(output_router_logits=True, router_aux_loss_coef=0.01))


def test_a_call_that_asks_for_one_warns() -> None:
    _, apply = sf.from_module(_model())
    params = dict(apply.module.named_parameters())
    ids = torch.arange(6).view(1, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(params, input_ids=ids, labels=ids)
    with pytest.warns(UserWarning, match="output_router_logits=True has the module add a balance loss"):
        apply(params, input_ids=ids, labels=ids, output_router_logits=True)


def test_a_balance_loss_of_weight_zero_is_accepted() -> None:
    sf.from_module(_model(output_router_logits=True, router_aux_loss_coef=0.0))
