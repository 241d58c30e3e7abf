"""Functions of a user that change the logits of a request's draws, by name.

A processor is `f(output, logits) -> logits` or `f(prompt, output, logits) -> logits`, as in vLLM: lists of token ids,
and the raw logits of the next token, float32 or float64 [V]. It is a pure function, equal on all ranks. So a request's
tokens do not depend on batches, preemption, drafts or ranks.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn.core import did_you_mean

from ._draw_rows import LogitsEdit, Processor
from ._hooks import EngineHooks, list_drawing_rows
from ._requests import Request
from ._state import State


class LogitsProcessors:
    """Processors of an engine, and the requests in progress that use them.

    Args:
        functions: processors by name.

    Raises:
        TypeError: a processor is not a function of two or three arguments.
    """

    def __init__(self, functions: Mapping[str, Processor]) -> None:
        self._functions = {name: _count_arguments(name, f) for name, f in functions.items()}

    @property
    def hooks(self) -> EngineHooks:
        """Returns the engine hooks that change logits."""
        return EngineHooks(admit=self.admit, columns=lambda state, plan: {"edits": self.list_edits(state)})

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names that requests may give."""
        return tuple(self._functions)

    def admit(self, request: Request) -> None:
        """Refuses requests with unknown names of processors.

        Raises:
            ValueError: names the processor.
        """
        check_names(request, self.names)

    def list_edits(self, state: State) -> list[LogitsEdit]:
        """Returns the edits of the next plan's rows."""
        if not self._functions:
            return []
        edits = list[LogitsEdit]()
        for one in list_drawing_rows(state):
            if names := one.request.sampling.logits_processors:
                chosen = [(name, self._functions[name]) for name in names]
                edits.append(LogitsEdit(one.row, one.choice[0], chosen, list(one.request.prompt), list(one.output)))
        return edits


def check_names(request: Request, names: Sequence[str]) -> None:
    """Refuses a request with unknown logits processors.

    Raises:
        ValueError: names the processor.
    """
    for name in request.sampling.logits_processors:
        if name not in names:
            has = f"this engine has {list(names)}" if names else "this engine has none"
            raise ValueError(
                f"logits_processors has {name!r:.60}, but {has}.{did_you_mean(name, names)} Pass functions by name to"
                " Engine(logits_processors=)."
            )


def _count_arguments(name: str, function: Any) -> Processor:
    """Returns a processor of prompt, output and logits."""
    try:
        num = len([x for x in inspect.signature(function).parameters.values() if x.default is inspect.Parameter.empty])
    except (TypeError, ValueError):
        num = 0
    if num not in (2, 3):
        raise TypeError(
            f"logits_processors[{name!r}] must be a function (output, logits) or (prompt, output, logits), got"
            f" {function!r:.60}."
        )
    return function if num == 3 else lambda prompt, output, logits: function(output, logits)
