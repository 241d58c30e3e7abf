"""Covers ZeRO++: secondary pieces, quantised gathers and reductions: values, bytes by axis, staleness, jit."""

from typing import Any

import shardfn as sf
from shardfn.testing import (
    ODD_TRAINABLE,
    assert_same,
    distributed,
    odd_batch,
    odd_loss,
    odd_params,
    on_mesh,
)

# Small enough that the odd leaves fall on both sides of each threshold.
ODD: dict[str, Any] = {"stage": 3, "axis": ("node", "gpu"), "persist": 2, "bucket": 64, "prefetch": 150}
BATCH = sf.P(("node", "gpu"))


def _mesh() -> sf.Mesh:
    return sf.make_mesh({"node": 2, "gpu": 2})


@distributed(world=4)
def test_secondary_pieces_never_change_a_bit() -> None:
    batches = [odd_batch(n) for n in range(3)]
    for loss in (odd_loss, sf.accumulate(sf.remat(odd_loss), 3)):
        args = (loss, sf.optim.adamw(1e-2), odd_params(), batches)
        how: dict[str, Any] = {"mesh": _mesh(), "batch": BATCH, "trainable": ODD_TRAINABLE}
        want = on_mesh(*args, zero=sf.Zero(**ODD), **how)
        for near in ("gpu", "node"):
            got = on_mesh(*args, zero=sf.Zero(**ODD, secondary_axis=near), **how)
            assert_same(got, want, exact=True)
        jitted = sf.jit(loss, backend="graph")
        got = on_mesh(jitted, *args[1:], zero=sf.Zero(**ODD, secondary_axis="gpu"), **how)
        assert_same(got, want, exact=True)


@distributed(world=4)
def test_quantised_jit() -> None:
    batches = [odd_batch(n) for n in range(3)]
    for loss in (odd_loss, sf.accumulate(sf.remat(odd_loss), 3)):
        args = (sf.optim.adamw(1e-2), odd_params(), batches)
        how: dict[str, Any] = {"mesh": _mesh(), "batch": BATCH, "trainable": ODD_TRAINABLE}
        for near in (None, "gpu"):
            how["zero"] = sf.Zero(**ODD, secondary_axis=near, gather="int8", reduce="int4", block=4)
            want = on_mesh(loss, *args, **how)
            print(want.metrics)
            got = on_mesh(sf.jit(loss, backend="graph"), *args, **how)
            assert_same(got, want, exact=True)
