"""Covers the steps of `inference`: biases of tokens, the most probable ones at each place, and threads."""

import dataclasses
from typing import Any

import pytest
import torch

from shardfn import core, make_mesh
from shardfn.core import Mesh
from shardfn.engine import BoundCall
from shardfn.inference import Decoder, Engine, Runner, Sampling, decoder, limits_of
from shardfn.models import gpt
from shardfn.models.moe import Experts
from tests.inference.test_engine import engine


def test_biases_of_tokens() -> None:
    how = Sampling(max_tokens=6, temperature=0.0, top_logprobs=2)
    one = engine()
    [free] = one.generate([[1, 2, 3]], how)
    assert [len(top) for top in free.top_logprobs] == [2] * 6
    for token, logprob, top in zip(free.tokens, free.logprobs, free.top_logprobs, strict=True):
        assert top[0] == (token, logprob)  # the most probable one is drawn, with one value
    [never, always] = one.generate(
        [[1, 2, 3]] * 2,
        [
            dataclasses.replace(how, logit_bias=((free.tokens[0], -100.0),)),
            dataclasses.replace(how, logit_bias=((4, 100.0),)),
        ],
    )
    assert never.tokens[0] == free.top_logprobs[0][1][0]
    assert always.tokens == [4] * 6 and always.top_logprobs[0] == free.top_logprobs[0]
    assert one.generate([[1, 2, 3]], Sampling(max_tokens=6, temperature=0.0))[0].top_logprobs == ()


@pytest.mark.nightly
@pytest.mark.parametrize("exact", [True, False])
def test_torch_takes_one_thread_beside_kernels(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()  # by torch in the pure step, when it is captured and when it runs
    config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32, batch_invariant=exact)
    made = decoder(config)

    def outputs(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return made.outputs(*args)

    def call(self: BoundCall, *args: Any, run: Any = BoundCall.__call__) -> Any:
        seen.append(torch.get_num_threads())
        return run(self, *args)

    monkeypatch.setattr(BoundCall, "__call__", call)
    one = Engine(dataclasses.replace(made, outputs=outputs), gpt.init(config, core.key(0)))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        one.generate([[1, 2, 3]], Sampling(max_tokens=2))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert len(seen) >= 4 and set(seen) == {1 if exact else 3}


def _lower(made: Decoder, params: Any, mesh: Mesh, layouts: tuple[tuple[str, int], ...], rows: int) -> tuple[Any, Any]:
    """Returns the memory plan of an engine, and the cost of a step of some rows, from shapes only."""
    runner = Runner(made, limits_of(made, running=1, buckets=(2, rows), layouts=layouts), mesh=mesh)
    return runner.plan_memory(params), runner.lower_step(params, rows).cost_analysis()


def test_layouts_that_shift_add_no_bytes() -> None:
    """Both layouts read one copy of the weights in place, and each costs what it costs alone."""
    sizes: dict[str, Any] = {"vocab_size": 61, "num_layers": 2, "d_model": 128, "num_heads": 8, "max_len": 64}
    config = gpt.Config(**sizes, batch_invariant=True)
    with core.deferred():
        params = gpt.init(config, core.key(0))
    cut, wide = (make_mesh(x, device="cpu", abstract=True) for x in ({"tp": 2, "sp": 2}, {"tp": 4}))
    shift, tp = decoder(config, tp="tp", sp="sp"), decoder(config, tp="tp")
    large, dear = _lower(shift, params, cut, (("tp", 1), ("sp", 16)), 32)
    small, cheap = _lower(shift, params, cut, (("tp", 1), ("sp", 64)), 32)
    alone, own = _lower(shift, params, cut, (("sp", 1),), 32)
    fixed, want = _lower(tp, params, wide, (("tp", 1),), 32)
    assert large == alone and (dear.sent, dear.flops) == (own.sent, own.flops)
    assert small.weights == large.weights and small.cache == large.cache == fixed.cache
    assert (cheap.sent, cheap.flops) == (want.sent, want.flops)
    assert small.step < fixed.step + 4096  # no weight is copied in a step


def test_layouts_that_cannot_shift_are_refused() -> None:
    base: dict[str, Any] = {
        "vocab_size": 61,
        "num_layers": 1,
        "d_model": 48,
        "num_heads": 4,
        "max_len": 32,
        "batch_invariant": True,
    }
    mesh = make_mesh({"tp": 2, "sp": 2}, device="cpu", abstract=True)

    def make_runner(**changes: Any) -> Runner:
        one = decoder(gpt.Config(**base | changes), tp="tp", sp="sp")
        return Runner(one, limits_of(one, layouts=(("tp", 1), ("sp", 64))), mesh=mesh)

    make_runner()
    for changes, said in (
        ({"d_ff": 90}, r"4 ranks of \('tp', 'sp'\) do not divide the 90 features of the MLP"),
        ({"num_kv_heads": 2}, r"4 ranks of \('tp', 'sp'\) do not divide the 2 key heads"),
        ({"chunks": 6}, r"do not divide the 6 chunks .* use Config\(chunks=8\)"),
        ({"batch_invariant": False}, "needs batch-invariant layers"),
        ({"experts": Experts(num=4)}, "a model without experts"),
    ):
        with pytest.raises(ValueError, match=said):
            make_runner(**changes)
    with pytest.raises(ValueError, match=r"ascending from 1, .* got \(\('tp', 1\), \('sp', 0\)\)"):
        limits_of(decoder(gpt.Config(**base), tp="tp", sp="sp"), layouts=(("tp", 1), ("sp", 0)))
    with pytest.raises(ValueError, match="must be different axes"):
        decoder(gpt.Config(**base), tp="tp", sp="tp")
    wider: dict[str, Any] = base | {"d_model": 64}
    config = gpt.Config(**wider)
    coded = decoder(config, tp="tp", sp="sp", quantization="int8")
    with pytest.raises(
        ValueError, match=r"32 inputs .* share a scale(.|\n)*blocks.0.wo: each of 2 ranks of 'sp' has 16"
    ):
        Runner(coded, limits_of(coded), mesh=mesh).plan_memory(gpt.init(config, core.key(0)))


def test_lanes_that_do_not_fit_are_refused() -> None:
    base: dict[str, Any] = {"vocab_size": 61, "num_layers": 4, "d_model": 32, "num_heads": 4, "max_len": 32}
    exact = gpt.Config(**base, batch_invariant=True)
    stacked = dataclasses.replace(exact, stacked=True)
    mesh = make_mesh({"pp": 2}, device="cpu", abstract=True)
    for said, call in (
        ("must be of a batch-invariant model with stacked layers", lambda: decoder(exact, pp=("pp", 2))),
        ("3 stages of 'pp' must divide the 4 layers", lambda: decoder(stacked, pp=("pp", 3))),
        ("pp='pp' must have at least 1 stage, got 0", lambda: decoder(stacked, pp=("pp", 0))),
        ("only one of sp, pp and dp may be given", lambda: decoder(stacked, pp=("pp", 2), dp="dp")),
        ("dp='dp' needs batch-invariant layers", lambda: decoder(gpt.Config(**base), dp="dp")),
        (
            "must have the same kinds of layers in the same order",
            lambda: decoder(dataclasses.replace(stacked, window=(5, None, None, 7)), pp=("pp", 2)),
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    four = decoder(stacked, pp=("pp", 4))
    with pytest.raises(ValueError, match="2 ranks of 'pp', but the decoder has 4 stages"):
        Runner(four, limits_of(four), mesh=mesh)
    two = decoder(stacked, pp=("pp", 2))
    with pytest.raises(ValueError, match="must be on the device"):
        Runner(two, limits_of(two), mesh=mesh, cache="host")
    assert decoder(dataclasses.replace(stacked, window=(5, None, 5, None)), pp=("pp", 2)).cache.layers == 2
    with core.deferred():
        params, whole = gpt.init(stacked, core.key(0)), gpt.init(exact, core.key(0))
    cut, one = Runner(two, limits_of(two), mesh=mesh), Runner(decoder(exact), limits_of(decoder(exact)))
    stage, alone = cut.plan_memory(params), one.plan_memory(whole)
    assert stage.cache == alone.cache  # half of the layers, of two lanes
    assert stage.weights < 0.6 * alone.weights
