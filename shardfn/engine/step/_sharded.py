"""`sharded`: a function over sharded leaves. A training step is one made of it, so are evaluation and decoding.

The law: `sharded(f, ...)(params, *args) == f(whole params, *args)`, on each rank with its own arguments. Where leaves
are kept, and when they move, changes no value.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.capture import is_traced
from shardfn.collectives import Agreed, Constant, GlobalTensor, bind_mesh
from shardfn.core import (
    Mesh,
    P,
    PyTree,
    Sharding,
    Zero,
    as_mesh,
    as_zero,
    tree_flatten,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)
from shardfn.engine.agreement import (
    Agreement,
    Comms,
    check_replicas,
    comms_of,
    losing_no_peer,
)
from shardfn.engine.execution import (
    FunctionArgs,
    FunctionPrograms,
    Interface,
    ProgramCall,
    entered_argument,
    entered_as_rows,
    pure_apply,
    pure_loss,
    refuse_away,
)
from shardfn.engine.loss import (
    CacheInfo,
    Transform,
    Unwrapped,
    check_order,
    check_params,
    check_specs,
    default_batch,
    describe_function,
    is_abstract,
    unwrap,
)
from shardfn.engine.partition import bind
from shardfn.engine.pipeline import check_layout, stage_axes
from shardfn.engine.plan import Plan, Planner, Words
from shardfn.engine.transfers import close_pool, disk_of
from shardfn.memory import Pool
from shardfn.modules import computing_in
from shardfn.state import check_alive, taken

from ._bound_call import Blocks, BoundCall, layouts_of
from ._init import (
    abstract_params,
    drawn,
    first_params,
    own_blocks,
)
from ._lower import Lowered
from ._run_call import AdmittedCall, run_call, run_purely

_WORDS = Words(
    "the first argument is a tree of GlobalTensors; make it with init, or pass a state's params:",
    "the first argument is not kept in the layout of this function:",
    "the first argument is kept under another policy:",
)


def sharded(
    f: Callable[..., Any],
    *,
    mesh: Mesh | DeviceMesh | None = None,
    specs: PyTree = P(),
    zero: Zero | int | None = None,
    in_specs: Sequence[PyTree] = (),
    out_specs: PyTree = None,
    batch: P | None = None,
    donate: int | Sequence[int] = (),
) -> "Sharded":
    """`f(params, *args)` as a function over sharded leaves: `sharded(f)(params, *args)`.

    `params` are stored as a step stores them under `specs` and `zero`. `f` sees each leaf in its compute spec. It is
    gathered at its first use and freed after its last. `jit` around `f` captures all of this as a single graph. Calls
    are collective.

    It can be differentiated by `torch.func` and by `value_and_grad`. Then all leaves are gathered at once and stay
    gathered. The gradient is that of the sum of the ranks' results: return `pmean(x, axes)` for the gradient of the
    mean.

    Args:
        f: `f(params, *args)`; may be jitted, accumulated, of mixed precision.
        mesh: mesh from `make_mesh`, or a DeviceMesh with named axes. None is a single device, in a program of a single
            process.
        specs: compute specs: a prefix tree of `P` for params.
        zero: the ZeRO rule for params, or its stage; default stage 0. Its fields for gradients and the optimizer have
            no effect here.
        in_specs: an entry for each argument beyond the first: a prefix tree of `P` for a tree of `GlobalTensor`s, where
            `f` sees this rank's blocks; None, or no entry, for this rank's own value, which is passed on unchanged.
            Blocks that are kept on the host are copied whole to the device. Those of a `Sharding(spec, "host")` `f`
            sees on the host, and moves the parts that it needs itself, as by `memory.rows_to_device`.
        out_specs: a prefix tree for the result: `P` makes a `GlobalTensor` of this rank's block, which must be the same
            on all ranks along axes that the spec leaves out. `Donated(k)` gives the result the shapes, specs and memory
            of argument k. None returns this rank's value unchanged.
        batch: the axes along which ranks pass values of their own. Gradients are summed over them. Default as in a
            step.
        donate: positions of sharded arguments whose blocks `f` may write to and return. A call consumes them. They may
            be kept on the host or on disk.

    Returns:
        The function. `init`, `specs`, `lower` and `cache_info` are those of a step.

    Raises:
        ValueError: (also when called) specs, params or arguments do not fit. Every leaf is listed by path. Or `mesh` is
            None in a program of several processes.
        DonatedError: (when called) an argument was consumed by an earlier call.
        RankError: (when called) ranks disagree on the call, or another rank failed.

    Example:
        >>> double = sharded(lambda w, x: w * x)
        >>> double(double.init(torch.tensor([1.0, 2.0])), 2)
        tensor([2., 4.])
        >>> def push(w, cache, x):
        ...     cache[:1] = w * x
        ...     return cache
        >>> push = sharded(push, in_specs=(P(),), out_specs=P(), donate=1)
        >>> cache = GlobalTensor(torch.zeros(2), torch.Size([2]), P(), push.mesh)
        >>> push(push.init(torch.tensor(3.0)), cache, 2).full_tensor(), cache.donated
        (tensor([6., 0.]), True)
    """
    on, rule = as_mesh(mesh), as_zero(zero)
    check_order("sharded", f)
    check_specs(specs, batch or P(), rule, on)
    donated = (donate,) if isinstance(donate, int) else tuple(donate)
    interface = Interface(on, tuple(in_specs), out_specs, donated)
    interface.check()
    unwrapped = unwrap(f)
    if unwrapped.mixed is not None and unwrapped.mixed.loss_scale is not None:
        raise ValueError(
            "mixed_precision(f, policy, loss_scale) in sharded: the loss scale has no effect, since nothing is"
            " differentiated here. Leave it out."
        )
    policy = unwrapped.mixed and unwrapped.mixed.policy
    batch = default_batch(specs, on) if batch is None else batch
    planner = Planner(on, specs, batch, rule, True, policy, stage_axes(unwrapped.loss))
    unwrapped = bind(unwrapped, planner)
    lines = [*describe_function(unwrapped, "f"), f"in_specs {in_specs}, out_specs {out_specs}, donate {donated}"]
    name = getattr(unwrapped.loss, "__name__", type(unwrapped.loss).__name__)
    return Sharded(unwrapped, planner, interface, Agreement(lambda plan: lines), f"the sharded function {name}")


class Sharded(Transform):
    """A function over sharded leaves; made by `sharded`, which documents it.

    Args:
        unwrapped: the function.
        planner: the annotations of its first argument.
        interface: the annotations of the others, and of the result.
        agreement: the facts that ranks compare before a call.
        what: the call, in words.
        words: the message for a first argument that does not fit.
    """

    transform: ClassVar[str] = "sharded"

    def __init__(
        self,
        unwrapped: Unwrapped,
        planner: Planner,
        interface: Interface,
        agreement: Agreement,
        what: str,
        words: Words = _WORDS,
    ) -> None:
        self.mesh, self.jitted = planner.mesh, unwrapped.jitted
        self._f, self._planner, self._interface = unwrapped.loss, planner, interface
        self._agreement, self._what, self._words = agreement, what, words
        self._compute = None if planner.policy is None else planner.policy.compute
        self._programs = FunctionPrograms(self._f, interface, what, self._compute, self.jitted)

    def init(self, params: PyTree, *args: Any) -> PyTree:
        """Returns the first argument in its storage layout: every rank stores only its own blocks.

        Args:
            params: a tree of tensors, the same on all ranks, or a function, called with `args`, that returns one.
            *args: the arguments of such a function.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: the tree does not fit the specs.
            RankError: ranks pass different trees or different values.
        """
        leaves, plan = drawn(self._planner, params, args)
        if self.mesh.abstract or is_abstract(leaves):
            return abstract_params(plan)
        comms = comms_of(self.mesh)
        self._agreement.agree(comms, "init", plan)
        check_replicas([leaf.path for leaf in plan.leaves], leaves, comms.control)
        del params
        with bind_mesh(self.mesh), losing_no_peer(comms):
            return first_params(plan, own_blocks(plan, leaves))

    def specs(self, params: PyTree) -> PyTree:
        """Returns the storage `Sharding` of each leaf of a parameter tree. Its leaves need a shape and a dtype only."""
        return kept_as(self._planner, params)

    @property
    def pool(self) -> Pool | None:
        """Returns the files of the function's directory on disk, as `reshard(pool=)` takes them.

        None without a directory.
        """
        return disk_of(self._planner)

    def close(self) -> None:
        """Releases the function's directory on disk. States that are there cannot be used any more."""
        close_pool(self._planner)

    def cache_info(self) -> CacheInfo:
        """Returns counts and size of the cache of captures, with the captures of `lower`."""
        return self._programs.graphs.cache_info()

    def __call__(self, params: PyTree, /, *args: Any) -> Any:
        """Returns the function's value.

        Inside a transform, or if an argument requires a gradient, as a pure function.
        """
        if is_traced() or _is_differentiated((params, args)):
            return self.pure(params, *args)
        return self._make_call(self._programs.call, None, params, args)

    def pure(self, params: PyTree, /, *args: Any) -> Any:
        """Returns the same value, made of differentiable collectives alone: leaves are gathered at once, and stay."""

        def admit() -> tuple[Plan, Callable[[], Any]]:
            plan, arguments = self._plan_of(params), self._interface.arguments(args)
            refuse_away(arguments)
            return plan, lambda: self._run_purely(FunctionArgs(plan, params, arguments, tree_structure(args)))

        return run_purely(self.mesh, self._what, self._agreement, admit)

    def _run_purely(self, args: FunctionArgs) -> Any:
        plan, params, arguments, treedef = args
        entered = entered_argument if self._interface.has_specs else entered_as_rows
        with computing_in(self._compute):
            given = tree_unflatten(treedef, [entered(a, plan) for a in arguments])
            if self._interface.has_specs:
                mode = plan.following_function
                typed = functools.partial(self._interface.typed, mode=mode, arguments=arguments)
                out = pure_apply(plan, params, lambda tree: typed(self._f(tree, *given)))
            else:
                out = pure_loss(plan, params, lambda tree: self._f(tree, *given))
            return self._interface.results(out, self._interface.shapes_within, arguments)

    def bind(self, params: PyTree, /, *args: Any, check_every: int = 100) -> BoundCall:
        """Returns the function for arguments of this layout alone.

        A call that repeats costs no agreement of ranks. Collective.

        `f.bind(params, *args)(params, *args) == f(params, *args)`, bit for bit, also for other values and other tensors
        of the same layout. The graph is captured, the ranks agree and the shapes of cut results are exchanged here.
        Nothing runs. Calls of a bound function promise that all ranks call it alike.

        Args:
            params: parameters as for a call. A bound function keeps its last one alive.
            *args: the others.
            check_every: the number of calls from one check of that promise to the next; 0 = never.

        Raises:
            ValueError: `f` is not jitted, `check_every` is negative, or arguments do not fit.
            TypeError: `check_every` is not an int.

        Example:
            >>> from shardfn import jit
            >>> def push(w, cache, x):
            ...     cache[:1] = w * x
            ...     return cache
            >>> push = sharded(jit(push), in_specs=(P(),), out_specs=P(), donate=1)
            >>> cache = GlobalTensor(torch.zeros(2), torch.Size([2]), P(), push.mesh)
            >>> w = push.init(torch.tensor(3.0))
            >>> bound = push.bind(w, cache, torch.tensor(2.0))
            >>> cache = bound(w, cache, torch.tensor(4.0))
            >>> bound(w, cache, torch.tensor(5.0)).full_tensor()
            tensor([15., 0.])
        """
        what = self._what
        if self.jitted is None:
            raise ValueError(f"{what} is not captured, so it cannot be bound. Write sharded(sf.jit(f), ...).")
        if not isinstance(check_every, int) or isinstance(check_every, bool):
            raise TypeError(f"check_every={check_every!r} is a {type(check_every).__name__}. Pass a number of calls.")
        if check_every < 0:
            raise ValueError(f"check_every={check_every}: pass a number of calls from 1 on, or 0 for no checks.")

        def admit() -> AdmittedCall:
            # A bound function keeps the arguments, not their copies on the device.
            given, constant = self._check_given(params, args)
            moved = given.moved(self.mesh.device)
            key = self._programs.signature(moved)

            def run(comms: Comms, agreed: Agreed) -> BoundCall:
                ready = self._programs.ready(comms, key, moved, everywhere=agreed.ready, expected=True)
                layouts = layouts_of(ready.program.abstract_result(), given.arguments, self._interface, comms.control)
                return BoundCall(what, ready, self.mesh, given, layouts, check_every)

            knows = self._programs.graphs.knows(key)
            return AdmittedCall(f"bind of {what}", constant, run, (knows, knows))

        return run_call(self.mesh, admit)

    def lower(self, params: PyTree, /, *args: Any) -> Lowered:
        """Returns the function as a graph, captured and scheduled for these shapes, and not run.

        It neither allocates memory nor sends messages, so the mesh may be abstract.

        Args:
            params: parameters as `init` returns it, or a tree of whole tensors. Only shapes and dtypes are used, so
                tensors may be abstract.
            *args: the others; sharded ones as `GlobalTensor`s, or whole.

        Raises:
            CaptureError: the function depends on the value of a tensor. The message names the line.

        Example:
            >>> sharded(lambda w, x: w * x).lower(torch.ones(4), torch.ones(4)).cost_analysis().sent
            0
        """
        plan, params, args = self._abstract(params, args)
        given = FunctionArgs(plan, params, self._interface.arguments(args), tree_structure(args))
        program, schedule = self._programs.lower(given)
        only = self._programs.signature(given)

        def compile(backend: str | None) -> Callable[..., Any]:
            call_of = self._programs.compile(program, backend, comms_of(self.mesh))
            return lambda params, *args: self._make_call(call_of, only, params, args)

        return Lowered(program.gm, self.mesh, schedule, compile)

    def _make_call(
        self, call_of: Callable[[FunctionArgs], ProgramCall[PyTree]], only: Any, params: PyTree, args: tuple[Any, ...]
    ) -> Any:
        """Makes one call, by `call_of`; if `only` is not None, for that signature only."""

        def admit() -> AdmittedCall:
            given, constant = self._check_given(params, args)
            given = given.moved(self.mesh.device)
            if only is not None and self._programs.signature(given) != only:
                raise ValueError(
                    "a compiled function takes the shapes it was lowered for. Lower it again for these, or jit it."
                )
            call = call_of(given)

            def run(comms: Comms, agreed: Agreed) -> Any:
                # Before the call runs: writes to read-only tensors are detected by their versions at this point.
                blocks = Blocks(params, given.arguments)
                with taken([a.given for a in given.arguments if a.donated], donate=True):
                    out = call.run(comms, agreed, given)
                    blocks.check()
                    shape_of = self._interface.shapes_by(comms.control)
                    return self._interface.results(blocks.apart(out), shape_of, given.arguments)

            return AdmittedCall(self._what, constant, run, call.known)

        return run_call(self.mesh, admit)

    def _check_given(self, params: PyTree, args: tuple[Any, ...]) -> tuple[FunctionArgs, Constant]:
        """Returns the arguments of a call, and the facts that ranks compare; refuses a bad call."""
        check_alive(params, "params")
        plan = self._plan_of(params)
        given = FunctionArgs(plan, params, self._interface.arguments(args), tree_structure(args))
        return given, self._agreement.constant(plan)

    def _abstract(self, params: PyTree, args: tuple[Any, ...]) -> tuple[Plan, PyTree, tuple[Any, ...]]:
        leaves, treedef = tree_flatten(params)
        if leaves and all(isinstance(x, GlobalTensor) for x in leaves):
            plan = self._plan_of(params)
        else:
            check_params(params)
            plan = self._planner.plan(treedef, leaves)
            check_layout(plan, self._f)
            params = abstract_params(plan)
        return plan, params, self._interface.abstract(args)

    def _plan_of(self, params: PyTree) -> Plan:
        plan = self._planner.kept(params, self._words)
        check_layout(plan, self._f)
        return plan


def kept_as(planner: Planner, params: PyTree) -> PyTree:
    """Returns the storage `Sharding` of each leaf of a tree."""
    leaves, treedef = tree_flatten(params)
    plan = planner.plan(treedef, leaves)
    return tree_unflatten(
        treedef, [Sharding(leaf.param, leaf.home, bool(leaf.layers), leaf.places.quantization) for leaf in plan.leaves]
    )


def _is_differentiated(tree: PyTree) -> bool:
    if not torch.is_grad_enabled():
        return False
    held = [x.held if isinstance(x, GlobalTensor) and not x.donated else x for x in tree_leaves(tree)]
    return any(isinstance(x, Tensor) and x.requires_grad for x in held)
