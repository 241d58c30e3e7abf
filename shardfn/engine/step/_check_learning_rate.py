"""Optimizers whose updates would raise the loss, since they point along the gradient: refused before the first step."""

from shardfn.core import raise_all
from shardfn.engine.execution import decided_on, whole
from shardfn.engine.plan import Plan
from shardfn.optim import GradientTransformation, ascending


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
    up = ascending(decided_on(plan, optimizer), whole(plan))
    raise_all(
        ValueError,
        "the optimizer would add the gradients of these leaves to them, which raises the loss: masked(inner, mask)"
        " passes on the gradients of leaves whose mask is False, as in optax. To keep such leaves unchanged, pass"
        " sharded_step(trainable=mask), or optim.chain(optim.masked(inner, mask), optim.freeze(opposite_mask)). To"
        " train them by a rule of their own, use optim.multi_transform(rules, labels). To give all leaves one learning"
        " rate, put optim.scale_by_learning_rate(1e-3) last in an optim.chain. The leaves:",
        [f"{leaf.path}: {tuple(leaf.shape)}" for leaf, x in zip(trained, up, strict=True) if x],
    )
