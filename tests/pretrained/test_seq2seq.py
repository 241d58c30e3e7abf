"""Covers encoder-decoder models of transformers in `LLM` and `shardfn generate`: text in, text out."""

import json
import pathlib
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import shardfn as sf  # noqa: E402
from shardfn.cli import main  # noqa: E402
from shardfn.inference import Sampling  # noqa: E402
from tests.cli.test_generate import WORDS, tokenizer_of  # noqa: E402

VOCAB = 3 + len(WORDS)
_T5: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "n_positions": 32}
_BART: dict[str, Any] = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 24}
for half in ("encoder", "decoder"):
    _BART |= {f"{half}_ffn_dim": 24, f"{half}_attention_heads": 4}
MODELS = {
    "t5": ("T5", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "bart": ("Bart", _BART | {"forced_eos_token_id": None, "init_std": 0.3}),
}


def write_model(name: str, folder: pathlib.Path) -> Any:
    """A tiny random model with its tokenizer."""
    tokenizer_of(WORDS).save_pretrained(folder)
    start, sizes = MODELS[name]
    transformers.set_seed(4)
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    config = getattr(transformers, f"{start}Config")(vocab_size=VOCAB, **ends, **sizes)
    model = getattr(transformers, f"{start}ForConditionalGeneration")(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_greedy_texts_are_those_of_transformers(
    name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(name, tmp_path)
    llm = sf.LLM(str(tmp_path), running=3, buckets=(2, 8))
    texts, how = [f"{WORDS[0]} {WORDS[3]} {WORDS[1]}", WORDS[2]], Sampling(max_tokens=8, temperature=0.0)
    found = llm.generate(texts, how)
    for text, one in zip(texts, found, strict=True):
        ids = torch.tensor([llm.text.encode(text)])
        want = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=1)[0, 1:].tolist()
        assert one.tokens == want
    assert llm.generate(texts[1], how)[0] == found[1]
    [[scored]] = llm.engine.score([llm.text.encode(texts[0])], [[found[0].tokens[:3]]])
    assert scored.logprobs == tuple(found[0].logprobs[:3])
    with pytest.raises(ValueError, match="this decoder does not give its hidden states"):
        llm.embed(texts)
    llm.engine.close()
    assert main(["generate", str(tmp_path), *texts, "--max-tokens", "8", "--temperature", "0", "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in printed] == [one.text for one in found]


def test_others_are_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model("t5", tmp_path)
    with pytest.raises(ValueError, match=r"is an encoder-decoder model, which takes no --weights"):
        sf.LLM(str(tmp_path), quantization="int8")
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | {"model_type": "whisper"}))
    with pytest.raises(ValueError, match=r"model_type must be one of \('t5', 'mt5', 'bart'\), got 'whisper'"):
        sf.LLM(str(tmp_path))
