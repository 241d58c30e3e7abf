"""Covers `partition` of many small losses: the loss and every gradient of one device, or an error."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.core import tree_map
from shardfn.testing import RTOL, distributed

Tree = dict[str, Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)


def mlp_params() -> Tree:
    return {"up": drawn(8, 10), "down": drawn(10, 8, seed=5), "shift": drawn(8, seed=9)}


def table_params() -> Tree:
    return {"table": drawn(7, 6), "shift": drawn(6, seed=2)}


MLP = {"up": P(None, "tp"), "down": P("tp"), "shift": P()}
TABLE = {"table": P("tp"), "shift": P()}
ROWS = drawn(4, 8, seed=1)
TOKENS = torch.tensor([[1, 2, 2, 6], [2, 0, 3, 2]])


class Case(NamedTuple):
    loss: Callable[[Tree, Any], Tensor]
    params: Callable[[], Tree] = mlp_params
    specs: Any = MLP
    batch: Any = ROWS


def mlp(p: Tree, h: Tensor) -> Tensor:
    return torch.tanh(h @ p["up"]) @ p["down"]


def moved(p: Tree, x: Tensor) -> Tensor:
    return x + p["shift"]


def hidden(p: Tree, x: Tensor) -> Tensor:
    return moved(p, x) @ p["up"]


def rotary(p: Tree, x: Tensor) -> Tensor:
    turn = torch.polar(torch.ones(4, dtype=torch.float64), torch.arange(4, dtype=torch.float64))
    h = torch.view_as_complex(moved(p, x).reshape(4, 4, 2)) * turn
    return mlp(p, torch.view_as_real(h).reshape(4, 8)).square().mean()


def mean_in_16_bits(p: Tree, x: Tensor) -> Tensor:
    return ((x[:, None, None] * p["a"][None, :, None]).expand(40, 10, 400).contiguous().mean() * p["b"]).sum()


def compared_in_place(p: Tree, x: Tensor) -> Tensor:
    h = mlp(p, moved(p, x))
    m = h.clone().gt_(0.0)
    return (h * (m + m)).square().mean()


def filled(p: Tree, x: Tensor) -> Tensor:
    """Two halves written to one new tensor, as attention with latent keys does."""
    h = hidden(p, x)
    both = h.new_empty(5, 10)
    both[:4], both[4:, 3:] = h, h[:1, 3:]
    both[4, :3].fill_(0.5)
    return (both @ p["down"]).square().mean()


def row_by_row(p: Tree, x: Tensor) -> Tensor:
    """A recurrence in place, as a delta rule has it."""
    h = hidden(p, x).reshape(1, 4, 10)
    for i in range(1, 4):
        h[..., i, :] = h[..., i, :].clone() + 0.5 * h[..., i - 1, :].clone().tanh()
    return (h[0] @ p["down"]).square().mean()


def halves_in_place(p: Tree, x: Tensor) -> Tensor:
    h = hidden(p, x)
    gate, up = h[:, :5], h[:, 5:]
    h[:, 5:] = up.tanh() + gate
    seen = h.view(-1)
    h.t()[1:3].mul_(2)
    h.clamp_(min=-0.5)
    seen[::3] += 0.25
    return (h @ p["down"]).square().mean() + seen.square().sum()


def shifted_targets(p: Tree, t: Tensor) -> Tensor:
    """As models with a decoder make its inputs of their labels."""
    before = t.new_zeros(t.shape)
    before[..., 1:] = t[..., :-1].clone()
    before[..., 0] = 3
    before.masked_fill_(before == 2, 1)
    return (F.embedding(before, p["table"]) * p["shift"]).square().sum()


def classes(p: Tree, t: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy((p["shift"] + ROWS[:2, :6]) @ p["table"].t(), t, **options)


NONE = torch.empty(0, dtype=torch.float64)
CASES = {
    "complex": Case(lambda p, x: mlp(p, torch.fft.fft(moved(p, x), dim=-1).real).square().mean()),
    "rotary by complex numbers": Case(rotary),
    "a number added to a sum": Case(lambda p, x: (mlp(p, moved(p, x)) + 1).square().mean()),
    "a truth value added": Case(lambda p, x: (mlp(p, moved(p, x)) + True).square().mean()),
    "bits as numbers": Case(lambda p, x: (mlp(p, moved(p, x)) * (1 + x.view(torch.int64) % 3)).square().mean()),
    "joined with nothing": Case(lambda p, x: mlp(p, torch.cat([NONE, moved(p, x)], dim=-1)).square().mean()),
    "cut and joined with nothing": Case(lambda p, x: (torch.cat([NONE, hidden(p, x)], -1) @ p["down"]).square().mean()),
    "one row by index": Case(lambda p, x: mlp(p, torch.index_select(moved(p, x), 0, torch.tensor(2))).square().mean()),
    "powers": Case(lambda p, x: (2 ** mlp(p, moved(p, x))).mean() + 1 / p["shift"].square().sum()),
    "largest": Case(lambda p, x: (hidden(p, x).max(-1).values * p["down"].sum()).mean() + mlp(p, x).amax()),
    "norms": Case(lambda p, x: p["up"].norm() + p["shift"].norm() + mlp(p, x).norm() + p["up"].std()),
    "sorted": Case(lambda p, x: (hidden(p, x).cumsum(-1).sort(-1).values @ p["down"]).square().mean()),
    "einsum": Case(lambda p, x: torch.einsum("bi,ij,jk->bk", moved(p, x), p["up"], p["down"]).pow(3).mean()),
    "groups": Case(lambda p, x: (F.group_norm(hidden(p, x), 5) @ p["down"]).square().mean()),
    "batch norm": Case(lambda p, x: (F.batch_norm(hidden(p, x), None, None, training=True) @ p["down"]).pow(3).mean()),
    "rolled": Case(lambda p, x: (hidden(p, x).roll(1, -1).flip(-1).tril() @ p["down"]).square().mean()),
    "gated": Case(lambda p, x: (F.glu(hidden(p, x)) @ p["down"][:5]).square().mean()),
    "log of sums": Case(lambda p, x: hidden(p, x).std(-1).mean() + torch.logcumsumexp(p["down"], 0).mean()),
    "compared in place": Case(compared_in_place),
    "filled in place": Case(filled),
    "row by row in place": Case(row_by_row),
    "views in place": Case(halves_in_place),
    "views in place, recomputed": Case(lambda p, x: sf.remat(halves_in_place)(p, x) + sf.remat(filled)(p, x)),
    "shifted in place": Case(shifted_targets, table_params, TABLE, TOKENS),
    "embedding": Case(
        lambda p, t: (F.embedding(t, p["table"]) * p["shift"]).square().sum(), table_params, TABLE, TOKENS
    ),
    "embedding by frequency": Case(
        lambda p, t: (F.embedding(t, p["table"], scale_grad_by_freq=True) * p["shift"]).square().sum(),
        table_params,
        TABLE,
        TOKENS,
    ),
    "classes": Case(classes, table_params, TABLE, torch.tensor([2, -100])),
    "smoothed classes": Case(
        lambda p, t: classes(p, t, label_smoothing=0.1), table_params, TABLE, torch.tensor([2, 3])
    ),
    "mean in 16 bits": Case(
        mean_in_16_bits,
        lambda: {"a": torch.ones(10).half(), "b": torch.ones(2).half()},
        {"a": P("tp"), "b": P()},
        torch.ones(40).half(),
    ),
}


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_losses_and_gradients_are_those_of_one_device(world: int) -> None:
    mesh, wrong = sf.make_mesh({"tp": world}), []
    for name, case in CASES.items():
        params = case.params()
        leaves = tree_map(lambda x: x.clone().requires_grad_(), params)
        want = case.loss(leaves, case.batch)
        grads = torch.autograd.grad(want, list(leaves.values()), allow_unused=True)
        step = sf.sharded_step(
            sf.partition(case.loss), sf.optim.sgd(1.0), mesh=mesh, specs=case.specs, batch=P(), donate=False
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*without a policy")  # of the case in 16 bits
            state = step.init(params)
        new, metrics = step(state, case.batch)
        got = {k: params[k] - new.params[k].full_tensor() for k in params}
        pairs = [("loss", metrics["loss"], want), *((k, got[k], g) for k, g in zip(params, grads, strict=True))]
        for what, a, b in pairs:
            b = torch.zeros_like(a) if b is None else b.detach().to(a.dtype)
            off = float((a - b).abs().max() / max(float(b.abs().max()), 1e-3))
            if not off <= RTOL[b.dtype]:
                wrong.append(f"{name}: {what} is {off:.1e} off")
    assert not wrong, "\n".join(wrong)


def twice(p: Tree, x: Tensor) -> Tensor:
    h = moved(p, x)
    y = mlp(p, h).square().mean()
    return y + torch.autograd.grad(y, h, create_graph=True)[0].square().sum()


def rescaled_unseen(p: Tree, x: Tensor) -> Tensor:
    h = mlp(p, moved(p, x))
    with torch.no_grad():
        h[:, 0].mul_(2)
    return h.square().mean()


def windows(p: Tree, x: Tensor) -> Tensor:
    h = mlp(p, moved(p, x))
    h.unfold(1, 4, 4)[0].mul_(2)
    return h.square().mean()


def batch_overwritten(p: Tree, x: Tensor) -> Tensor:
    x[0] = 0.0
    return mlp(p, moved(p, x)).square().mean()


REFUSED = {
    "differentiates something itself": Case(twice),
    "writes to a value that is differentiated, where autograd does not see it": Case(rescaled_unseen),
    r"writes through a view of another kind \(aten.unfold": Case(windows),
    "writes to an argument of the loss": Case(batch_overwritten),
    r"an index of an embedding is not in \[0, 7\)": Case(
        lambda p, t: F.embedding(t, p["table"]).square().sum(), table_params, TABLE, TOKENS + 1
    ),
    r"an index of an embedding is not in \[0, 7\) ?": Case(
        lambda p, t: F.embedding(t, p["table"]).square().sum(), table_params, TABLE, TOKENS - 1
    ),
    r"a target is not in \[0, 7\)": Case(classes, table_params, TABLE, torch.tensor([7, 3])),
    r"a target is not in \[0, 7\) ?": Case(classes, table_params, TABLE, torch.tensor([-1, 3])),
}


@pytest.mark.nightly
@distributed(world=2)
def test_losses_that_it_cannot_hold_are_an_error() -> None:
    mesh = sf.make_mesh({"tp": 2})
    for text, case in REFUSED.items():
        step = sf.sharded_step(sf.partition(case.loss), sf.optim.sgd(1.0), mesh=mesh, specs=case.specs, batch=P())
        with pytest.raises((ValueError, sf.RankError), match=text):
            step(step.init(case.params()), case.batch)


@distributed(world=2)
def test_a_gradient_of_the_batch_is_whole() -> None:
    mesh, params = sf.make_mesh({"tp": 2}), mlp_params()

    def loss(p: Tree, x: Tensor) -> Tensor:
        return (torch.tanh(x @ p["up"]) @ p["down"] + p["shift"]).square().mean()

    step = sf.sharded_step(sf.partition(loss), sf.optim.sgd(1.0), mesh=mesh, specs=MLP, batch=P())
    state = step.init(params)
    step.loss(state.params, ROWS)  # a program for rows without a gradient is another one
    x = ROWS.clone().requires_grad_()
    step.loss(state.params, x).backward()
    y = ROWS.clone().requires_grad_()
    loss(params, y).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-15)


@distributed(world=2)
def test_autocast_is_a_part_of_a_program() -> None:
    mesh, params = sf.make_mesh({"tp": 2}), tree_map(Tensor.float, mlp_params())
    loss = sf.partition(lambda p, x: mlp(p, moved(p, x)).square().mean())
    step = sf.sharded_step(loss, sf.optim.sgd(0.0), mesh=mesh, specs=MLP, batch=P())
    state = step.init(params)
    with torch.autocast("cpu", torch.bfloat16):
        state, _ = step(state, ROWS.float())
    _, metrics = step(state, ROWS.float())
    want = mlp(params, moved(params, ROWS.float())).square().mean()
    assert math.isclose(float(metrics["loss"]), float(want), rel_tol=1e-6)
