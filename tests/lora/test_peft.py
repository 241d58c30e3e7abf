"""Covers `save_peft` and `load_peft`: adapters come back unchanged, and `peft` itself gives the same logits."""

import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import shardfn as sf
from shardfn.lora import LoRA, load_peft, save_peft

TARGETS = [r"\.[qv]_proj\.weight", r"down_proj\.weight"]
IDS = torch.tensor([[3, 4, 5, 6], [7, 3, 9, 4]])


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_embd=8, n_layer=2, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


def _adapters(lora: LoRA) -> dict[str, Any]:
    made = lora.init(sf.key(1))
    for i, ab in enumerate(made.values()):
        ab["b"] = torch.randn(ab["b"].shape, generator=torch.Generator().manual_seed(i)) / 4
    return made


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_they_come_back_as_they_were(name: str, stacked: bool, tmp_path: pathlib.Path) -> None:
    module = _llama() if name == "llama" else _gpt2()
    layers, targets = ("model.layers", TARGETS) if name == "llama" else ("transformer.h", [r"c_attn\.weight"])
    params, _ = sf.from_module(module, layers=layers) if stacked else sf.from_module(module)
    lora = LoRA.of(params, targets, rank=2, alpha=6, rslora=True, fan_in_fan_out=name == "gpt2")
    adapters = _adapters(lora)
    save_peft(tmp_path, lora, adapters, base_model="tiny")
    again, got = load_peft(tmp_path, params)
    assert again == lora
    assert got.keys() == adapters.keys()
    for path, ab in adapters.items():
        assert torch.equal(got[path]["a"], ab["a"]) and torch.equal(got[path]["b"], ab["b"]), path
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    one = "model.layers.1.self_attn.q_proj" if name == "llama" else "transformer.h.1.attn.c_attn"
    assert {f"base_model.model.{one}.lora_A.weight", f"base_model.model.{one}.lora_B.weight"} <= names
    # One file is for stacked layers and for unstacked ones.
    other, _ = sf.from_module(module) if stacked else sf.from_module(module, layers=layers)
    _, theirs = load_peft(tmp_path, other)
    assert sum(ab["a"].numel() for ab in theirs.values()) == sum(ab["a"].numel() for ab in adapters.values())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, from transformers
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_peft_reads_them(name: str, tmp_path: pathlib.Path) -> None:
    peft: Any = pytest.importorskip("peft")
    module = _llama() if name == "llama" else _gpt2()
    layers, targets = ("model.layers", TARGETS) if name == "llama" else ("transformer.h", [r"c_attn\.weight"])
    params, apply = sf.from_module(module, layers=layers)
    lora = LoRA.of(params, targets, rank=2, alpha=6, fan_in_fan_out=name == "gpt2")
    adapters = _adapters(lora)
    ours = lora.adapt(lambda p: apply(p, input_ids=IDS, use_cache=False).logits)({"base": params, "lora": adapters})
    save_peft(tmp_path, lora, adapters)
    theirs = peft.PeftModel.from_pretrained(module, tmp_path)
    torch.testing.assert_close(theirs(input_ids=IDS, use_cache=False).logits, ours)
    theirs.save_pretrained(tmp_path / "again")
    fresh, _ = sf.from_module(_llama() if name == "llama" else _gpt2(), layers=layers)
    _, got = load_peft(tmp_path / "again", fresh)
    for path, ab in adapters.items():
        assert torch.equal(got[path]["a"], ab["a"]) and torch.equal(got[path]["b"], ab["b"]), path


def test_files_of_another_kind_are_refused(tmp_path: pathlib.Path) -> None:
    params, _ = sf.from_module(_llama())
    lora = LoRA.of(params, TARGETS, rank=2)
    save_peft(tmp_path, lora, _adapters(lora))
    config, tensors = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    plain, whole = json.loads(config.read_text()), load_file(tensors)
    config.write_text(json.dumps(plain | {"use_dora": True, "bias": "all"}))
    with pytest.raises(ValueError, match=r"(?s)bias is 'all'; only 'none' is known.*use_dora is True; only False"):
        load_peft(tmp_path, params)
    config.write_text(json.dumps(plain))
    one = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(
        {k: v for k, v in whole.items() if k != one} | {"base_model.model.lm_hea.lora_A.weight": whole[one]}, tensors
    )
    with pytest.raises(ValueError, match=r"(?s)q_proj.lora_A.weight is missing.*lm_hea is no weight.*Did you mean"):
        load_peft(tmp_path, params)
    save_file(whole | {one: whole[one][:, :5].contiguous()}, tensors)
    with pytest.raises(ValueError, match=r"q_proj.weight, a: \(2, 5\) in the file, \(2, 8\) wanted"):
        load_peft(tmp_path, params)
    odd = LoRA.of({"w": torch.ones(4, 4)}, ["w"], rank=2)
    with pytest.raises(ValueError, match="w is no weight of a module, by its name"):
        save_peft(tmp_path, odd, odd.init(sf.key(0)))
