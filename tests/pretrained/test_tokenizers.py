"""Covers tokenizers of GGUF files: ids and texts of transformers' tokenizer of the file, without transformers."""

import pathlib
from typing import Any

import pytest

from shardfn.interop import GGUFFile
from shardfn.pretrained._tokenizers import load_byte_level
from tests.interop.test_gguf import file_of

WORDS = "the theme of these other themes is \u00e9t\u00e9 12345 it's they'll don't"
TEXTS = (WORDS, "  the\n\n\tthe  <|im_start|>user the<think> \u4e2d\u6587 \U0001f600", "", "a")
CHAT = "{% for m in messages %}{{ bos_token }}{{ m['role'] | tojson }}\n{{ m['content'] }}{% endfor %}{{ eos_token }}"


def _write_file(path: pathlib.Path, pre: str | None, **changes: Any) -> GGUFFile:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([WORDS] * 9, trainer)
    merges = [line.split(" ") for line in _list_merges(made)]
    vocab = made.get_vocab()
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), "<|im_start|>", "<|endoftext|>", "<think>"]
    kinds = [1] * len(vocab) + [3, 3, 4]
    fields: dict[str, Any] = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"}
    fields |= {} if pre is None else {"tokenizer.ggml.pre": pre}
    fields |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [" ".join(m) for m in merges]}
    fields |= {"tokenizer.ggml.eos_token_id": len(vocab) + 1, "tokenizer.ggml.bos_token_id": len(vocab)}
    fields |= {"tokenizer.ggml.token_type": kinds, "tokenizer.chat_template": CHAT} | changes
    path.write_bytes(file_of(fields, {}))
    return GGUFFile(path)


def _list_merges(made: Any) -> list[str]:
    import json

    given = json.loads(made.to_str())["model"]["merges"]
    return [m if isinstance(m, str) else " ".join(m) for m in given]


@pytest.mark.nightly
@pytest.mark.parametrize("pre", [None, "gpt-2", "llama-bpe", "qwen2"])
def test_ids_and_chats_are_those_of_transformers(tmp_path: pathlib.Path, pre: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    file = _write_file(tmp_path / "model.gguf", pre)
    text = load_byte_level(file, frozenset())
    want = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert text is not None and text.chat is not None
    for given in TEXTS:
        assert text.encode(given) == want(given)["input_ids"], given
        assert text.plain(given) == want(given, add_special_tokens=False)["input_ids"]
        assert text.tokenizer.decode(text.plain(given)) == want.decode(text.plain(given), skip_special_tokens=True)
    messages = [{"role": "user", "content": "<the> \u00e9"}]
    assert text.chat(messages) == want.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.ends == {want.eos_token_id} and text.size == len(want)


def test_digits_of_smollm_are_single_and_special_tokens_whole(tmp_path: pathlib.Path) -> None:
    text = load_byte_level(_write_file(tmp_path / "model.gguf", "smollm"), frozenset({7}))
    assert text is not None
    assert [text.tokenizer.id_to_token(i) for i in text.encode("12<think>")] == ["1", "2", "<think>"]
    assert text.token("<|endoftext|>") in text.ends and 7 in text.ends


def test_unknown_tokenizers_are_left_to_transformers(tmp_path: pathlib.Path) -> None:
    for changes in ({"tokenizer.ggml.pre": "unknown"}, {"tokenizer.ggml.model": "llama"}):
        assert load_byte_level(_write_file(tmp_path / "model.gguf", None, **changes), frozenset()) is None
