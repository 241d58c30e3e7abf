"""Covers `fit_quantization`: values that rounding keeps, for engines and steps, with less error of outputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.core import tree_leaves, tree_map
from shardfn.inference import Engine, Sampling, _fit_codes, decoder, fit_quantization, hf_decoder
from shardfn.lora import LoRA
from shardfn.memory import QuantizedBlocks
from shardfn.models import gpt

SIZES: dict[str, Any] = {"vocab_size": 61, "num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 72, "max_len": 24}
GREEDY = Sampling(max_tokens=5, temperature=0.0)


def model(**changes: Any) -> tuple[gpt.Config, Any]:
    config = gpt.Config(**{**SIZES, **changes}, batch_invariant=True)
    return config, tree_map(lambda x: x * 8, gpt.init(config, sf.key(0)))


def text(num: int = 6) -> Tensor:
    return torch.randint(61, (num, 20), generator=torch.Generator().manual_seed(1))


def logits(config: gpt.Config, params: Any) -> Tensor:
    return gpt.apply(config, params, text(8)[6:])


@pytest.mark.nightly
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("codes", ["int4", {r"\.w_(up|down)$": "int4", "blocks": "int8"}])
def test_the_engine_rounds_to_the_fitted_values(codes: Any, stacked: bool) -> None:
    config, params = model(stacked=stacked)
    fitted = fit_quantization(decoder(config), params, codes, text())
    served = codes if isinstance(codes, dict) else {"blocks": codes}
    [got] = Engine(decoder(config, quantization=served), fitted).generate([[1, 2, 3]], GREEDY)
    [want] = Engine(decoder(config), fitted).generate([[1, 2, 3]], GREEDY)
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)
    same = [torch.equal(a, b) for a, b in zip(tree_leaves(fitted), tree_leaves(params), strict=True)]
    assert 0 < sum(same) < len(same)


@pytest.mark.nightly
def test_it_has_less_error_of_outputs_than_rounding() -> None:
    config, params = model()
    made, rows, name = decoder(config), text(32), "blocks.0.w_up"
    moments = _fit_codes.Moments({name: 64}, full=True)
    for row in rows.tolist():
        _fit_codes._run_row(made, made.pack(params), row, moments)
    h, w = moments.mean(name), params["blocks"][0]["w_up"]
    assert h is not None

    def error(value: Tensor) -> float:
        return float(((value - w) @ h * (value - w)).sum())

    weighed, compensated = (
        fit_quantization(made, params, "int4", rows, compensate=x)["blocks"][0]["w_up"] for x in (False, True)
    )
    assert error(compensated) < 0.9 * error(weighed) < 0.9 * error(QuantizedBlocks.of(w, "int4").load())


def test_layers_are_fitted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config, params = model()
    want = fit_quantization(decoder(config), params, "int4", text())
    monkeypatch.setattr(_fit_codes, "TOGETHER", 1)
    for a, b in zip(
        tree_leaves(fit_quantization(decoder(config), params, "int4", text())), tree_leaves(want), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.nightly
def test_a_step_and_its_engine_have_the_fitted_codes() -> None:
    config, params = model(d_ff=96)
    fitted = fit_quantization(decoder(config), params, "int4", text())
    lora = LoRA.of(params, [r"\.w_(up|down)$"], rank=2, quantization="int4")
    step = sf.sharded_step(
        lora.adapt(lambda p, batch: gpt.loss(config, p, batch)),
        optim.sgd(1.0),
        specs=lora.specs,
        trainable=lora.trainable,
    )
    state = step.init({"base": fitted, "lora": lora.init(sf.key(1))})
    base = state.params["base"]["blocks"][1]["w_up"]
    assert base.sharding.quantization == "int4" and torch.equal(base.full_tensor(), fitted["blocks"][1]["w_up"])
    [got] = Engine(decoder(config, quantization={"blocks": "int4"}), state.params["base"]).generate([[1, 2, 3]], GREEDY)
    [want] = Engine(decoder(config), fitted).generate([[1, 2, 3]], GREEDY)
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_unmodified_models(kind: str) -> None:
    pytest.importorskip("transformers")
    from tests.inference.hf_models import MODELS

    made, params = hf_decoder(MODELS[kind]())
    linear: dict[str, Any] = {"|".join(made.linear).replace(".", r"\."): "int4"}
    rows = torch.randint(made.vocab, (4, 12), generator=torch.Generator().manual_seed(1))
    fitted = fit_quantization(made, params, "int4", rows)
    [got] = Engine(hf_decoder(MODELS[kind](), quantization=linear)[0], fitted).generate([[1, 2, 3]], GREEDY)
    [want] = Engine(made, fitted).generate([[1, 2, 3]], GREEDY)
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)
    assert any(not torch.equal(fitted[name], params[name]) for name in made.linear)


def test_mistakes() -> None:
    config, params = model()
    plain, cases = gpt.Config(**SIZES), list[tuple[Any, Any, Any, str]]()
    cases += (
        (
            decoder(plain),
            "int4",
            text(),
            r"does not show its linear layers. Use Config\(batch_invariant=True\)",
        ),
        (decoder(config, tp="tp"), "int4", text(), "this decoder is cut over 'tp'. Pass one without tp="),
        (decoder(config), None, text(), "quantization=None rounds nothing. Pass 'int8', 'int4'"),
        (decoder(config), {"wx": "int4"}, text(), "the pattern 'wx' of quantization= matches no name"),
        (decoder(config), "int4", [], "there are no rows of tokens. Pass some text"),
        (decoder(config), "int4", [[1, 61]], "row 0 must have 1 to 24 tokens from 0 to 60, got 2 tokens from 1 to 61"),
        (decoder(config), "int4", [[1], []], "row 1 must have 1 to 24 tokens from 0 to 60, got 0 tokens"),
    )
    for made, codes, rows, words in cases:
        with pytest.raises(ValueError, match=words):
            fit_quantization(made, params, codes, rows)
