"""Covers `distill.logits` and `distill.features`: TRL's values, a vocabulary that ranks cut, and errors."""

import json
import math
import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import distill
from shardfn.testing import assert_parity, distributed

GOLDENS: Any = json.loads(pathlib.Path(__file__).with_name("gkd_goldens.json").read_text())
STUDENT, TEACHER = (torch.tensor(GOLDENS[name], dtype=torch.float64) for name in ("student", "teacher"))
TARGETS = torch.tensor(GOLDENS["targets"])
V = STUDENT.shape[-1]


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: "-".join(map(str, case["options"].values())))
def test_values_and_gradients_are_those_of_trl(case: Any) -> None:
    square = case["options"].get("temperature", 1.0) ** 2
    x = STUDENT.clone().requires_grad_()
    found = distill.logits(x, TEACHER, TARGETS, **case["options"])
    assert found.weight == 4
    (grad,) = torch.autograd.grad(found.mean(), x)
    assert math.isclose(found.mean().item(), case["loss"] * square, rel_tol=1e-12)
    torch.testing.assert_close(grad, square * torch.tensor(case["gradient"], dtype=grad.dtype), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("direction", ["forward", "reverse", "jensen"])
def test_classes_without_probability_count_nothing(direction: Any) -> None:
    """Padding of a vocabulary has logits of -inf in both models."""
    pad = torch.full((*TARGETS.shape, 3), -math.inf, dtype=torch.float64)
    x = torch.cat((STUDENT, pad), -1).requires_grad_()
    found = distill.logits(x, torch.cat((TEACHER, pad), -1), TARGETS, direction=direction)
    (grad,) = torch.autograd.grad(found.total, x)
    y = STUDENT.clone().requires_grad_()
    want = distill.logits(y, TEACHER, TARGETS, direction=direction)
    torch.testing.assert_close(found, want, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad[..., :V], torch.autograd.grad(want.total, y)[0], rtol=1e-12, atol=1e-15)
    assert not grad[..., V:].any()


def test_logits_of_16_bits_are_compared_in_float32() -> None:
    x, y = STUDENT.bfloat16(), TEACHER.bfloat16()
    assert torch.equal(distill.logits(x, y).total, distill.logits(x.float(), y.float()).total)


@distributed(world=[2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_vocabulary_that_ranks_cut(world: int) -> None:
    """Seven classes on two and three ranks, with targets that do not count."""
    params = {"student": STUDENT[0, :2].T.contiguous(), "teacher": TEACHER[1, :2].T.contiguous()}
    batch = {"x": torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0)).double(), "targets": TARGETS}

    for direction, temperature in (("forward", 1.0), ("reverse", 2.0), ("jensen", 0.7)):

        def loss(params: Any, batch: Any, axis: Any, direction: Any = direction, t: float = temperature) -> Any:
            x = sf.pvary(batch["x"], axis)
            student, teacher = (x @ params[name].mT for name in ("student", "teacher"))
            how: dict[str, Any] = {"direction": direction, "temperature": t, "axis": axis, "vocab_size": V}
            return distill.logits(student, teacher, batch["targets"], **how)

        with sf.make_mesh({"tp": world}, device="cpu") as mesh:
            assert_parity(
                lambda params, batch, loss=loss: loss(params, batch, "tp"),
                sf.optim.sgd(0.1),
                params,
                [batch],
                reference=lambda params, batch, loss=loss: loss(params, batch, None),
                mesh=mesh,
                specs=sf.P("tp"),
                batch=sf.P(),
                trainable={"student": True, "teacher": False},
            )


def test_features_by_the_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    student = {"a": torch.randn(2, 3, 4, generator=draw), "b": torch.randn(2, 3, 5, generator=draw)}
    teacher = {"a": torch.randn(2, 3, 6, generator=draw), "b": torch.randn(2, 3, 5, generator=draw)}
    w = torch.randn(6, 4, generator=draw, requires_grad=True)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    found = distill.features(student, teacher, mask, projections={"a": w})
    each = [((student["a"] @ w.T - teacher["a"]) ** 2).mean(-1), ((student["b"] - teacher["b"]) ** 2).mean(-1)]
    torch.testing.assert_close(found.mean(), (each[0] + each[1])[mask].mean() / 2)
    assert found.weight == 4 and torch.autograd.grad(found.total, w)[0].any()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"temperature": 0.0}, r"temperature must be above 0 and finite, got 0.0.*argmax"),
        ({"temperature": math.inf}, "temperature must be above 0 and finite, got inf"),
        ({"direction": "both"}, "direction must be one of 'forward', 'reverse', 'jensen', got 'both'"),
        ({"beta": 0.3}, r'beta=0.3 has an effect only on direction="jensen"'),
        ({"direction": "jensen", "beta": 1.0}, r'beta must be above 0 and below 1.*"reverse" \(1\)'),
        ({"teacher_BTV": TEACHER[..., :5]}, "the student has 7 classes and the teacher 5.*rl.check_tokenizers"),
        ({"teacher_BTV": TEACHER[:1]}, r"logits of shapes \(2, 3, 7\) and \(1, 3, 7\)"),
        ({"targets_BT": TARGETS[:, :2]}, r"targets \(2, 2\)"),
        ({"teacher_BTV": TEACHER.clone().requires_grad_()}, r"teacher_BTV requires a gradient.*'teacher': False"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"student_BTV": STUDENT, "teacher_BTV": TEACHER, "targets_BT": TARGETS, **options}
    with pytest.raises(ValueError, match=f"(?s)distill.logits.*{said}"):
        distill.logits(**given)


def test_bad_features_are_refused() -> None:
    x, wide = torch.zeros(1, 2, 3), torch.zeros(1, 2, 5)
    with pytest.raises(ValueError, match=r"(?s)'a' has 3 dims in the student and 5 in the teacher.*'b' is only of the"):
        distill.features({"a": x}, {"a": wide, "b": x})
    with pytest.raises(ValueError, match=r"projections\['a'\] has shape \(3, 5\); it must be \(5, 3\)"):
        distill.features({"a": x}, {"a": wide}, projections={"a": torch.zeros(3, 5)})
    with pytest.raises(ValueError, match="all must be of the same tokens"):
        distill.features({"a": x}, {"a": x[:, :1]})
    with pytest.raises(ValueError, match="there must be features"):
        distill.features({}, {})
    with pytest.raises(ValueError, match="a requires a gradient"):
        distill.features({"a": x}, {"a": x.clone().requires_grad_()})
