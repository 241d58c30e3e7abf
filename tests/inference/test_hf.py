"""Covers unmodified models of transformers as decoders: tokens of `generate`, exactness, stories, refusals."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from shardfn import core
from shardfn.inference import Completion, Decoder, Engine, Limits, Runner, Sampling, hf_decoder
from shardfn.inference._cache import make_single_bodies
from shardfn.testing import distributed
from tests.inference.hf_models import CONTEXT, LLAMA, MODELS, VOCAB, config_of, made, transformers
from tests.inference.stories import check, draw_alone, run
from tests.inference.test_stories import drawn_stories

DAY = ["gpt2", "llama", "gemma3", "mixtral"]
KINDS = [k if k in DAY else pytest.param(k, marks=pytest.mark.nightly) for k in MODELS]
LIMITS = Limits(vocab=VOCAB, context=CONTEXT, blocks=13, block=4, buckets=(3, 12), running=4)
PROMPTS = [[1, 2, 3, 4, 5], [7], [3, 3, 8, 1, 2, 9, 4, 4, 4, 1, 2, 3, 5, 11, 0, 6, 7], [2, 6], [12, 5, 5]]
# Of log probabilities against transformers in float32; a token may differ where two are within twice of it.
TOL = 1e-4


@dataclass
class Model:
    """A decoder, the parameters of each version, and the logits of whole sequences, computed alone on one device."""

    decoder: Decoder
    params: Sequence[dict[str, Tensor]]
    alone: Decoder | None = None  # where the other runs on several ranks
    adapters: Any = field(default_factory=dict)
    has_images: ClassVar = False

    def __post_init__(self) -> None:
        self._one = self.alone or self.decoder
        self._served = [self._one.pack(p) for p in self.params]
        self.full = functools.lru_cache(maxsize=4096)(self._full)

    def _full(self, version: int, tokens: tuple[int, ...]) -> Tensor:
        """One call over the whole sequence, with a cache of one block."""
        T = len(tokens)
        at_T, bodies = torch.arange(T, dtype=torch.int32), make_single_bodies(self._one.cache, T)
        with torch.no_grad():
            return self._one.logits(
                self._served[version], torch.tensor(tokens, dtype=torch.int32), at_T, at_T, bodies
            ).float()


def complete(decoder: Decoder, params: Any, limits: Limits = LIMITS) -> list[Completion]:
    """Greedy tokens of all prompts at once, in a pool that cannot hold them all."""
    greedy = Sampling(max_tokens=8, temperature=0.0, prompt_logprobs=True)
    return Engine(decoder, params, limits=limits).generate(PROMPTS, greedy)


def check_tokens(model: Any, completions: list[Completion], tol: float = TOL) -> None:
    """Compares with transformers: log probabilities within a tolerance, tokens where they are not that close."""
    for prompt, got in zip(PROMPTS, completions, strict=True):
        sequence = torch.tensor([[*prompt, *got.tokens]])
        with torch.no_grad():
            logprobs = model(sequence).logits[0].float().log_softmax(-1)[:-1]
        told = logprobs.gather(1, sequence[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([*got.prompt_logprobs, *got.logprobs]), told, rtol=0, atol=tol)
        drawn = len(prompt) - 1
        assert bool((logprobs[drawn:].amax(-1) - told[drawn:] < 2 * tol).all())
        start = sequence[:, : len(prompt)]  # with a mask, as `generate` else hides tokens equal to the padding
        mask = torch.ones_like(start)
        want = model.generate(start, attention_mask=mask, max_new_tokens=len(got.tokens), do_sample=False)
        for i, (a, b) in enumerate(zip(got.tokens, want[0, len(prompt) :].tolist(), strict=True)):
            if a != b:
                assert abs(float(logprobs[drawn + i, a] - logprobs[drawn + i, b])) < 2 * tol
                break


def check_alone(model: Model, completions: list[Completion]) -> None:
    """Compares log probabilities with those of the same decoder on each sequence alone, bit for bit."""
    greedy = Sampling(temperature=0.0)
    for prompt, got in zip(PROMPTS, completions, strict=True):
        sequence, logprobs = [*prompt, *got.tokens], [*got.prompt_logprobs, *got.logprobs]
        full = model.full(0, tuple(sequence[:-1]))
        for place, (token, logprob) in enumerate(zip(sequence[1:], logprobs, strict=True)):
            assert draw_alone(full[place], greedy, 0, place, token) == (token, logprob)


@pytest.mark.day("llama")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_generate(kind: str) -> None:
    model = MODELS[kind]()
    before = model.config._attn_implementation
    made, params = hf_decoder(model, batch_invariant=True)
    assert made.batch_invariant and (made.vocab, made.context) == (VOCAB, CONTEXT)
    completions = complete(made, params)
    assert model.config._attn_implementation == before
    check_tokens(model, completions)
    check_alone(Model(made, [params]), completions)


@pytest.mark.nightly
def test_graphs_of_many_rows_have_the_bits_of_a_forward() -> None:
    """Rotary tables of 12 rows of 128 are large enough for a compiler, whose cosine is another one."""
    model = made("Llama", **(LLAMA | {"hidden_size": 32, "head_dim": 128}))
    decoder, params = hf_decoder(model, batch_invariant=True)
    check_alone(Model(decoder, [params]), complete(decoder, params, replace(LIMITS, buckets=(12,))))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_16_bit_weights_are_exact(kind: str) -> None:
    made, params = hf_decoder(MODELS[kind]().bfloat16(), batch_invariant=True)
    assert made.pack(params)["params"]["lm_head.weight"].dtype == torch.bfloat16
    check_alone(Model(made, [params]), complete(made, params))


def tell(kind: str, number: int) -> None:
    """Stories with changes of weights, held against each sequence alone."""
    decoder, params = hf_decoder(MODELS[kind](), batch_invariant=True)
    versions = [{name: x * scale for name, x in params.items()} for scale in (1.0, 1.2, 0.8)]
    model: Any = Model(decoder, versions)
    runner = Runner(decoder, LIMITS)
    for story in drawn_stories(LIMITS, number):
        told, _ = run(story, model, runner, LIMITS)
        check(story, told, model)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_stories(kind: str) -> None:
    tell(kind, 8)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(MODELS))
def test_many_stories(kind: str) -> None:
    tell(kind, 60)


@pytest.mark.nightly
def test_a_model_that_cannot_be_exact_is_served_without(caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["llama"]().double()
    with pytest.raises(
        ValueError, match=r"(?s)LlamaForCausalLM with batch_invariant=True:.*weights are of torch.float64"
    ):
        hf_decoder(model, batch_invariant=True)
    with caplog.at_level(logging.WARNING, "shardfn.inference"):
        made, params = hf_decoder(model)
    assert (
        not made.batch_invariant and "is served without batch invariance: weights are of torch.float64" in caplog.text
    )
    check_tokens(model, complete(made, params))


class RowsMatter(torch.nn.Module):
    """A head whose results depend on the other rows of a call."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x_1RD: Tensor) -> Tensor:
        """Logits."""
        return x_1RD @ self.weight.T + 1e-3 * x_1RD.mean()


def test_the_probe_finds_rows_that_depend_on_others() -> None:
    model = MODELS["llama"]()
    model.lm_head = RowsMatter(model.lm_head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"bits of a token's logits differ beside 1 others; it multiplies by matmul"):
        hf_decoder(model, batch_invariant=True)
    made, _ = hf_decoder(model)
    assert not made.batch_invariant


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_without_exactness_the_modules_own_functions_run(kind: str) -> None:
    model = MODELS[kind]()
    made, params = hf_decoder(model, batch_invariant=False)
    assert not made.batch_invariant and made.pack(params) == {"params": params, "packed": {}}
    tokens = tuple(PROMPTS[2])
    want = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Model(made, [params]).full(0, tokens), want, rtol=1e-5, atol=1e-5)


_SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": (_SMALL, r"keep a state that is not keys and values.*is a Conv1d"),
    "Bloom": (_SMALL | {"n_head": 4}, r"without transformers' AttentionInterface.*does not take position_ids\n"),
    "Falcon": (_SMALL | {"num_attention_heads": 4, "alibi": True}, r"without transformers' AttentionInterface"),
    "JetMoe": (
        _SMALL | {"num_key_value_heads": 2, "kv_channels": 4},
        r"experts \(num_local_experts=8\) that are not in",
    ),
    "Llama": (
        _SMALL
        | {"num_attention_heads": 4, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        r"rotary positions are of type dynamic",
    ),
    "GPT2": (_SMALL | {"n_head": 4, "add_cross_attention": True}, r"attend to the states of an encoder"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_models_that_cannot_be_served_are_refused(kind: str) -> None:
    config, match = REFUSED[kind]
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **config)).eval()
    with pytest.raises(ValueError, match=rf"(?s){kind}\w* cannot be served:.*{match}"):
        hf_decoder(model)


def test_a_forward_that_passes_its_keywords_to_the_model_inside_is_served() -> None:
    config = config_of("GraniteMoe", **_SMALL, num_attention_heads=4, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()  # takes use_cache as one of its **kwargs
    made, params = hf_decoder(model)
    with torch.no_grad():
        want = model(torch.tensor([PROMPTS[2]])).logits[0]
    got = Model(made, [params]).full(0, tuple(PROMPTS[2]))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_encoder_and_decoder_is_refused() -> None:
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration cannot be served:\n.*states of an encoder"):
        hf_decoder(model)


def test_mistakes_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a model of transformers, got a Linear"):
        hf_decoder(torch.nn.Linear(2, 2))
    model = MODELS["llama"]()
    with pytest.raises(ValueError, match=r"training mode. Call eval\(\)"):
        hf_decoder(model.train())
    with pytest.raises(ValueError, match=r"LlamaModel cannot be served:\n.*logits_to_keep; load it by .*a LlamaForCau"):
        hf_decoder(model.eval().model)
    with pytest.raises(ValueError, match=r"tokenizer has 14 tokens, and LlamaForCausalLM has 13. Pass the tokenizer"):
        hf_decoder(model, tokenizer=range(14))
    made, params = hf_decoder(model, tokenizer=range(13))
    with pytest.raises(
        ValueError, match=r"not the parameters of the model:\n.*lm_head.weight is missing\n.*'lm_head.w"
    ):
        name = "lm_head.weight"
        Engine(made, {("lm_head.weights" if n == name else n): x for n, x in params.items()}, limits=LIMITS)
    with pytest.raises(ValueError, match=r"model.norm.weight is \(2,\), and the model's is \(24,\)"):
        Engine(made, params | {"model.norm.weight": torch.ones(2)}, limits=LIMITS)


@pytest.mark.nightly
@distributed(world=2)
def test_a_mesh_of_several_ranks_is_refused() -> None:
    decoder, params = hf_decoder(MODELS["llama"](), batch_invariant=False)
    with pytest.raises(ValueError, match=r"the mesh \{'tp': 2\} has 2 ranks.*run it on one rank"):
        Engine(decoder, params, mesh=core.make_mesh({"tp": 2}), limits=LIMITS)
