"""`shardfn plan --recipes` and the memories of states: published runs fit, and states keep their bytes elsewhere."""

import dataclasses
import json

import pytest

from shardfn.cli import RECIPES, Setup, main, model_states, parse_model, plan, recipe
from shardfn.core import Disk, Zero
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
    ],
)
def test_bad_arguments_are_named(told: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *told]) == 2
    assert text in capsys.readouterr().err


def test_all_recipes_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"]
    assert [x["recipe"] for x in found] == list(RECIPES)
