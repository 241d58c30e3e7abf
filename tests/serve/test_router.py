"""Covers the choice of a replica: prefixes, loads, turns, and its independence of everything else."""

import random

import pytest

from shardfn.inference import PrefixScope, list_prefix_keys
from shardfn.serve._router import PrefixTable, choose_replica

SCOPE = PrefixScope(0, b"", "float32", b"")


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_within_its_bound(seed: int) -> None:
    """Only replicas that are up and near the least load are chosen, and among them one with the most hits."""
    draw = random.Random(seed)
    num, slack = draw.randint(1, 5), draw.choice([0, 10, 1000])
    hits = [draw.choice([None, 0, 1, 2, 7]) for _ in range(num)]
    loads = [draw.randrange(2000) for _ in range(num)]
    at = choose_replica(hits, loads, seed, slack=slack)
    assert at == choose_replica(list(hits), list(loads), seed, slack=slack)
    if at is None:
        assert hits == [None] * num
        return
    least = min(load for load, found in zip(loads, hits, strict=True) if found is not None)
    found = hits[at]
    assert found is not None and loads[at] <= least + slack
    for other, load in zip(hits, loads, strict=True):
        if other is not None and load <= least + slack:
            assert found > other or (found == other and loads[at] <= load)


def test_equal_replicas_have_turns() -> None:
    chosen = [choose_replica([0, 0, 0], [5, 5, 5], arrival) for arrival in range(30)]
    assert [chosen.count(i) for i in range(3)] == [10, 10, 10]
    assert {choose_replica([0, None, 0], [5, 5, 5], arrival) for arrival in range(30)} == {0, 2}


def test_shared_prefixes_stay_on_a_replica() -> None:
    """24 prefixes of 128 tokens with 20 requests each: hits are at least 0.95 of the hits of a single replica."""
    draw = random.Random(0)
    prefixes = [[draw.randrange(1000) for _ in range(128)] for _ in range(24)]
    order = [i for i in range(24) for _ in range(20)]
    draw.shuffle(order)
    prompts = [[*prefixes[i], *(draw.randrange(1000) for _ in range(20))] for i in order]

    def count_hits(replicas: int) -> tuple[int, list[int]]:
        tables, total = [PrefixTable(2000) for _ in range(replicas)], 0
        loads, work = [0] * replicas, [0] * replicas
        for arrival, prompt in enumerate(prompts):
            keys = list_prefix_keys(prompt, 16, SCOPE)
            hits = [table.count_hits(keys) for table in tables]
            at = choose_replica(list(hits), loads, arrival)
            assert at is not None
            tables[at].record(keys)
            total += hits[at]
            loads = [load * 9 // 10 for load in loads]  # work is done in between
            loads[at] += len(prompt)
            work[at] += 1
        return total, work

    (alone, _), (together, work) = count_hits(1), count_hits(2)
    assert together >= 0.95 * alone and min(work) >= 0.35 * len(prompts)


def test_salts_and_adapters_share_no_prefix() -> None:
    tokens = list(range(64))
    table = PrefixTable(100)
    table.record(list_prefix_keys(tokens, 16, SCOPE))
    assert table.count_hits(list_prefix_keys(tokens, 16, SCOPE)) == 4
    for other in (SCOPE._replace(salt=b"s"), SCOPE._replace(adapter=b"a")):
        assert table.count_hits(list_prefix_keys(tokens, 16, other)) == 0
