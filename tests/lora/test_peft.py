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
def test_they_come_back_unchanged(name: str, stacked: bool, tmp_path: pathlib.Path) -> None:
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
    config.write_text(json.dumps(plain | {"lora_bias": True, "bias": "all"}))
    with pytest.raises(ValueError, match=r"(?s)bias is 'all'; only 'none' is known.*lora_bias is True; only False"):
        load_peft(tmp_path, params)
    config.write_text(json.dumps(plain))
    one = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(
        {k: v for k, v in whole.items() if k != one} | {"base_model.model.lm_hea.lora_A.weight": whole[one]}, tensors
    )
    with pytest.raises(ValueError, match=r"(?s)q_proj.lora_A.weight is missing.*lm_hea is not a weight.*Did you mean"):
        load_peft(tmp_path, params)
    save_file(whole | {one: whole[one][:, :5].contiguous()}, tensors)
    with pytest.raises(ValueError, match=r"q_proj.weight, a: \(2, 5\) in the file, \(2, 8\) wanted"):
        load_peft(tmp_path, params)
    odd = LoRA.of({"w": torch.ones(4, 4)}, ["w"], rank=2)
    with pytest.raises(ValueError, match="w is not a weight of a module, by its name"):
        save_peft(tmp_path, odd, odd.init(sf.key(0)))


KINDS: dict[str, dict[str, Any]] = {
    "patterns": {"rank_pattern": {r"layers.0.self_attn.q_proj": 3}, "alpha_pattern": {"v_proj": 5, "down_proj": 1}},
    "dora": {"dora": True},
    "saved": {"modules_to_save": [r"^lm_head\.", r"^model\.norm\."]},
    "all": {"dora": True, "rank_pattern": {"v_proj": 1}, "modules_to_save": ["embed_tokens"], "rslora": True},
    "gpt2": {"dora": True, "rank_pattern": {"h.1.attn.c_attn": 3}},
}


def _moved(lora: LoRA, params: Any) -> dict[str, Any]:
    """Adapters as after some steps."""
    made = lora.init(sf.key(1), params=params)
    for i, own in enumerate(made.values()):
        for name, x in own.items():
            x += 0.0 if name == "a" else torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) / 4
            x.requires_grad_()
    return made


def _built(kind: str) -> tuple[nn.Module, Any, Any, LoRA]:
    gpt2 = kind == "gpt2"
    module = _gpt2() if gpt2 else _llama()
    params, apply = sf.from_module(module)
    targets = [r"c_attn\.weight"] if gpt2 else TARGETS
    return module, params, apply, LoRA.of(params, targets, rank=2, alpha=6, fan_in_fan_out=gpt2, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_comes_back_unchanged(kind: str, tmp_path: pathlib.Path) -> None:
    _, params, _, lora = _built(kind)
    adapters = _moved(lora, params)
    save_peft(tmp_path, lora, adapters)
    again, got = load_peft(tmp_path, params)
    assert again == lora and got.keys() == adapters.keys()
    for path, own in adapters.items():
        assert own.keys() == got[path].keys() and all(torch.equal(got[path][k], x) for k, x in own.items()), path


@pytest.mark.filterwarnings("ignore")  # of peft, from transformers
@pytest.mark.parametrize("kind", KINDS)
def test_peft_has_the_same_outputs_and_gradients(kind: str, tmp_path: pathlib.Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="needs peft: pip install peft")
    module, params, apply, lora = _built(kind)
    adapters = _moved(lora, params)

    ours = lora.adapt(lambda p: apply(p, input_ids=IDS, use_cache=False).logits)({"base": params, "lora": adapters})
    ours.square().mean().backward()
    save_peft(tmp_path, lora, adapters)
    theirs = peft.PeftModel.from_pretrained(module, tmp_path, is_trainable=True).eval()
    out = theirs(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(out, ours, rtol=1e-6, atol=1e-6)
    out.square().mean().backward()
    found = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    ends = {"a": "lora_A.weight", "b": "lora_B.weight", "m": "lora_magnitude_vector.weight"}
    ends["full"] = "modules_to_save.weight"
    for path, own in adapters.items():
        for name, x in own.items():
            theirs_of = found.pop(f"base_model.model.{path.removesuffix('.weight')}.{ends[name]}")
            assert x.grad is not None
            torch.testing.assert_close(theirs_of, x.grad, rtol=1e-5, atol=1e-6)
    assert not found
    # And the files that peft writes.
    theirs.save_pretrained(tmp_path / "again")
    again, got = load_peft(tmp_path / "again", params)
    assert again.sites.keys() == lora.sites.keys()
    assert all(torch.equal(x, adapters[path][name]) for path, own in got.items() for name, x in own.items())


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_peft_has_made_are_read(tmp_path: pathlib.Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="needs peft: pip install peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"], use_dora=True, modules_to_save=["lm_head"],
        rank_pattern={"layers.0.self_attn.q_proj": 3}, alpha_pattern={"q_proj": 5}, init_lora_weights=False,
        lora_dropout=0.1, task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = peft.get_peft_model(_llama(), config).eval()
    theirs.save_pretrained(tmp_path)
    params, apply = sf.from_module(_llama())
    lora, adapters = load_peft(tmp_path, params)
    assert {site.rank for site in lora.sites.values()} == {0, 2, 3} and lora.dora
    ours = lora.adapt(lambda p: apply(p, input_ids=IDS, use_cache=False).logits)({"base": params, "lora": adapters})
    torch.testing.assert_close(ours, theirs(input_ids=IDS, use_cache=False).logits, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"stacks layers of ranks \[2, 3\], alphas \[5.0\]; leave out layers="):
        load_peft(tmp_path, sf.from_module(_llama(), layers="model.layers")[0])


def test_adapters_that_are_not_finite_are_not_written(tmp_path: pathlib.Path) -> None:
    lora = LoRA.of({"up.weight": torch.ones(4, 6)}, ["up"], rank=2)
    adapters = lora.init(sf.key(0))
    adapters["up.weight"]["b"][1, 1] = torch.nan
    with pytest.raises(ValueError, match=r"in 1 of 2 leaves[\s\S]*up\.lora_B\.weight: 1 of 8 elements"):
        save_peft(tmp_path / "out", lora, adapters)
    assert not (tmp_path / "out").exists()
