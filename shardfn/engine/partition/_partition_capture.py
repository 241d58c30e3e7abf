"""Captures of losses that are to be partitioned: notes on, or refusal of, facts that a graph does not hold.

A graph of a forward has operations. Everything else that the loss does with values and that autograd sees must be noted
beside them (sections that are recomputed or offloaded, parts under `no_grad`), or be an error (functions with a
backward of their own, hooks).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shardfn._torch import current_graph_task
from shardfn.capture import Recorder, recorder
from shardfn.core import raise_all, saved_tensors_hooks
from shardfn.graph import LoopMark
from shardfn.nn import is_differentiated


@dataclasses.dataclass(frozen=True, eq=False)
class Section:
    """A part of a loss that ran inside a function of a transform.

    Attributes:
        around: the transform: from a function of tensors to one of the same meaning.
    """

    around: Callable[[Callable[..., Any]], Callable[..., Any]]


class Noting(Recorder):
    """Notes of each op whether it is differentiated, the loop that it is in, and the outermost section in that."""

    def __init__(self) -> None:
        super().__init__()
        # The sections that are open at this point of the capture, the outermost first; in a loop's body, its own alone.
        self.sections: list[Section] = []
        self._loop: LoopMark | None = None

    @contextlib.contextmanager
    def inside(self, loop: LoopMark) -> Iterator[None]:
        """While the body of a loop runs. Sections that began around it do not belong to it."""
        before = self._loop, self.sections
        self._loop, self.sections = loop, []
        try:
            yield
        finally:
            self._loop, self.sections = before

    def note(self, node: Node) -> None:
        """Notes the facts of a node.

        Raises:
            ValueError: something else has hooks on what autograd saves.
        """
        if current_graph_task() != -1:
            raise ValueError(
                f"{self.line() or 'a line unknown'}: the loss differentiates something itself (torch.autograd.grad or"
                " backward), which the graph of its forward does not hold as such; use torch.func, or leave out"
                " partition."
            )
        if not is_differentiated():
            node.meta["no_grad"] = True
        if self._loop is not None:
            node.meta["loop"] = self._loop
        if self.sections:
            node.meta["section"] = self.sections[0]
        top = saved_tensors_hooks()
        if top is not None and top[0] is not _keep_value:
            raise ValueError(
                f"{self.line() or 'a line unknown'}: partition(loss) does not hold tensors that are recomputed or moved"
                " by saved-tensor hooks, such as torch.utils.checkpoint; use sf.remat or sf.offload, or turn it off."
            )


def in_section(around: Callable[[Callable[..., Any]], Callable[..., Any]], f: Callable[[], Any]) -> tuple[bool, Any]:
    """Runs `f` as a section of the loss that is being captured to be partitioned; (False, None) where none is."""
    notes = recorder()
    if not isinstance(notes, Noting):
        return False, None
    notes.sections.append(Section(around))
    try:
        return True, f()
    finally:
        notes.sections.pop()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A capture inside a step, without the step's hooks on saved values; it refuses hooks on values."""
    names = "register_hook", "register_post_accumulate_grad_hook"
    before = {name: getattr(torch.Tensor, name) for name in names}

    def refuse_hook(self: Tensor, hook: Any) -> Any:
        del self, hook
        raise ValueError(
            "partition(loss): a hook on a tensor in the loss, Tensor.register_hook, is not in the graph of its forward;"
            " write a product, or x + (y - x).detach(), or leave out partition."
        )

    for name in names:
        setattr(torch.Tensor, name, refuse_hook)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_keep_value, _keep_value):
            yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


# The names that torch gives to derivatives with which ops are registered. The graph holds these ops, and `nn` calls
# them so that they are noted as differentiated. Any other op with such a derivative would be noted as if it had none.
_OPS = "copied_rows", "combined_rows", "multiplied_rows"
_OF_AN_OP = tuple(f"GeneratedBackwardFor_shardfn_kernels_{name}_" for name in _OPS)


def refuse_functions(out: Sequence[Any]) -> None:
    """Refuses operations with a backward of their own, which a graph of their forward does not hold.

    Raises:
        ValueError: lists them.
    """
    todo = [x.grad_fn for x in out if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(todo)
    found: set[str] = set()
    while todo:
        fn = todo.pop()
        if isinstance(fn, torch.autograd.function.BackwardCFunction) and not type(fn).__name__.startswith(_OF_AN_OP):
            found.add(type(fn).__name__.removesuffix("Backward"))
        for before, _ in fn.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                todo.append(before)
    raise_all(
        ValueError,
        "partition(loss) holds operations of torch, whose backward it knows. Functions with a backward of their own:",
        [
            "a collective of shardfn; leave it out, or leave out partition: specs alone decide the cuts"
            if name == "_Collective"
            else f"{name}; write it in operations of torch, or leave out partition"
            for name in sorted(found)
        ],
    )


def _keep_value(x: Any) -> Any:
    return x
