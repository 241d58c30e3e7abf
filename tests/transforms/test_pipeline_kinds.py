"""Covers `pipeline_module` of layers that differ in their leaves, and of layers that ask for values of tensors."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.modules import from_module
from shardfn.testing import assert_parity, distributed

V, T, ROWS = 40, 7, 4
_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
_GROUPS: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_MLA: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _config(name: str, layers: int, **more: Any) -> Any:
    sizes = {**_SIZES, "num_hidden_layers": layers, **more}
    made: Any = transformers
    if name == "qwen3_moe":
        return made.Qwen3MoeConfig(**sizes, num_experts=4)
    if name == "glm4_moe":
        return made.Glm4MoeConfig(**sizes, **_GROUPS, first_k_dense_replace=1)
    if name == "deepseek_v3":
        sizes |= {"head_dim": 4}
        return made.DeepseekV3Config(**sizes, **_GROUPS, **_MLA, v_head_dim=4, first_k_dense_replace=1)
    kinds = ["linear_attention", "full_attention"] * (layers // 2)
    shared = {"num_experts": 4, "shared_expert_intermediate_size": 16}
    return made.Qwen3NextConfig(**sizes, **_LINEAR, **shared, layer_types=kinds)


def _model(name: str, layers: int, experts: str = "grouped_mm", **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(_config(name, layers, **more))
    model.set_experts_implementation(experts)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.15)
    return model


def _ids(num: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, V, (ROWS, T), generator=g) for _ in range(num)]


def _parity(name: str, mesh: sf.Mesh, *, layers: int = 4, jit: bool = False, **options: Any) -> None:
    torch.set_num_threads(1)
    model = _model(name, layers, options.pop("experts", "grouped_mm"))
    params, apply = from_module(copy.deepcopy(model), layers="model.layers")

    def loss(params: Any, ids: Tensor) -> Tensor:
        return apply(params, input_ids=ids, labels=ids).loss

    def plain(params: Any, ids: Tensor) -> Tensor:
        flat = {k: x for k, x in params.items() if k != "model.layers"}
        flat |= apply.kinds.flat(params["model.layers"], 0, layers)
        return torch.func.functional_call(model, flat, kwargs={"input_ids": ids, "labels": ids}).loss

    specs = {key: P("pp") if key == "model.layers" else P() for key in params}
    if len(apply.kinds.kinds) > 1 and name != "qwen3_next":
        specs["model.layers"] = {"0": P(), "1": P("pp")}  # pyright: ignore
    piped: Any = sf.pipeline_module(loss, apply, num_microbatches=2)
    # The linear attention of qwen3_next magnifies rounding: after two steps one device differs from itself in parts.
    batches = _ids(1 if name == "qwen3_next" else 2)
    assert_parity(
        sf.jit(piped, backend="graph") if jit else piped, optim.sgd(0.1), params, batches, mesh=mesh, reference=plain,
        specs=specs, batch=P("dp"), **options,
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@distributed(world=2)
def test_mixtures_of_experts_in_stages(experts: str) -> None:
    _parity("qwen3_moe", sf.make_mesh({"pp": 2}, device="cpu"), layers=3, experts=experts)


@pytest.mark.nightly
@distributed(world=2)
def test_captured_stages_of_experts() -> None:
    _parity("qwen3_moe", sf.make_mesh({"pp": 2}, device="cpu"), layers=2, jit=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
@distributed(world=2)
def test_dense_layers_before_experts(name: str) -> None:
    _parity(name, sf.make_mesh({"pp": 2}, device="cpu"))


@pytest.mark.nightly
@distributed(world=2)
def test_linear_and_full_attention_in_turn() -> None:
    _parity("qwen3_next", sf.make_mesh({"pp": 2}, device="cpu"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next"])
@distributed(world=4, timeout=600)
def test_kinds_with_zero(name: str) -> None:
    mesh = sf.make_mesh({"dp": 2, "pp": 2}, device="cpu")
    _parity(name, mesh, zero=Zero(stage=3, persist_elements=0))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
@distributed(world=3, timeout=600)
def test_a_rank_without_layers(name: str) -> None:
    """Four mixtures of experts are 2, 2 and none."""
    _parity(name, sf.make_mesh({"pp": 3}, device="cpu"), layers=5)
    _parity(name, sf.make_mesh({"pp": 3}, device="cpu"), layers=5, jit=True)


class _Layer(nn.Module):
    """A layer by `kind`: "a" and "b" have other leaves, "values" reads a value, "pair" too, and returns a pair."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(5, 5, bias=kind != "b")

    def forward(self, h: Tensor) -> Any:
        if self.kind in ("values", "pair"):
            h = h * float(h.detach().abs().amax() < 100.0)
        h = torch.tanh(self.linear(h))
        return (h, h.sum(-1)) if self.kind == "pair" else h


class _Net(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 5)
        self.layers = nn.ModuleList(_Layer(kind) for kind in kinds)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            out = layer(h)
            h = out[0] if isinstance(out, tuple) else out
        return self.head(h)


class _Unpacks(_Net):
    """Takes a pair apart as a pair, which a tensor is not."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h, _ = layer(h)
        return self.head(h)


def _net(kinds: list[str], mesh: sf.Mesh, uncut: str = "", net: type[_Net] = _Net, m: int = 2) -> None:
    params, apply = from_module(net(kinds).double(), layers="layers")
    _, plain = from_module(net(kinds).double(), layers="layers")  # so that stages learn nothing from it

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    def reference(params: Any, x: Tensor) -> Tensor:
        return plain(params, x).square().mean()

    specs: dict[str, Any] = dict(apply.specs)
    if uncut:
        specs["layers"] = {key: P() if key == uncut else P("pp") for key in params["layers"]}
    batches = [torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    piped = sf.pipeline_module(loss, apply, num_microbatches=m)
    how: dict[str, Any] = {"mesh": mesh, "specs": specs, "batch": P(), "reference": reference}
    assert_parity(piped, optim.adamw(1e-2), params, batches, **how)
    step = sf.sharded_step(piped, optim.adamw(1e-2), mesh=mesh, specs=specs, batch=P())
    found = step.evaluate(step.init(params), batches[:1])["loss"]
    torch.testing.assert_close(found, float(reference(params, batches[0])), rtol=1e-12, atol=0)


@pytest.mark.nightly
@distributed(world=2)
def test_stacks_of_two_kinds_are_cut_for_the_same_stages() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    _net(["a", "b", "b", "a", "b", "b"], mesh)
    _net(["a", "b", "b", "b", "b"], mesh, uncut="0")
    _net(["a", "a", "a", "b"], mesh, uncut="3")


@distributed(world=2)
def test_a_kind_may_have_fewer_layers_than_there_are_stages() -> None:
    _net(["a", "b", "b", "b"], sf.make_mesh({"pp": 2}, device="cpu"))


@distributed(world=2)
def test_a_kind_of_one_layer_at_the_end_is_left_uncut() -> None:
    told = r"in specs=\{'layers': \{'0': P\(axis\), '3': P\(\)\}\}"
    with pytest.raises(ValueError, match=told):
        _net(["a", "a", "a", "b"], sf.make_mesh({"pp": 2}, device="cpu"))


def test_specs_are_a_tree_like_the_parameters() -> None:
    params, apply = from_module(_Net(["a", "b", "b"]), layers="layers")
    assert sf.core.tree_paths(apply.specs, is_leaf=lambda x: isinstance(x, P)) == sf.core.tree_paths(params)
    assert {*apply.specs["layers"]["1"].values()} == {P("pp")} and apply.specs["embed.weight"] == P()
    step = sf.sharded_step(lambda p, x: apply(p, x).square().mean(), optim.sgd(0.1), specs=apply.specs)
    step(step.init(params), torch.ones(2, 3))


@pytest.mark.nightly
@distributed(world=3)
def test_stacks_of_two_kinds_on_three_ranks() -> None:
    mesh = sf.make_mesh({"pp": 3}, device="cpu")
    _net(["a", "b", "b", "b"], mesh, m=3)
    _net(["a", "b"] * 3, mesh)
    _net(["b", "a", "a", "a", "b", "a"], mesh, uncut="0", m=3)


@distributed(world=2)
def test_kinds_whose_stages_are_not_in_order_are_refused() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    with pytest.raises(ValueError, match=r"(?s)'layers' has layers of 2 kinds.*from layer 1 on.*from layer 4 on"):
        _net(["a", "a", "b", "b", "b", "b"], mesh)
    with pytest.raises(
        ValueError, match=r"rank 1 of 2 would have params\['layers'\]\['0'\] from layer 1 on.*as in specs"
    ):
        _net(["a", "a", "b"], mesh)
    params, apply = from_module(_Net(["a", "b"]), layers="layers")
    loss: Any = lambda p, x: apply(p, x).sum()  # noqa: E731
    step = sf.sharded_step(sf.pipeline_module(loss, apply), optim.sgd(0.1), mesh=mesh, batch=P())
    with pytest.raises(ValueError, match=r"(?s)\['0'\].*cut dim 0, its layers.*\['1'\].*cut dim 0, its layers"):
        step.init(params)
    with pytest.raises(ValueError, match="a single kind, got 2 kinds"):
        sf.pipeline_module(loss, apply, layers_per_stage=(1, 1))


@pytest.mark.nightly
@distributed(world=2)
def test_the_result_of_a_layer_that_asks_for_values_is_learnt_from_an_own_layer() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    _net(["values"] * 3, mesh)
    _net(["pair"] * 3, mesh)
    with pytest.raises((ValueError, sf.RankError), match="unpack") as caught:
        _net(["pair"] * 4, mesh, net=_Unpacks)
    if mesh.coords["pp"] == 1:
        assert "A layer's result was assumed to be a tensor" in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.nightly
@distributed(world=3)
def test_a_rank_without_layers_cannot_learn_the_result_of_one() -> None:
    mesh = sf.make_mesh({"pp": 3}, device="cpu")
    with pytest.raises((ValueError, sf.RankError), match="this rank runs no layer"):
        _net(["values"] * 4, mesh)


def test_outputs_of_layers_are_recorded_on_one_device() -> None:
    model = _model("qwen3_moe", 2)
    params, apply = from_module(copy.deepcopy(model), layers="model.layers")
    (ids,) = _ids(1)
    how: dict[str, Any] = {"input_ids": ids, "labels": ids, "output_router_logits": True, "output_hidden_states": True}
    with pytest.warns(UserWarning, match="a balance loss of its own"):
        got = apply(params, **how)
    want = model(**how)
    torch.testing.assert_close(got.loss, want.loss.detach())
    assert [x.shape for x in got.router_logits] == [x.shape for x in want.router_logits]
    for x, y in zip(got.hidden_states, want.hidden_states, strict=True):
        torch.testing.assert_close(x, y.detach())


@distributed(world=2)
def test_outputs_of_layers_on_other_ranks_are_refused() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    model = _model("qwen3_moe", 2, output_router_logits=True, router_aux_loss_coef=0.0)
    params, apply = from_module(model, layers="model.layers")
    specs = {key: P("pp") if key == "model.layers" else P() for key in params}
    piped = sf.pipeline_module(lambda p, ids: apply(p, input_ids=ids, labels=ids).loss, apply)
    step = sf.sharded_step(piped, optim.sgd(0.1), mesh=mesh, specs=specs, batch=P())
    with pytest.raises((ValueError, sf.RankError), match=r"records router_logits of all layers.*output_router_logits"):
        step(step.init(params), _ids(1)[0])
