"""`sharded_step`: from `loss(params, batch)` to `step(state, batch) -> (state, metrics)` on a mesh.

The law: `sharded_step(loss, tx)(state, batch)` computes what the one-device step computes on the global batch. ZeRO's
stages, memory and prefetch change where things are and when they move, never a value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives import GlobalTensor, bind_mesh, psum
from shardfn.core import (
    Mesh,
    P,
    PyTree,
    Sharding,
    Zero,
    as_mesh,
    block_slices,
    broadcast_prefix,
    deferred,
    draw_block,
    fold_in,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_structure,
    tree_unflatten,
)
from shardfn.optim import GradientTransformation, inplace

from ._backward import Comms, Outcome, Plan, run_backward, run_forward
from ._check import check_batch, check_params, check_replicas, check_specs, is_spec
from ._layout import leaf_layout
from ._loss import Loss
from ._refresh import refresh
from ._state import TrainState, check_alive, donate, state_specs


def sharded_step(
    loss: Loss,
    optimizer: GradientTransformation,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    specs: PyTree = P(),
    batch: PyTree = P("dp"),
    zero: Zero | None = None,
    key: Tensor | None = None,
    has_aux: bool = False,
    donate: bool = True,
    skip_nonfinite: bool = False,
    trainable: PyTree = True,
) -> "ShardedStep":
    """The training step of `loss` under `optimizer`, on a mesh: `step(state, batch) -> (state, metrics)`.

    Between steps each leaf is kept as its storage sharding says; the loss sees it as its compute spec says. The conversions,
    and their transposes for the gradients, are inserted at each use of a leaf. Gradients are averaged over the axes that
    shard the batch.

    Args:
        loss: `loss(params, batch)` or, with `key`, `loss(params, batch, key)`; returns a 0-d tensor or a `WeightedMean`.
        optimizer: an (init, update) pair of `shardfn.optim`.
        mesh: from `make_mesh`, or a DeviceMesh with named axes; None is one device.
        specs: compute specs: a prefix tree of `P` for params. `P()` everywhere means pure data parallelism.
        batch: how the global batch is cut: a prefix tree of `P`; each rank passes its own rows.
        zero: the ZeRO rule; default stage 0.
        key: when given, the loss gets `fold_in(key, step)`, the same on all ranks.
        has_aux: whether the loss returns `(loss, aux)`; aux is a dict of scalars, averaged into the metrics.
        donate: whether a step reuses the buffers of the state it is given, which then cannot be touched again.
        skip_nonfinite: whether a step whose loss or gradient norm is not finite returns the state as it was.
        trainable: a prefix tree of bools for params; False leaves get no gradient and no optimizer state.

    Returns:
        The step. Its metrics are 0-d tensors, the same on all ranks: "loss" (global mean), "grad_norm" (of the averaged
        gradient, before clipping), "finite" (whether both are), "skipped", and the aux.

    Raises:
        ValueError: (at `init` or first call) specs, batch or state do not fit; every failing leaf is listed by path.
        DonatedError: (when called) the state was consumed by an earlier step.
        RankError: (when called) ranks disagree on what to run, or another rank failed.

    Example:
        >>> from shardfn import optim
        >>> step = sharded_step(lambda w, x: ((w * x) ** 2).mean(), optim.sgd(0.5))
        >>> state = step.init(torch.tensor(1.0))
        >>> state, metrics = step(state, torch.tensor([1.0, 1.0]))
        >>> state.params.full_tensor(), metrics["loss"]
        (tensor(0.), tensor(1.))

    References:
        Rajbhandari et al., ZeRO, 2019, https://arxiv.org/abs/1910.02054
    """
    return ShardedStep(
        loss, optimizer, as_mesh(mesh), specs, batch, zero or Zero(), key, has_aux, donate, skip_nonfinite, trainable
    )


class ShardedStep:
    """A compiled-by-annotation training step. Build one with `sharded_step`."""

    def __init__(
        self,
        loss: Loss,
        optimizer: GradientTransformation,
        mesh: Mesh,
        specs: PyTree,
        batch: PyTree,
        zero: Zero,
        key: Tensor | None,
        has_aux: bool,
        donate: bool,
        skip_nonfinite: bool,
        trainable: PyTree,
    ) -> None:
        check_specs(specs, batch, zero, mesh)
        self.mesh, self.zero = mesh, zero
        self._loss, self._optimizer, self._has_aux = loss, optimizer, has_aux
        self._specs, self._batch, self._trainable, self._key = specs, batch, trainable, key
        self._donate, self._skip = donate, skip_nonfinite
        self._update = inplace(optimizer)
        used = {a for p in tree_leaves(batch, is_leaf=is_spec) for a in mesh.axes(p.axes)}
        self._batch_axes = tuple(a for a in mesh.axis_names if a in used)
        self._comms: Comms | None = None
        self._plans: dict[Any, Plan] = {}

    def init(self, params: PyTree, *args: Any) -> TrainState:
        """The first state: every rank keeps its own blocks only.

        Args:
            params: a tree of tensors, the same on all ranks; or a function, called with `args`, that returns one. Inside
                such a function `shardfn`'s own draws are deferred, so that each rank draws its own blocks and no others.

        Raises:
            ValueError: the tree does not fit the specs.
            RankError: ranks pass different trees or different values.
        """
        if callable(params):
            with deferred():
                params = params(*args)
        check_params(params)
        leaves, treedef = tree_flatten(params)
        comms = self._ready_comms()
        plan = self._plan(treedef, tree_paths(params, "params"), [x.shape for x in leaves], [x.dtype for x in leaves])
        comms.control.agree("the parameters or the configuration of the step", self._describe(plan))
        check_replicas(leaves, plan, comms.control)
        blocks = []
        for i, leaf in enumerate(plan.leaves):
            where = block_slices(tuple(leaf.shape), leaf.param, self.mesh.shape, self.mesh.coords)
            blocks.append(draw_block(leaves[i], where).to(self.mesh.device).contiguous())
            leaves[i] = None
        return TrainState(
            self._wrap(plan, blocks), self._init_optimizer(plan, blocks), torch.zeros((), dtype=torch.int64), self._key
        )

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        """One step on this rank's rows of the global batch."""
        check_alive(state)
        plan = self._plan_of(state)
        comms = self._ready_comms()
        even = self._agree(plan, comms, state, batch)
        args = (batch,) if self._key is None else (batch, fold_in(self._key_of(state), state.step))
        blocks = [g.local for g in tree_leaves(state.params)]
        with bind_mesh(self.mesh):
            ranks = self.mesh.axis_size(self._batch_axes)
            out = run_backward(plan, comms, blocks, "step", self._loss, args, self._has_aux, ranks, even)
            metrics, scale = self._measure(plan, out)
            if self._skip and not bool(metrics["finite"]):
                metrics["skipped"] = torch.ones_like(metrics["finite"])
                return state, metrics
            grads = out.reducer.gradients()
            return self._advance(plan, comms, state, grads, scale), metrics

    def apply(self, f: Callable[..., Any], state: TrainState, *args: Any) -> Any:
        """`f(params, *args)` without gradients, with params as the loss sees them: for evaluation and sampling.

        Collective: every rank calls it. What `f` returns is returned as it is, so a mean over this rank's rows is this
        rank's. Passing the same function again reuses the order of gathers learnt the first time.
        """
        check_alive(state)
        plan, comms = self._plan_of(state), self._ready_comms()
        known = ("apply", f) in plan.use_orders
        if not all(comms.control.exchange(int(known))):
            plan.use_orders.pop(("apply", f), None)
        with bind_mesh(self.mesh):
            blocks = [g.local for g in tree_leaves(state.params)]
            return run_forward(plan, comms, blocks, ("apply", f), lambda params: f(params, *args))

    def specs(self, params: PyTree) -> PyTree:
        """The storage `Sharding` of each leaf of a parameter tree (tensors, `GlobalTensor`s, or anything with shape and dtype)."""
        leaves, treedef = tree_flatten(params)
        plan = self._plan(treedef, tree_paths(params, "params"), [x.shape for x in leaves], [x.dtype for x in leaves])
        return tree_unflatten(treedef, [Sharding(leaf.param) for leaf in plan.leaves])

    def _ready_comms(self) -> Comms:
        if self._comms is None or self._comms.broken:
            self._comms = Comms(self.mesh)
        return self._comms

    def _plan(self, treedef: Any, paths: list[str], shapes: list[torch.Size], dtypes: list[torch.dtype]) -> Plan:
        cache_key = (treedef, tuple(shapes), tuple(dtypes))
        if cache_key not in self._plans:
            tree = tree_unflatten(treedef, list(range(len(paths))))
            specs = broadcast_prefix(self._specs, tree, is_spec, names=("specs", "params"))
            train = broadcast_prefix(
                self._trainable, tree, lambda x: isinstance(x, bool), names=("trainable", "params")
            )
            specs = [s.spec if isinstance(s, Sharding) else s for s in specs]
            too_long = [f"{p} of shape {tuple(s)} has spec {c!r}" for p, s, c in zip(paths, shapes, specs, strict=True) if len(c) > len(s)]
            if too_long:
                raise ValueError("specs have more entries than the leaf has dims; drop some:\n  - " + "\n  - ".join(too_long))
            leaves = [
                leaf_layout(
                    p,
                    torch.Size(s),
                    d,
                    c,
                    zero=self.zero,
                    mesh=self.mesh,
                    batch_axes=self._batch_axes,
                    trainable=t and d.is_floating_point,
                )
                for p, s, d, c, t in zip(paths, shapes, dtypes, specs, train, strict=True)
            ]
            self._plans[cache_key] = Plan(leaves, treedef, self.zero)
        return self._plans[cache_key]

    def _plan_of(self, state: TrainState) -> Plan:
        if not isinstance(state, TrainState):
            raise TypeError(f"a step takes the TrainState that init or a step returned, got {type(state).__name__}.")
        leaves, treedef = tree_flatten(state.params)
        bad = [f"{p} is a {type(x).__name__}" for p, x in zip(tree_paths(state.params, "state.params"), leaves, strict=True) if not isinstance(x, GlobalTensor)]
        if bad:
            raise TypeError("state.params must hold GlobalTensors (make the state with step.init):\n  - " + "\n  - ".join(bad))
        plan = self._plan(treedef, tree_paths(state.params, "params"), [x.shape for x in leaves], [x.dtype for x in leaves])
        wrong = [
            f"{leaf.path} is kept as {x.spec!r}, this step keeps it as {leaf.param!r}"
            for leaf, x in zip(plan.leaves, leaves, strict=True)
            if x.spec != leaf.param
        ]
        if wrong:
            raise ValueError("the state was made by a step with other shardings:\n  - " + "\n  - ".join(wrong))
        return plan

    def _key_of(self, state: TrainState) -> Tensor:
        if state.key is None:
            raise ValueError("the step was built with a key, but the state has none; make the state with this step's init.")
        return state.key

    def _describe(self, plan: Plan) -> str:
        lines = [f"{x.path}: {tuple(x.shape)} {x.dtype} compute {x.compute!r} trainable {x.trainable}" for x in plan.leaves]
        flags = f"donate {self._donate} skip_nonfinite {self._skip} has_aux {self._has_aux} key {self._key is not None}"
        return "\n".join([f"{self.zero!r}", f"mesh {self.mesh.shape}", f"batch {self._batch!r}", flags, *lines])

    def _agree(self, plan: Plan, comms: Comms, state: TrainState, batch: PyTree) -> bool:
        """Compares what the ranks are about to run. True when all ranks pass batches of the same shapes."""
        fixed, sizes = check_batch(batch, self._batch, self.mesh)
        text = f"step {int(state.step)}\n{fixed}\n{len(plan.leaves)} leaves"
        if self.mesh.size == 1:
            return True
        comms.control.agree("what to run", text)
        return len(set(comms.control.exchange(hash(sizes) >> 2))) == 1

    def _measure(self, plan: Plan, out: Outcome) -> tuple[dict[str, Tensor], Tensor | None]:
        """Global loss, norm and aux; and by what the gradients are still to be multiplied (None: nothing)."""
        like = out.total
        count = torch.tensor(float(out.num_microbatches), dtype=torch.float64, device=like.device)
        row = [out.total, count if out.weight is None else out.weight]
        row += [x for pair in out.aux.values() for x in pair]
        sums = psum(torch.stack([x.to(torch.float64) for x in row]), self._batch_axes)
        loss = sums[0] / sums[1]
        norm = torch.sqrt(_sum_squares(plan, out))
        scale = None
        if out.weight is not None:
            scale = 1.0 / sums[1]
            norm = norm * scale
        metrics = {"loss": loss.to(like.dtype), "grad_norm": norm.to(torch.float32)}
        metrics["finite"] = torch.isfinite(metrics["loss"]) & torch.isfinite(metrics["grad_norm"])
        metrics["skipped"] = torch.zeros_like(metrics["finite"])
        for k, name in enumerate(out.aux):
            if name in metrics:
                raise ValueError(f"aux[{name!r}] has the name of a metric of the step; choose another.")
            metrics[name] = (sums[2 + 2 * k] / sums[3 + 2 * k]).to(torch.float32)
        return metrics, scale

    def _advance(
        self, plan: Plan, comms: Comms, state: TrainState, grads: dict[int, Tensor], scale: Tensor | None
    ) -> TrainState:
        take = donate if self._donate else _clone
        with torch.no_grad():
            params, opt_state = take(state.params), take(state.opt_state)
            blocks = tree_leaves(params)
            rows = [self._rows(leaf, b) for leaf, b in zip(plan.leaves, blocks, strict=True)]
            train = [leaf.trainable for leaf in plan.leaves]
            g = [self._own(plan.leaves[i], grads[i]) if t else None for i, t in enumerate(train)]
            if scale is not None:
                torch._foreach_mul_([x for x in g if x is not None], float(scale))
            new, opt_state = self._update(
                tree_unflatten(plan.treedef, g),
                opt_state,
                tree_unflatten(plan.treedef, [x if t else None for x, t in zip(rows, train, strict=True)]),
                specs=tree_unflatten(plan.treedef, [leaf.shard if leaf.trainable else None for leaf in plan.leaves]),
            )
            fresh = iter(tree_leaves(new))
            blocks = refresh(plan, comms.channels, blocks, [next(fresh) if t else None for t in train])
        return TrainState(
            self._wrap(plan, blocks),
            _like(opt_state, state.opt_state),
            state.step + 1,
            state.key,
        )

    def _rows(self, leaf: Any, block: Tensor) -> Tensor:
        """The part of a parameter that this rank updates."""
        if leaf.gathered or leaf.dim is None:
            return block
        return leaf.rows(block, self.mesh.axis_index(leaf.zero_axes)).contiguous()

    def _own(self, leaf: Any, grad: Tensor) -> Tensor:
        """The part of a summed gradient that this rank applies."""
        if leaf.cut or leaf.dim is None:
            return grad
        return leaf.rows(grad, self.mesh.axis_index(leaf.zero_axes)).contiguous()

    def _init_optimizer(self, plan: Plan, blocks: list[Tensor]) -> PyTree:
        rows = [self._rows(leaf, b) if leaf.trainable else None for leaf, b in zip(plan.leaves, blocks, strict=True)]
        tree = tree_unflatten(plan.treedef, rows)
        opt_state = self._optimizer.init(tree)
        specs = [leaf.shard for leaf in plan.leaves if leaf.trainable]
        shapes = [leaf.shape for leaf in plan.leaves if leaf.trainable]
        where = state_specs(opt_state, tree, specs, shapes)
        leaves, treedef = tree_flatten(opt_state)
        return tree_unflatten(
            treedef, [GlobalTensor(x, torch.Size(s), p, self.mesh) for x, (s, p) in zip(leaves, where, strict=True)]
        )

    def _wrap(self, plan: Plan, blocks: list[Tensor]) -> PyTree:
        return tree_unflatten(
            plan.treedef,
            [GlobalTensor(b, leaf.shape, leaf.param, self.mesh) for b, leaf in zip(blocks, plan.leaves, strict=True)],
        )


def _sum_squares(plan: Plan, out: Outcome) -> Tensor:
    """The squared global norm of the summed gradients (float64)."""
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for unit, part in out.reducer.parts().items():
        leaf = plan.leaves[plan.reduce_units[unit].leaves[0]]
        axes = tuple(dict.fromkeys(leaf.reduce_axes + leaf.compute.axes))
        by_axes.setdefault(axes, []).append(_square(part))
    total = torch.zeros((), dtype=torch.float64, device=out.total.device)
    for axes, squares in by_axes.items():
        total = total + psum(torch.stack(squares).sum(), axes)
    return total


def _square(x: Tensor) -> Tensor:
    if x.dtype in (torch.float32, torch.float64) and x.numel():
        return torch.dot(x, x).to(torch.float64)
    return torch.linalg.vector_norm(x, dtype=torch.float32).to(torch.float64) ** 2


def _clone(tree: PyTree) -> PyTree:
    return tree_map(lambda x: x.local.clone() if isinstance(x, GlobalTensor) else x, tree)


def _like(tree: PyTree, old: PyTree) -> PyTree:
    """Local tensors of an updated optimizer state, wrapped as the old state's leaves were."""
    leaves, treedef = tree_flatten(tree)
    if treedef != tree_structure(old):
        raise ValueError(f"the optimizer changed the structure of its state from {tree_structure(old)} to {treedef}.")
    meta = tree_leaves(old)
    return tree_unflatten(
        treedef, [GlobalTensor(x, m.shape, m.spec, m.mesh) for x, m in zip(leaves, meta, strict=True)]
    )
