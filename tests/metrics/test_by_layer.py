"""Covers shardfn/metrics/_values.py, and the norms of stacked leaves: by layer, on one rank and several."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.core import DonatedError
from shardfn.metrics import by_layer, to_floats
from shardfn.testing import distributed


def params(*, stacked: bool) -> Any:
    draw = torch.Generator().manual_seed(0)
    layers = [{"w": torch.randn(5, 7, generator=draw), "b": torch.randn(5, generator=draw)} for _ in range(5)]
    pile = {k: torch.stack([layer[k] for layer in layers]) for k in ("w", "b")}
    head = {"weight": torch.randn(3, 4, generator=draw), "bias": torch.randn(3, generator=draw)}
    return {"blocks": pile if stacked else layers, "head": head, "scale": torch.tensor(2.0)}


def wanted() -> dict[str, float]:
    p = params(stacked=False)
    flat = {f"n/blocks.{i}": layer for i, layer in enumerate(p["blocks"])} | {"n/head": p["head"], "n/scale": p}
    squares = {k: [x for x in v.values() if isinstance(x, Tensor)] for k, v in flat.items()}
    return {k: float(torch.cat([x.flatten() for x in xs]).double().norm()) for k, xs in squares.items()}


@pytest.mark.day("1")
@distributed(world=[1, 2])
def test_layers_in_a_list_and_in_a_stack_have_the_same_norms(world: int) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    for stage in (1, 3):
        zero = sf.Zero.flat(stage=stage, persist_elements=0)
        step = sf.sharded_step(lambda p, x: p["scale"] * x.sum(), sf.optim.sgd(0.1), mesh=mesh, zero=zero)
        found = by_layer(sf.leaf_norms(step.init(params(stacked=False)).params), "n")
        state = step.init(params(stacked=True))
        assert to_floats(found) == pytest.approx(wanted(), rel=1e-6) and [*found] == [*wanted()]
        assert to_floats(by_layer(sf.leaf_norms(state.params, "blocks"), "n")) == pytest.approx(wanted(), rel=1e-6)


@distributed(world=2)
def test_rows_that_are_cut_over_ranks(world: int) -> None:
    mesh, p = sf.make_mesh({"pp": 2}, device="cpu"), params(stacked=True)
    specs: Any = {"w": P("pp"), "b": P(None, "pp")}
    tree = {"blocks": {k: sf.shard(x, specs[k], mesh) for k, x in p["blocks"].items()}}
    norms = sf.leaf_norms(tree, stacked=["blocks"])
    for k, x in p["blocks"].items():
        torch.testing.assert_close(norms["blocks"][k], x.flatten(1).norm(dim=1))


def test_names_of_modules_have_a_layer_each() -> None:
    names = [
        "model.embed.weight",
        "model.layers.0.q.weight",
        "model.layers.0.q.bias",
        "model.layers.10.q.weight",
        "norm",
    ]
    found = to_floats(by_layer({name: torch.tensor(1.0) for name in names}, "w"))
    assert found.keys() == {"w/model.embed", "w/model.layers.0", "w/model.layers.10", "w/norm"}
    assert found["w/model.layers.0"] == pytest.approx(2**0.5)
    assert by_layer(torch.tensor(3.0)) == {"norm": 3.0}


def test_mistakes_are_named() -> None:
    step = sf.sharded_step(lambda p, x: p["scale"] * x.sum(), sf.optim.sgd(0.1))
    tree = step.init(params(stacked=True)).params
    with pytest.raises(ValueError, match=r"no leaf is below 'block'\. Did you mean 'blocks'"):
        sf.leaf_norms(tree, "block")
    with pytest.raises(ValueError, match=r"tree\['scale'\] is 0-d"):
        sf.leaf_norms(tree, ["blocks", "scale"])
    tree["scale"].donate()
    with pytest.raises(DonatedError):
        sf.leaf_norms(tree)
