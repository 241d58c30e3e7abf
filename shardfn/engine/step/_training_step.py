"""`ShardedStep`: the training step that `sharded_step` builds, and the functions over its parameters.

In a collective call, ranks agree on the call before its first transfer; a failure after that closes the step's
communicators, so that no rank waits.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardfn.collectives import transforming
from shardfn.core import (
    P,
    PyTree,
    as_html,
    dtype_name,
    explains_attributes,
    explains_extra,
    tree_flatten,
)
from shardfn.engine.agreement import (
    Agreement,
    comms_of,
    uncollected,
)
from shardfn.engine.execution import (
    MAX_APPLIED,
    Interface,
    UpdateArgs,
    pure_gradients,
    pure_step,
    pure_update,
    signature,
)
from shardfn.engine.loss import (
    BoundedCache,
    CacheInfo,
    Transform,
    Unwrapped,
    abstract_leaves,
    agree_on_step,
    check_kept,
    cut_ahead,
    describe_batch,
    function_name,
    num_microbatches,
    shapes_of,
    told_before,
    unwrap,
)
from shardfn.engine.partition import bind
from shardfn.engine.plan import OF_A_STATE, Plan, Planner, phase_of, reduced_for
from shardfn.engine.transfers import (
    StepParts,
    check_schedule,
    close_pool,
)
from shardfn.graph import Cluster
from shardfn.modules import beside_model_state
from shardfn.optim import Phase
from shardfn.state import TrainState, check_alive, check_passed, widest

from ._evaluate import Measures, check_batches
from ._init import StepStates, drawn
from ._lower import Lowered, StepProfile, measured, predict
from ._multi_loss import StepLoss, lines_of, mean_of
from ._sharded import Sharded, kept_as
from ._step_calls import Admission, StepCalls, check_scale


@explains_attributes(
    train="Set the module's mode, module.train(), before sf.from_module(module).",
    eval="Set the module's mode, module.eval(), before sf.from_module(module); step.evaluate(state, batches) measures.",
    parameters="A step holds no parameters; they are state.params.",
    state_dict="A step holds no state; save that: sf.checkpoint.save(directory, state).",
    load_state_dict="A step holds no state; read one: sf.checkpoint.restore(directory, step.init(params)).",
    zero_grad="Leave it out: a step makes its gradients anew.",
    step="Call it: state, metrics = step(state, batch).",
)
class ShardedStep(Transform):
    """A training step. Build one with `sharded_step`, which documents it."""

    transform: ClassVar[str] = "sharded"

    def __init__(
        self,
        parts: StepParts,
        unwrapped: Unwrapped,
        planner: Planner,
        key: Tensor | None,
        state_specs: PyTree = P(),
        sources: Mapping[str, StepLoss] | None = None,
    ) -> None:
        check_schedule(parts.schedule, planner.num_chunks * num_microbatches(parts.loss))
        sources = {"": StepLoss.of(unwrapped, parts, planner)} if sources is None else sources
        self.mesh = planner.mesh
        self._parts, self._unwrapped, self._planner, self._key = parts, unwrapped, planner, key
        self._state_specs = state_specs
        self._optimizer, self._loss_scale = parts.optimizer, parts.loss_scale
        # A step holds no state and no counter, only learnt facts that are the same on all ranks: plans in the planner,
        # by tree; graphs in `_steps`, by signature; functions over params in `_functions`.
        self._agreement = Agreement(lambda plan: lines_of(sources, plan, key, state_specs))
        self._admission = Admission(parts, planner, self._agreement, key, state_specs)
        self._states = StepStates(parts, planner, self._agreement, key, state_specs)
        self._jitted = unwrapped.jitted
        mean = mean_of(sources)
        self._functions = Functions(planner, self._agreement)
        in_specs = [state_specs] if parts.has_state else []
        self._loss = self._functions.make(Unwrapped(mean), "the loss of a step", *in_specs)
        self._measures = Measures(parts, planner, self._jitted, self._functions.make, state_specs)
        self._steps = next(iter(sources.values())).programs
        self._calls = StepCalls(self._admission, sources)

    def __repr__(self) -> str:
        return described(self._unwrapped, self._parts.loss, self._planner, list(self._calls.sources))

    def _repr_html_(self) -> str:
        return as_html(repr(self))

    def init(self, params: PyTree, *args: Any, model_state: PyTree = ()) -> TrainState:
        """Returns the first state; every rank stores only its own blocks.

        Args:
            params: a tree of tensors, the same on all ranks, or a function that returns such a tree when called with
                `args`. Random draws of `shardfn` inside the function are deferred, so that each rank draws only its
                own blocks.
            *args: arguments of the function.
            model_state: initial model state, with `has_state`: a tree of tensors, the same on all ranks.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: the tree does not fit the specs.
            RankError: ranks pass different trees or different values.
        """
        leaves, plan = drawn(self._planner, params, args)
        del params  # nor does this frame keep it
        return self._states.first(plan, leaves, model_state)

    def resume(self, params: PyTree, *args: Any, model_state: PyTree = ()) -> TrainState:
        """Returns the state of the last step that all ranks finished, from their files on disk. Collective.

        Each step commits the state under `Zero(disk=Disk(...))`, if all large parts of it are on disk (small persistent
        leaves, counters, and 16-bit parameters whose master copies are on disk, need not be). So the state survives the
        processes, however they end.

        Args:
            params: see `init`. Only shapes and dtypes are used.
            *args: see `init`.
            model_state: see `init`. Only shapes and dtypes are used.

        Raises:
            FileNotFoundError: the ranks have no commit in common.
            ValueError: the step stores nothing on disk, or the commit is of another model, with each leaf that differs.
            DamagedError: files are missing, too short or changed.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from shardfn import Zero, core, optim, sharded_step
            >>> loss = lambda w, x: (w * x).square().mean()
            >>> def make(directory):
            ...     zero = core.Zero(persist_elements=0, params="disk", optimizer="disk", disk=core.Disk(directory))
            ...     return sharded_step(loss, optim.sgd(0.1), mesh=core.make_mesh({"dp": 1}), zero=zero)
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     step = make(directory)
            ...     state, _ = step(step.init(torch.ones(2)), torch.ones(2))
            ...     step.close()
            ...     make(directory).resume(torch.ones(2)).step
            tensor(1)
        """
        plan = drawn(self._planner, params, args)[1]
        return self._states.resume(plan, model_state)

    def adopt(self, state: TrainState, *, opt_state: str = "keep") -> TrainState:
        """Returns the state of another step, to continue with this one.

        With other frozen leaves, ZeRO stage, mesh or optimizer.

        Parameters (their master copies, where there are some), step number, key, model state and loss scale continue.
        So does the optimizer's state of parameters that both steps train, with its counters. Parameters that only this
        step trains start with the state of `init`: zero moments. `optim.per_leaf` gives these counters of their own.
        Collective.

        Args:
            state: state of the other step; consumed. Its ranks are the ranks of this step's mesh.
            opt_state: "keep", or "new" to begin with a new state of this step's optimizer, which may be any other.

        Returns:
            A state of this step.

        Raises:
            ValueError: the optimizers' states differ, with each difference, or the state is on disk.
            DonatedError: a step has consumed `state`.

        Example:
            >>> import torch
            >>> import shardfn as sf
            >>> loss = lambda p, x: (p["a"] * p["b"] * x).sum()
            >>> make = lambda trainable: sf.sharded_step(loss, sf.optim.adam(0.1), trainable=trainable)
            >>> head, both = make({"a": False, "b": True}), make(True)
            >>> state, _ = head(head.init({"a": torch.ones(1), "b": torch.ones(1)}), torch.ones(1))
            >>> state, _ = both(both.adopt(state), torch.ones(1))
            >>> state.step, state.opt_state[0].count.full_tensor()
            (tensor(2), tensor(2, dtype=torch.int32))
        """
        check_passed(state, call="step.adopt(state)")
        check_alive(state)
        if opt_state not in ("keep", "new"):
            raise ValueError(f"adopt(opt_state={opt_state!r}): it is 'keep' or 'new'.")
        leaves, treedef = tree_flatten(widest(state))
        return self._states.adopted(self._planner.plan(treedef, leaves), state, fresh=opt_state == "new")

    def close(self) -> None:
        """Releases the step's directory on disk. States that are there can then only be resumed."""
        close_pool(self._planner)

    @explains_extra(
        "step(state, batch)",
        "A batch is one tree, such as a dict of tensors. A key is passed once, as sharded_step(..., key=sf.key(0)), and"
        " each step makes its own of it. Bind other arguments of the loss before: functools.partial(loss, config).",
    )
    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        """One step on this rank's rows of the global batch. Inside a transform of torch.func it is a pure function."""
        if transforming():
            self._refuse_several("a step inside a transform of torch.func")
            return self._calls.pure("a step", pure_step, state, lambda admission, _: admission.args(state, batch))
        with uncollected():
            if self._calls.are_several:
                return self._calls.step_of_losses(state, batch)
            return self._calls.step(self._calls.programs.step, None, state, batch)

    def lower(self, state: PyTree, batch: PyTree, *, phase: Phase | None = None) -> Lowered:
        """Returns the step as a graph, captured and scheduled for these shapes but not run.

        To read, measure or compile it.

        It neither allocates memory nor sends messages, so the mesh may be abstract and the state larger than any
        machine.

        Args:
            state: a state, or a tree of parameters. Only shapes and dtypes are used, so results of `eval_shape` and
                tensors on the device "meta" are accepted.
            batch: this rank's rows, abstract or not.
            phase: the phase of an optimizer that has phases; needed if the state has no values to find it by.

        Raises:
            CaptureError: the loss depends on the value of a tensor. The message names the line.
            ValueError: under `jit(cluster=...)` no schedule fits the memory.

        Example:
            >>> import torch
            >>> import shardfn as sf
            >>> step = sf.sharded_step(lambda w, x: ((w * x) ** 2).mean(), sf.optim.sgd(0.5))
            >>> step.lower(torch.ones(4), torch.ones(4)).cost_analysis().sent
            0
        """
        self._refuse_several("lower")
        plan, given, args = self._make_abstract(state, batch, phase)
        phase = phase_of(self._optimizer, given.opt_state, phase)
        program, schedule = self._steps.lower(plan, given, args, phase)
        key = signature(plan, args), shapes_of(given.model_state), phase

        def compile(backend: str | None) -> Callable[..., Any]:
            call_of = self._steps.compile(program, backend, comms_of(self.mesh))
            return uncollected()(functools.partial(self._calls.step, call_of, key))

        return Lowered(program.gm, self.mesh, schedule, compile)

    def profile(
        self, state: TrainState, batch: PyTree, *, steps: int = 3, cluster: Cluster | None = None
    ) -> tuple[TrainState, StepProfile]:
        """Returns the time and the bytes of real steps, by phase and by leaf. Collective: every rank calls it.

        It trains: it makes one step to warm up and then `steps` measured ones on this batch, and returns the state
        after them. `state` is consumed if the step donates; to keep it, build the step with `donate=False` and ignore
        the returned state.

        Args:
            state: the state.
            batch: this rank's rows.
            steps: the number of steps that are measured, after the first.
            cluster: cluster from `graph.cluster` or `graph.calibrate`, for a prediction of the same. None means no
                prediction.

        Returns:
            The state after `steps + 1` steps, and this rank's profile. For a jitted step only the total is measured.

        Raises:
            ValueError: `steps` is below 1, or a prediction is requested for a step that cannot be lowered.

        Example:
            >>> import torch
            >>> import shardfn as sf
            >>> step = sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.1))
            >>> state, found = step.profile(step.init(torch.ones(4)), torch.ones(4), steps=2)
            >>> state.step, found.steps, list(found.phases)
            (tensor(3), 2, ['forward', 'backward', 'gather', 'reduce', 'update', 'refresh', 'waits', 'rest'])
        """
        comms = comms_of(self.mesh)
        with told_before(comms.control):
            if steps < 1:
                raise ValueError(f"profile(steps={steps}): at least one step must be measured. Pass steps=1 or more.")
            check_passed(state, batch)
            check_alive(state)
            predicted = None if cluster is None else predict(self.lower(state, batch), cluster)
        agree_on_step(comms.control, f"step.profile(steps={steps})")
        now, _ = self(state, batch)
        del state

        def run() -> None:
            nonlocal now
            now, _ = self(now, batch)

        found = measured(self.mesh, run, steps, predicted, jitted=self._jitted is not None)
        return now, found

    def _make_abstract(
        self, state: PyTree, batch: PyTree, phase: Phase | None
    ) -> tuple[Plan, TrainState, tuple[Any, ...]]:
        given = state
        if not isinstance(state, TrainState):
            leaves, treedef = tree_flatten(state)
            given = self._states.abstract(self._planner.plan(treedef, leaves))
        check_kept(given.model_state, self._state_specs, has_state=self._parts.has_state)
        plan = reduced_for(self._planner.plan_of(given), self._optimizer, given.opt_state, phase)
        check_scale(given, self._loss_scale)
        describe_batch(batch, self._planner.batch, self.mesh)
        rest = [] if self._key is None else [self._key]
        rest += [torch.zeros((), dtype=torch.int64)] if self._parts.count else []
        return plan, given, abstract_leaves((cut_ahead(self._parts.loss, batch), *rest), self.mesh.device)

    @uncollected()
    def gradients(self, state: TrainState, batch: PyTree) -> tuple[PyTree, dict[str, Tensor]]:
        """Returns the gradients of a step, which `update` takes.

        `step(state, batch)` is `update` of `gradients`, bit for bit.

        They are averaged over the global batch and free of the loss scale, as the optimizer takes them. Between the two
        calls clip them by a rule of your own, add gradients of other losses, look at their norms: change a leaf by
        `g.with_block(f(g.local))`, `leaf_norms(grads)` has the norms. The state is not changed or consumed. Collective.

        Args:
            state: the state.
            batch: this rank's rows.

        Returns:
            `(grads, metrics)`. With `has_state`, `((grads, model_state), metrics)`, with the model state that the loss
            has returned, which `update` finishes where the step has `finish=`.

            grads is a tree like `state.params` with a `GlobalTensor` for each leaf that the step trains, and None for
            each that it does not. A leaf has the parameter's shape, the spec of its optimizer state (each rank stores
            the rows that it updates, ungathered), the memory of `Zero(grads=...)`, and the dtype in which gradients are
            added up: float32 for 16-bit parameters, otherwise the parameter's own.

            metrics are those of a step without "skipped": "loss", "grad_norm", "finite", the aux values, and
            "loss_scale".

        Raises:
            ValueError: the state or the batch does not fit the step, or the optimizer averages gradients itself, as
                1-bit rules do after their warm-up.
            DonatedError: a step has consumed the state.
            RankError: ranks disagree on the call, or another rank failed.

        Example:
            >>> import torch
            >>> import shardfn as sf
            >>> step = sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.1))
            >>> state = step.init(torch.tensor([1.0, 1.0]))
            >>> grads, metrics = step.gradients(state, torch.tensor([8.0, 2.0]))
            >>> grads.full_tensor()
            tensor([4., 1.])
            >>> clipped = grads.with_block(grads.local.clamp(-2, 2))
            >>> state, _ = step.update(state, clipped)
            >>> state.params.full_tensor()
            tensor([0.8000, 0.9000])
        """
        if transforming():
            what = "the gradients of a step"
            found = self._calls.pure(what, pure_gradients, state, lambda admission, _: admission.args(state, batch))
        else:
            found = self._calls.gradients(state, batch)
        return (found.grads, found.model_state) if self._parts.has_state else found.grads, found.metrics

    @uncollected()
    def update(
        self,
        state: TrainState,
        grads: PyTree,
        *,
        model_state: PyTree = None,
        finite: Tensor | bool = True,
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """Returns the state after an update by gradients, and its number advanced: the other half of a step.

        If the step donates, state and gradients are consumed, the gradients of a skipped update, too. Collective.

        Args:
            state: the state.
            grads: a tree as `gradients` returns it: the same leaves, in the same layout, memory and dtype. A leaf on
                disk may have a block in host memory: `g.with_block(f(g.local))` reads it.
            model_state: new model state with `has_state`, which is copied, after `finish=` if the step has one.
                Default: that of the state stays, and is not finished.
            finite: `metrics["finite"]` of `gradients`, where a step that is not finite is skipped: a loss may overflow
                while its gradients do not. The same on all ranks.

        Returns:
            The next state, and the metrics of the update: "grad_norm" of `grads`, "finite" (whether that is finite, and
            `finite`), "skipped", and with a loss scale "loss_scale" (the one used).

        Raises:
            TypeError: a leaf of `grads` is not a `GlobalTensor`.
            ValueError: leaves are missing or additional, or of another layout, mesh, memory, dtype or shape. All are
                listed by path, before anything is written.
            DonatedError: an update has consumed the gradients, or a step the state.
            RankError: ranks disagree on the call, or another rank failed.
            FloatingPointError: gradients overflow although the loss scale is at its minimum.

        Example:
            >>> import torch
            >>> import shardfn as sf
            >>> step = sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.5))
            >>> state = step.init(torch.tensor(2.0))
            >>> grads, measured = step.gradients(state, torch.tensor([1.0, 3.0]))
            >>> state, metrics = step.update(state, grads, finite=measured["finite"])
            >>> state.step, state.params.full_tensor(), metrics["grad_norm"]
            (tensor(1), tensor(1.), tensor(2.))
        """
        passed = UpdateArgs(grads, model_state, finite)
        if not transforming():
            return self._calls.update(state, passed)

        def prepare(admission: Admission, plan: Plan) -> UpdateArgs:
            admission.passed(plan, state, passed)
            return passed

        return self._calls.pure("the update of a step", pure_update, state, prepare)

    def loss(self, params: PyTree, batch: PyTree, *rest: Tensor, model_state: PyTree = ()) -> Tensor:
        """Returns the mean loss of the global batch, the same on all ranks: a pure function of the sharded parameters.

        `torch.func.grad`, `vmap`, `jvp` and their compositions pass through it. A gradient is a tree of `GlobalTensor`
        with the specs of `params`. Collective: every rank calls it, with the same number of members or examples under a
        `vmap`.

        Args:
            params: a state's params.
            batch: this rank's rows.
            *rest: the key, if the loss takes a key, and with `count` the number of the step, both passed on unchanged.
            model_state: model state of a state, with `has_state`. The new model state is dropped.

        Returns:
            A 0-d tensor.

        Example:
            >>> import torch
            >>> import shardfn as sf
            >>> step = sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.1))
            >>> state = step.init(torch.tensor(2.0))
            >>> torch.func.grad(step.loss)(state.params, torch.tensor([1.0, 3.0])).full_tensor()
            tensor(2.)
        """
        return self._loss.pure(params, *([model_state] if self._parts.has_state else []), batch, *rest)

    def rows(self, num: int) -> slice:
        """Returns the rows of a global batch of `num` that this rank passes, if the batch is cut along dim 0 alone.

        Raises:
            ValueError: with canonical sums, the chunks do not divide `num`.

        Example:
            >>> import shardfn as sf
            >>> sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.1)).rows(6)
            slice(0, 6, None)
        """
        return self._planner.rows(num)

    def cache_info(self) -> CacheInfo:
        """Returns the counts of the step's captures, with the captures of `lower`."""
        if self._jitted is None:  # `lower` captures the first loss
            return self._steps.graphs.cache_info()
        infos = [x.programs.graphs.cache_info() for x in self._calls.sources.values()]
        return CacheInfo(*map(sum, zip(*infos, strict=True)))

    def _refuse_several(self, call: str) -> None:
        if self._calls.are_several:
            raise ValueError(
                f"{call} is of a step of one loss, and this one has {list(self._calls.sources)}. Build a step of the"
                " loss alone, with the same optimizer, specs and zero, for it."
            )

    def apply(self, f: Callable[..., Any], state: TrainState, *args: Any) -> Any:
        """Returns `f(params, *args)` without gradients, with params as the loss sees them: for predictions.

        It is `sharded(f)` with the step's specs. Collective: every rank calls it. The result of `f` is returned
        unchanged, so a mean over this rank's rows is of this rank only. Modules run in their own mode. The same
        function object reuses the order of gathers of its first call, and a jitted one its graph.
        """
        if not isinstance(state, TrainState):
            with told_before(comms_of(self.mesh).control):
                check_passed(state, f, call="step.apply(f, state, *args)")
        g = self._functions.of(f)
        with contextlib.nullcontext() if transforming() else torch.no_grad(), beside_model_state(state.model_state):
            return g(state.params, *args)

    def evaluate(
        self, state: TrainState, batches: Iterable[PyTree], metrics: Callable[..., dict[str, Any]] | None = None
    ) -> dict[str, float]:
        """Returns means over all rows of all batches of all ranks, exact for any numbers of rows and batches per rank.

        It runs in the precision of the step, jitted if the step is, without gradients, and does not change the state.
        Modules of `from_module` run in eval mode, whatever mode they are in, with the statistics of the model state.
        Nothing is dropped, by modules, adapters or `sf.nn`. Each batch runs as a whole, not in microbatches. The means
        equal those of a single device that gets all rows. Collective.

        Args:
            state: the state.
            batches: this rank's batches, cut as for the step. Ranks may have different numbers of batches, the last
                batch may be shorter, and a rank may have no batch.
            metrics: `metrics(params, batch) -> {name: value}`, and with `has_state` `metrics(params, model_state,
                batch)`. A value is a `WeightedMean`, or a scalar that is a mean over the rows of the batch. Default:
                the step's loss as "loss", and its aux. Pass the same function object each time, so that its captures
                are reused.

        Returns:
            Name -> float, the same on all ranks. Scalars are averaged over rows; a `WeightedMean` by its weights.

        Raises:
            TypeError: `metrics` takes other arguments, or does not return a dict of scalars.
            ValueError: the batches have no rows, or the weights of a metric add up to 0.
            DonatedError: the state was consumed by a step.

        Example:
            >>> import torch
            >>> import shardfn as sf
            >>> step = sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.1))
            >>> state = step.init(torch.tensor(2.0))
            >>> step.evaluate(state, [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])])
            {'loss': 8.0}
        """
        comms = comms_of(self.mesh)
        with told_before(comms.control):
            if metrics is None:
                self._refuse_several("step.evaluate(state, batches) without metrics=")
            check_passed(state, batches, call="step.evaluate(state, batches)")
            check_batches(batches, metrics, has_state=self._parts.has_state)
            self._planner.plan_of(state)
            check_alive(state)
        agree_on_step(comms.control, "step.evaluate")
        rest = () if metrics is not None else self._admission.args(state, None)[1:]
        return self._measures.evaluate(metrics, state, batches, rest)

    def specs(self, params: PyTree) -> PyTree:
        """Returns the storage `Sharding` of each leaf of a parameter tree. Only shapes and dtypes are used."""
        return kept_as(self._planner, params)


def described(unwrapped: Unwrapped, loss: Any, planner: Planner, names: Sequence[str] = ("",)) -> str:
    """Returns the `repr` of a step: its loss or the names of its losses, its stage, its precision and its mesh."""
    inner = unwrapped.loss
    while isinstance(inner, Transform):
        inner = getattr(inner, "inner", type(inner).__name__)
    name = ", ".join(names) or (inner if isinstance(inner, str) else function_name(inner))
    mixed, count = unwrapped.mixed, num_microbatches(loss)
    facts = [f"ZeRO stage {planner.zero.stage}"]
    facts += [f"computed in {dtype_name(mixed.policy.compute)}"] if mixed is not None else []
    facts += [f"{count} microbatches"] if count > 1 else []
    facts += ["jit"] if unwrapped.jitted is not None else []
    return f"ShardedStep({name}: {', '.join(facts)}; {planner.mesh!r})"


class Functions:
    """Makes functions over the parameters of one step, and keeps the functions of its users.

    A function is identified without its transforms, so that the same one passed again finds the order of gathers that
    was learnt, and its graphs. `MAX_APPLIED` are kept, since each may hold graphs.

    Args:
        planner: planner of the step.
        agreement: agreement of the step.
    """

    def __init__(self, planner: Planner, agreement: Agreement) -> None:
        self._planner, self._agreement = planner, agreement
        self._known = BoundedCache[Sharded](MAX_APPLIED)

    def make(self, f: Unwrapped, what: str, *in_specs: PyTree) -> Sharded:
        """Returns a function over the parameters.

        `what` is its name in errors, `in_specs` those of its other arguments.
        """
        interface = Interface(self._planner.mesh, in_specs)
        return Sharded(f, self._planner, interface, self._agreement, what, OF_A_STATE)

    def of(self, f: Callable[..., Any]) -> Sharded:
        """`f` over the parameters, the one of an earlier call, or a new one."""
        unwrapped = bind(unwrap(f), self._planner)
        found = self._known.find(unwrapped.loss)
        if found is None or found.jitted != unwrapped.jitted:
            found = self.make(unwrapped, "apply")
            self._known.keep(unwrapped.loss, found)
        return found
