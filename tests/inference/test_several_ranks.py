"""Engines on several ranks: equal tokens for each number of ranks, and errors where ranks disagree."""

import os
import pathlib
import signal
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from shardfn import RankError, make_mesh
from shardfn.core import Mesh
from shardfn.inference import Engine, EngineCore, Runner, Sampling, Token, decoder
from shardfn.models import gpt
from shardfn.nn import moe
from shardfn.testing import distributed
from tests.inference.stories import Model, check, model, run
from tests.inference.test_stories import KINDS, MANY, drawn_stories

PARTS = 10


def tell(world: int, kind: str, number: int, part: slice = slice(None), **more: Any) -> None:
    """Runs a part of some stories on all ranks of a world in lockstep, each beside its own forward on one device."""
    changes, limits = KINDS[kind]
    one = model("tp", **(changes | more))
    runner = Runner(one.decoder, limits, mesh=make_mesh({"tp": world}))
    for story in drawn_stories(limits, number, changes)[part]:
        told, _ = run(story, one, runner, limits)
        check(story, told, one)


@pytest.mark.nightly
@distributed(world=[2, 4])
def test_stories(world: int) -> None:
    tell(world, "gpt2", 6)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@distributed(world=[2, 4], timeout=900)
def test_many_stories(world: int, part: int) -> None:
    tell(world, "gpt2", MANY, slice(part, None, PARTS))


@pytest.mark.nightly
@distributed(world=2)
def test_stories_of_latent_attention() -> None:
    tell(2, "latent", 6)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek"])
@distributed(world=2)
def test_stories_of_experts(kind: str) -> None:
    changes, limits = KINDS[kind]
    experts = replace(changes["experts"], exchange=moe.AllReduce("tp", in_order=True))
    one, cut = model(**changes), model("tp", **changes | {"experts": experts})
    runner = Runner(cut.decoder, limits, mesh=make_mesh({"tp": 2}))
    for story in drawn_stories(limits, 30 if kind == "qwen3_moe" else 6):
        told, _ = run(story, cut, runner, limits)
        check(story, told, one)


@pytest.mark.nightly
@distributed(world=2)
def test_stories_of_grouped_heads() -> None:
    tell(2, "llama", 30)


@pytest.mark.nightly
@distributed(world=2)
def test_stories_of_images() -> None:
    tell(2, "images", 10)


@pytest.mark.nightly
@distributed(world=3)
def test_stories_on_three_ranks() -> None:
    tell(3, "llama", 20, d_model=48, num_heads=6, num_kv_heads=3, d_ff=96, chunks=24)


@pytest.mark.nightly
@distributed(world=2)
def test_stories_beside_a_slow_rank() -> None:
    step = EngineCore.step

    def late(self: EngineCore) -> list[Token]:
        if self._runner.mesh.rank == 1 and self._state.step % 3 == 1:
            time.sleep(0.03)  # longer than a wait spins
        return step(self)

    with mock.patch.object(EngineCore, "step", late):
        tell(2, "gpt2", 3)


@distributed(world=2)
def test_a_different_request_on_a_rank_is_an_error_within_one_step() -> None:
    torch.manual_seed(0)
    changes, limits = KINDS["gpt2"]
    one, mesh = model("tp", **changes), make_mesh({"tp": 2})
    engine = Engine(one.decoder, one.params[0], mesh=mesh, limits=limits)
    engine.add([1, 2, 3], Sampling(max_tokens=3))
    engine.step()
    engine.add([1, 2, 3 + mesh.rank])
    with pytest.raises(RankError, match=r"ranks 0 and 1 differ in sequences\[request-1.0"):
        engine.step()
    with pytest.raises(RuntimeError, match="Make another engine"):
        engine.step()


@distributed(world=2)
def test_an_altered_state_is_named_within_one_step() -> None:
    changes, limits = KINDS["gpt2"]
    one, mesh = model("tp", **changes), make_mesh({"tp": 2})
    engine = Engine(one.decoder, one.params[0], mesh=mesh, limits=limits)
    engine.add([1, 2, 3], Sampling(max_tokens=9, seed=4))
    engine.step()
    if mesh.rank == 1:
        engine.core._state.sequences[0].key ^= 1
    with pytest.raises(RankError, match=r"differ in sequences\[request-0.0\].key"):
        engine.step()


@distributed(world=2, timeout=60)
def _die_in_the_middle(out: pathlib.Path) -> None:
    changes, limits = KINDS["gpt2"]
    one, mesh = model("tp", **changes), make_mesh({"tp": 2})
    engine = Engine(one.decoder, one.params[0], mesh=mesh, limits=limits)
    told, start = 0, time.monotonic()
    try:
        for token in engine.stream([1, 2, 3], Sampling(max_tokens=20)):
            told += token.token is not None
            if mesh.rank == 1 and told == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
    except RankError as error:
        (out / f"rank{mesh.rank}").write_text(f"{time.monotonic() - start:.1f} {error}")
        raise


@pytest.mark.nightly
def test_a_rank_that_is_killed_is_an_error_of_the_others(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RankError, match="rank 1"):
        _die_in_the_middle(tmp_path)
    seconds, text = (tmp_path / "rank0").read_text().split(" ", 1)
    assert float(seconds) < 5 and "rank 1" in text


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek"])
@distributed(world=[2, 3])
def test_steps_of_experts_in_each_layout(world: int, kind: str) -> None:
    """Experts are cut by number beside all tokens, get tokens, or are gathered: tokens and experts are the same."""
    given, limits = KINDS[kind]
    changes: dict[str, Any] = given | {
        "num_heads": 6,
        "num_kv_heads": None if kind == "deepseek" else 6,
        "d_model": 48,
        "d_ff": 96,
        "chunks": 24 if world == 3 else 8,
    }
    experts = replace(changes["experts"], exchange=moe.AllReduce("tp", in_order=True))
    one, cut, mesh = model(**changes), model("tp", **changes | {"experts": experts}), make_mesh({"tp": world})
    prompts, how = [[1, 2, 3], [5, 2] * 6, [4] * 9], Sampling(max_tokens=6, temperature=0.9, seed=3)
    plain = Engine(one.decoder, one.params[0], limits=limits, record_experts=True)
    want = [(x.tokens, x.logprobs, x.expert_ids.tolist()) for x in plain.generate(prompts, how)]
    shift = (("tp", 1), ("ep", 3), ("sp", limits.budget))
    for layouts, axis in ((shift, None), ((("sp", 1),), "tp"), ((("ep", 1),), None)):
        own = replace(limits, layouts=layouts)
        engine = Engine(cut.decoder, cut.params[0], mesh=mesh, limits=own, weights_axis=axis, record_experts=True)
        got = [(x.tokens, x.logprobs, x.expert_ids.tolist()) for x in engine.generate(prompts, how)]
        assert got == want, (layouts, axis)


def make_shift_mesh(world: int) -> Mesh:
    """Tokens along "sp" alone on 2 ranks, and beside "tp" on 4."""
    return make_mesh({"sp": 2} if world == 2 else {"tp": world // 2, "sp": 2})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi", "olmo2", "swift"])
@distributed(world=[2, 4], timeout=600)
def test_stories_that_shift(world: int, kind: str) -> None:
    """Steps of many rows have cut tokens, and those of few rows cut weights, over one copy of weights and one cache."""
    given, limits = KINDS[kind]
    changes = given | {"num_kv_heads": 4}
    one, cut = model(**changes), model("tp", "sp", **changes)
    own = replace(limits, layouts=(("tp", 1), ("sp", 4)))
    runner = Runner(cut.decoder, own, mesh=make_shift_mesh(world))
    for story in drawn_stories(own, 12 if kind == "gpt2" else 5):
        told, _ = run(story, cut, runner, own)
        check(story, told, one)


def stack(one: Model, **how: Any) -> Model:
    """Returns the model with stacked layers, cut otherwise, without adapters."""
    config = replace(one.config, stacked=True)
    params = [gpt.stack_blocks(config, x, torch.stack) for x in one.params]
    return Model(config, decoder(config, **how), params)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@distributed(world=[2, 4], timeout=600)
def test_stories_of_a_pipeline(world: int, kind: str) -> None:
    """Plans of two lanes of sequences are in flight, on two stages of layers."""
    changes, limits = KINDS[kind]
    one = Model((whole := model(**changes)).config, whole.decoder, whole.params)
    cut = stack(one, tp="tp" if world == 4 else None, pp=("pp", 2))
    runner = Runner(cut.decoder, limits, mesh=make_mesh({"pp": 2} | ({"tp": 2} if world == 4 else {})))
    for story in drawn_stories(limits, 8):
        told, _ = run(story, cut, runner, limits)
        check(story, told, one)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt2"])
@distributed(world=[2, 4], timeout=600)
def test_stories_of_groups(world: int, kind: str) -> None:
    """Sequences are dealt to groups of ranks, and experts lie on all ranks."""
    changes, limits = KINDS[kind]
    one = Model((whole := model(**changes)).config, whole.decoder, whole.params)
    made = decoder(one.config, tp="tp" if world == 4 else None, dp="dp")
    cut = Model(one.config, made, one.params)
    runner = Runner(made, limits, mesh=make_mesh({"dp": 2} | ({"tp": 2} if world == 4 else {})))
    for story in drawn_stories(limits, 8):
        told, _ = run(story, cut, runner, limits)
        check(story, told, one)


@pytest.mark.nightly
@distributed(world=2)
def test_a_shift_has_the_bits_of_a_device_and_of_codes() -> None:
    """Steps of both layouts, of weights in floats and in codes, whose groups of inputs a rank reads in part."""
    changes, limits = KINDS["gpt2"][0] | {"d_model": 64}, replace(KINDS["gpt2"][1], layouts=(("tp", 1), ("sp", 4)))
    one, mesh, prompts = model(**changes), make_shift_mesh(2), [[1, 2, 3], [5, 2] * 6]
    how = Sampling(max_tokens=3, temperature=0.9, seed=3)
    for kind in (None, "int4"):
        plain, cut = (decoder(one.config, sp=sp, quantization=kind) for sp in (None, "sp"))
        want = Engine(plain, one.params[0], limits=KINDS["gpt2"][1], eager_steps=99).generate(prompts, how)
        engine = Engine(cut, one.params[0], mesh=mesh, limits=limits, eager_steps=99)
        assert engine.generate(prompts, how) == want
        assert engine.core.weights["tp"] is engine.core.weights["sp"]


@distributed(world=2)
def test_weights_that_are_cut_between_their_uses() -> None:
    """Each rank keeps a half of each large weight, and gathers a layer ahead."""
    changes, limits = KINDS["gpt2"]
    one, mesh = model(**changes), make_mesh({"dp": 2})
    prompts, how = [[1, 2, 3], [4] * 9], Sampling(max_tokens=6, temperature=0.9, seed=3)
    plain = Engine(one.decoder, one.params[0], limits=limits)
    want, whole = plain.generate(prompts, how), plain.runner.held_memory(plain.core.weights, plain.core.cache)
    engine = Engine(one.decoder, one.params[0], mesh=mesh, limits=limits, weights_axis="dp")
    held = engine.runner.held_memory(engine.core.weights, engine.core.cache)
    assert engine.generate(prompts, how) == want and held.weights < 0.7 * whole.weights
    engine.update_weights(one.params[1])
    plain.update_weights(one.params[1])
    assert engine.generate(prompts, how) == plain.generate(prompts, how)
    with pytest.raises(ValueError, match=r"axes \['dp'\] that no layout|cut it over no axis"):
        Engine(one.decoder, one.params[0], mesh=mesh, limits=limits)
    with pytest.raises(ValueError, match="weights_axis='tp' must be an axis of the mesh"):
        Engine(one.decoder, one.params[0], mesh=mesh, limits=limits, weights_axis="tp")
