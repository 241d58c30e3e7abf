"""Covers `inference/_draft_tree.py`: paths, branches and bad trees, and how a schedule takes and moves drafts."""

import pytest

from shardfn.inference import Add, DraftTree, Limits, Request, Sampling, State, advance, start
from tests.inference.drafters import Context

TREE = DraftTree((5, 6, 7, 8, 5), (-1, 0, 0, 2, -1))


@pytest.mark.parametrize(
    ("drawn", "path"),
    [
        ((9, 0, 0, 0, 0, 0), []),
        ((5, 6, 8, 0, 0, 0), [0, 1]),
        ((5, 7, 0, 8, 0, 6), [0, 2, 3]),
        ((5, 9, 0, 8, 0, 6), [0]),  # the first of equal siblings is followed
    ],
)
def test_the_child_that_is_drawn_is_followed(drawn: tuple[int, ...], path: list[int]) -> None:
    assert TREE.path(drawn) == path


def test_branches_and_prefixes() -> None:
    assert TREE.branches and TREE.height == 3 and TREE.ancestors(3) == [0, 2, 3]
    assert TREE.first(2) == DraftTree.chain([5, 6]) and not TREE.first(2).branches and len(TREE.first(0)) == 0
    assert DraftTree().height == 0 and DraftTree().path([3]) == []


@pytest.mark.parametrize(("tokens", "parents"), [((5,), ()), ((5, 6), (-1, 1)), ((5,), (-2,))])
def test_a_tree_without_order_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must have one parent: -1, or the index of an earlier token"):
        DraftTree(tokens, parents)


class _Fixed:
    """Proposes one tree."""

    def propose(self, context: Context, most: int) -> DraftTree:
        return TREE.first(most)

    def end(self, context: Context) -> None:
        pass

    def copy(self) -> "_Fixed":
        return self

    def digest(self) -> bytes:
        return b"fixed"


def drafted(drawn: list[int]) -> State:
    """A sequence of three tokens and token 4, whose tree was drawn."""
    limits = Limits(vocab=10, context=40, blocks=9, block=2, buckets=(3, 6), running=2, drafts=7)
    request = Request((1, 2, 3), Sampling(max_tokens=12))
    state, plan, _ = advance(start(limits, drafter=_Fixed()), [Add(0, "a", request)])
    state.sequences[0].draft_length = state.sequences[0].draft_length._replace(width=5)
    state, plan, _ = advance(state, drawn=[4])
    assert plan is not None and plan.branches == ((1, TREE.parents),)
    assert list(plan.tokens[:6]) == [4, *TREE.tokens] and list(plan.positions[:6]) == [3, 4, 5, 5, 6, 4]
    assert list(plan.places[:6]) == [4, 5, 6, 6, 7, 5] and len({*plan.slots[:6]}) == 6
    state, _, outputs = advance(state, drawn=drawn)
    assert [(o.position, o.row) for o in outputs] == [(4, 0), (5, 1), (6, 3), (7, 4)][: len(outputs)]
    return state


def test_drafts_of_the_accepted_branch_move_to_their_positions() -> None:
    state = drafted([5, 7, 0, 8, 2, 0])
    [sequence] = state.running
    assert list(sequence.tokens) == [1, 2, 3, 4, 5, 7, 8, 2] and sequence.computed == 7
    assert state.speculation.accepted == 3 and state.speculation.drafted == 5
    assert not state.moves  # the plan has them
    assert state.flight[-1].sequence is sequence


def test_moves_wait_for_a_plan() -> None:
    limits = Limits(vocab=10, context=40, blocks=9, block=2, buckets=(3, 6), running=2, drafts=7)
    request = Request((1, 2, 3), Sampling(max_tokens=12, stop_tokens=(8,)))
    state, _, _ = advance(start(limits, drafter=_Fixed()), [Add(0, "a", request)])
    state.sequences[0].draft_length = state.sequences[0].draft_length._replace(width=5)
    state, plan, _ = advance(state, drawn=[4])
    assert plan is not None
    slots = plan.slots
    state, plan, outputs = advance(state, drawn=[5, 7, 0, 8, 0, 0])
    assert plan is None and outputs[-1].finish_reason == "stop"
    assert state.moves == [(slots[3], slots[2])]  # position 5, of a block that is known now
    assert state.copy().moves == state.moves
    state, plan, _ = advance(state, [Add(1, "b", Request((1, 2, 3, 4, 5, 7, 1), Sampling(max_tokens=2)))])
    assert plan is not None and plan.moves == ((slots[3], slots[2]),) and plan.positions[0] == 6
