"""Covers the byte counter: the ring formulas, nesting, and that gradients are counted."""

import pytest
import torch

from shardfn import collectives as c
from shardfn.core import make_mesh
from shardfn.testing import distributed


def test_counters_nest_and_end() -> None:
    with c.count_traffic() as outer:
        c.record("psum", ("dp",), 3)
        with c.count_traffic() as inner:
            c.record("psum", ("dp",), 4, dtype=torch.int8)
        c.record("psum", ("dp", "tp"), 5)
    c.record("psum", ("dp",), 100)
    assert outer.by_op == {("psum", ("dp",)): [2, 7], ("psum", ("dp", "tp")): [1, 5]}
    assert (outer.calls, outer.bytes, outer.by_dtype) == (3, 12, {None: 8, torch.int8: 4})
    assert (inner.calls, inner.bytes) == (1, 4)


def test_a_counter_ends_with_an_error() -> None:
    with pytest.raises(KeyError), c.count_traffic() as traffic:
        raise KeyError
    c.record("psum", ("dp",), 1)
    assert traffic.calls == 0


def test_one_rank_sends_nothing() -> None:
    with c.count_traffic() as traffic:
        c.psum(c.all_gather(torch.ones(3), "dp"), ("dp", "tp"))
    assert traffic.bytes == traffic.calls == 0


@distributed(world=4)
def test_ring_formulas() -> None:
    n, size = 4, 8
    x = torch.ones(size, 3)
    whole = size * 3 * 4
    with c.bind_mesh(make_mesh({"dp": n}, device="cpu")):
        expected = {
            "psum": (lambda: c.psum(x, "dp"), 2 * whole * (n - 1) // n),
            "pmax": (lambda: c.pmax(x, "dp"), 2 * whole * (n - 1) // n),
            "all_gather": (lambda: c.all_gather(x[:2], "dp"), whole * (n - 1) // n),
            "psum_scatter": (lambda: c.psum_scatter(x, "dp"), whole * (n - 1) // n),
            "all_to_all": (lambda: c.all_to_all(x, "dp", split_dim=0, concat_dim=1), whole * (n - 1) // n),
            "ppermute": (lambda: c.ppermute(x, "dp", [(0, 1), (2, 2)]), whole if c.axis_index("dp") == 0 else 0),
        }
        for name, (run, sent) in expected.items():
            with c.count_traffic() as traffic:
                run()
            assert traffic.by_op == {(name, ("dp",)): [1, sent]}, name
            # A maximum travels as integers in the same order, so that a NaN survives.
            assert traffic.by_dtype == {torch.int32 if name == "pmax" else torch.float32: sent}, name
        with c.count_traffic() as traffic:
            c.take_own_block(c.pvary(x, "dp"), "dp")
        assert traffic.calls == 0


@distributed(world=4)
def test_axes_are_named_in_the_order_of_the_mesh_and_backwards_count() -> None:
    with c.bind_mesh(make_mesh({"dp": 2, "tp": 2}, device="cpu")):
        x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        with c.count_traffic() as traffic:
            c.all_gather(x, ("tp", "dp")).sum().backward()
        assert traffic.by_op == {("all_gather", ("dp", "tp")): [1, 12], ("psum_scatter", ("dp", "tp")): [1, 12]}
