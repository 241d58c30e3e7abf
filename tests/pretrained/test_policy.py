"""Covers policies made from a directory: the page's program, equal metrics on any ranks, and refusals."""

import functools
import pathlib
import re
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import optim, rl
from shardfn.core import tree_leaves
from shardfn.inference import Sampling
from shardfn.pretrained import load_policy
from shardfn.testing import distributed
from tests.cli.test_generate import given as given  # a fixture

ROOT = pathlib.Path(__file__).parents[2]
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "reference": {"beta": 0.1},
    "adapters": {"beta": 0.1, "lora": 2, "loss": functools.partial(rl.grpo, epsilon_high=0.3)},
}


def count_twos(prompt: str, answer: str) -> float:
    return answer.count("two") + 0.1 * len(prompt)


def _train(directory: pathlib.Path, mesh: sf.Mesh, how: dict[str, Any]) -> list[dict[str, float]]:
    sampling = Sampling(max_tokens=4, n=2)
    policy, state = load_policy(directory, optim.adamw(1e-2), sampling, mesh=mesh, running=4, **how)
    rows = list[dict[str, float]]()
    for n in range(2):
        rollout = policy.sample(
            state, ["one two", [{"role": "five", "content": "six"}], [3, 4]], sf.fold_in(sf.key(0), n)
        )
        state, metrics = policy.update(state, policy.score(count_twos, rollout))
        rows.append({name: float(x) for name, x in metrics.items()})
    return rows


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@distributed(world=[pytest.param(3, marks=pytest.mark.nightly), 2])
def test_ranks_learn_as_one(world: int, kind: str, given: pathlib.Path) -> None:
    rows = _train(given, sf.make_mesh({"dp": world}), KINDS[kind])
    assert rows[0]["exact"] == 1 and rows[0]["grad_norm"] > 0
    alone = _train(given, sf.make_mesh({"dp": 1}, alone=True), KINDS[kind])
    for mine, other in zip(rows, alone, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.nightly
def test_the_program_of_the_page(given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    [code] = re.findall(r"\n\n((?:    import shardfn.*\n)(?:(?:    .*)?\n)+)", (ROOT / "docs/rlhf.md").read_text())[:1]
    lines = [line[4:] for line in code.splitlines()]
    assert sum(map(bool, lines)) <= 15
    text = "\n".join(lines).replace("models/smollm2", str(given)).replace("runs/grpo", str(tmp_path / "out"))
    text = (
        text.replace("What is {a} plus {b}?", "one two")
        .replace("range(20)", "range(1)")
        .replace("range(5)", "range(2)")
    )
    names: dict[str, Any] = {}
    exec(text.replace("max_tokens=16", "max_tokens=8"), names)
    _, written = sf.interop.gpt_from_hf(tmp_path / "out")
    assert len(tree_leaves(written)) == len(tree_leaves(names["policy"].merge(names["state"])))
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_refusals(given: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"must have only the axis 'dp', .*got \['tp'\]"):
        load_policy(given, optim.adamw(1e-3), Sampling(n=2), mesh=sf.make_mesh({"tp": 1}, alone=True))
    with pytest.raises(TypeError, match=r"num_generations.*Sampling\(n=8\)"):
        load_policy(given, optim.adamw(1e-3), Sampling(n=2), num_generations=8)
    policy, state = load_policy(
        given, optim.adamw(1e-3), Sampling(max_tokens=4, n=2), mesh=sf.make_mesh(alone=True), running=4
    )
    with pytest.raises(ValueError, match=r"longer|too long|context"):
        policy.sample(state, [list(range(3, 10)) * 3], sf.key(0))
    assert torch.isfinite(policy.sample(state, ["one"], sf.key(0)).logprobs).all()


def test_the_first_answers_take_the_weights_that_the_engine_has(given: pathlib.Path) -> None:
    def make(seed: int) -> Any:
        how: dict[str, Any] = {"mesh": sf.make_mesh(alone=True), "running": 4, "lora": 2, "seed": seed}
        return load_policy(given, optim.adamw(1e-2), Sampling(max_tokens=4, n=2), **how)

    policy, state = make(0)
    first = policy.sample(state, ["one"], sf.key(0))
    assert policy.engine.version == 0 and set(first.versions.flatten().tolist()) <= {0, -1}
    rollout = policy.sample(state, ["one"], sf.key(0))
    assert policy.engine.version == 1 and torch.equal(first.logprobs, rollout.logprobs)
    policy, state = make(0)
    _, other = make(1)
    policy.sample(other, ["one"], sf.key(0))  # not the state that the engine was made with
    assert policy.engine.version == 1
    policy, state = make(0)
    spent, _ = policy.update(state, rollout._replace(rewards=torch.tensor([0.0, 1.0])))
    with pytest.raises(sf.DonatedError):
        policy.sample(state, ["one"], sf.key(0))
    policy.sample(spent, ["one"], sf.key(0))
    assert policy.engine.version == 1
