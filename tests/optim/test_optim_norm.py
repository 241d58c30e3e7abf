"""Covers global norms and clipping: odd leaves, accuracy, and leaves cut over a mesh of simulated ranks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import optim
from shardfn.collectives import bind_mesh, current_mesh
from shardfn.core import Mesh, P, all_coords, block_slices, make_mesh, tree_leaves, tree_map
from shardfn.optim import _bounds as unit_module
from shardfn.optim import _norm as norm_module
from shardfn.testing import distributed


def test_values_and_order() -> None:
    tree = {
        "b": torch.tensor([3.0, 4.0]),
        "a": torch.tensor(2.0),
        "none": None,
        "c": [torch.zeros(0), torch.ones(2, 2)],
    }
    squares = optim.sum_squares(tree)
    assert squares.dtype == torch.float32
    assert squares.tolist() == [4.0, 25.0, 0.0, 4.0]
    assert optim.global_norm(tree) == pytest.approx(math.sqrt(33))


@pytest.mark.parametrize(
    "tree",
    [{}, pytest.param([], marks=pytest.mark.nightly), pytest.param(None, marks=pytest.mark.nightly), {"a": None}],
)
def test_no_leaves(tree: Any) -> None:
    assert optim.sum_squares(tree).shape == (0,)
    assert optim.global_norm(tree) == 0
    assert optim.clip_by_global_norm(1.0).update(tree, optim.EmptyState())[0] == tree


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "num",
    [
        1,
        pytest.param(17, marks=pytest.mark.nightly),
        pytest.param(4096, marks=pytest.mark.nightly),
        65535,
        pytest.param(65536, marks=pytest.mark.nightly),
        pytest.param(65537, marks=pytest.mark.nightly),
        1_000_003,
    ],
)
def test_accuracy(dtype: torch.dtype, num: int) -> None:
    x = torch.randn(num, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(optim.sum_squares([x])[0].double(), x.double().square().sum(), rtol=3e-7, atol=0)


def test_accuracy_of_leaves_that_are_not_contiguous() -> None:
    x = torch.randn(400, 500)
    assert optim.global_norm([x.t()]) == pytest.approx(float(x.double().norm()), rel=1e-6)
    assert optim.global_norm([x[:, ::2]]) == pytest.approx(float(x[:, ::2].double().norm()), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("num", [3, 70_000])
def test_a_norm_that_is_not_finite_raises(bad: float, num: int) -> None:
    x = torch.ones(num)
    x[num // 2] = bad
    assert not optim.global_norm([x]).isfinite()
    for donate in (False, True):
        clipped, _ = optim.clip_by_global_norm(1.0).update(
            [x.clone(), torch.ones(2)], optim.EmptyState(), donate=donate
        )
        assert all(c.isnan().all() for c in clipped)


def test_clip_within_the_bound_is_the_identity_to_the_bit() -> None:
    x = torch.randn(1000) * 0.01
    clipped, _ = optim.clip_by_global_norm(1.0).update([x], optim.EmptyState())
    assert torch.equal(clipped[0], x)


def test_clip_beyond_the_bound_lands_on_it() -> None:
    xs: Any = {"a": torch.randn(100), "b": torch.randn(3, 4).bfloat16(), "c": torch.zeros(0)}
    clipped, _ = optim.clip_by_global_norm(0.5).update(xs, optim.EmptyState())
    assert optim.global_norm(clipped) == pytest.approx(0.5, rel=1e-3)
    assert [c.dtype for c in tree_leaves(clipped)] == [x.dtype for x in tree_leaves(xs)]
    torch.testing.assert_close(clipped["a"], xs["a"] * 0.5 / optim.global_norm(xs))


def test_clip_by_value() -> None:
    clipped, _ = optim.clip(1.0).update([torch.tensor([-3.0, 0.5, 2.0, math.nan])], optim.EmptyState())
    torch.testing.assert_close(clipped[0], torch.tensor([-1.0, 0.5, 1.0, math.nan]), equal_nan=True)


def test_donated_gradients_are_kept_apart_that_share_memory() -> None:
    one = torch.full((4,), 10.0)
    flat = torch.full((8,), 10.0)
    for shared in (
        [one, one],
        [one.view(2, 2), one],
        [torch.tensor(10.0).expand(8)],
        [flat[:4], flat[4:]],
        [flat[:5], flat[3:]],
    ):
        update = optim.clip_by_global_norm(1.0).update
        want, _ = update([x.clone() for x in shared], optim.EmptyState())
        got, _ = update(shared, optim.EmptyState(), donate=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
        one.fill_(10.0)
        flat.fill_(10.0)


def test_donated_gradients_are_reused() -> None:
    xs = [torch.ones(4), torch.ones(2, 2)]
    tx = optim.clip_by_global_norm(1.0)
    assert tx.needs.donates
    got, _ = tx.update(xs, optim.EmptyState(), donate=True)
    assert [a is b for a, b in zip(got, xs, strict=True)] == [True, True]


# Simulated ranks: each runs the function twice. The first time `psum` records the rank's summand, the second time it
# returns the sum over the ranks of its row.
SHAPE = {"dp": 2, "tp": 3}
SPECS: Any = {"a": P("dp"), "b": [P(None, "tp"), P(("tp", "dp"))], "c": P(), "e": P("tp"), "n": None, "s": P()}


def make_tree(seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    shapes: Any = {"a": (5, 4), "b": [(3, 7), (11,)], "c": (6,), "e": (2, 2), "n": None, "s": ()}
    return tree_map(lambda s: torch.randn(s, generator=g), shapes, is_leaf=lambda s: isinstance(s, tuple))


def blocks(tree: Any, coords: dict[str, int]) -> Any:
    cut = lambda x, spec: x[block_slices(tuple(x.shape), spec, SHAPE, coords)]  # noqa: E731
    return tree_map(cut, tree, SPECS)


def simulate(monkeypatch: pytest.MonkeyPatch, f: Callable[[dict[str, int]], Any]) -> tuple[list[Any], list[Any]]:
    sent: list[list[tuple[tuple[str, ...], Tensor]]] = []
    every = all_coords(SHAPE)

    def record(x: Tensor, axis: tuple[str, ...]) -> Tensor:
        sent[-1].append((axis, x))
        return x

    def answer(x: Tensor, axis: tuple[str, ...]) -> Tensor:
        coords, i = current_mesh().coords, answer.calls  # type: ignore[attr-defined]
        answer.calls += 1  # type: ignore[attr-defined]
        row = [r for r, c in enumerate(every) if all(c[n] == coords[n] for n in SHAPE if n not in axis)]
        assert all(sent[r][i][0] == axis for r in row)
        return torch.stack([sent[r][i][1] for r in row]).sum(0)

    out = []
    for psum in (record, answer):
        for module in (norm_module, unit_module.collectives):
            monkeypatch.setattr(module, "psum", psum)
        for coords in every:
            mesh = Mesh(SHAPE, torch.device("cpu"))
            mesh._coords = coords
            sent += [[]] if psum is record else []
            answer.calls = 0  # type: ignore[attr-defined]
            with bind_mesh(mesh):
                out.append(f(coords))
    return out[len(every) :], sent


def test_sum_squares_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(0)
    got, sent = simulate(monkeypatch, lambda coords: optim.sum_squares(blocks(tree, coords), SPECS))
    for squares in got:
        torch.testing.assert_close(squares, optim.sum_squares(tree), rtol=1e-6, atol=0)
    # One psum for each set of axes, in the mesh's order, and none for replicated leaves.
    assert [axes for axes, _ in sent[0]] == [("dp",), ("tp",), ("dp", "tp")]
    assert [len(x) for _, x in sent[0]] == [1, 2, 1]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.float64, marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_norms_of_other_orders(dtype: torch.dtype) -> None:
    tree = {"a": torch.randn(70_001).to(dtype), "b": [torch.tensor(-9.0, dtype=dtype), torch.zeros(0, dtype=dtype)]}
    flat = torch.cat([x.double().reshape(-1) for x in tree_leaves(tree)])
    for ord, want in ((1, flat.abs().sum()), (2, flat.norm()), (math.inf, flat.abs().max())):
        norm = optim.global_norm(tree, ord=ord)
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(norm.double(), want, rtol=1e-6, atol=0)
    assert optim.global_norm(tree, ord="inf") == optim.global_norm(tree, ord=math.inf)
    assert [optim.global_norm({}, ord=ord).item() for ord in (1, math.inf)] == [0, 0]
    tree["b"][0].fill_(math.nan)
    assert all(optim.global_norm(tree, ord=ord).isnan() for ord in (1, math.inf))
    with pytest.raises(ValueError, match=r"ord=3 must be None, 1, 2, math.inf"):
        optim.global_norm(tree, ord=3)


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_norms_of_other_orders_of_blocks(world: int) -> None:
    mesh, tree = make_mesh({"dp": world}), {"a": torch.randn(7, 2, generator=torch.Generator().manual_seed(0))}
    specs = {"a": P("dp"), "b": P()}
    tree["b"] = tree["a"][:2] / 2
    for bad in (None, 0, 6):  # a NaN on the first rank, and on the last
        if bad is not None:
            tree["a"][bad] = math.nan
        sizes = {"dp": world}
        block = tree["a"][block_slices((7, 2), P("dp"), sizes, mesh.coords)]
        with bind_mesh(mesh):
            for ord in (1, 2, math.inf):
                got, want = optim.global_norm({**tree, "a": block}, specs, ord=ord), optim.global_norm(tree, ord=ord)
                torch.testing.assert_close(got, want, equal_nan=True)
            with optim.sum_exactly():
                exact = optim.sum_squares({**tree, "a": block}, specs)
                assert torch.equal(exact.isnan(), torch.tensor([bad is not None, False]))
        tree["a"].nan_to_num_()


@distributed(world=[2, pytest.param(3, marks=pytest.mark.nightly)])
def test_units_are_summed_to_the_bit_where_sums_are_exact(world: int) -> None:
    mesh, g = make_mesh({"dp": world}), torch.Generator().manual_seed(0)
    params, grads = ({k: torch.randn(s, generator=g) for k, s in (("w", (2, 9)), ("v", (7,)))} for _ in range(2))
    tx = optim.resolve_masks(optim.adaptive_grad_clip(0.1), params)
    cut = lambda tree: {k: x[block_slices(tuple(x.shape), P("dp"), mesh.shape, mesh.coords)] for k, x in tree.items()}  # noqa: E731
    with optim.sum_exactly(), bind_mesh(mesh):
        want, _ = tx.update(grads, optim.EmptyState(), params)
        got, _ = tx.update(cut(grads), optim.EmptyState(), cut(params), specs=P("dp"))
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(got), tree_leaves(cut(want)), strict=True))
    torch.testing.assert_close(want, tx.update(grads, optim.EmptyState(), params)[0])


def test_units_are_those_of_whole_leaves() -> None:
    # A block of one row of a matrix is not a vector: undecided, a rule of units refuses blocks.
    tx, x = optim.adaptive_grad_clip(0.1), [torch.ones(1, 3)]
    with (
        bind_mesh(Mesh({"dp": 2}, torch.device("cpu"))),
        pytest.raises(ValueError, match=r"adaptive_grad_clip is a function of whole leaves"),
    ):
        tx.update(x, optim.EmptyState(), x, specs=[P("dp")])


def test_leaves_without_such_units_are_named() -> None:
    params = {"w": torch.ones(2, 3), "b": torch.ones(3), "deep": torch.ones(1, 1, 1, 2, 2, 2)}
    for axis, names in ((None, ["deep"]), (1, ["b"]), ((0, -2), ["b"])):
        with pytest.raises(ValueError, match="adaptive_grad_clip needs leaves") as caught:
            optim.adaptive_grad_clip(0.1, axis=axis).update(params, optim.EmptyState(), params)
        assert [name for name in params if f"params['{name}']" in str(caught.value)] == names
    with pytest.raises(ValueError, match="needs the parameters"):
        optim.adaptive_grad_clip(0.1).update(params, optim.EmptyState())


def test_a_prefix_of_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    tree: Any = {"x": torch.randn(6, 2), "y": [torch.randn(6)]}
    cut = lambda coords: tree_map(lambda x: x[block_slices(tuple(x.shape), P("dp"), SHAPE, coords)], tree)  # noqa: E731
    got, sent = simulate(monkeypatch, lambda coords: optim.global_norm(cut(coords), P("dp")))
    assert all(abs(float(n / optim.global_norm(tree)) - 1) < 1e-6 for n in got)
    assert len(sent[0]) == 1


def matrices(params: Any) -> Any:
    return tree_map(lambda x: x.ndim > 1, params)


CLIPPED = {"a": True, "b": True, "c": False, "e": True, "s": True}
OPTIMIZERS = {
    "lamb": lambda: optim.lamb(0.1, weight_decay=0.1, mask=matrices),
    "lamb moments": lambda: optim.lamb(0.1, mask=matrices, bias_correction="moments"),
    "lars": lambda: optim.lars(0.1, 0.1, matrices, 0.5, trust_ratio_mask=matrices),
    "block rms": lambda: optim.chain(optim.clip_by_block_rms(0.3), optim.sgd(0.1)),
    "units": lambda: optim.chain(optim.adaptive_grad_clip(0.3), optim.sgd(0.1)),
    "units, axis": lambda: optim.chain(optim.masked(optim.adaptive_grad_clip(0.3, axis=-1), matrices), optim.sgd(0.1)),
    "rmsprop": lambda: optim.named_chain(("clip", optim.clip_by_global_norm(0.5)), ("step", optim.rmsprop(0.1))),
    "clip": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, momentum=0.9)),
    "masked": lambda: optim.masked(optim.clip_by_global_norm(0.5), CLIPPED),
    "multi": lambda: optim.multi_transform(
        {"x": optim.lamb(0.1), "y": optim.adamw(0.1)}, {"a": "x", "b": ["x", "y"], "c": "x", "e": "x", "s": "y"}
    ),
}  # fmt: skip


@pytest.mark.day("False-block rms", "True-lamb", "True-rmsprop")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(OPTIMIZERS)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_steps_on_blocks_equal_blocks_of_steps(name: str, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tx = OPTIMIZERS[name]()

    def step(params: Any, state: Any, grads: Any, specs: Any) -> tuple[Any, Any]:
        if in_place:
            g, s, p = (tree_map(torch.clone, tree) for tree in (grads, state, params))
            return optim.inplace(tx)(g, s, p, specs=specs)
        updates, state = tx.update(grads, state, params, specs=specs)
        return optim.apply_updates(params, updates), state

    whole = make_tree(0)
    tx = optim.resolve_masks(tx, whole)
    state = tx.init(whole)
    ranks = [str(c) for c in all_coords(SHAPE)]
    local = {str(c): (blocks(whole, c), tx.init(blocks(whole, c))) for c in all_coords(SHAPE)}
    for i in range(3):
        grads, now = make_tree(i + 1), dict(local)
        whole, state = step(whole, state, grads, None)
        new, _ = simulate(monkeypatch, lambda c, g=grads, n=now: step(*n[str(c)], blocks(g, c), SPECS))
        local = dict(zip(ranks, new, strict=True))
    for coords in all_coords(SHAPE):
        want = tree_leaves(blocks(whole, coords))
        for a, b in zip(tree_leaves(local[str(coords)][0]), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_an_axis_that_is_not_in_the_mesh() -> None:
    with bind_mesh(Mesh(SHAPE, torch.device("cpu"))), pytest.raises(ValueError, match="'dpp' is not in the mesh"):
        optim.global_norm([torch.ones(3)], [P("dpp")])


def test_specs_of_another_tree() -> None:
    with pytest.raises(ValueError, match=r"tree\['b'\]|params\['b'\]"):
        optim.global_norm({"a": torch.ones(3), "b": torch.ones(3)}, {"a": P("dp")})


def test_without_a_mesh_blocks_are_whole() -> None:
    assert optim.global_norm([torch.tensor([3.0, 4.0])], [P("dp")]) == 5
