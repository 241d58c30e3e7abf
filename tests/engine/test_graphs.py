"""Covers the captured programs of one function: the cache, agreement on the program, and errors on all ranks."""

import gc
import linecache
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.capture import capture
from shardfn.core import Mesh
from shardfn.engine import Graphs, signature
from shardfn.engine.agreement._agreement import Comms
from shardfn.engine.execution._graphs import agreed
from shardfn.engine.execution._program import CapturedProgram
from shardfn.engine.loss._jitted import GraphCache, Jitted, argument_shapes
from shardfn.graph import Events

from .fakes import ScriptedRounds, Wire, plan_of

MESH = Mesh({"dp": 2}, torch.device("cpu"), abstract=True)
SAME = Events([], [])


class Peer(ScriptedRounds):
    """Rounds with a rank that has the same, but in the exchanges that `differs` numbers."""

    def __init__(self, **differs: tuple[str, Events | None]) -> None:
        super().__init__()
        self.differs = {int(name.removeprefix("at_")): told for name, told in differs.items()}
        self.exchanges, self.told = 0, None
        self.last: Any = None

    def exchange(self, value: int, kind: Any = None, timeout: Any = None) -> list[int]:
        del kind, timeout
        self.told = self.differs.get(self.exchanges)
        self.exchanges += 1
        return [value, value if self.told is None else value ^ 1]

    def gather(self, value: Any) -> list[Any]:
        told, self.told = self.told, None
        self.last = value if told is None else told
        return [value, self.last]

    def agree(self, what: str, text: str) -> None:
        if text != self.last[0]:
            raise sf.RankError(f"ranks disagree on {what}: {text}")


def _comms(peer: Peer) -> Comms:
    return Comms(MESH, Wire(), peer)  # pyright: ignore[reportArgumentType]  # the rounds of a control plane suffice


class Case:
    """The graphs of `x -> (x + 1,)`."""

    def __init__(self, peer: Peer | None = None, **options: Any) -> None:
        self.jitted = Jitted(torch.neg, backend="graph", check_types=False, **options)
        self.graphs, self.peer, self.captured = Graphs(self.jitted), peer or Peer(), 0

    def capture(self) -> CapturedProgram:
        self.captured += 1
        gm = capture(lambda x: [x + 1], [torch.zeros(3)])
        gm.meta |= {"mesh_shape": {}, "coords": {}, "groups": {}}
        return CapturedProgram(gm, "a tensor")

    def ready(
        self, *, everywhere: bool = False, make: Callable[[], CapturedProgram] | None = None, rows: int = 3
    ) -> Any:
        key, batch = ("plan", rows), {"x": torch.zeros(rows)}
        return self.graphs.ready(_comms(self.peer), key, make or self.capture, "add", batch, everywhere=everywhere)

    def call(self, rows: int) -> Any:
        return self.ready(everywhere=self.graphs.knows(("plan", rows)), rows=rows)


def test_a_signature_is_captured_once_and_found_again() -> None:
    case = Case()
    assert not case.graphs.knows(("plan", 3))
    first = case.ready()
    assert case.graphs.knows(("plan", 3)) and not case.graphs.knows(("plan", 4))
    (out,) = first(_comms(case.peer), None, [torch.zeros(3)])
    assert torch.equal(out, torch.ones(3))
    sent = case.peer.exchanges
    assert case.ready(everywhere=True) is first
    assert (case.captured, case.peer.exchanges) == (1, sent)
    info = case.graphs.cache_info()
    assert (info.hits, info.misses, info.currsize) == (1, 1, 1)
    assert case.jitted.cache_info().misses == 0  # two steps around one function count apart


@pytest.mark.nightly
def test_where_one_rank_lacks_the_graph_all_capture_it() -> None:
    case = Case()
    first = case.ready()
    assert case.ready(everywhere=False) is not first
    assert case.captured == 2 and case.graphs.cache_info().currsize == 1


def _kept(cache: GraphCache[str], keys: str) -> str:
    return "".join(key for key in keys if key in cache)


def test_the_least_recently_used_graph_is_evicted() -> None:
    cache = GraphCache[str](2)
    for key in "ab":
        cache.keep(key, key.upper(), "f", {})
    assert "a" in cache and cache.find("a") == "A" and cache.find("z") is None
    cache.keep("c", "C", "f", {})
    assert _kept(cache, "abc") == "ac" and len(cache) == 2
    # To ask whether a graph is there is no use of it.
    assert "a" in cache
    cache.keep("d", "D", "f", {})
    assert _kept(cache, "abcd") == "cd"
    # A graph that is made again, as another rank has no graph, takes the place of the old one, and is used.
    cache.keep("c", "new", "f", {})
    assert cache.counts.evictions == 2 and cache.find("d") == "D" and cache.find("c") == "new"
    cache.keep("e", "E", "f", {})
    assert _kept(cache, "cde") == "ce"
    assert vars(cache.counts) | {"hits": 3, "evictions": 3} == vars(cache.counts)


@pytest.mark.nightly
def test_calls_count_hits_misses_and_evictions_and_keep_the_order_of_use() -> None:
    case = Case(max_graphs=2)
    for rows in (2, 3, 2, 4, 2, 3):  # 4 evicts 3, 3 evicts 4
        case.call(rows)
    info = case.graphs.cache_info()
    assert (info.hits, info.misses, info.currsize, info.evictions, info.maxsize) == (2, 4, 2, 2, 2)
    assert [case.graphs.knows(("plan", rows)) for rows in (2, 3, 4)] == [True, True, False]


@pytest.mark.nightly
def test_an_evicted_graph_is_freed_with_its_code() -> None:
    case = Case(max_graphs=1)
    first = case.call(2)
    held = [weakref.ref(x) for x in (first.program, first.program.gm, first.run, first.run.function)]
    file = first.run.function.__code__.co_filename
    del first
    gc.collect()
    assert all(x() is not None for x in held) and file in linecache.cache
    case.call(3)
    gc.collect()
    assert [x() for x in held] == [None] * 4 and file not in linecache.cache


@pytest.mark.nightly
def test_an_evicted_graph_of_a_function_alone_is_freed() -> None:
    held: list[weakref.ref[Any]] = []

    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    f = sf.jit(scaled, backend="graph", max_graphs=1)
    for by in (2.0, 3.0):
        assert torch.equal(f(torch.ones(2), by), torch.full((2,), by))
        held += [weakref.ref(x[0].function) for x in [kept.made for kept in f.graphs._entries.values()]]
        gc.collect()
    assert held[0]() is None and held[1]() is not None
    info = f.cache_info()
    assert (info.hits, info.misses, info.currsize, info.evictions, info.maxsize) == (0, 2, 1, 1, 1)


@pytest.mark.nightly
def test_more_evictions_than_graphs_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(max_graphs=2)
    with caplog.at_level(logging.WARNING, "shardfn.jit"):
        for rows in (2, 3, 4, 2):
            case.call(rows)
        assert not [r for r in caplog.records if "evicted" in r.message]
        for rows in (3, 4, 2, 3):
            case.call(rows)
    (record,) = [r for r in caplog.records if "evicted" in r.message]
    assert "3 graphs were evicted, more than max_graphs=2 keeps" in record.message
    assert "Graphs of add; these arguments change: batch['x'] is (4,), (2,), (3,)" in record.message
    assert "jit(max_graphs=)" in record.message
    # Numbered by captures, evicted graphs included.
    assert caplog.records[-1].message.endswith("graph number 8")


def test_the_report_of_evictions_names_values_and_programs() -> None:
    x = torch.ones(2, 3)
    assert argument_shapes(({"x": x, "n": 4},), "args") == {"args[0]['n']": "4", "args[0]['x']": "(2, 3)"}


@pytest.mark.parametrize("key", ["same", "other"])
def test_the_report_of_evictions_without_a_changing_shape(key: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = GraphCache[int](1)
    for n in range(4):
        cache.keep((key, n), n, "a step" if key == "same" or n % 2 else "the update of a step", {"x": "(2,)"})
    (record,) = caplog.records
    assert "all shapes are equal, so dtypes, strides" in record.message
    assert ("Graphs of a step;" if key == "same" else "Graphs of the update of a step and a step;") in (
        record.message.replace("a step and the update of a step", "the update of a step and a step")
    )


@pytest.mark.parametrize(
    ("num", "kind", "says"),
    [
        (0, ValueError, r"jit\(max_graphs=0\).*an int of at least 1, or leave it out for 64"),
        (-3, ValueError, r"jit\(max_graphs=-3\).*an int of at least 1"),
        (True, TypeError, r"jit\(max_graphs=True\): a bool is not a size; pass how many"),
        (None, TypeError, r"jit\(max_graphs=None\): a NoneType is not a size"),
        (2.0, TypeError, r"jit\(max_graphs=2.0\): a float is not a size"),
    ],
)
def test_a_bad_number_of_graphs_is_refused(num: Any, kind: type[Exception], says: str) -> None:
    with sys.modules["shape_checks"].unchecked(), pytest.raises(kind, match=says):
        sf.jit(torch.neg, max_graphs=num)


def _fails() -> CapturedProgram:
    raise KeyError("no such leaf")


def test_a_rank_that_fails_raises_its_own_error_after_it_has_taken_part() -> None:
    case = Case()
    with pytest.raises(KeyError, match="no such leaf"):
        case.ready(make=_fails)
    assert case.peer.exchanges == 1 and not case.graphs.knows(("plan", 3))


@pytest.mark.parametrize(
    "at",
    [0, pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly)],
    ids=["capture", "types", "compilation"],
)
def test_a_failure_of_another_rank_is_an_error_here_and_leaves_no_graph(at: int) -> None:
    case = Case(Peer(**{f"at_{at}": ("KeyError: 'no such leaf'", None)}))
    with pytest.raises(sf.RankError, match=r"another rank could not capture or compile .*\n.*rank 1 failed: KeyError"):
        case.ready()
    assert not case.graphs.knows(("plan", 3))


@pytest.mark.day("collectives")
@pytest.mark.parametrize(
    ("told", "says"),
    [
        (("two tensors", SAME), "disagree on the result of the loss: a tensor"),
        (("a tensor", Events(["gather dp: all_gather float32 [3, 3]"], [])), "collective 1 on channel 'gather dp'"),
    ],
    ids=["results", "collectives"],
)
def test_ranks_whose_programs_differ_are_refused(told: tuple[str, Events], says: str) -> None:
    with pytest.raises(sf.RankError, match=says):
        Case(Peer(at_0=told)).ready()


def test_agreement_sends_one_number_where_programs_are_the_same() -> None:
    peer = Peer()
    assert agreed(_comms(peer), lambda: 7, lambda made: (str(made), SAME)) == 7
    assert peer.exchanges == 1


def test_a_program_is_lowered_without_a_word_to_other_ranks() -> None:
    case = Case()
    program, schedule = case.graphs.lower(case.capture)
    assert isinstance(program, CapturedProgram) and schedule == case.jitted.schedule and case.peer.exchanges == 0
    ready = case.graphs.compile(program, None, _comms(case.peer))
    assert torch.equal(ready(_comms(case.peer), None, [torch.zeros(3)])[0], torch.ones(3))


def test_a_program_of_no_use_is_refused_by_facts_that_all_ranks_have() -> None:
    class Useless(CapturedProgram):
        def check(self, exchange: Callable[[int], Sequence[int]]) -> None:
            raise ValueError(f"useless on {exchange(5)}")

    case = Case()
    with pytest.raises(ValueError, match=r"useless on \[5, 5\]"):
        case.ready(make=lambda: Useless(**vars(case.capture())))


def test_a_signature_has_every_fact_that_a_graph_relies_on() -> None:
    plan, _, _ = plan_of({"a": (4, 3)}, sf.Zero(0))
    other, _, _ = plan_of({"a": (4, 3)}, sf.Zero(0))

    def of(x: Tensor, on: Any = plan) -> Any:
        return signature(on, {"x": x})

    x = torch.zeros(3, 3)
    assert of(x) == of(torch.ones(3, 3))
    different = [of(torch.zeros(3, 2)), of(x.t()[:, :2]), of(x.double()), of(x[:2]), of(x, other)]
    assert of(x.t()) == of(x.t().clone(memory_format=torch.preserve_format))
    assert of(x.t()) != of(x) and all(key != of(x) for key in different)
    with torch.autocast("cpu", torch.bfloat16):
        assert of(x) != signature(plan, {"x": torch.zeros(3, 3, dtype=torch.float64)})
        inside = of(x)
    assert inside != of(x)
