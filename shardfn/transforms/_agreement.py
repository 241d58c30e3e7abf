"""What the ranks compare of a step before the first transfer of a call: how it was built."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardfn.collectives import Constant
from shardfn.core import tree_structure

from ._capture import capturing
from ._check import agree_on_step, told_before
from ._comms import Comms, comms_of
from ._constant import describe_step
from ._plan import Plan
from ._schedule import as_text
from ._state import TrainState
from ._step import StepParts
from ._unwrap import Unwrapped
from ._update import decided_on


class Agreement:
    """How one step was built, as text that is hashed once for each plan, and compared in each call.

    All calls but those of pure functions are collective, and agree each time, since the hash travels with what they
    exchange anyway. A pure function may not, and agrees before its first call with a plan alone.

    Args:
        parts: what the step is made of.
        unwrapped: the loss, and what was around it.
        key: the key that the step was built with.
    """

    def __init__(self, parts: StepParts, unwrapped: Unwrapped, key: Tensor | None) -> None:
        self._parts, self._unwrapped, self._key = parts, unwrapped, key
        self._constants: dict[Any, Constant] = {}
        self._agreed: set[tuple[int, str]] = set()

    def agree(self, comms: Comms, what: str, plan: Plan, state: TrainState | None) -> None:
        """Compares how the step was built; what the optimizer's functions of the tree say, too, and that they do.

        Raises:
            RankError: ranks disagree, or run another call.
        """
        with told_before(comms.control):
            constant = self.constant(plan, state)
        agree_on_step(comms.control, what, constant=constant)

    def agree_once(self, plan: Plan, what: str) -> None:
        """Compares how the step was built before the first of calls that are pure functions, and agree on no more."""
        mesh = plan.mesh
        if mesh.size == 1 or mesh.abstract or capturing() or (id(plan), what) in self._agreed:
            return
        constant = self.constant(plan, None)
        with torch._C._DisableFuncTorch(), _disable_current_modes():  # a message, and no part of what is transformed
            agree_on_step(comms_of(mesh).control, what, constant=constant)
        self._agreed.add((id(plan), what))

    def constant(self, plan: Plan, state: TrainState | None) -> Constant:
        """What calls with this plan have in common, hashed once; with a state, how its optimizer state is made, too."""
        treedef = None if state is None else tree_structure(state.opt_state)
        key = id(plan), treedef
        if key not in self._constants:
            parts = self._parts
            flags = f"donate {parts.donate} skip_nonfinite {parts.skip_nonfinite} has_aux {parts.has_aux}"
            seed = f"key {None if self._key is None else self._key.tolist()}"
            made = describe_step(self._unwrapped, decided_on(plan, parts.optimizer))
            lines = [flags, seed, made, f"schedule {as_text(parts.schedule)}", plan.describe()]
            kept = [] if treedef is None else [f"the state of the optimizer: {treedef}"]
            self._constants[key] = Constant.of("\n".join([*lines, *kept]))
        return self._constants[key]
