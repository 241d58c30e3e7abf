"""Makes the parts of a step, from an unwrapped loss and an optimizer; the text on which ranks agree, and refusals."""

from torch import Tensor

from shardfn.collectives import transforming
from shardfn.core import Mesh, PyTree, describe, raise_all
from shardfn.engine.loss import (
    Finish,
    Unwrapped,
    check_scaled,
    cuts_by_function,
    describe_function,
    num_microbatches,
    with_masters,
)
from shardfn.engine.pipeline import check_stages, pipelined_in, table_of
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import StepParts, accumulation
from shardfn.graph import resolve_backend
from shardfn.optim import GradientTransformation, find_ascending
from shardfn.schedules import as_text

from ._update import decided_on, whole


def step_parts(
    loss: Unwrapped,
    optimizer: GradientTransformation,
    mesh: Mesh,
    num_chunks: int,
    *,
    finish: Finish | None = None,
    **flags: bool,
) -> StepParts:
    """Returns the parts of a step that accumulates microbatches, or runs stages of a pipeline side by side.

    The optimizer keeps master copies if the loss's policy requires it. `num_chunks`: see `Planner`.

    Raises:
        ValueError: the pipeline cannot run on the mesh.
    """
    mixed = loss.mixed
    if mixed is not None:
        check_scaled(mixed)
        optimizer = with_masters(optimizer, mixed.policy)
    num = num_chunks * num_microbatches(loss.loss)
    how = {"loss_scale": mixed and mixed.loss_scale, "schedule": accumulation(num), "table": table_of(loss, num, mesh)}
    how |= {"finish": finish}
    return StepParts(loss.loss, optimizer, **flags, **how)  # pyright: ignore[reportArgumentType]


def step_lines(
    unwrapped: Unwrapped, parts: StepParts, plan: Plan, key: Tensor | None, state_specs: PyTree
) -> list[str]:
    """Returns the facts that ranks agree on before the first transfer, besides the layout, one a line."""
    flags = f"donate {parts.donate} skip_nonfinite {parts.skip_nonfinite} has_aux {parts.has_aux} count {parts.count}"
    kept = [f"state_specs {state_specs}"] if parts.has_state else []
    kept += [] if parts.finish is None else describe(parts.finish, "finish")
    seed = f"key {None if key is None else key.tolist()}"
    made = [*describe_function(unwrapped, "loss"), *describe(decided_on(plan, parts.optimizer), "optimizer")]
    check_canonical(plan, parts)
    if unwrapped.jitted is not None:
        check_backend(plan, resolve_backend(unwrapped.jitted.backend))
    staged = pipelined_in(parts.loss)
    if parts.table is not None and staged is not None:
        check_stages(plan, staged)
        return [flags, seed, *made, f"pipeline along {staged.axis!r}: {parts.table.as_text()}", *kept]
    return [flags, seed, *made, f"schedule {as_text(parts.schedule)}", *kept]


def check_canonical(plan: Plan, parts: StepParts) -> None:
    """Refuses features that cannot be combined with canonical sums.

    Raises:
        ValueError: lists all such features.
    """
    if plan.chunks is None:
        return
    # Blocks over an axis of the batch, such as experts, have gradients that the loss has added up over ranks already.
    cut = {x.path: x.mean_axes for x in plan.layers if x.trainable and x.mean_axes != plan.batch_axes}
    elsewhere = [leaf.path for leaf in plan.layers if leaf.trainable and leaf.extra_axes and leaf.path not in cut]
    over = tuple(a for a in plan.batch_axes if any(a not in axes for axes in cut.values()))
    problems = {
        f"{plan.chunks.ranks} ranks share {plan.chunks.total} chunks; raise reduction_chunks": plan.chunks.num == 0
        or plan.chunks.ranks > plan.chunks.total,
        "a schedule whose backwards are split, or come in another order than the microbatches: use '1f1b', 'gpipe' or"
        " 'interleaved'": parts.table is not None
        and (parts.table.splits or parts.table.find_late("backward") is not None),
        "accumulate(split=): it cuts a rank's rows, whose number depends on the number of ranks": cuts_by_function(
            parts.loss
        ),
        "finish=: the states of chunks are joined before it, and it would add them up again": parts.finish is not None,
        "torch.func: its sums are made in order of ranks": transforming(),
        "an optimizer that averages gradients itself": parts.optimizer.needs.phases is not None,
        f"{', '.join(elsewhere)}: sharded along some axes of the batch only; Zero(axis={plan.batch_axes})": bool(
            elsewhere
        ),
        f"{', '.join(cut)}: the specs cut them along axes that cut the batch, {over}, so that their gradients come"
        " added up over the rows of all ranks there, in an order that depends on the number of ranks; cut them along"
        f" another axis than {plan.batch_axes}, or use reduction='by_rank'": bool(cut),
    }
    raise_all(
        ValueError,
        "Zero(reduction='canonical') does not go with these; leave them out, or the reduction:",
        [text for text, is_wrong in problems.items() if is_wrong],
    )


def check_backend(plan: Plan, backend: str) -> None:
    """Refuses canonical sums in compiled graphs.

    A compiler chooses the order of the sums in an operation by the graph around it, and a rank with fewer chunks has
    another graph.

    Raises:
        ValueError: names the back end and the remedy.
    """
    if plan.chunks is not None and backend != "graph":
        raise ValueError(
            f"Zero(reduction='canonical') needs the operations of the eager step, got backend={backend!r}, which fuses"
            " them by the graph around, and so by the number of chunks of a rank. Use jit(loss, backend='graph')."
        )


def check_descends(rule: GradientTransformation) -> None:
    """Refuses an optimizer without a learning rate, such as `chain()` of nothing or a clip alone.

    Raises:
        ValueError: names a transform to put after it.
    """
    if rule.needs.ascends is True:
        raise ValueError(
            "the optimizer has no learning rate: its updates point along the gradient, so that adding them raises the"
            " loss. Put one after it, as in optim.chain(optimizer, optim.scale_by_learning_rate(1e-3)), or an"
            " optimizer, as in optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))."
        )


def check_leaves_descend(plan: Plan, optimizer: GradientTransformation) -> None:
    """Refuses an optimizer that would add the gradients of some leaves, such as `masked(adamw(1e-3), mask)` alone.

    Raises:
        ValueError: lists these leaves and the remedies.
    """
    if isinstance(optimizer.needs.ascends, bool):
        return
    trained = [leaf for leaf in plan.leaves if leaf.trainable]
    up = find_ascending(decided_on(plan, optimizer), whole(plan))
    raise_all(
        ValueError,
        "the optimizer would add the gradients of these leaves to them, which raises the loss: masked(inner, mask)"
        " passes on the gradients of leaves whose mask is False, as in optax. To keep such leaves unchanged, pass"
        " sharded_step(trainable=mask), or optim.chain(optim.masked(inner, mask), optim.freeze(opposite_mask)). To"
        " train them by a rule of their own, use optim.multi_transform(rules, labels). To give all leaves one learning"
        " rate, put optim.scale_by_learning_rate(1e-3) last in an optim.chain. The leaves:",
        [f"{leaf.path}: {tuple(leaf.shape)}" for leaf, x in zip(trained, up, strict=True) if x],
    )
