"""Covers the choice of a schedule by the cost model: slow and fast links, little memory, and when nothing fits."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn.graph import Choice, Cluster, Device, Link, Schedule, check_fits, choose, estimate, memory_analysis

S = torch.ops.shardfn
N, LAYERS = 64, 6
LEAF = 4 * N * N  # bytes of a gathered layer
FAST, SLOW = Link(1e12, 0.0), Link(LEAF / 2 / 0.04, 0.0)


def _step(ranks: int = 2, leaves: int = LAYERS) -> GraphModule:
    """Layers whose weights are gathered one by one, and a backward that gathers and reduces them again.

    Every third layer computes for as long as all three travel, so that one gather ahead is too little.
    """
    own = N * N // ranks

    def gathered(x: Tensor) -> Tensor:
        return S.wait(S.all_gather_start(x, [own] * ranks, "dp")).view(N, N)

    def f(x: Tensor, *blocks: Tensor) -> tuple[Tensor, ...]:
        acts = [x]
        for i, b in enumerate(blocks):
            acts.append(torch.tanh(_heavy(acts[-1], x, 0 if i % 3 else 4) @ gathered(b)))
        grad, sums = acts[-1] * 2, []
        for b, given, y in reversed(list(zip(blocks, acts, acts[1:], strict=False))):
            grad = grad * (1 - y * y)
            sums.append(S.wait(S.psum_scatter_start((given.t() @ grad).view(-1), [own] * ranks, 0, "dp")))
            grad = grad @ gathered(b).t()
        return (*sums,)

    gm = make_fx(f, tracing_mode="fake")(torch.ones(2 * N, N), *(torch.ones(own) for _ in range(leaves)))
    gm.meta["mesh_shape"] = {"dp": ranks}
    backward = False
    for node in gm.graph.nodes:
        backward = backward or node.name == "mul"
        node.meta["phase"] = "backward" if backward else "forward"
    return gm


def _heavy(y: Tensor, x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        y = x @ (x.t() @ y)
    return y


def _box(link: Link, memory: int = 1 << 30) -> Cluster:
    return Cluster(Device("box", memory, {"float32": 1e8}, 1e9), 1, link, link)


def _holds(gm: GraphModule, cluster: Cluster, choice: Choice) -> None:
    """The choice has the seconds and the peak of the analyses, and no fitting candidate is faster."""
    out = choice.schedule(gm)
    assert (choice.seconds, choice.peak) == (estimate(out, cluster).seconds, memory_analysis(out).peak)
    fitting = [s for s in choice.table if s.peak <= choice.memory]
    assert choice.seconds <= 1.001 * min(s.seconds for s in fitting)
    check_fits(out, choice.memory)


@pytest.mark.nightly
def test_a_slow_link_is_prefetched_for_and_a_fast_one_is_not() -> None:
    gm = _step()
    before = str(gm.graph)
    slow, fast = _box(SLOW), _box(FAST)
    one, other = choose(gm, slow), choose(gm, fast)
    _holds(gm, slow, one)
    _holds(gm, fast, other)
    none = estimate(Schedule(prefetch=None, bucket=None, reductions=None)(gm), slow).seconds
    assert one.seconds < 0.6 * none
    assert one.schedule.prefetch == 4 * LEAF  # three layers ahead
    # Where transfers take no time all are as fast, and the leanest is taken.
    assert other.schedule.prefetch == 0
    assert other.peak == min(s.peak for s in other.table) < one.peak
    assert str(gm.graph) == before
    assert choose(gm, slow) == one
    assert choose(_step(), slow) == one
    assert str(one).count("*") == 1


@pytest.mark.nightly
def test_latency_is_met_by_larger_messages() -> None:
    gm, late = _step(), _box(Link(1e8, 0.1))
    choice = choose(gm, late)
    _holds(gm, late, choice)
    assert choice.schedule.bucket is not None and choice.schedule.bucket > LEAF
    kept = choose(gm, late, given={"bucket": 0})
    assert {s.schedule.bucket for s in kept.table} == {0}
    assert kept.seconds > choice.seconds


@pytest.mark.nightly
def test_little_memory_takes_a_smaller_window_then_computes_again_then_fails() -> None:
    gm, slow = _step(), _box(SLOW)
    free = choose(gm, slow)
    smaller = choose(gm, slow, memory=free.peak - 1)
    _holds(gm, slow, smaller)
    assert smaller.seconds > free.seconds and smaller.peak < free.peak
    assert (smaller.schedule.prefetch or 0) < (free.schedule.prefetch or 0)
    assert "does not fit" in str(smaller)
    assert choose(gm, _box(slow.inside, free.peak - 1)).table == smaller.table

    least = min(s.peak for s in free.table)
    again = choose(gm, slow, memory=least - 2 * LEAF)
    _holds(gm, slow, again)
    assert again.schedule.budget is not None

    with pytest.raises(
        ValueError, match=r"none of \d+ schedules fits: the smallest peak found is .* MiB \(.*holds?"
    ) as error:
        choose(gm, slow, memory=4 * LEAF)
    assert all(word in str(error.value) for word in ("remat", "Zero(stage=)", "more ranks", "budget=", "0.06 MiB"))
    with pytest.raises(ValueError, match="none of"):  # the budget is given, so no other is tried
        choose(gm, slow, memory=least - 2 * LEAF, given={"budget": 1 << 30})
    with pytest.raises(ValueError, match="the schedule does not fit"):
        check_fits(free.schedule(gm), free.peak - 1)


def test_ties_go_to_the_first_and_a_program_that_sends_nothing_has_one_schedule() -> None:
    gm, box = _step(), _box(FAST)
    one = Schedule(prefetch=0)
    choice = choose(gm, box, candidates=[one, dataclasses.replace(one, reuse=0)])
    assert choice.schedule is one and len(choice.table) == 2
    assert len(choose(_step(ranks=1), box).table) == 1
    with pytest.raises(ValueError, match="expected a schedule to choose from, got none"):
        choose(gm, box, candidates=[])
