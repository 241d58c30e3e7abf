"""`shardfn plan --recipes` and the memories of states: published runs fit, and states keep their bytes elsewhere."""

import dataclasses
import json
from pathlib import Path

import pytest

from shardfn.cli import RECIPES, Setup, main, model_states, parse_model, plan, recipe
from shardfn.core import Disk, Quantization, Zero
from shardfn.graph import cluster
from shardfn.models import gpt


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_run_fits_as_its_authors_say(name: str):
    assert recipe(name).plan().fits == recipe(name).fits, recipe(name).plan().verdict


def test_zero_offload_has_the_papers_bytes():
    made = recipe("zero-offload-13b").plan()
    num = made.num_params
    assert made.memory["params"] == 2 * num
    assert made.outside == {"host": {"grads": 2 * num, "optimizer": 12 * num}}
    # Section 3 of the paper: gradients go down and parameters return, 4 bytes a parameter.
    assert sum(t.nbytes for t in made.cost.transfers if t.axis == "host") == 4 * num


@pytest.mark.parametrize(("name", "ranks"), [("zero-infinity-1t", 16), ("zero-infinity-32t", 512)])
def test_zero_infinity_has_16_bytes_a_parameter_on_disk(name: str, ranks: int):
    made = recipe(name).plan()
    assert sum(made.outside["disk"].values()) * ranks == pytest.approx(16 * made.num_params, rel=1e-3)
    assert made.outside["disk"].keys() == {"params", "grads", "optimizer"}


def test_published_counts():
    counts = {"zero-offload-13b": 13e9, "zero-offload-70b": 70e9, "zero-infinity-32t": 32e12, "ted-40b": 40e9}
    counts |= {"deepspeed-moe-1.3b-128": 52e9}
    for name, num in counts.items():
        assert gpt.num_params(recipe(name).setup.config) == pytest.approx(num, rel=0.05), name


def test_states_keep_their_bytes_in_another_memory():
    shape, model = {"dp": 4}, parse_model("llama-7b")
    near = Setup("m", model, shape, cluster("a100-80"), Zero(3), remat=True)
    zero = Zero(3, params="host", grads="host", optimizer="disk", disk=Disk("."))
    far = dataclasses.replace(near, zero=zero, activations="host")
    one, two = plan(near), plan(far)
    moved = {kind: nbytes for kinds in two.outside.values() for kind, nbytes in kinds.items()}
    assert moved == {kind: one.memory[kind] for kind in ("params", "grads", "optimizer", "activations")}
    assert all(two.memory[kind] == 0 for kind in moved)
    assert two.memory["gathered window"] == one.memory["gathered window"] == model_states(near).window
    assert two.cost.seconds > one.cost.seconds


def test_a_run_that_the_host_cannot_hold_does_not_fit(capsys: pytest.CaptureFixture[str]):
    told = [
        "plan",
        "1t",
        "--mesh",
        "dp=16",
        "--device",
        "v100-32",
        "--precision",
        "fp16-adam",
        "--remat",
        "--seq",
        "1024",
    ]
    told += ["--params", "host", "--grads", "host", "--optimizer", "host"]
    assert main(told) == 1
    assert "does not fit: 938.81 of 90.24 GiB of the host for each rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (["--device", "cpu", "--params", "host"], "--params host: cpu has no memory next to the device's"),
        (["--activations", "host"], "add --remat"),
        (["--recipes", "--zero", "2"], "--zero 2"),
        (["--quantization", "int4"], "add --lora RANK"),
        (["--lora", "-1"], "--lora must be a rank of at least 1, or 0 for no adapters, got -1"),
        (["mixtral-8x7b", "--lora", "8"], "puts adapters on dense layers"),
        (["--lora", "8", "--exact"], "--exact captures the training of all weights"),
        (["--lora", "8", "--longest"], "--lora 8: it is not planned"),
    ],
)
def test_bad_arguments_are_named(told: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *told]) == 2
    assert text in capsys.readouterr().err


def test_all_recipes_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"]
    assert [x["recipe"] for x in found] == list(RECIPES)


@pytest.mark.parametrize(("quantization", "row"), [(None, 64), ("int8", 34), ("int4", 20)])
def test_adapters_leave_the_base_without_gradients(quantization: Quantization | None, row: int):
    config = gpt.Config.llama_like(vocab_size=96, num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128)
    setup = Setup("m", config, {"dp": 1}, cluster("h100"), Zero(0), lora=8, quantization=quantization)
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    matrices = 2 * sum(a * b for a, b in shapes)
    adapters = 2 * sum(8 * (a + b) for a, b in shapes)
    found = model_states(setup)
    assert found.grads == 2 * adapters and found.optimizer == 12 * adapters
    rest = gpt.num_params(config) - matrices
    assert found.params == 2 * (rest + adapters) + matrices * row // 32
    whole = plan(dataclasses.replace(setup, lora=0, quantization=None))
    assert plan(setup).cost.compute < whole.cost.compute


def test_adapters_have_the_sizes_of_the_models_linear_layers():
    config = gpt.Config.llama_like(vocab_size=96, num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128)
    setup = Setup("m", config, {"dp": 1}, cluster("h100"), Zero(0), "fp32-adam", lora=8)
    assert model_states(setup).grads == 4 * 8 * sum(sum(sizes) for sizes in gpt.linear_sizes(config).values())


def test_states_of_adapters_are_divided_by_zero():
    config = gpt.Config.llama_like(vocab_size=96, num_layers=2, d_model=512, num_heads=4, d_ff=1024)
    one, four = (
        model_states(
            Setup("m", config, {"dp": n}, cluster("h100"), Zero(3, persist_elements=0), lora=8, quantization="int4")
        )
        for n in (1, 4)
    )
    assert four.params == pytest.approx(one.params / 4, rel=0.01) and four.optimizer * 4 == one.optimizer


def test_windows_have_less_attention():
    near = Setup("m", parse_model("llama-7b:window=256"), {"dp": 8}, cluster("h100"), Zero(3), seq=2048)
    whole = dataclasses.replace(near, config=parse_model("llama-7b"))
    c, tokens = whole.config, whole.tokens
    assert (
        plan(whole).cost.model_flops - plan(near).cost.model_flops
        == 12 * c.d_model * c.num_layers * (2048 - 256) * tokens
    )


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "olmo2"])
def test_families_of_today_are_planned(kind: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    config = parse_model(str(tmp_path))
    assert plan(Setup(kind, config, {"dp": 8}, cluster("h100"), Zero(3))).num_params == gpt.num_params(config)
