"""`sharded_step`: from `loss(params, batch)` to `step(state, batch) -> (state, metrics)` on a mesh.

The law: `sharded_step(loss, tx)(state, batch)` has the result of the one-device step on the global batch. ZeRO's
stages, memory and prefetch change the place of leaves and the time of transfers, never a value.
"""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn import core, engine
from shardfn.optim import GradientTransformation, Pair

# Arguments of steps in other libraries, and the counterparts here.
_MEANT = {
    "stage": "zero={value!r}",
    "zero_stage": "zero={value!r}",
    "policy": "sharded_step(sf.mixed_precision(loss, policy), ...)",
    "precision": "sharded_step(sf.mixed_precision(loss, sf.Policy.bf16()), ...)",
    "dtype": "sharded_step(sf.mixed_precision(loss, sf.Policy.bf16()), ...)",
    "accumulate": "sharded_step(sf.accumulate(loss, {value!r}), ...)",
    "num_microbatches": "sharded_step(sf.accumulate(loss, {value!r}), ...)",
    "jit": "sharded_step(sf.jit(loss), ...)",
    "params": "step = sharded_step(loss, optimizer); state = step.init(params)",
    "seed": "key=sf.key({value!r})",
    "max_norm": "sf.optim.chain(sf.optim.clip_by_global_norm({value!r}), optimizer)",
    "clip": "sf.optim.chain(sf.optim.clip_by_global_norm({value!r}), optimizer)",
    "tx": "it as optimizer=",
    "loss_fn": "it as loss=",
}


@core.explains_keywords(**_MEANT)
def sharded_step(
    loss: engine.Loss | Mapping[str, engine.Loss | engine.Objective],
    optimizer: GradientTransformation | Pair,
    *,
    mesh: core.Mesh | DeviceMesh | None = None,
    specs: core.PyTree = core.P(),
    batch: core.PyTree = None,
    zero: core.Zero | int | None = None,
    key: Tensor | None = None,
    count: bool = False,
    has_aux: bool = False,
    has_state: bool = False,
    state_specs: core.PyTree = core.P(),
    finish: Callable[[core.PyTree], core.PyTree] | None = None,
    donate: bool = True,
    skip_nonfinite: bool = False,
    trainable: core.PyTree = None,
) -> engine.ShardedStep:
    """Returns the training step of `loss` on a mesh: `step(state, batch) -> (state, metrics)`.

    Between steps each leaf is stored in the storage sharding. The loss sees the leaf in the compute spec. The step
    inserts the conversion where a leaf is used, and the transpose for the gradient. Gradients are averaged over the
    axes of the batch: for example 6 rows on 3 ranks along "dp" are 2 rows each.

    Args:
        loss: `loss(params, batch)` or, with `key`, `loss(params, batch, key)`, with a 0-d tensor or a `WeightedMean` as
            the result. `jit`, `accumulate` and `mixed_precision` around it, in any order, apply to the whole step. Or a
            dict of such losses, or `Objective`s, by name: gradients are added, and the step takes a dict of batches
            with the same names.
        optimizer: optimizer of `shardfn.optim`, or any pair `(init, update)` as in optax. See
            `optim.as_transformation`.
        mesh: mesh from `make_mesh`, or a `DeviceMesh` with named axes. None means one device, in a program of one
            process.
        specs: compute specs, a prefix tree of `P` for params. `P()` everywhere means pure data parallelism.
        batch: specs of the global batch, a prefix tree of `P`. Each rank passes the rank's rows. Along axes that do not
            cut the batch, ranks pass the same rows. Default: a cut along "dp" and all axes of the mesh without a use in
            a spec.
        zero: ZeRO rule, or only the stage. Default: stage 0.
        key: key from `sf.key(seed)`. The loss then takes a third argument, `fold_in(key, step)`, the same on all ranks.
        count: whether the loss takes the number of the step, `loss(params, batch[, key], step=step)`: an int64 0-d
            tensor, 0 in the first step, the same on all ranks and in all microbatches. The number is an input of a
            captured step, so that one graph serves all steps. A skipped step is not counted. Of the functions of a
            `pipeline`, `last` takes the number.
        has_aux: whether the loss returns `(loss, aux)`. The aux is a dict of scalars, averaged into the metrics.
        has_state: whether the loss is `loss(params, model_state, batch[, key]) -> (loss[, aux], model_state)`. The
            model state is a tree of tensors other than parameters, such as running statistics. `init(params,
            model_state=...)` takes the first model state. Each microbatch gets the state after the previous microbatch.
            A skipped step keeps the old state. The model state has no gradient.
        state_specs: prefix tree of `P` for the model state. The loss sees this rank's blocks. Along axes outside of a
            spec, all ranks must return the same values.
        finish: `finish(model_state) -> model_state`, pure function, called once per step, after the last microbatch.
            The function sees this rank's blocks, may use collectives, and runs inside a captured step. A skipped step
            skips `finish`, and `gradients` leaves the call to `update`. Before `finish`, ranks may hold parts of a sum.
        donate: whether a step reuses the buffers of the given state. The given state cannot be used afterwards.
        skip_nonfinite: whether a step with a loss or gradient norm that is not finite returns the old state.
        trainable: prefix tree of bools for params. Leaves with False get no gradient and no optimizer state. Default:
            the adapters for a loss of `lora.adapt`, else all leaves but parameters with `requires_grad=False`, such as
            those from `from_module`.

    Returns:
        The step. The metrics are 0-d tensors, the same on all ranks: "loss" (global mean), "grad_norm" (of the averaged
        gradient, before clipping; if the optimizer averages the gradients, the root of the mean of the ranks' squared
        norms), "finite" (whether both are finite), "skipped", the aux values, and with a loss scale "loss_scale" (the
        used scale). With several losses "loss" is the sum, and the metrics of each loss are "name/loss",
        "name/grad_norm", and so on. `gradients` and `update` are the two halves of a step.

    Raises:
        TypeError: an argument has the wrong type, or the loss does not take the arguments of the step. The message has
            the remedy.
        ValueError: the optimizer has no learning rate, or `mesh` is None in a program of several processes. (At `init`
            or the first call) specs, batch or state do not fit. The message lists every such leaf by path.
        DonatedError: (when called) the state was consumed by an earlier step.
        RankError: (when called) ranks disagree on the call, or pass different rows where all must pass the same, or
            another rank failed.
        FloatingPointError: (when called) gradients overflow although the loss scale is at its minimum.

    Example:
        >>> import torch
        >>> from shardfn import optim
        >>> step = sharded_step(lambda w, x: ((w * x) ** 2).mean(), optim.sgd(0.5))
        >>> state = step.init(torch.tensor(1.0))
        >>> state, metrics = step(state, torch.tensor([1.0, 1.0]))
        >>> state.params.full_tensor(), metrics["loss"]
        (tensor(0.), tensor(1.))

    References:
        Rajbhandari et al., ZeRO, 2019, https://arxiv.org/abs/1910.02054
    """
    flags = {
        "count": count,
        "has_aux": has_aux,
        "has_state": has_state,
        "donate": donate,
        "skip_nonfinite": skip_nonfinite,
    }
    return engine.build_step(
        loss,
        optimizer,
        mesh=mesh,
        specs=specs,
        batch=batch,
        zero=zero,
        key=key,
        state_specs=state_specs,
        flags=flags,
        trainable=trainable,
        finish=finish,
    )
