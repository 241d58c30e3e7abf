"""Microbatches in stages: this rank runs some layers, and activations and gradients go from rank to rank.

All ranks know each message and the sender beforehand. The schedule is a table that all ranks share. The shapes and
dtypes of the result of `first`, which layers keep, are found without computing the result. A send never waits. Receives
are posted some actions ahead.

`StageLink` has the messages between stages: activations, and their gradients in the other direction.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import DataDependentOutputException, DynamicOutputShapeException, disable_current_modes
from shardfn.capture import fakes
from shardfn.collectives import AnyChannel, TransportError, current_axis_types, psum
from shardfn.core import (
    Pending,
    PyTree,
    RankError,
    named_leaves,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_structure,
    tree_unflatten,
)
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import (
    Loss,
    Mixed,
    ModelState,
    Value,
    WeightedMean,
    evaluate,
    varying_along,
)
from shardfn.engine.plan import ActivationShapes, LeafView, Plan
from shardfn.engine.transfers import BackwardRoots, Seed
from shardfn.schedules import Action, PipelineSchedule, StageAction

from ._pipelined import (
    LET_FIRST,
    Pipelined,
    Place,
    from_one,
    pipelined_in,
)
from ._stage_layout import check_stages

# How many receives a rank has started ahead of use, for example of the next two actions.
AHEAD = 2


class _Unanswered(NamedTuple):
    """Message that may still be sent: the receiving rank, and the index of the action in that rank's list."""

    rank: int
    position: int
    pending: Pending[Tensor]


class StageLink:
    """Sends and receives between stages. Each message has a separate tag within a step.

    A send ends when the receiver has answered. An answer is a message that the receiver sends after taking the message.
    Then the sent tensors are dropped, without a wait. Sends without an answer end with the step.
    """

    def __init__(
        self, channel: AnyChannel, like: list[Tensor], table: PipelineSchedule, rank: int, device: torch.device
    ) -> None:
        self._channel, self._like, self._rank, self._device = channel, like, rank, device
        self._of, self._num_stages = table.neighbours(rank), table.num_stages
        self._floats = [x for x in like if x.is_floating_point()]
        # Receives start in the order of the list. Started receives are in `_coming` until used.
        self._next = collections.deque(a for a in table.ranks[rank] if self._is_remote(a))
        self._coming: dict[Action, list[Pending[Tensor] | Tensor]] = {}
        self._sent: list[_Unanswered] = []
        # Messages from a stage to the next where both are on this rank.
        self._here: dict[StageAction, list[Tensor]] = {}

    def receive(self, action: Action) -> list[Tensor]:
        """Returns the message that an action waits for, empty if the action waits for none."""
        place, before, _ = self._of[action]
        if before is None:
            return []
        if before.rank == self._rank:
            return self._here.pop(place)
        self._ask_ahead(AHEAD + 1)
        got = [x.result() if isinstance(x, Pending) else x for x in self._coming.pop(action)]
        if self._sent:
            self._end_sends(lambda x: x.rank == before.rank and x.position <= before.position)
        self._ask_ahead(AHEAD)
        return got

    def send(self, action: Action, tensors: list[Tensor]) -> None:
        """Sends the tensors that an action has made. Sent tensors must not be written afterwards."""
        place, _, after = self._of[action]
        assert after is not None
        to = StageAction(place.kind, place.microbatch, place.stage + (1 if place.kind == "forward" else -1))
        if after.rank == self._rank:
            self._here[to] = [x.detach() for x in tensors]
            return
        if self._sent:
            self._end_sends(lambda x: x.pending.done())
        tag = self._first_tag(to)
        for i, x in enumerate(tensors):
            if x.numel():
                self._sent.append(_Unanswered(*after, self._channel.send(x.detach(), after.rank, tag + i)))

    def close(self) -> None:
        """Waits until all messages have left."""
        self._end_sends(lambda _: True)

    def _end_sends(self, which: Callable[[_Unanswered], bool]) -> None:
        kept = list[_Unanswered]()
        for x in self._sent:
            if which(x):
                x.pending.result()
            else:
                kept.append(x)
        self._sent = kept

    def _is_remote(self, action: Action) -> bool:
        """Returns whether an action waits for another rank."""
        before = self._of[action].before
        return before is not None and before.rank != self._rank

    def _ask_ahead(self, ahead: int) -> None:
        """Starts receives in the order of need, up to `ahead` at a time."""
        while self._next and len(self._coming) < ahead:
            action = self._next.popleft()
            place, before, _ = self._of[action]
            assert before is not None
            like, tag = self._like if action.kind == "forward" else self._floats, self._first_tag(place)
            self._coming[action] = [self._start_receive(x, before.rank, tag + i) for i, x in enumerate(like)]

    def _start_receive(self, like: Tensor, source: int, tag: int) -> Pending[Tensor] | Tensor:
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype, device=self._device)
        return self._channel.arrival(like, source, tag)

    def _first_tag(self, to: StageAction) -> int:
        """Returns the first of the tags of the tensors that go to an action."""
        number = (to.microbatch * self._num_stages + to.stage) * 2 + (to.kind == "forward")
        return number * len(self._like)


@dataclasses.dataclass(frozen=True)
class _StageOutput:
    """Values for the next stage, not a loss, so that a policy does not cast the values."""

    h: Any


@dataclasses.dataclass
class _Underway:
    """Microbatch between the forward through a chunk and the backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    value: Value | None


class Staged:
    """`MicrobatchRunner` whose stages lie on the ranks along an axis.

    Args:
        plan: layout.
        comms: communicators.
        loss: loss of a microbatch, pipelined, perhaps of mixed precision.
        table: actions of each rank.
        batches: microbatches, the same on each rank along the axis.
        rest: key, if the loss takes a key.
        has_aux: whether the loss returns an aux.
        model_state: model state with which the microbatches begin. Only shapes count.
    """

    def __init__(
        self,
        plan: Plan,
        comms: Comms,
        loss: Loss,
        table: PipelineSchedule,
        batches: list[PyTree],
        rest: tuple[Any, ...],
        has_aux: bool,
        model_state: PyTree,
    ) -> None:
        of = pipelined_in(loss)
        assert of is not None
        self._plan, self._comms, self._of, self._table = plan, comms, of, table
        self._mixed = loss if isinstance(loss, Mixed) else None
        self._batches, self._rest, self._has_aux = batches, rest, has_aux
        self._rank = plan.mesh.axis_index(of.axis)
        self.actions, self.late_axes = table.ranks[self._rank], (of.axis,)
        self._firsts = of.firsts(check_stages(plan, of), self._rank)
        given = (batches[0], *rest), model_state
        self._shape = _find_shape(plan, of, self._mixed, given)
        # Found after this rank's layers have run: the result of a layer may be known only by then.
        self._ends = functools.partial(_find_ends, plan, loss, self._shape, given, has_aux)
        channel = comms.channels.between(self.late_axes)
        self._line = StageLink(channel, self._shape.leaves, table, self._rank, plan.mesh.device)
        # The message that `receive` has taken for the action that runs now.
        self._arrived: list[Tensor] = []
        # By microbatch and chunk, from the forward to the backward. A W needs no entry.
        self._open: dict[tuple[int, int], _Underway] = {}

    def receive(self, action: Action) -> None:
        """Waits for the activations of a forward, or for the gradients that a backward starts from."""
        self._comms.name(self._action_text(action))
        self._arrived = self._line.receive(action)

    def forward(self, action: Action, params: PyTree) -> Value | None:
        """Runs this rank's layers and sends the result on. At the last stage, returns the loss."""
        stage = self._table.stages[self._rank][action.chunk]
        inputs, given = self._enter_stage(stage)
        loss = self._stage_loss(action.chunk, stage, given)
        args = self._batches[action.microbatch], *self._rest
        if stage == self._table.num_stages - 1:
            value = evaluate(loss, params, args, self._has_aux)
            self._open[action[1:]] = _Underway(inputs, [value.total], value)
            return value
        outputs = self._check_result(loss(params, *args).h)
        self._open[action[1:]] = _Underway(inputs, outputs, None)
        self._line.send(action, outputs)
        return None

    def ends(self, action: Action, seed: Seed) -> BackwardRoots:
        """Returns the loss, or the tensors that were sent on and the gradients that came back."""
        opened = self._open.pop(action[1:])
        if opened.value is not None:
            pairs = [(opened.value.total, seed(opened.value.total, opened.value.weight))]
        else:
            floats = [x for x in opened.outputs if x.is_floating_point()]
            pairs = list(zip(floats, self._arrived, strict=True))
        pairs = [(x, g) for x, g in pairs if x.requires_grad]
        return BackwardRoots([x for x, _ in pairs], [g for _, g in pairs], opened.inputs)

    def send_back(self, action: Action, grads: list[Tensor | None]) -> None:
        """Sends the gradients of the received tensors back to the sender, and zeros for a tensor without a gradient."""
        if self._table.stages[self._rank][action.chunk] == 0:
            return
        floats = [x for x in self._shape.leaves if x.is_floating_point()]
        made = zip(grads, floats, strict=True)
        device = self._plan.mesh.device
        self._line.send(
            action, [torch.zeros(x.shape, dtype=x.dtype, device=device) if g is None else g for g, x in made]
        )

    def close(self) -> None:
        """Waits until the other stages have received all messages of this stage."""
        self._comms.name("")
        self._line.close()

    def values(self, seen: list[Value]) -> list[Value]:
        """Returns the values that the last stage has seen, sent to the other stages."""
        plan, stages = self._plan, self._plan.learnt.stages
        if plan.captured:
            ends = stages.take_ends(self._ends())
        elif stages.ends is None:
            ends = stages.take_ends(next(x for x in self._comms.control.gather(_kinds_of(seen)) if x is not None))
        else:
            ends = stages.ends
        if seen and _kinds_of(seen) != ends:
            raise ValueError(
                f"the loss returned {ends} in the first step, and now {_kinds_of(seen)}. The loss must"
                " always return the same."
            )
        dtype, weight_dtype, names, device = *ends, plan.mesh.device
        rows = torch.zeros(len(self._batches), 2 + 2 * len(names), dtype=torch.float64, device=device)
        if seen:
            rows = torch.stack([_row_of(value, names) for value in seen])
        return [_value_of(row, dtype, weight_dtype, names) for row in psum(rows, self.late_axes).unbind()]

    def kept(self, model_state: PyTree) -> PyTree:
        """Returns the model state.

        Parts that several ranks have and a single stage changes come from the rank of the stage.
        """
        of = self._of
        if not of.has_state:
            return model_state
        own, num = self._table.stages[self._rank], self._table.num_stages
        for stage in range(num):
            model_state = of.shared_layers(model_state, stage, stage in own)
        first, last = (
            tree_map(functools.partial(from_one, here=stage in own, axis=of.axis), part)
            for stage, part in ((0, model_state.first), (num - 1, model_state.last))
        )
        return model_state._replace(first=first, last=last)

    @contextlib.contextmanager
    def named(self, action: Action) -> Iterator[None]:
        """Notes in an error of only this rank which stage was at which microbatch."""
        try:
            yield
        except (TransportError, RankError):
            raise
        except Exception as error:
            error.add_note(self._action_text(action))
            raise

    def _action_text(self, action: Action) -> str:
        stage = self._table.stages[self._rank][action.chunk]
        return f"in stage {stage} of {self._table.num_stages}, {action.kind} of microbatch {action.microbatch}"

    def _enter_stage(self, stage: int) -> tuple[list[Tensor], PyTree]:
        """Returns this stage's inputs.

        The tensors that get a gradient, and the tree. At the first stage, empty and None.
        """
        if stage == 0:
            return [], None
        plan = self._plan
        for x, axes in zip(self._arrived, self._shape.axes, strict=True):
            if x.is_floating_point():
                x.requires_grad_()
            if axes:
                plan.following.declare(x, (*plan.batch_axes, *axes))
        inputs = [x for x in self._arrived if x.is_floating_point()]
        return inputs, tree_unflatten(self._shape.treedef, self._arrived)

    def _stage_loss(self, chunk: int, stage: int, given: PyTree) -> Loss:
        """Returns this stage as a loss that begins with `given`. Stages before the last return values to send on."""
        of, final = self._of, stage == self._table.num_stages - 1

        def run_part(params: PyTree, batch: PyTree, *key: Tensor) -> Any:
            out = of.stage(params, batch, given, Place(chunk, self._firsts[chunk], stage == 0, final), key)
            return out if final else _StageOutput(out)

        return run_part if self._mixed is None else dataclasses.replace(self._mixed, inner=run_part)

    def _check_result(self, h: PyTree) -> list[Tensor]:
        """Returns the leaves of a stage's result. The leaves must be like the input's.

        Raises:
            TypeError: leaves differ. The message lists every leaf.
        """
        leaves, treedef = tree_flatten(h)
        if treedef != self._shape.treedef:
            raise TypeError(
                f"a stage made a tree {treedef} of {self._shape.treedef}. Layers must return a tree like the input."
            )
        raise_all(
            TypeError,
            "layers must return tensors of the shapes and dtypes that they take:",
            [
                f"{path} was {tuple(y.shape)} {y.dtype}, and is {tuple(x.shape)} {x.dtype}"
                for path, x, y in zip(self._shape.paths, leaves, self._shape.leaves, strict=True)
                if x.shape != y.shape or x.dtype != y.dtype
            ],
        )
        named = zip(self._shape.paths, leaves, self._shape.axes, strict=True)
        return [varying_along(f"{path} of a stage", x, axes, LET_FIRST) for path, x, axes in named]


def _find_shape(plan: Plan, of: Pipelined, mixed: Mixed | None, given: PyTree) -> ActivationShapes:
    """Returns the shapes of the result of `first`, found once for batches of the same shape.

    Args:
        plan: layout.
        of: pipelined loss.
        mixed: precision.
        given: arguments behind the parameters, and the model state.
    """
    leaves, treedef = tree_flatten(given)
    key = treedef, *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    return plan.learnt.stages.shapes(key, lambda: _evaluate_shape(plan, of, mixed, leaves, treedef))


def _evaluate_shape(
    plan: Plan, of: Pipelined, mixed: Mixed | None, leaves: list[Any], treedef: Any
) -> ActivationShapes:
    """Evaluates `first` on tensors without data. See `_find_shape`."""
    plain, axes = of.without_collectives
    first: Callable[..., Any] = lambda *args: _StageOutput(plain.enter(*args))  # noqa: E731
    first = first if mixed is None else dataclasses.replace(mixed, inner=first)
    with _run_abstract(plan, leaves, axes) as (params, abstract), _explain_read(*of.begins):
        args, state = tree_unflatten(treedef, abstract)
        with ModelState(state).through(), plan.follows():
            out = first(params, *args).h
            mode = current_axis_types(begin=False)
            found = [mode.axes_of(x) if mode is not None and isinstance(x, Tensor) else () for x in tree_leaves(out)]
    wrong = [p for p, x in named_leaves(out, "h") if not isinstance(x, Tensor)]
    raise_all(TypeError, "the result of `first` must be a tree of tensors:", wrong)
    wrong = [p for p, x in named_leaves(out, "h") if x.is_complex()]
    raise_all(TypeError, "complex activations have no gradients between stages; use torch.view_as_real:", wrong)
    like = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tree_leaves(out)]
    more = [tuple(a for a in axes if a not in plan.batch_axes) for axes in found]
    return ActivationShapes(tree_structure(out), like, tree_paths(out, "h"), more)


def _find_ends(plan: Plan, loss: Loss, shape: ActivationShapes, given: PyTree, has_aux: bool) -> Any:
    """Returns the `_kinds_of` of the last stage's result, found on any rank, without computing the result.

    See `_find_shape`.
    """
    of = pipelined_in(loss)
    assert of is not None
    leaves, treedef = tree_flatten(given)
    num = len(leaves)
    plain, axes = of.without_collectives
    with _run_abstract(plan, [*leaves, *shape.leaves], axes) as (params, abstract):
        args, state = tree_unflatten(treedef, abstract[:num])
        h = tree_unflatten(shape.treedef, abstract[num:])
        last: Callable[..., Any] = lambda params, batch, *key: plain.leave(params, h, batch, *key)  # noqa: E731
        last = dataclasses.replace(loss, inner=last) if isinstance(loss, Mixed) else last
        with ModelState(state).through():
            return _kinds_of([evaluate(last, params, args, has_aux)])


@contextlib.contextmanager
def _run_abstract(plan: Plan, leaves: list[Any], axes: Sequence[str]) -> Iterator[tuple[PyTree, list[Any]]]:
    """Yields the parameters and some leaves as tensors without data, outside of a running capture.

    Along `axes` parameters are whole.
    """
    with disable_current_modes(), torch.no_grad():
        shapes = [LeafView.of(x).along(axes) if axes else x.block for x in plan.leaves]
        pairs = zip(shapes, plan.leaves, strict=True)
        blocks = [torch.empty(shape, dtype=x.dtypes.compute, device="meta") for shape, x in pairs]
        abstract: Any = fakes([*blocks, *leaves], plan.mesh.device)
        for x, leaf in zip(abstract, plan.leaves, strict=False):
            if leaf.distinct_axes:
                plan.following.declare(x, (*plan.batch_axes, *(a for a in leaf.distinct_axes if a not in axes)))
        with abstract[0].fake_mode:
            yield tree_unflatten(plan.treedef, abstract[: len(blocks)]), abstract[len(blocks) :]


@contextlib.contextmanager
def _explain_read(what: str, first: Callable[..., Any]) -> Iterator[None]:
    """Explains the error of a function, passed as `what`, that reads values of tensors while running without data.

    Raises:
        ValueError: the function reads values.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # and sympy: not when imported

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        name = getattr(first, "__qualname__", type(first).__qualname__)
        why = str(error).splitlines()[0]
        raise ValueError(
            f"{what}={name} of a pipeline is run once without data, for the shapes that stages exchange, and"
            f" asks for values of tensors ({why}). Leave out .item(), nonzero(), masks as indices and branches on"
            " values: use torch.where, or compute them in the batch."
        ) from error


def _kinds_of(seen: list[Value]) -> Any:
    """Returns the dtypes of the loss and its weight, and the names of aux, or None without a loss."""
    if not seen:
        return None
    last = seen[-1]
    return last.total.dtype, None if last.weight is None else last.weight.dtype, sorted(last.aux)


def _row_of(value: Value, names: list[str]) -> Tensor:
    total = value.total
    weight = torch.zeros_like(total) if value.weight is None else value.weight
    pairs = [x for name in names for x in value.aux[name]]
    return torch.stack([torch.as_tensor(x).to(total.device, torch.float64) for x in (total, weight, *pairs)])


def _value_of(row: Tensor, dtype: torch.dtype, weight_dtype: torch.dtype | None, names: list[str]) -> Value:
    total, weight, *pairs = row.unbind()
    aux = {name: WeightedMean(*pairs[2 * k : 2 * k + 2]) for k, name in enumerate(names)}
    return Value(total.to(dtype), None if weight_dtype is None else weight.to(weight_dtype), aux)
