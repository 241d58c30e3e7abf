"""Covers a microbatch in stages: the messages of a first and of a last stage, the shapes between them, and errors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import bind_mesh
from shardfn.core import Mesh, Pending, tree_flatten
from shardfn.engine import Planner
from shardfn.engine.agreement._agreement import Comms
from shardfn.engine.pipeline._staged import Staged
from shardfn.schedules import Action, PipelineSchedule, parse

from .fakes import ScriptedRounds, Wire

P = sf.P
TABLE = PipelineSchedule("by hand", 2, ((0,), (1,)), (parse("F0 F1 B0 B1"), parse("F0 B0 F1 B1")))
F0, F1, B0 = Action("forward", 0), Action("forward", 1), Action("backward", 0)
ROWS, WIDTH = 3, 4


def _first(params: Any, x: Tensor) -> dict[str, Tensor]:
    return {"h": x @ params["in"], "rows": torch.arange(len(x))}


def _block(p: Tensor, h: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**h, "h": torch.tanh(h["h"] @ p)}


def _last(params: Any, h: dict[str, Tensor], x: Tensor) -> Tensor:
    return (h["h"] * params["out"]).square().mean()


class Between(Wire):
    """The channels of a rank beside one other, whose messages are in `coming`, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, Tensor]] = []
        self.coming: list[Tensor] = []

    def between(self, axes: tuple[str, ...]) -> Any:
        assert axes == ("pp",)
        return self

    def send(self, x: Tensor, to: int, tag: int) -> Pending[Tensor]:
        self.sent.append((to, x))
        return Pending.of(x)

    def arrival(self, like: Tensor, source: int, tag: int) -> Pending[Tensor]:
        assert source == 1 - self.rank
        return Pending(lambda: self.coming.pop(0), lambda: False)

    rank = 0


class Case:
    """Two layers on two ranks, seen from one of them."""

    def __init__(self, rank: int, first: Any = _first, block: Any = _block) -> None:
        draw = torch.Generator().manual_seed(0)
        mesh = Mesh({"pp": 2}, torch.device("cpu"), abstract=True, view_mesh_from={"pp": rank})
        whole = {
            "blocks": torch.randn(2, WIDTH, WIDTH, generator=draw),
            "in": torch.randn(5, WIDTH, generator=draw),
            "out": torch.randn(WIDTH, generator=draw),
        }
        self.mesh, self.wire = mesh, Between()
        self.wire.rank = rank
        self.params = {**whole, "blocks": whole["blocks"][rank : rank + 1].clone()}
        for x in self.params.values():
            x.requires_grad_()
        leaves, treedef = tree_flatten(whole)
        specs = {"blocks": P("pp"), "in": P(), "out": P()}
        self.plan = Planner(mesh, specs, P(), sf.Zero(0), True, None, ("pp",)).plan(treedef, leaves)
        self.batches = [torch.randn(ROWS, 5, generator=draw) for _ in range(2)]
        loss: Any = sf.pipeline(first, block, _last)
        comms = Comms(mesh, self.wire, ScriptedRounds())  # pyright: ignore[reportArgumentType]  # the parts that a stage uses
        self.course = Staged(self.plan, comms, loss, TABLE, self.batches, (), False, ())

    def forward(self, action: Action) -> Any:
        self.course.receive(action)
        return self.course.forward(action, self.params)


@pytest.fixture
def first_stage() -> Iterator[Case]:
    case = Case(0)
    with bind_mesh(case.mesh):
        yield case


@pytest.fixture
def last_stage() -> Iterator[Case]:
    case = Case(1)
    with bind_mesh(case.mesh):
        yield case


def _h(case: Case, microbatch: int = 0) -> Tensor:
    return torch.tanh(case.batches[microbatch] @ case.params["in"] @ case.params["blocks"][0])


def test_the_first_stage_sends_the_result_of_its_layers_and_has_no_loss(first_stage: Case) -> None:
    assert first_stage.forward(F0) is None
    (to, h), (also, rows) = first_stage.wire.sent
    assert to == also == 1
    assert torch.equal(h, _h(first_stage)) and torch.equal(rows, torch.arange(ROWS))
    assert not h.requires_grad


def test_its_backward_starts_from_the_gradient_that_comes_back(first_stage: Case) -> None:
    first_stage.forward(F0)
    first_stage.forward(F1)
    gradient = torch.full((ROWS, WIDTH), 2.0)
    first_stage.wire.coming = [gradient]
    first_stage.course.receive(B0)
    outputs, cotangents, inputs = first_stage.course.ends(B0, lambda loss, weight: loss)
    assert torch.equal(outputs[0], _h(first_stage)) and len(outputs) == 1  # the integers have no gradient
    assert torch.equal(cotangents[0], gradient) and inputs == []
    sent = len(first_stage.wire.sent)
    first_stage.course.send_back(B0, [])
    assert len(first_stage.wire.sent) == sent


def test_the_last_stage_has_the_loss_of_its_inputs(last_stage: Case) -> None:
    h = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    last_stage.wire.coming = [h.clone(), torch.arange(ROWS)]
    value = last_stage.forward(F0)
    p = last_stage.params
    assert torch.equal(value.total, (torch.tanh(h @ p["blocks"][0]) * p["out"]).square().mean())
    assert last_stage.wire.sent == []


@pytest.mark.parametrize("used", [True, False], ids=["used", "not used"])
def test_it_sends_back_the_gradients_of_its_inputs_or_zeros(last_stage: Case, used: bool) -> None:
    last_stage.wire.coming = [torch.ones(ROWS, WIDTH), torch.arange(ROWS)]
    last_stage.forward(F0)
    last_stage.course.receive(B0)
    ends = last_stage.course.ends(B0, lambda loss, weight: torch.full_like(loss, 3.0))
    assert [x.item() for x in ends.cotangents] == [3.0] and len(ends.inputs) == 1
    made: list[Tensor | None] = (
        list(torch.autograd.grad(ends.outputs, ends.inputs, ends.cotangents)) if used else [None]
    )
    last_stage.course.send_back(B0, made)
    ((to, back),) = last_stage.wire.sent
    assert to == 0 and torch.equal(back, made[0] if made[0] is not None else torch.zeros(ROWS, WIDTH))


def test_shapes_between_stages_are_found_once_and_without_a_value() -> None:
    seen: list[torch.device] = []

    def first(params: Any, x: Tensor) -> dict[str, Tensor]:
        seen.append(x.device)
        assert type(x) is not Tensor  # it has no values
        return _first(params, x)

    case = Case(1, first)
    (shapes,) = case.plan.learnt.stages.between.values()
    assert shapes.paths == ["h['h']", "h['rows']"]
    assert [(tuple(x.shape), x.dtype) for x in shapes.leaves] == [
        ((ROWS, WIDTH), torch.float32),
        ((ROWS,), torch.int64),
    ]
    assert len(seen) == 1


def test_the_result_of_a_stage_must_be_like_its_input(first_stage: Case) -> None:
    good = {"h": torch.ones(ROWS, WIDTH), "rows": torch.arange(ROWS)}
    assert [x is y for x, y in zip(first_stage.course._check_result(good), good.values(), strict=True)] == [True, True]
    with pytest.raises(TypeError, match="of the shapes and dtypes that they take") as caught:
        first_stage.course._check_result({"h": torch.ones(ROWS, 2), "rows": torch.ones(ROWS)})
    assert "h['h'] was (3, 4) torch.float32, and is (3, 2) torch.float32" in str(caught.value)
    assert "h['rows'] was (3,) torch.int64, and is (3,) torch.float32" in str(caught.value)
    with pytest.raises(TypeError, match="Layers must return a tree like the input"):
        first_stage.course._check_result(good["h"])


@pytest.mark.parametrize(
    ("first", "error", "says"),
    [
        (lambda params, x: x @ params["in"] if x.sum() > 0 else x, ValueError, "asks for values of tensors"),
        pytest.param(
            lambda params, x: [x @ params["in"], 3],
            TypeError,
            r"must be a tree of tensors:\n.*h\[1\]",
            marks=pytest.mark.nightly,
        ),
        pytest.param(lambda params, x: torch.complex(x, x), TypeError, "torch.view_as_real", marks=pytest.mark.nightly),
    ],
    ids=["values", "a number", "complex"],
)
def test_a_first_whose_result_cannot_be_sent_is_refused(first: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Case(0, first)


def test_an_error_has_a_note_of_its_stage_and_microbatch(last_stage: Case) -> None:
    with pytest.raises(KeyError) as caught, last_stage.course.named(F1):
        raise KeyError("w")
    assert caught.value.__notes__ == ["in stage 1 of 2, forward of microbatch 1"]
    with pytest.raises(sf.RankError) as other, last_stage.course.named(F1):
        raise sf.RankError("rank 0 failed")
    assert not hasattr(other.value, "__notes__")  # it is not this rank's


def test_every_message_has_left_when_the_course_is_closed(first_stage: Case) -> None:
    left: list[int] = []
    first_stage.wire.send = lambda x, to, tag: Pending(lambda: left.append(tag), lambda: False)  # pyright: ignore
    first_stage.forward(F0)
    assert left == []
    first_stage.course.close()
    assert len(left) == 2 and len(set(left)) == 2
