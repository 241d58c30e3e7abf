"""The fine-tuning example end to end: its length, one process, two, interrupted, and its files in transformers."""

import ast
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tokenize

import pytest

from shardfn.checkpoint import steps

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/finetune.py"
ALONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

transformers = pytest.importorskip("transformers")
pytest.importorskip("tensorboard")


def code_lines(path: pathlib.Path) -> int:
    """Lines that hold code: no comments, no blank lines, no docstring of the module."""
    text = path.read_text()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    doc = ast.parse(text).body[0]
    return len(found - set(range(doc.lineno, (doc.end_lineno or 0) + 1)))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with a tiny Llama, its tokenizer, and data."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("given")
    words = [f"{n} plus {k} is {n + k}".split() for n in range(6) for k in range(6)]
    vocabulary = {word: i for i, word in enumerate(sorted({"<unk>", *(w for line in words for w in line)}))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), num_key_value_heads=2, bos_token_id=None, eos_token_id=None, **sizes
    )
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    lines = [json.dumps({"text": " ".join(line[: 2 + i % 4])}) + "\n" for i, line in enumerate(words)]
    (folder / "train.jsonl").write_text("".join(lines[:31]))
    (folder / "validation.jsonl").write_text("".join(lines[31:]))  # five rows: the last batch has one
    return folder


def run(launcher: list[str], given: pathlib.Path, out: pathlib.Path, *options: str) -> list[dict[str, float]]:
    data = [str(given / name) for name in ("model", "train.jsonl", "validation.jsonl")]
    rest = ["--out", str(out), "--batch", "4", "--length", "8", "--lr", "0.03", *options]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*launcher, str(EXAMPLE), *data, *rest], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_it_has_45_lines() -> None:
    assert code_lines(EXAMPLE) <= 45
    page = (ROOT / "docs/training_loop.md").read_text()
    for name in ("examples/finetune.py", "docs/finetune_accelerate.py"):
        assert f"{code_lines(ROOT / name)} lines" in page


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [ALONE, TWO], ids=["alone", "two"])
def test_it_trains_and_transformers_reads_its_files(
    launcher: list[str], given: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    rows = run(launcher, given, tmp_path, "--steps", "6", "--every", "3")
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["validation_loss"] < rows[2]["validation_loss"]
    assert {"learning_rate", "tokens_per_s", "grad_norm"} <= rows[0].keys()
    assert steps(tmp_path / "checkpoints") == [3, 6] and len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    total = count = 0.0
    for line in (given / "validation.jsonl").read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"]
        total += float(model(input_ids=ids, labels=ids).loss.detach()) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    # The files hold the masters, in float32; the run measured in bfloat16.
    assert total / count == pytest.approx(rows[-1]["validation_loss"], rel=2e-2)


@pytest.mark.nightly
def test_a_run_that_goes_on_ends_as_one_that_was_not_interrupted(given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    whole = run(TWO, given, tmp_path / "whole", "--steps", "6", "--every", "2")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for found in (tmp_path / "again/checkpoints").glob("*6"):
        shutil.rmtree(found)
    shutil.rmtree(tmp_path / "again/model")
    assert steps(tmp_path / "again/checkpoints") == [4]
    again = run(TWO, given, tmp_path / "again", "--steps", "6", "--every", "2")
    for a, b in zip(whole, again, strict=True):
        assert {**a, "tokens_per_s": 0} == {**b, "tokens_per_s": 0}
    one, two = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "again"))
    assert one == two


@pytest.mark.nightly
def test_one_rank_and_two_compute_the_same(given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    one = run(ALONE, given, tmp_path / "one", "--steps", "3", "--every", "3")
    two = run(TWO, given, tmp_path / "two", "--steps", "3", "--every", "3")
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2)
    assert one[-1]["validation_loss"] == pytest.approx(two[-1]["validation_loss"], rel=2e-2)
