"""`sharded_step`: from `loss(params, batch)` to `step(state, batch) -> (state, metrics)` on a mesh.

The law: `sharded_step(loss, tx)(state, batch)` has the result of the one-device step on the global batch. ZeRO's
stages, memory and prefetch change where leaves are and when they move, never a value.
"""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.core import Mesh, P, PyTree, Zero, explains_keywords
from shardfn.engine import Loss, Objective, ShardedStep, build_step
from shardfn.optim import GradientTransformation, Pair

# Arguments of steps in other libraries, and their counterparts here.
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


@explains_keywords(**_MEANT)
def sharded_step(
    loss: Loss | Mapping[str, Loss | Objective],
    optimizer: GradientTransformation | Pair,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    specs: PyTree = P(),
    batch: PyTree = None,
    zero: Zero | int | None = None,
    key: Tensor | None = None,
    has_aux: bool = False,
    has_state: bool = False,
    state_specs: PyTree = P(),
    finish: Callable[[PyTree], PyTree] | None = None,
    donate: bool = True,
    skip_nonfinite: bool = False,
    trainable: PyTree = None,
) -> ShardedStep:
    """Returns the training step of `loss` under `optimizer`, on a mesh: `step(state, batch) -> (state, metrics)`.

    Between steps each leaf is stored in its storage sharding. The loss sees it in its compute spec. The step inserts
    the conversion where a leaf is used, and its transpose for the gradient. Gradients are averaged over the axes that
    shard the batch.

    Args:
        loss: `loss(params, batch)` or, with `key`, `loss(params, batch, key)`, and returns a 0-d tensor or a
            `WeightedMean`. `jit`, `accumulate` and `mixed_precision` around it, in any order, apply to the whole step.
            Or a dict of such losses, or `Objective`s, by name, whose gradients are added. Each takes its own batch: the
            step takes a dict of batches with the same names.
        optimizer: one of `shardfn.optim`, or any pair `(init, update)` as in optax. See `optim.as_transformation`.
        mesh: mesh from `make_mesh`, or a `DeviceMesh` with named axes. None means one device, in a program of one
            process.
        specs: compute specs: a prefix tree of `P` for params. `P()` everywhere means pure data parallelism.
        batch: how the global batch is cut: a prefix tree of `P`. Each rank passes its own rows; along axes that do not
            cut the batch, ranks pass the same rows. Default: cut along "dp" and all axes of the mesh that no spec uses.
        zero: the ZeRO rule, or its stage alone; default stage 0.
        key: a key from `sf.key(seed)`. The loss then takes a third argument, `fold_in(key, step)`, the same on all
            ranks.
        has_aux: whether the loss returns `(loss, aux)`; aux is a dict of scalars, averaged into the metrics.
        has_state: whether the loss is `loss(params, model_state, batch[, key]) -> (loss[, aux], model_state)`. The
            model state is a tree of tensors that are not parameters, such as running statistics. `init(params,
            model_state=...)` takes the first one. Each microbatch gets that of the one before. A skipped step keeps the
            old one. It has no gradient.
        state_specs: a prefix tree of `P` for the model state. The loss sees this rank's blocks. Along axes that are not
            in a spec, all ranks must return the same values.
        finish: `finish(model_state) -> model_state`, a pure function that is called once a step, after the last
            microbatch. It sees this rank's blocks, may use collectives, and runs inside a captured step. A skipped step
            skips it, `gradients` leaves it to `update`. Until it has run, ranks may hold parts of a sum that it makes.
        donate: whether a step reuses the buffers of the state that it takes. That state cannot be used afterwards.
        skip_nonfinite: whether a step whose loss or gradient norm is not finite returns the old state.
        trainable: a prefix tree of bools for params. Leaves that are False get no gradient and no optimizer state.
            Default: the adapters for a loss of `lora.adapt`, else all leaves but parameters with `requires_grad=False`,
            such as those from `from_module`.

    Returns:
        The step. Its metrics are 0-d tensors, the same on all ranks: "loss" (global mean), "grad_norm" (of the averaged
        gradient, before clipping; if the optimizer does its own averaging, the root of the mean of the ranks' squared
        norms), "finite" (whether both are finite), "skipped", the aux values, and with a loss scale "loss_scale" (the
        one used). With several losses "loss" is their sum, and the metrics of each are "name/loss", "name/grad_norm",
        and so on. `gradients` and `update` are the two halves of a step.

    Raises:
        TypeError: an argument has the wrong type, or the loss takes other arguments than the step passes. The message
            has the remedy.
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
    flags = {"has_aux": has_aux, "has_state": has_state, "donate": donate, "skip_nonfinite": skip_nonfinite}
    return build_step(
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
