"""Covers from_module(has_state=True): buffers as model state, and BatchNorm over the rows of all ranks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import optim
from shardfn.testing import RTOL, distributed

MODES = {"eager": lambda f: f, "graph": lambda f: sf.jit(f, backend="graph")}
ROWS = {1: [7], 2: [4, 3], 3: [3, 1, 3]}  # one rank has a single row, which torch's own BatchNorm refuses


class Net(nn.Module):
    """Two kinds of BatchNorm, one of them run again in the backward, a spectral norm, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn2 = nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4, momentum=0.3)
        self.lin, self.bn1 = parametrizations.spectral_norm(nn.Linear(4, 5)), nn.BatchNorm1d(5, affine=False)
        self.frozen = nn.BatchNorm1d(5).eval()
        self.register_buffer("calls", torch.tensor(0))
        self.again = True
        self.double()

    def first(self, x: Tensor) -> Tensor:
        return torch.tanh(self.bn2(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h: Any = checkpoint(self.first, x, use_reentrant=False) if self.again else self.first(x)
        return self.frozen(self.bn1(self.lin(h.mean(2)))) + self.calls / 8


def _batch(n: int) -> Tensor:
    return 2 * torch.randn(7, 3, 6, generator=torch.Generator().manual_seed(n), dtype=torch.float64) + 1


def _torch(net: Net, steps: int) -> tuple[dict, dict]:
    """SGD by torch alone, on whole batches, without a recomputation, in which torch counts a batch twice."""
    net.again = False
    for n in range(steps):
        grads = torch.autograd.grad(net(_batch(n)).square().mean(), list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), grads, strict=True):
                p -= 0.1 * g
    return dict(net.named_parameters()), dict(net.named_buffers())


def _close(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype
        torch.testing.assert_close(got[name], x.detach(), rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@distributed(world=[1, 2, 3], timeout=200)
def _trains(world: int, cases: list[tuple[str, int]]) -> None:
    mesh, net = sf.make_mesh({"dp": -1}), Net()
    params, model_state, apply = sf.from_module(net, has_state=True)
    assert "calls" in model_state and "bn1.num_batches_tracked" in model_state
    before = copy.deepcopy(dict(net.named_buffers()))

    def loss(p: dict, s: dict, x: Tensor) -> tuple[sf.WeightedMean, dict]:
        out, s = apply(p, s, x)
        return sf.WeightedMean(out.square().sum(), out.numel()), s

    want, buffers = _torch(copy.deepcopy(net), 3)
    for mode, stage in cases:
        zero = sf.Zero(stage=stage, persist_elements=0)
        step = sf.sharded_step(MODES[mode](loss), optim.sgd(0.1), mesh=mesh, zero=zero, has_state=True)
        state = step.init(params, model_state=model_state)
        for n in range(3):
            state, _ = step(state, _batch(n).split(ROWS[world])[mesh.rank])
        _close(sf.unshard(state.params), want)
        _close(sf.unshard(state.model_state), buffers)
    assert all(torch.equal(x, before[name]) for name, x in net.named_buffers())


@pytest.mark.nightly
def test_batch_norm_equals_torch_on_the_global_batch() -> None:
    _trains(cases=[("eager", 3)], world=2)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 3])
def test_batch_norm_equals_torch_at_every_stage(world: int) -> None:
    _trains(cases=[(mode, stage) for mode in MODES for stage in (0, 1, 3)], world=world)


@distributed(world=2)
def test_statistics_keep_their_dtype_under_a_policy() -> None:
    mesh = sf.make_mesh({"dp": 2})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    params, model_state, apply = sf.from_module(net, has_state=True)

    def loss(p: dict, s: dict, x: Tensor) -> tuple[Tensor, dict]:
        out, s = apply(p, s, x)
        assert out.dtype == torch.bfloat16
        return out.float().square().mean(), s

    step = sf.sharded_step(sf.mixed_precision(loss, sf.Policy.bf16()), optim.sgd(0.1), mesh=mesh, has_state=True)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    state, _ = step(step.init(params, model_state=model_state), x.chunk(2)[mesh.rank])
    got = sf.unshard(state.model_state)
    net(x)
    assert {n: y.dtype for n, y in got.items()} == {n: y.dtype for n, y in net.named_buffers()}
    for name, y in net.named_buffers():
        torch.testing.assert_close(got[name].float(), y.float(), rtol=0, atol=2 * RTOL[torch.bfloat16])


class Counted(nn.Module):
    """A buffer `n`, and a forward that changes it."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.lin, self.change = nn.Linear(3, 2), change
        self.register_buffer("n", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.lin(x) * self.n


def _assign(part: Any, x: Tensor) -> None:
    part.n = 2 * part.n


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": lambda part, x: part.n.mul_(2),
    "assigned": _assign,
    "copied": lambda part, x: part.n.copy_(2 * part.n),
    "data": lambda part, x: part.n.data.mul_(2),
}


@pytest.mark.parametrize(
    "how", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(CHANGES)]
)
def test_a_buffer_may_change_in_any_way_and_the_module_stays_unchanged(how: str) -> None:
    net = Counted(CHANGES[how])
    params, first, apply = sf.from_module(net, has_state=True)
    x, state = torch.ones(4, 3), first
    for k in (2, 4):
        out, state = apply(params, state, x)
        assert state["n"] == k and torch.equal(out, net.lin(x) * k)
    assert net.n == 1 and first["n"] == 1
    with pytest.raises(ValueError, match=r"\['n'\] are missing, \['m'\] are not in the module"):
        apply(params, {"m": first["n"]}, x)
    with pytest.raises(ValueError, match=r"or hand it on as model state: from_module\(module, has_state=True\)"):
        sf.from_module(net)[1](params, x)
    with pytest.raises(ValueError, match="has no effect: this Linear has no buffers"):
        sf.from_module(net.lin, has_state=True)


@pytest.mark.nightly
@distributed(world=2)
def test_a_state_by_the_rows_of_each_rank_raises_in_the_first_step() -> None:
    mesh = sf.make_mesh({"dp": 2})
    params, first, apply = sf.from_module(Counted(lambda part, x: part.n.copy_(x.mean())), has_state=True)

    def loss(p: dict, s: dict, x: Tensor) -> tuple[Tensor, dict]:
        out, s = apply(p, s, x)
        return out.square().mean(), s

    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, has_state=True)
    params = sf.core.tree_map(torch.ones_like, params)
    with pytest.raises(sf.RankError, match=r"model_state\['n'\], kept as P\(\), differs along \('dp',\)"):
        step(step.init(params, model_state=first), torch.full((2, 3), mesh.rank + 1.0))


@distributed(world=2)
def test_batch_norm_without_statistics_needs_no_buffers() -> None:
    mesh, net = sf.make_mesh({"dp": 2}), nn.BatchNorm1d(3, track_running_stats=False).double()
    params, first, apply = sf.from_module(net, has_state=True)

    def loss(p: dict, s: dict, x: Tensor) -> tuple[Tensor, dict]:
        out, s = apply(p, s, x)
        return (out - x).square().mean(), s

    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, has_state=True)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state, metrics = step(step.init(params, model_state=first), x.chunk(2)[mesh.rank])
    torch.testing.assert_close(metrics["loss"], (net(x) - x).square().mean().detach())
    assert first == state.model_state == {}


def test_dropout_goes_by_the_key_too() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    params, state, apply = sf.from_module(net, has_state=True)
    x, index = torch.randn(6, 3), torch.arange(6)
    out, new = apply.keyed(sf.key(0), index)(params, state, x)
    again, _ = apply.keyed(sf.key(0), index)(params, state, x)
    assert torch.equal(out, again) and (out == 0).any() and new["0.num_batches_tracked"] == 1
