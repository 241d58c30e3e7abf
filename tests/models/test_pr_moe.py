"""Covers PR-MoE: a learnt mean of experts and the dense MLP, and pyramids, numbers of experts by layer."""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import assert_parity, distributed

NIGHTLY = pytest.mark.nightly
TINY: dict[str, Any] = {"vocab_size": 31, "num_layers": 4, "d_model": 12, "num_heads": 2, "d_ff": 10, "max_len": 16}
STYLES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False},
}
TOP1 = functools.partial(layers.top_k, renormalise=False)
# Layers 1 and 3 have experts.
PYRAMID = (2, 5)


def config(style: str = "llama", **changes: Any) -> gpt.Config:
    given: dict[str, Any] = {"num": PYRAMID, "every": 2, "top_k": 1, "route": TOP1, "residual": True, "balance": 0.1}
    return gpt.Config(**TINY, **STYLES[style], experts=moe.Experts(**{**given, **changes}))


def params(c: gpt.Config) -> Any:
    """Parameters in float64, far enough from their start that no bias is 0."""
    draw = torch.Generator().manual_seed(0)
    return sf.core.tree_map(lambda x: x.double() + 0.2 * torch.randn(x.shape, generator=draw), gpt.init(c, sf.key(0)))


def tokens(rows: int = 4, length: int = 8) -> torch.Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("style", STYLES)
def test_leaves_and_numbers_of_parameters(style: str) -> None:
    c, plain = config(style), config(style, residual=False)
    made = gpt.init(c, sf.key(0))
    assert [p["router"].shape[0] for p in made["blocks"] if "router" in p] == list(PYRAMID)
    assert [p["mix"].shape for p in made["blocks"] if "mix" in p] == [(2, 12)] * 2 and c.num_experts == [2, 5]
    biased = style == "gpt"
    mlp = (3 if style == "llama" else 2) * 10 * 12 + (10 + 12 if biased else 0)
    assert gpt.num_params(c) == gpt.num_params(plain) + 2 * (mlp + 2 * 12 + 2)
    assert gpt.num_params(c) == sum(x.numel() for x in sf.core.tree_leaves(made))
    expert = (3 if style == "llama" else 2) * 10 * 12
    assert moe.num_active_params(c) == gpt.num_params(c) - (2 + 5 - 2) * expert


@pytest.mark.parametrize("style", STYLES)
def test_saturated_coefficients_are_the_plain_layer_and_the_dense_layer(style: str) -> None:
    c, ids = config(style), tokens()
    leaves = params(c)
    for on, other in ((0, config(style, residual=False)), (1, dataclasses.replace(c, experts=None))):
        blocks = []
        for p in leaves["blocks"]:
            if "mix" in p:
                b = torch.full((2,), -1e4, dtype=torch.float64)
                b[on] = 1e4
                p = {**p, "mix": torch.zeros_like(p["mix"]), "mix_b": b}
            blocks.append(p)
        names = [set(p) for p in gpt.init(other, sf.key(0))["blocks"]]
        kept = [{n: x for n, x in p.items() if n in has} for p, has in zip(blocks, names, strict=True)]
        got, want = gpt.apply(c, {**leaves, "blocks": blocks}, ids), gpt.apply(other, {**leaves, "blocks": kept}, ids)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_one_expert_is_the_mean_of_two_layers() -> None:
    """By the formula, with torch alone."""
    c = config("gpt", num=(1, 1))
    leaves = params(c)
    p = leaves["blocks"][1]
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    expert = gelu(x @ p["e_up"][0].T + p["e_b_up"][0]) @ p["e_down"][0].T + p["e_b_down"][0]
    mlp = gelu(x @ p["w_up"].T + p["b_up"]) @ p["w_down"].T + p["b_down"]
    c_S2 = (x @ p["mix"].T + p["mix_b"]).softmax(-1)
    got = layers.residual(expert, mlp, x, p["mix"], p["mix_b"])
    torch.testing.assert_close(got, c_S2[:, :1] * expert + c_S2[:, 1:] * mlp, rtol=1e-13, atol=1e-13)
    h = torch.nn.functional.layer_norm(x, (12,), p["norm2_w"], p["norm2_b"], c.norm_eps)
    found = h @ p["router"].T
    assert found.shape == (7, 1) and math.isclose(float(found.softmax(-1).min()), 1.0)


# Each day a few of the cases, by night all.
CASES = [
    pytest.param(ep, stage, jit, marks=() if (ep, stage, jit) == (4, 1, False) else NIGHTLY)
    for ep in (1, 2, 4)
    for stage in (0, 1, 2, 3)
    for jit in (False, True)
]


@distributed(world=4)
@pytest.mark.parametrize("ep, stage, jit", CASES)
def test_steps_equal_one_device(ep: int, stage: int, jit: bool) -> None:
    """A layer of 2 experts on 4 ranks leaves two ranks without experts of the layer."""
    exchange = layers.AllToAll("ep") if ep != 2 else layers.GatherExperts("ep")
    c, alone = config(exchange=exchange, axes=("dp", "ep"), capacity=1.2), config(capacity=1.2)
    batches = [{"tokens": tokens(8)}, {"tokens": tokens(8).flip(0)}]
    loss: Any = functools.partial(gpt.loss, c)
    with sf.make_mesh({"dp": 4 // ep, "ep": ep}, device="cpu") as mesh:
        assert_parity(
            sf.jit(loss, backend="graph") if jit else loss,
            sf.optim.sgd(0.1, momentum=0.9),
            params(c),
            batches,
            reference=functools.partial(gpt.loss, alone),
            mesh=mesh,
            specs=gpt.specs(c),
            batch=sf.P(("dp", "ep")),
            zero=sf.Zero(stage=stage, axis=("dp", "ep"), persist_elements=0),
        )


@distributed(world=2)
@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=NIGHTLY)])
def test_coefficients_beside_layers_that_are_cut(sequence: bool) -> None:
    c = config("gpt")
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        assert_parity(
            functools.partial(gpt.loss, c, axis="tp", sequence=sequence),
            sf.optim.sgd(0.1),
            params(c),
            [{"tokens": tokens()}],
            reference=functools.partial(gpt.loss, c),
            mesh=mesh,
            specs=gpt.specs(c, tp="tp"),
            batch=sf.P(),
        )


@NIGHTLY
@distributed(world=4)
@pytest.mark.parametrize("stage, jit", [(0, False), (1, True), (3, False)])
def test_a_pyramid_in_a_pipeline_equals_one_device(stage: int, jit: bool) -> None:
    """Layers of other leaves on each stage, next to experts along ep."""
    c, alone = config(exchange=layers.AllToAll("ep"), axes="ep"), config()
    loss: Any = sf.pipeline(*gpt.stages(c, wrap=sf.remat), axis="pp")
    with sf.make_mesh({"pp": 2, "ep": 2}, device="cpu") as mesh:
        assert_parity(
            sf.jit(loss, backend="graph") if jit else loss,
            sf.optim.sgd(0.1, momentum=0.9),
            params(c),
            [{"tokens": tokens()}, {"tokens": tokens().flip(0)}],
            reference=functools.partial(gpt.loss, alone),
            mesh=mesh,
            specs=gpt.specs(c),
            batch=sf.P("ep"),
            zero=sf.Zero(stage=stage, axis="ep", persist_elements=0),
        )


@NIGHTLY
@distributed(world=2)
def test_biases_of_a_pyramid_move_in_a_pipeline(world: int) -> None:
    route = functools.partial(layers.sigmoid_groups, groups=1, groups_kept=1)
    c, ends = config(route=route, bias_rate=0.25, balance=0.0), []
    for pp in (1, world):
        mesh = sf.make_mesh({"pp": pp, "dp": world // pp}, device="cpu")
        step = sf.sharded_step(
            sf.pipeline(*moe.stages(c, axes="dp"), num_microbatches=2 if pp > 1 else 1),
            sf.optim.sgd(0.1),
            mesh=mesh,
            batch=sf.P("dp"),
            has_state=True,
            finish=functools.partial(moe.finish, c),
        )
        state = step.init(params(c), model_state=sf.PipelineState(blocks=moe.layer_states(c)))
        for rows in (tokens(), tokens().flip(0)):
            state, _ = step(state, {"tokens": rows[step.rows(4)]})
        ends.append(sf.unshard((state.params, state.model_state)))
    for x, y in zip(*map(sf.core.tree_leaves, ends), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    assert any(x["bias"].any() for x in ends[0][1].blocks if x)


def test_biases_of_a_pyramid_move_by_each_layers_counts() -> None:
    route = functools.partial(layers.sigmoid_groups, groups=1, groups_kept=1)
    c = config(route=route, bias_rate=0.25, balance=0.0)
    state = moe.init_state(c)
    assert [x.shape for x in state["bias"]] == [(2,), (5,)]
    leaves = params(c)
    _, aux, state = moe.loss(c, leaves, state, {"tokens": tokens()})
    assert [int(x.sum()) for x in state["counts"]] == [28, 28] and "max_load" in aux
    moved = moe.finish(c, state)
    for bias, counts in zip(moved["bias"], state["counts"], strict=True):
        assert torch.equal(bias, 0.25 * torch.sign(counts.double().mean() - counts).float())
    assert all(not x.any() for x in moved["counts"])
    with pytest.raises(ValueError, match=r"bias has shape \[\(2,\), \(4,\)\].*need \[\(2,\), \(5,\)\]"):
        gpt.apply(c, leaves, tokens(), bias=[torch.zeros(2), torch.zeros(4)])


@pytest.mark.parametrize("style", STYLES)
def test_a_batch_invariant_model_is_served_with_the_bits_of_its_forward(style: str) -> None:
    c = dataclasses.replace(config(style), batch_invariant=True)
    leaves, ids = sf.core.tree_map(torch.Tensor.float, params(c)), tokens()
    whole = gpt.apply(c, leaves, ids)
    assert torch.equal(gpt.apply(c, leaves, ids[1:2, :5]), whole[1:2, :5])
    made = sf.inference.decoder(c)
    engine = sf.inference.Engine(made, leaves)
    greedy = sf.inference.Sampling(max_tokens=5, temperature=0.0)
    done = engine.generate([ids[0, :3].tolist(), ids[1].tolist()], greedy)
    for prompt, found in zip(([*ids[0, :3].tolist()], ids[1].tolist()), done, strict=True):
        drawn = found[0] if isinstance(found, list) else found
        every = torch.tensor([prompt + list(drawn.tokens)])
        logprobs = gpt.apply(c, leaves, every)[0].double().log_softmax(-1)
        for i, token in enumerate(drawn.tokens):
            assert int(logprobs[len(prompt) - 1 + i].argmax()) == token
    coded = gpt.pack(c, leaves, quantization="int8")
    assert all(p["mix"].dtype == torch.float32 for p in coded["blocks"] if "mix" in p)


@pytest.mark.parametrize(
    "changed, said",
    [
        (
            {"num": (2, 5, 7)},
            r"num=\(2, 5, 7\) must have a number for each layer .*got 3 numbers for 2 layers \[1, 3\]",
        ),
        ({"num": (2,)}, r"got 1 numbers for 2 layers"),
        ({"num": (2, 0)}, r"num=\(2, 0\) must be at least 1"),
        ({"num": ()}, r"num=\(\) must be at least 1"),
        ({"top_k": 3}, r"top_k=3 choices of num=\(2, 5\) experts"),
        ({"shared": True}, "residual=True and shared=True both use the layer's dense MLP"),
    ],
)
def test_bad_settings_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**changed)


def test_a_pyramid_of_stacked_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stacked=True needs one number .*got num=\(2, 5\). Use stacked=False"):
        dataclasses.replace(config(), stacked=True)


GOLDENS: Any = json.loads(pathlib.Path(__file__).with_name("pr_moe_goldens.json").read_text())


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=["residual", "plain"])
def test_layers_are_deepspeeds_own(case: Any) -> None:
    """A pyramid of two layers of DeepSpeed on a stream: outputs, balance, counts and all gradients, in float32."""
    leaves = {name: torch.tensor(x).requires_grad_() for name, x in case["params"].items()}
    x = torch.tensor(case["x"]).requires_grad_()
    h, balance, counts = x, torch.zeros(()), []
    for i, num in enumerate((2, 3)):
        own = {n.removeprefix(f"{i}."): p for n, p in leaves.items() if n.startswith(f"{i}.")}
        experts = {
            new: torch.stack([own[f"deepspeed_moe.experts.deepspeed_experts.{e}.{name}"] for e in range(num)])
            for new, name in (("w_up", "0.weight"), ("b_up", "0.bias"), ("w_down", "2.weight"), ("b_down", "2.bias"))
        }
        routing = layers.switch_top1(h @ own["deepspeed_moe.gate.wg.weight"].T)
        y = layers.apply(layers.gelu_experts, experts, h, routing)
        if case["residual"]:
            up = h @ own["mlp.0.weight"].T + own["mlp.0.bias"]
            mlp = torch.nn.functional.gelu(up, approximate="tanh") @ own["mlp.2.weight"].T + own["mlp.2.bias"]
            y = layers.residual(y, mlp, h, own["coefficient.weight"], own["coefficient.bias"])
        h, balance = h + y, balance + layers.balance.switch(routing)
        counts.append(routing.counts().tolist())
    assert counts == case["counts"]
    torch.testing.assert_close(h.detach(), torch.tensor(case["out"]), rtol=1e-6, atol=1e-6)
    assert balance.item() == pytest.approx(case["balance"], rel=1e-6)
    loss = (h * torch.tensor(case["cotangent"])).sum() + 0.1 * balance
    found = torch.autograd.grad(loss, [x, *leaves.values()], allow_unused=True, materialize_grads=True)
    for name, grad in zip(["x", *leaves], found, strict=True):
        want = torch.tensor(case["gradients"][name])
        torch.testing.assert_close(grad, want, rtol=2e-6, atol=2e-6 * float(want.abs().max()), msg=name)
