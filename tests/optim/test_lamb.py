"""Covers `lamb` on float64 leaves: against a plain oracle in float64, alone and beside narrower leaves."""

import pytest
import torch
from torch import Tensor

from shardfn import optim

LR, B1, B2, EPS, DECAY = 0.01, 0.9, 0.99, 1e-6, 0.1


def draw(n: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def oracle(p: Tensor, grads: list[Tensor]) -> Tensor:
    mu, nu = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        mu, nu = B1 * mu + (1 - B1) * g, B2 * nu + (1 - B2) * g * g
        u = mu / (nu.sqrt() + EPS) + DECAY * p
        ratio = (p.square().sum().sqrt() / u.square().sum().sqrt()).clamp(0.01, 10.0)
        p = p - LR * (1 - B2**t) ** 0.5 / (1 - B1**t) * ratio * u
    return p


@pytest.mark.parametrize("in_place", [False, True])
def test_norms_of_float64_leaves_are_float64(in_place: bool) -> None:
    tx = optim.lamb(LR, B1, B2, EPS, DECAY)
    params = [draw(0, 7, 5), draw(1, 70_001), draw(2)]
    grads = [[draw(10 * k + i, *p.shape) for i, p in enumerate(params, 3)] for k in range(3)]
    want = [oracle(p, [g[i] for g in grads]) for i, p in enumerate(params)]
    state, narrow = tx.init(params), [draw(4, 6).float()]
    mixed, alone = [*(p.clone() for p in params), *narrow], [narrow[0].clone()]
    both, single = tx.init(mixed), tx.init(alone)
    for step in grads:
        more = [draw(5, 6).float()]
        if in_place:
            params, state = optim.inplace(tx)([g.clone() for g in step], state, params)
            mixed, both = optim.inplace(tx)([g.clone() for g in (*step, *more)], both, mixed)
            alone, single = optim.inplace(tx)([g.clone() for g in more], single, alone)
            continue
        us, state = tx.update(step, state, params)
        params = optim.apply_updates(params, us)
        us, both = tx.update([*step, *more], both, mixed)
        mixed = optim.apply_updates(mixed, us)
        us, single = tx.update(more, single, alone)
        alone = optim.apply_updates(alone, us)
    for got in (params, mixed[:3]):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert torch.equal(mixed[3], alone[0])  # a narrow leaf steps beside wide ones as it does alone
