"""`shardfn plan`: published figures, bad arguments, runs that fit or do not, the search, the formats."""

import builtins
import dataclasses
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardfn as sf
from shardfn.cli import (
    PRECISIONS,
    PRESETS,
    Setup,
    activation_bytes,
    exact,
    main,
    model_states,
    parse_model,
    plan,
    search,
    step_cost,
)
from shardfn.core import Zero, block_slices
from shardfn.graph import DEVICES, cluster
from shardfn.models import gpt

TINY = "gpt:num_layers=2,d_model=64,num_heads=4,vocab_size=512,max_len=64"


def run(model, mesh, stage, *, device="a100-80", precision="fp16-adam", **more):
    return Setup(model, parse_model(model), mesh, cluster(device), Zero(stage=stage), precision, **more)


def as_a_program(*arguments):
    command = [sys.executable, "-m", "shardfn.cli", "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Published figures.


@pytest.mark.parametrize(
    ("stage", "gb"),
    [
        (0, 120.0),
        pytest.param(1, 31.4, marks=pytest.mark.nightly),
        pytest.param(2, 16.6, marks=pytest.mark.nightly),
        (3, 1.88),
    ],
)
def test_zero_paper(stage, gb):
    total = model_states(run("zero-7.5b", {"dp": 64}, stage)).total / 1e9
    assert round(total, 2 if stage == 3 else 1) == gb


def test_a_trillion_parameters_take_16_gb_each():
    setup = run("1t", {"dp": 1024}, 3)
    assert gpt.num_params(setup.config) >= 1e12
    assert 15.6e9 <= model_states(setup).total <= 16.0e9


def test_turing_nlg():
    config = PRESETS["turing-nlg-17b"].config
    assert (config.num_layers, config.d_model, config.num_heads) == (78, 4256, 28)
    assert round(gpt.num_params(config) / 1e9) == 17
    # Published: plain data parallelism does not fit 32 GB even with 4-way tensor parallelism; ZeRO stage 1 does.
    published = {"device": "v100-32", "batch": 8, "remat": True}
    assert not plan(run("turing-nlg-17b", {"dp": 64, "tp": 4}, 0, **published)).fits
    assert plan(run("turing-nlg-17b", {"dp": 64, "tp": 4}, 1, **published)).fits


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.1244),
        pytest.param("gpt2-xl", 1.558, marks=pytest.mark.nightly),
        pytest.param("llama-7b", 6.738, marks=pytest.mark.nightly),
        ("llama-65b", 65.29),
        pytest.param("llama2-70b", 68.98, marks=pytest.mark.nightly),
        pytest.param("llama3-8b", 8.03, marks=pytest.mark.nightly),
        ("gpt3-175b", 174.6),
        pytest.param("mt-nlg-530b", 529.6, marks=pytest.mark.nightly),
    ],
)
def test_presets_have_the_published_counts(name, billions):
    assert gpt.num_params(PRESETS[name].config) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_activations_are_the_published_34_bytes():
    # Korthikanti et al.: s b h (34 + 5 a s / h) a layer; 1 of these is the mask of the scores, which are not kept here.
    config = parse_model("gpt3-175b:dropout=0.1")
    one, two = (
        activation_bytes(
            Setup("x", parse_model(f"gpt3-175b:dropout=0.1,num_layers={n}"), {}, cluster("h100"), Zero(), seq=2048)
        ).saved
        for n in (1, 2)
    )
    assert two - one == 2048 * config.d_model * 34


def test_activations_under_tensor_parallelism():
    # The same source: s b h (10 + 24 / t) a layer.
    saved = [
        activation_bytes(run(f"gpt3-175b:dropout=0.1,num_layers={n}", {"tp": 8}, 0, seq=2048)).saved for n in (1, 2)
    ]
    assert saved[1] - saved[0] == 2048 * 12288 * (10 + 24 // 8)


@pytest.mark.nightly
def test_tables_in_the_documentation_are_the_programs():
    root = Path(__file__).parents[2] / "docs"
    maker = runpy.run_path(str(root / "make_plan_tables.py"))
    text = (root / "plan.md").read_text(encoding="utf-8")
    tables = maker["make_tables"]()
    assert maker["page"](text, tables) == text, "run `python docs/make_plan_tables.py`"
    assert "| **120.00** | 120" in tables


# Traffic and time.


def test_every_leaf_is_counted_once():
    for name, preset in PRESETS.items():
        assert model_states(run(name, {"dp": 2}, 0)).params == 2 * gpt.num_params(preset.config)


def test_traffic_is_that_of_the_paper():
    size = 2 * gpt.num_params(PRESETS["zero-7.5b"].config)
    sent = [sum(t.nbytes for t in step_cost(run("zero-7.5b", {"dp": 64}, s)).transfers) for s in range(4)]
    assert [round(b / (size * 63 / 64), 2) for b in sent] == [2.0, 2.0, 2.0, 3.0]


def test_tensor_parallel_sums():
    (transfer,) = step_cost(run("gpt2", {"tp": 4}, 0, batch=2, seq=128)).transfers
    assert transfer.nbytes == 2 * 3 / 4 * (4 * 12) * (2 * 128 * 768 * 2)
    assert transfer.bandwidth == cluster("a100-80").inside.bandwidth


def test_remat_costs_a_forward_and_saves_memory():
    plain, again = (plan(run("gpt2-xl", {"dp": 8}, 3, batch=8, remat=r)) for r in (False, True))
    assert again.peak < plain.peak
    assert 1.2 < again.cost.compute / plain.cost.compute < 4 / 3
    assert again.cost.model_flops == plain.cost.model_flops


def test_more_ranks_on_a_slower_wire_wait_longer():
    fast, slow = (step_cost(run("gpt2-xl", {"dp": 64}, 3, device=d)) for d in ("a100-40", "rtx4090"))
    assert fast.exposed < slow.exposed
    assert slow.dominates == "waiting for data-parallel transfers"


def test_link_of_the_mesh():
    box = cluster("a100-80")
    assert box.link({"dp": 8}, "dp") == box.inside
    assert box.link({"dp": 16}, "dp").bandwidth == 8 * box.between.bandwidth
    assert box.link({"dp": 16, "tp": 8}, "dp").bandwidth == box.between.bandwidth
    assert box.link({"dp": 16, "tp": 4}, "dp").bandwidth == 2 * box.between.bandwidth
    assert box.link({"dp": 16, "tp": 4}, "tp") == box.inside
    assert box.link({"dp": 2, "tp": 4}, "dp,tp") == box.inside
    assert box.link({"dp": 4, "tp": 6}, "tp").latency == box.between.latency
    with pytest.raises(ValueError, match=r"axis 'dq' is not in the mesh.*Did you mean 'dp'"):
        box.link({"dp": 2}, "dq")


def test_devices_are_complete():
    for name, box in DEVICES.items():
        assert box.device.name == name and box.device.memory > 2**30 and box.device.rate("float32") > 0
    with pytest.raises(ValueError, match="v100-32 does not compute in bfloat16"):
        cluster("v100-32").device.rate("bfloat16")


def test_every_precision_counts_16_bytes():
    assert {p.params + p.grads + p.optimizer for p in PRECISIONS.values()} == {16}


# The captured step beside the formulas.


@pytest.mark.parametrize(
    ("remat", "accumulate", "stage"),
    [
        (False, 1, 3),
        *(pytest.param(False, 1, stage, marks=pytest.mark.nightly) for stage in (0, 1, 2)),
        *(pytest.param(True, 2, stage, marks=pytest.mark.nightly) for stage in range(4)),
    ],
)
def test_captured_step_agrees(stage, remat, accumulate):
    more = {"batch": 4, "seq": 64, "remat": remat, "accumulate": accumulate}
    setup = run(TINY, {"dp": 4}, stage, precision="fp32-adam", **more)
    captured, formula = exact(setup), plan(setup)
    for kind in ("params", "optimizer"):
        assert captured.memory[kind] == pytest.approx(formula.memory[kind], rel=0.01)
    # The schedule may keep small gradients under way, and these are small.
    assert 0.5 * formula.peak < captured.peak < formula.peak + captured.memory.get("grads", 0)
    sent = sum(n for _, _, n in captured.traffic)
    estimate = sum(t.nbytes for t in formula.cost.transfers)
    if stage < 3:
        assert sent == pytest.approx(estimate, rel=0.01)
    else:  # The program keeps a leaf that it needs again soon; the formula gathers it twice a microbatch.
        assert 0.5 * estimate < sent < 1.01 * estimate


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16-adam", "fp16-adam"])
def test_the_captured_step_has_the_optimizer_that_the_formula_counts(precision):
    setup = run(TINY, {"dp": 4}, 3, precision=precision, batch=4, seq=64)
    captured, formula = exact(setup), plan(setup)
    for kind in ("params", "optimizer"):
        assert captured.memory[kind] == pytest.approx(formula.memory[kind], rel=0.01)


def test_stacked_layers_have_the_states_of_layers_in_a_list():
    for mesh in ({"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}):
        stacked, listed = (plan(run(TINY + more, mesh, 3, batch=4, seq=64)) for more in (",stacked=true", ""))
        assert stacked.memory == listed.memory


def test_small_numbers_have_three_figures(capsys):
    assert main(["plan", "--model", f"{TINY},bias=false"]) == 0
    text = capsys.readouterr().out
    assert "0.000e9" not in text and not re.search(r"\b0\.00[1-9]\b", text), text


@pytest.mark.nightly
def test_a_small_model_is_in_smaller_units(capsys):
    assert main(["plan", "--model", f"{TINY},bias=False", "--exact"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\*\*fits: \d\.\d+ MiB of 75\.20 GiB", text), text
    assert re.search(r"^\| kind +\| MiB +\| MiB, captured +\|", text, re.M), text


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device a100-88", "device 'a100-88' is not known. Did you mean 'a100-80'?"),
        pytest.param(
            "--model gpt2xl", "--model 'gpt2xl' is not known. Did you mean 'gpt2-xl'?", marks=pytest.mark.nightly
        ),
        pytest.param(
            "--model gpt:num_layer=2",
            "'num_layer' is not a field of models.gpt.Config. Did you mean 'num_layers'?",
            marks=pytest.mark.nightly,
        ),
        ("--model gpt:num_layers=2", "d_model is missing; add d_model=.."),
        pytest.param("--model gpt2:num_layers=two", "num_layers='two' must be an integer.", marks=pytest.mark.nightly),
        pytest.param("--model gpt2:num_layers", "'num_layers' has no value", marks=pytest.mark.nightly),
        ("--model gpt2:bias=1", "bias=1 must be True or False."),
        pytest.param("--model gpt2:dropout=x", "dropout='x' must be a number.", marks=pytest.mark.nightly),
        pytest.param(
            "--model gpt2:num_heads=7",
            "num_heads=7 does not divide d_model=768. Give d_head.",
            marks=pytest.mark.nightly,
        ),
        ("--mesh dq=8", "axis 'dq' is not known. Did you mean 'dp'?"),
        pytest.param("--mesh dp=8,sp=2", "a plan does not know axis 'sp' yet", marks=pytest.mark.nightly),
        pytest.param("--mesh dp=0", "axis 'dp' has size '0'", marks=pytest.mark.nightly),
        ("--mesh dp=2,dp=2", "axis 'dp' is given twice."),
        pytest.param("--mesh tp=64", "tp=64 is more than the model's 12 heads", marks=pytest.mark.nightly),
        pytest.param("--zero 4", "Zero(stage=4): the stages are 0, 1, 2 and 3.", marks=pytest.mark.nightly),
        ("--precision bf16-adm", "--precision 'bf16-adm' is not known. Did you mean 'bf16-adam'?"),
        pytest.param(
            "--device v100-32",
            "v100-32 does not compute in bfloat16; use fp16-adam or fp32-adam.",
            marks=pytest.mark.nightly,
        ),
        pytest.param("--batch 3 --accumulate 2", "--accumulate 2 does not divide --batch 3", marks=pytest.mark.nightly),
        ("--batch 0", "--batch 0 must be at least 1."),
        pytest.param("--seq 4096", "--seq 4096 is longer than the model's max_len=1024", marks=pytest.mark.nightly),
        pytest.param("--efficiency 2", "--efficiency 2.0 must lie in (0, 1].", marks=pytest.mark.nightly),
        ("--mesh tp=2 --exact", "--exact needs tp=1"),
        pytest.param("--png plan.docx", "a picture cannot be written as 'docx'", marks=pytest.mark.nightly),
        pytest.param("--out no/such/folder/plan.md", "no/such/folder/plan.md", marks=pytest.mark.nightly),
    ],
)
def test_bad_arguments_are_explained(arguments, message, capsys):
    assert main(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shardfn plan: error: ") and message in error


def test_all_mistakes_are_listed_at_once(capsys):
    assert main(["plan", "--batch", "0", "--efficiency", "0", "--seq", "9999"]) == 2
    assert capsys.readouterr().err.count("  - ") == 3


def test_a_run_that_does_not_fit(capsys):
    assert main(["plan", "--model", "gpt3-175b", "--mesh", "dp=8", "--zero", "1"]) == 1
    assert "**does not fit: " in capsys.readouterr().out


def test_plan_report_json_and_picture(capsys, tmp_path):
    out, png = tmp_path / "plan.md", tmp_path / "plan.png"
    base = ["plan", "--model", "llama-7b", "--mesh", "dp=64", "--batch", "4", "--remat"]
    assert main([*base, "--out", str(out), "--png", str(png)]) == 0
    text = capsys.readouterr().out
    assert out.read_text() == text and "## Memory of the fullest rank" in text
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main([*base, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    kinds = {k: n for k, n in read["memory"].items() if k not in ("peak", "limit", "model_states")}
    assert read["fits"] and sum(kinds.values()) == read["memory"]["peak"] < read["memory"]["limit"]
    assert sum(read["time"][k] for k in ("compute", "exposed", "tensor", "update")) == read["time"]["step"]


def test_only_the_picture_needs_matplotlib(capsys, monkeypatch):
    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    plain = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["plan"]) == 0
    assert main(["plan", "--png", "plan.png"]) == 2
    assert "--png needs matplotlib: pip install 'shardfn[train]'" in capsys.readouterr().err


@pytest.mark.nightly
def test_captured_report(capsys):
    flags = ["--mesh", "dp=2", "--precision", "bf16-adam", "--device", "h100", "--exact"]
    assert main(["plan", "--model", TINY, *flags]) == 0
    text = capsys.readouterr().out
    assert "MiB, captured" in text and "float32 master copies, mu and nu in the optimizer's state" in text


# The search.


def test_search_finds_a_run_that_fits_and_is_deterministic():
    setup = run("llama-7b", {"dp": 8, "tp": 1}, 0, device="a100-40", batch=4, seq=2048)
    assert not plan(setup).fits
    found = search(setup)
    assert found == search(setup)
    assert all(p.fits for p in found.best)
    assert [p.cost.seconds for p in found.best] == sorted(p.cost.seconds for p in found.best)
    assert {p.setup.batch * p.setup.axis("dp") for p in found.best} == {32}
    assert {p.setup.world for p in found.best} == {8}
    assert not any(p.fits for p in found.failed) and (1, 0) in [
        (p.setup.axis("tp"), p.setup.zero.stage) for p in found.failed
    ]


def test_search_leaves_tp_alone_unless_the_mesh_names_it():
    assert {p.setup.axis("tp") for p in search(run("gpt2", {"dp": 8}, 3)).best} == {1}
    assert {p.setup.axis("tp") for p in search(run("gpt2", {"dp": 8, "tp": 1}, 3)).best} == {1, 2, 4, 8}


@pytest.mark.nightly
def test_search_explains_why_nothing_fits(capsys, tmp_path):
    arguments = ["plan", "--model", "1t", "--mesh", "dp=4,tp=4", "--device", "rtx4090", "--search"]
    assert main([*arguments, "--png", str(tmp_path / "none.png")]) == 1
    text = capsys.readouterr().out
    assert "# Search: 0 of " in text and "## Runs that do not fit, at their smallest" in text
    assert "tp=16: more than the 8 ranks of a node" in text
    assert main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["best"] == []


def test_search_report(capsys):
    assert main(["plan", "--model", "gpt2-xl", "--mesh", "dp=8", "--batch", "8", "--search", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["plan"]["fits"] and len(read["best"]) == 10 and read["tried"] == 32


@pytest.mark.nightly
def test_a_huge_model_as_a_program():
    text = as_a_program("--model", "mt-nlg-530b", "--mesh", "dp=1024", "--remat")
    assert text.startswith("# mt-nlg-530b on 1024 x a100-80")


def test_heads_that_tp_does_not_divide_are_counted_on_the_fullest_rank(capsys: pytest.CaptureFixture[str]) -> None:
    model = "gpt:vocab_size=64,num_layers=3,d_model=32,num_heads=4"
    how = ["--device", "cpu", "--precision", "fp32-adam", "--seq", "8", "--zero", "0"]
    assert main(["plan", model, "--mesh", "tp=3", *how]) == 0
    text = capsys.readouterr().out
    assert "tp=3 does not divide the 4 heads: the fullest rank has 2" in text and "Config(per_head=True)" in text
    assert main(["plan", model, "--mesh", "tp=2", *how]) == 0
    assert "does not divide" not in capsys.readouterr().out
    config = parse_model(model)
    two, three = (Setup("", config, {"tp": n}, cluster("cpu"), Zero(0), "fp32-adam", seq=8) for n in (2, 3))
    # Both have a rank with two heads: as many attention weights and activations, and as much of their time.
    assert two.heads_on_a_rank == three.heads_on_a_rank == (2, 2)
    held = [sum(x.numel() for x in attention_of(config, n)) for n in (2, 3)]
    assert held[0] == held[1]
    assert plan(two).cost.compute > plan(three).cost.compute > plan(two).cost.compute * 2 / 3
    grouped = dataclasses.replace(config, num_heads=8, d_model=64, num_kv_heads=2)
    for tp, most in {1: (8, 2), 2: (4, 1), 3: (3, 2), 4: (2, 1), 5: (2, 1), 8: (1, 1)}.items():
        setup = Setup("", grouped, {"tp": tp}, cluster("cpu"), Zero(0), "fp32-adam", seq=8)
        assert setup.heads_on_a_rank == most


def attention_of(config: gpt.Config, ranks: int) -> list[torch.Tensor]:
    """The blocks of attention weights on the first rank, from the specs of the model."""
    mesh = sf.make_mesh({"tp": ranks}, device="cpu", abstract=True)
    own = dataclasses.replace(config, per_head=True)
    params, specs = gpt.init(own, sf.key(0))["blocks"][0], gpt.specs(own, tp="tp")["blocks"][0]
    return [params[n][block_slices(tuple(params[n].shape), specs[n], mesh.shape, {})] for n in ("wq", "wk", "wv", "wo")]
