"""Covers models of transformers on the ranks of `shardfn generate`: a rank reads its own parts of the files."""

import json
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfn import core
from shardfn.core import Draw
from shardfn.inference import Engine, Sampling, fit_quantization, hf_decoder, limits_of
from shardfn.pretrained import ModelSettings, _load, _tokenizers
from shardfn.pretrained._load import load_model, make_engine
from shardfn.testing import distributed
from tests.cli.test_generate import WORDS, tokenizer_of
from tests.inference.test_hf_parts import counted

transformers = pytest.importorskip("transformers")


def job_of(folder: pathlib.Path, ranks: int, **more: Any) -> ModelSettings:
    """The job of a model that `models.gpt` does not have, whose files the first rank writes."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tokenizer_of(WORDS).save_pretrained(folder)
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"vocab_size": 3 + len(WORDS), "max_position_embeddings": 16}
        transformers.set_seed(0)
        config = transformers.GPTNeoXConfig(bos_token_id=1, eos_token_id=2, initializer_range=0.5, **sizes)
        transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return ModelSettings(model=str(folder), kind="files", ranks=ranks, **more)


@pytest.mark.nightly
@distributed(world=2)
def test_a_rank_of_two_reads_about_half(world: int, tmp_path: pathlib.Path) -> None:
    mesh, alone = core.make_mesh({"tp": 2}), core.make_mesh({}, alone=True)
    job = job_of(tmp_path, world)
    prompts, how = [[1, 3, 4], [5]], Sampling(max_tokens=5, temperature=0.0)
    with counted() as reads:
        served = load_model(job, mesh)
        assert not reads and all(isinstance(x, Draw) for x in served.params.values())
        limits = limits_of(served.decoder, context=16, cache_bytes=1 << 20)
        engine, _ = make_engine(job, served, limits, mesh, {})
        assert 0.5 < sum(reads) / (4 * served.size) < 0.6
        whole = load_model(job_of(tmp_path, 1), alone)
        one, _ = make_engine(job, whole, limits, alone, {})
    assert engine.generate(prompts, how) == one.generate(prompts, how)


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_codes_are_fitted_from_one_load(world: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, text = list[Any](), tmp_path / "text"
    module = _load.make_module
    monkeypatch.setattr(_load, "make_module", lambda *args: loads.append(args) or module(*args))
    text.write_text(" ".join(WORDS * 3))
    mesh, job = core.make_mesh({"tp": world}), job_of(tmp_path, world, weights="int4", fit=str(text))
    with counted() as reads:
        served = load_model(job, mesh)
        engine, _ = make_engine(job, served, limits_of(served.decoder, context=16, cache_bytes=1 << 20), mesh, {})
    assert len(loads) == 1 and served.plain is None
    assert sum(reads) == (4 * served.size if world > 1 else 0)  # alone, transformers reads them
    plain, params = hf_decoder(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    tokens = [1, *range(3, 11), *range(3, 11), *range(3, 11)]
    fitted = fit_quantization(plain, params, "int4", [tokens[:16], tokens[16:]])
    alone = Engine(served.decoder, fitted, mesh=mesh)
    how = Sampling(max_tokens=5, temperature=0.0)
    [got], [want] = (x.generate([[1, 3, 4]], how) for x in (engine, alone))
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)


def module_of(folder: pathlib.Path, axis: str | None = "tp", **more: Any) -> tuple[Any, Any]:
    return _load.make_module(folder, job_of(folder, 2, **more), axis)


def test_weights_are_read_whole_where_transformers_changes_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module_of(tmp_path, None)[1] is None
    module, params = module_of(tmp_path, dtype="bfloat16")
    assert {x.dtype for x in params.values()} == {torch.bfloat16}
    monkeypatch.setattr(type(module), "_keep_in_fp32_modules_strict", ["final_layer_norm"])
    module, params = module_of(tmp_path, dtype="bfloat16")
    assert params is None and module.get_parameter("gpt_neox.final_layer_norm.weight").dtype == torch.float32
    assert module_of(tmp_path)[1] is not None


def test_a_file_of_other_shapes_is_named(tmp_path: pathlib.Path) -> None:
    job = job_of(tmp_path, 2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 128}))
    words = rf"(?s)the files of {tmp_path} do not fit the GPTNeoXForCausalLM:.*dense_h_to_4h.weight is \(256, 64\)"
    with pytest.raises(ValueError, match=words):
        _load.make_module(tmp_path, job, "tp")


@pytest.mark.day(2)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "PreTrainedTokenizerFast"),
        ("gpt2", "GPT2Tokenizer"),
        ("qwen2", "Qwen2TokenizerFast"),
        ("qwen2", "LlamaTokenizer"),
        ("llama", "LlamaTokenizerFast"),
        ("mistral", "LlamaTokenizer"),
        ("gpt_neox", "GPTNeoXTokenizerFast"),
        ("of_nobody", "TokenizersBackend"),
        ("llama", None),
    ],
)
def test_a_tokenizer_is_that_of_its_models_whole_config(tmp_path: pathlib.Path, kind: str, name: str | None) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {x: i for i, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner: Any = Tokenizer(models.BPE(letters | {"he": 256}, [("h", "e")]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    made.chat_template = "{{ messages[0].content }}"
    made.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    settings = {key: value for key, value in settings.items() if value is not None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert (_tokenizers._tokenizer_config(tmp_path) is None) == (name is None)
    want = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    got = _tokenizers.load_tokenizer(tmp_path)
    assert type(got) is type(want) and got.get_vocab() == want.get_vocab()
    assert got.special_tokens_map == want.special_tokens_map and got.chat_template == want.chat_template
    assert got.encode(text := "hello, été\n <end>12") == want.encode(text)
