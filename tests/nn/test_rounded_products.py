"""Covers products with rounded operands: their definition, equal steps on ranks, served codes, and refusals."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import kernels, nn, optim
from shardfn.core import P, Policy, RoundingPolicy
from shardfn.inference import Engine, Sampling, decoder
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

CONFIG = gpt.Config(
    vocab_size=64, num_layers=2, d_model=64, num_heads=4, d_ff=128, max_len=32, mlp="swiglu", norm="rms", bias=False
)
DOUBLE = dict.fromkeys(("param", "compute", "reduce", "accum", "output"), torch.float64)
POLICIES = {
    "int8": RoundingPolicy("int8", "int8", "int8"),
    "mxfp8": RoundingPolicy("mxfp8", "mxfp8", "mxfp8"),
    "fp8": RoundingPolicy("fp8", "fp8", "fp8"),
    "qat": RoundingPolicy(weights="int4"),
}


def round_slowly(x: Tensor, rounding: str) -> Tensor:
    """Rounds block by block, in Python."""
    out = x.detach().clone()
    flat = out.view(-1, 32)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    values = values[~values.isnan()].unique()
    for block in flat:
        largest = block.abs().max().item()
        scale = largest / 127 if rounding == "int8" else largest / 448
        if rounding == "mxfp8" and largest:
            scale = 2.0 ** (torch.tensor(largest).log2().floor().item() - 8)
        for i, value in enumerate(block.tolist()):
            near = value / scale if scale else 0.0
            near = max(-448.0, min(448.0, near)) if rounding != "int8" else near
            best = round(near) if rounding == "int8" else values[(values - near).abs().argmin()].item()
            block[i] = best * scale
    return out


@pytest.mark.parametrize("rounding", ["int8", "fp8", "mxfp8"])
def test_rounded_values_are_the_nearest(rounding: Any) -> None:
    x = torch.randn(3, 96, dtype=torch.float64) * torch.logspace(-6, 6, 96, dtype=torch.float64)
    x[1, :32] = 0
    torch.testing.assert_close(nn.round_operand(x, rounding), round_slowly(x, rounding), rtol=1e-12, atol=0)
    assert torch.equal(nn.round_operand(x[:1], rounding), nn.round_operand(x, rounding)[:1])


def test_weights_have_the_values_that_an_engine_serves() -> None:
    w = torch.randn(5, 64)
    for kind in ("int8", "int4"):
        want = kernels.dequantize_blocks(kernels.quantize_blocks(w, kind), 64)
        with nn.rounding_products(RoundingPolicy(weights=kind)):
            assert torch.equal(nn.column_linear(torch.eye(64), w), want.t())


@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_has_the_value_and_gradients_of_the_definition(name: str) -> None:
    policy = POLICIES[name]
    x, w, b = torch.randn(2, 7, 64).double(), torch.randn(96, 64).double(), torch.randn(96).double()

    def rounded(x: Tensor, kind: str | None) -> Tensor:
        return x if kind is None else nn.round_operand(x, kind)  # pyright: ignore[reportArgumentType]

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with nn.rounding_products(policy):
            return nn.column_linear(x, w, b).sin().sum()

    served = rounded(w, policy.weights)
    if policy.weights == "int8":
        served = kernels.dequantize_blocks(kernels.quantize_blocks(w, "int8"), 64, torch.float64)
    y = F.linear(rounded(x, policy.inputs), served, b)
    dy = y.cos()
    of_x = served if policy.grads is None else rounded(w.t(), policy.weights).t()
    want = rounded(dy, policy.grads) @ of_x, torch.einsum("btf,btd->fd", dy, x), dy.sum((0, 1))
    grads, value = torch.func.grad_and_value(f, (0, 1, 2))(x, w, b)
    torch.testing.assert_close(value, y.sin().sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, want, rtol=1e-12, atol=1e-12)


def make_loss(name: str, axis: str | None = None, *, remat: bool = False, jit: bool = False) -> Any:
    wrap: Any = {"wrap": sf.remat} if remat else {}

    def loss(params: Any, batch: Any) -> Tensor:
        return gpt.loss(CONFIG, params, batch, axis=axis, **wrap)

    made = sf.mixed_precision(loss, Policy(**DOUBLE, master=None, products=POLICIES[name]))
    return sf.jit(made, backend="graph") if jit else made


@distributed(world=2)
@pytest.mark.day("int8-tp, jit")
@pytest.mark.parametrize("how", ["zero 3", "tp", "tp, jit", "zero 2, remat, jit"])
@pytest.mark.parametrize("name", POLICIES)
def test_steps_on_ranks_equal_steps_on_one_device(name: str, how: str) -> None:
    params = sf.tree_map(lambda x: x.double(), gpt.init(CONFIG, sf.key(0)))
    batches = [{"tokens": (torch.arange(4 * 9).view(4, 9) * (i + 3)) % 64} for i in range(2)]
    axis = "tp" if "tp" in how else None
    loss = make_loss(name, axis, remat="remat" in how, jit="jit" in how)
    over: Any = {"mesh": sf.make_mesh({axis or "dp": 2})}
    over |= {"specs": gpt.specs(CONFIG, tp="tp"), "batch": P()} if axis else {"zero": sf.Zero(int(how[5]))}
    run = assert_parity(loss, optim.adamw(1e-2), params, batches, reference=make_loss(name), **over)
    assert run.metrics[1]["loss"] != run.metrics[0]["loss"]


def test_a_model_of_quantization_aware_training_is_served_as_trained() -> None:
    config = dataclasses.replace(CONFIG, batch_invariant=True)
    params, tokens = gpt.init(CONFIG, sf.key(0)), torch.arange(12)[None]
    with nn.rounding_products(POLICIES["qat"]):
        trained = gpt.apply(CONFIG, params, tokens)[0]
    policy: Any = {"blocks": "int4", "": None}
    engine = Engine(decoder(config, quantization=policy), params, eager_steps=100)
    [found] = engine.generate([tokens[0].tolist()], Sampling(max_tokens=1, prompt_logprobs=True))
    want = trained.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.prompt_logprobs), want, rtol=1e-4, atol=1e-5)
    plain = gpt.apply(CONFIG, params, tokens)[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert not torch.allclose(plain, want, rtol=1e-3)


def test_rounding_that_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="inputs must be None or one of 'int8', 'fp8', 'mxfp8', got 'int4'"):
        RoundingPolicy("int8", "int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least one operand must be rounded"):
        RoundingPolicy()
    with nn.rounding_products(POLICIES["int8"]):
        with pytest.raises(ValueError, match=r"the inputs of a layer on each rank must be a multiple of 32.*got 48"):
            nn.column_linear(torch.ones(1, 48), torch.ones(32, 48))
        with pytest.raises(ValueError, match=r"the outputs of a layer on each rank must be a multiple of 32.*got 8"):
            nn.column_linear(torch.ones(1, 32), torch.ones(8, 32))
        with pytest.raises(ValueError, match="must not be batch-invariant"):
            gpt.apply(
                dataclasses.replace(CONFIG, batch_invariant=True), gpt.init(CONFIG, sf.key(0)), torch.ones(1, 4).long()
            )
        with pytest.raises(ValueError, match="from_module: the layers of a module are not rounded"):
            params, apply = sf.from_module(torch.nn.Linear(32, 32))
            apply(params, torch.ones(1, 32))
