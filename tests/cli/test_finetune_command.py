"""Covers `shardfn finetune`: training, adapters, two ranks, a kill in the middle, and every bad argument."""

import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from shardfn.cli import main
from tests.cli.test_generate import smol_python as smol_python

ROOT = pathlib.Path(__file__).parents[2]
ALONE = [sys.executable, "-m", "shardfn"]

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


def torchrun(ranks: int) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "shardfn"]
    return [sys.executable, *run]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with a tiny Llama, its tokenizer, and data of each kind."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("given")
    lines = [f"{n} plus {k} is {n + k}".split() for n in range(5) for k in range(5)]
    vocabulary = {word: i for i, word in enumerate(["<unk>", "</s>", *sorted({w for line in lines for w in line})])}
    inner: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), num_key_value_heads=2, bos_token_id=None, eos_token_id=1, **sizes
    )
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(folder / "model")
    texts = [{"text": " ".join(line[: 2 + i % 4])} for i, line in enumerate(lines)]
    pairs = [{"prompt": " ".join(line[:4]), "completion": " " + line[4]} for line in lines]
    chats = [
        {
            "messages": [
                {"role": "user", "content": " ".join(line[:4])},
                {"role": "assistant", "content": line[4]},
            ]
        }
        for line in lines
    ]
    for name, rows in {"train": texts[:20], "val": texts[20:], "pairs": pairs, "chats": chats}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words(given: pathlib.Path, out: pathlib.Path, *more: str) -> list[str]:
    options = {
        "validation": given / "val.jsonl",
        "out": out,
        "steps": 6,
        "every": 2,
        "batch": 4,
        "length": 8,
        "lr": 0.03,
    }
    told = [x for name, value in options.items() for x in (f"--{name}", str(value))]
    return ["finetune", str(given / "model"), str(given / "train.jsonl"), *told, *more]


def rows_of(out: pathlib.Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(launcher: list[str], *args: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*launcher, *args], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_it_plans_trains_and_leaves_a_model(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(given, tmp_path)) == 0
    assert capsys.readouterr().out.startswith(f"# {given / 'model'} on 1 x ")  # the estimate comes first
    rows = rows_of(tmp_path)
    assert len(rows) == 6 and rows[-1]["validation_loss"] < rows[1]["validation_loss"] and rows[-1]["step"] == 6
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.generation_config.max_new_tokens == 5
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    # Once more, it has nothing left to do.
    assert main(words(given, tmp_path)) == 0 and rows_of(tmp_path) == rows


@pytest.mark.nightly
def test_adapters_of_a_file_of_options(given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('lora = 2\nlora-alpha = 4\nmerge = true\nlr = 0.5\nprecision = "fp32"\n')
    assert main(words(given, tmp_path / "out", "--config", str(toml))) == 0
    rows = rows_of(tmp_path / "out")
    assert rows[-1]["validation_loss"] < rows[1]["validation_loss"]
    assert max(row["learning_rate"] for row in rows) <= 0.03  # the command line goes before the file
    config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4) and len(config["target_modules"]) == 14
    start = transformers.AutoModelForCausalLM.from_pretrained(given / "model")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    same = {n: torch.equal(p, merged.get_parameter(n)) for n, p in start.named_parameters()}
    assert (
        not same["model.layers.0.mlp.up_proj.weight"] and same["lm_head.weight"] and same["model.embed_tokens.weight"]
    )
    # A checkpoint has the adapters alone.
    from shardfn.checkpoint import stored

    assert not any("base" in path for path in stored(tmp_path / "out/checkpoints"))


@pytest.mark.nightly
def test_adapters_beside_weights_in_codes(given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    more = ["--lora", "2", "--quantization", "int4", "--merge", "--steps", "2", "--lr", "1e-9", "--precision", "fp32"]
    assert main(words(given, tmp_path, *more)) == 0
    start = transformers.AutoModelForCausalLM.from_pretrained(given / "model")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.weight"
    change = (merged.get_parameter(name) - start.get_parameter(name)).abs().max() / start.get_parameter(
        name
    ).abs().max()
    assert 0.01 < change < 0.2 and torch.equal(
        merged.get_parameter("lm_head.weight"), start.get_parameter("lm_head.weight")
    )


@pytest.mark.nightly
def test_a_run_beside_codes_goes_on_where_it_was_ended(given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from safetensors.torch import load_file

    from shardfn.checkpoint import steps

    asked = words(given, tmp_path, "--lora", "2", "--quantization", "int4", "--validation", "")
    assert main(asked) == 0
    want = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert all(bool(x.any()) for x in want.values())
    newest = max(steps(tmp_path / "checkpoints"))
    shutil.rmtree(tmp_path / f"checkpoints/step_{newest:06}")
    shutil.rmtree(tmp_path / "adapter")
    assert newest == 6 and max(steps(tmp_path / "checkpoints")) == 4 and main(asked) == 0
    got = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.nightly
@pytest.mark.parametrize("width", [16, 64])
def test_tensor_parallel_beside_codes(width: int, given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Rows of 16 elements share one scale; of 64, two ranks have one group each."""
    from safetensors.torch import load_file

    model = tmp_path / "model"
    shutil.copytree(given / "model", model)
    config = transformers.AutoConfig.from_pretrained(model)
    config.update({"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // 4})
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    more = [
        "--lora",
        "2",
        "--quantization",
        "int4",
        "--merge",
        "--precision",
        "fp32",
        "--steps",
        "4",
        "--validation",
        "",
    ]

    def asked(out: str, *others: str) -> list[str]:
        told = words(given, tmp_path / out, *more, *others)
        return [told[0], str(model), *told[2:]]

    tp = asked("two", "--mesh", "dp=1,tp=2")
    run(ALONE, *asked("one"))
    run(torchrun(2), *tp)
    for a, b in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    one, two = (load_file(tmp_path / out / "model/model.safetensors") for out in ("one", "two"))
    assert torch.equal(one["lm_head.weight"], two["lm_head.weight"])
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-5), name
    adapters = tmp_path / "two/adapter/adapter_model.safetensors"
    want = adapters.read_bytes()
    shutil.rmtree(tmp_path / "two/checkpoints/step_000004")
    shutil.rmtree(tmp_path / "two/adapter")
    run(torchrun(2), *tp)
    assert adapters.read_bytes() == want


@pytest.mark.nightly
def test_the_result_is_the_checkpoint_with_the_lowest_validation_loss(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardfn.checkpoint import best, steps

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    # The rate of the first step is 0, and those of the next ones destroy the model.
    assert main(words(given, tmp_path, "--steps", "8", "--every", "1", "--lr", "8", "--remat")) == 0
    losses = {int(row["step"]): row["validation_loss"] for row in rows_of(tmp_path)}
    lowest = min(losses, key=lambda step: losses[step])
    assert lowest < 7 and best(tmp_path / "checkpoints", "validation_loss") == lowest
    assert steps(tmp_path / "checkpoints") == [lowest, 7, 8]
    assert f"The result is that of step {lowest}, with the lowest validation loss." in capsys.readouterr().out
    assert "fine-tuning" in terminal.getvalue() and "8/8" in terminal.getvalue()
    assert equals_checkpoint(tmp_path, lowest) and not equals_checkpoint(tmp_path, 8)


@pytest.mark.nightly
def test_adapters_are_of_the_checkpoint_with_the_lowest_validation_loss(
    given: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from safetensors.torch import load_file

    from shardfn.checkpoint import best, read_leaves, stored

    more = ["--steps", "4", "--every", "1", "--lr", "1000", "--lora", "2", "--precision", "fp32"]
    assert main(words(given, tmp_path, *more)) == 0
    before = (tmp_path / "adapter/adapter_model.safetensors").read_bytes()
    # Once more, it has nothing left to do, and the same result.
    assert main(words(given, tmp_path, *more)) == 0
    assert (tmp_path / "adapter/adapter_model.safetensors").read_bytes() == before
    lowest = best(tmp_path / "checkpoints", "validation_loss")
    assert lowest is not None and lowest < 4
    adapters = load_file(tmp_path / "adapter/adapter_model.safetensors").values()
    for step in (lowest, 4):
        paths = [path for path in stored(tmp_path / "checkpoints", step) if path.startswith("params")]
        kept = [x for _, x in read_leaves(tmp_path / "checkpoints", paths, step)]
        assert len(kept) == len(adapters)
        assert all(any(x.shape == y.shape and torch.equal(x, y) for y in adapters) for x in kept) == (step == lowest)


def equals_checkpoint(out: pathlib.Path, step: int) -> bool:
    """Whether the resulting model has the weights of a checkpoint."""
    from shardfn.checkpoint import read_leaves

    module = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    paths = {f"opt_state.master['{name}']": x for name, x in module.named_parameters()}
    return all(torch.equal(paths[path], x) for path, x in read_leaves(out / "checkpoints", paths, step))


@pytest.mark.day("chats")
@pytest.mark.parametrize("kind", ["pairs", "chats"])
def test_prompts_and_chats(kind: str, given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    told = words(given, tmp_path, "--steps", "2")
    told[2] = str(given / f"{kind}.jsonl")
    assert main(told) == 0 and len(rows_of(tmp_path)) == 2


def test_a_prompt_is_not_predicted(given: pathlib.Path) -> None:
    from shardfn.cli._finetune_rows import encode_row

    tokenizer = transformers.AutoTokenizer.from_pretrained(given / "model")
    row = {"prompt": "1 plus 2 is", "completion": " 3"}
    made = encode_row(tokenizer, row, length=8)
    assert len(made["tokens"]) == 6 and made["tokens"][-1] == tokenizer.eos_token_id
    assert made["labels"] == [-100] * 4 + made["tokens"][4:]
    assert encode_row(tokenizer, row, length=8, learn="everything") == {
        "tokens": made["tokens"],
        "labels": made["tokens"],
    }
    ask, answer = ({"role": role, "content": text} for role, text in (("user", "1 plus 2 is"), ("assistant", "3")))
    for chat in ({"messages": [ask, answer]}, {"prompt": [ask], "completion": [answer]}):
        assert encode_row(tokenizer, chat, length=8)["labels"] == made["labels"][:5]
    with pytest.raises(ValueError, match=r"token ids must be below 4, the size of the model's vocabulary, got"):
        encode_row(tokenizer, row, length=8, vocab_size=4)


def test_a_token_across_the_prompt_and_the_completion_is_not_learnt_in_half() -> None:
    from shardfn.cli._finetune_rows import encode_row

    class Pairs:
        """Tokens of two letters where they fit."""

        eos_token_id = 0

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            ids = [ord(text[i]) + sum(map(ord, text[i + 1 : i + 2])) for i in range(0, len(text), 2)]
            return {"input_ids": [1] * add_special_tokens + ids}

    made = encode_row(Pairs(), {"prompt": "abc", "completion": "d"}, length=8)
    first = Pairs()("abc")["input_ids"]
    assert made["tokens"] == [*first, ord("d"), 0] and made["labels"] == [-100] * len(first) + [ord("d"), 0]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lora", [False, True])
def test_killed_and_started_again_it_has_the_same_losses(
    ranks: int, lora: bool, given: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    launcher = ALONE if ranks == 1 else torchrun(2)
    more = ["--steps", "12", *(["--lora", "2"] if lora else [])]
    run(launcher, *words(given, tmp_path / "whole", *more))
    cut = words(given, tmp_path / "cut", *more)
    child = subprocess.Popen([*launcher, *cut], env=environment(), stdout=subprocess.DEVNULL)
    log, deadline = tmp_path / "cut/metrics.jsonl", time.monotonic() + 240
    while not (log.exists() and len(log.read_text().splitlines()) >= 5) and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.01)
    # torchrun's workers have sessions of their own: without their parent they would continue.
    workers = pathlib.Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    for pid in (child.pid, *map(int, workers)):
        os.kill(pid, signal.SIGKILL)
    child.wait()
    run(launcher, *cut)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    name = "adapter/adapter_model.safetensors" if lora else "model/model.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["dp=2", "dp=1,tp=2"])
def test_two_ranks_equal_one(mesh: str, given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    more = ["--precision", "fp32", "--lora", "2", "--steps", "4"]
    run(ALONE, *words(given, tmp_path / "one", *more))
    run(torchrun(2), *words(given, tmp_path / "two", *more, "--mesh", mesh))
    for a, b in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_every_bad_argument_is_named_before_anything_is_loaded(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardfn.cli._finetune.load_model", lambda *_: pytest.fail("loaded"))
    lost, empty = tmp_path / "lost", tmp_path / "empty.jsonl"
    empty.write_text("\n")
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"txt": "a"}\n')
    cases = {
        (): "",
        ("--steps", "0"): "--steps must be at least 1, got 0",
        ("--lr", "0"): "--lr must be above 0, and finite, got 0.0",
        ("--lr", "nan"): "--lr must be above 0, and finite, got nan",
        ("--weight-decay", "-1"): "--weight-decay must be 0 or more, and finite, got -1.0",
        ("--log-every", "0"): "--log-every must be at least 1, got 0",
        ("--learn", "answer"): "--learn answer: it is answers or everything. Did you mean 'answers'?",
        ("--dtype", "bf16"): "--dtype bf16: it is float32, bfloat16, float16. Did you mean 'bfloat16'?",
        ("--accumulate", "5"): "--accumulate 5: 5 microbatches on dp=1 need as many rows",
        ("--merge",): "--merge has no effect without --lora RANK",
        ("--quantization", "int4"): "--quantization has no effect without --lora RANK",
        ("--lora", "2", "--quantization", "int3"): "--quantization int3: it must be int8 or int4",
        ("--lora", "-1"): "--lora -1: the rank is 1 or more",
        ("--zero", "4"): "--zero 4: a stage is 0, 1, 2 or 3",
        ("--precision", "bf61"): "--precision bf61: it is bf16 or fp32. Did you mean 'bf16'?",
        (
            "--mesh",
            "dp=2",
        ): "takes 2 ranks, and there are 1; start it by torchrun --nproc-per-node 2 -m shardfn finetune",
        ("--mesh", "pp=2"): "axis 'pp' is not one of dp, tp",
        ("--mesh", "dp"): "dp needs a size, as in dp=2",
        ("--validation", str(lost)): f"--validation {lost} is not a file",
        ("--validation", str(empty)): "empty.jsonl has no lines",
        (
            "--validation",
            str(odd),
        ): "odd.jsonl:1: expected 'text', or 'prompt' and 'completion', or 'messages', got ['txt']",
        ("--config", str(lost)): "No such file",
    }
    for more, text in cases.items():
        if more:
            assert main(words(given, tmp_path / "out", *more)) == 2
            error = capsys.readouterr().err
            assert text in error and "Traceback" not in error, (more, error)
    bare = words(given, tmp_path / "out")
    assert main([bare[0], "meta/llama", str(lost), *bare[3:]]) == 2
    error = capsys.readouterr().err  # all at once
    assert "MODEL meta/llama is not a directory; fetch one first: hf download meta/llama" in error
    assert f"TRAIN {lost} is not a file" in error
    toml = tmp_path / "run.toml"
    toml.write_text('stepz = 3\nlr = "fast"\n')
    assert main([*bare, "--config", str(toml)]) == 2
    error = capsys.readouterr().err
    assert (
        "'stepz' is not an option. Did you mean 'steps'?" in error
        and "lr = 'fast' is of type str; write a float" in error
    )


@pytest.mark.nightly
def test_a_run_that_goes_on_keeps_its_settings(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(given, tmp_path, "--steps", "2")) == 0
    capsys.readouterr()
    assert main(words(given, tmp_path, "--steps", "2", "--lr", "0.5")) == 2
    assert (
        "has a run with lr=0.03, and now it is 0.5: pass the same to continue, or another --out"
        in capsys.readouterr().err
    )


# Trains adapters of a model beside its weights in codes, and beside a copy whose same weights are the decoded ones.
BESIDE_DECODED = """
import json, pathlib, sys
import torch
from safetensors.torch import load_file, save_file
from shardfn.cli import main
from shardfn.kernels import quantize_blocks, dequantize_blocks

model, out = map(pathlib.Path, sys.argv[1:])
weights, decoded = load_file(model / "model.safetensors"), out / "decoded"
for name, w in weights.items():
    if "_proj." in name:
        weights[name] = dequantize_blocks(quantize_blocks(w, "int4"), w.shape[1])
decoded.mkdir(parents=True)
for path in model.glob("*.json"):
    (decoded / path.name).write_bytes(path.read_bytes())
save_file(weights, decoded / "model.safetensors", metadata={"format": "pt"})
lines = [{"prompt": f"What is {n} plus {n}?", "completion": f" It is {2 * n}."} for n in range(8)]
(out / "lines.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
how = "--lora 4 --steps 3 --batch 2 --length 16 --lr 1e-3 --precision fp32".split()
for name, path, more in (("coded", model, ["--quantization", "int4"]), ("plain", decoded, [])):
    assert main(["finetune", str(path), str(out / "lines.jsonl"), "--out", str(out / name), *how, *more]) == 0
"""


@pytest.mark.nightly
def test_smollm2_beside_codes_trains_as_beside_its_decoded_weights(smol_python: str, tmp_path: pathlib.Path) -> None:
    unpack = [smol_python, str(ROOT / "examples/rlhf/chat.py"), str(tmp_path / "smol")]
    for command in (unpack, [smol_python, "-c", BESIDE_DECODED, str(tmp_path / "smol"), str(tmp_path)]):
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    coded, plain = rows_of(tmp_path / "coded"), rows_of(tmp_path / "plain")
    assert len(coded) == 3 and coded[-1]["loss"] < coded[0]["loss"]
    assert [(x["loss"], x["grad_norm"]) for x in coded] == [(x["loss"], x["grad_norm"]) for x in plain]
    name = "adapter/adapter_model.safetensors"
    assert (tmp_path / "coded" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_good_checkpoints(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardfn.checkpoint import read_leaves, steps, stored

    asked = words(
        given, tmp_path, "--steps", "20", "--every", "1", "--lr", "1e38", "--validation", "", "--log-every", "1"
    )
    for _ in range(2):  # and so does the same command again
        assert main(asked) == 1
        told = capsys.readouterr()
        assert re.search(r"error: the loss .* must be finite, got NaN or infinity in steps (\d+) to (\d+)", told.err)
        assert "(not finite: skipped)" in told.out and "Traceback" not in told.err
        assert not (tmp_path / "model").exists() and len(rows_of(tmp_path)) < 20
    for step in steps(tmp_path / "checkpoints"):
        paths = [path for path in stored(tmp_path / "checkpoints", step) if path.startswith("params")]
        assert paths and all(bool(x.isfinite().all()) for _, x in read_leaves(tmp_path / "checkpoints", paths, step))
    nan = tmp_path / "nan"
    shutil.copytree(given / "model", nan)
    from safetensors.torch import load_file, save_file

    weights = load_file(nan / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, nan / "model.safetensors", {"format": "pt"})
    told = words(given, tmp_path / "out", "--validation", "", "--max-nonfinite", "2")
    assert main([told[0], str(nan), *told[2:]]) == 1
    assert "in steps 1 to 2" in (err := capsys.readouterr().err) and "look at the weights of MODEL" in err


def test_files_keep_the_dtypes_of_the_model(given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from safetensors.torch import load_file, save_file

    start = load_file(given / "model/model.safetensors")
    mixed = tmp_path / "mixed"
    shutil.copytree(given / "model", mixed)
    kinds = {name: torch.float32 if "norm" in name else torch.bfloat16 for name in start}
    start = {name: x.to(kinds[name]) for name, x in start.items()}
    save_file(start, mixed / "model.safetensors", {"format": "pt"})
    more = ["--steps", "2", "--validation", ""]
    for out, own in (("full", []), ("merged", ["--lora", "2", "--merge"]), ("wide", ["--dtype", "float32"])):
        told = words(given, tmp_path / out, *more, *own)
        assert main([told[0], str(mixed), *told[2:]]) == 0
        made = load_file(tmp_path / out / "model/model.safetensors")
        wanted = dict.fromkeys(kinds, torch.float32) if out == "wide" else kinds
        assert {name: x.dtype for name, x in made.items()} == wanted
        assert json.loads((tmp_path / out / "model/config.json").read_text())["dtype"] == (
            "float32" if out == "wide" else "bfloat16"
        )
    merged = load_file(tmp_path / "merged/model/model.safetensors")
    assert all(torch.equal(merged[name], x) for name, x in start.items() if "_proj" not in name)
    # The model is the base with the adapters, which are not rounded: added in float32, and rounded once.
    found = load_file(tmp_path / "merged/adapter/adapter_model.safetensors")
    path = "model.layers.0.mlp.up_proj"
    a, b = (found[f"base_model.model.{path}.lora_{letter}.weight"] for letter in "AB")
    assert a.dtype == torch.float32 and not torch.equal(a, a.bfloat16().float())
    want = start[f"{path}.weight"].float() + b @ a
    assert torch.equal(merged[f"{path}.weight"], want.bfloat16())


def test_a_float32_model_that_is_trained_in_bf16_is_merged_without_rounding(
    given: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from safetensors.torch import load_file

    assert main(words(given, tmp_path, "--steps", "2", "--validation", "", "--lora", "2", "--merge")) == 0
    start, made = (load_file(x / "model/model.safetensors") for x in (given, tmp_path))
    assert all(torch.equal(made[name], x) for name, x in start.items() if "_proj" not in name)


def test_other_data_in_the_same_file_is_refused(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = tmp_path / "train.jsonl"
    shutil.copy(given / "train.jsonl", train)
    told = words(given, tmp_path / "out", "--steps", "2", "--validation", "")
    asked = [*told[:2], str(train), *told[3:]]
    assert main(asked) == 0
    settings = (tmp_path / "out/run.json").read_text()
    with train.open("a") as file:
        file.write('{"text": "1 plus 2"}\n')
    capsys.readouterr()
    assert main(asked) == 2
    error = capsys.readouterr().err
    assert "has a run on other data: pass its TRAIN to continue, or another --out" in error
    assert "examples must be 20, as in the saved position, got 21" in error and "Traceback" not in error
    assert (tmp_path / "out/run.json").read_text() == settings


def test_one_step_trains_and_lines_are_printed(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(given, tmp_path / "one", "--steps", "1")) == 0
    assert rows_of(tmp_path / "one")[0]["learning_rate"] == pytest.approx(0.03)
    capsys.readouterr()
    assert main(words(given, tmp_path / "out", "--steps", "7", "--log-every", "3", "--every", "5")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1]) for line in lines] == [1, 3, 5, 6, 7]
    losses = {int(row["step"]): row["loss"] for row in rows_of(tmp_path / "out")}
    assert lines[1].startswith(f"step 3 of 7: loss {losses[3]:.4f}, grad_norm ") and "tokens_per_s" in lines[1]
    assert "validation_loss" in lines[2] and "validation_loss" not in lines[3]


def test_mistakes_that_only_the_model_shows_have_no_traceback(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(model: pathlib.Path, *more: str) -> str:
        told = words(given, tmp_path / "out", "--validation", "", *more)
        assert main([told[0], str(model), *told[2:]]) == 2
        return capsys.readouterr().err

    rank = error(given / "model", "--lora", "500")
    assert "model.layers.0.mlp.up_proj.weight (24, 16) has a smaller side than rank=500" in rank
    broken = tmp_path / "broken"
    shutil.copytree(given / "model", broken)
    (broken / "tokenizer.json").write_text("{}")
    assert "MODEL: transformers cannot load its tokenizer" in error(broken)
    (broken / "config.json").write_text('{"model_type": "no-such"}')
    shutil.copy(given / "model/tokenizer.json", broken)
    assert "MODEL: transformers cannot load its config.json" in error(broken)
    assert not (tmp_path / "out/run.json").exists()


def test_rows_whose_answers_are_cut_off_are_named(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1 plus 2 is " * 9, "completion": "3"}) + "\n")
    told = words(given, tmp_path / "out", "--validation", "")
    assert main([*told[:2], str(tmp_path / "long.jsonl"), *told[3:]]) == 1
    assert "have no token to learn within --length 8: pass a larger one" in capsys.readouterr().err


def test_an_interrupted_run_of_an_earlier_version_is_not_continued_with_other_labels(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = words(given, tmp_path, "--steps", "2", "--validation", "")
    asked = [*told[:2], str(given / "chats.jsonl"), *told[3:]]
    assert main([*asked, "--learn", "everything"]) == 0
    record = json.loads((tmp_path / "run.json").read_text())
    del record["learn"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert main(asked) == 2
    assert "which learnt all tokens of messages: pass --learn everything to" in capsys.readouterr().err
    assert main([*asked, "--learn", "everything"]) == 0


@pytest.mark.nightly
def test_a_run_of_an_earlier_version_has_its_quantization_as_codes(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(given, tmp_path, "--steps", "1", "--validation", "", "--lora", "2", "--quantization")
    assert main([*asked, "int4"]) == 0
    record = json.loads((tmp_path / "run.json").read_text())
    record["codes"] = record.pop("quantization")
    (tmp_path / "run.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert main([*asked, "int8"]) == 2
    assert "has a run with quantization='int4', and now it is 'int8'" in capsys.readouterr().err
    assert main([*asked, "int4"]) == 0


@pytest.mark.nightly
def test_several_files_are_mixed_by_weights_and_a_run_goes_on_with_the_same(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(out: str, *more: str, weights: tuple[str, str] = (":3", ":1")) -> int:
        told = words(given, tmp_path / out, "--validation", "", *more)
        files = [
            str(given / name) + weight for name, weight in zip(("train.jsonl", "pairs.jsonl"), weights, strict=True)
        ]
        return main([*told[:2], *files, *told[3:]])

    assert run("whole", "--steps", "4") == 0 and run("parts", "--steps", "4", weights=("", "")) == 0
    losses = [[row["loss"] for row in rows_of(tmp_path / out) if "loss" in row] for out in ("whole", "parts")]
    assert losses[0] and losses[0] != losses[1]
    record = json.loads((tmp_path / "whole/run.json").read_text())["train"]
    assert [text.rpartition("/")[2] for text in record] == ["train.jsonl:3", "pairs.jsonl:1"]
    capsys.readouterr()
    assert run("whole", "--steps", "4", weights=(":2", ":1")) == 2
    assert "has a run with train=" in capsys.readouterr().err


def test_wrong_mixtures_are_refused(
    given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, train = words(given, tmp_path), str(given / "train.jsonl")
    for files, text in (
        ([f"{train}:2", str(given / "val.jsonl")], "all files of TRAIN must have a weight, or none"),
        ([f"{train}:-1", f"{given}/val.jsonl:1"], "the weight must be above 0, and finite"),
        ([f"{train}:1", f"{train}:2"], "each file of TRAIN must be given once"),
        ([f"{train}:x", f"{given}/val.jsonl:1"], "train.jsonl:x is not a file"),
    ):
        assert main([*told[:2], *files, *told[3:]]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_adapters_of_some_layers_with_dropout(ranks: int, given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = ["--lora", "2", "--lora-target", "q_proj,v_proj", "--lora-rank-pattern", "q_proj=4", "--loggers", "csv"]
    options += ["--lora-dropout", "0.3", "--schedule", "linear", "--warmup", "1", "--clip", "0", "--precision", "fp32"]
    command = words(given, tmp_path / "out", *options)
    if ranks == 1:
        assert main(command) == 0
    else:
        run(torchrun(ranks), *command)
    described = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert sorted(x.rpartition(".")[2] for x in described["target_modules"])[0] == "q_proj"
    assert described["r"] == 2 and set(described["rank_pattern"].values()) == {4}
    rows = rows_of(tmp_path / "out")
    assert (tmp_path / "out/metrics.csv").is_file() and rows[1]["learning_rate"] == pytest.approx(0.03)
    same = [row["loss"] for row in rows]
    if ranks == 1:
        assert main([*words(given, tmp_path / "dry", *options), "--lora-dropout", "0.0"]) == 0
        assert [row["loss"] for row in rows_of(tmp_path / "dry")] != same
    else:
        run(ALONE, *words(given, tmp_path / "alone", *options))
        assert [row["loss"] for row in rows_of(tmp_path / "alone")] == pytest.approx(same, rel=1e-5)


def test_patience_ends_a_run(given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--patience", "2", "--steps", "40", "--every", "1", "--lr", "3.0", "--schedule", "constant"]
    assert main(words(given, tmp_path, *options, "--warmup", "0")) == 0
    rows = rows_of(tmp_path)
    best = min(range(len(rows)), key=lambda n: rows[n]["validation_loss"])
    assert len(rows) < 40 and len(rows) - best - 1 == 2
    assert f"The result is that of step {best + 1}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--schedule", "cosin"], "--schedule must be cosine, linear, constant, got 'cosin'. Did you mean 'cosine'"),
        (["--warmup", "-2"], "--warmup must be at least 0, or -1"),
        (["--patience", "-1"], "--patience must be at least 0"),
        (["--loggers", "csv,wandbb"], "got 'wandbb'. Did you mean 'wandb'"),
        (["--lora-target", "q_proj"], "--lora-target has no effect without --lora"),
        (["--lora", "2", "--lora-target", "q_prj"], "--lora-target must be parts of"),
        (["--lora", "2", "--lora-rank-pattern", "q_proj"], "--lora-rank-pattern must be as in"),
        (["--lora", "2", "--lora-dropout", "1"], "--lora-dropout must be at least 0 and below 1"),
        (["--lora", "2", "--eval-tasks", "arc_easy"], "--eval-tasks needs the whole model"),
    ],
)
def test_wrong_options_are_named(
    options: list[str], pattern: str, given: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(given, tmp_path, *options)) == 2
    assert pattern in capsys.readouterr().err
