"""Covers optimizers with states on the host or on disk: the bits of a state on the device, and checkpoints."""

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.testing import distributed

RULES: dict[str, Any] = {
    "adafactor": lambda: optim.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9, weight_decay_rate=1e-3),
    "adafactor in rules": lambda: optim.chain(
        optim.clip_by_global_norm(1.0), optim.average_params(optim.adafactor(1e-2, min_dim_size_to_factor=4), 0.9)
    ),
    "adafactor if finite": lambda: optim.apply_if_finite(optim.adafactor(1e-2, min_dim_size_to_factor=4), 3),
    "adafactor of some": lambda: optim.multi_transform(
        {"large": optim.adafactor(1e-2, min_dim_size_to_factor=4), "small": optim.adamw(1e-2)},
        {"wide": "large", "odd": "small", "row": "small", "one": "small"},
    ),
    "adamw": lambda: optim.adamw(1e-2),
    "lamb": lambda: optim.lamb(1e-2),
    "lion": lambda: optim.lion(1e-3),
    "muon": lambda: optim.muon(1e-2),
    "lookahead": lambda: optim.lookahead(optim.sgd(0.1, momentum=0.9), 2, 0.5),
    "schedule_free": lambda: optim.schedule_free(optim.sgd(0.1), 0.1),
}
X = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))


def _params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (9, 7), "odd": (5, 3), "row": (7,), "one": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _loss(p: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["wide"] + p["row"]) * p["one"]).square().mean() + p["odd"].square().mean()


def _trained(rule: Any, where: Any, wrap: Any, at: pathlib.Path, mesh: Any, stage: int) -> dict[str, Tensor]:
    """The parameters after four steps, the last two from a checkpoint."""

    def made(name: str) -> Any:
        disk: dict[str, Any] = {"disk": sf.Disk(str(at / name))} if where == "disk" else {}
        zero = sf.Zero(stage=stage, persist_elements=0, optimizer=where, **disk)
        return sf.sharded_step(wrap(_loss), rule(), mesh=mesh, zero=zero)

    step, other = made("first"), made("second")
    state = step.init(_params())
    for _ in range(2):
        state, _ = step(state, X[step.rows(6)])
    sf.checkpoint.save(at / "saved", state, step=2)
    state = sf.checkpoint.restore(at / "saved", other.init({k: v * 0 for k, v in _params().items()})).tree
    for _ in range(2):
        state, _ = other(state, X[step.rows(6)])
    found = {name: x.full_tensor() for name, x in state.params.items()}
    step.close()
    other.close()
    return found


def _compare(name: str, at: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    for k, (stage, wrap) in enumerate([(3, lambda f: f), (1, lambda f: sf.jit(f, backend="graph"))]):
        want: dict[str, Tensor] = {}
        for where in ("device", "host", "disk"):
            found = _trained(RULES[name], where, wrap, at / f"{k}{where}", mesh, stage)
            want = want or found
            for path, x in want.items():
                assert torch.equal(found[path], x), (name, stage, where, path)


@pytest.mark.day("adafactor")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.filterwarnings("ignore")
def test_states_away_have_the_bits_of_states_on_the_device(name: str, tmp_path: pathlib.Path) -> None:
    _compare(name, tmp_path)


@pytest.mark.nightly
@distributed(world=[2, 3], timeout=300)
def test_states_away_on_ranks(world: int, tmp_path: pathlib.Path) -> None:
    del world
    for name in ("adafactor", "adafactor in rules", "adafactor of some"):
        _compare(name, tmp_path / name.replace(" ", "_"))
