"""Covers `partition` of `nn.moe`: specs alone make experts parallel, with the messages of a sum by hand."""

import dataclasses
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import assert_parity, distributed

with warnings.catch_warnings():  # torch's own, at its first jvp
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

S, D, F, E, K = 9, 6, 5, 4, 2


def clamped_experts(params: Any, x_MD: Tensor, counts_E: Tensor, *, lookup: bool = False) -> Tensor:
    """gpt-oss' experts: biases of both products, and a gate in which zeros do not stay zeros."""

    def bias(b_EF: Tensor) -> Tensor:
        if not lookup:
            return layers.grouped(x_MD.new_ones(len(x_MD), 1), b_EF[:, None], counts_E)
        ends_E = counts_E.cumsum(0)
        number_M = (torch.arange(len(x_MD))[:, None] >= ends_E).sum(1).clamp(max=len(ends_E) - 1)
        return b_EF[number_M]

    up_MF = layers.grouped(x_MD, params["w_up"], counts_E, transposed=True) + bias(params["b_up"])
    gate_MF, up_MF = up_MF[..., ::2].clamp(max=0.7), up_MF[..., 1::2].clamp(min=-0.7, max=0.7)
    h_MF = (up_MF + 1) * (gate_MF * torch.sigmoid(gate_MF * 1.702))
    return layers.grouped(h_MF, params["w_down"], counts_E, transposed=True) + bias(params["b_down"])


EXPERTS = {
    "swiglu": layers.swiglu_experts,
    "gelu": layers.gelu_experts,
    "gpt-oss": clamped_experts,
    "lookup": functools.partial(clamped_experts, lookup=True),
}


def made(experts: str, num: int) -> Any:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaves = {"w_gate_up": draw(num, 2, F, D), "w_down": draw(num, D, F)}
    if experts == "gelu":
        leaves = {"w_up": draw(num, F, D), "b_up": draw(num, F), "w_down": draw(num, D, F), "b_down": draw(num, D)}
    if experts in ("gpt-oss", "lookup"):
        leaves = {
            "w_up": draw(num, 2 * F, D),
            "b_up": draw(num, 2 * F),
            "w_down": draw(num, D, F),
            "b_down": draw(num, D),
        }
    return {"router": draw(num, D), "experts": leaves, "scale": torch.ones(D, dtype=torch.float64)}


def layer(experts: str, params: Any, x_SD: Tensor) -> Tensor:
    x_SD = x_SD * params["scale"]
    routing = layers.top_k(x_SD @ params["router"].t(), K)
    y_SD = layers.apply(EXPERTS[experts], params["experts"], x_SD, routing)
    return (x_SD + y_SD).square().mean() + 0.1 * layers.balance.switch(routing)


def rows() -> list[Tensor]:
    return list(torch.randn(2, S, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


@pytest.mark.nightly
@distributed(world=[2, 3])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("num", [4, 5])
@pytest.mark.parametrize("experts", EXPERTS)
def test_experts_are_parallel_by_their_spec(world: int, experts: str, num: int, jit: bool) -> None:
    loss = functools.partial(layer, experts)
    parted = sf.partition(loss, "ep")
    params = made(experts, num)
    specs = {"router": P(), "experts": dict.fromkeys(params["experts"], P("ep")), "scale": P()}
    with sf.make_mesh({"ep": world}, device="cpu") as mesh:
        options: dict[str, Any] = {"mesh": mesh, "specs": specs, "batch": P(), "reference": loss}
        wrapped = sf.jit(parted, backend="graph") if jit else parted
        assert_parity(wrapped, sf.optim.adamw(0.01), params, rows(), **options)
    sent = [(x.name, x.shape) for x in parted.programs()[0].sent]
    # The transposes of the tokens' rows and of their weights, and the sum of the results: that of `Sum("ep")`.
    if experts == "lookup":  # the biases are gathered; between the products rows stay with their ranks
        biases = [("all_gather", (num, 2 * F)), ("all_gather", (num, D))]
        # Each of more ranks compares its rows with the ends of the experts, and sends their numbers, no row of floats.
        numbers = [("all_gather_invariant", (S * K,))] if (world, num) == (3, 5) else []
        assert sent == [("pvary", (S, D)), *biases, *numbers, ("pvary", (S, K)), ("psum", (S, D))]
        return
    assert sent == [("pvary", (S, D)), ("pvary", (S, K)), ("psum", (S, D))]


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("experts", ["swiglu", "gpt-oss"])
def test_a_loss_with_experts_is_differentiated_and_batched_by_torch(experts: str) -> None:
    loss = functools.partial(layer, experts)
    params, (x_SD, other_SD) = made(experts, E), rows()
    specs = {"router": P(), "experts": dict.fromkeys(params["experts"], P("ep")), "scale": P()}
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        step = sf.sharded_step(sf.partition(loss, "ep"), sf.optim.sgd(0.1), mesh=mesh, specs=specs, batch=P())
        state = step.init(params)
        with pytest.raises(ValueError, match=r"(?s)captured at its first call.*Call the loss once before"):
            torch.func.grad(step.loss, 1)(state.params, x_SD)
        step.loss(state.params, x_SD)
        step.loss(state.params, x_SD.clone().requires_grad_())
        grads = sf.unshard(torch.func.grad(step.loss)(state.params, x_SD))
        close(grads, torch.func.grad(loss)(params, x_SD))
        both = torch.stack([x_SD, other_SD])
        close(torch.func.vmap(step.loss, (None, 0))(state.params, both), torch.stack([loss(params, x) for x in both]))
        of_rows = torch.func.vmap(torch.func.grad(step.loss, 1), (None, 0))(state.params, both)
        close(of_rows, torch.stack([torch.func.grad(loss, 1)(params, x) for x in both]))
        got = torch.func.jvp(lambda x: step.loss(state.params, x), (x_SD,), (other_SD,))
        close(got, torch.func.jvp(functools.partial(loss, params), (x_SD,), (other_SD,)))


def close(got: Any, want: Any) -> None:
    for a, b in zip(sf.core.tree_leaves(got), sf.core.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.day("gpt-False")
@distributed(world=2)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("setting", ["mixtral", "gpt"])
def test_a_model_with_experts_is_cut_by_specs(setting: str, stacked: bool) -> None:
    sizes: dict[str, Any] = {"vocab_size": 31, "num_layers": 2, "d_model": 12, "num_heads": 2, "d_ff": 10}
    experts = moe.Experts(num=3, every=1 if stacked else 2, capacity=1.0, z=0.01)
    style = {"num_kv_heads": 2, "max_len": 16, "stacked": stacked, "experts": experts}
    config = (moe.mixtral_like if setting == "mixtral" else moe.gpt_moe)(**sizes, **style)
    loss = functools.partial(gpt.loss, config)
    on_ranks = dataclasses.replace(config, experts=dataclasses.replace(experts, exchange=layers.AllReduce("tp")))
    params = sf.core.tree_map(lambda x: x.double() * 3, gpt.init(config, sf.key(0)))
    paths, (leaves, tree) = sf.core.tree_paths(params), sf.core.tree_flatten(params)
    # The gradient of a bias of keys is 0 but for rounding.
    trainable = sf.core.tree_unflatten(tree, ["bk" not in path for path in paths[: len(leaves)]])
    made = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(0, 31, (4, 8), generator=made)} for _ in range(2)]
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        assert_parity(
            sf.partition(loss),
            sf.optim.adamw(0.01),
            params,
            batches,
            mesh=mesh,
            specs=gpt.specs(on_ranks, tp="tp"),
            batch=P(),
            reference=loss,
            trainable=trainable,
        )


def test_ops_with_a_derivative_equal_the_functions() -> None:
    params, x_SD = made("swiglu", E), rows()[0]

    def grads() -> list[Tensor]:
        leaves, tree = sf.core.tree_flatten(sf.core.tree_map(lambda x: x.clone().requires_grad_(), params))
        return list(torch.autograd.grad(layer("swiglu", sf.core.tree_unflatten(tree, leaves), x_SD), leaves))

    want = grads()
    with sf.nn.as_ops():
        assert all(torch.equal(a, b) for a, b in zip(grads(), want, strict=True))
