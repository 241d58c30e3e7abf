"""Covers models of sequence classification: logits of transformers, classes of their config, rewards, and refusals."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import shardfn as sf  # noqa: E402
from shardfn import interop  # noqa: E402
from shardfn.core import key, make_mesh  # noqa: E402
from shardfn.models import gpt  # noqa: E402
from shardfn.pretrained import ModelSettings, load_model  # noqa: E402
from tests.cli.test_generate import WORDS, tokenizer_of  # noqa: E402

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 3 + len(WORDS), "num_key_value_heads": 2, "max_position_embeddings": 24}
GPT2 = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 3 + len(WORDS),
    "n_positions": 24,
}
TEXTS = [f"{WORDS[0]} {WORDS[1]}", WORDS[2], " ".join(WORDS[:3])]


def save(folder: pathlib.Path, kind: str, **more: object) -> Any:
    """Writes a model of sequence classification with its tokenizer."""
    tokenizer_of(WORDS).save_pretrained(folder)
    transformers.set_seed(4)
    sizes = GPT2 if kind == "GPT2" else SIZES
    config = getattr(transformers, f"{kind}Config")(initializer_range=0.5, pad_token_id=0, **sizes, **more)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "more", "activate"),
    [
        ("Llama", {"num_labels": 1}, torch.sigmoid),
        ("GPT2", {"id2label": {0: "bad", 1: "fair", 2: "good"}}, lambda x: x.softmax(-1)),
        pytest.param(
            *("Mistral", {"num_labels": 2, "problem_type": "multi_label_classification"}, torch.sigmoid),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_classes_are_those_of_transformers(
    tmp_path: pathlib.Path, kind: str, more: dict[str, Any], activate: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = save(tmp_path, kind, **more)
    llm = sf.LLM(str(tmp_path), running=7, buckets=(8,))
    assert llm.classifier is not None
    with torch.no_grad():
        want = torch.cat([activate(model(torch.tensor([llm.text.encode(text)])).logits) for text in TEXTS])
    torch.testing.assert_close(llm.classify(TEXTS), want, rtol=1e-5, atol=1e-6)
    assert llm.classify(TEXTS[1])[0].tolist() == llm.classify(TEXTS)[1].tolist()  # bits of the prompt alone
    assert llm.classifier.classes.labels == tuple(model.config.id2label.values())
    assert llm.text.pair is not None
    assert llm.text.pair(WORDS[0], WORDS[1]) == tokenizer_of(WORDS)(WORDS[0], WORDS[1])["input_ids"]
    with pytest.raises(ValueError, match="Call classify"):
        llm.generate(TEXTS)
    job = ModelSettings(model=str(tmp_path), kind="files")
    with pytest.raises(ValueError, match="is a model of sequence classification"):
        load_model(job, make_mesh({}, alone=True))


def test_a_reward_is_the_first_logit(tmp_path: pathlib.Path) -> None:
    tokenizer_of(WORDS).save_pretrained(tmp_path)
    config = gpt.Config.llama_like(
        vocab_size=3 + len(WORDS), num_layers=1, d_model=16, num_heads=2, d_ff=32, max_len=24, tie_embeddings=False
    )
    params = gpt.init(config, key(0))
    interop.gpt_to_hf(tmp_path, config, params)
    job = ModelSettings(model=str(tmp_path), kind="files", reward_head=True, classifies=True)
    made = load_model(job, make_mesh({}, alone=True))
    assert made.classifier is not None and made.classifier.classes == (("reward",), "identity")
    engine = sf.inference.Engine(made.decoder, made.params)
    ids = [[3, 4, 5], [6]]
    found = torch.cat(list(map(made.classifier.compute_logits, engine.embed(ids))))
    want = torch.stack([gpt.apply(config, params, torch.tensor([x]))[0, -1, 0] for x in ids])
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    path = tmp_path / "config.json"
    interop.gpt_to_hf(tmp_path, tied := dataclasses.replace(config, tie_embeddings=True), gpt.init(tied, key(0)))
    with pytest.raises(ValueError, match="must be a table of floats apart from the embeddings"):
        load_model(job, make_mesh({}, alone=True))
    assert json.loads(path.read_text())["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem_type": "ranking"}, "problem_type must be one of 'regression'"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must have the keys 0 to 0, got"),
    ],
)
def test_a_wrong_config(tmp_path: pathlib.Path, change: dict[str, Any], words: str) -> None:
    save(tmp_path, "Llama", num_labels=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=words):
        load_model(ModelSettings(model=str(tmp_path), kind="files", classifies=True), make_mesh({}, alone=True))


def test_files_without_the_head(tmp_path: pathlib.Path) -> None:
    save(tmp_path, "Llama", num_labels=1)
    weights = interop.Archive(tmp_path)
    rest = {name: weights[name] for name in weights if name != "score.weight"}
    values = {name: weights.box(name, [(0, n) for n in x.shape]) for name, x in rest.items()}
    with interop.ArchiveWriter(tmp_path, {name: (x.dtype, tuple(x.shape)) for name, x in values.items()}) as writer:
        for name, x in values.items():
            writer.put(name, x)
    with pytest.raises(ValueError, match=r"score\.weight is missing"):
        interop.classifier_from_hf(tmp_path)
