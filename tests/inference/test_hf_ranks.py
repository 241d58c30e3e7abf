"""Covers models of transformers on several ranks: tokens and logits of one device, edges of layers, and refusals."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardfn import core
from shardfn.collectives import all_gather_invariant
from shardfn.core import Mesh
from shardfn.inference import Decoder, Engine, Runner, Sampling, _hf_decoder, hf_decoder
from shardfn.inference._cache import make_single_bodies
from shardfn.inference._hf_edges import edges_of
from shardfn.modules import RowEdge, _batch_invariant, decoding
from shardfn.testing import distributed
from shardfn.transforms import sharded
from tests.inference.hf_models import MODELS, VOCAB
from tests.inference.stories import Arrival, Story, check, run
from tests.inference.test_hf import LIMITS, PROMPTS, Model
from tests.inference.test_stories import drawn_stories

DAY = ["gpt2", "llama", "mixtral"]
KINDS = [k if k == "llama" else pytest.param(k, marks=pytest.mark.nightly) for k in MODELS]
GREEDY = Sampling(max_tokens=8, temperature=0.0, prompt_logprobs=True)
SAMPLED = Sampling(max_tokens=8, temperature=1.2, top_k=5, seed=7, n=2)


def model_of(kind: str, ranks: int) -> Any:
    """A model whose key heads this number of ranks divides; its features and its vocabulary are not divided."""
    if ranks == 2 or (ranks, kind) == (4, "gpt2"):
        return MODELS[kind]()
    if ranks == 4:
        return MODELS[kind](hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    if kind in ("gpt2", "opt"):
        return MODELS[kind](**{"n_head" if kind == "gpt2" else "num_attention_heads": 6})
    hidden = {"hidden_size": 48} if kind == "phi" else {}
    return MODELS[kind](num_attention_heads=6, num_key_value_heads=3, **hidden)


def logits_of(decoder: Decoder, params: Any, mesh: Mesh, tokens: list[int]) -> Tensor:
    """One forward of a sequence on the ranks of a mesh, with a cache of one block."""
    pack = sharded(decoder.pack, mesh=mesh, specs=decoder.specs, out_specs=decoder.packed)
    T = len(tokens)
    at_T = torch.arange(T, dtype=torch.int32)

    def forward(weights: Any) -> Tensor:
        bodies = make_single_bodies(decoder.cache, T, ranks=mesh.axis_size("tp"))
        return decoder.logits(weights, torch.tensor(tokens, dtype=torch.int32), at_T, at_T, bodies)

    with torch.no_grad():
        return sharded(forward, mesh=mesh, specs=decoder.packed)(pack(pack.init(params)))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@distributed(world=[2, 3])
def test_tokens_and_logits_are_those_of_one_device(world: int, kind: str) -> None:
    compare(world, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", DAY)
@distributed(world=4)
def test_tokens_and_logits_on_four_ranks(world: int, kind: str) -> None:
    compare(world, kind)


def compare(world: int, kind: str) -> None:
    """Logits and tokens of ranks, held against one device."""
    model, mesh = model_of(kind, world), core.make_mesh({"tp": world})
    one, params = hf_decoder(model, batch_invariant=True)
    cut, _ = hf_decoder(model, tp="tp")
    reference: Any = Model(cut, [params], one)
    for prompt in PROMPTS:
        got = logits_of(cut, params, mesh, prompt)
        assert got.shape == (len(prompt), VOCAB) and torch.equal(got, reference.full(0, tuple(prompt)))
    greedy, sampled = (arrivals(how) for how in (GREEDY, SAMPLED))
    runner = Runner(cut, LIMITS, mesh=mesh)
    for story in (Story(greedy, (), 13), Story(sampled, (), 13)):
        told, _ = run(story, reference, runner, LIMITS)
        assert check(story, told, reference) > 40


def arrivals(sampling: Sampling) -> tuple[Arrival, ...]:
    """All prompts at once."""
    return tuple(Arrival(0, tuple(prompt), sampling) for prompt in PROMPTS)


def edges(model: Any, key_heads: int = 2) -> dict[str, RowEdge]:
    """Of one layer, by the names of modules."""
    function = decoding(model)
    linear = {n: False for n in function.params if "proj.weight" in n or "lm_head" in n}
    found = edges_of(function, linear, key_heads)
    return {n.split(".")[-2]: edge for n, edge in found.items() if ".1." in n}


ENTER = dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], RowEdge.ENTER)
LEAVE = dict.fromkeys(["o_proj", "down_proj"], RowEdge.LEAVE)


def test_a_rank_has_its_own_features_where_the_plan_of_the_model_holds() -> None:
    model = MODELS["llama"]()
    assert edges(model) == ENTER | LEAVE
    assert edges(model, key_heads=1) == {}
    apart = {"q_proj", "k_proj", "v_proj", "o_proj"}  # OLMo's norms are over all heads
    assert edges(MODELS["olmo3"]()) == {n: e for n, e in (ENTER | LEAVE).items() if n not in apart}


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_join_results_four_times_a_layer_of_llama() -> None:
    mesh, joins = core.make_mesh({"tp": 2}), {"llama": 4, "gpt2": 5}
    for kind, num in joins.items():
        cut, params = hf_decoder(MODELS[kind](), tp="tp")
        with (
            mock.patch.object(_batch_invariant, "all_gather_invariant", side_effect=all_gather_invariant) as of_layers,
            mock.patch.object(_hf_decoder, "all_gather_invariant", side_effect=all_gather_invariant) as of_heads,
        ):
            logits_of(cut, params, mesh, [1, 2, 3])
        assert of_layers.call_count + of_heads.call_count == 2 * num + 1  # and the vocabulary


@pytest.mark.parametrize("wrong", ["gate_proj", "k_proj", "down_proj"])
def test_a_plan_that_does_not_hold_is_not_used(wrong: str) -> None:
    model = MODELS["llama"]()
    model._tp_plan = {name: kind for name, kind in model._tp_plan.items() if not name.endswith(wrong)}
    assert edges(model) == {}


class NormOfAll(torch.nn.Module):
    """A function of all features, in which each depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        """The features over their mean square."""
        return x * x.square().mean(-1, keepdim=True).rsqrt()


def test_code_between_layers_that_needs_all_features_is_found() -> None:
    model = MODELS["llama"]()
    model.model.layers[1].mlp.act_fn = NormOfAll()
    assert edges(model) == {}


def test_layers_that_are_not_exact_are_not_cut() -> None:
    words = r"LlamaForCausalLM with tp='tp': ranks cut only batch-invariant linear layers; run it on one rank"
    with pytest.raises(ValueError, match=rf"(?s){words}.*batch_invariant=False"):
        hf_decoder(MODELS["llama"](), batch_invariant=False, tp="tp")
    with pytest.raises(ValueError, match=rf"(?s){words}.*weights are of torch.float64"):
        hf_decoder(MODELS["llama"]().double(), tp="tp")


@pytest.mark.nightly
@distributed(world=3)
def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    decoder, params = hf_decoder(MODELS["llama"](), tp="tp")
    with pytest.raises(ValueError, match="3 ranks of 'tp' do not divide the 2 key heads of the model"):
        Engine(decoder, params, mesh=core.make_mesh({"tp": 3}), limits=LIMITS)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
@distributed(world=[2, 3])
def test_stories_with_other_weights(world: int, kind: str) -> None:
    model, mesh = model_of(kind, world), core.make_mesh({"tp": world})
    (one, params), (cut, _) = hf_decoder(model, batch_invariant=True), hf_decoder(model, tp="tp")
    versions = [{name: x * scale for name, x in params.items()} for scale in (1.0, 1.2, 0.8)]
    reference: Any = Model(cut, versions, one)
    runner = Runner(cut, LIMITS, mesh=mesh)
    for story in drawn_stories(LIMITS, 12):
        told, _ = run(story, reference, runner, LIMITS)
        check(story, told, reference)


@distributed(world=2)
def test_16_bit_weights_on_ranks() -> None:
    model, mesh = MODELS["llama"]().bfloat16(), core.make_mesh({"tp": 2})
    (one, params), (cut, _) = hf_decoder(model, batch_invariant=True), hf_decoder(model, tp="tp")
    got = logits_of(cut, params, mesh, PROMPTS[2])
    assert torch.equal(got.float(), Model(one, [params]).full(0, tuple(PROMPTS[2])))


@pytest.mark.nightly
@pytest.mark.parametrize("codes", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
@distributed(world=[2, 3])
def test_ranks_have_the_bits_of_one_device_in_codes(world: int, kind: str, codes: Any) -> None:
    model, mesh = model_of(kind, world), core.make_mesh({"tp": world})
    (one, params), (cut, _) = hf_decoder(model, quantization=codes), hf_decoder(model, tp="tp", quantization=codes)
    reference: Any = Model(cut, [params], one)
    plain: Any = Model(cut, [params], hf_decoder(model, batch_invariant=True)[0])
    for prompt in PROMPTS[:3]:
        got = logits_of(cut, params, mesh, prompt)
        assert torch.equal(got, reference.full(0, tuple(prompt))) and not torch.equal(got, plain.full(0, tuple(prompt)))
    story = Story(arrivals(GREEDY), (), 13)
    told, _ = run(story, reference, Runner(cut, LIMITS, mesh=mesh), LIMITS)
    assert check(story, told, reference) > 40
