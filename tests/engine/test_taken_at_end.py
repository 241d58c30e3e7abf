"""Covers gradients that are taken when a backward has ended, without hooks: from the second step on, and as before."""

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import Travel, Zero, optim
from shardfn.testing import distributed


def _loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Autograd gives `a` and `b` one tensor; `c` gets none where x is not negative."""
    y = (x @ (p["a"] + p["b"])).square().mean()
    return y + (p["c"] * x.sum() if x.min() < 0 else 0.0)


def _batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.rand(4, 3, generator=draw, dtype=torch.float64) - shift for shift in (0.0, 0.5, 0.0, 0.5)]


def _params() -> dict[str, Tensor]:
    a = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    return {"a": a, "b": a.flip(0).clone(), "c": torch.tensor(0.5, dtype=torch.float64)}


@pytest.mark.day("1048576")
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@distributed(world=2)
def test_leaves_that_share_or_lack_a_gradient(bucket_bytes: int) -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    for stage in (0, 2, 3):
        zero = Zero(stage=stage, persist_elements=0, travel=Travel(bucket_bytes=bucket_bytes))
        step = sf.sharded_step(_loss, optim.sgd(0.1), mesh=mesh, zero=zero)
        state, want = step.init(_params()), {k: x.requires_grad_() for k, x in _params().items()}
        for n, x in enumerate(_batches()):
            state, _ = step(state, x.chunk(2)[mesh.rank])
            (plan,) = step._planner._plans.values()
            assert plan.sent_last() == {0, 1, 2}, n
            # Each rank's own loss: it uses `c` or not, by its rows.
            grads = [
                torch.autograd.grad(_loss(want, rows), list(want.values()), allow_unused=True) for rows in x.chunk(2)
            ]
            mean = [sum(torch.zeros(()) if g is None else g for g in pair) / 2 for pair in zip(*grads, strict=True)]
            want = {k: (p - 0.1 * g).detach().requires_grad_() for (k, p), g in zip(want.items(), mean, strict=True)}
            for name, leaf in state.params.items():
                torch.testing.assert_close(leaf.full_tensor(), want[name].detach())
