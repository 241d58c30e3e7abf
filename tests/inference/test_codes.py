"""Covers weights in codes in the engine: tokens and logits are those of the decoded weights, bit for bit."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import kernels
from shardfn.core import tree_map
from shardfn.inference import Engine, Runner, Sampling, decoder, hf_decoder, logprobs
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.inference.stories import VERSIONS, Model, check, run
from tests.inference.test_stories import KINDS, LLAMA, drawn_stories

CODES: tuple[kernels.Quantization, ...] = ("int8", "int4")
_LINEAR = ("wq", "wk", "wv", "wo", "w_up", "w_gate", "w_down")
SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "num_layers": 2,
    "d_model": 64,
    "num_heads": 4,
    "max_len": 28,
    "batch_invariant": True,
}


def decoded(config: gpt.Config, params: Any, codes: kernels.Quantization, ranks: int = 1) -> Any:
    """The parameters with the values of their codes."""

    def of(name: str, w: Tensor) -> Tensor:
        matrix = (w.flatten(1) if name == "wo" else w.flatten(0, -2)).detach()
        return kernels.unpack_rows(kernels.pack_rows(matrix, codes), *matrix.shape).view(w.shape)

    head = "embed" if config.tie_embeddings else "head"
    blocks = [{name: of(name, w) if name in _LINEAR else w for name, w in p.items()} for p in params["blocks"]]
    return params | {"blocks": blocks, head: of(head, params[head])}


def as_blocks(config: gpt.Config, params: Any, codes: kernels.Quantization) -> Any:
    """The parameters with linear weights as the blocks of a GGUF file."""

    def of(w: Tensor) -> Tensor:
        return kernels.quantize_blocks(w.flatten(0, -2), codes).view(*w.shape[:-1], -1)

    head = "embed" if config.tie_embeddings else "head"
    blocks = [{name: of(w) if name in _LINEAR else w for name, w in p.items()} for p in params["blocks"]]
    return params | {"blocks": blocks, head: of(params[head])}


@functools.cache
def model(codes: kernels.Quantization, blocks: bool = False, tp: str | None = None, **changes: Any) -> Model:
    """A model in codes, whose whole sequences are computed with the decoded weights."""
    config = gpt.Config(**{**SIZES, **changes})
    params = [tree_map(lambda x: x * 8, gpt.init(config, sf.key(i))) for i in range(VERSIONS)]
    one = Model(config, decoder(config, tp=tp, quantization=codes), [decoded(config, p, codes) for p in params])
    one.params = [as_blocks(config, p, codes) if blocks else p for p in params]
    one.full = functools.lru_cache(maxsize=4096)(
        functools.partial(_full, one, [decoded(config, p, codes) for p in params])
    )
    return one


def _full(
    one: Model, versions: list[Any], version: int, tokens: tuple[int, ...], _: str | None = None, picture: int = 0
) -> Tensor:
    seen = one.features(tokens, picture)
    with torch.no_grad():
        return gpt.apply(one.config, versions[version], torch.tensor([tokens]), image_features=seen)[0]


def tell(one: Model, kind: str, number: int) -> None:
    limits = KINDS[kind][1]
    runner = Runner(one.decoder, limits)
    for story in drawn_stories(limits, number):
        told, _ = run(story, one, runner, limits)
        check(story, told, one)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind, codes, blocks",
    [
        pytest.param("gpt2", "int8", False, marks=pytest.mark.nightly),
        ("gpt2", "int4", False),
        pytest.param("llama", "int4", True, marks=pytest.mark.nightly),
    ],
)
def test_stories_are_those_of_the_decoded_weights(kind: str, codes: kernels.Quantization, blocks: bool) -> None:
    tell(model(codes, blocks, **KINDS[kind][0]), kind, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_many_stories(kind: str, codes: kernels.Quantization) -> None:
    tell(model(codes, **KINDS[kind][0]), kind, 60)


def test_memory_counts_the_bytes_of_codes() -> None:
    config, held = gpt.Config(**{**SIZES, "vocab_size": 64}), dict[str | None, int]()
    params = gpt.init(config, sf.key(0))
    for codes in (None, *CODES):
        held[codes] = Engine(decoder(config, quantization=codes), params).memory().weights
    elements = config.vocab_size * 64 + config.num_layers * 12 * 64 * 64
    assert held[None] - held["int8"] == elements * 4 - elements // 32 * 34
    assert held[None] - held["int4"] == elements * 4 - elements // 32 * 20


@pytest.mark.nightly
def test_new_weights_are_rounded_too() -> None:
    config, greedy = gpt.Config(**SIZES), Sampling(max_tokens=5, temperature=0.0)
    first, second = (tree_map(lambda x: x * 8, gpt.init(config, sf.key(i))) for i in (0, 1))
    engine = Engine(decoder(config, quantization="int4"), first)
    engine.update_weights(second)
    [got] = engine.generate([[1, 2, 3]], greedy)
    [want] = Engine(decoder(config), decoded(config, second, "int4")).generate([[1, 2, 3]], greedy)
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)


@pytest.mark.nightly
@pytest.mark.parametrize("codes", CODES)
@distributed(world=2)
def test_two_ranks_have_the_bits_of_one(codes: kernels.Quantization) -> None:
    config = gpt.Config(**{**SIZES, **LLAMA})
    params, mesh = tree_map(lambda x: x * 8, gpt.init(config, sf.key(0))), sf.make_mesh({"tp": 2})
    greedy = Sampling(max_tokens=6, temperature=0.0)
    rounded = decoded(config, params, codes)
    [want] = Engine(decoder(config, tp="tp"), rounded, mesh=mesh).generate([[1, 2, 3]], greedy)
    tokens = torch.tensor([[1, 2, 3, *want.tokens]])
    assert logprobs(gpt.apply(config, rounded, tokens)[0, 2:-1], tokens[0, 3:]).tolist() == want.logprobs
    for given in (params, as_blocks(config, params, codes)):
        [got] = Engine(decoder(config, tp="tp", quantization=codes), given, mesh=mesh).generate([[1, 2, 3]], greedy)
        assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)
    narrow = gpt.Config(**{**SIZES, "d_model": 96, "num_heads": 4})
    with pytest.raises(ValueError, match=r"quantization='int.' of blocks.0.wo: each of 2 ranks has 48 of its inputs"):
        Engine(decoder(narrow, tp="tp", quantization=codes), gpt.init(narrow, sf.key(0)), mesh=mesh)


@pytest.mark.nightly
@pytest.mark.parametrize("codes", ["int4", "int8"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_unmodified_models(kind: str, codes: kernels.Quantization) -> None:
    pytest.importorskip("transformers")
    from tests.inference.hf_models import MODELS

    made, params = hf_decoder(MODELS[kind](), quantization=codes)
    plain, _ = hf_decoder(MODELS[kind](), batch_invariant=True)
    assert made.batch_invariant
    rounded = {}
    for name, x in params.items():
        if x.ndim < 2:
            continue
        transposed = name.split(".")[-2] in ("c_attn", "c_proj", "c_fc")
        if transposed or name.split(".")[-2].endswith("_proj") or name in ("lm_head.weight", "transformer.wte.weight"):
            matrix = x.detach().mT if transposed else x.detach()
            value = kernels.unpack_rows(kernels.pack_rows(matrix, codes), *matrix.shape)
            rounded[name] = value.mT.contiguous() if transposed else value
    greedy = Sampling(max_tokens=6, temperature=0.0, prompt_logprobs=True)
    [got] = Engine(made, params).generate([[1, 2, 3, 4]], greedy)
    [want] = Engine(plain, params | rounded).generate([[1, 2, 3, 4]], greedy)
    assert (got.tokens, got.logprobs, got.prompt_logprobs) == (want.tokens, want.logprobs, want.prompt_logprobs)
    [other] = Engine(plain, params).generate([[1, 2, 3, 4]], greedy)
    assert got.prompt_logprobs != other.prompt_logprobs
    with pytest.raises(ValueError, match="Remove batch_invariant=False"):
        hf_decoder(MODELS[kind](), quantization=codes, batch_invariant=False)


def test_refusals() -> None:
    config = gpt.Config(**SIZES)
    params: Any = gpt.init(config, sf.key(0))
    plain = gpt.Config(**{**SIZES, "batch_invariant": False})
    with pytest.raises(
        ValueError,
        match=r"quantization='int8' needs batch-invariant layers. Use Config\(batch_invariant=True\)",
    ):
        decoder(plain, quantization="int8")
    with pytest.raises(
        ValueError, match=r"blocks.0.wq is quantized, which only linear layers of Config\(batch_invariant=True\)"
    ):
        gpt.pack(plain, as_blocks(plain, params, "int8"))
    with pytest.raises(ValueError, match="embed is quantized, which only linear layers"):
        gpt.pack(config, params | {"embed": kernels.quantize_blocks(params["embed"], "int8")})
    with pytest.raises(ValueError, match=r"head.. is \(13, 67\), and the model's is \(13, 64\)"):
        gpt.pack(config, params | {"head": torch.zeros(13, 67, dtype=torch.uint8)})
