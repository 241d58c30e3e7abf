"""`capture`: a function of tensors as a single flat graph of aten ops and transfers.

The function runs once on tensors without data, and the ops are recorded. So the graph is the program that eager mode
would run, op for op. Code that depends on the values of tensors cannot be recorded: an error names the line.

Side effects that a capture refuses or undoes: draws of random numbers, and tensors left in caches.

The Python of a function runs only at the capture. A number drawn in Python, and not by an operation of the graph, would
be the same in every step. A tensor put into a cache would have no data.
"""

import contextlib
import functools
import gc
import linecache
import pathlib
import random
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import jaxtyping
import optree
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx

from shardfn._torch import (
    DYNAMO,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    use_lazy_graph_module,
)
from shardfn.collectives import (
    counting_nothing,
    current_application,
    current_call_site,
    record_call_sites,
    transforming,
    with_sizes,
)
from shardfn.core import Ambient, progress, runs_op_by_op, serialize_tracing, tree_leaves
from shardfn.memory import in_host_region

from ._asserted import Asserting
from ._fakes import Fakes, fakes

_PACKAGE = pathlib.Path(__file__).parents[1]
# Rooms with lines that count as the user's, since the rooms hold models.
_MODELS = str(_PACKAGE / "models")
_PLUMBING = tuple(str(pathlib.Path(str(m.__file__)).parent) for m in (torch, jaxtyping, optree))
# Folders of libraries. Users do not change lines there.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_SKIP = (str(_PACKAGE), *_PLUMBING, "<", contextlib.__file__, functools.__file__)


class CaptureError(RuntimeError):
    """Raised where a function does something that no graph can hold, for example `.item()`."""


class Recorder:
    """Annotates each op that a capture records.

    Attributes:
        phase: part of the step that is being captured, for example "forward".
        part: action of a pipeline that is being captured, in words, else empty.
        tracer: tracer that writes the graph, while a capture runs.
        known: traces to copy again (`traced_once`), by key.
    """

    def __init__(self) -> None:
        self.phase, self.part = "forward", ""
        self.tracer: Any = None
        self.known: dict[Any, Any] = {}
        self._top: FrameType | None = None

    # Set explicitly: autograd records the ops of a backward, and the frames of autograd do not show the phase.
    def mark(self, phase: str) -> None:
        """Marks the beginning of a part of the step."""
        self.phase = phase

    def name(self, part: str) -> None:
        """Marks the beginning of an action of a pipeline."""
        self.part = part

    def note(self, node: Node) -> None:
        """Adds notes to a recorded op. A hook for captures of a special kind."""
        del node

    def line(self) -> str | None:
        """Returns the innermost line of the user's code that is running.

        For a line of a library, also the line that called the library.
        """
        frame: FrameType | None = sys._getframe(1)
        inner = ""
        while frame is not None and frame is not self._top:
            name = frame.f_code.co_filename
            own = not name.startswith(_INSTALLED)
            if _is_users(name) and (own or not inner):
                line = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
                if own:
                    return f"{inner}, called at {line}" if inner else line
                inner = line
            frame = frame.f_back
        return inner or None

    @contextlib.contextmanager
    def below(self) -> Iterator[None]:
        """Looks for the user's lines only in calls from now on."""
        top, self._top = self._top, sys._getframe(2)
        try:
            yield
        finally:
            self._top = top

    @contextlib.contextmanager
    def attached(self, recorded: Callable[[], object]) -> Iterator[None]:
        """Writes phase, line and memory to every op while a capture runs, and calls a function after each op."""
        mode = get_proxy_mode()
        assert mode is not None
        tracer: Any = mode.tracer
        self.tracer = tracer
        create = tracer.create_node
        self._top = sys._getframe(2)

        def create_node(*args: Any, **kwargs: Any) -> Node:
            node = create(*args, **kwargs)
            node.meta["phase"] = self.phase
            if self.part:
                node.meta["part"] = self.part
            if in_host_region():
                node.meta["memory"] = "host"
            if runs_op_by_op():
                node.meta["op_by_op"] = True
            line = current_call_site()
            # In eager steps the generator is put back before a recomputation. To put back a generator is no op, and no
            # graph holds the change.
            if _RECOMPUTING and draws(node):
                raise CaptureError(
                    f"{line or 'a recomputation'}: {node.target} draws from torch's generator inside remat:"
                    " in a graph the recomputation would draw other numbers than the forward did. Draw by a"
                    " key: sf.nn.dropout(key, ...), with key= of the step, or leave out remat or jit."
                )
            if line is not None:
                node.meta["where"] = line
            applied = current_application()
            if applied is not None:
                node.meta["collective"] = applied
                node.meta["again"] = bool(_RECOMPUTING)
            self.note(node)
            recorded()
            return node

        # Only on this tracer: a capture inside has another tracer, and another recorder.
        tracer.create_node = create_node
        try:
            with _RECORDER.bound(self), record_call_sites(self.line):
                yield
        finally:
            tracer.create_node = create
            # The traces would keep the graph alive, and nodes of a graph are useless in the next graph.
            self._top = self.tracer = None
            self.known.clear()


_RECOMPUTING = Ambient[None]("a function runs for the second time")
_RECORDER = Ambient[Recorder]("recorder of a capture")


def recomputing() -> AbstractContextManager[None]:
    """Marks the second run of a `remat`ted function (activation checkpointing)."""
    return _RECOMPUTING.bound(None)


def capturing() -> bool:
    """Returns whether a capture is running."""
    return get_proxy_mode() is not None


def is_traced() -> bool:
    """Returns whether a capture or a transform of torch.func follows the code that runs."""
    return capturing() or transforming()


# Roles of values that their ops do not show: a whole leaf, a leaf's gradient, a result of the loss.
MARKS = frozenset({"whole_of", "gradient_to", "result"})


def mark(x: Tensor, key: str, what: Any) -> None:
    """Adds a role to the node of a tensor, while a capture runs."""
    notes = recorder()
    slot: Any = None if notes is None else get_proxy_slot(x, notes.tracer, None)
    if slot is not None:
        meta = slot.proxy.node.meta
        # A value may have several roles, such as a leaf that the loss returns unchanged.
        meta[key] = tuple(dict.fromkeys((*meta.get(key, ()), what)))


def recorder() -> Recorder | None:
    """Returns the recorder of the running capture, if its tracer is the innermost one, else None."""
    innermost = _RECORDER.innermost()
    if innermost is None:  # checked first, as an eager step calls this for each leaf
        return None
    mode = get_proxy_mode()
    # Not in a capture inside, which has no recorder here: such nodes do not belong to the graph that is noted.
    return innermost if mode is not None and innermost.tracer is mode.tracer else None


def capture(
    f: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Any],
    recorder: Recorder | None = None,
    *,
    differentiable: bool = False,
) -> GraphModule:
    """Returns the graph of `f(*inputs)`.

    Args:
        f: function that takes a tensor for each input and returns a flat sequence of tensors.
        inputs: anything with shape, dtype and device. Values are not looked at.
        recorder: recorder that annotates each op with phase and line.
        differentiable: whether the graph is to be differentiated afterwards. Such a graph keeps `detach`.

    Returns:
        The graph module. Each node's `meta["val"]` is a tensor without data.

    Raises:
        CaptureError: the function reads the value of a tensor. The message names the line.
    """
    notes = recorder or Recorder()

    def record_call(*args: Tensor) -> Sequence[Tensor]:
        with (
            progress(desc="capturing", unit="op", part=True) as bar,
            notes.attached(bar.update),
            Asserting(),
            _drawing_nothing(notes.line),
        ):
            return f(*args)

    # On a single device the backward must run on this thread, where the tracer is.
    once = torch.autograd.set_multithreading_enabled(False)
    trace = make_fx(record_call, tracing_mode="fake", _allow_non_fake_inputs=True, _disable_torch_fn_metadata_mode=True)
    try:
        with (
            serialize_tracing(),
            once,
            use_lazy_graph_module(True),
            _naming_lines(),
            quiet(),
            counting_nothing(),
            _run_uncompiled(),
        ):
            gm = trace(*fakes(inputs))
    finally:
        # After an error, too. Else the next call finds tensors without data.
        _forget_cached()
    with_sizes(gm)
    if not differentiable:
        _strip_detach(gm)
    return gm


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Pauses the garbage collector.

    A graph is many live objects, and repeated scans cost as much as making the objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _run_uncompiled() -> Iterator[None]:
    """Runs a model's compiled functions as written, so that their ops are part of the graph."""
    # The import takes seconds, so this code does not import the module: where the module is missing, the model has
    # compiled nothing.
    dynamo: Any = sys.modules.get(DYNAMO)
    with contextlib.nullcontext() if dynamo is None else dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


@contextlib.contextmanager
def _naming_lines() -> Iterator[None]:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # and sympy: not when imported

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise CaptureError(_explain_error(error)) from error
    except RuntimeError as error:
        if "was used before it has been defined" in str(error):
            raise CaptureError(
                "a tensor that the function of a scan has made is used outside of the function, and must be"
                " in the carry or in y. Return the tensor, since the function's Python runs for some layers"
                " only."
            ) from error
        # Uses of a tensor's memory: .numpy(), and an index that is a sequence of tensors.
        if not any(said in str(error) for said in ("numpy", "data is not allocated yet")):
            raise
        raise CaptureError(_explain_error(error)) from error
    except _Drawn as drawn:
        name, line = (*drawn.args, None)[:2]
        raise CaptureError(
            f"{f'{line}: ' if line else ''}the function draws from {name} while it is captured: the graph"
            " would hold these numbers, the same in every step. Draw by a key: sf.nn.dropout(key, ...),"
            " with key= of the step. Or draw before the step and pass the numbers in the batch, as tensors,"
            " or leave out jit."
        ) from None


def _users_line(error: BaseException) -> tuple[str, str]:
    """Returns the innermost line of the user's code that an error went through, and its text."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    if not frames:
        return "somewhere", ""
    line = frames[-1].lineno or 0
    text = (frames[-1].line or linecache.getline(frames[-1].filename, line)).strip()
    return f"{frames[-1].filename}:{line}", text


def _explain_error(error: BaseException) -> str:
    where, text = _users_line(error)
    return (
        f"{where}: `{text}` needs the value of a tensor while the step is captured ({str(error).splitlines()[0]})."
        " A graph has one path: use torch.where or arithmetic in place of the branch, keep the value a tensor in place"
        " of .item(), take sizes from shapes; or leave out jit, as eager steps run any Python."
    )


def draws(node: Node) -> bool:
    """Returns whether an op of a graph draws from torch's generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema: Any = getattr(node.target, "_schema")  # noqa: B009  # an OpOverload, as it has tags
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    # Attention has the tag because of possible dropout. At a rate of 0, the default, attention draws nothing.
    may_not = any(a.name == "dropout_p" for a in schema.arguments) and given.get("dropout_p", 0.0) == 0.0
    return not may_not


def _is_users(name: str) -> bool:
    return not name.startswith(_SKIP) or name.startswith(_MODELS)


def _strip_detach(gm: GraphModule) -> None:
    """Removes `detach`, the identity in a graph, since a graph has no autograd."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.detach.default:
            source: Any = node.args[0]
            for key in MARKS & node.meta.keys():
                source.meta[key] = (*source.meta.get(key, ()), *node.meta[key])
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
    gm.recompile()


_CACHE: Any = type(functools.lru_cache(len))


class _Drawn(Exception):
    """Error for a function that draws numbers, with the name of the generator and, if known, the line."""


@contextlib.contextmanager
def _drawing_nothing(line: Callable[[], str | None]) -> Iterator[None]:
    """Refuses draws from Python's and numpy's generators in the body, and restores a generator that has advanced.

    Args:
        line: function that returns the user's line that is running.

    Raises:
        _Drawn: something is drawn.
    """
    before = [(name, get(), put) for name, get, put in _list_generators()]
    with _refuse_draws(random, getattr(random, "_inst"), line), _refuse_draws(*_numpy_generator(), line):  # noqa: B009  # is private
        yield
    now = [get() for _, get, _ in _list_generators()]
    # A generator imported during the body is not in `before`, so there is no state to put back.
    moved = [(name, put, old) for (name, old, put), new in zip(before, now, strict=False) if not _is_same(old, new)]
    for _, put, old in moved:
        put(old)
    if moved:
        raise _Drawn(" and ".join(name for name, _, _ in moved))


@contextlib.contextmanager
def _refuse_draws(module: Any, generator: Any, line: Callable[[], str | None]) -> Iterator[None]:
    """Makes those functions of a module raise that draw from the module's generator."""
    # Methods of the module's global generator. A generator that the user made is no global state, and passes.
    found = {name: f for name, f in vars(module).items() if getattr(f, "__self__", None) is generator} if module else {}

    def make_refusal(name: str) -> Any:
        def raise_refusal(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            raise _Drawn(f"{module.__name__}.{name}", line())

        return raise_refusal

    for name in found:
        # To set or read the state draws nothing. The check around the body does both, too.
        if "state" not in name:
            setattr(module, name, make_refusal(name))
    try:
        yield
    finally:
        for name, f in found.items():
            setattr(module, name, f)


def _numpy_generator() -> tuple[Any, Any]:
    module: Any = sys.modules.get("numpy.random")
    return module, None if module is None else module.mtrand._rand


def _forget_cached() -> None:
    """Empties every `functools.lru_cache` that holds a tensor without data, so that later calls make real tensors."""
    for x in gc.get_objects():
        if type(x) is _CACHE and any(_is_fake(t) for t in tree_leaves(gc.get_referents(x))):
            x.cache_clear()


def _is_fake(x: Any) -> bool:
    return isinstance(x, FakeTensor) and isinstance(x.fake_mode, Fakes)


def _list_generators() -> list[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    out: list[Any] = [("torch's generator", torch.get_rng_state, torch.set_rng_state)]
    if "beartype" not in sys.modules:  # beartype draws from Python's generator at any call
        out.append(("Python's random", random.getstate, random.setstate))
    numpy, _ = _numpy_generator()
    if numpy is not None:
        out.append(("numpy.random", lambda: numpy.get_state(legacy=False), numpy.set_state))
    return out


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return a == b
    # To draw all numbers of a key returns the position to the old value, but with another key.
    return a["state"]["pos"] == b["state"]["pos"] and bool((a["state"]["key"] == b["state"]["key"]).all())
