"""Covers functions of the tree (masks, labels): their arguments, and when they are called."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.collectives import bind_mesh
from shardfn.core import tree_leaves, tree_map
from shardfn.testing import distributed

RULES: dict[str, Any] = {
    "adamw": lambda f: optim.adamw(0.1, weight_decay=0.5, mask=f),
    "lion": lambda f: optim.lion(0.1, weight_decay=0.5, mask=f),
    "lamb": lambda f: optim.lamb(0.1, weight_decay=0.5, mask=f),
    "decay": lambda f: optim.add_decayed_weights(0.5, f),
    "masked": lambda f: optim.masked(optim.sgd(0.5), f),
    "freeze": lambda f: optim.freeze(f),
    "multi": lambda f: optim.multi_transform(
        {"a": optim.sgd(0.5), "b": optim.adam(0.1)}, lambda p: tree_map(lambda on: "a" if on else "b", f(p))
    ),
    "nested": lambda f: optim.masked(optim.adamw(0.1, mask=f), {"w": True, "b": False, "none": True}),
    "chained": lambda f: optim.chain(optim.clip(1.0), optim.chain(optim.masked(optim.sgd(0.1, momentum=0.9), f))),
    "delayed": lambda f: optim.delayed(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, mask=f))),
    "masters": lambda f: optim.master_weights(optim.adamw(0.1, mask=f)),
    "onebit": lambda f: optim.onebit_adam(0.1, freeze_step=2, mask=f, exact=f),
}


def make_params() -> Any:
    return {"w": torch.ones(4, 3), "b": torch.ones(3), "none": None}


def steps(tx: Any, in_place: bool) -> Any:
    params = make_params()
    state = tx.init(params)
    for i in range(3):
        grads = tree_map(lambda p, i=i: torch.full_like(p, 0.5 + i), params)
        if in_place:
            params, state = optim.inplace(tx)(grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
    return params, state


@pytest.mark.day("decay", "multi", "delayed")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(RULES)]
)
def test_a_decided_rule_is_the_rule_and_never_asks_again(name: str) -> None:
    asked = []

    def mask(params: Any) -> Any:
        asked.append([tuple(x.shape) for x in tree_leaves(params)])
        return tree_map(lambda x: x.ndim > 1, params)

    tx = RULES[name](mask)
    fixed = optim.resolve_masks(tx, tree_map(lambda p: p.to("meta"), make_params()))
    told = len(asked)
    for in_place in (False, True):
        want, got = steps(tx, in_place), steps(RULES[name](mask), in_place)
        before = len(asked)
        got = steps(fixed, in_place)
        assert len(asked) == before
        for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
            assert torch.equal(*(x if isinstance(x, Tensor) else x.local for x in (a, b)))
    assert told >= 1 and set(map(tuple, asked)) <= {((3,), (4, 3)), ((4, 3),)}
    # Decided on whole leaves, a rule does the same to blocks and parts of them.
    blocks = {"w": torch.ones(1, 3), "b": torch.ones(1), "none": None}
    optim.inplace(fixed)(tree_map(torch.clone, blocks), fixed.init(blocks), blocks)


def test_a_function_is_shown_tensors_without_values() -> None:
    seen: list[Any] = []

    def mask(params: Any) -> Any:
        seen.extend(tree_leaves(params))
        return tree_map(lambda x: isinstance(x, Tensor) and x.size(0) == len(x) == x.shape[0] > 3, params)

    optim.freeze(mask).init({"w": torch.ones(4, 3, dtype=torch.bfloat16), "b": torch.ones(3)})
    b, w = seen
    assert (w.shape, w.ndim, w.dim(), w.dtype) == ((4, 3), 2, 2, torch.bfloat16)
    assert (w.numel(), w.nelement(), w.itemsize, w.nbytes, w.is_floating_point()) == (12, 12, 2, 24, True)
    assert b.dtype == torch.float32 and not b.is_complex()


@pytest.mark.parametrize(
    ("look", "what"),
    [
        (lambda x: bool(x.abs().max() > 1), "abs"),
        pytest.param(lambda x: bool(x > 1), "gt", marks=pytest.mark.nightly),
        pytest.param(lambda x: x.requires_grad, "requires_grad", marks=pytest.mark.nightly),
        (lambda x: x.device.type == "cuda", "device"),
        pytest.param(lambda x: torch.sum(x) > 0, "sum", marks=pytest.mark.nightly),
        pytest.param(lambda x: x[0] is None, "getitem", marks=pytest.mark.nightly),
    ],
)
def test_a_function_that_looks_at_values_is_refused(look: Any, what: str) -> None:
    params = make_params()
    mask = lambda p: tree_map(look, p)  # noqa: E731
    for name in ("adamw", "masked"):
        tx = RULES[name](mask)
        with pytest.raises(ValueError, match=rf"passed as mask looks at '\w*{what}\w*' of params\['b'\].*\(3,\)"):
            tx.update(params, tx.init(params), params)
        with pytest.raises(ValueError, match=r"pass the tree that the function would return"):
            optim.resolve_masks(tx, params)
    with pytest.raises(ValueError, match="passed as exact looks at"):
        optim.onebit_adam(0.1, freeze_step=1, exact=mask).init(params)


def rule_of_my_own(inner: Any) -> Any:
    return optim.GradientTransformation(inner.init, inner.update, needs=optim.join_needs([inner], rule_of_my_own))


@pytest.mark.nightly
@distributed(world=2)
def test_an_undecided_rule_refuses_blocks(world: int) -> None:
    mesh = sf.make_mesh({"dp": 2})
    block, specs = {"w": torch.ones(2, 3), "b": torch.ones(3), "none": None}, {"w": P("dp"), "b": P(), "none": None}
    with bind_mesh(mesh):
        for name, make in RULES.items():
            tx = make(lambda p: tree_map(lambda x: x.ndim > 0 and x.shape[0] > 3, p))
            if name == "onebit":  # its local steps take whole gradients
                continue
            # The first step of a delayed rule in place does not come to the rule inside.
            for step in (tx.update,) if name == "delayed" else (tx.update, optim.inplace(tx)):
                with pytest.raises(ValueError, match=r"this rank's blocks[^$]*params\['w'\] is cut as P\('dp'\)"):
                    step(tree_map(torch.clone, block), tx.init(block), block, specs=specs)
            fixed = optim.resolve_masks(rule_of_my_own(tx), make_params())
            fixed.update(tree_map(torch.clone, block), fixed.init(block), block, specs=specs)
