"""The parity harness: a sharded run equals the run on a single device.

The one-device side is a plain loop: torch.autograd on the whole tree, the optimizer's pure `update`, and an addition.
The loop shares no code with `sharded_step` except the optimizer's mathematics.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import nn
from shardfn.collectives import unshard
from shardfn.core import (
    Dtypes,
    Mesh,
    P,
    Policy,
    PyTree,
    Zero,
    as_mesh,
    block_slices,
    broadcast_prefix,
    fold_in,
    is_frozen,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine import num_microbatches
from shardfn.engine.loss import trained_leaves
from shardfn.optim import GradientTransformation, LossScale, MasterState, Pair, apply_updates, as_transformation
from shardfn.state import TrainState
from shardfn.transforms import Mixed, ShardedStep, WeightedMean, default_batch, sharded_step

# Relative to the largest element of a leaf. No test loosens the tolerance.
RTOL = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


class Run(NamedTuple):
    """Results of a few steps: whole tensors, and a dict of metrics for each step."""

    params: PyTree
    opt_state: PyTree
    metrics: list[dict[str, Tensor]]
    model_state: PyTree = ()


def one_device(
    loss: Callable[..., Any],
    optimizer: GradientTransformation | Pair,
    params: PyTree,
    batches: Sequence[PyTree],
    *,
    trainable: PyTree = None,
    key: Tensor | None = None,
    count: bool = False,
    parts: int = 1,
) -> Run:
    """Runs the plain loop on global batches. A loss of `mixed_precision` runs in the policy, with the loss scale.

    Args:
        loss: `loss(params, batch)`, or `loss(params, batch, key)` when `key` is given, with `step=` under `count`.
        optimizer: the optimizer.
        params: tree of whole tensors, not changed.
        batches: global batches, a batch for each step.
        trainable: prefix tree of bools. Default: all leaves but frozen leaves.
        key: key to fold with the step's number.
        count: whether the loss takes the number of the step.
        parts: number of pieces of each batch, with gradients added up. Use ranks times microbatches to compare 16-bit
            results more closely than their rounding.
    """
    optimizer = as_transformation(optimizer)
    leaves, treedef = tree_flatten(tree_map(torch.clone, params))
    train = [not is_frozen(x) for x in leaves]
    trainable = trained_leaves(loss) if trainable is None else trainable
    if trainable is not None:
        train = broadcast_prefix(trainable, params, lambda x: isinstance(x, bool), names=("trainable", "params"))
    train = [t and x.is_floating_point() for t, x in zip(train, leaves, strict=True)]
    how = _PlainPrecision.of(loss, params)
    leaves = [x.to(d.master) for x, d in zip(leaves, how.dtypes, strict=True)]
    opt_state, scaling = optimizer.init(_keep_leaves(treedef, leaves, train)), how.scale and how.scale.init()
    metrics = []
    for n, batch in enumerate(batches):
        args = () if key is None else (fold_in(key, n),)
        by = None if scaling is None else scaling.scale
        kept = [x.to(d.param) for x, d in zip(leaves, how.dtypes, strict=True)]
        counted = how._replace(loss=functools.partial(how.loss, step=torch.tensor(n))) if count else how
        value, own = counted.differentiate(treedef, kept, train, batch, args, parts, by)
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g, t in zip(own, train, strict=True) if t))  # pyright: ignore
        metrics.append({"loss": value, "grad_norm": norm.float()})
        if how.scale is not None:
            finite = value.isfinite() & norm.isfinite()
            scaling = how.scale.update(scaling, finite)
            if not finite:
                continue
        with torch.no_grad():
            old = _keep_leaves(treedef, leaves, train)
            updates, opt_state = optimizer.update(_keep_leaves(treedef, own, train), opt_state, old)
            fresh = iter(tree_leaves(apply_updates(old, updates)))
            leaves = [next(fresh) if t else x for x, t in zip(leaves, train, strict=True)]
    if how.wide:
        wide = [t and d.master != d.param for t, d in zip(train, how.dtypes, strict=True)]
        opt_state = MasterState(_keep_leaves(treedef, leaves, wide), opt_state)
    kept = [x.to(d.param) for x, d in zip(leaves, how.dtypes, strict=True)]
    return Run(tree_unflatten(treedef, kept), opt_state, metrics)


class _PlainPrecision(NamedTuple):
    """The plain loop's reading of a policy. Without one, everything is in each leaf's dtype."""

    loss: Callable[..., Any]
    dtypes: list[Dtypes]
    policy: Policy | None
    scale: LossScale | None

    @staticmethod
    def of(loss: Callable[..., Any], params: PyTree) -> "_PlainPrecision":
        leaves = tree_leaves(params)
        if not isinstance(loss, Mixed):
            return _PlainPrecision(loss, [Dtypes.plain(x.dtype) for x in leaves], None, None)
        pairs = zip(tree_paths(params, "params"), leaves, strict=True)
        dtypes = [loss.policy.dtypes(path, x.dtype) for path, x in pairs]
        return _PlainPrecision(loss.inner, dtypes, loss.policy, loss.loss_scale)

    @property
    def wide(self) -> bool:
        return self.policy is not None and self.policy.keeps_master

    def differentiate(
        self,
        treedef: Any,
        kept: list[Tensor],
        train: list[bool],
        batch: PyTree,
        args: tuple[Any, ...],
        parts: int,
        scale: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the mean loss and the gradients, in the dtypes of their sums."""
        grads = [torch.zeros(x.shape, dtype=d.accum) for x, d in zip(kept, self.dtypes, strict=True)]
        totals: list[Tensor] = []
        weights: list[Any] = []
        for k in range(parts):
            compute = [x.to(d.compute) for x, d in zip(kept, self.dtypes, strict=True)]
            handles = [x.clone().requires_grad_() if t else x for x, t in zip(compute, train, strict=True)]
            piece = tree_map(lambda x, k=k: self._cast_compute(x.chunk(parts)[k] if x.ndim else x), batch)
            with nn.rounding_products(None if self.policy is None else self.policy.products):
                value = self.loss(tree_unflatten(treedef, handles), piece, *args)
            weighted = isinstance(value, WeightedMean)
            out = value.total if weighted else value
            out = out if self.policy is None else out.to(self.policy.output)
            seed = torch.full_like(out, 1.0 if weighted else 1.0 / parts) * (1.0 if scale is None else scale)
            mine = [h for h, t in zip(handles, train, strict=True) if t]
            got = iter(torch.autograd.grad(out, mine, seed, allow_unused=True))
            for g, d, t in zip(grads, self.dtypes, train, strict=True):
                new = next(got) if t else None
                if new is not None:
                    g += new.to(d.reduce).to(d.accum)
            totals.append(out.detach())
            weights += [value.weight] if weighted else []
        weight = sum(weights) if weights else 1.0
        by = weight if scale is None else weight * scale
        mean = torch.stack(totals).sum() / (weight if weights else parts)
        return mean, [g / by if t else g for g, t in zip(grads, train, strict=True)]

    def _cast_compute(self, x: Tensor) -> Tensor:
        return x if self.policy is None or not x.is_floating_point() else x.to(self.policy.compute)


def on_mesh(
    loss: Callable[..., Any],
    optimizer: GradientTransformation | Pair,
    params: PyTree,
    batches: Sequence[PyTree],
    *,
    mesh: Mesh | None,
    batch: PyTree = None,
    model_state: PyTree = (),
    opened: bool = False,
    **options: Any,
) -> Run:
    """Runs `sharded_step` on global batches. Each rank takes the rank's rows. Collective.

    Args:
        loss: loss as `sharded_step` takes it.
        optimizer: the optimizer.
        params: tree of whole tensors, the same on all ranks.
        batches: global batches, a batch for each step.
        mesh: mesh of the ranks.
        batch: specs of the batch. Default: as in `sharded_step`.
        model_state: first model state, with `has_state`.
        opened: whether each step runs as two halves, `step.gradients` and `step.update`.
        **options: options of `sharded_step`.
    """
    batch = default_batch(options.get("specs", P()), as_mesh(mesh)) if batch is None else batch
    step = sharded_step(loss, optimizer, mesh=mesh, batch=batch, **options)
    state = step.init(tree_map(torch.clone, params), model_state=model_state)
    take = _run_halves if opened else ShardedStep.__call__
    metrics = []
    for whole in batches:
        state, measured = take(step, state, shard_rows(whole, batch, as_mesh(mesh)))
        metrics.append(measured)
    return Run(unshard(state.params), unshard(state.opt_state), metrics, unshard(state.model_state))


def _run_halves(step: ShardedStep, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
    """Runs a step as two halves, `step.gradients` and `step.update`."""
    found, metrics = step.gradients(state, batch)
    # A tree of gradients may be a pair itself. A pair of gradients and a model state is known by the state.
    grads, kept = (found, None) if state.model_state == () else found
    state, updated = step.update(state, grads, model_state=kept, finite=metrics["finite"])
    return state, metrics | {"skipped": updated["skipped"]}


def assert_opened(
    loss: Callable[..., Any],
    optimizer: GradientTransformation | Pair,
    params: PyTree,
    batches: Sequence[PyTree],
    *,
    mesh: Mesh | None,
    zero: Zero | None = None,
    **options: Any,
) -> Run:
    """Asserts that a step equals the two halves, bit for bit: `step(state, batch) == step.update . step.gradients`.

    Args:
        loss: loss as `sharded_step` takes it.
        optimizer: the optimizer.
        params: tree of whole tensors, the same on all ranks.
        batches: global batches, a batch for each step.
        mesh: mesh of the ranks.
        zero: ZeRO rule. With a directory on disk, the halves have a separate directory inside.
        **options: further options of `on_mesh`.

    Returns:
        Results of the halves.

    Raises:
        AssertionError: lists every leaf and metric that differs.

    Example:
        >>> from shardfn import optim
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> assert_opened(lambda w, b: (b @ w).sum(), optim.sgd(0.1), torch.ones(2), [x], mesh=None).params
        tensor([0.9000, 0.8000])
    """
    apart = zero
    if zero is not None and zero.disk is not None:
        disk = dataclasses.replace(zero.disk, directory=f"{zero.disk.directory}/halves")
        apart = dataclasses.replace(zero, disk=disk)
    want = on_mesh(loss, optimizer, params, batches, mesh=mesh, zero=zero, **options)
    got = on_mesh(loss, optimizer, params, batches, mesh=mesh, zero=apart, opened=True, **options)
    assert_same(got, want, exact=True)
    return got


def shard_rows(batch: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Returns this rank's rows of a global batch.

    Example:
        >>> shard_rows({"x": torch.arange(2)}, P("dp"), as_mesh(None))
        {'x': tensor([0, 1])}
    """
    cuts = broadcast_prefix(specs, batch, lambda x: isinstance(x, P), names=("batch spec", "batch"))
    leaves, treedef = tree_flatten(batch)
    pairs = zip(leaves, cuts, strict=True)
    return tree_unflatten(treedef, [x[block_slices(tuple(x.shape), c, mesh.shape, mesh.coords)] for x, c in pairs])


def assert_parity(
    loss: Callable[..., Any],
    optimizer: GradientTransformation | Pair,
    params: PyTree,
    batches: Sequence[PyTree],
    *,
    mesh: Mesh | None,
    reference: Callable[..., Any] | None = None,
    parts: int = 1,
    trainable: PyTree = None,
    key: Tensor | None = None,
    count: bool = False,
    zero: Zero | None = None,
    **options: Any,
) -> Run:
    """Asserts that a sharded run equals the one-device run: params, optimizer state, loss and norm of every step.

    For your models: call the function inside `testing.distributed`.

    Args:
        loss: sharded loss, which may be transformed, for example by `accumulate` or `remat`.
        optimizer: the optimizer.
        params: tree of whole tensors, the same on all ranks.
        batches: global batches, a batch for each step.
        mesh: mesh of the ranks.
        reference: plain loss for the one-device loop, or `mixed_precision` of a plain loss. Default: `loss`.
        parts: number of pieces of the batch in the one-device loop. See `one_device`.
        trainable: prefix tree of bools. Default: all leaves but frozen leaves.
        key: key for losses with a key.
        count: whether the loss takes the number of the step.
        zero: ZeRO rule.
        **options: further options of `sharded_step`.

    Returns:
        The sharded run.

    Raises:
        AssertionError: lists every leaf and metric that differs by more than `RTOL` of its largest element, with both
            values of the element that differs most, the sharded value first.

    Example:
        >>> from shardfn import optim
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> run = assert_parity(lambda w, b: (b @ w).sum(), optim.sgd(0.1), torch.ones(2), [x], mesh=None)
        >>> run.params
        tensor([0.9000, 0.8000])
    """
    trainable = trained_leaves(loss) if trainable is None else trainable
    want = one_device(
        reference or loss, optimizer, params, batches, trainable=trainable, key=key, count=count, parts=parts
    )
    got = on_mesh(
        loss, optimizer, params, batches, mesh=mesh, trainable=trainable, key=key, count=count, zero=zero, **options
    )
    try:
        assert_same(got, want)
    except AssertionError as error:
        num = _num_parts(loss, mesh, options)
        even = all(x.ndim and len(x) % num == 0 for whole in batches for x in tree_leaves(whole))
        how: dict[str, Any] = {"trainable": trainable, "key": key, "count": count, "parts": num}
        plain = reference or loss
        if 1 == parts < num and even and _are_same(got, one_device(plain, optimizer, params, batches, **how)):
            error.add_note(
                f"The sharded run has the mean of the losses of {num} parts of the batch (ranks times microbatches),"
                " which is not the loss of the batch. Return a mean over rows; or, where parts have unequal numbers of"
                " terms, such as tokens that count, sf.WeightedMean(total, weight)."
            )
        raise
    return got


def _num_parts(loss: Callable[..., Any], mesh: Mesh | None, options: dict[str, Any]) -> int:
    """Returns the number of parts of a batch whose losses a step averages: ranks times microbatches."""
    on, specs = as_mesh(mesh), options.get("batch")
    specs = default_batch(options.get("specs", P()), on) if specs is None else specs
    found = tree_leaves(specs, is_leaf=lambda x: isinstance(x, P))
    axes = dict.fromkeys(a for spec in found if len(spec) for a in on.axes(spec.dim_axes(0)))
    return on.axis_size(tuple(axes)) * num_microbatches(loss)


def _are_same(got: Run, want: Run) -> bool:
    try:
        assert_same(got, want)
    except AssertionError:
        return False
    return True


def assert_same(got: Run, want: Run, *, exact: bool = False, computed: torch.dtype | None = None) -> None:
    """Asserts that two runs agree; bit for bit with `exact`.

    Args:
        got: run to check.
        want: expected run.
        exact: whether bits are compared.
        computed: dtype of the arithmetic, if coarser than the dtype of the kept values, with a different order.

    Raises:
        AssertionError: lists every leaf and metric that differs.
    """
    least = 0.0 if computed is None else RTOL[computed]
    problems = _find_differences("params", got.params, want.params, exact, least)
    problems += _find_differences("opt_state", got.opt_state, want.opt_state, exact, least)
    problems += _find_differences("model_state", got.model_state, want.model_state, exact, least)
    for n, (a, b) in enumerate(zip(got.metrics, want.metrics, strict=True)):
        problems += _find_differences(f"metrics[{n}]", {k: a[k] for k in b}, b, exact, least)
    raise_all(AssertionError, "the runs differ:", problems)


def _find_differences(name: str, got: PyTree, want: PyTree, exact: bool, least: float) -> list[str]:
    out = []
    for path, a, b in zip(tree_paths(want, name), tree_leaves(got), tree_leaves(want), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            out.append(f"{path}: {tuple(a.shape)} {a.dtype} is not {tuple(b.shape)} {b.dtype}")
        elif exact and not _is_equal(a, b):
            out.append(f"{path}: not bit-identical, largest difference {(a - b).abs().max():.3g}")
        elif a.numel() and not exact:
            error, size = (a.double() - b.double()).abs().max(), b.double().abs().max()
            if not error <= max(RTOL.get(a.dtype, 0.0), least) * size:
                out.append(f"{path}{_farthest_element(a, b)}; the largest element is {size:.6g}")
    return out


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether all elements are equal, where NaN equals NaN."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _farthest_element(a: Tensor, b: Tensor) -> str:
    """Returns the element in which two tensors of equal shape differ most, or a NaN, with both values."""
    k = int((a.double() - b.double()).abs().argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(k), a.shape)] if a.ndim else ""
    return f"{at}: {a.flatten()[k].item()!r} is not {b.flatten()[k].item()!r}"


def _keep_leaves(treedef: Any, leaves: list[Any], keep: list[bool]) -> PyTree:
    return tree_unflatten(treedef, [x if k else None for x, k in zip(leaves, keep, strict=True)])
