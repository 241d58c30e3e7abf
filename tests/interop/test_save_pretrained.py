"""Covers `export` beside the `save_pretrained` of transformers: the same files, byte for byte, that load back."""

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn.testing import distributed

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL = {"vocab_size": 17, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = torch.tensor([[3, 4, 5, 6], [6, 5, 4, 3]])


def _model(name: str, tie: bool) -> Any:
    torch.manual_seed(0)
    t = transformers
    if name == "gpt2":
        config: Any = t.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=8, tie_word_embeddings=tie, **SPECIAL)
        model = t.GPT2LMHeadModel(config)
    elif name == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(tie_word_embeddings=tie, **SIZES, **SPECIAL))
    else:
        qwen = t.Qwen2Config(num_key_value_heads=1, tie_word_embeddings=tie, **SIZES, **SPECIAL)
        model = t.Qwen2ForCausalLM(qwen)
    model.generation_config.update(do_sample=True, temperature=0.7, max_new_tokens=3)
    return model.eval()


def _tokenizer() -> Any:
    import tokenizers
    import tokenizers.pre_tokenizers as pre

    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c", "hello"])}
    inner: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    made.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    return made


def _state(module: nn.Module, mesh: sf.Mesh | None = None) -> Any:
    params, apply = sf.from_module(module)

    def loss(p: Any, x: torch.Tensor) -> Any:
        return apply(p, input_ids=x, labels=x, use_cache=False).loss

    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=3))
    state = step.init(params)
    return step(state, TOKENS[step.rows(2)] if mesh is not None else TOKENS)[0]


def _files(directory: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _assert_same(ours: pathlib.Path, theirs: pathlib.Path) -> None:
    a, b = _files(ours), _files(theirs)
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


@pytest.mark.day("llama-True", "llama-False", "qwen2-True")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_the_directory_is_that_of_save_pretrained(name: str, tie: bool, tmp_path: pathlib.Path) -> None:
    module, tokenizer = _model(name, tie), _tokenizer()
    state = _state(module)
    sf.export(state, module, tmp_path / "ours", tokenizer=tokenizer)
    sf.to_module(state, module)
    module.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "ours").iterdir()
    }
    assert (tmp_path / "ours" / "chat_template.jinja").is_file()
    _assert_same(tmp_path / "ours", tmp_path / "theirs")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(input_ids=TOKENS).logits, module(input_ids=TOKENS).logits)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "ours")
    assert generation.temperature == 0.7 and generation.max_new_tokens == 3
    words, theirs = (transformers.AutoTokenizer.from_pretrained(tmp_path / who) for who in ("ours", "theirs"))
    assert words("a hello")["input_ids"] == theirs("a hello")["input_ids"]  # a class that Qwen2's config chooses
    chat = [{"role": "user", "content": "hello"}]
    assert words.apply_chat_template(chat, tokenize=False) == "user: hello"


def test_several_files_have_the_same_index(tmp_path: pathlib.Path) -> None:
    module = _model("llama", False)
    sf.export(_state(module), module, tmp_path / "ours", file_bytes=2000)
    sf.to_module(_state(module), module)
    module.save_pretrained(tmp_path / "theirs", max_shard_size=2000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").is_file()
    ours, theirs = _files(tmp_path / "ours"), _files(tmp_path / "theirs")
    assert ours["model.safetensors.index.json"] == theirs["model.safetensors.index.json"]


def test_the_configuration_has_the_dtype_of_the_files(tmp_path: pathlib.Path) -> None:
    module = _model("llama", True)
    state = _state(module)
    sf.export(state, module, tmp_path / "ours", dtype=torch.bfloat16)
    sf.to_module(state, module)
    module.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    _assert_same(tmp_path / "ours", tmp_path / "theirs")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


def _parallel(module: Any) -> Any:
    return nn.parallel.DistributedDataParallel(module)


def _compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


WRAPS = {
    "parallel": _parallel,
    "compiled": _compiled,
    "both": lambda m: _compiled(_parallel(m)),
    "either": lambda m: _parallel(_compiled(m)),
}


@distributed(world=2)
def test_wrapped_modules_are_unwrapped(tmp_path: pathlib.Path) -> None:
    """`module.` and `_orig_mod.` are in no name, on the way in and on the way out."""
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    for kind, wrap in WRAPS.items():
        module = _model("qwen2", True)
        wrapped: Any = wrap(module)
        state = _state(module, mesh)
        params, _ = sf.from_module(wrapped) if kind == "parallel" else (dict(module.named_parameters()), None)
        assert set(params) == {name for name, _ in module.named_parameters()}
        sf.export(state, wrapped, tmp_path / kind)
        sf.to_module(state, wrapped)
        if mesh.rank == 0:
            module.save_pretrained(tmp_path / "theirs" / kind)
            _assert_same(tmp_path / kind, tmp_path / "theirs" / kind)
        torch.distributed.barrier()


def test_a_module_without_configuration_has_weights_alone(tmp_path: pathlib.Path) -> None:
    module = nn.Linear(2, 1)
    sf.interop.module_to_hf(module, dict(module.named_parameters()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(TypeError, match="has no save_pretrained: pass a tokenizer or processor"):
        sf.interop.module_to_hf(module, dict(module.named_parameters()), tmp_path, tokenizer="gpt2")
