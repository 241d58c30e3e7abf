"""Covers keywords of other libraries: calls with their names are refused with the name here, which exists."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, limits_of
from shardfn.lora import LoRA

# By callable, keywords of TRL, verl, peft, vLLM, SGLang, transformers and Lightning, and parts of their remedies.
KNOWN: dict[Callable[..., Any], dict[str, str]] = {
    Sampling: {"max_new_tokens": "max_tokens=7", "do_sample": "temperature=1.0", "stop_token_ids": "stop_tokens=7"}
    | {"best_of": "n=7", "logprobs": "top_logprobs=7", "ignore_eos": "stop_tokens=()", "guided_json": "grammar="},
    LoRA.of: {"r": "rank=7", "lora_alpha": "alpha=7", "target_modules": "targets=7", "use_dora": "dora=7"},
    sf.metrics.EarlyStopping: {"early_stopping_patience": "patience=7", "monitor": "update(value)"},
    rl.grpo: {"epsilon_low": "epsilon=7", "loss_agg_mode": "loss_type=", "clip_ratio_c": "delta=7"}
    | {"most": "delta=7", "corrected": "use_bias_correction_kl=7", "behaviour_BT": "sampling_logprobs_BT="}
    | {"normalise": "loss_type=", "ratio": "importance_sampling_level=7", "clip": "epsilon=7"},
    rl.ppo_policy: {"cliprange": "epsilon=7", "truncate": "importance_sampling_clip_max=7"},
    rl.ppo_value: {"cliprange_value": "cliprange=7"},
    rl.dpo: {"smoothing": "label_smoothing=7", "loss_weights": "loss_type={'sigmoid': 0.8"},
    rl.kto: {"weights": "desirable_weight=", "divergence": "kl="},
    rl.gae: {"discount": "gamma=7", "decay": "lam=7"},
    rl.group_advantages: {"size": "num_generations=7", "deviation": "scale_rewards="},
    rl.score: {"timeout": "seconds=7"},
    limits_of: {"max_num_seqs": "running=7", "max_model_len": "context=7", "gpu_memory_utilization": "cache_bytes="},
    Engine: {"max_num_seqs": "limits=limits_of(decoder, running=7)", "gpu_memory_utilization": "cache_bytes="}
    | {"tensor_parallel_size": "mesh=make_mesh({'tp': 7})", "speculative_config": "drafter="},
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "name", "text"), [(call, name, text) for call, names in KNOWN.items() for name, text in names.items()]
)
def test_a_keyword_of_a_peer_is_refused_with_its_name_here(call: Callable[..., Any], name: str, text: str) -> None:
    with pytest.raises(TypeError, match=rf"\({name}=7\): there is no argument '{name}'\. .*{re.escape(text)}"):
        call(**{name: 7})


def test_positions_of_a_class_are_counted_without_itself() -> None:
    with pytest.raises(TypeError, match=r"LoRA\.of takes params and targets by position and got 3 arguments"):
        LoRA.of({}, ["w"], 8)  # pyright: ignore[reportCallIssue]
    with pytest.raises(
        TypeError, match=r"Engine takes decoder and params by position and got 3 arguments. Pass the oth"
    ):
        Engine(1, 2, 3)  # pyright: ignore
    assert "self" not in str(inspect.signature(Sampling)) and Sampling(3).max_tokens == 3
