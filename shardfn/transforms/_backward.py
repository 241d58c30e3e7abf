"""One step's loss and gradients: storage -> compute, the user's loss, and the transpose, microbatch by microbatch."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import TransportError
from shardfn.core import PyTree, RankError, Stored, tree_unflatten
from shardfn.graph import storage_of

from ._accumulate import microbatches
from ._ahead import Ahead
from ._capture import recorder
from ._comms import Comms, described, open_channels
from ._copies import alias, traced_once
from ._gather import DONE, IDLE, Gatherer
from ._layout import LeafLayout
from ._lazy import LazyLeaf, LeafBook
from ._loss import Loss, NoGradientError, Value, WeightedMean, evaluate
from ._order import UseOrder
from ._plan import Plan
from ._reduce import Reducer
from ._splice import taking_early
from ._writes import Watch, check_graph

# How the outcome of a plan begins where gradients must be divided by the weight of the whole batch.
WEIGHTED = "a WeightedMean"


@dataclasses.dataclass
class Outcome:
    """What the backward leaves: sums over this rank's microbatches, and gradients summed over ranks."""

    total: Tensor
    weight: Tensor | None
    aux: dict[str, WeightedMean]
    num_microbatches: int
    reducer: Reducer
    plan: Plan

    def gradients(self) -> dict[int, Tensor | Stored]:
        """Per leaf, what the optimizer takes of the summed gradient: this rank's rows, or the whole block."""
        return self.plan.by_leaf(self.reducer.gradients())


def run_forward(
    plan: Plan, comms: Comms, blocks: Sequence[Tensor | Stored], key: Any, f: Callable[[PyTree], Any]
) -> Any:
    """`f(params)` without gradients, with the leaves as a loss sees them."""
    open_channels(comms, plan)
    kept, blocks = blocks, plan.by_layer(blocks)
    gatherer = _gatherer(plan, comms, blocks, plan.use_order(key), keep=False)
    watch = _watch(plan, kept)
    book = LeafBook(gatherer.whole, plan.layers, watch)
    with _told(gatherer, comms), torch.no_grad():
        params, _ = _enter(plan, blocks, book, None)
        gatherer.begin_phase()
        out = f(params)
        watch.check("the function")
        gatherer.end_phase(ask=True)
    gatherer.close()
    return out


def run_backward(
    plan: Plan,
    comms: Comms,
    blocks: Sequence[Tensor | Stored],
    loss: Loss,
    args: tuple[Any, ...],
    *,
    has_aux: bool,
    even: bool,
    loss_scale: Tensor | None = None,
    ahead: Ahead | None = None,
) -> Outcome:
    """The loss and the summed gradients of one global batch.

    Args:
        plan: the layout.
        comms: the communicators.
        blocks: this rank's block of each parameter.
        loss: the user's loss, possibly accumulated.
        args: this rank's batch, and a key if the loss takes one.
        has_aux: whether the loss returns aux.
        even: whether all ranks hold batches of the same shapes; if not, the loss must be a `WeightedMean`.
        loss_scale: what the gradients come multiplied by; None = nothing.
        ahead: an update that takes gradients as they are complete; it is stopped if they must be divided by a weight.
    """
    open_channels(comms, plan)
    ranks = plan.mesh.axis_size(plan.batch_axes)
    watch, blocks = _watch(plan, blocks), plan.by_layer(blocks)
    gatherer = _gatherer(plan, comms, blocks, plan.use_order("step"))
    reducer = Reducer(plan, comms.channels, plan.reduce_order)
    values: list[Value] = []
    idle = False
    with _told(gatherer, comms), torch.enable_grad():
        inner, batches = microbatches(loss, args[0])
        book = LeafBook(gatherer.whole, plan.layers, watch)
        params, handles = _enter(plan, blocks, book, reducer)
        for k, batch in enumerate(batches):
            last = k == len(batches) - 1
            send = last or plan.zero.accumulate == "each"
            reducer.begin(send=send, last=last)
            gatherer.begin_phase()
            if last and ahead is not None:  # whose reads queue behind those of the first parameters
                ahead.begin()
            comms.mark("forward")
            with book.keep_out_of_graph() if plan.gather_units else contextlib.nullcontext():
                value = evaluate(inner, params, (batch, *args[1:]), has_aux)
            watch.check("the loss")
            if not even and value.weight is None:
                raise ValueError(
                    "ranks hold batches of different sizes, so the mean of their losses is not the global mean;"
                    " return WeightedMean(total, weight) from the loss, or pass equal batches."
                )
            gatherer.end_phase(ask=False)
            if k == 0:
                reducer.expect(plan.reduce_order or plan.guessed_order(plan.use_order("step")))
            if last and ahead is not None:
                if value.weight is None:
                    reducer.give_to(ahead)
                else:  # gradients are divided by the weight of all ranks' batches first
                    ahead.stop()
            values.append(Value(value.total.detach(), value.weight, value.aux))
            gatherer.begin_phase()
            comms.mark("backward")
            _differentiate(value, handles, plan.num_left / (ranks * len(batches)), loss_scale)
            del value
            watch.check("the backward of the loss")
            idle = gatherer.end_phase(ask=send, says=IDLE if last and handles and not reducer.received else DONE)
            reducer.end()
            book.forget_dead()
        gatherer.close()
        _check_capture(plan, blocks, book)
        if idle and not plan.captured:  # ranks that capture agree on it afterwards
            raise NoGradientError(plan.trained)
        comms.mark("update")
        out = _outcome(values, reducer, plan)
        if not plan.reduce_order:
            first: Any = comms.control.gather(reducer.seen)[0]
            plan.reduce_order = first
        _agree_on_outcome(plan, comms, out)
    return out


def _gatherer(
    plan: Plan, comms: Comms, blocks: Sequence[Tensor | Stored], order: UseOrder, *, keep: bool = True
) -> Gatherer:
    pieces = [b if leaf.lazy else None for leaf, b in zip(plan.layers, blocks, strict=True)]
    return Gatherer(
        plan.layers,
        plan.gather_units,
        pieces,
        comms.channels,
        comms.control,
        order,
        plan.zero.prefetch,
        plan.mesh.device,
        keep=keep,
    )


def _enter(
    plan: Plan, blocks: Sequence[Tensor | Stored], book: LeafBook, reducer: Reducer | None
) -> tuple[PyTree, list[Tensor]]:
    """The parameter tree as the loss sees it, and the handles that its gradients arrive at."""
    entered: list[Tensor] = []
    handles: list[Tensor] = []
    for i, (leaf, block) in enumerate(zip(plan.layers, blocks, strict=True)):
        handle = _handle(plan, leaf) if leaf.lazy else _resident(leaf, block)
        if isinstance(block, Tensor) and not leaf.lazy and not _as_it_is(leaf, block):
            book.look_after(leaf.path, handle)
        if not leaf.lazy:
            book.watch.enter(leaf.path, handle)
        if reducer is not None and leaf.trainable:
            handle.requires_grad_()
            handle.register_hook(_taker(reducer, i, alias(handle)))
            handles.append(handle)
        entered.append(LazyLeaf.make(i, leaf.path, handle, book) if leaf.lazy else handle)
    layers = iter(entered)
    tree = [
        LazyLeaf.stack(leaf.path, [next(layers) for _ in leaf.layers], book) if leaf.layers else next(layers)
        for leaf in plan.leaves
    ]
    return tree_unflatten(plan.treedef, tree), handles


def _watch(plan: Plan, blocks: Sequence[Tensor | Stored]) -> Watch:
    """What sees writes to the blocks that the loss is given as they are."""
    watch = Watch()
    for leaf, block in zip(plan.leaves, blocks, strict=True):
        if isinstance(block, Tensor) and _as_it_is(leaf, block) and not plan.captured:
            watch.add(leaf.path, block, kept=True)
    return watch


def _check_capture(plan: Plan, blocks: Sequence[Tensor | Stored], book: LeafBook) -> None:
    """Refuses a captured loss that writes to parameters."""
    notes = recorder()
    if notes is None:
        return
    here = [(leaf.path, x) for leaf, x in zip(plan.layers, blocks, strict=True) if isinstance(x, Tensor)]
    leaves = {storage_of(x): path for path, x in here} | {k: path for k, (path, _) in book.captured.items()}
    check_graph(notes.tracer.graph, leaves)


def _as_it_is(leaf: LeafLayout, block: Tensor) -> bool:
    """Whether the loss sees the state's own memory."""
    return not leaf.lazy and block.dtype == leaf.dtypes.compute


def _handle(plan: Plan, leaf: LeafLayout) -> Tensor:
    """A tensor of the leaf's shape that costs one element."""
    dtype = leaf.dtypes.compute

    def make() -> list[Tensor]:
        return [torch.empty_strided(leaf.block, (0,) * len(leaf.block), dtype=dtype, device=plan.mesh.device)]

    return traced_once(("handle", leaf.block, dtype), make, [])[0]


def _resident(leaf: LeafLayout, block: Tensor | Stored) -> Tensor:
    """A leaf that is there, in the dtype that the loss sees."""
    assert isinstance(block, Tensor)
    return alias(block if _as_it_is(leaf, block) else block.to(leaf.dtypes.compute))


def _taker(reducer: Reducer, leaf: int, stand_in: Tensor) -> Callable[[Tensor | None], Tensor | None]:
    """A hook that takes a gradient away and leaves autograd something of its shape that costs no memory."""

    def take(grad: Tensor | None) -> Tensor | None:
        if grad is None:  # it was taken before
            return None
        reducer.take(leaf, alias(grad))
        return stand_in

    return take


def _differentiate(value: Value, handles: list[Tensor], scale: float, loss_scale: Tensor | None) -> None:
    if not handles or not value.total.requires_grad:
        return
    seed = torch.full_like(value.total, scale if value.weight is None else 1.0)
    if loss_scale is not None:
        seed = seed * loss_scale.to(seed)
    with taking_early(value.total):
        torch.autograd.grad(value.total, handles, seed, allow_unused=True)


@contextlib.contextmanager
def _told(gatherer: Gatherer, comms: Comms) -> Any:
    """Where connections cannot be closed: tells the other ranks of an error in their next round, before raising it."""
    try:
        yield
    except Exception as error:
        if comms.meets and not isinstance(error, RankError | TransportError):
            gatherer.fail(described(error))
        raise


def _agree_on_outcome(plan: Plan, comms: Comms, out: Outcome) -> None:
    """Compares, in the first step of a plan, what the losses of the ranks return: their sums must mean the same."""
    if plan.outcome is None:
        plan.outcome = f"{'a mean' if out.weight is None else WEIGHTED} and aux {sorted(out.aux)}"
        comms.control.agree("what the loss returns", plan.outcome)


def _outcome(values: list[Value], reducer: Reducer, plan: Plan) -> Outcome:
    total = torch.stack([v.total for v in values]).sum()
    weights = [v.weight for v in values if v.weight is not None]
    weight = torch.stack(weights).sum() if weights else None
    aux: dict[str, WeightedMean] = {}
    for name in sorted(values[0].aux):
        pairs = [v.aux[name] for v in values]
        aux[name] = WeightedMean(sum(p.total for p in pairs), sum(p.weight for p in pairs))  # pyright: ignore[reportArgumentType]
    return Outcome(total, weight, aux, len(values), reducer, plan)
