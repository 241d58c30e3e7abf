"""Covers shardfn/interop/_hf_module.py: weights of any module, by its own names."""

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn.interop import Archive, file_dtypes, module_from_hf, module_to_hf, without_weights

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(14).view(2, 7) % 61


def _config(tie: bool = True) -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.Qwen2Config(
        vocab_size=61, num_key_value_heads=2, tie_word_embeddings=tie, use_cache=False, **sizes
    )


@pytest.mark.day("True")
@pytest.mark.parametrize("tie", [True, False])
@torch.no_grad()
def test_a_module_without_weights_reads_them(tie: bool, tmp_path: pathlib.Path) -> None:
    module = transformers.Qwen2ForCausalLM(_config(tie)).eval()
    module.save_pretrained(tmp_path / "in", max_shard_size="9KB")
    with without_weights():
        empty = transformers.Qwen2ForCausalLM(_config(tie)).eval()
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    params, apply = sf.from_module(empty)
    read = module_from_hf(empty, tmp_path / "in")
    assert read.keys() == params.keys() and ("lm_head.weight" in read) != tie
    step = sf.sharded_step(lambda p, x: apply(p, input_ids=x).logits.square().mean(), sf.optim.sgd(0.1))
    state = step.init(read)
    whole = sf.unshard(state.params)
    assert torch.equal(apply(whole, input_ids=TOKENS).logits, module(input_ids=TOKENS).logits)
    module_to_hf(empty, state.params, tmp_path / "out", file_bytes=9000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(again(input_ids=TOKENS).logits, module(input_ids=TOKENS).logits)


def test_buffers_go_along(tmp_path: pathlib.Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module(torch.randn(5, 3))
    module_to_hf(module, dict(module.named_parameters()), tmp_path)
    with without_weights():
        other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module_from_hf(other, tmp_path)
    assert all(torch.equal(x, y) for x, y in zip(module.buffers(), other.buffers(), strict=True))


def test_every_weight_that_does_not_fit_is_listed(tmp_path: pathlib.Path) -> None:
    module = nn.Linear(3, 2)
    module_to_hf(module, dict(module.named_parameters()), tmp_path)
    with pytest.raises(ValueError, match=r"weight is \(2, 3\) in the file, but \(2, 4\)") as error:
        module_from_hf(nn.Linear(4, 2, bias=False), tmp_path)
    assert "bias is left over" in str(error.value)
    with pytest.raises(ValueError, match=r"weight is missing. Did you mean 'wieght'"):
        module_to_hf(module, {"wieght": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path)


def test_no_weight_is_read_before_it_is_used(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    module_to_hf(module, dict(module.named_parameters()), tmp_path)
    reads: list[int] = []
    plain: Any = Archive._read
    monkeypatch.setattr(Archive, "_read", lambda *args: reads.append(args[-1].nbytes) or plain(*args))
    read: dict[str, Any] = module_from_hf(module, tmp_path)
    assert reads == []
    read["0.weight"].block((slice(8, 16),))
    assert reads == [8 * 64 * 4]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_come_as_master_copies(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    module = nn.Linear(8, 6, bias=False).to(dtype)
    module_to_hf(module, dict(module.named_parameters()), tmp_path)
    read: dict[str, Any] = module_from_hf(module, tmp_path)
    assert torch.equal(read["weight"].full(), module.weight.float())
    assert module_from_hf(module, tmp_path, dtype=dtype)["weight"].dtype == dtype
    _, apply = sf.from_module(module)
    step = sf.sharded_step(lambda p, x: apply(p, x).square().mean(), sf.optim.adamw(1e-5, weight_decay=0.0))
    state, x = step.init(read), torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(60):
        state, _ = step(state, x)
    assert (state.params["weight"].full_tensor() - module.weight.float()).abs().mean() > 4e-4


def test_each_tensor_keeps_the_dtype_of_its_file(tmp_path: pathlib.Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    kinds = {"0.weight": torch.bfloat16, "0.bias": torch.float32, "1.weight": torch.float16}
    module_to_hf(module, dict(module.named_parameters()), tmp_path / "a", dtype=kinds)
    assert {name: x.dtype for name, x in Archive(tmp_path / "a").items()} == kinds
    assert file_dtypes(module, tmp_path / "a") == kinds
    again = module_from_hf(module, tmp_path / "a")
    assert {x.dtype for x in again.values()} == {torch.float32}
    module_to_hf(module, again, tmp_path / "b", dtype=file_dtypes(module, tmp_path / "a"))
    assert (tmp_path / "b/model.safetensors").read_bytes() == (tmp_path / "a/model.safetensors").read_bytes()


def test_parameters_must_be_finite_and_masks_need_not(tmp_path: pathlib.Path) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.full((2,), -torch.inf))
    params = dict(module.named_parameters())
    module_to_hf(module, params, tmp_path)
    with torch.no_grad():
        module.bias[0] = torch.nan
    with pytest.raises(ValueError, match=r"in 1 of 3 leaves[\s\S]*bias: 1 of 2 elements"):
        module_to_hf(module, params, tmp_path)
    assert not torch.isnan(Archive(tmp_path).box("bias", [(0, 2)])).any()
    with pytest.raises(ValueError, match="must be finite"):  # a value that overflows in the files' dtype
        module_to_hf(module, params | {"bias": torch.full((2,), 1e6)}, tmp_path, dtype=torch.float16)
