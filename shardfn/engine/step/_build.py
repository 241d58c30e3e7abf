"""Makes a step of its losses, optimizer and layouts, after each argument is checked."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.core import Mesh, P, PyTree, Zero, as_mesh, as_zero, check_key
from shardfn.engine.execution import check_descends, step_parts
from shardfn.engine.loss import (
    Finish,
    Loss,
    Masks,
    check_cuts,
    check_finish,
    check_loss,
    check_specs,
    default_batch,
    trained_leaves,
    unwrap,
)
from shardfn.engine.partition import bind
from shardfn.engine.pipeline import stage_axes
from shardfn.engine.plan import Planner
from shardfn.optim import GradientTransformation, Pair, as_transformation

from ._multi_loss import Objective, StepLoss, check_alike_losses
from ._training_step import ShardedStep


def build_step(
    loss: Loss | Mapping[str, Loss | Objective],
    optimizer: GradientTransformation | Pair,
    *,
    mesh: Mesh | DeviceMesh | None,
    specs: PyTree,
    batch: PyTree,
    zero: Zero | int | None,
    key: Tensor | None,
    state_specs: PyTree,
    flags: Mapping[str, bool],
    trainable: PyTree,
    finish: Finish | None = None,
) -> ShardedStep:
    """Returns the step of `sf.sharded_step`, which documents the arguments.

    Args:
        loss: see there, as for the others.
        optimizer: or a pair of optax's form.
        mesh: None for a single device.
        specs: specs of the parameters.
        batch: specs of the batch, or of each loss's, or None for the default.
        zero: a rule or a stage.
        key: None for losses without randomness.
        state_specs: state specs of the model state.
        flags: `count`, `has_aux`, `has_state`, `donate`, `skip_nonfinite`.
        trainable: a prefix tree of bools, or None.
        finish: the end of a step for the model state, or None.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    has_state, count = flags["has_state"], flags["count"]
    _check_flags(flags, trainable)
    check_finish(finish, has_state=has_state)
    losses = _named_losses(loss)
    if trainable is None:
        own = {name: trained_leaves(x.loss) if x.trainable is None else x.trainable for name, x in losses.items()}
        losses = {name: x._replace(trainable=own[name]) for name, x in losses.items()}
    unwrapped = {name: unwrap(x.loss, has_state=has_state, count=count) for name, x in losses.items()}
    for x in losses.values():
        check_loss(x.loss, key=key is not None, has_state=has_state, count=count)
    update = as_transformation(optimizer)
    check_descends(update)
    if key is not None:
        check_key("sharded_step", key)
    on, rule = as_mesh(mesh), as_zero(zero)
    batch = default_batch(specs, on) if batch is None else batch
    check_specs(specs, batch, rule, on)
    check_cuts(batch, rule)
    check_specs({"state_specs": state_specs}, P(), Zero(), on)
    rows = {"": batch} if "" in losses else _specs_by_loss(losses, batch)
    masks = trainable if "" in losses else Masks(trainable, {name: x.trainable for name, x in losses.items()})

    def planned(name: str, mask: PyTree, cut: PyTree) -> Planner:
        mixed = unwrapped[name].mixed
        return Planner(on, specs, cut, rule, mask, mixed and mixed.policy, stage_axes(unwrapped[name].loss))

    sources: dict[str, StepLoss] = {}
    for name, x in losses.items():
        planner = planned(name, trainable if x.trainable is None else x.trainable, rows[name])
        bound = bind(unwrapped[name], planner)
        sources[name] = StepLoss.of(
            bound, step_parts(bound, update, on, planner.num_chunks, finish=finish, **flags), planner
        )
    first = next(iter(sources))
    check_alike_losses(sources)
    planner = sources[first].planner if first == "" else planned(first, masks, batch)
    return ShardedStep(sources[first].parts, sources[first].unwrapped, planner, key, state_specs, sources)


def _named_losses(loss: Any) -> dict[str, Objective]:
    """Returns the losses of a step by name. One loss has the name "".

    Raises:
        TypeError: a name is not a string.
        ValueError: the dict is empty, or a name cannot be part of the name of a metric.
    """
    if not isinstance(loss, Mapping):
        return {"": loss if isinstance(loss, Objective) else Objective(loss)}
    if not loss:
        raise ValueError("sharded_step: the dict of losses is empty. Name at least one: {'actor': loss}.")
    wrong = [name for name in loss if not isinstance(name, str) or not name]
    if wrong:
        raise TypeError(f"sharded_step: losses are named by strings that are not empty, and there are {wrong}.")
    return {name: x if isinstance(x, Objective) else Objective(x) for name, x in loss.items()}


def _specs_by_loss(losses: Mapping[str, Objective], batch: PyTree) -> dict[str, PyTree]:
    """Returns the specs of each loss's batch.

    Raises:
        ValueError: they are a dict that does not name the losses.
    """
    if not isinstance(batch, Mapping):
        return dict.fromkeys(losses, batch)
    if set(batch) != set(losses):
        raise ValueError(
            f"sharded_step(batch={batch!r}): with several losses, {list(losses)}, the batch is a dict with an entry for"
            " each, and so are its specs; or one P for all."
        )
    return {name: batch[name] for name in losses}


def _check_flags(flags: Mapping[str, Any], trainable: Any) -> None:
    """Refuses other values than bools for flags, and names of leaves for the tree `trainable`.

    Raises:
        TypeError: the remedy is in the message.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"sharded_step({name}={value!r}): True or False, and this is a {type(value).__name__}.")
    if isinstance(trainable, list | tuple | set) and trainable and all(isinstance(name, str) for name in trainable):
        raise TypeError(
            f"trainable={trainable!r} is a {type(trainable).__name__} of names. Write True or False for each leaf:"
            f" trainable={{name: name in {sorted(trainable)} for name in params}}."
        )
