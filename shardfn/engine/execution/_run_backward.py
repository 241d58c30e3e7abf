"""Runs the loss of a single step, and its gradients: storage -> compute, the user's loss, and the transpose.

`run_backward` makes a `Performer`, which runs the forwards and backwards of the microbatches, action by action.
`run_forward` runs a function without gradients.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import TransportError
from shardfn.core import PyTree, RankError, StoredValue, named_leaves, tree_map
from shardfn.engine.agreement import (
    Comms,
    catch_up,
    described,
    named_range,
    open_channels,
    rounds_of,
)
from shardfn.engine.loss import (
    LeafUses,
    Loss,
    ModelState,
    NoGradientError,
    UnequalBatchesError,
    Value,
    microbatches,
    naming_used_up,
    num_microbatches,
    refuse_negative,
    separating,
    taking_early,
    warning_of_draws,
)
from shardfn.engine.pipeline import Staged, leaf_uses, pipelined_in
from shardfn.engine.plan import Chunks, Plan, UseOrder
from shardfn.engine.transfers import (
    DONE,
    IDLE,
    BackwardResult,
    ChunkStates,
    Gatherer,
    LocalRunner,
    MicrobatchRunner,
    Reducer,
    StepParts,
    agree_on_outcome,
    check_capture,
    chunks_of,
    enter,
    make_write_detector,
    outcome_of,
)
from shardfn.leaves import LeafBook, opened
from shardfn.nn import DeferredGradients
from shardfn.schedules import Action, split_backwards
from shardfn.state import OverlappedUpdate

from ._step_parts import check_canonical


class Performer:
    """The forwards and backwards of a single step's microbatches, each a call. Made anew each step.

    `enter` once, `perform` for each action of the schedule, `finish` once. One action runs at a time, and is one phase
    of the agreed order of use: so all ranks that share leaves perform the same actions in the same order, though their
    losses may take different branches. Between actions the course holds a microbatch, with its graph, from the forward
    to the backward. Any number may be open. Where the schedule has W, the backward gives gradients of activations, and
    W those of weights: until then the performer keeps the products that are left to compute. No other state belongs to
    one microbatch: lazy leaves are opened at any use, and the reducer adds up the gradients of the backward that runs.

    Args:
        plan: the layout.
        comms: the communicators.
        course: the parts of each microbatch that this rank runs, and their order.
        num_microbatches: how many there are.
        gatherer: serves whole leaves.
        book: keeps them out of graphs.
        ahead: see `run_backward`.
        chunks: chunks that are run in place of microbatches, in a step with canonical sums.
        uses: uses of layers that several functions use, in such a step.
    """

    def __init__(
        self,
        plan: Plan,
        comms: Comms,
        course: MicrobatchRunner,
        num_microbatches: int,
        gatherer: Gatherer,
        book: LeafBook,
        ahead: OverlappedUpdate | None,
        chunks: Chunks | None,
        uses: Mapping[int, LeafUses],
    ) -> None:
        self._plan, self._comms, self._course, self._num = plan, comms, course, num_microbatches
        self._gatherer, self._book, self._ahead = gatherer, book, ahead
        self._chunks = chunks
        self._reducer = Reducer(plan, comms.channels, plan.learnt.reduce_order, course.late_axes, chunks, uses)
        self._split = split_backwards(course.actions)
        # The two parts of a split backward give gradients when they have them.
        self._at_end = frozenset[int]() if self._split else plan.sent_last()
        # By microbatch and chunk, from the forward to the W: the gradients that the backward puts off.
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}
        # By number in the list: before the last forward an update that runs ahead begins to read, and with the last end
        # of a backward gradients are complete.
        ends = [self._is_last_action(a) for a in course.actions]
        self._last_forward = max(i for i, a in enumerate(course.actions) if a.kind == "forward")
        self._last_backward = max(i for i, is_end in enumerate(ends) if is_end)
        self._performed = 0
        # Values of the first step are compared.
        self._compares = not plan.learnt.compared
        self._idle = False
        self._seen: dict[int, Value] = {}

    def enter(
        self,
        blocks: Sequence[StoredValue],
        *,
        even: bool,
        model_state: PyTree,
        loss_scale: Tensor | None,
    ) -> None:
        """Lets the leaves and the model state enter."""
        self._model_state = ModelState(model_state)
        self._states = None if self._chunks is None else ChunkStates(model_state, self._chunks)
        self._even, self._loss_scale = even, loss_scale
        entered = enter(self._plan, blocks, self._book, self._reducer, self._at_end)
        self._params, self._handles, by_use = entered
        self._separating = separating(by_use) if by_use else contextlib.nullcontext()

    def perform(self, action: Action) -> None:
        """Runs the next action of the schedule."""
        self._course.receive(action)
        if action.kind == "forward":
            with named_range("forward"):
                self._forward(action, last=self._performed == self._last_forward)
        else:
            with named_range("backward"):
                self._run_backward(action, last=self._performed == self._last_backward)
        self._performed += 1
        catch_up()

    def _forward(self, action: Action, *, last: bool) -> None:
        plan, ahead = self._plan, self._ahead
        self._gatherer.begin_phase()
        if last and ahead is not None:  # whose reads queue behind those of the first parameters
            ahead.begin()
        self._comms.mark("forward")
        kept = self._book.keep_out_of_graph() if plan.gather_units else contextlib.nullcontext()
        first = self._performed == 0 and self._compares
        drawing = warning_of_draws(plan.mesh.device) if first else contextlib.nullcontext()
        state, states = self._model_state, self._states
        if states is not None:
            state.now = states.start_part(action.microbatch)
        with kept, state.through(), self._record_products(action), drawing, plan.follows(), self._separating:
            value = self._course.forward(action, self._params)
        if states is not None:
            states.end_part(action.microbatch, state.now)
        self._book.watch.check("the loss")
        if value is not None and self._compares:
            refuse_negative(value.weight)
        if not self._even and value is not None and value.weight is None and plan.chunks is None:
            raise UnequalBatchesError(
                "ranks hold batches of different sizes, so the mean of their losses is not the global mean."
                " Return WeightedMean(total, weight) from the loss, or pass equal batches."
            )
        with named_range("waits"):
            self._gatherer.end_phase(ask=False)
        if self._performed == 0:
            self._reducer.queue.expect(plan.learnt.reduce_order or plan.guessed_order(plan.learnt.use_order("step")))
        if last and ahead is not None:
            if value is not None and value.weight is None:
                self._reducer.store.give_to(ahead)
            else:  # gradients are divided by the weight of all ranks' batches first
                ahead.stop()
        if value is not None:
            self._seen[action.microbatch] = Value(value.total.detach(), value.weight, value.aux)

    def _run_backward(self, action: Action, *, last: bool) -> None:
        plan, reducer = self._plan, self._reducer
        each = plan.zero.pace.accumulate == "each" and plan.chunks is None
        send = last or (each and self._is_last_action(action))
        reducer.begin(send=send, last=last, microbatch=action.microbatch)
        self._gatherer.begin_phase()
        self._comms.mark("backward")
        if action.kind == "weights":
            self._deferred.pop(action[1:]).rest()
        else:
            self._differentiate(action)
        self._book.watch.check("the backward of the loss")
        without = last and self._handles and not reducer.received
        with named_range("waits"):
            self._idle = self._gatherer.end_phase(ask=send, says=IDLE if without else DONE)
        with named_range("reduce"):
            reducer.end()
        self._book.forget_dead()

    def _differentiate(self, action: Action) -> None:
        ends, deferred = self._course.ends(action, self._make_cotangent), self._deferred.get(action[1:])
        wanted, num = [*self._handles.values(), *ends.inputs], len(self._handles)
        grads: list[Tensor | None] = [None] * len(wanted)
        if not wanted or not ends.outputs:
            pass
        elif deferred is not None:
            grads[:] = deferred.first(ends.outputs, ends.cotangents, ends.inputs)
        else:
            with naming_used_up(), taking_early(ends.outputs[0]):
                grads[:] = torch.autograd.grad(ends.outputs, wanted, ends.cotangents, allow_unused=True)
        self._course.send_back(action, grads[num:])
        del grads[num:]
        self._take(grads)

    def _take(self, grads: list[Tensor | None]) -> None:
        """Takes the gradients that no hook has taken. `grads`, of all handles, is emptied."""
        # Aliases, as a hook takes: two leaves may have got one tensor, which neither then owns alone.
        mine = zip(self._handles, grads, strict=True)
        own = [(use, x.detach()) for use, x in mine if x is not None and use[0] in self._at_end]
        grads.clear()
        self._reducer.take_all(own)

    def _record_products(self, action: Action) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for a forward whose backward is split, which records its products."""
        if action[1:] not in self._split:
            return contextlib.nullcontext()
        deferred = self._deferred[action[1:]] = DeferredGradients([*self._handles.values()], opened)
        return deferred.recorded()

    def _is_last_action(self, action: Action) -> bool:
        """Returns whether a microbatch has all gradients of a chunk with an action."""
        return action.kind == "weights" or (action.kind == "backward" and action[1:] not in self._split)

    def _make_cotangent(self, total: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the cotangent of a microbatch's loss."""
        chunks, ranks = self._chunks, self._plan.mesh.axis_size(self._plan.batch_axes)
        terms = ranks * self._num if chunks is None else chunks.total * chunks.parts
        seed = torch.full_like(total, 1.0 / terms if weight is None else 1.0)
        return seed if self._loss_scale is None else seed * self._loss_scale.to(seed)

    def finish(self, blocks: Sequence[StoredValue], model_state: PyTree) -> BackwardResult:
        """Returns the sums over the microbatches; in the first step of a plan, ranks also agree on its outcome.

        Raises:
            NoGradientError: no microbatch of any rank gives a leaf a gradient.
            ValueError: a captured loss writes to parameters.
        """
        plan, comms = self._plan, self._comms
        self._gatherer.close()
        self._course.close()
        check_capture(plan, blocks, self._book, "the loss", named_leaves(model_state, "model_state"))
        if not comms.meets and comms.mesh.axis_size(plan.sharing_axes) < comms.mesh.size:
            # A group of ranks does not continue to the update while another one, which shares no leaves with it, has
            # failed.
            self._idle = all(comms.control.exchange(int(self._idle)))
        if self._idle and not plan.captured:  # ranks that capture agree on it afterwards
            raise NoGradientError(plan.trained)
        comms.mark("update")
        values = self._course.values([self._seen[k] for k in sorted(self._seen)])
        now = self._model_state.now if self._states is None else self._states.join_ranks(plan.batch_axes)
        out = outcome_of(values, self._num, self._reducer, self._course.kept(now))
        if not plan.learnt.reduce_order:
            first: Any = rounds_of(comms, plan).gather(self._reducer.queue.seen)[0]
            plan.learnt.take_reduce_order(first)
        agree_on_outcome(plan, comms, out)
        return out


def run_forward(plan: Plan, comms: Comms, blocks: Sequence[StoredValue], key: Any, f: Callable[[PyTree], Any]) -> Any:
    """`f(params)` without gradients, with the leaves as a loss sees them. Leaves that it returns come whole."""
    open_channels(comms, plan)
    kept, blocks = blocks, plan.by_layer(blocks)
    watch = make_write_detector(plan, kept, (), first=key not in plan.learnt.use_orders)
    gatherer = _make_gatherer(plan, comms, blocks, plan.learnt.use_order(key), keep=False)
    book = LeafBook(gatherer.whole, plan.layers, watch)
    with _sending_errors(gatherer, comms), torch.no_grad():
        params, *_ = enter(plan, blocks, book, None)
        gatherer.begin_phase()
        out = tree_map(opened, f(params))
        watch.check("the function")
        gatherer.end_phase(ask=True)
    gatherer.close()
    check_capture(plan, blocks, book, "the function")
    return out


def run_backward(
    plan: Plan,
    comms: Comms,
    blocks: Sequence[StoredValue],
    parts: StepParts,
    args: tuple[Any, ...],
    *,
    even: bool,
    model_state: PyTree = (),
    loss_scale: Tensor | None = None,
    ahead: OverlappedUpdate | None = None,
) -> BackwardResult:
    """Returns the loss and the summed gradients of one global batch, by the actions of the step's schedule.

    Args:
        plan: the layout.
        comms: the communicators.
        blocks: this rank's block of each parameter.
        parts: the loss, and the order in which its microbatches run.
        args: this rank's batch, and a key if the loss takes one.
        even: whether all ranks hold batches of the same shapes. If not, the loss must be a `WeightedMean`.
        model_state: a tree of this rank's blocks, for a loss that takes one.
        loss_scale: the factor of the gradients. None means 1.
        ahead: an update that uses gradients as soon as they are complete; stopped if they must be divided by a weight.
    """
    open_channels(comms, plan, _late_axes(plan, parts))
    states = named_leaves(model_state, "model_state")
    watch, blocks = make_write_detector(plan, blocks, states, first=not plan.learnt.compared), plan.by_layer(blocks)
    gatherer = _make_gatherer(plan, comms, blocks, plan.learnt.use_order("step"))
    check_canonical(plan, parts)
    chunks, uses = plan.chunks, dict[int, LeafUses]()
    if chunks is None:
        loss, batches = microbatches(parts.loss, args[0])
    else:
        chunks, uses = chunks._replace(parts=num_microbatches(parts.loss)), leaf_uses(plan, parts.loss)
        loss, batches = chunks_of(plan, chunks, parts.loss, args[0], even=even)
    course = _make_runner(plan, comms, parts, loss, batches, args[1:], model_state)
    book = LeafBook(gatherer.whole, plan.layers, watch)
    performer = Performer(plan, comms, course, len(batches), gatherer, book, ahead, chunks, uses)
    with _sending_errors(gatherer, comms), torch.enable_grad():
        performer.enter(blocks, even=even, model_state=model_state, loss_scale=loss_scale)
        for action in course.actions:
            with course.named(action):
                performer.perform(action)
        return performer.finish(blocks, model_state)


def _make_runner(
    plan: Plan,
    comms: Comms,
    parts: StepParts,
    loss: Loss,
    batches: list[Any],
    rest: tuple[Any, ...],
    model_state: PyTree,
) -> MicrobatchRunner:
    if parts.table is None:
        return LocalRunner(loss, batches, rest, parts.has_aux, parts.schedule)
    return Staged(plan, comms, loss, parts.table, batches, rest, parts.has_aux, model_state)


def _late_axes(plan: Plan, parts: StepParts) -> tuple[str, ...]:
    """Returns the axes along which ranks run different actions at the same time."""
    staged = pipelined_in(parts.loss)
    if parts.table is None or staged is None:
        return ()
    return (staged.axis,)


def _make_gatherer(
    plan: Plan, comms: Comms, blocks: Sequence[StoredValue], order: UseOrder, *, keep: bool = True
) -> Gatherer:
    return Gatherer(
        plan.layers,
        plan.gather_units,
        blocks,
        comms.channels,
        rounds_of(comms, plan),
        order,
        plan.zero.pace.prefetch_bytes,
        plan.mesh.device,
        keep=keep,
    )


@contextlib.contextmanager
def _sending_errors(gatherer: Gatherer, comms: Comms) -> Iterator[None]:
    """If connections cannot be closed, sends an error to the other ranks in their next round, then raises it."""
    try:
        yield
    except Exception as error:
        if comms.meets and not isinstance(error, RankError | TransportError):
            gatherer.fail(described(error))
        raise
