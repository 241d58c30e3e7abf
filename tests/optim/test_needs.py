"""Covers needs: how those of rules that work together join, a wrapper of one's own, and the keywords of before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import optim
from shardfn.core import tree_leaves, tree_map
from shardfn.optim import GradientTransformation, Measure, Needs, Phase, Phases


def sums(block: Tensor) -> Tensor:
    return block.sum()


def ruled(needs: Needs) -> GradientTransformation:
    """A rule that does nothing, and keeps its number of steps."""

    def update(updates: Any, state: Any, params: Any = None, *, specs: Any = None) -> Any:
        return updates, state

    return GradientTransformation(lambda params: {"n": torch.zeros((), dtype=torch.int32)}, update, needs=needs)


ELEMENT, LEAF, TREE = ruled(Needs("element")), ruled(Needs("leaf")), ruled(Needs())
NORM = ruled(Needs("element", Measure(sums, additive=True)))
LATE = ruled(Needs("element", Measure(sums, additive=True, ahead=lambda state: bool(state["n"] > 0))))
OTHER = ruled(Needs("element", Measure(lambda block: block.max())))
OWN = ruled(Needs(phases=Phases(("dp",), lambda state: Phase(f"at {int(state['n'])}", True))))
PAIR = (lambda params: (), lambda updates, state, params=None: (updates, state))


def beside(*rules: Any) -> GradientTransformation:
    names = "abc"[: len(rules)]
    return optim.multi_transform(dict(zip(names, rules, strict=True)), dict.fromkeys(names, "a"))


def around(inner: Any) -> GradientTransformation:
    needs = optim.join_needs([inner], around)
    return GradientTransformation(inner.init, inner.update, needs=needs)


# A composition; then its granularity, its measure, whether the measure is additive, and whether it needs wholes.
JOINS: list[tuple[Any, tuple[Any, ...]]] = [
    (optim.chain(), ("element", None, None, False)),
    (optim.chain(ELEMENT, LEAF), ("leaf", None, None, False)),
    (optim.chain(LEAF, TREE, ELEMENT), ("tree", None, None, False)),
    (optim.chain(NORM, ELEMENT), ("element", sums, True, False)),
    (optim.chain(NORM, LEAF), ("leaf", sums, True, False)),
    (optim.chain(ELEMENT, NORM), ("tree", None, None, False)),
    (optim.chain(NORM, NORM), ("tree", sums, True, False)),
    (optim.chain(optim.chain(NORM, ELEMENT), ELEMENT), ("element", sums, True, False)),
    (optim.named_chain(("a", NORM), ("b", LEAF)), ("leaf", sums, True, False)),
    (optim.named_chain(("a", PAIR)), ("tree", None, None, True)),
    (optim.chain(PAIR, ELEMENT), ("tree", None, None, True)),
    (beside(ELEMENT, LEAF), ("leaf", None, None, False)),
    (beside(NORM, ELEMENT), ("element", sums, False, False)),
    (beside(NORM, LATE), ("element", sums, False, False)),
    (beside(ELEMENT, PAIR), ("tree", None, None, True)),
    (optim.masked(NORM, True), ("element", sums, False, False)),
    (optim.master_weights(NORM), ("element", sums, True, False)),
    (optim.master_weights(optim.chain(PAIR)), ("tree", None, None, True)),
    (optim.delayed(NORM), ("element", sums, True, False)),
    (optim.delayed(LEAF), ("leaf", None, None, False)),
    (optim.delayed(OTHER), ("tree", None, None, False)),
    (around(NORM), ("element", sums, True, False)),
    (around(optim.chain(NORM, LEAF)), ("leaf", sums, True, False)),
]


@pytest.mark.parametrize(
    ("tx", "want"), [pytest.param(*x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(JOINS)]
)
def test_needs_join(tx: GradientTransformation, want: tuple[Any, ...]) -> None:
    granularity, measure, _, _, phases, whole, donates, _ = tx.needs
    of, additive = (None, None) if measure is None else measure[:2]
    assert (granularity, of, additive, whole) == want
    assert phases is None and not donates


def test_a_chain_ascends_until_a_rule_descends() -> None:
    clip, adam = optim.clip_by_global_norm(1.0), optim.scale_by_adam()
    trust = optim.scale_by_trust_ratio(), optim.scale_by_moment_ratio(), optim.scale_by_bias_correction()
    kept = optim.clip(1.0), optim.add_decayed_weights(0.1), optim.trace(0.9), optim.scale_by_lion(), optim.identity()
    more = optim.scale_by_radam(), optim.scale_by_rms(), optim.scale_by_stddev(), optim.scale_by_rss(), optim.scale(0.1)
    leaf = optim.clip_by_block_rms(1.0), optim.adaptive_grad_clip(1.0), optim.named_chain(("a", adam), ("b", clip))
    for rule in (clip, adam, *trust, *kept, *more, *leaf, optim.chain(), optim.chain(clip, optim.chain(adam))):
        assert rule.needs.ascends
        assert not optim.chain(rule, optim.scale_by_learning_rate(0.1)).needs.ascends
    down = (
        optim.scale(-1.0),
        optim.scale_by_schedule(optim.constant_schedule(-1.0)),
        optim.lars(0.1),
        optim.adagrad(0.1),
    )
    for rule in (optim.sgd(0.1), optim.adamw(0.1), optim.lamb(0.1), optim.lion(0.1), *down, ELEMENT, around(clip)):
        assert not rule.needs.ascends and not optim.chain(clip, rule).needs.ascends


def test_which_leaves_ascend_depends_on_the_mask() -> None:
    params = {"a": torch.ones(2, 2), "b": [torch.ones(3), None]}
    only, rest = {"a": True, "b": False}, {"a": False, "b": True}
    sgd, clip = optim.sgd(0.1), optim.clip(1.0)
    by_shape = lambda p: tree_map(lambda x: x.ndim == 2, p)  # noqa: E731  # as users write masks
    for tx, want in (
        (optim.masked(sgd, only), [False, True]),
        (optim.masked(sgd, by_shape), [False, True]),
        (optim.masked(sgd, True), [False, False]),
        (optim.freeze(rest), [True, False]),
        (optim.masked(optim.masked(sgd, by_shape), rest), [True, True]),
        (optim.chain(clip, optim.masked(sgd, only)), [False, True]),
        (optim.chain(optim.masked(sgd, only), optim.masked(optim.adam(0.1), rest)), [False, False]),
        (optim.chain(optim.masked(sgd, only), optim.freeze(rest)), [False, False]),
        (optim.chain(optim.masked(optim.scale_by_adam(), only), optim.scale_by_learning_rate(0.1)), [False, False]),
        (optim.multi_transform({"x": sgd, "y": clip}, {"a": "x", "b": "y"}), [False, True]),
        (optim.multi_transform({"x": sgd, "y": optim.set_to_zero()}, {"a": "x", "b": "y"}), [False, False]),
        (optim.master_weights(optim.masked(sgd, only)), [False, True]),
        (optim.delayed(optim.masked(sgd, only)), [False, True]),
        (optim.resolve_masks(optim.chain(clip, optim.masked(sgd, by_shape)), params), [False, True]),
        (clip, [True, True]),
        (sgd, [False, False]),
    ):
        assert optim.find_ascending(tx, params) == want
        state = tx.init(params)
        if not isinstance(state, optim.DelayedState):  # which does not update at its first step
            updates, _ = tx.update(tree_map(torch.ones_like, params), state, params)
            assert [bool((u > 0).all()) for u in tree_leaves(updates)] == want
    assert optim.masked(clip, only).needs.ascends is True
    assert optim.multi_transform({"x": sgd, "y": optim.adam(0.1)}, {"a": "x", "b": "y"}).needs.ascends is False


def test_two_measures_side_by_side_take_the_tree() -> None:
    assert beside(NORM, OTHER).needs.granularity == "tree"


def test_a_reader_of_a_state_is_shown_its_own() -> None:
    params = {"w": torch.ones(2)}
    for tx in (LATE, optim.chain(LATE, ELEMENT), optim.master_weights(optim.chain(optim.chain(LATE))), around(LATE)):
        measure, state = tx.needs.measure, tx.init(params)
        assert measure is not None and measure.ahead is not None
        assert not measure.ahead(state)
        assert measure.ahead(tree_map(lambda x: x + 1, state))
    for tx in (
        OWN,
        optim.chain(ELEMENT, OWN),
        optim.named_chain(("z", ELEMENT), ("a", OWN)),
        optim.master_weights(optim.chain(ELEMENT, optim.chain(OWN))),
        around(OWN),
    ):
        phases = tx.needs.phases
        assert phases is not None and phases.axes == ("dp",)
        assert phases.next(tree_map(lambda x: x + 3, tx.init(params))) == Phase("at 3", True)


def test_each_part_is_given_its_own_leaves() -> None:
    seen: list[Any] = []

    def told(name: str) -> GradientTransformation:
        def on(params: Any, stats: Tensor | None, phase: Phase | None) -> GradientTransformation:
            shapes = {k: None if x is None else tuple(x.shape) for k, x in params.items()}
            seen.append((name, shapes, None if stats is None else stats.tolist(), phase))
            return told(name)

        return ruled(Needs("element", Measure(sums), bind_stats=on))

    params, stats, phase = {"w": torch.ones(2), "b": torch.ones(3)}, torch.tensor([1.0, 2.0]), Phase("now", False)
    whole = {"w": (2,), "b": (3,)}
    optim.bind_stats(optim.chain(told("first"), told("then")), params, stats, phase)
    assert seen == [("first", whole, [1.0, 2.0], phase), ("then", whole, None, phase)]
    seen.clear()
    optim.bind_stats(optim.multi_transform({"x": told("x"), "y": told("y")}, {"w": "x", "b": "y"}), params, stats)
    assert seen == [("x", {"w": (2,), "b": None}, [2.0], None), ("y", {"w": None, "b": (3,)}, [1.0], None)]
    seen.clear()
    optim.bind_stats(around(optim.master_weights(told("in"))), params, stats, phase)
    assert seen == [("in", whole, [1.0, 2.0], phase)]
