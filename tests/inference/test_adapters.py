"""Adapters per request: bits of the request alone and of the base model, shared blocks, files of peft, refusals."""

import dataclasses
import functools
import pathlib
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import make_mesh
from shardfn.inference import Completion, DraftModel, Engine, Sampling, Suffix, hf_decoder
from shardfn.inference._cache import make_single_bodies
from shardfn.inference._low_rank import make_adapter, make_low_rank, stack_adapters
from shardfn.lora import LoRA, load_peft, save_peft
from shardfn.testing import distributed
from tests.inference.hf_models import MODELS
from tests.inference.stories import adapter, draw_alone, model
from tests.inference.test_hf import LIMITS as HF_LIMITS
from tests.inference.test_hf import PROMPTS
from tests.inference.test_stories import KINDS

GREEDY = Sampling(max_tokens=6, temperature=0.0, prompt_logprobs=True)
TARGETS = {"llama": [r"[qv]_proj\.weight", r"down_proj\.weight"], "gpt2": [r"c_attn\.weight", r"mlp\.c_proj\.weight"]}


@functools.cache
def served(kind: str, tp: str | None = None) -> tuple[Any, Any, Any]:
    """A model of transformers, and two adapters of other layers and ranks."""
    made, params = hf_decoder(MODELS[kind](), batch_invariant=True, tp=tp)
    adapters = {}
    for i, (name, targets) in enumerate({"a": TARGETS[kind], "b": TARGETS[kind][1:]}.items()):
        one, tree = adapter(params, targets, 2 + 7 * i, i)
        if kind == "gpt2":  # weights are [inputs, outputs]
            one = LoRA.of(params, targets, rank=2 + 7 * i, alpha=3, fan_in_fan_out=True)
            tree = {path: {"a": own["b"].mT, "b": own["a"].mT} for path, own in tree.items()}
        adapters[name] = one, {path: {k: x / 4 for k, x in own.items()} for path, own in tree.items()}
    return made, params, adapters


def engine(kind: str = "llama", **more: Any) -> Engine:
    made, params, adapters = served(kind)
    return Engine(made, params, limits=HF_LIMITS, **({"adapters": adapters} | more))


def check_merged(kind: str, name: str, prompt: list[int], got: Completion) -> None:
    """Log probabilities are those of the merged model, up to rounding."""
    _, params, adapters = served(kind)
    merged = MODELS[kind]()
    with torch.no_grad():
        for path, x in adapters[name][0].merge(params, adapters[name][1]).items():
            merged.get_parameter(path).copy_(x)
        sequence = torch.tensor([[*prompt, *got.tokens]])
        logprobs = merged(sequence).logits[0].log_softmax(-1)[:-1].gather(1, sequence[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([*got.prompt_logprobs, *got.logprobs]), logprobs, rtol=0, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers(kind: str) -> None:
    one, names = engine(kind), ["a", None, "b", "a", None]
    together = one.generate(PROMPTS, GREEDY, adapter=names)
    for prompt, name, got in zip(PROMPTS, names, together, strict=True):
        assert one.generate([prompt], GREEDY, adapter=name) == [got]
        if name is not None:
            check_merged(kind, name, prompt, got)
            other = engine(kind, adapters={"x": served(kind)[2][name]})  # without the other adapter's rank and layers
            assert other.generate([prompt], GREEDY, adapter="x") == [got]
    plain = engine(kind, adapters={}).generate(PROMPTS, GREEDY)
    assert [got for got, name in zip(together, names, strict=True) if name is None] == [plain[1], plain[4]]
    assert together[0] != plain[0] and together[2] != plain[2]


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_have_the_bits_of_one_device(world: int) -> None:
    made, params, adapters = served("llama", "tp")
    names = ["a", None, "b", "a", None]
    cut = Engine(made, params, limits=HF_LIMITS, mesh=make_mesh({"tp": world}), adapters=adapters)
    for prompt, name, got in zip(PROMPTS, names, cut.generate(PROMPTS, GREEDY, adapter=names), strict=True):
        sequence = [*prompt, *got.tokens]
        logits = logits_alone("llama", name, sequence[:-1])
        for place, logprob in enumerate([*got.prompt_logprobs, *got.logprobs]):
            assert draw_alone(logits[place], GREEDY, 0, place, sequence[place + 1]) == (sequence[place + 1], logprob)


def logits_alone(kind: str, name: str | None, tokens: list[int]) -> Tensor:
    """The logits of one forward of a sequence on one device."""
    made, params, adapters = served(kind)
    T, low = len(tokens), None
    at_T, bodies = torch.arange(T, dtype=torch.int32), make_single_bodies(made.cache, T)
    if name is not None:
        description, values = adapters[name]
        own = make_adapter(description, values, made.linear)
        sites = stack_adapters([own], made.linear, torch.device("cpu"))
        low = make_low_rank(array("i", [0] * T), [own.digest], {own.digest: 0}, sites)
    with torch.no_grad():
        return made.outputs(made.pack(params), torch.tensor(tokens, dtype=torch.int32), at_T, at_T, bodies, low)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("drafter", ["suffix", "model"])
def test_drafts_change_no_token_of_an_adapter(drafter: str) -> None:
    """A draft model knows no adapter, so that fewer of its drafts are right, and no other token is drawn."""
    made, params, adapters = served("llama")
    names, limits = ["a", None, "b"], dataclasses.replace(HF_LIMITS, drafts=6)
    one = Engine(made, params, limits=limits, adapters=adapters)
    guesser = Suffix() if drafter == "suffix" else DraftModel(made, params, limits=HF_LIMITS)
    guessing = Engine(made, params, limits=limits, adapters=adapters, runner=one.runner, drafter=guesser)
    for how in (GREEDY, Sampling(max_tokens=11, seed=3)):
        want = one.generate([PROMPTS[2]] * 3, how, adapter=names)
        for _ in range(2):
            assert [guessing.generate([PROMPTS[2]], how, adapter=name)[0] for name in names] == want
        assert guessing.generate([PROMPTS[2]] * 3, how, adapter=names) == want
    assert guessing.stats.speculation.accepted > 5


@pytest.mark.nightly
def test_blocks_are_not_shared_between_adapters() -> None:
    one, prompt, how = engine(), PROMPTS[2], dataclasses.replace(GREEDY, prompt_logprobs=False)
    for i, name in enumerate((None, "a"), 1):
        [first] = one.generate([prompt], how, adapter=name)
        assert one.stats.counts["cached"] == 5 * i
        assert one.generate([prompt], how, adapter=name) == [first]
        assert one.stats.counts["cached"] == 5 * i  # its own blocks are found
        assert engine().generate([prompt], how, adapter=name) == [first]


@pytest.mark.nightly
def test_another_adapter_under_the_same_name() -> None:
    made = served("llama")[2]
    one, prompt = engine(adapters={"x": made["a"]}), PROMPTS[2]
    old = one.generate([prompt], GREEDY, adapter="x")
    with pytest.raises(ValueError, match=r"an adapter named 'x' is there. Remove it first"):
        one.adapters.add("x", made["b"])
    stream = one.stream(prompt, GREEDY, adapter="x")
    with pytest.raises(ValueError, match=r"adapter 'x' is of requests in progress, \['request-1'\]. Cancel them"):
        one.adapters.remove("x")
    assert [t.token for t in stream][-len(old[0].tokens) :] == old[0].tokens
    one.adapters.remove("x")
    one.adapters.add("x", made["b"])
    assert one.adapters.names == ["x"]
    assert one.generate([prompt], GREEDY, adapter="x") == engine().generate([prompt], GREEDY, adapter="b")


@pytest.mark.nightly
def test_embeddings_with_an_adapter() -> None:
    one = engine()
    made = one.embed(PROMPTS, "mean", adapter=["a", None, "b", "a", None])
    assert torch.equal(made[0], one.embed(PROMPTS[:1], "mean", adapter="a")[0])
    assert torch.equal(made[1], engine(adapters={}).embed(PROMPTS[1:2], "mean")[0])
    assert not torch.equal(made[0], one.embed(PROMPTS[:1], "mean")[0])


@pytest.mark.nightly
def test_files_of_peft(tmp_path: pathlib.Path) -> None:
    made, params, adapters = served("llama")
    save_peft(tmp_path, *adapters["a"])
    one = Engine(made, params, limits=HF_LIMITS, adapters={"file": load_peft(tmp_path, params)})
    assert one.generate(PROMPTS, GREEDY, adapter="file") == engine().generate(PROMPTS, GREEDY, adapter="a")


@pytest.mark.nightly
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_adapters_and_streamed_weights(base: torch.dtype, dtype: torch.dtype) -> None:
    """Adapters are added in float32, for any dtypes of their files and of the base, on the device and on the host."""
    made, params = hf_decoder(MODELS["llama"]().to(base), batch_invariant=True)
    description, values = adapter(params, TARGETS["llama"], 3, 0)
    narrow = {path: {k: (x / 4).bfloat16() for k, x in own.items()} for path, own in values.items()}
    of = {path: {k: x.to(dtype) for k, x in own.items()} for path, own in narrow.items()}
    wide = {path: {k: x.float() for k, x in own.items()} for path, own in narrow.items()}
    names = ["a", None, "a", "a", None]
    plain = Engine(made, params, limits=HF_LIMITS, adapters={"a": (description, wide)})
    want = plain.generate(PROMPTS, GREEDY, adapter=names)
    streamed = Engine(made, params, limits=HF_LIMITS, adapters={"a": (description, of)}, weights="host")
    assert streamed.generate(PROMPTS, GREEDY, adapter=names) == want
    assert [streamed.generate([p], GREEDY, adapter=n)[0] for p, n in zip(PROMPTS, names, strict=True)] == want
    assert streamed.generate(PROMPTS[:1], GREEDY) != want[:1]


@pytest.mark.nightly
def test_the_training_forward_is_near() -> None:
    _, params, adapters = served("llama")
    _, apply = sf.from_module(MODELS["llama"]())
    description, values = adapters["a"]
    [got] = engine().generate([PROMPTS[0]], GREEDY, adapter="a")
    sequence = torch.tensor([[*PROMPTS[0], *got.tokens]])
    with torch.no_grad():
        logits = description.adapt(lambda p, ids: apply(p, input_ids=ids).logits)(
            {"base": params, "lora": values}, sequence
        )
    logprobs = logits[0].log_softmax(-1)[:-1].gather(1, sequence[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([*got.prompt_logprobs, *got.logprobs]), logprobs, rtol=0, atol=1e-3)


@pytest.mark.day("changes0")
@pytest.mark.parametrize("changes", [{"per_head": True}, {"stacked": True}, {"per_head": True, "stacked": True}])
def test_leaves_of_gpt_by_head_and_stacked(changes: dict[str, bool]) -> None:
    one = model(**changes)
    params = one.params[0]
    own = adapter(params, [r"wq$", r"w_down$"], 2, 0)
    prompt = [1, 2, 0, 5]
    limits = KINDS["gpt2"][1]
    [got] = Engine(one.decoder, params, limits=limits, adapters={"x": own}).generate([prompt], GREEDY, adapter="x")
    [want] = Engine(one.decoder, own[0].merge(params, own[1]), limits=limits).generate([prompt], GREEDY)
    assert got.tokens == want.tokens
    told, merged = (torch.tensor([*c.prompt_logprobs, *c.logprobs]) for c in (got, want))
    torch.testing.assert_close(told, merged, rtol=0, atol=1e-3)


def test_refusals() -> None:
    _, params, adapters = served("llama")
    one, (description, values) = engine(), adapters["a"]
    path = "model.layers.0.self_attn.q_proj.weight"
    for name in ("c", 3):
        with pytest.raises(ValueError, match=rf"adapter must be one of \['a', 'b'\], got {name!r}"):
            one.add([1, 2], adapter=name)
    with pytest.raises(ValueError, match=r"adapter must be one of \['a', 'b'\], got None"):
        one.adapters.remove(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"5 prompts and 2 adapters. Give one for all, or one each"):
        one.generate(PROMPTS, GREEDY, adapter=["a", "b"])
    with pytest.raises(TypeError, match=r"adapter 'c' is a dict. Pass \(lora, values\)"):
        one.adapters.add("c", values)
    other = {**values, path: {"a": values[path]["a"], "b": torch.ones(24, 3)}}
    with pytest.raises(ValueError, match=rf"(?s)adapter 'c': .*{path}: b @ a is \(24, 3\) @ \(2, 24\)"):
        one.adapters.add("c", (description, other))
    with pytest.raises(ValueError, match=r"k_proj\.weight is in the values alone"):
        one.adapters.add("c", (description, {**values, "k_proj.weight": {}}))
    head = LoRA.of(params, [r"lm_head"], rank=2)
    with pytest.raises(ValueError, match=r"lm_head.weight is not a linear layer that may have an adapter"):
        one.adapters.add("c", (head, {"lm_head.weight": {"a": torch.ones(2, 24), "b": torch.ones(13, 2)}}))
    dora = LoRA.of(params, [r"0.self_attn.q_proj"], rank=2, dora=True)
    with pytest.raises(ValueError, match="a request's adapter has a and b alone: merge this one"):
        one.adapters.add("c", (dora, dora.init(torch.tensor([0, 1]), params=params)))
    inexact, _ = hf_decoder(MODELS["llama"](), batch_invariant=False)
    with pytest.raises(ValueError, match="needs a batch-invariant decoder"):
        Engine(inexact, params, limits=HF_LIMITS, adapters=adapters)
    assert one.adapters.names == ["a", "b"] and one.idle
