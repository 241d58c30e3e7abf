"""Covers optimizers in pieces: bits equal to the whole's for every rule and cut, grains, refusals, one psum."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import optim
from shardfn.collectives import bind_mesh
from shardfn.core import Mesh, P, tree_entries, tree_flatten, tree_leaves, tree_map, tree_unflatten
from shardfn.optim import GradientTransformation

SCHEDULE = optim.warmup_cosine_decay_schedule(0.001, 0.02, 3, 30)
CLIP = optim.clip_by_global_norm(1.0)


def large(params: Any) -> Any:
    return tree_map(lambda p: p.numel() > 40, params)  # which rows of a leaf are not


def labels(params: Any) -> Any:
    return tree_map(lambda p: "a" if p.numel() > 40 else "b", params)


ELEMENT: dict[str, Callable[[], GradientTransformation]] = {
    "sgd": lambda: optim.sgd(0.02, weight_decay=0.1),
    "sgd momentum": lambda: optim.sgd(SCHEDULE, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: optim.adam(0.02),
    "adamw": lambda: optim.adamw(SCHEDULE, weight_decay=0.1, mask=large),
    "lion": lambda: optim.lion(SCHEDULE, weight_decay=0.1, mask=large),
    "clip, adamw": lambda: optim.chain(CLIP, optim.adamw(0.02)),
    "clip value": lambda: optim.chain(optim.clip(0.1), optim.identity(), optim.adam(0.02)),
    "freeze": lambda: optim.chain(CLIP, optim.sgd(0.1), optim.freeze(large)),
    "masked": lambda: optim.chain(optim.masked(CLIP, large), optim.masked(optim.adamw(0.02), large)),
    "multi": lambda: optim.multi_transform(
        {"a": optim.chain(CLIP, optim.adamw(SCHEDULE, mask=large)), "b": optim.chain(CLIP, optim.lion(0.01))}, labels
    ),
    "by hand": lambda: optim.chain(
        CLIP, optim.scale_by_adam(), optim.add_decayed_weights(0.1, large), optim.scale_by_learning_rate(SCHEDULE)
    ),
    "trace": lambda: optim.chain(optim.trace(0.9), optim.scale_by_lion(), optim.scale_by_learning_rate(0.01)),
    "delayed": lambda: optim.chain(CLIP, optim.delayed(optim.adamw(SCHEDULE, mask=large), warmup=1)),
    "delayed norm": lambda: optim.delayed(optim.chain(CLIP, optim.adamw(SCHEDULE, mask=large)), warmup=1),
    "nadamw": lambda: optim.chain(CLIP, optim.nadamw(SCHEDULE, weight_decay=0.1, mask=large)),
    "adam mu": lambda: optim.adam(0.02, mu_dtype=torch.bfloat16, nesterov=True),
    "radam": lambda: optim.radam(SCHEDULE, b2=0.8),
    "rmsprop": lambda: optim.rmsprop(0.02, centered=True, momentum=0.9, bias_correction=True),
    "adagrad": lambda: optim.named_chain(("clip", CLIP), ("step", optim.adagrad(SCHEDULE))),
    "scales": lambda: optim.chain(optim.scale_by_rms(), optim.scale_by_schedule(SCHEDULE), optim.scale(-1.0)),
    "delayed at once": lambda: optim.delayed(optim.chain(CLIP, optim.sgd(0.1))),
}  # fmt: skip
LEAF: dict[str, Callable[[], GradientTransformation]] = {
    "lamb": lambda: optim.lamb(SCHEDULE, weight_decay=0.1, mask=large),
    "clip, lamb": lambda: optim.chain(CLIP, optim.lamb(0.02)),
    "lamb by hand": lambda: optim.chain(
        optim.scale_by_moment_ratio(), optim.scale_by_trust_ratio(), optim.scale_by_bias_correction(),
        optim.scale_by_learning_rate(0.02),
    ),
    "lamb moments": lambda: optim.lamb(SCHEDULE, mask=large, bias_correction="moments"),
    "lars": lambda: optim.lars(SCHEDULE, 0.1, large, trust_ratio_mask=large),
    "block rms": lambda: optim.chain(optim.clip_by_block_rms(0.5), optim.adam(0.02)),
    "units": lambda: optim.named_chain(("clip", optim.adaptive_grad_clip(0.5)), ("step", optim.sgd(SCHEDULE))),
    "multi lamb": lambda: optim.multi_transform({"a": optim.lamb(0.02), "b": optim.set_to_zero()}, labels),
}  # fmt: skip
TREE: dict[str, Callable[[], GradientTransformation]] = {
    "own": lambda: optim.stateless(lambda updates, params, specs: tree_map(torch.neg, updates)),
    "late norm": lambda: optim.chain(optim.scale_by_adam(), CLIP),
    "delayed norm of some": lambda: optim.delayed(optim.masked(optim.chain(CLIP, optim.sgd(0.1)), large)),
}


NAMES = ("w", "long", "half", "list", "none")


def make_params() -> Any:
    g = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(7, 9, generator=g),
        "long": torch.randn(70_001, generator=g),
        "half": torch.randn(37, 3, generator=g).bfloat16(),
        "list": [torch.randn((), generator=g), torch.zeros(0, 3), torch.randn(64, generator=g)],
        "none": None,
    }


def make_grads(params: Any, step: int) -> Any:
    g = torch.Generator().manual_seed(step)
    grads = tree_map(lambda p: torch.randn(p.shape, generator=g), params)
    grads["half"] = grads["half"].bfloat16()
    grads["w"] = grads["w"].bfloat16()  # narrower than its parameter
    return grads


def clone(tree: Any) -> Any:
    return tree_map(torch.clone, tree)


def cuts(params: Any, granularity: str, rng: random.Random) -> list[dict[Any, slice]]:
    """Parts that cover the tree: for each, the rows of the leaves that are in it."""
    rows: list[tuple[Any, slice]] = []
    for entry, p in zip(tree_entries(params), tree_leaves(params), strict=True):
        marks = [0, len(p) if p.ndim else 1]
        if granularity == "element" and p.ndim:
            marks += [rng.randrange(0, len(p) + 1) for _ in range(rng.randrange(4))]
        marks = sorted(marks)
        rows += [(entry, slice(a, b)) for a, b in itertools.pairwise(marks)]
    rng.shuffle(rows)
    parts: list[dict[Any, slice]] = []
    for entry, cut in rows:
        part = next((part for part in parts if entry not in part and rng.random() < 0.4), None)
        if part is None:
            parts.append(part := {})
        part[entry] = cut
    return parts


def take(tree: Any, part: dict[Any, slice]) -> Any:
    """A part of params, or of a state: leaves whose path ends as a parameter's does are cut like it."""
    leaves, treedef = tree_flatten(tree)

    def view(entry: Any, x: Tensor) -> Tensor | None:
        if not any(k in NAMES for k in entry):
            return x  # a counter
        cut = next((cut for e, cut in part.items() if entry[-len(e) :] == e), None)
        return None if cut is None else x[cut] if x.ndim else x

    return tree_unflatten(treedef, [view(e, x) for e, x in zip(tree_entries(tree), leaves, strict=True)])


def put(tree: Any, part: dict[Any, slice], new: Any) -> None:
    for old, fresh in zip(tree_leaves(take(tree, part)), tree_leaves(new), strict=True):
        if old.data_ptr() != fresh.data_ptr():
            old.copy_(fresh)


def step_in_parts(tx: GradientTransformation, grads: Any, state: Any, params: Any, rng: random.Random) -> Any:
    pieces = optim.in_pieces(tx, tree_map(lambda p: p.to("meta"), params))
    stats = [pieces.measure(g) for g in tree_leaves(grads)] if pieces.measure else []
    token = pieces.begin(state, stats)
    for part in cuts(params, pieces.granularity, rng):
        own = [take(tree, part) for tree in (grads, state, params)]
        new_params, new_state = pieces.apply(token, *own)
        put(params, part, new_params)
        put(state, part, new_state)
    return pieces.end(token, state)


def assert_same(got: Any, want: Any) -> None:
    entries = tree_entries(want)
    assert entries == tree_entries(got)
    for entry, a, b in zip(entries, tree_leaves(got), tree_leaves(want), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), entry


@pytest.mark.day(4)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate([*ELEMENT, *LEAF])]
)
@pytest.mark.parametrize("wide", [False, True])
def test_any_cut_has_the_bits_of_the_whole(name: str, wide: bool) -> None:
    tx, rng = {**ELEMENT, **LEAF}[name](), random.Random(name)
    assert tx.needs.granularity == ("element" if name in ELEMENT else "leaf")
    params = make_params()
    state = tx.init(params)
    if wide:  # moments of the half-precision leaf in float32
        state = tree_map(lambda x: x.float() if x.dtype == torch.bfloat16 else x, state)
    whole = clone((state, params))
    for i in range(4):
        grads = make_grads(params, i)
        whole = optim.inplace(tx)(clone(grads), whole[0], whole[1])[::-1]
        state = step_in_parts(tx, grads, state, params, rng)
        assert_same((state, params), whole)
    counters = [x for x in tree_leaves(state) if x.dtype == torch.int32]
    assert all(int(c) in (3, 4) if "delayed" in name else int(c) == 4 for c in counters)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(TREE)]
)
def test_a_rule_that_needs_the_tree_is_cut_nowhere(name: str) -> None:
    tx, params = TREE[name](), make_params()
    pieces = optim.in_pieces(tx, params)
    assert (pieces.granularity, pieces.measure) == ("tree", None)
    state, grads = tx.init(params), make_grads(params, 0)
    token = pieces.begin(state)
    with pytest.raises(ValueError, match=r"params\['long'\] is missing; give the whole tree at once"):
        pieces.apply(token, grads, state, {**params, "long": None})
    want = optim.inplace(tx)(clone(grads), clone(state), clone(params))
    got, new = pieces.apply(token, grads, state, params)
    assert_same((got, pieces.end(token, new)), want)


def test_parts_that_are_no_parts_are_refused() -> None:
    tx, params = optim.lamb(0.1), make_params()
    pieces, state = optim.in_pieces(tx, params), tx.init(params)
    token = pieces.begin(state)

    def refused(part: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            pieces.apply(token, part, state, part)

    refused({**params, "w": params["w"][2:4]}, r"params\['w'\] has shape \(2, 9\), rows of \(7, 9\); give the whole")
    refused({**params, "w": params["w"].t()}, r"params\['w'\] has shape \(9, 7\), which is no rows of \(7, 9\)")
    refused({**params, "none": torch.ones(2)}, r"params\['none'\] is given, but is None in the whole")
    refused({"w": params["w"]}, "Keep every container")
    with pytest.raises(ValueError, match=r"no counter at 3\.0"):
        pieces.begin(())


def test_measures_that_are_missing_are_asked_for() -> None:
    tx, params = ELEMENT["clip, adamw"](), make_params()
    pieces = optim.in_pieces(tx, params)
    with pytest.raises(ValueError, match="a measure for each of 6 leaves, got 0"):
        pieces.begin(tx.init(params))


def test_the_norm_is_summed_over_the_mesh_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, Any]] = []

    def psum(x: Tensor, axes: Any) -> Tensor:
        calls.append((x.tolist(), axes))
        return 2 * x

    monkeypatch.setattr("shardfn.optim._norm.psum", psum)
    tx = optim.chain(CLIP, optim.sgd(1.0))
    params, grads = [torch.zeros(4), torch.zeros(2)], [torch.full((4,), 2.0), torch.ones(2)]
    specs = [P("dp"), P()]
    pieces, state = optim.in_pieces(tx, params), tx.init(params)
    assert pieces.measure is not None
    with bind_mesh(Mesh({"dp": 2}, torch.device("cpu"))):
        token = pieces.begin(state, [pieces.measure(g) for g in grads], specs=specs)
        for rows in (slice(0, 3), slice(3, 4)):
            pieces.apply(token, [grads[0][rows], None], state, [params[0][rows], None], specs=specs)
        pieces.apply(token, [None, grads[1]], state, [None, params[1]], specs=specs)
    assert calls == [([16.0], ("dp",))]
    scale = 1 / torch.tensor(34.0).sqrt()
    assert torch.equal(params[0], torch.full((4,), -2.0) * scale) and torch.equal(params[1], -scale.expand(2))
