"""Covers `distill.staged_step`: parity with one device, steps without the teacher, and errors on all ranks."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import distill
from shardfn.models import gpt
from shardfn.nn import cross_entropy_sum
from shardfn.testing import distributed, one_device

NIGHTLY = pytest.mark.nightly
UNTIL = 2
SMALL = gpt.Config(vocab_size=31, num_layers=1, d_model=12, num_heads=2, d_ff=10, max_len=16)
LARGE = gpt.Config(vocab_size=31, num_layers=1, d_model=16, num_heads=4, d_ff=20, max_len=16)
FROZEN = {"student": True, "teacher": False}


def weight(step: torch.Tensor) -> torch.Tensor:
    return 1.0 - step / 4


def params() -> Any:
    made = {"student": gpt.init(SMALL, sf.key(0)), "teacher": gpt.init(LARGE, sf.key(1))}
    draw = torch.Generator().manual_seed(0)
    return sf.core.tree_map(lambda x: x.double() + 0.2 * torch.randn(x.shape, generator=draw), made)


def batches(num: int = 3) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [{"tokens": torch.randint(31, (6, 9), generator=draw)} for _ in range(num)]


def loss(params: Any, batch: Any, *, weight: Any, axis: Any = None, calls: Any = None, teacher: Any = LARGE) -> Any:
    def of_logits(logits: torch.Tensor, shifted: Any) -> Any:
        targets, how = shifted["targets"], {"axis": axis, "vocab_size": 31}
        total, count = cross_entropy_sum(logits, targets, **how)
        if weight is None:
            return sf.WeightedMean(total, count)
        if calls is not None:
            calls.append(1)
        theirs = gpt.apply(teacher, params["teacher"], shifted["tokens"], axis=axis)
        by = distill.logits(logits, theirs, targets, temperature=2.0, **how)
        return sf.WeightedMean(total + weight * by.total, count)

    return gpt.loss(SMALL, params["student"], batch, axis=axis, of_logits=of_logits)


def reference(params: Any, batch: Any, *, step: torch.Tensor) -> Any:
    return loss(params, batch, weight=weight(step) if step < UNTIL else None)


CASES = [
    pytest.param(dp, stage, jit, home, marks=() if (dp, stage, jit) == (2, 3, False) else NIGHTLY)
    for dp in (1, 2)
    for stage, home in ((0, "device"), (1, "device"), (2, "host"), (3, "host"))
    for jit in (False, True)
]


@distributed(world=2)
@pytest.mark.parametrize("dp, stage, jit, home", CASES)
def test_steps_equal_one_device(dp: int, stage: int, jit: bool, home: Any) -> None:
    """Along tp vocabulary, heads and features are cut. The teacher may lie on the host."""
    tx = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.sgd(0.1, momentum=0.9))
    calls: list[int] = []
    with sf.make_mesh({"dp": dp, "tp": 2 // dp}, device="cpu") as mesh:
        theirs = sf.core.tree_map(lambda spec: sf.Sharding(spec, home), gpt.specs(LARGE, tp="tp"))
        steps = distill.staged_step(
            functools.partial(loss, axis="tp", calls=calls),
            tx,
            until=UNTIL,
            weight=weight,
            wrap=functools.partial(sf.jit, backend="graph") if jit else lambda inner: inner,
            mesh=mesh,
            specs={"student": gpt.specs(SMALL, tp="tp"), "teacher": theirs},
            batch=sf.P("dp"),
            zero=sf.Zero(stage=stage, axis="dp", persist_elements=0),
            trainable=FROZEN,
        )
        want = one_device(reference, tx, params(), batches(), trainable=FROZEN, count=True)
        state = steps.init(params())
        for n, batch in enumerate(batches()):
            own = {"tokens": batch["tokens"][steps.at(state).rows(6)]}
            state, metrics = steps(state, own)
            torch.testing.assert_close(metrics["loss"], want.metrics[n]["loss"], rtol=1e-12, atol=0)
        got = sf.unshard(state.params)
        for x, y in zip(sf.core.tree_leaves(got), sf.core.tree_leaves(want.params), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)
        assert len(calls) == (1 if jit else UNTIL) and steps.at(state) is steps.steps[1]


def test_each_part_has_one_graph() -> None:
    def small(p: Any, x: torch.Tensor, *, weight: Any) -> torch.Tensor:
        own = (p["student"] * x).square().mean()
        return own if weight is None else own + weight * (p["student"] - p["teacher"]).square().sum()

    wrap = functools.partial(sf.jit, backend="graph")
    steps = distill.staged_step(small, sf.optim.sgd(0.1), until=3, weight=weight, wrap=wrap, trainable=FROZEN)
    state, losses = steps.init({"student": torch.ones(2), "teacher": torch.zeros(2)}), []
    for _ in range(5):
        state, metrics = steps(state, torch.zeros(2))
        losses.append(float(metrics["loss"]))
    assert losses == pytest.approx([2.0, 1.5 * 0.8**2, 1.0 * (0.8 * 0.85) ** 2, 0.0, 0.0])
    assert [(s.cache_info().misses, s.cache_info().hits) for s in steps.steps] == [(1, 2), (1, 1)]


@distributed(world=2)
def test_steps_without_the_teacher_are_those_of_a_training_without_one(world: int) -> None:
    """Bit for bit, and nothing of the teacher is sent."""
    mesh, sent, ends = sf.make_mesh({"dp": world}), [], []
    alone = sf.Zero.flat(stage=3, persist_elements=0, bucket_bytes=1)  # no leaf shares a message
    options: dict[str, Any] = {"mesh": mesh, "zero": alone}
    steps = distill.staged_step(loss, sf.optim.adamw(1e-2), until=0, trainable=FROZEN, **options)
    own_loss = lambda params, batch: loss({"student": params}, batch, weight=None)  # noqa: E731
    plain = sf.sharded_step(own_loss, sf.optim.adamw(1e-2), **options)
    for step, made in ((steps.steps[1], params()), (plain, params()["student"])):
        state = step.init(made)
        with sf.count_traffic() as traffic:
            for batch in batches(3):
                state, _ = step(state, {"tokens": batch["tokens"][step.rows(6)]})
        sent.append(sum(n for (op, _), (_, n) in traffic.by_op.items() if op == "all_gather"))
        ends.append(sf.unshard(state.params))
    for x, y in zip(sf.core.tree_leaves(ends[0]["student"]), sf.core.tree_leaves(ends[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert sent[0] == sent[1] > 0


@distributed(world=2)
def test_a_teacher_that_learns_and_one_of_another_vocabulary_are_refused(world: int) -> None:
    """On all ranks, before the first step changes anything. A rank's block of 32 classes may be that of 31."""
    mesh = sf.make_mesh({"tp": world})
    specs = {"student": gpt.specs(SMALL, tp="tp"), "teacher": gpt.specs(LARGE, tp="tp")}
    options: dict[str, Any] = {"mesh": mesh, "specs": specs, "batch": sf.P()}
    taught = functools.partial(loss, axis="tp")
    steps = distill.staged_step(taught, sf.optim.sgd(0.1), until=1, **options)
    with pytest.raises(ValueError, match=r"teacher_BTV requires a gradient. Pass sharded_step\(trainable="):
        steps(steps.init(params()), batches(1)[0])
    other = gpt.Config(vocab_size=32, num_layers=1, d_model=12, num_heads=2, d_ff=10, max_len=16)
    options["specs"]["teacher"] = gpt.specs(other, tp="tp")
    taught = functools.partial(taught, teacher=other)
    steps = distill.staged_step(taught, sf.optim.sgd(0.1), until=1, trainable=FROZEN, **options)
    made = params() | {"teacher": sf.core.tree_map(torch.Tensor.double, gpt.init(other, sf.key(0)))}
    with pytest.raises((ValueError, sf.RankError), match="the student has 15 classes and the teacher 16"):
        steps(steps.init(made), batches(1)[0])


def test_bad_stages_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"until": -1}, "until must be 0 or more steps with the teacher, got -1"),
        ({"until": 1, "weight": -0.5}, "weight must be 0 or more and finite, got -0.5"),
    ]
    for changed, said in cases:
        with pytest.raises(ValueError, match=said):
            distill.staged_step(loss, sf.optim.sgd(0.1), **changed)
    with pytest.raises(TypeError, match=r"weight must be a number or a function .* got 'linear'"):
        distill.staged_step(loss, sf.optim.sgd(0.1), until=1, weight="linear")  # pyright: ignore[reportArgumentType]
