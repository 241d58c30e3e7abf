"""Covers updates in chunks: any memories and sizes of chunks give the bits of the update in one go."""

import dataclasses
import pathlib
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardfn import optim
from shardfn.core import MemoryKind, P, Stored, load, tree_flatten, tree_leaves, tree_map
from shardfn.memory import Pool
from shardfn.state import _stream
from shardfn.state._operands import LeafRows, Update, UpdatedLeaves, UpdateOperand
from shardfn.state._state import state_owners
from shardfn.state._stream import stream, stream_some

RULES = {
    "adamw": lambda: optim.adamw(0.1),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, momentum=0.9)),
    "lamb": lambda: optim.lamb(0.1),
}
KINDS: list[MemoryKind] = ["device", "host", "disk"]
SHAPES = [(7, 5), (), (64,), (0, 3), (33, 4), (3,)]


def _values(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=draw) for s in SHAPES]


def _column(x: Tensor, home: MemoryKind, pool: Pool, **how: bool) -> UpdateOperand:
    return UpdateOperand(pool.write(x.clone()).result() if home == "disk" else x.clone(), home, **how)


def _update(rule: Any, homes: list[tuple[MemoryKind, ...]], pool: Pool, chunk: int, scale: Tensor | None) -> Update:
    params, grads = _values(0), _values(1)
    state = rule.init(params)
    leaves, treedef = tree_flatten(state)
    owners = state_owners(state, params, rule)
    return Update(
        optimizer=rule,
        treedef=tree_flatten(params)[1],
        specs=[P()] * len(params),
        numels=[x.numel() for x in params],
        params=[_column(x, h[0], pool) for x, h in zip(params, homes, strict=True)],
        grads=[_column(x, h[1], pool) for x, h in zip(grads, homes, strict=True)],
        state=[_column(x, "device" if k is None else homes[k][2], pool) for x, k in zip(leaves, owners, strict=True)],
        state_treedef=treedef,
        owners=owners,
        scale=scale,
        device=torch.device("cpu"),
        pool=pool,
        chunk=chunk,
    )


def _in_one_go(rule: Any, scale: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    params, grads = _values(0), _values(1)
    grads = grads if scale is None else [g * scale for g in grads]
    specs = [P()] * len(params)
    new, state = optim.inplace(rule)(grads, rule.init(params), params, specs=specs)
    return tree_leaves(new), tree_leaves(state)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(RULES)]
)
def test_chunks_give_the_bits_of_one_go(name: str, tmp_path: pathlib.Path) -> None:
    rule = RULES[name]()
    with Pool(tmp_path / "pool") as pool:
        for seed in range(8):
            draw = random.Random(seed)
            homes: list[tuple[MemoryKind, ...]] = [tuple(draw.choice(KINDS) for _ in range(3)) for _ in SHAPES]
            scale = draw.choice((None, torch.tensor(0.5)))
            update = _update(rule, homes, pool, draw.choice((1, 300, 3000, 1 << 20)), scale)
            before = [load(c.held).clone() for c in update.params if c is not None]
            rows, state = stream(update, UpdatedLeaves())
            new, after = _in_one_go(rule, scale)
            for got, want in zip([*rows, *tree_leaves(state)], [*new, *after], strict=True):
                assert got is not None and torch.equal(load(got), want), (seed, homes)
            for column, row, old in zip(update.params, rows, before, strict=True):
                assert column is not None
                if column.home == "disk":  # the state after a failure
                    assert torch.equal(load(column.held), old) and isinstance(row, Stored), seed
                else:
                    assert row is column.held, seed


def test_leaves_that_were_stepped_before_go_home_and_are_not_stepped_again(tmp_path: pathlib.Path) -> None:
    rule = optim.adamw(0.1)
    homes: list[tuple[MemoryKind, ...]] = [("device", "host", "host")] * len(SHAPES)
    with Pool(tmp_path / "pool") as pool:
        update = _update(rule, homes, pool, 300, None)
        some = [0, 4]
        pairs = zip(update.state, update.owners, strict=True)
        kept = dataclasses.replace(
            update,
            params=[UpdateOperand(c.held, c.home, kept=True) for c in update.params if c is not None],
            state=[c if k is None else UpdateOperand(c.held, c.home, kept=True) for c, k in pairs],
        )
        done = stream_some(kept, [LeafRows(0), LeafRows(4, 0, 20), LeafRows(4, 20, 33)])
        assert sorted(done.params) == some
        assert all(torch.equal(load(c.held), x) for c, x in zip(update.params, _values(0), strict=True) if c)
        for i in some:
            mock_grad = update.grads[i]
            assert mock_grad is not None and isinstance(mock_grad.held, Tensor)
            mock_grad.held.fill_(torch.nan)  # used already
        rows, state = stream(update, done)
        new, after = _in_one_go(rule, None)
        for got, want in zip([*rows, *tree_leaves(state)], [*new, *after], strict=True):
            assert got is not None and torch.equal(load(got), want)


def test_no_more_is_in_memory_than_three_chunks(tmp_path: pathlib.Path) -> None:
    """Bytes that have been read and have not left, counted at each step of the rule."""
    rule, seen = optim.adamw(0.1), list[int]()
    homes: list[tuple[MemoryKind, ...]] = [("disk", "disk", "disk")] * len(SHAPES)
    alive: set[_stream._RowChunk] = set()
    begun, settled, step = _stream._RowChunk.__init__, _stream._RowChunk.settle, _stream._RowChunk.step

    def begin(self: Any, *args: Any) -> None:
        begun(self, *args)
        alive.add(self)

    def settle(self: Any) -> None:
        settled(self)
        alive.discard(self)

    def apply(self: Any, token: Any) -> None:
        seen.append(sum(chunk.nbytes for chunk in alive))
        step(self, token)

    with (
        Pool(tmp_path / "pool") as pool,
        mock.patch.multiple(_stream._RowChunk, __init__=begin, settle=settle, step=apply),
    ):
        update = _update(rule, homes, pool, 600, None)
        stream(update, UpdatedLeaves())
    assert len(seen) > 6 and not alive
    assert max(seen) <= 3 * 600, seen


def test_rows_are_views_and_shapes() -> None:
    x = torch.arange(12).view(4, 3)
    assert LeafRows(0).of(x) is x and LeafRows(0).shape(x.shape) == (4, 3)
    part = LeafRows(0, 1, 3)
    assert torch.equal(part.of(x), x[1:3]) and part.of(x).data_ptr() == x[1].data_ptr()
    assert part.shape(x.shape) == (2, 3)


def test_rules_may_return_other_tensors() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    _stream._keep_buffers([x, y], [torch.ones(2), y])
    assert tree_map(torch.Tensor.tolist, [x, y]) == [[1, 1], [1, 1]]
