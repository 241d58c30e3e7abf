"""Covers the mixtures of experts of the zoo under expert parallelism and ZeRO's stage 3, and those that are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.nn import moe
from shardfn.testing import assert_parity, distributed

transformers = pytest.importorskip("transformers")

from architectures import ZOO  # noqa: E402  # beside this file; needs transformers
from tiny_configs import tiny  # noqa: E402
from tiny_inputs import inputs  # noqa: E402

ROUTED = """
    AfmoeForCausalLM AriaTextForCausalLM DeepseekV3ForCausalLM Ernie4_5_MoeForCausalLM FlexOlmoForCausalLM
    Glm4MoeForCausalLM GptOssForCausalLM GraniteMoeForCausalLM KimiLinearForCausalLM MixtralForCausalLM
    NemotronHForCausalLM OlmoeForCausalLM PhimoeForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM
    Qwen3NextForCausalLM Qwen4ExpForCausalLM SolarOpenForCausalLM
""".split()
# Their experts are code of their own: a list of modules, or products that are not looked up in transformers' table.
REFUSED = {
    "JetMoeForCausalLM": "JetMoeMoE",
    "Llama4ForCausalLM": "Llama4TextExperts",
    "NllbMoeForConditionalGeneration": "NllbMoeSparseMLP",
    "SwitchTransformersForConditionalGeneration": "SwitchTransformersSparseMLP",
}
FIELDS: dict[str, Any] = {
    "DeepseekV3ForCausalLM": {"first_k_dense_replace": 1},
    "NllbMoeForConditionalGeneration": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
}
EVAL = {"PhimoeForCausalLM"}  # in training it draws noise for its router


def model_of(name: str) -> Any:
    entry, kind = ZOO[name], getattr(transformers, name)
    torch.manual_seed(0)
    config = tiny(kind.config_class, {**entry.config, **FIELDS.get(name, {})})
    model = kind(config).to(entry.dtype).train(name not in EVAL)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ROUTED)
@distributed(world=2, timeout=600)
def test_experts_of_the_zoo_on_two_ranks(name: str, jit: bool) -> None:
    torch.set_num_threads(1)
    model, mesh = model_of(name), sf.make_mesh({"ep": 2}, device="cpu")
    params, apply = sf.from_module(model, experts=moe.AllToAll("ep"))
    _, own = sf.from_module(model)
    batches = [inputs(model, ZOO[name].inputs, seed, ZOO[name].images) for seed in range(2)]

    def loss_of(f: Any) -> Any:
        def loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
            return f(params, **batch).loss

        return loss

    assert_parity(
        sf.jit(loss_of(apply), backend="graph") if jit else loss_of(apply),
        sf.optim.sgd(0.1),
        params,
        batches,
        mesh=mesh,
        reference=loss_of(own),
        parts=2,
        specs=apply.specs,
        batch=sf.P("ep"),
        zero=sf.Zero(stage=3, axis="ep", persist_elements=0),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_are_not_looked_up_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"is a {REFUSED[name]}, .* without transformers' ExpertsInterface"):
        sf.from_module(model_of(name), experts=moe.AllToAll("ep"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "exchange, axis", [(moe.AllToAll("x"), sf.P("x")), (moe.AllReduce("x"), sf.P())], ids=["tokens", "sum"]
)
@distributed(world=2)
def test_a_norm_that_all_experts_share(exchange: Any, axis: sf.P) -> None:
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel

    torch.manual_seed(0)
    model: Any = MuseSparkTextModel(tiny(MuseSparkTextModel.config_class, {}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    params, apply = sf.from_module(model, experts=exchange)
    _, own = sf.from_module(model)
    assert any("post_expert_norm" in name for name in params)
    batches = [(torch.arange(28).view(4, 7) * n) % 13 for n in (3, 5)]

    def loss_of(f: Any) -> Any:
        return lambda params, tokens: f(params, input_ids=tokens).last_hidden_state.square().mean()

    with sf.make_mesh({"x": 2}, device="cpu") as mesh:
        options: dict[str, Any] = {"mesh": mesh, "specs": apply.specs, "batch": axis, "parts": 1 + len(axis)}
        assert_parity(loss_of(apply), sf.optim.sgd(0.001), params, batches, reference=loss_of(own), **options)
