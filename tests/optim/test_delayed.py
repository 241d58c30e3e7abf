"""Covers the delayed update: the stale reference to the bit, warm-up, one state structure, pure == in place, traced."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import optim
from shardfn.core import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

RULES = {
    "sgd": lambda: optim.sgd(0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda: optim.adamw(optim.warmup_cosine_decay_schedule(0.001, 0.05, 3, 30)),
    "lamb": lambda: optim.lamb(0.02),
    "clip, adamw": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.02)),
}


def quadratic(params: Any) -> Any:
    return tree_map(lambda p: p * torch.arange(1.0, p.numel() + 1), params)


def network(params: Any) -> Any:
    x, y = torch.linspace(-1, 1, 12).reshape(6, 2), torch.linspace(0, 1, 6)

    def loss(params: Any) -> Any:
        return (((x @ params["in"]).tanh() @ params["out"] + params["bias"]) - y).square().mean()

    return torch.func.grad(loss)(params)


def start(gradient: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    if gradient is quadratic:
        return {"a": torch.randn(5, generator=g), "b": None}
    return {"in": torch.randn(2, 7, generator=g), "out": torch.randn(7, generator=g), "bias": torch.zeros(())}


def clone(tree: Any) -> Any:
    return tree_map(torch.clone, tree)


def stale(tx: optim.GradientTransformation, gradient: Any, warmup: int, steps: int) -> Any:
    """The reference: a list of all points, and each step along the gradient that is due."""
    points, state = [start(gradient)], None
    state = tx.init(points[0])
    for t in range(steps):
        at = t if t < warmup else t - 1 if t > warmup else None
        point = clone(points[t])
        if at is not None:
            point, state = optim.inplace(tx)(clone(gradient(points[at])), state, point)
        points.append(point)
    return points[-1], state


@pytest.mark.day(4)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(RULES)]
)
@pytest.mark.parametrize("gradient", [quadratic, network])
@pytest.mark.parametrize("warmup", [0, 3])
def test_equals_the_stale_reference(name: str, gradient: Any, warmup: int) -> None:
    tx = optim.delayed(RULES[name](), warmup)
    params = start(gradient)
    state = tx.init(params)
    structure = tree_structure(state)
    for t in range(8):
        want, inner = stale(RULES[name](), gradient, warmup, t)
        for a, b in zip(tree_leaves((params, state.inner)), tree_leaves((want, inner)), strict=True):
            assert torch.equal(a, b), t
        assert tree_structure(state) == structure and state.count == t
        assert t > warmup or all(not x.any() for x in tree_leaves(state.pending))
        params, state = optim.inplace(tx)(gradient(params), state, params)


@pytest.mark.day("sgd")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(RULES)]
)
def test_pure_and_traced_are_the_in_place_form(name: str) -> None:
    tx = optim.delayed(RULES[name](), 1)
    params = start(network)
    leaves, treedef = tree_flatten((clone(params), tx.init(params), params))

    def step(*xs: torch.Tensor) -> Any:
        return tree_leaves(optim.inplace(tx)(*tree_unflatten(treedef, xs)))

    traced = make_fx(step, tracing_mode="fake")(*leaves)
    state = tx.init(params)
    forms: dict[str, Any] = {form: (clone(params), clone(state)) for form in ("pure", "place", "traced")}
    for _ in range(4):
        new = {}
        for form, (p, s) in forms.items():
            grads = network(p)
            if form == "pure":
                updates, s = tx.update(grads, s, p)
                new[form] = optim.apply_updates(p, updates), s
            elif form == "place":
                new[form] = optim.inplace(tx)(grads, s, p)
            else:
                out = traced(*tree_leaves((grads, s, p)))
                new[form] = tree_unflatten(tree_structure((p, s)), out)
        forms = new
    for form in ("pure", "traced"):
        for a, b in zip(tree_leaves(forms[form]), tree_leaves(forms["place"]), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


def test_buffers_are_kept_and_gradients_copied() -> None:
    tx, w = optim.delayed(optim.sgd(0.1)), torch.ones(3)
    state = tx.init([w])
    where = [x.data_ptr() for x in tree_leaves((state, w))]
    grad = torch.ones(3)
    for _ in range(3):
        new, state = optim.inplace(tx)([grad], state, [w])
        assert [x.data_ptr() for x in tree_leaves((state, new))] == where
    grad.fill_(9.0)
    assert torch.equal(state.pending[0], torch.ones(3))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="warmup=-1 must be an int >= 0"):
        optim.delayed(optim.sgd(0.1), -1)
    tx = optim.delayed(optim.sgd(0.1))
    with pytest.raises(ValueError, match="delayed expected a DelayedState"):
        optim.inplace(tx)([torch.ones(1)], optim.EmptyState(), [torch.ones(1)])
    with pytest.raises(ValueError, match=r"pending\[0\] has shape \(1,\)"):
        optim.inplace(tx)([torch.ones(2)], tx.init([torch.ones(1)]), [torch.ones(2)])


def test_a_clip_inside_begins_without_measures_after_the_warm_up_only() -> None:
    tx, params = optim.delayed(optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(1.0)), 1), [torch.zeros(2)]
    pieces, state, grad = optim.in_pieces(tx, params), tx.init(params), torch.tensor([3.0, 4.0])
    with pytest.raises(ValueError, match="got no measures, but the rule needs the measures of this step's gradients"):
        pieces.begin(state, None)
    for _ in range(3):  # a plain step, one that moves nothing, one along waiting gradients
        assert pieces.measure is not None
        token = pieces.begin(state, [pieces.measure(grad)])
        if int(state.count) > 0:
            early = pieces.begin(state, None)
            _ = pieces.apply(early, [grad.clone()], state, params)
            with pytest.raises(ValueError, match="begun without measures"):
                pieces.end(early, state)
        else:
            _ = pieces.apply(token, [grad.clone()], state, params)
        state = pieces.end(token, state)
    torch.testing.assert_close(params[0], torch.tensor([-0.12, -0.16]))
    assert state.measured == 25
