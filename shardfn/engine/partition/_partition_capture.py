"""Captures of losses that are to be partitioned: notes, or refusals, of facts that a graph does not hold.

A graph of a forward has operations. Everything else that autograd sees must be noted next to the operations, such as
sections that are recomputed (activation checkpointing) or offloaded, and parts under `no_grad`. Anything that cannot be
noted is an error, such as functions with a custom backward, and hooks.
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
    """Part of a loss that ran inside a function of a transform.

    Attributes:
        around: transform, from a function of tensors to a function of the same meaning.
    """

    around: Callable[[Callable[..., Any]], Callable[..., Any]]


class Noting(Recorder):
    """Notes of each op: whether the op is differentiated, the op's loop, and the outermost section in the loop."""

    def __init__(self) -> None:
        super().__init__()
        # The sections that are open at this point of the capture, the outermost first. In a loop's body, only the
        # body's sections.
        self.sections: list[Section] = []
        self._loop: LoopMark | None = None

    @contextlib.contextmanager
    def inside(self, loop: LoopMark) -> Iterator[None]:
        """Notes ops as a loop's while the body runs. Sections that began around the loop do not belong to the body."""
        before = self._loop, self.sections
        self._loop, self.sections = loop, []
        try:
            yield
        finally:
            self._loop, self.sections = before

    def note(self, node: Node) -> None:
        """Notes the facts of a node.

        Raises:
            ValueError: other code has hooks on what autograd saves.
        """
        if current_graph_task() != -1:
            raise ValueError(
                f"{self.line() or 'a line unknown'}: the loss differentiates something itself"
                " (torch.autograd.grad or backward), which the graph of the forward does not hold as such."
                " Use torch.func, or leave out partition."
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
                f"{self.line() or 'a line unknown'}: partition(loss) does not hold tensors that are"
                " recomputed or moved by saved-tensor hooks, such as torch.utils.checkpoint. Use sf.remat"
                " or sf.offload, or turn the hooks off."
            )


def in_section(around: Callable[[Callable[..., Any]], Callable[..., Any]], f: Callable[[], Any]) -> tuple[bool, Any]:
    """Runs `f` as a section of the loss being captured, or returns (False, None) outside of such a capture."""
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
    """Runs a capture inside a step, without the step's hooks on saved values. Refuses hooks on values."""
    names = "register_hook", "register_post_accumulate_grad_hook"
    before = {name: getattr(torch.Tensor, name) for name in names}

    def refuse_hook(self: Tensor, hook: Any) -> Any:
        del self, hook
        raise ValueError(
            "partition(loss): a hook on a tensor in the loss, Tensor.register_hook, is not in the graph of"
            " the forward. Write a product, or x + (y - x).detach(), or leave out partition."
        )

    for name in names:
        setattr(torch.Tensor, name, refuse_hook)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_keep_value, _keep_value):
            yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


# Torch's names of derivatives of registered ops. The graph holds these ops, and `nn` calls the ops so that
# differentiation is noted. Any other op with such a derivative would be noted as an op without a derivative.
_OPS = "copied_rows", "combined_rows", "multiplied_rows"
_OF_AN_OP = tuple(f"GeneratedBackwardFor_shardfn_kernels_{name}_" for name in _OPS)


def refuse_functions(out: Sequence[Any]) -> None:
    """Refuses operations with a custom backward. A graph of the forward does not hold a custom backward.

    Raises:
        ValueError: there are such operations. The message lists all.
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
