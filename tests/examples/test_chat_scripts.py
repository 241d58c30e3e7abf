"""SFT, DPO, KTO and rewards on conversations: rows under TRL's names, held-out metrics, adapters, and SmolLM2."""

import argparse
import dataclasses
import functools
import importlib
import json
import operator
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.checkpoint import steps
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed
from tests.cli.test_generate import smol_python as smol_python  # a fixture
from tests.examples.test_grpo_arithmetic import EXAMPLE, TWO, rows, run

NAMES = "chat", "chat_sft", "chat_dpo", "chat_kto", "chat_reward", "chat_grpo", "chat_ppo"
SFT, DPO = (EXAMPLE.with_name(f"chat_{name}.py") for name in ("sft", "dpo"))
CONFIG = gpt.Config.llama_like(vocab_size=256, num_layers=1, d_model=32, num_heads=2, d_ff=64, max_len=64)
ASK, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "a?"), ("assistant", "yes"), ("assistant", "no"))
)

JUDGED = [
    {"prompt": [ASK], "completion": [GOOD], "label": True},
    {"prompt": [ASK], "completion": [BAD], "label": False},
    {"prompt": "b?", "completion": [GOOD], "label": True},
    {"prompt": "Is it? ", "completion": "no, it is not", "label": False},
]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(SFT.parent))
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        if name not in before:
            del sys.modules[name]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of train_gpt.py without training, and rows."""
    folder = tmp_path_factory.mktemp("chat")
    row = {"model": sf.interop.hf_config(CONFIG), "per_head": CONFIG.per_head, "tokenizer": "bytes"}
    (folder / "model.json").write_text(json.dumps(row))
    sf.checkpoint.save(folder / "checkpoints", gpt.init(CONFIG, sf.key(0)), 3, at="params")
    pair = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    for name, made in (("sft", {"messages": [ASK, GOOD]}), ("dpo", pair), ("reward", pair)):
        (folder / f"{name}.jsonl").write_text((json.dumps(made) + "\n") * 4)
    lines = [json.dumps(row) + "\n" for row in JUDGED]
    (folder / "kto.jsonl").write_text("".join(lines))
    return folder


def tokens(text: str) -> list[int]:
    return list(text.encode())


CHAT = tokens("user: a?\0assistant: ")


@pytest.mark.parametrize(
    ("row", "text", "learnt"),
    [
        ({"messages": [ASK, GOOD, ASK, BAD]}, "user: a?\0assistant: yes\0user: a?\0assistant: no\0", "yes\0no\0"),
        ({"prompt": "a", "completion": "b"}, "ab\0", "b\0"),
        ({"prompt": [ASK, BAD, ASK], "completion": [GOOD]}, None, "yes\0"),
        ({"text": "abc"}, "abc\0", "abc\0"),
        ({"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "yes"}]}, None, "yes\0"),
        ({"instruction": "a?", "input": "b", "output": "c"}, "user: a?\n\nb\0assistant: c\0", "c\0"),
        ({"instruction": "a?", "input": "", "output": "c"}, "user: a?\0assistant: c\0", "c\0"),
        ({"question": "a?", "answer": "1 + 1\n#### 2"}, "user: a?\0assistant: 1 + 1\n#### 2\0", "1 + 1\n#### 2\0"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_rows_of_supervised_fine_tuning(
    parts: Any, files: pathlib.Path, row: Any, text: str | None, learnt: str
) -> None:
    model = parts["chat"].load(str(files), sf.make_mesh(alone=True))
    found = parts["chat"].example(model, row, 64)
    assert text is None or found["tokens"] == tokens(text)
    assert [x for x in found["labels"] if x != -100] == tokens(learnt)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, CHAT),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, CHAT),
        ({"prompt": "a?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, CHAT),
        ({"prompt": "Is it? ", "chosen": "yes", "rejected": "no"}, tokens("Is it? ")),
        ({"prompt": "Is it?", "chosen": "Is it? yes", "rejected": "Is it? no"}, tokens("Is it?")),
        ({"chosen": "Q: a? A: yes", "rejected": "Q: a? A: no"}, tokens("Q: a? A:")),
    ],
    ids=["messages", "implicit", "text-and-messages", "texts", "prompt-repeated", "implicit-texts"],
)
def test_rows_of_pairs(parts: Any, files: pathlib.Path, row: Any, prompt: list[int]) -> None:
    model = parts["chat"].load(str(files), sf.make_mesh(alone=True))
    found = parts["chat"].pair(model, row, 64)
    for (ids, start, _), text in zip(found, ("yes\0", "no\0"), strict=True):
        assert ids[:start] == prompt and bytes(ids[start:]).decode().strip(" ") == text


def test_rows_of_single_answers(parts: Any, files: pathlib.Path) -> None:
    model = parts["chat"].load(str(files), sf.make_mesh(alone=True))
    read = parts["chat_kto"].Judged(str(files / "kto.jsonl"), functools.partial(parts["chat"].judged, model, length=40))
    asked = [CHAT, CHAT, tokens("user: b?\0assistant: "), tokens("Is it? ")]
    said = ["yes\0", "no\0", "yes\0", "no, it is not\0"]
    # Rows 0 and 1 have one prompt, so both are read with the completion of row 2.
    others = ["yes\0", "yes\0"]
    for i, (own, other, wanted) in enumerate(read[i] for i in range(2)):
        assert own == (asked[i] + tokens(said[i]), len(asked[i]), False) and wanted == JUDGED[i]["label"]
        assert other == (asked[i] + tokens(others[i]), len(asked[i]), False)


def formula(beta: float, weights: tuple[float, float], params: Any, batch: Any) -> torch.Tensor:
    """1 - sigmoid(beta (gain - z)) of wanted answers, 1 - sigmoid(beta (z - gain)) of others; z = max(mean gain, 0)."""

    def gain(answers: Any, row: int) -> torch.Tensor:
        ids, start, num = answers["ids"][row : row + 1], int(answers["prompts"][row]), int(answers["lengths"][row])
        logs = [gpt.apply(CONFIG, params[name], ids)[0].log_softmax(-1) for name in ("policy", "reference")]
        return torch.stack([(logs[0] - logs[1])[i - 1, ids[0, i]] for i in range(start, start + num)]).sum()

    num, wanted = len(batch["wanted"]), batch["wanted"].tolist()
    z = torch.stack([gain(batch["other"], row) for row in range(num)]).mean().detach().clamp(min=0)
    signs = [1 if one else -1 for one in wanted]
    losses = [1 - torch.sigmoid(sign * beta * (gain(batch["own"], row) - z)) for row, sign in enumerate(signs)]
    return torch.stack([weights[0 if one else 1] * loss for one, loss in zip(wanted, losses, strict=True)]).mean()


def compare_with_formula(folder: pathlib.Path, mesh: sf.Mesh) -> None:
    chat, script = (importlib.import_module(name) for name in ("chat", "chat_kto"))
    model = chat.load(str(folder), sf.make_mesh(alone=True))
    read = script.Judged(str(folder / "kto.jsonl"), functools.partial(chat.judged, model, length=40))
    batch, trained = script.rows([read[i] for i in range(4)], 40), script.WithReference(model, 0, 0)
    loss = functools.partial(script.loss_of, CONFIG, trained, 0.5, (1.0, 2.0))
    one, two = (sf.tree_map(lambda x: x.double(), gpt.init(CONFIG, sf.key(i))) for i in (0, 7))
    found = []
    for policy, reference in ((one, two), (two, one)):  # with a z above 0, and with one of 0
        params = {"policy": policy, "reference": reference}
        how: dict[str, Any] = {"specs": trained.specs, "zero": sf.Zero(stage=3, persist_elements=0)}
        how |= {"mesh": mesh, "trainable": trained.trainable}
        alone = functools.partial(formula, 0.5, (1.0, 2.0))
        assert_parity(lambda *x: loss(*x)[0], sf.optim.sgd(0.1), params, [batch], reference=alone, **how)
        step = sf.sharded_step(loss, sf.optim.sgd(0.1), has_aux=True, **how)
        _, metrics = step(step.init(params), sf.tree_map(operator.itemgetter(step.rows(4)), batch))
        found.append(float(metrics["z"]))
    assert found[0] * found[1] < 0


@pytest.mark.nightly
def test_the_loss_of_single_answers_is_the_formula(parts: Any, files: pathlib.Path) -> None:
    del parts
    compare_with_formula(files, sf.make_mesh({"dp": 1}, device="cpu"))


@pytest.mark.nightly
@distributed(world=2)
def test_the_loss_of_single_answers_is_that_of_all_ranks(files: pathlib.Path) -> None:
    sys.path.insert(0, str(SFT.parent))
    with sf.make_mesh({"dp": 2}, device="cpu") as mesh:
        compare_with_formula(files, mesh)


def test_mistakes_in_rows_are_named(parts: Any, files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    chat, path = parts["chat"], tmp_path / "rows.jsonl"
    model = chat.load(str(files), sf.make_mesh(alone=True))
    path.write_text('{"text": "a"}\n{"title": "b"}\n')
    encoded = chat.Encoded(str(path), lambda row: chat.example(model, row, 64))
    with pytest.raises(ValueError, match=r"rows.jsonl: row 1: it has the columns \['title'\]; messages, or prompt"):
        encoded[1]
    with pytest.raises(ValueError, match=r"it has the columns \['text'\]; chosen and rejected are missing"):
        chat.pair(model, {"text": "a"}, 64)
    with pytest.raises(ValueError, match=r"it has the columns \['text'\]; completion and label and prompt are missing"):
        chat.judged(model, {"text": "a"}, 64)
    with pytest.raises(ValueError, match="its label is 'good'; it must be true for an answer that is wanted"):
        chat.judged(model, {"prompt": "a", "completion": "b", "label": "good"}, 64)
    path.write_text('{"prompt": "a", "completion": "b", "label": true}\n' * 3)
    read = parts["chat_kto"].Judged(str(path), lambda row: chat.judged(model, row, 64))
    with pytest.raises(ValueError, match=r"rows.jsonl: row 2: all rows have its prompt.*add some"):
        read[2]
    with pytest.raises(ValueError, match="its prompt has 20 tokens, and rows have 9; pass a larger --length"):
        chat.pair(model, {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, 9)
    model.learnt = lambda messages, start: sf.data.encode_answers(
        lambda part, reply: [len(part), *range(3 * len(part) - reply)], messages, start=start
    )
    with pytest.raises(ValueError, match=r"after the tokens that begin an answer.*'prompt': .*'completion'"):
        chat.example(model, {"messages": [ASK, GOOD, ASK]}, 64)


def arguments(files: pathlib.Path, kind: str, **changed: Any) -> argparse.Namespace:
    given = {"model": str(files), "train": str(files / f"{kind}.jsonl"), "held_out": str(files / f"{kind}.jsonl")}
    given |= {
        "lora": 0,
        "steps": 6,
        "every": 3,
        "batch": 4,
        "length": 40,
        "lr": 1e-2,
        "beta": 0.1,
        "weights": (1.0, 1.0),
        "zero": 3,
        "seed": 0,
    }
    return argparse.Namespace(**given | changed)


@pytest.mark.day("sft-2")
@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward"])
def test_a_run_learns_and_saves_a_model(
    parts: Any, files: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str, lora: int
) -> None:
    script = parts[f"chat_{kind}"]
    changed = {"lora": lora, "beta": 1.0 if kind == "kto" else 0.1, "out": str(tmp_path)}
    monkeypatch.setattr(script, "options", lambda _: arguments(files, kind, **changed))
    script.main()
    found = [row for row in rows(tmp_path) if "held_out/loss" in row]
    assert all(row["held_out/cut"] == 0 for row in found)
    assert [row["step"] for row in found] == [0, 3, 6] and found[-1]["held_out/loss"] < found[0]["held_out/loss"] - 0.01
    if kind == "dpo":
        assert abs(found[0]["held_out/loss"] - 0.6931472) < 1e-6  # policy and reference are one
        assert found[0]["held_out/accuracy"] == 0 and found[-1]["held_out/accuracy"] == 1
    if kind == "kto":
        assert found[0]["held_out/loss"] == 0.5 and found[0]["held_out/z"] == 0  # policy and reference are one
        assert found[-1]["held_out/wanted"] > found[-1]["held_out/other"] + 0.1
    again = parts["chat"].load(str(tmp_path / "model"), sf.make_mesh(alone=True))
    if kind == "reward":
        assert abs(found[0]["held_out/loss"] - 0.6931472) < 1e-6 and found[0]["held_out/margin"] == 0  # a head of zeros
        assert found[-1]["held_out/accuracy"] == 1
        scores = [value_of(again, messages) for messages in ([ASK, GOOD], [ASK, BAD])]
        assert abs(scores[0] - scores[1] - found[-1]["held_out/margin"]) < 1e-4
    first = parts["chat"].load(str(files), sf.make_mesh(alone=True))
    assert not torch.equal(again.params["blocks"][0]["wq"], first.params["blocks"][0]["wq"])
    assert steps(tmp_path / "checkpoints")[-1] == 6


def value_of(model: Any, messages: list[Any]) -> float:
    ids = torch.tensor([model.chat(messages, False)])
    return float(rl.last_values(gpt.apply(model.config, model.params, ids)[..., 0], torch.tensor([ids.shape[1]])))


def test_rows_that_are_cut_are_counted(parts: Any, files: pathlib.Path) -> None:
    model = parts["chat"].load(str(files), sf.make_mesh(alone=True))
    short, long = (parts["chat"].example(model, {"text": "abc" * num}, 8) for num in (1, 5))
    batch = parts["chat_sft"].padded(sf.data.pad(8), [short, long])
    assert batch["tokens"].shape == (2, 8) and batch["cut"].tolist() == [0, 1]
    pair = parts["chat"].pair(model, {"prompt": "a", "chosen": "b", "rejected": "c" * 9}, 8)
    batch = parts["chat_dpo"].rows([pair], 8)
    assert batch["chosen"]["cut"].tolist() == [0] and batch["rejected"]["cut"].tolist() == [1]


def rewards_of(parts: Any, files: pathlib.Path, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of chat_reward.py, whose values are not 0."""
    monkeypatch.setattr(parts["chat_reward"], "options", lambda _: arguments(files, "reward", out=str(folder)))
    parts["chat_reward"].main()
    return str(folder / "model")


@pytest.mark.nightly
def test_grpo_rewards_the_form_of_answers(parts: Any, files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = importlib.import_module("chat_grpo")
    model = parts["chat"].load(str(files), sf.make_mesh(alone=True), batch_invariant=True)
    for text, parts_of_three in (("Yes.\0", 3), ("Yes.", 1), ("yes.\0", 2), ("Yes. No.\0", 2), ("Yes\0", 2), ("", 0)):
        assert script.reward(model, CHAT, tokens(text)) == parts_of_three / 3, text
    assert script.reward(model, CHAT, tokens("It is 12.\0"), "12") == 1
    assert script.reward(model, CHAT, tokens("It is 12 or 13.\0"), "12") == 0
    args = argparse.Namespace(
        lora=0, iterations=1, epochs=2, prompts=2, answers=2, tokens=4, beta=0.1, lr=1e-3, zero=0, seed=0
    )
    args.out, args.questions = str(tmp_path), None
    script.train(args, sf.make_mesh(alone=True), model)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2] and found[0]["exact"] == 1 and found[0]["kl"] == 0


def test_grpo_takes_questions_of_a_file(parts: Any, files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    chat, script, path = parts["chat"], importlib.import_module("chat_grpo"), tmp_path / "questions.jsonl"
    model = chat.load(str(files), sf.make_mesh(alone=True), batch_invariant=True)
    rows_of_file: list[Any] = [
        {"prompt": "a?"},
        {"prompt": [ASK], "answer": 7},
        {"question": "a?", "answer": "x #### 3"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_file))
    found = list(chat.Encoded(str(path), lambda row: chat.question(model, row)))
    assert found == [(CHAT, None), (CHAT, 7), (CHAT, "3")]
    with pytest.raises(ValueError, match=r"it has the columns \['text'\]; prompt, or question and answer, are needed"):
        chat.question(model, {"text": "a"})
    args = argparse.Namespace(lora=0, iterations=1, epochs=1, prompts=3, answers=2, tokens=4, beta=0.1, lr=1e-3, zero=0)
    args.seed, args.out, args.questions = 0, str(tmp_path), str(path)
    script.train(args, sf.make_mesh(alone=True), model)
    [row] = rows(tmp_path)
    assert row["exact"] == 1 and row["missing"] == 0


@pytest.mark.parametrize("lora", [0, 2])
def test_grpo_takes_a_model_of_rewards(
    parts: Any, files: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, lora: int
) -> None:
    script, found = importlib.import_module("chat_grpo"), list[tuple[rl.Rollout, Any]]()
    rewards, values = rewards_of(parts, files, tmp_path / "reward", monkeypatch), script.values

    def kept(model: Any, step: Any, state: Any, rollout: rl.Rollout) -> torch.Tensor:
        out = values(model, step, state, rollout)
        found.append((rollout._replace(rewards=out), sf.tree_map(torch.clone, sf.unshard(state.params["reward"]))))
        return out

    monkeypatch.setattr(script, "values", kept)
    given = ["chat_grpo.py", str(files), "--rewards", rewards, "--out", str(tmp_path / "run"), "--lora", str(lora)]
    options = ["--iterations", "2", "--prompts", "2", "--answers", "2", "--tokens", "4"]
    monkeypatch.setattr(sys, "argv", [*given, *options])
    script.main()
    model = parts["chat"].load(rewards, sf.make_mesh(alone=True), batch_invariant=True)
    for (rollout, params), row in zip(found, rows(tmp_path / "run"), strict=True):
        for i in range(4):
            ids = torch.tensor([[*rollout.tokens(i)[0], *rollout.tokens(i)[1]]])
            value = gpt.apply(model.config, model.params, ids)[0, -1, 0]
            assert torch.equal(rollout.rewards[i], value) and value != 0
        assert abs(row["reward"] - float(rollout.rewards.mean())) < 1e-6
        for x, y in zip(sf.tree_leaves(params), sf.tree_leaves(model.params), strict=True):
            assert torch.equal(x, y)  # it does not learn


def test_a_model_of_rewards_reads_whole_conversations(parts: Any, files: pathlib.Path) -> None:
    script, model = importlib.import_module("chat_grpo"), parts["chat"].load(str(files), sf.make_mesh(alone=True))
    rollout = rl.empty_rollout(2, 24, 4)
    for i, answer in enumerate((tokens("yes\0"), tokens("no"))):
        rollout.ids[i, : 18 + len(answer)] = torch.tensor([*CHAT, *answer][-18 - len(answer) :])
        rollout.prompts[i], rollout.lengths[i], rollout.ended[i] = 18, len(answer), i == 0
    for tail in ([], tokens("\n\n")):
        behind = functools.partial(lambda tail, *x: model.chat(*x) + tail * (not x[1]), tail)
        ids, lengths = script.whole(dataclasses.replace(model, chat=behind), rollout)
        assert lengths.tolist() == [22 + len(tail), 20]
        for i, end in enumerate((tail, [])):
            assert ids[i].tolist()[: int(lengths[i])] == [*rollout.tokens(i)[0], *rollout.tokens(i)[1], *end]
    other = dataclasses.replace(model, vocabulary={"a": 0})
    with pytest.raises(
        ValueError, match=r"check_tokenizers: .* For example id 0 is .*encode the text with the other one"
    ):
        script.check_same(model, other)
    other = dataclasses.replace(model, chat=lambda messages, reply: tokens("b"))
    with pytest.raises(ValueError, match=r"of the policy writes 'user: a.*of the model of rewards 'b'; train"):
        script.check_same(model, other)


STAGES = ["--steps", "2", "--batch", "4", "--iterations", "2", "--prompts", "2", "--answers", "2", "--tokens", "4"]


@pytest.mark.nightly
def test_three_stages_by_one_command(parts: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out = importlib.import_module("chat_ppo"), tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["chat_ppo.py", *STAGES, "--out", str(out)])
    script.main()
    found = rows(out / "ppo")
    assert [row["step"] for row in found] == [1, 2, 3, 4] and found[0]["actor/exact"] == found[2]["actor/exact"] == 1
    assert found[0]["ptx/loss"] == pytest.approx(0.5 * found[0]["ptx/text"]) and 0 <= found[0]["form"] <= 1
    report = (out / "report.md").read_text()
    assert "| question | before | ppo | average |" in report and report.count("'user: Name a ") == 6
    assert (out / "curves.svg").stat().st_size > 1000
    mesh = sf.make_mesh(alone=True)
    sft, ppo, average = (parts["chat"].load(str(out / name / "model"), mesh) for name in ("sft", "ppo", "average"))
    for a, x, y in zip(*(sf.tree_leaves(x.params) for x in (average, sft, ppo)), strict=True):
        assert (a - x).norm() < (y - x).norm()  # behind the actor
    script.main()  # stages 1 and 2 are read
    assert rows(out / "sft")[-1]["step"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize("lora", [0, 4])
def test_stage_3_goes_on_after_a_kill(tmp_path: pathlib.Path, lora: int) -> None:
    options = [*STAGES, "--iterations", "4", "--save-every", "1", "--lora", str(lora), "--out"]
    script, program = str(SFT.with_name("chat_ppo.py")), [sys.executable]
    env = os.environ | {"PYTHONPATH": str(SFT.parents[2])}
    for name in ("whole", "killed"):
        command = [*program, script, *options, str(tmp_path / name)]
        if name == "killed":
            with subprocess.Popen(command, env=env) as process:
                end = time.monotonic() + 500
                while not steps(tmp_path / name / "ppo/checkpoints"):  # the first of 4 rollouts is complete
                    assert process.poll() is None and time.monotonic() < end
                    time.sleep(0.02)
                process.kill()
            assert max(steps(tmp_path / name / "ppo/checkpoints")) < 4
        subprocess.run(command, env=env, check=True, timeout=500)
    whole, killed = (rows(tmp_path / name / "ppo") for name in ("whole", "killed"))
    assert whole == killed and len(whole) == 8
    reports = [(tmp_path / name / "report.md").read_text() for name in ("whole", "killed")]
    assert reports[0] == reports[1]


@pytest.mark.parametrize(("option", "value"), [("--ptx", "-0.5"), ("--ema", "1.0"), ("--ema", "-0.1")])
def test_numbers_of_stage_3_are_checked_before_stage_1(
    parts: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    script = importlib.import_module("chat_ppo")
    monkeypatch.setattr(sys, "argv", ["chat_ppo.py", f"{option}={value}"])
    with pytest.raises(SystemExit):
        script.options()
    assert "--ptx must be 0 or more and finite, and --ema in [0, 1), got" in capsys.readouterr().err


@pytest.mark.nightly
def test_three_stages_on_two_ranks(tmp_path: pathlib.Path) -> None:
    run(TWO, *STAGES, "--out", str(tmp_path), example=SFT.with_name("chat_ppo.py"))
    assert [row["step"] for row in rows(tmp_path / "ppo")] == [1, 2, 3, 4] and (tmp_path / "report.md").is_file()


@pytest.mark.nightly
def test_grpo_on_two_ranks(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = "--iterations", "2", "--prompts", "2", "--answers", "2", "--tokens", "4", "--out", str(tmp_path)
    run(TWO, str(files), *options, example=SFT.with_name("chat_grpo.py"))
    assert [row["exact"] for row in rows(tmp_path)] == [1, 1]


@pytest.mark.nightly
def test_the_form_of_answers_of_smollm2_improves(smol_python: str, tmp_path: pathlib.Path) -> None:
    run([smol_python], str(tmp_path / "model"), example=SFT.with_name("chat.py"))
    options = "--lora", "8", "--iterations", "8", "--prompts", "4", "--out", str(tmp_path / "run")
    run([smol_python], str(tmp_path / "model"), *options, example=SFT.with_name("chat_grpo.py"))
    found = rows(tmp_path / "run")  # four iterations have all questions once
    first, last = (sum(row["reward"] for row in part) / 4 for part in (found[:4], found[4:]))
    assert last > first + 0.1
    assert max(row["kl"] for row in found) < 1
