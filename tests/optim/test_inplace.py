"""Covers `apply` at the edges of hyperparameters: it writes the buffers it is given, and equals `update`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfn import optim
from shardfn.core import tree_leaves, tree_map
from shardfn.optim import GradientTransformation

ZERO, HALF = torch.tensor(0.0), torch.tensor(0.5)
FLAT = optim.constant_schedule(0.02)
RULES: dict[str, Callable[[], GradientTransformation]] = {
    "sgd": lambda: optim.sgd(0.02),
    "sgd still": lambda: optim.sgd(0.0),
    "sgd of a tensor": lambda: optim.sgd(torch.tensor(0.02), momentum=HALF, nesterov=True, weight_decay=HALF),
    "sgd momentum 0": lambda: optim.sgd(0.02, momentum=0.0),
    "sgd momentum int 0, decay": lambda: optim.sgd(FLAT, momentum=0, weight_decay=0.1),
    "sgd momentum tensor 0, nesterov": lambda: optim.sgd(0.02, momentum=ZERO, nesterov=True, weight_decay=0.1),
    "sgd nesterov": lambda: optim.sgd(0.02, momentum=0.9, nesterov=True),
    "adam": lambda: optim.adam(0.02, b1=0.0, b2=0.0),
    "adam of tensors": lambda: optim.adam(FLAT, b1=ZERO, b2=HALF, eps=torch.tensor(1e-8)),
    "adamw": lambda: optim.adamw(0.02, weight_decay=0.0),
    "adamw of tensors": lambda: optim.adamw(torch.tensor(0.02), weight_decay=ZERO),
    "lion": lambda: optim.lion(0.02, b1=0.0, b2=0.0, weight_decay=0.0),
    "lion of tensors": lambda: optim.lion(FLAT, b1=HALF, b2=ZERO, weight_decay=HALF),
    "lamb": lambda: optim.lamb(0.02, b1=0.0, b2=0.5, weight_decay=0.0, min_coeff=0, max_coeff=1),
    "lamb of tensors": lambda: optim.lamb(FLAT, b1=ZERO, b2=HALF, weight_decay=HALF),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(1), optim.sgd(0.02, momentum=0.0)),
    "masked": lambda: optim.masked(optim.sgd(0.02, momentum=0.0), {"e": False, "s": False, "w": True, "b": True}),
    "labels": lambda: optim.multi_transform(
        {"a": optim.sgd(0.02, momentum=0.0), "b": optim.lion(0.02), "off": optim.set_to_zero()},
        {"e": "a", "s": "off", "w": "b", "b": "a"},
    ),
    "masters": lambda: optim.master_weights(optim.sgd(0.02, momentum=0.0)),
    "delayed": lambda: optim.delayed(optim.sgd(0.02, momentum=0.0), warmup=1),
}
every = pytest.mark.parametrize("name", RULES)


def make_params(dtype: torch.dtype) -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"w": (5, 7), "b": (200,), "s": (), "e": (0, 3)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def make_grads(params: Any, step: int) -> Any:
    draw = torch.Generator().manual_seed(step)
    return tree_map(lambda p: torch.randn(p.shape, generator=draw).to(p.dtype), params)


@pytest.mark.day(24)
@every
@pytest.mark.parametrize(
    ("dtype", "tol"), [(torch.float32, 1e-6), (torch.float64, 1e-6), (torch.bfloat16, 2**-6)], ids=str
)
def test_apply_writes_its_buffers_and_equals_update(name: str, dtype: torch.dtype, tol: float) -> None:
    tx = RULES[name]()
    params, other = make_params(dtype), make_params(dtype)
    state, known = tx.init(params), tx.init(other)
    where = [x.data_ptr() for x in tree_leaves((params, state))]
    for step in range(3):
        grads = make_grads(params, step)
        updates, known = tx.update(grads, known, other)
        other = optim.apply_updates(other, updates)
        params, state = optim.inplace(tx)(grads, state, params)
        assert [x.data_ptr() for x in tree_leaves((params, state))] == where
    for a, b in zip(tree_leaves((params, state)), tree_leaves((other, known)), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@every
def test_apply_takes_trees_of_empty_leaves(name: str) -> None:
    tx, params = RULES[name](), tree_map(lambda p: p.new_zeros(0, 3), make_params(torch.float32))
    new, _ = optim.inplace(tx)(tree_map(torch.clone, params), tx.init(params), params)
    assert all(x.shape == (0, 3) for x in tree_leaves(new))


def test_without_momentum_a_trace_is_the_gradient_even_if_it_is_not_finite() -> None:
    for momentum in (0.0, ZERO):
        tx = optim.sgd(0.5, momentum=momentum)
        (w, v), state, known = (torch.ones(2), torch.ones(2)), tx.init([torch.ones(2)]), tx.init([torch.ones(2)])
        for grad in ([torch.inf, 1.0], [1.0, 2.0]):
            updates, known = tx.update([torch.tensor(grad)], known, [v])
            [v] = optim.apply_updates([v], updates)
            [w], state = optim.inplace(tx)([torch.tensor(grad)], state, [w])
        torch.testing.assert_close((w, state), (v, known), rtol=0, atol=0, equal_nan=True)
