"""Covers the example of a server: a chat with a run of train_gpt."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from shardfn import core, interop
from shardfn.checkpoint import save
from shardfn.models import gpt

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = gpt.Config.llama_like(vocab_size=256, num_layers=1, d_model=32, num_heads=2, d_ff=None, max_len=64)


@pytest.mark.nightly
@pytest.mark.parametrize("typed", [False, True])
def test_it_chats(tmp_path: pathlib.Path, typed: bool) -> None:
    row = {"model": interop.hf_config(CONFIG), "per_head": False, "tokenizer": "bytes"}
    (tmp_path / "model.json").write_text(json.dumps(row))
    save(tmp_path / "checkpoints", gpt.init(CONFIG, core.key(0)), 3, at="params")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "examples/serve.py", str(tmp_path), "--max-tokens", "8"]
    done = subprocess.run(
        [*command, *([] if typed else ["--ask", "abc"])],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        input="abc\ndef\n",
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert "ready at http://127.0.0.1:" in done.stderr and done.stdout.strip()
    assert done.stdout.count("> ") >= (3 if typed else 0)
