"""Covers `models.moe.student`: layers and weights of the teacher, stacked or not, and distillation over a mesh."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import distill
from shardfn.models import gpt, moe
from shardfn.nn import cross_entropy_sum
from shardfn.nn import moe as layers
from shardfn.testing import distributed, one_device

NIGHTLY = pytest.mark.nightly
TINY: dict[str, Any] = {"vocab_size": 31, "d_model": 12, "num_heads": 2, "d_ff": 10, "max_len": 16}
TOP1 = functools.partial(layers.top_k, renormalise=False)
FROZEN = {"student": True, "teacher": False}


def teacher(num_layers: int = 8, stacked: bool = False, **changes: Any) -> gpt.Config:
    given: dict[str, Any] = {"num": 3, "every": 2, "top_k": 1, "route": TOP1, "residual": True, "balance": 0.1}
    return gpt.Config(**TINY, num_layers=num_layers, stacked=stacked, experts=moe.Experts(**{**given, **changes}))


def params(c: gpt.Config) -> Any:
    draw = torch.Generator().manual_seed(0)
    return sf.core.tree_map(lambda x: x.double() + 0.2 * torch.randn(x.shape, generator=draw), gpt.init(c, sf.key(0)))


def tokens(rows: int = 4) -> torch.Tensor:
    return torch.randint(31, (rows, 9), generator=torch.Generator().manual_seed(1))


def test_a_student_of_21_of_24_layers() -> None:
    """Of a pyramid of ten layers of 32 experts and two of 64, as in DeepSpeed-MoE. Its student has both of the two."""
    c = gpt.Config(vocab_size=8, num_layers=24, d_model=4, num_heads=1, d_ff=4, max_len=4)
    c = dataclasses.replace(c, experts=moe.Experts(num=(32,) * 10 + (64,) * 2, every=2, top_k=1, route=TOP1))
    made, _ = moe.student(c, gpt.init(c, sf.key(0)))
    assert made.num_layers == 21 and made.num_experts == [32] * 8 + [64]
    assert made.experts and made.expert_layers == [1, 3, 5, 8, 10, 12, 15, 17, 19]
    published, _ = moe.student(c, gpt.init(c, sf.key(0)), keep=[i for i in range(24) if i not in (7, 15, 16)])
    assert published.num_layers == 21 and published.num_experts == [32] * 8 + [64] * 2
    again, _ = moe.student(made, gpt.init(made, sf.key(0)), keep=range(9))
    assert again.expert_layers == [1, 3, 5, 8] and again.num_experts == [32] * 4


@pytest.mark.parametrize("keep", [None, [0, 1, 4, 5], [1, 2, 6], [0, 2]])
@pytest.mark.parametrize("stacked", [False, True])
def test_layers_are_the_teachers(stacked: bool, keep: Any) -> None:
    """A layer with zeros where it writes to the stream has no effect: the teacher with such layers is the student."""
    c = teacher(stacked=stacked)
    leaves, want = params(c), teacher()
    kept = list(range(7)) if keep is None else keep
    made, own = moe.student(c, leaves, keep=keep)
    assert made.num_layers == len(kept) and made.stacked == (stacked and kept in ([0, 1, 4, 5], [0, 2]))
    flat = moe.student(c, leaves, keep=[*range(7)])[1]["blocks"] if stacked else leaves["blocks"]
    blocks = [dict(p) for p in flat]
    if stacked:  # the last layer is in no student of seven layers
        blocks.append({n.removeprefix("1."): x[3] for n, x in leaves["blocks"].items() if n.startswith("1.")})
    for i in set(range(8)) - set(kept):
        for name in ("wo", "bo", "w_down", "b_down", "e_down", "e_b_down"):
            blocks[i] |= {name: torch.zeros_like(blocks[i][name])} if name in blocks[i] else {}
    ids = tokens()[:, :8]
    found = gpt.apply(made, own, ids)
    torch.testing.assert_close(found, gpt.apply(want, {**leaves, "blocks": blocks}, ids), rtol=1e-12, atol=1e-13)
    assert gpt.num_params(made) == sum(x.numel() for x in sf.core.tree_leaves(own))


def loss(
    student: gpt.Config, large: gpt.Config, params: Any, batch: Any, *, weight: Any, step: Any = None, axis: Any = None
) -> Any:
    weight = 0.5 if step is not None and step < 1 else None if step is not None else weight

    def of_logits(logits: torch.Tensor, shifted: Any) -> Any:
        total, count = cross_entropy_sum(logits, shifted["targets"])
        if weight is None:
            return sf.WeightedMean(total, count)
        taught = gpt.apply(large, params["teacher"], shifted["tokens"])
        return sf.WeightedMean(total + weight * distill.logits(logits, taught, shifted["targets"]).total, count)

    return gpt.loss(student, params["student"], batch, of_logits=of_logits)


@distributed(world=2)
@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=NIGHTLY) for n in range(3)), 3])
def test_a_mixture_of_students_equals_one_device(stage: int) -> None:
    """Teacher and student have their experts along ep, in layers at unequal distances."""
    pyramid = {"num": (2, 3), "axes": ("ep",), "capacity": 1.2}
    alone, large = teacher(4, **pyramid), teacher(4, **pyramid, exchange=layers.AllToAll("ep"))
    made, keep = params(alone), [0, 1, 3]
    (small, own), (plain, _) = moe.student(large, made, keep=keep), moe.student(alone, made, keep=keep)
    assert small.expert_layers == [1, 2] and small.num_experts == [2, 3]
    tx, both = sf.optim.sgd(0.1, momentum=0.9), {"student": own, "teacher": made}
    batches = [{"tokens": tokens()}, {"tokens": tokens().flip(0)}]
    reference = functools.partial(loss, plain, alone, weight=None)
    want = one_device(reference, tx, both, batches, trainable=FROZEN, count=True)
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        steps = distill.staged_step(
            functools.partial(loss, small, large),
            tx,
            until=1,
            weight=0.5,
            mesh=mesh,
            specs={"student": gpt.specs(small), "teacher": gpt.specs(large)},
            batch=sf.P("ep"),
            zero=sf.Zero(stage=stage, axis="ep", persist_elements=0),
            trainable=FROZEN,
        )
        state = steps.init(both)
        for n, batch in enumerate(batches):
            state, metrics = steps(state, {"tokens": batch["tokens"][steps.at(state).rows(4)]})
            torch.testing.assert_close(metrics["loss"], want.metrics[n]["loss"], rtol=1e-12, atol=0)
        got = sf.unshard(state.params)
        for x, y in zip(sf.core.tree_leaves(got), sf.core.tree_leaves(want.params), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"keep": []}, r"a student must have layers, got \[\] of 8"),
        ({"keep": [1, 8]}, r"layers \[8\] must be from 0 to 7, got \[1, 8\]"),
        ({"keep": [2, 1]}, r"keep must be ascending.*got \[2, 1\]"),
        ({"keep": range(8)}, "all 8 layers are kept. Pass keep="),
        ({"every": 9}, "all 8 layers are kept. Pass keep=, or a smaller every=9"),
        ({"every": 1}, "every must be 2 or more, got 1"),
    ],
)
def test_bad_layers_are_refused(options: dict[str, Any], said: str) -> None:
    c = teacher()
    with pytest.raises(ValueError, match=said):
        moe.student(c, gpt.init(c, sf.key(0)), **options)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"layers": (3, 1), "every": 1}, r"layers=\(3, 1\) must be numbers of layers, ascending"),
        ({"layers": (1, 3)}, r"layers=\(1, 3\) is in place of every=2 and first=0"),
        ({"layers": (1, 8), "every": 1}, "names layers that the 8 layers do not have. They are 0 to 7"),
    ],
)
def test_bad_layers_of_experts_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        teacher(**changed)
