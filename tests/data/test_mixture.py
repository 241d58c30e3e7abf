"""Covers shardfn/data/_mixture.py and batch ramps: rows by weights on any ranks, positions, and mistakes by name."""

import json
import pathlib
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from shardfn.data import (
    Batches,
    BatchRamp,
    ByteTokenizer,
    Cursor,
    ExampleBatches,
    JSONLines,
    Mixture,
    encode_files,
    pad,
)
from shardfn.data._mixture import BLOCK

A = [[i] for i in range(100, 107)]
B = [[i] for i in range(200, 203)]
C = [[300]]


def rows(mixture: Mixture, count: int, first: int = 0) -> list[int]:
    return [mixture[g][0] for g in range(first, first + count)]


def test_a_mixture_of_one_source_is_that_source() -> None:
    mixture, alone = Mixture({"a": A}, seed=3), ExampleBatches(A, 5, pad(), seed=3)
    batches = mixture.batches(5, pad())
    assert all(torch.equal(batches(n)["tokens"], alone(n)["tokens"]) for n in (0, 1, 2, 7, BLOCK // 5, BLOCK))


def test_counts_are_exact_in_each_block_and_epochs_visit_every_example_once() -> None:
    mixture = Mixture({"a": A, "b": B, "c": C}, weights={"a": 5, "b": 2, "c": 1}, seed=1)
    assert mixture.counts(BLOCK) == {"a": 40960, "b": 16384, "c": 8192}
    assert mixture.counts(3 * BLOCK) == {name: 3 * n for name, n in mixture.counts(BLOCK).items()}
    for first, count in ((0, 1000), (BLOCK - 300, 700)):
        found = Counter(v // 100 for v in rows(mixture, count, first))
        known, before = mixture.counts(first + count), mixture.counts(first)
        assert [found[i] for i in (1, 2, 3)] == [known[name] - before[name] for name in ("a", "b", "c")]
    own = [v for v in rows(mixture, 4000) if v // 100 == 1]
    assert all(sorted(own[i : i + 7]) == list(range(100, 107)) for i in range(0, len(own) - 7, 7))
    assert abs(mixture.counts(4000)["a"] - 2500) < 130  # 4 deviations of a draw with probability 5 / 8


def test_counts_of_weights_that_divide_no_block_sum_to_it() -> None:
    mixture = Mixture({"a": A, "b": B, "c": C}, weights={"a": 1, "b": 1, "c": 1})
    assert sorted(mixture.counts(BLOCK).values()) == [21845, 21845, 21846]
    assert sum(mixture.counts(12345).values()) == 12345


@pytest.mark.parametrize(("temperature", "shares"), [(None, (7, 3, 1)), (1.0, (7, 3, 1)), (2.0, (7**0.5, 3**0.5, 1))])
def test_a_temperature_weighs_sources_by_their_sizes(temperature: float | None, shares: tuple[float, ...]) -> None:
    found = Mixture({"a": A, "b": B, "c": C}, temperature=temperature).shares
    assert np.allclose([*found.values()], np.array(shares) / sum(shares), rtol=1e-15)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_concatenate_to_the_global_batch(world: int) -> None:
    batches = Mixture({"a": A, "b": B}, weights={"a": 1, "b": 3}).batches(7, pad())
    for n in (0, 3, BLOCK // 7):
        parts = [batches(n, rank=r, world=world)["tokens"] for r in range(world)]
        assert torch.equal(torch.cat(parts), batches(n)["tokens"])


def test_a_cursor_goes_on_on_other_ranks_and_names_the_source_that_changed() -> None:
    def mixture(examples: Any = B, **weights: float) -> ExampleBatches:
        return Mixture({"a": A, "b": examples}, weights={"a": 1, "b": 3} | weights, seed=5).batches(4, pad())

    whole = [batch["tokens"].tolist() for batch in Cursor(mixture(), stop=6)]
    cursor = Cursor(mixture(), stop=6)
    assert [next(cursor)["tokens"].tolist() for _ in range(2)] == whole[:2]
    state = json.loads(json.dumps(cursor.state()))
    assert [batch["tokens"].tolist() for batch in Cursor(mixture(), stop=6).at(state)] == whole[2:]
    for other, text in (
        (mixture([*B, [203]]), "b: examples must be 3, as in the saved position, got 4"),
        (mixture([[200], [201], [209]]), "b: digest must be .*, as in the saved position"),
        (mixture(b=1.0), "b: rows of 65536 must be 49152, as in the saved position, got 32768"),
    ):
        with pytest.raises(ValueError, match=rf"(?s)this position in the data is of other batches.*{text}"):
            Cursor(other, stop=6).at(state)
    less = Mixture({"a": A}, seed=5).batches(4, pad())
    with pytest.raises(ValueError, match=r"sources must be \['a', 'b'\], as in the saved position, got \['a'\]"):
        Cursor(less, stop=6).at(state)


def test_windows_of_token_files_are_mixed(tmp_path: pathlib.Path) -> None:
    def source(name: str, text: str) -> Batches:
        (tmp_path / name).write_text(text)
        return Batches(encode_files([tmp_path / name], tmp_path / f"{name}.bin", ByteTokenizer()), 1, length=9)

    mixture = Mixture({"a": source("a", "a" * 91), "b": source("b", "b" * 46)}, weights={"a": 1, "b": 1})
    tokens = torch.stack([mixture[g]["tokens"] for g in range(64)])
    assert tokens.shape == (64, 10) and {*map(len, map(set, tokens.tolist()))} == {1}
    found = Counter(ByteTokenizer().decode([v]) for v in tokens[:, 0].tolist())
    assert found == {"a": mixture.counts(64)["a"], "b": mixture.counts(64)["b"]}


def test_files_of_lines_have_a_fingerprint_by_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n')
    lines = JSONLines(tmp_path / "a.jsonl", lambda row: row["tokens"])
    found = Mixture({"a": lines, "b": B}).batches(2, pad()).fingerprint
    assert found["sources"] == ["a", "b"] and found["a: examples"] == 1 and isinstance(found["a: digest"], str)


@pytest.mark.parametrize(
    ("sources", "options", "texts"),
    [
        ({}, {}, ["at least one source"]),
        ({"a": A, "b": []}, {}, ["source 'b' must have at least one example, got 0"]),
        ({"a": A, "b": B}, {"weights": {"a": -1.0, "b": float("nan")}}, ["'a' must be above 0.*got -1.0", "'b'.*nan"]),
        ({"a": A, "b": B}, {"weights": {"a": 0, "b": 1}}, ["'a' must be above 0 and finite, got 0"]),
        (
            {"a": A, "b": B},
            {"weights": {"a": 1, "d": 1}},
            ["source 'b' must have a weight", "'d' must belong to"],
        ),
        ({"a": A, "b": B}, {"weights": {"a": 1, "b": 1e-9}}, ["'b' must give at least 1 of 65,536 rows, got 1e-09"]),
        ({"a": A}, {"temperature": 0.0}, ["temperature must be above 0 and finite, got 0.0"]),
        ({"a": A}, {"temperature": 2.0, "weights": {"a": 1}}, ["exclude each other"]),
    ],
    ids=str,
)
def test_mistakes_are_named(sources: Any, options: Any, texts: list[str]) -> None:
    with pytest.raises(ValueError, match="(?s)^Mixture:.*" + ".*".join(texts)):
        Mixture(sources, **options)


def test_an_order_of_an_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed must be None for an endless dataset.*got 0. Use Mixture.batches"):
        ExampleBatches(Mixture({"a": A}), 4, pad())


def test_a_ramp_has_the_sizes_of_megatron_and_loses_no_row() -> None:
    ramp = BatchRamp(start=2, increment=3, rows=50)
    batches = ExampleBatches(A, 11, pad(), seed=2, ramp=ramp)
    sizes = [len(batches(n)["tokens"]) for n in range(18)]
    consumed = 0
    for size in sizes:  # Megatron: whole increments of rows that are consumed
        assert size == min(2 + 3 * (consumed * 3 // 50), 11)
        consumed += size
    flat = ExampleBatches(A, 1, pad(), seed=2)
    whole = list(chain(*(batches(n)["tokens"].flatten().tolist() for n in range(18))))
    assert whole == [flat(g)["tokens"].item() for g in range(consumed)] and sizes[-1] == 11
    parts = [batches(5, rank=r, world=3)["tokens"] for r in range(3)]
    assert torch.equal(torch.cat(parts), batches(5)["tokens"])


def test_a_position_in_a_ramp_needs_the_ramp() -> None:
    def cursor(ramp: BatchRamp | None) -> Cursor:
        return Cursor(ExampleBatches(A, 6, pad(), ramp=ramp), stop=9)

    state = json.loads(json.dumps(cursor(BatchRamp(2, 2, 20)).state()))
    cursor(BatchRamp(2, 2, 20)).at(state)
    with pytest.raises(ValueError, match=r"ramp must be \[2, 2, 20\], as in the saved position, got \[2, 2, 30\]"):
        cursor(BatchRamp(2, 2, 30)).at(state)
    with pytest.raises(ValueError, match=r"ramp must be \[2, 2, 20\], as in the saved position, got None"):
        cursor(None).at(state)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: BatchRamp(0, -1, 5), r"(?s)start must be at least 1, got 0.*increment must be at least 1, got -1"),
        (lambda: ExampleBatches(A, 7, pad(), ramp=BatchRamp(2, 2, 5)), "multiple of increment.*got batch_size=7"),
        (lambda: ExampleBatches(A, 4, pad(), ramp=BatchRamp(6, 2, 5)), "not negative, got batch_size=4, start=6"),
    ],
)
def test_ramps_that_do_not_end_at_the_batch_size_are_refused(made: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made()
