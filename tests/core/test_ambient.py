"""Ambient values: nesting, threads, and that there is no other kind of ambient state."""

import itertools
import pathlib
import threading

import pytest

import shardfn
from shardfn.core import Ambient, ambient_names

NUMBERS = itertools.count()


def made(*, by_thread: bool = False) -> Ambient[object]:
    return Ambient(f"of a test, {next(NUMBERS)}", by_thread=by_thread)


def on_a_thread(f):
    out = []
    thread = threading.Thread(target=lambda: out.append(f()))
    thread.start()
    thread.join()
    return out[0]


def test_the_innermost_counts_and_is_gone_after_an_error():
    value = made()
    assert not value and value.innermost() is None
    with value.bound("outer"):
        with pytest.raises(KeyError), value.bound("inner"):
            assert value.innermost() == "inner" and value.all == ("outer", "inner")
            raise KeyError
        assert value.innermost() == "outer"
    assert not value


def test_none_can_be_bound():
    value = made()
    with value.bound(None):
        assert value and value.all == (None,)
    assert not value


@pytest.mark.parametrize("by_thread", [False, True])
def test_who_sees_it(by_thread: bool):
    value = made(by_thread=by_thread)
    with value.bound(1):
        assert on_a_thread(lambda: value.all) == (() if by_thread else (1,))
        with value.hidden():
            assert not value
            with value.bound(2):
                assert value.all == (2,)
        assert value.all == (1,)


def test_blocks_may_end_in_any_order_and_take_their_own_value():
    value = made()
    first, second = [], []  # equal, and not the same
    a, b = value.bound(first), value.bound(second)
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert len(value.all) == 1 and value.innermost() is second
    b.__exit__(None, None, None)
    assert not value


def test_a_name_is_one_value():
    assert len(set(ambient_names())) == len(ambient_names())
    with pytest.raises(ValueError, match="there is an ambient value 'mesh' already"):
        Ambient("mesh")


def test_there_is_no_other_kind():
    """All values that are bound while a block runs are `Ambient`s: `ambient_names` lists them all."""
    root = pathlib.Path(shardfn.__file__).parent
    words = ("threading.local", "ContextVar", "\n    global ")
    found = [
        f"{path.relative_to(root)}: {word.strip()}"
        for path in sorted(root.rglob("*.py"))
        for word in words
        if word in path.read_text()
    ]
    assert found == ["core/_ambient.py: threading.local"]
