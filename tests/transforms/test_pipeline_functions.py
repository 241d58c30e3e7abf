"""Covers pipelines of a list of functions, whose leaves differ: stages on ranks equal one device."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.core import tree_leaves, tree_map
from shardfn.testing import assert_parity, distributed

NIGHTLY = pytest.mark.nightly
D, ROWS = 6, 12


def _params(dtype: torch.dtype = torch.float64) -> Any:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) / 2

    layers = [draw(D, D), {"a": draw(D, 3), "b": draw(3, D)}, (), {"scale": draw(D)}, [draw(D, D), draw(D)]]
    return {"embed": draw(D, D), "blocks": layers, "out": draw(D)}


def _whole(p: Any, h: Tensor) -> Tensor:
    return h + torch.tanh(h @ p)


def _narrow(p: Any, h: Tensor) -> Tensor:
    return h + torch.relu(h @ p["a"]) @ p["b"]


def _plain(p: Any, h: Tensor) -> Tensor:
    del p
    return h - h.mean(-1, keepdim=True)


def _scaled(p: Any, h: Tensor) -> Tensor:
    return h * p["scale"]


def _dense(p: Any, h: Tensor) -> Tensor:
    return h + torch.tanh(h @ p[0] + p[1])


LAYERS = [_whole, _narrow, _plain, _scaled, sf.remat(_dense)]


def _first(p: Any, x: Tensor) -> Tensor:
    return x @ p["embed"]


def _last(p: Any, h: Tensor, x: Tensor) -> Tensor:
    return ((h @ p["embed"].t() - x) * p["out"]).square().mean()  # tied


def _reference(p: Any, x: Tensor) -> Tensor:
    h = _first(p, x)
    for f, own in zip(LAYERS, p["blocks"], strict=True):
        h = f(own, h)
    return _last(p, h, x)


def _loss(m: int = 3, **options: Any) -> Any:
    return sf.pipeline(_first, LAYERS, _last, num_microbatches=m, **options)


def _batches(num: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, D, generator=g, dtype=torch.float64) for _ in range(num)]


def _parity(mesh: sf.Mesh, loss: Any, **options: Any) -> None:
    clipped = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
    how: dict[str, Any] = {"params": _params(), "batches": _batches(), "mesh": mesh, "batch": P("dp")}
    assert_parity(loss, optimizer=clipped, reference=_reference, **how, **options)


@distributed(world=[2, pytest.param(3, marks=NIGHTLY)])
def test_stages_equal_one_device(world: int) -> None:
    mesh = sf.make_mesh({"pp": world}, device="cpu")
    for schedule in ("1f1b", "gpipe"):
        _parity(mesh, _loss(schedule=schedule))


@pytest.mark.parametrize("stage", [pytest.param(n, marks=NIGHTLY) for n in (0, 1, 2, 3)])
@distributed(world=4)
def test_with_every_stage_of_zero(stage: int) -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    _parity(mesh, _loss(), zero=Zero(stage=stage, persist_elements=0))
    _parity(mesh, _loss(2, schedule="interleaved", num_chunks=2), zero=Zero(stage=stage))
    _parity(mesh, _loss(2, schedule="zb-v", num_chunks=2), zero=Zero(stage=stage))


@NIGHTLY
@distributed(world=3)
def test_captured_stages_have_the_bits_of_eager_ones() -> None:
    mesh = sf.make_mesh({"pp": 3}, device="cpu")
    states = []
    for loss in (_loss(), sf.jit(_loss(), backend="graph")):
        step = sf.sharded_step(loss, optim.adamw(1e-2), mesh=mesh, batch=P("dp"))
        state = step.init(_params(torch.float32))
        for x in _batches():
            state, _ = step(state, x.float())
        states.append(sf.unshard(state.params))
    assert all(torch.equal(x, y) for x, y in zip(*map(tree_leaves, states), strict=True))


@distributed(world=2)
def test_called_by_itself_it_runs_stage_after_stage() -> None:
    mesh, params = sf.make_mesh({"pp": 2}, device="cpu"), _params()
    step = sf.sharded_step(_loss(), optim.sgd(0.1), mesh=mesh, batch=P("dp"))
    (x, _), state = _batches(), step.init(params)
    got = step.apply(_loss(), state, x)
    torch.testing.assert_close(got, _reference(params, x), rtol=1e-12, atol=0)


@pytest.mark.nightly
def test_lists_that_do_not_fit_are_refused() -> None:
    params, x = _params(), _batches(1)[0]
    torch.testing.assert_close(_loss()(params, x), _reference(params, x), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="a pipeline of 5 functions expected a list with the leaves of each, got 4"):
        _loss()({**params, "blocks": params["blocks"][:4]}, x)
    with pytest.raises(ValueError, match=r"a pipeline of 5 functions with layers_per_stage=\[3, 2\]"):
        _loss(layers_per_stage=[3, 2])
    with pytest.raises(ValueError, match="a pipeline of 0 functions"):
        sf.pipeline(_first, [], _last)
    specs = tree_map(lambda _: P(), params) | {"embed": P("pp")}
    mesh = sf.make_mesh({"pp": 2}, abstract=True)
    step = sf.sharded_step(_loss(), optim.sgd(0.1), mesh=mesh, specs=specs, batch=P("dp"))
    with pytest.raises(ValueError, match=r"params\['embed'\] has spec P\('pp'\), but is not a layer; leave 'pp' out"):
        step.lower(params, x)
    many = sf.make_mesh({"pp": 6}, abstract=True)
    with pytest.raises(ValueError, match="a pipeline of 6 stages along 'pp' must have a function for each, got 5"):
        sf.sharded_step(_loss(), optim.sgd(0.1), mesh=many, batch=P("dp")).lower(params, x)
