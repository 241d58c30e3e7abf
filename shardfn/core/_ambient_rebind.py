"""Code that runs after its forward, in a backward, and needs the forward's ambient values.

A function under activation checkpointing runs a second time in the backward, when the blocks around the first run may
have ended. Each room registers how to bind its ambient values again. `capture_ambient` collects these functions.
`torch.utils.checkpoint` gets the same while `rebind_in_checkpoints` is active: torch looks up two names of a file in
each run, and the two are replaced.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from jaxtyping import Shaped
from torch import Tensor
from torch.fx.node import has_side_effect

from shardfn._torch import CHECKPOINT, CHECKPOINT_APART, CHECKPOINT_GENERATOR

from ._ambient import Ambient

Sees = Callable[[Tensor, str], None]
_SEEING = Ambient[Sees]("sees values that a recomputation must repeat", by_thread=True)


class FirstRun:
    """Values of a function's first run that later runs must repeat.

    Example:
        >>> run = FirstRun()
        >>> with run.noted():
        ...     check_recompute(torch.tensor([1, 2]), "blocks.0: choices")
        >>> with run.repeated():
        ...     check_recompute(torch.tensor([1, 2]), "blocks.0: choices")
    """

    def __init__(self) -> None:
        self._values: list[Tensor] = []

    def noted(self) -> AbstractContextManager[Any]:
        """Notes values while the function runs for the first time."""
        return _SEEING.bound(lambda x, name: self._values.append(x))

    def repeated(self) -> AbstractContextManager[Any]:
        """Compares values while the function runs again. A difference is a RuntimeError."""
        before = iter(self._values)
        return _SEEING.bound(lambda x, name: _compare_values(next(before, None), x, name))


def check_recompute(x: Shaped[Tensor, "..."], name: str) -> None:
    """Requires that a recomputation of the functions around has the same `x` here, without a gradient.

    The functions are under `remat`, or under `torch.utils.checkpoint` on a mesh or in a step (activation
    checkpointing).

    Args:
        x: values to compare, in a capture by an operation of the graph.
        name: beginning of the error of a difference.

    Example:
        >>> check_recompute(torch.ones(2), "mask")  # no function around is recomputed
    """
    for sees in _SEEING.all if _SEEING else ():
        sees(x.detach(), name)


def _compare_values(before: Tensor | None, x: Tensor, name: str) -> None:
    if before is None or before.shape != x.shape:
        raise RuntimeError(_difference_text(name, ""))
    torch.ops.shardfn.check_recompute(before, x, name)


def _difference_text(name: str, places: str) -> str:
    return (
        f"{name} differ{places} between the forward and its recomputation, whose gradients would be those of another"
        " function. Draw by keys, and use nothing that changes in between."
    )


# One operation without a result: a policy by the operations of a forward does not count the comparison.
_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")
_LIBRARY.define("check_recompute(Tensor before, Tensor x, str name) -> ()")


def _compare_recompute(before: Tensor, x: Tensor, name: str) -> None:
    """Raises RuntimeError if values differ. On a GPU the program ends later, without a wait."""
    if x.is_cuda:
        torch._assert_async((before == x).all(), _difference_text(name, ""))
    elif not torch.equal(before, x):
        raise RuntimeError(_difference_text(name, f" in {int((before != x).sum())} of {x.numel()} places"))


_LIBRARY.impl("check_recompute", _compare_recompute, "CompositeExplicitAutograd")


@torch.library.register_fake("shardfn::check_recompute", lib=_LIBRARY)
def _(before: Tensor, x: Tensor, name: str) -> None:
    del before, x, name


# The result has no use, so that dead code would be removed.
has_side_effect(torch.ops.shardfn.check_recompute.default)


# Binds a value again, in each call.
Again = Callable[[], AbstractContextManager[Any]]
# Notes something on arguments.
Note = Callable[[Sequence[Any]], None]
_LOOKS: list[Callable[[], Sequence[Again]]] = []
_ARGUMENTS: list[Callable[[Sequence[Any]], Note | None]] = []


def rebind_ambient(look: Callable[[], Sequence[Again]]) -> Callable[[], Sequence[Again]]:
    """Registers a function that returns contexts to bind the current ambient values again, for code that runs later.

    The block that binds a value of this kind enters `rebind_in_checkpoints`, too.

    Example:
        >>> @rebind_ambient
        ... def nothing():
        ...     return []
        >>> with capture_ambient()():
        ...     pass
    """
    _LOOKS.append(look)
    return look


def rebind_note(look: Callable[[Sequence[Any]], Note | None]) -> Callable[[Sequence[Any]], Note | None]:
    """Registers a look at notes on the arguments of a checkpointed function, whose tensors are new objects later.

    The look returns a function that notes the same on the arguments of a later run, or None if there is nothing to
    note.
    """
    _ARGUMENTS.append(look)
    return look


def capture_ambient() -> Again:
    """Returns a way to bind the ambient values of this moment again, on any thread."""
    found = [again for look in _LOOKS for again in look()]
    return functools.partial(_enter_all, found) if found else contextlib.nullcontext


@contextlib.contextmanager
def _enter_all(found: Sequence[Again]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for again in found:
            stack.enter_context(again())
        yield


class Replaced:
    """Attributes that are replaced while blocks run, for all threads. Blocks may overlap, also of several objects.

    Args:
        find: function that returns the attributes, as (owner, name, replacement of the current value).
    """

    def __init__(self, find: Callable[[], list[tuple[Any, str, Callable[[Any], Any]]]]) -> None:
        self._find, self._num_running = find, 0
        self._found: list[tuple[Any, str, Callable[[Any], Any]]] = []

    def __enter__(self) -> None:
        with _LOCK:
            self._num_running += 1
            if self._num_running > 1:
                return
            self._found = self._find()
            for owner, name, replacement in self._found:
                # A class method itself, not bound to the class.
                value = _VALUES.setdefault((owner, name), _Attribute(vars(owner)[name], []))
                value.replacements.append(replacement)
                value.put(owner, name)

    def __exit__(self, *failure: object) -> None:
        with _LOCK:
            self._num_running -= 1
            if self._num_running:
                return
            for owner, name, replacement in self._found:
                value = _VALUES[owner, name]
                value.replacements.remove(replacement)
                value.put(owner, name)
                if not value.replacements:
                    del _VALUES[owner, name]


class _Attribute(NamedTuple):
    """Attribute that is replaced: the original value, and the replacements, the outermost last."""

    own: Any
    replacements: list[Callable[[Any], Any]]

    def put(self, owner: Any, name: str) -> None:
        value = self.own
        for replacement in self.replacements:
            value = replacement(value)
        setattr(owner, name, value)


_LOCK = threading.Lock()
_VALUES: dict[tuple[Any, str], _Attribute] = {}


def rebind_in_checkpoints() -> AbstractContextManager[None]:
    """Runs functions under `torch.utils.checkpoint` again with the ambient values of their forward.

    Values of `check_recompute` must then equal the values of the forward.

    The reentrant kind runs as the other kind, which means the same. Itself it would add gradients to the `.grad` of
    leaves, past a step, and drop the gradients of the function's parameters if no argument needs a gradient.
    """
    return _CHECKPOINTS


def _patched_names() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    # Another file of torch has a separate name for the generator.
    other = sys.modules.get(CHECKPOINT)
    files: list[Any] = [torch_checkpoint, other] if other else [torch_checkpoint]
    return [
        *((file, CHECKPOINT_GENERATOR, _wrap_driver) for file in files),
        (torch_checkpoint, "CheckpointFunction", _wrap_reentrant),
    ]


_CHECKPOINTS = Replaced(_patched_names)


@functools.cache
def _wrap_driver(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the driver of checkpoints that are not reentrant, with another function to run again."""

    @functools.wraps(original)
    def generator(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if CHECKPOINT_APART else args
        again, notes = capture_ambient(), [note for note in (look(given) for look in _ARGUMENTS) if note is not None]
        first = FirstRun()

        def run(*args: Any, **kwargs: Any) -> Any:
            with again(), first.repeated():
                for note in notes:
                    note(args)
                return f(*args, **kwargs)

        with first.noted():  # torch runs the forward while the driver is at the only yield
            yield from original(run, *args, **kwargs)

    return generator


@functools.cache
def _wrap_reentrant(original: Any) -> Any:
    """Returns a class that runs calls of the reentrant kind by the other kind."""

    class CheckpointFunction(original):
        @classmethod
        def apply(cls, f: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            # Another thread, not concerned.
            if capture_ambient() is contextlib.nullcontext:
                return original.apply(f, preserve_rng_state, *args)
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
            return torch_checkpoint.checkpoint(f, *args, **options)

    return CheckpointFunction
