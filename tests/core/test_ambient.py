"""Ambient values: nesting, threads, and that there is no other kind of ambient state."""

import itertools
import pathlib
import threading

import pytest
import torch

import shardfn
from shardfn.core import Ambient, OfProgram, Program, adopted, adopting, ambient_names, this_program

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
        assert on_a_thread(lambda: value.all) == ()
        assert on_a_thread(adopting(lambda: value.all)) == (() if by_thread else (1,))
        with value.hidden():
            assert not value and on_a_thread(adopting(lambda: value.all)) == ()
            with value.bound(2):
                assert value.all == (2,)
        assert value.all == (1,)
        assert on_a_thread(adopting(lambda: value.all)) == (() if by_thread else (1,))


def test_two_threads_bind_at_the_same_time_and_see_their_own():
    value, both, seen = made(), threading.Barrier(2, timeout=60), {}

    def work(name: str):
        for n in range(100):
            with value.bound((name, n)):
                both.wait()
                seen.setdefault(name, []).append(value.all)
                both.wait()
        return value.all

    other = threading.Thread(target=work, args=("other",))
    other.start()
    assert work("this") == ()
    other.join()
    assert all(seen[name] == [((name, n),) for n in range(100)] for name in ("this", "other"))


def test_a_thread_that_works_for_another_comes_back_to_its_own():
    value, theirs = made(), Program()
    with value.bound(1):
        with adopted(theirs), value.bound(2):
            assert value.all == (2,) and this_program() is theirs
            with adopted(this_program()):
                assert value.all == (2,)
        assert value.all == (1,) and not theirs.own(value.name, list)
        with pytest.raises(KeyError), adopted(theirs):
            raise KeyError
        assert value.all == (1,)


def test_a_program_has_one_value_of_each():
    value = OfProgram[list[int]](f"of a test, {next(NUMBERS)}", list)
    value.here().append(1)
    assert on_a_thread(value.here) == [] and on_a_thread(adopting(value.here)) is value.here() == [1]


class _Look(torch.autograd.Function):
    """Its backward notes an ambient value, and binds another."""

    @staticmethod
    def forward(ctx, x, value, seen):
        ctx.value, ctx.seen = value, seen
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        value = ctx.value
        with value.bound("inner"):
            ctx.seen.append((value.innermost(), value.all, this_program()))
        ctx.seen.append((value.innermost(), bool(value), this_program()))
        return grad_outputs[0], None, None


def looked(value, seen):
    x = torch.ones(2, requires_grad=True)
    _Look.apply(x, value, seen).sum().backward()


def test_a_thread_of_autograd_has_the_program_of_the_one_that_calls_the_backward():
    """Such a thread has used no ambient value outside of backwards, and torch gives it the caller's stash."""
    value, seen, program = made(), [], this_program()

    def device_thread():
        torch._C._stash_obj_in_tls("shardfn program", program)
        looked(value, seen)
        other = Program()  # the next backward is another program's
        torch._C._stash_obj_in_tls("shardfn program", other)
        looked(value, seen)
        return other

    with value.bound("outer"):
        other = on_a_thread(device_thread)
        assert value.all == ("outer",)
    assert seen == [
        ("inner", ("outer", "inner"), program),
        ("outer", True, program),
        ("inner", ("inner",), other),
        (None, False, other),
    ]


def test_a_backward_on_a_thread_without_a_program():
    value, seen = made(), []

    def work():
        looked(value, seen)
        return this_program()

    with value.bound("outer"):
        own = on_a_thread(work)
    assert [x[:2] for x in seen] == [("inner", ("inner",)), (None, False)]
    assert own is not this_program() and seen[0][2] is seen[1][2]


def test_a_thread_that_adopts_calls_backwards_for_the_same_program():
    value, seen = made(), []
    with value.bound("outer"):
        on_a_thread(adopting(lambda: looked(value, seen)))
    assert [x[:2] for x in seen] == [("inner", ("outer", "inner")), ("outer", True)]


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
    """All values that are bound while a block runs are `Ambient`s: `ambient_names` lists them all.

    Kernels know nothing of programs: the number of their threads belongs to a thread, as torch's does.
    """
    root = pathlib.Path(shardfn.__file__).parent
    words = ("threading.local", "ContextVar", "\n    global ")
    found = [
        f"{path.relative_to(root)}: {word.strip()}"
        for path in sorted(root.rglob("*.py"))
        for word in words
        if word in path.read_text()
    ]
    assert found == ["core/_ambient.py: threading.local", "kernels/_arguments.py: threading.local"]
