"""Covers encoder-decoder models of transformers in `LLM` and `shardfn generate`: text in, text out."""

import json
import pathlib
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import shardfn as sf  # noqa: E402
from shardfn.cli import main  # noqa: E402
from shardfn.data import read_wav  # noqa: E402
from shardfn.inference import Sampling  # noqa: E402
from tests.cli.test_generate import WORDS, tokenizer_of  # noqa: E402
from tests.data.test_audio import draw_sound, write_wav  # noqa: E402
from tests.interop.test_hf_seq2seq import make_whisper  # noqa: E402

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
    (tmp_path / "config.json").write_text(json.dumps(told | {"model_type": "pegasus"}))
    with pytest.raises(ValueError, match=r"must be one of \('t5', 'mt5', 'bart', 'whisper'\), got 'pegasus'"):
        sf.LLM(str(tmp_path))


def write_whisper(folder: pathlib.Path) -> Any:
    """A tiny random Whisper of sounds of 0.3 s, with a tokenizer that has its special tokens."""
    marks = ["<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    tokenizer = tokenizer_of(WORDS)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(folder)
    start, *rest = map(tokenizer.convert_tokens_to_ids, marks)
    model = make_whisper(folder, torch.float32, **{"decoder_start_token_id": start}, vocab_size=len(tokenizer))
    how = model.generation_config
    how.lang_to_id, how.task_to_id = {"<|en|>": rest[0], "<|de|>": rest[1]}, {"transcribe": rest[2]}
    how.no_timestamps_token_id, how.is_multilingual, how.suppress_tokens = rest[3], True, [4, 6, start, *rest]
    how.save_pretrained(folder)
    return model


@pytest.mark.parametrize("language", ["en", pytest.param("de", marks=pytest.mark.nightly)])
def test_transcripts_are_those_of_transformers(language: str, tmp_path: pathlib.Path) -> None:
    model = write_whisper(tmp_path)
    llm = sf.LLM(str(tmp_path), running=3, buckets=(2, 8))
    extract = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    sounds = [draw_sound(4800), draw_sound(4000, 1), 3 * draw_sound(2000, 2)]
    how = Sampling(max_tokens=9, temperature=0.0)
    found = llm.transcribe([write_wav(x) for x in sounds], how, language=language)
    for sound, one in zip(sounds, found, strict=True):
        samples = read_wav(write_wav(sound)).numpy()
        given = extract(samples, sampling_rate=16_000, return_tensors="pt", max_length=4800).input_features
        options: Any = {"max_new_tokens": 9, "do_sample": False, "num_beams": 1, "language": language}
        want = model.generate(given, task="transcribe", return_timestamps=False, **options)[0].tolist()
        drawn, want = ([t for t in tokens if t != 2] for tokens in (one.tokens, want))  # 2 is the end
        assert want[-len(drawn) :] == drawn if drawn else len(want) in (0, 4)
        assert not {4, 6} & {*drawn}
    assert llm.transcribe(write_wav(sounds[1]), how, language=language)[0].tokens == found[1].tokens
    with pytest.raises(ValueError, match=r"language must be a code that the tokenizer has, such as 'en', got 'xx'"):
        llm.transcribe(write_wav(sounds[0]), language="xx")
    with pytest.raises(ValueError, match=r"a sound must have from 0 to 0.3 s, got 0.50 s"):
        llm.transcribe(write_wav(draw_sound(8000)))
    with pytest.raises(ValueError, match=r"source must be features, float \[30, 8\], got a list"):
        llm.generate("ship")
    llm.engine.close()
