"""Proposals of forms: of small programs nearly the cheapest there is, by trying all; equal layers count as they do."""

import itertools
import random

import pytest
import torch

from shardfn.capture import capture
from shardfn.engine import HeldBytes, Proposer, prepare
from shardfn.graph._forms import WHOLE, cut

from .test_partition_search import SIZE, drawn_loss


def proposer(loss, shapes, num=2, **options):
    inputs = [torch.empty(s, device="meta").requires_grad_() for s in shapes]
    graph = prepare(capture(loss, inputs, differentiable=True)).graph
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    kept = {n: HeldBytes(4.0) for n in nodes}
    return Proposer(graph, num, kept, lambda n: True, lambda n: torch.zeros(()), **options), nodes


def cheapest(found, limit):
    """By trying all forms of all leaves."""
    every = itertools.product(*(found._leaf_forms(i) for i in range(len(found._groups))))
    return min(found.proposal(forms).sent for forms in every if found._resident_bytes(forms) <= limit)


@pytest.mark.nightly
@pytest.mark.parametrize("num", [2, 3])
def test_small_programs_get_the_cheapest_forms(num):
    cut = 0
    for seed in range(6):
        found, _ = proposer(drawn_loss(random.Random(seed), 4), [(SIZE, SIZE)] * 4, num)
        for share in (0.6, 0.8):
            limit = share * 4 * 4 * SIZE * SIZE
            best = found.best(limit)
            assert best.held <= limit
            assert best.sent == pytest.approx(cheapest(found, limit), rel=1e-6), (seed, share)
            cut += best.sent > 1
    assert cut, "nothing is sent in any of them, so that this shows nothing"


def layers(*xs):
    h = xs[0] + 1
    for up, down in zip(xs[1::2], xs[2::2], strict=True):
        h = h + (h.softmax(-1) @ up).relu() @ down
    return [h.square().sum()]


@pytest.mark.nightly
def test_equal_layers_are_searched_as_two_at_the_cost_of_all():
    shapes = [(6, 8)] + [(8, 12), (12, 8)] * 7
    short, nodes = proposer(layers, shapes)
    long, all_nodes = proposer(layers, shapes, tied=False)
    assert len(short._scope.nodes) < len(long._scope.nodes) / 2
    assert sorted(map(len, short._groups)) == [1, 7, 7]
    found = short.best(1.2 * short.least_held())
    of_all = dict(zip(all_nodes, (found.forms[n] for n in nodes), strict=True))
    assert found.sent == pytest.approx(long.proposal([of_all[g[0].node] for g in long._groups]).sent, rel=1e-6)
    assert found.sent > 0


@pytest.mark.nightly
def test_work_is_priced_by_the_operations_of_the_rank_with_the_most():
    def loss(x, up, down):
        return [((x + 1) @ up).relu().matmul(down).square().sum()]

    rows, width, inner = 8, 6, 31
    price = 1e-4  # so little that no other plan is better
    shapes = [(rows, width), (width, inner), (inner, width)]
    product = 2 * rows * width * inner

    def work(num, forms):
        free, priced = (proposer(loss, shapes, num, work_price=p) for p in (0.0, price))
        costs = [found.proposal([WHOLE, *forms]).sent for found, _ in (free, priced)]
        return (costs[1] - costs[0]) / price

    # All leaves have gradients here, and each product's backward is one for each operand.
    assert work(2, [WHOLE, WHOLE]) == pytest.approx(6 * product)
    # Two ranks have 16 and 15 of the 31 columns, three have 11, 11 and 9.
    for num, most in ((2, 16), (3, 11)):
        megatron = [cut(1, inner, num), cut(0, inner, num)]
        assert work(num, megatron) == pytest.approx(6 * product * most / inner)
