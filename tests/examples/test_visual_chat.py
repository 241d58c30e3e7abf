"""Covers `examples/visual_chat.py`: chats have right answers, and the program writes a report."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shardfn.inference import Sampling
from shardfn.pretrained import LLM

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import visual_chat  # pyright: ignore[reportMissingImports]

    yield visual_chat
    sys.modules.pop("visual_chat")


def test_chats_have_right_answers(example: Any) -> None:
    for kind in example.KINDS.values():
        chats = example.Chats(*kind, "a test")
        for i in range(20):
            chat = chats[i]
            words = [example.WORDS[t] for t in chat["tokens"]]
            learnt = [word for word, label in zip(words, chat["labels"], strict=True) if label >= 0]
            answers = learnt[::2]
            assert learnt[1::2] == ["<end>"] * len(answers)
            assert len(chat["labels"]) == len(words)
            assert len(answers) == 2 * kind[0] == words.count("?")
            assert words.count("<image>") == len(chat["images"]) <= 4
            assert all(words[j + 1] in answers for j, word in enumerate(words) if word == "?")
            assert chats[i]["tokens"] == chat["tokens"]
        assert example.collate([chats[i] for i in range(8)])["images"].shape[1:] == (3, example.SIZE, example.SIZE)


@pytest.mark.nightly
def test_it_writes_a_report(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    sizes = ["--steps", "3", "--tower-steps", "5", "--batch", "4", "--held-out", "8", "--layers", "1"]
    command = [sys.executable, str(ROOT / "examples/visual_chat.py"), *sizes, "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["rule"] for row in rows] == ["separate", "causal"]
    assert all(0 <= row["several rounds"] <= 1 for row in rows)
    assert "several images" in (tmp_path / "report.md").read_text()
    llm = LLM(str(tmp_path / "separate"), image_root=str(tmp_path / "images"), cache_gib=0.01)
    assert llm.engine.runner._decoder.config is not None and llm.text.images is not None
    assert llm.text.images.rule.rule == "separate"
    url = (tmp_path / "images" / "red-circle.png").as_uri()
    shown = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "first colour first ?"}]
    [found] = llm.chat([{"role": "user", "content": shown}], Sampling(max_tokens=1, temperature=0.0))
    assert len(found.tokens) == 1
