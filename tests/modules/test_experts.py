"""Covers experts of models of transformers by an exchange: parity with the models' own, specs, balance, refusals."""

import copy
import re
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.nn import moe
from shardfn.testing import RTOL, assert_parity, distributed, on_mesh, one_device, shard_rows

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "experts_implementation": "eager",
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 3}),
    "qwen3": ("Qwen3Moe", {"num_experts": 3, "moe_intermediate_size": 12, "head_dim": 8}),
    "deepseek": (
        "DeepseekV3",
        {"n_routed_experts": 3, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 3, "head_dim": 8, "layer_types": ["full_attention"]}),
}
BATCHES = [{"tokens": (torch.arange(28).view(4, 7) * n) % 13} for n in (3, 5)]


def model_of(kind: str, num: int = 3, **more: Any) -> Any:
    """The model with `num` experts; all of its leaves are drawn alike, so that no router is near a tie."""
    name, fields = KINDS[kind]
    fields = {k: num if k.endswith("experts") else v for k, v in fields.items()}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **fields, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def loss_of(apply: Any) -> Any:
    """The mean of the cross entropies of all tokens but the first of a row."""

    def loss(params: Any, batch: Any) -> torch.Tensor:
        tokens = batch["tokens"]
        logits = apply(params, input_ids=tokens[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def check(model: Any, exchange: Any, mesh: Any, *, wrap: Any = lambda f: f, rows: Any = None, **options: Any) -> None:
    params, apply = sf.from_module(model, experts=exchange)
    _, own = sf.from_module(model)
    tx = sf.optim.sgd(0.1, momentum=0.9)
    # Norms and routers of transformers compute in float32: one device rounds as the ranks do on the ranks' halves.
    options |= {"mesh": mesh, "specs": apply.specs, "reference": loss_of(own), "parts": 1 + len(options["batch"])}
    assert_parity(wrap(loss_of(apply)), tx, params, rows or BATCHES, **options)
    assert model.config._experts_implementation == "eager"


def zero(stage: int) -> sf.Zero:
    return sf.Zero(stage=stage, axis="ep", persist_elements=0)


def captured(loss: Any) -> Any:
    return sf.jit(loss, backend="graph")


def plain(loss: Any) -> Any:
    return loss


nightly = pytest.mark.nightly
CASES = [pytest.param(kind, marks=[] if kind in ("mixtral", "gpt-oss") else nightly) for kind in KINDS]
STAGES = [(0, plain), pytest.param(0, captured, marks=nightly), pytest.param(1, plain, marks=nightly)]
STAGES += [pytest.param(1, captured, marks=nightly), pytest.param(3, plain, marks=nightly), (3, captured)]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("stage, wrap", STAGES)
@distributed(world=2)
def test_three_experts_on_two_ranks_equal_those_of_the_model(kind: str, stage: int, wrap: Any) -> None:
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        check(model_of(kind), moe.AllToAll("ep"), mesh, wrap=wrap, batch=sf.P("ep"), zero=zero(stage))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [plain, captured])
@pytest.mark.nightly
@distributed(world=2)
def test_other_exchanges(kind: str, wrap: Any) -> None:
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        check(model_of(kind), moe.GatherExperts("ep"), mesh, wrap=wrap, batch=sf.P("ep"), zero=zero(3))
        check(model_of(kind), moe.Local(), mesh, wrap=wrap, batch=sf.P("ep"), zero=zero(3))
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        check(model_of(kind), moe.AllReduce("tp"), mesh, wrap=wrap, batch=sf.P())


@distributed(world=2)
def test_experts_by_their_weights_and_by_a_sum() -> None:
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        check(model_of("gpt-oss"), moe.GatherExperts("ep"), mesh, batch=sf.P("ep"), zero=zero(3))
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        check(model_of("gpt-oss"), moe.AllReduce("tp"), mesh, batch=sf.P())


@pytest.mark.nightly
@distributed(world=2)
def test_a_rank_whose_experts_have_no_row_and_layers_that_run_again() -> None:
    model = model_of("mixtral", num=4)
    model.model.layers[0].mlp.gate.register_forward_hook(_to_the_first_two)
    model.train().activation_checkpointing_enable()
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        check(model, moe.AllToAll("ep"), mesh, batch=sf.P("ep"), zero=zero(3))
        check(model, moe.AllToAll("ep"), mesh, wrap=captured, batch=sf.P("ep"), zero=zero(1))


def _to_the_first_two(gate: Any, args: Any, out: Any) -> Any:
    del gate, args
    logits, weights, chosen = out
    return logits, weights, chosen % 2


@pytest.mark.nightly
@distributed(world=4)
def test_experts_beside_data_and_in_microbatches() -> None:
    with sf.make_mesh({"dp": 2, "ep": 2}, device="cpu") as mesh:
        axes = ("dp", "ep")
        options: dict[str, Any] = {"batch": sf.P(axes), "zero": sf.Zero(stage=3, axis=axes, persist_elements=0)}
        rows = [{"tokens": x["tokens"].repeat(2, 1)} for x in BATCHES]
        # More parts round otherwise: the model is compared in the width in which its norms compute.
        model = model_of("qwen3", num=5).float()
        check(model, moe.AllToAll("ep"), mesh, wrap=lambda f: sf.accumulate(f, 2), rows=rows, **options)


@pytest.mark.day("plain")
@pytest.mark.parametrize("wrap", [plain, captured])
@distributed(world=2)
def test_buffers_of_a_router_are_model_state(wrap: Any) -> None:
    model = model_of("deepseek")
    gate = model.model.layers[0].mlp.gate
    with torch.no_grad():
        gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.4, -0.4]))
    params, model_state, apply = sf.from_module(model, has_state=True, experts=moe.AllToAll("ep"))
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    want = loss_of(lambda p, input_ids: model(input_ids))({}, BATCHES[0])

    def loss(params: Any, state: Any, batch: Any) -> Any:
        kept: list[Any] = []

        def of(params: Any, input_ids: Any) -> Any:
            out, now = apply(params, state, input_ids=input_ids)
            kept.append(now)
            return out

        return loss_of(of)(params, batch), kept[0]

    def finish(state: Any) -> Any:
        return {**state, name: state[name] + 1}

    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        step = sf.sharded_step(
            wrap(loss), sf.optim.sgd(0.1), mesh=mesh, specs=apply.specs, batch=sf.P("ep"), has_state=True, finish=finish
        )
        state = step.init(params, model_state=model_state)
        state, metrics = step(state, shard_rows(BATCHES[0], sf.P("ep"), mesh))
        torch.testing.assert_close(metrics["loss"].double(), want.detach(), rtol=1e-6, atol=0)
        assert torch.equal(sf.unshard(state.model_state)[name], gate.e_score_correction_bias + 1)


@distributed(world=2)
def test_the_models_own_balance_loss_is_over_own_rows() -> None:
    model = model_of("mixtral", router_aux_loss_coef=0.1)
    with pytest.warns(UserWarning, match="not that of the global batch"):
        _, apply = sf.from_module(model.eval(), experts=moe.AllToAll("ep"))
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params: Any, batch: Any) -> torch.Tensor:
            tokens = batch["tokens"]
            return apply(params, input_ids=tokens, labels=tokens, output_router_logits=True).loss

        with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
            step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, specs=apply.specs, batch=sf.P("ep"))
            own = shard_rows(BATCHES[0], sf.P("ep"), mesh)
            _, metrics = step(step.init(params), own)
    whole, *halves = (
        model(input_ids=x, labels=x, output_router_logits=True)
        for x in (BATCHES[0]["tokens"], *BATCHES[0]["tokens"].chunk(2))
    )
    torch.testing.assert_close(
        metrics["loss"], torch.stack([x.loss for x in halves]).mean().detach(), rtol=1e-6, atol=0
    )
    assert abs(whole.loss - metrics["loss"]) > 1e-4
    # The loss of the whole batch is that of nn.moe over the axes of the batch.
    routing = moe.top_k(whole.router_logits[0], 2)
    torch.testing.assert_close(moe.balance.mixtral(routing), whole.aux_loss.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_specs_are_those_of_the_plan_of_the_model(kind: str) -> None:
    model = model_of(kind)
    _, apply = sf.from_module(model, experts=moe.AllToAll(("dp", "ep")))
    planned = [
        re.compile(name.replace(".", r"\.").replace("*", r"\d+"))
        for name, how in model.config.base_model_ep_plan.items()
        if how == "grouped_gemm"
    ]
    cut = {name for name, spec in apply.specs.items() if spec == sf.P(("dp", "ep"))}
    assert cut == {name for name in apply.specs if any(p.fullmatch(name.removeprefix("model.")) for p in planned)}
    assert {spec for name, spec in apply.specs.items() if name not in cut} == {sf.P()}
    assert set(sf.from_module(model)[1].specs.values()) == {sf.P()}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mixtral", "deepseek"])
@pytest.mark.parametrize("wrap", [plain, captured])
@distributed(world=2)
def test_a_router_that_is_not_finite_is_refused_on_all_ranks(kind: str, wrap: Any) -> None:
    model = model_of(kind)
    params, apply = sf.from_module(model, experts=moe.AllToAll("ep"))
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        options: dict[str, Any] = {"mesh": mesh, "specs": apply.specs, "batch": sf.P("ep"), "zero": zero(3)}
        step = sf.sharded_step(wrap(loss_of(apply)), sf.optim.sgd(0.1), donate=False, **options)
        state = step.init(params)
        batch = shard_rows(BATCHES[0], sf.P("ep"), mesh)
        state, _ = step(state, batch)
        router = next(name for name in state.params if name.endswith("gate.weight"))
        whole = sf.unshard(state.params)
        whole[router][1, 2] = torch.nan
        spoilt = step.init(whole)
        with pytest.raises(ValueError, match=r"mlp\.experts.*: the router's weights are not finite in"):
            step(spoilt, batch)
        state, metrics = step(state, batch)
        assert metrics["loss"].isfinite()


@distributed(world=2)
def test_leaves_without_their_specs_are_refused() -> None:
    params, apply = sf.from_module(model_of("mixtral"), experts=moe.AllToAll("ep"))
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        step = sf.sharded_step(loss_of(apply), sf.optim.sgd(0.1), mesh=mesh, batch=sf.P("ep"))
        with pytest.raises((ValueError, sf.RankError), match=r"model.layers.0.mlp.experts: with AllToAll.*P\('ep'\)"):
            step(step.init(params), shard_rows(BATCHES[0], sf.P("ep"), mesh))


def test_experts_that_cannot_be_routed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experts=Local\(\).*Linear:\n.*there are no experts"):
        sf.from_module(torch.nn.Linear(2, 2), experts=moe.Local())
    sizes = {"vocab_size": 13, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 2, "num_experts": 2}
    switch = transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**sizes, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
    )
    with pytest.raises(ValueError, match=r"(?s)encoder.*SparseMLP, which.*ExpertsInterface.*decoder.*SparseMLP, which"):
        sf.from_module(switch, experts=moe.Local())
    model = model_of("gpt-oss")
    model.model.layers[0].mlp.experts.down_proj = torch.nn.Parameter(torch.zeros(2, 12, 16))
    with pytest.raises(ValueError, match=r"mlp.experts has down_proj of shape \(2, 12, 16\) for 3 experts"):
        sf.from_module(model, experts=moe.Local())
    model = model_of("mixtral")
    sf.from_module(model, experts=moe.Local())
    model.config._experts_implementation_internal = "shardfn"
    with pytest.raises(RuntimeError, match="for modules that run by from_module"):
        model(BATCHES[0]["tokens"])


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", [plain, captured])
@distributed(world=2)
def test_experts_in_bfloat16(wrap: Any) -> None:
    model = model_of("mixtral").float()
    policy = sf.Policy.bf16()
    params, apply = sf.from_module(model, experts=moe.AllToAll("ep"))
    # The model's own experts round the sum over a token's choices otherwise. Gradients of experts are sums over the
    # rows of both ranks, rounded once.
    _, own = sf.from_module(model, experts=moe.Local())
    tx, rtol = sf.optim.sgd(0.1), RTOL[torch.bfloat16]
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        options: dict[str, Any] = {"mesh": mesh, "specs": apply.specs, "batch": sf.P("ep"), "zero": zero(3)}
        got = on_mesh(wrap(sf.mixed_precision(loss_of(apply), policy)), tx, params, BATCHES, **options)
    want = one_device(sf.mixed_precision(loss_of(own), policy), tx, params, BATCHES, parts=2)
    assert torch.equal(got.metrics[0]["loss"], want.metrics[0]["loss"])
    torch.testing.assert_close(got.metrics[1]["grad_norm"], want.metrics[1]["grad_norm"], rtol=rtol, atol=0)
    for name, x in want.params.items():
        torch.testing.assert_close(got.params[name].float(), x.float(), rtol=rtol, atol=rtol, msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", [plain, captured])
@distributed(world=4)
def test_experts_in_the_layers_of_a_pipeline(wrap: Any) -> None:
    model, path = model_of("mixtral"), "model.layers"
    model.model.layers.extend(copy.deepcopy(model.model.layers))
    model.config.num_hidden_layers = 2
    params, apply = sf.from_module(model, layers=path, experts=moe.AllToAll("ep"))
    _, own = sf.from_module(model, layers=path)
    piped = wrap(sf.pipeline_module(loss_of(apply), apply, num_microbatches=2))
    specs: dict[str, Any] = dict.fromkeys(params, sf.P())
    specs[path] = {leaf: sf.P("pp", "ep") if "experts" in leaf else sf.P("pp") for leaf in params[path]}
    with sf.make_mesh({"pp": 2, "ep": 2}, device="cpu") as mesh:
        options: dict[str, Any] = {"mesh": mesh, "specs": specs, "batch": sf.P("ep"), "zero": zero(1)}
        assert_parity(piped, sf.optim.sgd(0.1), params, BATCHES, reference=loss_of(own), parts=4, **options)
