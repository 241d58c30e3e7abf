"""Covers plans of models with experts: their sizes, states, work, exchange, the best number of ranks, and mistakes."""

import dataclasses
import functools
import json

import pytest

import shardfn as sf
from shardfn.cli import Setup, exact, main, model_states, parse_model, plan, step_cost
from shardfn.core import Zero
from shardfn.graph import cluster
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import distributed


def run(model, mesh, stage=3, **more):
    config = parse_model(model) if isinstance(model, str) else model
    return Setup(str(model), config, mesh, cluster("h100"), Zero(stage=stage), **more)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.0, 2.9),
        ("deepseek-v3-like", 693.0, 59.1),
        # Published without a third digit: 52, 31 and 27.
        ("moe-1.3b-128", 52.5, 1.3),
        ("pr-moe-1.3b-128", 31.4, 1.7),
        ("pr-mos-1.3b-128", 27.0, 1.5),
    ],
)
def test_published_models_have_their_parameters(model, total, active):
    made = plan(run(model, {"dp": 64}, remat=True))
    assert made.experts is not None
    assert round(made.num_params / 1e9, 1) == pytest.approx(total, abs=0.1 * total / 10)
    assert round(made.experts.active / 1e9, 1) == pytest.approx(active, abs=0.1 * active / 10)


def tiny(exchange=None, **changes):
    experts = moe.Experts(num=4, every=2, d_ff=8, exchange=exchange or layers.Local())
    sizes = {"vocab_size": 32, "num_layers": 2, "d_model": 16, "num_heads": 4, "d_ff": 12, "max_len": 8}
    return gpt.Config.llama_like(**sizes, experts=experts, **changes)


@pytest.mark.day("2")
@distributed(world=4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_are_those_of_a_step(stage: int) -> None:
    c = tiny(layers.AllToAll("ep"))
    zero = Zero(stage=stage, axis=("dp", "ep"), persist_elements=0)
    with sf.make_mesh({"dp": 2, "ep": 2}, device="cpu") as mesh:
        step = sf.sharded_step(
            functools.partial(gpt.loss, c),
            sf.optim.adamw(1e-2),
            mesh=mesh,
            specs=gpt.specs(c),
            batch=sf.P(("dp", "ep")),
            zero=zero,
        )
        state = step.init(gpt.init(c, sf.key(0)))
    setup = run(tiny(), {"dp": 4}, precision="fp32-adam", ep=2, seq=8)
    planned = model_states(Setup(**{**vars(setup), "zero": Zero(stage=stage, persist_elements=0)}))
    held = [sum(x.local.nbytes for x in sf.core.tree_leaves(t) if x.shape) for t in (state.params, state.opt_state)]
    assert held == [planned.params, planned.optimizer]


def test_states_of_a_pyramid_have_all_its_parameters() -> None:
    rule = moe.Experts(num=(2, 5), every=2, top_k=1, residual=True)
    c = gpt.Config(vocab_size=32, num_layers=5, d_model=16, num_heads=4, experts=rule)
    assert model_states(run(c, {"dp": 1}, stage=0, precision="fp32-adam")).params == 4 * gpt.num_params(c)


def test_work_is_that_of_a_tokens_experts():
    c = parse_model("mixtral-8x7b")
    alone = gpt.Config.llama_like(**{f: getattr(c, f) for f in ("num_kv_heads", "max_len")}, d_ff=2 * 14336)
    one, other = (step_cost(run(x, {"dp": 8})).model_flops for x in (c, alone))
    router = 6 * 8 * 1024 * 32 * 8 * 4096
    assert one == other + router


def test_exchange_and_gathers_change_with_the_ranks_of_experts():
    plans = {n: plan(run("mixtral-8x7b", {"dp": 8}, batch=2, seq=2048, remat=True, ep=n)) for n in (1, 2, 8)}
    sent = {n: {t.what: t.nbytes for t in p.cost.transfers} for n, p in plans.items()}
    gathered = [sent[n]["gather of parameters, forward"] for n in (1, 2, 8)]
    assert gathered[0] > gathered[1] > 10 * gathered[2]
    assert "tokens to experts and back" not in sent[1] and plans[1].cost.experts == 0
    # Six exchanges of 32 layers, in which seven in eight rows leave the rank.
    assert sent[8]["tokens to experts and back"] == 6 * 32 * 2 * 2 * 2048 * 4096 * 2 * 7 / 8
    experts = plans[8].experts
    assert experts is not None and experts.balanced < experts.most < experts.weights
    # Each rank holds its experts, and a part of the rest.
    assert plans[8].states.params == pytest.approx(plans[1].states.params, rel=0.02)


def test_the_report_has_the_best_number_of_ranks(capsys):
    arguments = ["plan", "qwen3-30b-a3b", "--mesh", "dp=8", "--ep", "2", "--remat", "--device", "h100", "--batch", "2"]
    assert main(arguments) in (0, 1)
    out = capsys.readouterr().out
    assert "of them for a token; experts on 2 ranks" in out and "exchange of tokens" in out
    assert main([*arguments, "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["ep"] == 2 and found["best_ep"] in (1, 2, 4, 8) and found["config"]["experts"]["route"] == "top_k"
    assert f"**{found['best_ep']}**" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["mixtral-8x7b", "--mesh", "dp=8", "--ep", "3"], "--ep 3 must divide dp=8"),
        (["mixtral-8x7b", "--mesh", "dp=16", "--ep", "16"], "--ep 16 is more than the model's 8 experts"),
        (["gpt2", "--mesh", "dp=8", "--ep", "2"], "--ep 2 cuts experts, and gpt2 has none"),
        (["mixtral-8x7b", "--mesh", "dp=8", "--ep", "0"], "--ep 0 must divide dp=8"),
        (["mixtral-8x7b", "--mesh", "dp=8", "--ep", "2", "--exact"], "--exact needs --ep 1"),
    ],
)
def test_mistakes_are_named(arguments, text, capsys):
    assert main(["plan", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_dense_plan_has_no_experts():
    made = plan(run("gpt2", {"dp": 8}, seq=1024))
    assert made.experts is None and made.cost.experts == 0


@pytest.mark.nightly
def test_a_captured_step_of_experts_with_biases_leaves_them_out_and_has_a_note() -> None:
    experts = moe.Experts(num=4, d_ff=8, route=layers.sigmoid_groups, bias_rate=0.1)
    biased = dataclasses.replace(tiny(), experts=experts)
    plain = dataclasses.replace(biased, experts=dataclasses.replace(experts, bias_rate=0.0))
    found, without = (exact(run(c, {"dp": 2}, precision="fp32-adam", seq=8)) for c in (biased, plain))
    assert found.peak == without.peak and any("chosen without biases" in note for note in found.notes)
    assert not any("biases" in note for note in without.notes)
