"""Covers `onebit_adam` and `apmsqueeze` on ranks: the warm-up's bits, values computed by hand, ZeRO, exact leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import bind_mesh, local, pmean
from shardfn.core import tree_map
from shardfn.testing import distributed

P0 = torch.linspace(-1, 1, 8)
GOLDEN = {
    3: [-1.06160793, -0.722628265, -0.324955463, -0.035931288, 0.223040854, 0.465386091, 0.693469595, 0.888838116],
    4: [-1.048774309, -0.710173943, -0.311625689, -0.024017971, 0.213561266, 0.456728491, 0.684159633, 0.879259239],
    6: [-1.054044709, -0.715288577, -0.33732948, -0.019125513, 0.217454261, 0.46028392, 0.702112024, 0.897730178],
}


def golden_grad(t: int, rank: int) -> Tensor:
    i = torch.arange(8, dtype=torch.float64)
    return (torch.sin(0.7 * i + 1.3 * t + 0.9 * rank) * (1 + 0.1 * i)).float()


def run(tx: Any, params: Any, grads: Callable[[int], Any], steps: int, *, in_place: bool, given: bool = True) -> Any:
    """As the engine steps: averaged gradients while the phase is not local, in the rule for each phase."""
    state, out = tx.init(tree_map(torch.clone, params)), []
    params = tree_map(torch.clone, params)
    for t in range(1, steps + 1):
        phase = tx.needs.phases.next(local(state))
        g = grads(t) if phase.local else pmean(grads(t), tx.needs.phases.axes)
        rule = optim.bind_stats(tx, params, phase=phase) if given else tx
        if in_place:
            params, state = optim.inplace(rule)(g, state, params)
        else:
            updates, state = rule.update(g, state, params)
            params = optim.apply_updates(params, updates)
        out.append((tree_map(torch.clone, params), phase.name))
    return out, state


@pytest.mark.nightly
@distributed(world=2)
def test_the_values_computed_by_hand() -> None:
    mesh = sf.make_mesh({"dp": 2})
    with bind_mesh(mesh):
        rank = mesh.axis_index("dp")
        grads = lambda t: [golden_grad(t, rank)]  # noqa: E731
        for in_place in (False, True):
            tx: Any = optim.onebit_adam(0.01, freeze_step=3, bias_correction=False)
            steps, state = run(tx, [P0], grads, 6, in_place=in_place, given=in_place)
            for t, want in GOLDEN.items():
                close(steps[t - 1][0][0], want)
            assert [name for _, name in steps] == ["warmup"] * 3 + ["compressed"] * 3
            close(state.adam[0].mu[0], [0.05811224] * 3 + [-0.05811224] * 5, 2e-8)

            tx: Any = optim.zero_one_adam(
                0.01, var_freeze_step=6, var_update_scaler=2, local_step_scaler=2, local_step_clipper=4,
                bias_correction=False,
            )  # fmt: skip
            steps, state = run(tx, [P0], grads, 16, in_place=in_place, given=in_place)
            for t, want in GOLDEN_01.items():
                if rank == 0:
                    close(steps[t - 1][0][0][:3], want, 1e-6)
            early = ["warmup", "warmup", "onebit", "full", "onebit", "full", "onebit", "switch"]
            late = ["round", "round", "local", "round", "local", "local", "local", "round"]
            assert [name for _, name in steps] == early + late
            assert optim.is_in_round(state)

            tx: Any = optim.onebit_lamb(0.01, weight_decay=0.01, freeze_step=3, bias_correction=False)
            p0 = [torch.linspace(-1, 1, 5), torch.tensor([0.5, -0.25, 2])]
            steps, state = run(tx, p0, lambda t: list(golden_grad(t, rank).split([5, 3])), 6, in_place=in_place)
            close(state.coeff, [0.065740880, 0.107942225], 1e-7)
            close(state.scaling, [1.298593229, 0.813050488], 1e-6)
            close(state.factor, [0.863973376, 0.898237210], 1e-6)
            close(torch.cat(steps[5][0]), GOLDEN_LAMB, 1e-6)


def close(got: Tensor, want: list[float], atol: float = 2e-7) -> None:
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=atol)


GOLDEN_01 = {
    2: [-1.062903422, -0.745998114, -0.365080438],
    6: [-1.105728013, -0.749160185, -0.30905376],
    8: [-1.100610281, -0.728255246, -0.275520297],
    10: [-1.074202263, -0.726633527, -0.274325029],
    12: [-1.095269448, -0.697580182, -0.25291163],
    16: [-1.069702366, -0.732839247, -0.278898876],
}
GOLDEN_LAMB = [
    -1.013085495, -0.500146435, 0.024772557, 0.52632508, 1.017937433, 0.514079523, -0.258089697, 1.953510973,
]  # fmt: skip
