"""Refusal of features that cannot be combined with canonical sums."""

from shardfn.collectives import transforming
from shardfn.core import raise_all
from shardfn.engine.loss import num_microbatches
from shardfn.engine.pipeline import pipelined_in
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import StepParts


def check_canonical(plan: Plan, parts: StepParts, *, jitted: bool = False) -> None:
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
    staged = pipelined_in(parts.loss) is not None  # also on one rank, where its microbatches are accumulated
    problems = {
        f"{plan.chunks.ranks} ranks share {plan.chunks.total} chunks; raise reduction_chunks": plan.chunks.num == 0
        or plan.chunks.ranks > plan.chunks.total,
        "jit and lower: leave them out": jitted or plan.captured,
        "a pipeline: its microbatches are added up in another order": staged,
        "accumulate: the chunks are the microbatches; leave it out": num_microbatches(parts.loss) > 1 and not staged,
        "model state: it would be changed chunk by chunk": parts.has_state,
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
