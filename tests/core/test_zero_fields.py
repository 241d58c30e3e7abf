"""Covers `Zero` and its parts: defaults, errors, values that are copied and compared."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

import shardfn as sf

DISK = sf.Disk("/nowhere", checksum=True)
RULES = [
    sf.Zero(),
    sf.Zero(3, ("node", "gpu"), travel=sf.Travel(gather="int8", secondary_axis="gpu", reduce="int4", block_elements=4)),
    sf.Zero(1, optimizer="disk", optimizer_fraction=0.5, disk=DISK, pace=sf.Pace(accumulate="once", chunk_bytes=1)),
]


@pytest.mark.parametrize(
    "zero", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(RULES)]
)
def test_a_rule_is_a_value(zero: sf.Zero) -> None:
    for same in (
        dataclasses.replace(zero),
        pickle.loads(pickle.dumps(zero)),
        copy.deepcopy(zero),
        sf.Zero.flat(**zero.as_flat()),
        eval(repr(zero), {"Zero": sf.Zero, "Travel": sf.Travel, "Pace": sf.Pace, "Disk": sf.Disk}),
    ):
        assert same == zero and hash(same) == hash(zero) and repr(same) == repr(zero)
    other = dataclasses.replace(zero, persist_elements=1)
    assert other != zero and other.travel == zero.travel and other.disk == zero.disk


def test_flat_fields_are_all_fields() -> None:
    rule = RULES[-1].as_flat()
    parts = [f.name for part in (sf.Travel, sf.Pace, sf.Disk) for f in dataclasses.fields(part)]
    own = [f.name for f in dataclasses.fields(sf.Zero) if f.name not in ("travel", "pace", "disk")]
    assert sorted(rule) == sorted(own + parts) and len(set(rule)) == 20
    assert rule["directory"] == "/nowhere" and rule["accumulate"] == "once" and rule["chunk_bytes"] == 1
    assert "directory" not in sf.Zero().as_flat() and sf.Zero.flat(directory=None, checksum=False).disk is None
    with pytest.raises(TypeError, match=r"no field 'prefetch_byte'\. Did you mean 'prefetch_bytes'"):
        sf.Zero.flat(prefetch_byte=0)


def test_flat_fields_change_the_parts_that_are_given() -> None:
    changed = sf.Zero.flat(**RULES[-1].as_flat() | {"prefetch_bytes": 7})
    assert changed.pace == sf.Pace(7, "once", 1) and changed.disk == DISK
    with pytest.raises(ValueError, match=r"checksum=True\) has no effect without a dir"):
        sf.Zero.flat(checksum=True)
    assert not hasattr(sf.Zero(), "prefetched")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sf.Zero(4), "stages are 0, 1, 2 and 3"),
        pytest.param(
            lambda: sf.Zero(persist_elements=-1),
            r"Zero\(persist_elements=-1\): must not be negative",
            marks=pytest.mark.nightly,
        ),
        pytest.param(lambda: sf.Zero(params="hots"), "Did you mean 'host'", marks=pytest.mark.nightly),  # pyright: ignore[reportArgumentType]
        (lambda: sf.Zero(optimizer="host", optimizer_fraction=2), "a fraction lies between"),
        pytest.param(
            lambda: sf.Zero(optimizer_fraction=0.5),
            r"optimizer_fraction=0.5\) has no effect with optimizer='device'",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: sf.Zero(3, params="disk"), r"Name the directory: Zero\(disk=Disk\(", marks=pytest.mark.nightly
        ),
        (
            lambda: sf.Zero(2, travel=sf.Travel(gather="int8")),
            r"Travel\(gather='int8'\)\): gather would have no effect",
        ),
        pytest.param(
            lambda: sf.Zero(3, travel=sf.Travel(secondary_axis="dp")),
            "because it names all axes",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: sf.Zero(3, travel=sf.Travel(secondary_axis="dpp")), "Did you mean 'dp'", marks=pytest.mark.nightly
        ),
        (lambda: sf.Travel(gather="int9"), r"Travel\(gather='int9'\).*Did you mean 'int8'"),
        pytest.param(lambda: sf.Travel(reduce="once"), r"pass Pace\(accumulate='once'\)", marks=pytest.mark.nightly),
        pytest.param(lambda: sf.Travel(block_elements=64), "no option quantises", marks=pytest.mark.nightly),
        (lambda: sf.Travel(reduce="int4", block_elements=3), "even and at least 2"),
        pytest.param(
            lambda: sf.Travel(bucket_bytes=-1),
            r"Travel\(bucket_bytes=-1\): must not be negative",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: sf.Pace(prefetch_bytes=-1),
            r"Pace\(prefetch_bytes=-1\): must not be negative",
            marks=pytest.mark.nightly,
        ),
        (lambda: sf.Pace(accumulate="eech"), "Did you mean 'each'"),
        pytest.param(
            lambda: sf.Pace(chunk_bytes=0), r"Pace\(chunk_bytes=0\): must be positive", marks=pytest.mark.nightly
        ),
    ],
)
def test_fields_out_of_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_fields_at_the_wrong_place_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prefetch_bytes": 0}, r"write Zero\(pace=Pace\(prefetch_bytes=0\)\)"),
        ({"prefetch": 0}, "no field 'prefetch'. Did you mean 'prefetch_bytes'"),
        ({"travel": "int8"}, r"Zero\(travel='int8'\): must be a Travel"),
    ]
    for fields, words in cases:
        with pytest.raises(TypeError, match=words):
            sf.Zero(**fields)
