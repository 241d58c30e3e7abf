"""Covers `shardfn.LLM`: text in, text out, as by the engine of the directory's model."""

import json
import pathlib

import pytest
import torch

transformers = pytest.importorskip("transformers")

import shardfn as sf  # noqa: E402
from shardfn.inference import Sampling  # noqa: E402
from tests.cli.test_generate import WORDS, tokenizer_of  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny Llama with its tokenizer, and values of sampling."""
    folder = tmp_path_factory.mktemp("llm")
    tokenizer_of(WORDS).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 3 + len(WORDS), "num_key_value_heads": 2, "max_position_embeddings": 24}
    transformers.set_seed(4)
    config = transformers.LlamaConfig(bos_token_id=1, eos_token_id=2, initializer_range=0.5, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.5, "top_k": 4}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path) -> sf.LLM:
    return sf.LLM(str(folder), running=3, buckets=(2, 8))


def test_completions_are_those_of_the_engine(llm: sf.LLM) -> None:
    first, second = f"{WORDS[0]} {WORDS[1]}", WORDS[2]
    how = Sampling(max_tokens=5, temperature=0.0)
    [one] = llm.generate(first, how)
    both = llm.generate([first, second], how)
    ids = [1, 3, 4]  # <s> and the words
    assert both[0] == one == llm.generate(ids, how)[0] == llm.generate([ids], how)[0]
    assert one == llm.engine.generate([ids], Sampling(max_tokens=5, temperature=0.0, stop_tokens=(2,)))[0]
    assert one.text and len(both) == 2


def test_defaults_are_those_of_the_directory(llm: sf.LLM) -> None:
    assert llm.sampling == Sampling(temperature=0.5, top_k=4)
    prompt = WORDS[0]
    assert llm.generate(prompt) == llm.generate(prompt, Sampling(temperature=0.5, top_k=4))
    each = [Sampling(max_tokens=4, seed=i) for i in range(2)]
    assert llm.generate([prompt, prompt], each) == [llm.generate(prompt, how)[0] for how in each]


def test_a_chat_is_a_completion_of_its_template(llm: sf.LLM) -> None:
    how = Sampling(max_tokens=4, temperature=0.0)
    message = {"role": WORDS[3], "content": WORDS[4]}
    [made] = llm.chat([message], how)
    assert made == llm.generate([[1, 6, 7]], how)[0] and llm.chat([[message], [message]], how) == [made, made]


def test_scores_are_cosines_of_embeddings(llm: sf.LLM) -> None:
    rows = llm.embed(list(WORDS[:3]))
    assert torch.allclose(rows.norm(dim=1), torch.ones(3))
    want = (rows[:1] * rows).sum(1)
    assert torch.allclose(llm.score(WORDS[0], list(WORDS[:3])), want, atol=1e-6)
    assert torch.allclose(llm.score(list(WORDS[:3]), list(WORDS[:3])), torch.ones(3))
    with pytest.raises(ValueError, match="score: 2 texts and 3 pairs"):
        llm.score(list(WORDS[:2]), list(WORDS[:3]))


def test_wrong_arguments(folder: pathlib.Path, llm: sf.LLM) -> None:
    with pytest.raises(TypeError, match=r"there is no argument 'max_model_len'\. Write context=8"):
        sf.LLM(str(folder), max_model_len=8)
    with pytest.raises(ValueError, match="prompt must have from 1 to 23 tokens, got 25"):
        llm.generate(" ".join([WORDS[0]] * 24))
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens=16, got 20"):
        llm.generate(WORDS[0], Sampling(min_tokens=20))
