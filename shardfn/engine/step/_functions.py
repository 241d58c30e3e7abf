"""Functions over the parameters of a step, for `step.apply`, `step.loss` and `step.evaluate`."""

from collections.abc import Callable
from typing import Any

from shardfn.core import PyTree
from shardfn.engine.agreement import Agreement
from shardfn.engine.execution import MAX_APPLIED, Interface
from shardfn.engine.loss import BoundedCache, Unwrapped, unwrap
from shardfn.engine.partition import bind
from shardfn.engine.plan import OF_A_STATE, Planner

from ._sharded import Sharded


class Functions:
    """Makes functions over the parameters of one step, and keeps those of its users.

    A function is identified without its transforms, so that the same one passed again finds the order of gathers that
    was learnt, and its graphs. `MAX_APPLIED` are kept, since each may hold graphs.

    Args:
        planner: of the step.
        agreement: of the step.
    """

    def __init__(self, planner: Planner, agreement: Agreement) -> None:
        self._planner, self._agreement = planner, agreement
        self._known = BoundedCache[Sharded](MAX_APPLIED)

    def make(self, f: Unwrapped, what: str, *in_specs: PyTree) -> Sharded:
        """A function over the parameters; `what` is its name in errors, `in_specs` those of its other arguments."""
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
