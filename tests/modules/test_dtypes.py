"""Covers modules with parameters in other dtypes: buffers follow, exceptions of a policy compute in theirs."""

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn.testing import assert_same, distributed, on_mesh, one_device


class Rotary(nn.Module):
    inv_freq: Tensor
    seen: torch.dtype | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.linspace(1.0, 0.1, 4))
        self.seen = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.inv_freq.dtype
        return (self.inv_freq * torch.arange(x.shape[-2])[:, None]).cos().to(x.dtype)


class Norm(nn.Module):
    """As in language models: computes in float32, multiplies by its weight in the dtype of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Net(nn.Module):
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.lin, self.rotary = nn.Embedding(7, 4), Norm(), nn.Linear(4, 4), Rotary()
        self.register_buffer("positions", torch.linspace(-1, 1, 12).view(3, 4))
        self.bn = nn.BatchNorm1d(3).eval()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        x = x + torch.addmm(self.positions, self.positions, self.lin.weight) + self.rotary(x)
        return self.lin(self.norm(self.bn(x))).float().square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 2, 4], [1, 3, 5]])
POLICIES = {
    "bf16": sf.Policy.bf16(),
    "norms": sf.Policy.bf16(exceptions={"norm": torch.float32}),
    "norms and rows": sf.Policy.bf16(exceptions={"norm|bn|emb": torch.float32}),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(POLICIES)]
)
@distributed(world=2)
def test_a_module_with_buffers_trains_in_16_bits(world: int, name: str) -> None:
    module = net()
    params, apply = sf.from_module(module)
    loss = sf.mixed_precision(lambda p, tokens: apply(p, tokens), POLICIES[name])
    want = one_device(loss, sf.optim.sgd(0.1), params, [TOKENS], parts=world)
    step = sf.sharded_step(
        loss, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": world}), zero=sf.Zero(stage=3, persist_elements=0)
    )
    got = on_mesh(
        loss, sf.optim.sgd(0.1), params, [TOKENS], mesh=sf.make_mesh({"dp": world}), zero=sf.Zero(3, persist_elements=0)
    )
    assert_same(got, want)
    assert module.rotary.seen == torch.float32
    assert set(module.norm.seen) == {torch.float32 if name != "bf16" else torch.bfloat16}
    assert module.positions.dtype == torch.float32
    state = step.init(params)
    assert step.apply(lambda p: apply(p, TOKENS), state).dtype == torch.float32


@pytest.mark.nightly
def test_jit_takes_the_same_dtypes() -> None:
    params, apply = sf.from_module(net())
    runs = []
    for loss in (apply, sf.jit(lambda p, tokens: apply(p, tokens), backend="graph")):
        mixed = sf.mixed_precision(loss, POLICIES["norms"])
        runs.append(on_mesh(mixed, sf.optim.sgd(0.1), params, [TOKENS], mesh=sf.make_mesh({"dp": 1})))
    assert_same(runs[1], runs[0], exact=True)


def test_buffers_follow_the_nearest_parameters() -> None:
    module = net()
    params, apply = sf.from_module(module)
    seen = {}
    module.bn.register_forward_pre_hook(lambda bn, x: seen.update(bn=bn.running_mean.dtype, own=bn.weight.dtype))
    exceptions = {"bn": torch.float32}
    policy = sf.Policy.bf16(exceptions=exceptions)
    sf.mixed_precision(lambda p, tokens: apply(p, tokens), policy)(params, TOKENS)
    assert seen == {"bn": torch.float32, "own": torch.float32}
    sf.mixed_precision(lambda p, tokens: apply(p, tokens), sf.Policy.bf16())(params, TOKENS)
    assert seen == {"bn": torch.bfloat16, "own": torch.bfloat16}


def test_buffers_that_keep_their_dtype_can_be_named() -> None:
    module = net()
    params, apply = sf.from_module(module, keep_dtype=())
    loss = sf.mixed_precision(lambda p, tokens: apply(p, tokens), sf.Policy.bf16())
    loss(params, TOKENS)
    assert module.rotary.seen == torch.bfloat16
    assert module.rotary.inv_freq.dtype == torch.float32


def test_a_module_of_several_dtypes_is_left_unchanged() -> None:
    module = nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3))
    params, apply = sf.from_module(module)
    with pytest.raises(RuntimeError, match="dtype"):
        module(torch.ones(1, 3).bfloat16())
    with pytest.raises(RuntimeError, match="dtype"):
        apply(params, torch.ones(1, 3).bfloat16())
