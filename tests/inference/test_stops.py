"""Covers stop strings: the text is cut as `str.find` would cut the whole, wherever its pieces end."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardfn.inference._texts import StopStringMatcher

LETTERS = st.text("ab", min_size=1, max_size=4)


def whole_cut(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """By `str.find`: the first end of a stop string, and there the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, False
    end, length = min(ends)
    return text[: end if include else end + length], True


@pytest.mark.nightly
@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    text=st.text("ab", max_size=14),
    stops=st.lists(LETTERS, min_size=0, max_size=3),
    cuts=st.lists(st.integers(0, 14)),
    include=st.booleans(),
)
def test_pieces_are_cut_as_the_whole(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    cut, given_text, places = StopStringMatcher(stops, include=include), "", [0, *sorted(cuts), len(text)]
    found = False
    for a, b in itertools.pairwise(places):
        piece, found = cut.add(text[a:b])
        given_text += piece
        if found:
            break
        seen = text[:b]
        # No more is held back than what may begin a stop string.
        kept = max((k for s in stops for k in range(len(s)) if seen.endswith(s[:k])), default=0)
        assert given_text == seen[: len(seen) - kept]
    want, stopped = whole_cut(text, stops, include)
    assert (given_text + cut.end(), found) == (want, stopped)
