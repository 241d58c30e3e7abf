"""Covers attention of models of transformers by a body: values on one device, restored configs, refusals."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import nn
from shardfn.modules._attention import Windows
from shardfn.testing import RTOL, distributed

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.arange(14).view(2, 7) % 11


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=11, num_key_value_heads=2, use_cache=False, **SIZES, **more)
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize("packed", [False, True])
def test_a_body_equals_the_attention_of_the_model(packed: bool) -> None:
    model = llama()
    before = model.config._attn_implementation
    params, apply = sf.from_module(model, attention=nn.Blockwise(4))
    given: dict[str, Any] = {"input_ids": TOKENS, "labels": TOKENS}
    if packed:
        given["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)
    own = {name: p.clone().requires_grad_() for name, p in params.items()}
    got, want = apply(own, **given), model(**given)
    torch.testing.assert_close(got.logits, want.logits, rtol=RTOL[torch.float64], atol=RTOL[torch.float64])
    torch.testing.assert_close(got.loss, want.loss, rtol=RTOL[torch.float64], atol=0)
    grads = torch.autograd.grad(got.loss, list(own.values()))
    for (name, p), g in zip(params.items(), grads, strict=True):
        (right,) = torch.autograd.grad(want.loss, model.get_parameter(name), retain_graph=True)
        assert (g - right).abs().max() <= RTOL[torch.float64] * right.abs().max().clamp(min=1e-3), (name, p.shape)
    assert model.config._attn_implementation == before
    assert not any(m._forward_pre_hooks for m in model.modules())


def drawn(model: Any) -> Any:
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.double()


def test_chunks_of_tokens_are_counted_by_positions_in_documents() -> None:
    kinds = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "moe_layers": []}
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size_mlp": 20, "pad_token_id": 0}
    config = transformers.Llama4TextConfig(
        vocab_size=11, attention_chunk_size=3, use_cache=False, use_qk_norm=False, **sizes, **kinds
    )
    model = drawn(transformers.Llama4ForCausalLM(config))
    params, apply = sf.from_module(model, attention=nn.Blockwise(4))
    for given in ({}, {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3, 4]]).expand(2, -1)}):
        got, want = (f.logits for f in (apply(params, input_ids=TOKENS, **given), model(TOKENS, **given)))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # norms of transformers compute in float32


def llava() -> Any:
    torch.manual_seed(0)
    seen = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**seen, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(vocab_size=13, num_key_value_heads=2, **SIZES),
        image_token_id=12,
    )
    return drawn(transformers.LlavaForConditionalGeneration(config)).eval()


def test_a_model_that_sees_has_its_language_model_routed_alone() -> None:
    model, pixels = llava(), torch.ones(2, 3, 8, 8, dtype=torch.float64)
    tokens = torch.cat([torch.full((2, 4), 12), TOKENS], 1)
    params, apply = sf.from_module(model, attention=nn.Blockwise(4))
    got, want = (f.logits for f in (apply(params, tokens, pixels), model(tokens, pixels)))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.nightly
@distributed(world=2)
def test_rows_of_a_model_that_sees_are_embedded_before_they_are_cut() -> None:
    mesh, model = sf.make_mesh({"sp": 2}), llava()
    whole_BTD = model.get_input_embeddings()(TOKENS[:, :6]).detach()
    params, apply = sf.from_module(model, attention=nn.Ring("sp", 6))
    want = model(inputs_embeds=whole_BTD).logits.square().mean()
    step = sf.sharded_step(
        lambda p, b: apply(p, **b).logits.square().mean(), sf.optim.sgd(0.1), mesh=mesh, batch=sf.P(None, "sp")
    )
    state = step.init(params)
    own_BTD = whole_BTD.chunk(2, 1)[torch.distributed.get_rank()]
    torch.testing.assert_close(step.loss(state.params, {"inputs_embeds": own_BTD}), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"pixel_values would be put in places.*give inputs_embeds"):
        step.loss(state.params, {"input_ids": TOKENS[:, :3], "pixel_values": torch.ones(2, 3, 8, 8)})


def test_masks_that_have_more_pairs_are_refused() -> None:
    seen = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**seen, image_size=8, patch_size=4),
        text_config=transformers.GemmaConfig(vocab_size=13, num_key_value_heads=2, head_dim=4, **SIZES),
        image_token_index=12,
    )
    params, apply = sf.from_module(transformers.PaliGemmaForConditionalGeneration(config), attention=nn.Dense())
    with pytest.raises(ValueError, match="uses a custom mask"):
        apply(params, input_ids=TOKENS, token_type_ids=torch.zeros_like(TOKENS))


@pytest.mark.parametrize("kind", ["Phimoe", "Qwen2Moe"])
def test_windows_of_masks_alone_hold(kind: str) -> None:
    experts = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
    window = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=11, **SIZES, **window, **experts, num_key_value_heads=2, experts_implementation="eager"
    )
    model = drawn(transformers.AutoModelForCausalLM.from_config(config)).eval()
    params, apply = sf.from_module(model, attention=nn.Blockwise(4))
    given = [{"input_ids": x} for x in (TOKENS, TOKENS[:, -3:])]
    got, want = ([f(**x).logits[:, -1] for x in given] for f in (functools.partial(apply, params), model))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert (want[0] - want[1]).abs().max() > 1e-3  # two layers see beyond the last window


def test_several_windows_of_masks_alone_are_refused() -> None:
    windows = Windows()
    windows.made |= {3, 5}
    assert windows.of(torch.nn.Identity(), 4) == 4
    with pytest.raises(ValueError, match=r"no window, as Identity here. Got windows of \[3, 5\]"):
        windows.of(torch.nn.Identity(), None)


def roberta() -> Any:
    config = transformers.RobertaConfig(vocab_size=11, pad_token_id=1, max_position_embeddings=20, **SIZES)
    return drawn(transformers.RobertaForMaskedLM(config)).eval()


def test_a_model_numbers_whole_rows_by_its_own_rule() -> None:
    model, tokens = roberta(), TOKENS.clamp(min=2)
    params, apply = sf.from_module(model, attention=nn.Dense())
    torch.testing.assert_close(apply(params, tokens).logits, model(tokens).logits, rtol=1e-6, atol=1e-6)


@distributed(world=2)
def test_rows_that_a_model_would_number_on_each_rank_need_positions() -> None:
    mesh, model, tokens = sf.make_mesh({"sp": 2}), roberta(), TOKENS[:, :6].clamp(min=2)
    params, apply = sf.from_module(model, attention=nn.Ring("sp", 6))
    step = sf.sharded_step(
        lambda p, b: apply(p, **b).logits.square().mean(), sf.optim.sgd(0.1), mesh=mesh, batch=sf.P(None, "sp")
    )
    state, rank = step.init(params), torch.distributed.get_rank()
    whole = {"input_ids": tokens, "position_ids": torch.arange(2, 8).expand(2, -1)}
    own = {name: x.chunk(2, 1)[rank] for name, x in whole.items()}
    want = model(tokens).logits.square().mean()
    torch.testing.assert_close(step.loss(state.params, own), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"numbers tokens by all ids of a sequence.*give position_ids"):
        step.loss(state.params, {"input_ids": own["input_ids"]})


@distributed(world=3)
def test_a_rank_without_tokens_is_refused() -> None:
    mesh = sf.make_mesh({"sp": 3})
    params, apply = sf.from_module(llama(), attention=nn.Ring("sp", 4))
    step = sf.sharded_step(lambda p, x: apply(p, x).logits.sum(), sf.optim.sgd(0.1), mesh=mesh, batch=sf.P(None, "sp"))
    with pytest.raises(
        (ValueError, sf.RankError), match=r"of 4 tokens over 3 ranks this rank has no token.*multiple of 3"
    ):
        step(step.init(params), TOKENS[:, 2 * torch.distributed.get_rank() : 4][:, :2])


def test_calls_that_cannot_be_routed_are_refused() -> None:
    with pytest.raises(ValueError, match="no model of transformers"):
        sf.from_module(torch.nn.Linear(2, 2), attention=nn.Dense())
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=11, hidden_size=16, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match=r"(?s)Bloom.*without transformers' AttentionInterface.*position_ids"):
        sf.from_module(bloom, attention=nn.Ring("sp", 7))
    with pytest.raises(ValueError, match=r"rotary positions of type dynamic"):
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        sf.from_module(llama(rope_parameters=rope), attention=nn.Ring("sp", 7))

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.mix = llama(), torch.nn.Conv1d(2, 2, 3)

    with pytest.raises(ValueError, match=r"mix is a Conv1d, which mixes tokens"):
        sf.from_module(Mixed(), attention=nn.Ulysses("sp", 7))

    class Passing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.model.embed_tokens(x)

    params, apply = sf.from_module(Passing(), attention=nn.Dense())
    with pytest.raises(ValueError, match="has not called the attention of transformers"):
        apply(params, TOKENS)


def test_calls_that_no_body_computes_are_refused() -> None:
    params, apply = sf.from_module(llama(), attention=nn.Blockwise(4))
    with pytest.raises(ValueError, match=r"(?s)attention_mask is not routed.*labels of -100"):
        apply(params, input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS))
    params, apply = sf.from_module(llama(attention_dropout=0.1).train(), attention=nn.Blockwise(4))
    with pytest.raises(ValueError, match=r"dropout of attention\(p=0\.1\).*apply\.keyed"):
        apply(params, input_ids=TOKENS)
    from shardfn.modules._attention import routed_attention

    with pytest.raises(RuntimeError, match="from_module"):
        x = torch.zeros(1, 1, 1, 1)
        routed_attention(llama(), x, x, x, None)


@distributed(world=2)
def test_labels_that_a_rank_would_shift_are_refused() -> None:
    mesh = sf.make_mesh({"sp": 2})
    params, apply = sf.from_module(llama(), attention=nn.Ring("sp", 14))
    step = sf.sharded_step(
        lambda p, x: apply(p, input_ids=x, labels=x).loss, sf.optim.sgd(0.1), mesh=mesh, batch=sf.P(None, "sp")
    )
    with pytest.raises(ValueError, match=r"labels would be shifted on each rank.*causal_lm_batch"):
        step(step.init(params), TOKENS)
