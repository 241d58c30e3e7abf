"""Covers checks of values in captured functions: they become operations of the graph; other branches stay errors."""

import functools
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardfn as sf

VOCAB = 5


def checked(p: dict, labels: Tensor) -> Tensor:
    """Validates as models of transformers do."""
    if labels is not None and labels.max() >= VOCAB:
        raise ValueError(f"Label values must be <= vocab_size: {VOCAB}")
    if (labels < -100).any() or not (labels != 3).all():
        raise ValueError("3 is not in use")
    torch._check_tensor_all(labels != 2, lambda: "2 is not in use")  # pyright: ignore[reportAttributeAccessIssue]
    return p["w"][labels.clamp(min=0)].square().mean()


def run(f: Any, labels: list[int]) -> Tensor:
    step = sf.sharded_step(f, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
    return step(step.init({"w": torch.arange(10.0).view(5, 2)}), torch.tensor(labels))[1]["loss"]


@pytest.mark.nightly
def test_checks_are_part_of_the_graph() -> None:
    graph = sf.jit(checked, backend="graph")
    step = sf.sharded_step(graph, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
    state = step.init({"w": torch.arange(10.0).view(5, 2)})
    state, metrics = step(state, torch.tensor([0, 1, 4]))
    assert torch.equal(metrics["loss"], run(checked, [0, 1, 4]))
    for labels, text in (
        ([0, 1, 5], r"test_asserted.py:\d+: if labels is not None and labels.max\(\) >= VOCAB"),
        ([0, 1, 3], r"test_asserted.py:\d+: .*3 is not in use"),
        ([0, 1, 2], r"test_asserted.py:\d+: 2 is not in use"),
    ):
        with pytest.raises(ValueError, match=f"(?s){text}"):
            step(state, torch.tensor(labels))
        with pytest.raises((ValueError, RuntimeError, AssertionError, IndexError)):
            run(checked, labels)
    state, metrics = step(state, torch.tensor([0, 1, 4]))  # a check that failed has left the state
    assert step.cache_info().misses == 1


@pytest.mark.day("<lambda>")
@pytest.mark.parametrize("remat", [sf.remat, lambda f: functools.partial(checkpoint, f, use_reentrant=False)])
def test_checks_of_a_function_that_runs_again_are_part_of_the_graph(remat: Any) -> None:
    """Also where values are followed along an axis, by a mode between the check and the capture."""

    def loss(p: dict, labels: Tensor) -> Tensor:
        return sf.psum(remat(checked)(p, labels), "dp")

    graph = sf.jit(loss, backend="graph")
    step = sf.sharded_step(graph, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
    state = step.init({"w": torch.arange(10.0).view(5, 2)})
    assert torch.equal(step(state, torch.tensor([0, 1, 4]))[1]["loss"], run(loss, [0, 1, 4]))


class Checked(torch.nn.Module):
    """A module that validates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(10.0).view(5, 2))

    def forward(self, labels: Tensor) -> Tensor:
        return checked({"w": self.w}, labels)


def test_checks_of_a_module_are_part_of_the_graph() -> None:
    params, apply = sf.from_module(Checked())
    step = sf.sharded_step(sf.jit(apply, backend="graph"), sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
    state, metrics = step(step.init(params), torch.tensor([0, 1, 4]))
    assert torch.equal(metrics["loss"], run(checked, [0, 1, 4]))
    for labels, text in (([0, 1, 5], "labels.max"), ([0, 1, 3], "3 is not in use"), ([0, 1, 2], "2 is not in use")):
        with pytest.raises(ValueError, match=text):
            step(state, torch.tensor(labels))


@pytest.mark.nightly
def test_an_assert_of_an_item(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.py"  # pytest writes the asserts of a test anew
    path.write_text("def f(p, x):\n    assert x.max().item() <= 3, 'large'\n    return p['w'].sum()\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    f = sf.jit(names["f"], backend="graph")
    assert torch.equal(run(f, [1, 3]), run(names["f"], [1, 3]))
    with pytest.raises(ValueError, match=r"model.py:2: assert x.max\(\).item\(\) <= 3, 'large'"):
        run(f, [1, 4])


@pytest.mark.nightly
def test_branches_that_do_more_than_raise_are_not_taken() -> None:
    def two(p: dict, x: Tensor) -> Tensor:
        if x.max() > 1 and x.min() > 1:
            raise ValueError("which of the two it was, a graph cannot know")
        return p["w"].sum()

    def path(p: dict, x: Tensor) -> Tensor:
        if x.max() > 1:
            return p["w"].sum()
        return p["w"].mean()

    def caught(p: dict, x: Tensor) -> Tensor:
        try:
            if x.max() > 1:
                raise ValueError("another path")
        except ValueError:
            return p["w"].sum()
        return p["w"].mean()

    def either(p: dict, x: Tensor) -> Tensor:
        if x.max() > 1:
            raise ValueError("small")
        else:
            return p["w"].mean()

    for f in (two, path, caught, either):
        with pytest.raises(sf.CaptureError, match=r"test_asserted.py:\d+: `if x.max\(\) > 1.*needs the value"):
            run(sf.jit(f, backend="graph"), [0, 1])
