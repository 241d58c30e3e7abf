"""Covers a router that raises on one rank between two exchanges of a step: all ranks raise its text, and the next step
runs from the same state."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.core import tree_leaves
from shardfn.testing import distributed

EXPERTS, WIDTH = 4, 5
TEXT = "router of layer 1: 3 rows have scores that are not finite"
_FAIL: dict[str, Any] = {"where": "", "rank": 1}
MODES = {"eager": lambda f: f, "graph": lambda f: sf.jit(f, backend="graph")}


def _raise_at(where: str) -> None:
    if _FAIL["where"] == where and torch.distributed.get_rank() == _FAIL["rank"]:
        raise ValueError(TEXT)


@torch.library.custom_op("shardfn_test::checked_scores", mutates_args=())
def _checked(x: Tensor, where: str) -> Tensor:
    """A router's check of its scores, which a captured step runs, too."""
    _raise_at(where)
    return x.clone()


_checked.register_fake(lambda x, where: torch.empty_like(x))
_checked.register_autograd(
    lambda ctx, g: (_checked(g, "backward"), None), setup_context=lambda ctx, inputs, output: None
)


def _experts(p: dict, x: Tensor) -> Tensor:
    h = _checked(torch.tanh(x @ p["dense"]), "before")
    rows = sf.all_to_all(h, "ep", split_dim=0, concat_dim=0)
    rows = _checked((rows.view(-1, len(p["experts"]), WIDTH) * p["experts"]).view(-1, WIDTH), "between")
    return _checked(sf.all_to_all(rows, "ep", split_dim=0, concat_dim=0), "after")


def _loss(p: dict, s: dict, x: Tensor) -> tuple[Tensor, dict]:
    y = sf.remat(_experts)(p, x)
    return (y @ p["last"]).square().mean(), {"counts": s["counts"] + len(x), "ends": s["ends"]}


def _finish(s: dict) -> dict:
    counts = sf.psum(_checked(s["counts"].float(), "finish"), "ep")
    return {"counts": torch.zeros_like(s["counts"]), "ends": s["ends"] + counts.long()}


def _params() -> dict:
    draw = torch.Generator().manual_seed(0)
    shapes = {"dense": (WIDTH, WIDTH), "experts": (EXPERTS, WIDTH), "last": (WIDTH, 2)}
    return {n: torch.randn(shape, generator=draw) for n, shape in shapes.items()}


@contextlib.contextmanager
def _raising(where: str, text: str = TEXT) -> Iterator[None]:
    """All ranks raise the text of the one, and name it; at once, where a mesh would wait for half an hour."""
    here, since = torch.distributed.get_rank() == _FAIL["rank"], time.monotonic()
    _FAIL["where"] = where
    with pytest.raises(ValueError if here else sf.RankError) as caught:
        yield
    _FAIL["where"] = ""
    assert text in str(caught.value), caught.value
    if here:
        assert f"on rank {_FAIL['rank']} of 2" in caught.value.__notes__
    else:
        assert f"rank {_FAIL['rank']} raised ValueError: {text}" in str(caught.value), caught.value
    assert time.monotonic() - since < 30


def _whole(state: sf.TrainState) -> list[Tensor]:
    held = (state.params, state.opt_state, state.model_state)
    return [x.local.clone() for x in tree_leaves(held) if isinstance(x, sf.GlobalTensor)]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_raise_and_the_state_goes_on(mode: str, stage: int) -> None:
    _raised(mode, stage)


@distributed(world=2, timeout=120)
def _raised(mode: str, stage: int) -> None:
    mesh = sf.make_mesh({"ep": 2})
    step = sf.sharded_step(
        MODES[mode](sf.accumulate(_loss, 2)),
        optim.adamw(1e-2),
        mesh=mesh,
        specs={"dense": P(), "experts": P("ep"), "last": P()},
        batch=P("ep"),
        zero=sf.Zero(stage, axis="ep", persist_elements=0),
        has_state=True,
        finish=_finish,
    )
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(mesh.rank))
    first = {"counts": torch.tensor(0), "ends": torch.tensor(0)}
    want, _ = step(step.init(_params(), model_state=first), x)
    want, _ = step(want, x)
    state = step.init(_params(), model_state=first)
    for n in range(2):  # in a step that learns the order of use, and in one that knows it
        before = _whole(state)
        for where in ("before", "between", "after", "backward", "finish"):
            with _raising(where):
                step(state, x)
            assert all(torch.equal(a, b) for a, b in zip(_whole(state), before, strict=True)), (where, n)
        state, metrics = step(state, x)
        assert metrics["finite"]
    assert all(torch.equal(a, b) for a, b in zip(_whole(state), _whole(want), strict=True))
    assert int(state.model_state["ends"].local) == 32


def _capped(p: dict, x: Tensor) -> Tensor:
    """Each rank sends the first `len(x) - 1` rows to rank 0, which has room for 6: with 2 ranks for 4 rows each."""
    n, index = sf.axis_size("ep"), int(sf.axis_index("ep"))
    sizes, received = (torch.zeros(n, dtype=torch.int64) for _ in range(2))
    asked = (x[:, 0] > 0).sum()
    sizes[0] = asked
    all_asked = sf.all_gather(asked.view(1), "ep")
    if index == 0:
        received = all_asked
    begin = torch.zeros(n, dtype=torch.int64)
    begin[0] = all_asked[:index].sum()
    out = x.new_zeros(6, WIDTH)
    rows = sf.ragged_all_to_all(torch.tanh(x @ p["dense"]), out, torch.zeros_like(begin), sizes, begin, received, "ep")
    return (sf.checkpoint_name(rows, "moe_rows") * p["experts"].sum()).square().sum() + (x @ p["last"]).sum()


@pytest.mark.nightly
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_has_one_text_on_all_ranks_and_the_state_goes_on(mode: str, stage: int) -> None:
    _overflowed(mode, stage)


@distributed(world=2, timeout=120)
def _overflowed(mode: str, stage: int) -> None:
    mesh = sf.make_mesh({"ep": 2})
    loss = sf.remat(_capped, sf.policies.save_only_these_names("moe_rows"))
    step = sf.sharded_step(
        MODES[mode](loss),
        optim.adamw(1e-2),
        mesh=mesh,
        specs={"dense": P(), "experts": P("ep"), "last": P()},
        batch=P("ep"),
        zero=sf.Zero(stage, axis="ep", persist_elements=0),
    )
    few, many = torch.ones(4, WIDTH), torch.ones(4, WIDTH)
    few[2:] = -1.0
    state = step.init(_params())
    for _ in range(2):
        state, _ = step(state, few)
        before = _whole(state)
        with pytest.raises(ValueError, match=r"ragged_all_to_all: places do not fit. Nothing was sent") as caught:
            step(state, many)
        assert "beyond the 6 rows that out has on rank 0 of 'ep'. Give it more, or send fewer" in str(caught.value)
        assert all(torch.equal(a, b) for a, b in zip(_whole(state), before, strict=True))
        texts: list[Any] = [None, None]
        torch.distributed.all_gather_object(texts, str(caught.value))
        assert texts[0] == texts[1]
