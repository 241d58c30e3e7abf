"""Covers shardfn/cli/_main.py; and models by config.json, defaults in the help, `python -m shardfn`."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from shardfn.cli import main, parse_model
from shardfn.models import gpt

WAITING = "plan --model 1t --mesh dp=128,tp=8 --remat --precision fp16-adam".split()


def test_the_advice_for_a_run_that_waits_is_a_larger_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WAITING, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    (told,) = before["advice"]
    assert told.startswith("Raise --batch") and before["mfu"] < 0.2
    found = re.search(r"With (--batch \d+(?: --accumulate \d+)?) MFU is ([\d.]+)%", told)
    assert found
    assert main([*WAITING, *found[1].split(), "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["mfu"] == pytest.approx(float(found[2]) / 100, abs=1e-3) and after["mfu"] > 1.5 * before["mfu"]
    assert main(WAITING) == 0
    assert "## Advice\n\n- Raise --batch" in capsys.readouterr().out


def test_the_advice_for_a_run_that_does_not_fit_is_one_that_would(capsys: pytest.CaptureFixture[str]) -> None:
    run = "plan --model llama-7b --mesh dp=64 --zero 0 --batch 4 --json".split()
    assert main(run) == 1
    (told,) = json.loads(capsys.readouterr().out)["advice"]
    stage = re.match(r"Take --zero (\d)((?: and --\w+(?: \d+)?)*): then it takes", told)
    assert stage
    rest = stage[2].replace(" and", "").split()
    assert main([*run, "--zero", stage[1], *rest]) == 0
    capsys.readouterr()
    assert main("plan --model 1t --mesh dp=2 --json".split()) == 1
    assert "take more ranks" in json.loads(capsys.readouterr().out)["advice"][0]


@pytest.mark.parametrize("kind", ["gpt_bigcode", "persimmon", "xglm", "codegen", "opt"])
def test_other_families_have_a_shape_of_as_many_parameters(kind: str, tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}
    names = transformers.AutoConfig.for_model(kind).attribute_map
    told = {names.get(name, name): x for name, x in sizes.items()} | {"model_type": kind}
    told |= {"ffn_dim": 200, "word_embed_proj_dim": 96, "rotary_dim": 8, "d_model": 96, "attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with torch.device("meta"):
        settings = transformers.AutoConfig.for_model(kind, **{x: y for x, y in told.items() if x != "model_type"})
        module = transformers.AutoModelForCausalLM.from_config(settings)
    want = sum(p.numel() for p in module.parameters())
    with pytest.warns(UserWarning, match=f"{kind} is planned by a Llama-like shape of"):
        config = parse_model(str(tmp_path))
        assert main(["plan", str(tmp_path), "--mesh", "dp=2", "--seq", "64"]) in (0, 1)
    assert (config.num_layers, config.d_model, config.num_heads) == (3, 96, 4)
    assert gpt.num_params(config) == pytest.approx(want, rel=0.01)


def test_families_without_a_shape_are_refused(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    for told, words in (({"model_type": "mamba"}, "num_attention_heads"), ({"model_type": "evil"}, "must be one of")):
        (tmp_path / "config.json").write_text(json.dumps(told | {"hidden_size": 32, "num_hidden_layers": 1}))
        with pytest.raises(ValueError, match=words):
            parse_model(str(tmp_path))


def test_a_config_json_is_a_model(tmp_path: pathlib.Path) -> None:
    told = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    told |= {"intermediate_size": 96, "vocab_size": 100, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    for name in (tmp_path, tmp_path / "config.json"):
        config = parse_model(f"{name}")
        assert (config.num_layers, config.d_model, config.d_ff, config.vocab_size) == (3, 64, 96, 100)
    assert parse_model(f"{tmp_path}/config.json:num_layers=7").num_layers == 7
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        parse_model(f"{tmp_path}/bad.json")
    with pytest.raises(FileNotFoundError):
        parse_model(f"{tmp_path}/none.json")


def test_the_model_may_be_given_alone(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(told | {"intermediate_size": 96, "vocab_size": 100}))
    for args in (["plan", f"{tmp_path}/config.json"], ["plan", "--model", f"{tmp_path}/config.json"]):
        assert main([*args, "--mesh", "dp=2"]) == 0
        assert capsys.readouterr().out.startswith(f"# {tmp_path}/config.json on 2 x a100-80")
    assert main(["plan"]) == 0
    assert capsys.readouterr().out.startswith("# gpt2 on 1 x")


def test_the_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "(default a100-80)" in out and "(default bf16-adam)" in out and "(default gpt2)" in out


@pytest.mark.nightly
def test_the_package_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "shardfn", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("usage: shardfn")
