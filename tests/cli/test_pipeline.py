"""Plans of pipelines: against the schedules themselves, and against published figures."""

import itertools
import json

import pytest

from shardfn.cli import Setup, bubble, main, parse_model, pipeline, plan, recipe, search
from shardfn.core import Zero
from shardfn.graph import cluster
from shardfn.schedules import SCHEDULES, Costs, timeline

TINY = parse_model("gpt:num_layers=12,d_model=64,num_heads=4,vocab_size=128,max_len=32")


def run(mesh: dict[str, int], m: int, schedule: str = "1f1b", *, remat: bool = False, stage: int = 0) -> Setup:
    zero, places = Zero(stage=stage), cluster("a100-80")
    more = {"batch": m, "seq": 32, "accumulate": m, "remat": remat, "schedule": schedule}
    return Setup("tiny", TINY, mesh, places, zero, "bf16-adam", **more)  # type: ignore[arg-type]


@pytest.mark.day("gpipe-False", "gpipe-True", "zb-h1-True")
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(SCHEDULES)]
)
def test_the_cost_of_many_microbatches_follows_from_a_few(name: str, remat: bool):
    """Idle time, held microbatches and hops are those of the whole schedule, which is not simulated for it."""
    compared = 0
    for p, m in itertools.product((2, 3, 5), (1, 2, 3, 4, 6, 10, 15, 30)):
        try:
            schedule = SCHEDULES[name](p, m)
        except ValueError:
            continue
        whole = timeline(schedule, Costs(1.0, 2.0 if remat else 1.0, 1.0))
        busy = 4 if remat else 3
        got = pipeline(run({"pp": p}, m, name, remat=remat))
        assert got.idle == pytest.approx((whole.makespan - busy * m) / busy, abs=1e-6)
        assert got.held == whole.peaks
        homes = [schedule.home[s][0] for s in range(schedule.num_stages)]
        assert got.hops == 2 * sum(a != b for a, b in itertools.pairwise(homes))
        compared += 1
    assert compared >= 5


def test_the_bubble_of_1f1b_is_that_of_the_paper():
    assert bubble(run({"pp": 4}, 12)) == pytest.approx(3 / 12)
    assert bubble(run({"pp": 4}, 12, "zb-h1")) < bubble(run({"pp": 4}, 12)) / 2
    assert bubble(run({"dp": 4}, 12)) == 0


def test_a_pipeline_cuts_states_and_work_by_its_ranks():
    one, four = plan(run({"pp": 1}, 8)), plan(run({"pp": 4}, 8))
    blocks = one.num_params - 2 * 128 * 64 - 32 * 64 - 2 * 64  # embed, head, positions and last norm are on all ranks
    assert one.states.params - four.states.params == pytest.approx(2 * blocks * 3 / 4)
    assert four.cost.compute == pytest.approx(one.cost.compute / 4)
    assert four.cost.pipeline > four.cost.compute * 3 / 8
    axes = {t.axis: t for t in four.cost.transfers}
    assert axes["pp"].nbytes > 0 and "pp" not in {t.axis for t in one.cost.transfers}
    sent = next(t for t in four.cost.transfers if t.what == "activations and their gradients")
    assert (sent.nbytes, sent.messages) == (2 * 8 * 32 * 64 * 2, 16)  # 2 b s h a microbatch, in two bytes


def test_held_activations_follow_the_schedule():
    runs = {name: run({"pp": 4}, 16, name) for name in ("gpipe", "1f1b", "zb-h1")}
    assert {name: max(pipeline(r).held) for name, r in runs.items()} == {"gpipe": 16, "1f1b": 4, "zb-h1": 4}
    layer = 32 * 2 * (4 * 64 + 4 * 64 + 2 * 4 * 64)  # 32 tokens of two bytes: norms; q, k, v and output; the MLP
    gpipe, one = (plan(runs[name]).memory["activations"] for name in ("gpipe", "1f1b"))
    assert gpipe == 16 * 3 * layer + 2 * 32 * 2 * 64  # and on the last rank the activations of its end
    assert one == 4 * 3 * layer


@pytest.mark.parametrize(
    "setup, says",
    [
        (run({"pp": 16}, 16), "makes 16 stages of 12 layers; some would have no layer"),
        pytest.param(
            run({"pp": 4}, 6, "interleaved"), "4 microbatches at a time; 6 do not fit", marks=pytest.mark.nightly
        ),
        pytest.param(run({"pp": 4}, 6, "dualpipe-v"), "needs 8 microbatches or more, got 6", marks=pytest.mark.nightly),
        (run({"pp": 4}, 8, "1b1f"), "'1b1f' is not known. Did you mean '1f1b'?"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(setup: Setup, says: str):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        plan(setup)


@pytest.mark.nightly
def test_a_search_splits_ranks_among_three_axes():
    found = search(run({"pp": 2, "dp": 2, "tp": 2}, 4))
    meshes = {(p.setup.axis("dp"), p.setup.axis("tp"), p.setup.axis("pp")) for p in (*found.best, *found.failed)}
    assert {d * t * p for d, t, p in meshes} == {8} and {(8, 1, 1), (1, 2, 4), (2, 2, 2), (1, 1, 8)} - meshes == set()
    assert {p.setup.schedule for p in found.best if p.setup.axis("pp") > 1} == {"1f1b", "interleaved", "zb-h1"}
    assert [p.cost.seconds for p in found.best] == sorted(p.cost.seconds for p in found.best)


@pytest.mark.nightly
def test_recipes_match_the_published_numbers(capsys: pytest.CaptureFixture[str]):
    made = {name: plan(recipe(name).setup) for name in ("mt-nlg-530b", "bloom-176b", "turing-nlg-17b", "zero-1t")}
    assert all(p.fits for p in made.values())
    big, bloom = made["mt-nlg-530b"], made["bloom-176b"]
    assert big.num_params == pytest.approx(529.6e9, rel=1e-3) and big.setup.world == 2240
    assert bubble(big.setup) == pytest.approx(34 / 240)
    assert bloom.num_params == pytest.approx(176.247e9, rel=1e-4) and bloom.setup.world == 384
    assert 16 * made["turing-nlg-17b"].num_params == pytest.approx(272e9, rel=0.02)
    assert made["zero-1t"].states.total == pytest.approx(16e9, rel=0.02)
    assert main(["plan", "--recipe", "bloom-176b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["published"]["devices"] == "384"


def test_a_recipe_takes_no_other_settings(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--recipe", "bloom-176b", "--zero", "2", "--batch", "7"]) == 2
    told = capsys.readouterr().err
    assert "--zero 2" in told and "--batch 7" in told
    assert main(["plan", "--recipe", "bloom"]) == 2
    assert "Did you mean 'bloom-176b'?" in capsys.readouterr().err
