"""Before the first transfer of a call, the ranks compare how a step, or a sharded function, was built."""

from collections.abc import Callable, Sequence
from typing import Any

from shardfn.collectives import Constant
from shardfn.core import PyTree, tree_structure
from shardfn.engine.loss import agree_on_step, told_before
from shardfn.engine.plan import Plan

from ._comms import Comms, comms_of, has_peers, untransformed


class Agreement:
    """Description of how a step or function was built, hashed once per plan, and compared in each call.

    Every call is collective and agrees, since the hash is part of a message that ranks exchange anyway. Only pure
    functions exchange no such message, and agree before the first call with each plan.

    Args:
        lines: facts that must be equal on all ranks that run one plan, besides the plan itself.
    """

    def __init__(self, lines: Callable[[Plan], Sequence[str]]) -> None:
        self._lines = lines
        # By id, never used again: the step's planner keeps all plans, and plans of phases, as long as this object
        # lives.
        self._constants: dict[Any, Constant] = {}
        self._agreed: set[tuple[int, str]] = set()

    def agree(self, comms: Comms, what: str, plan: Plan) -> None:
        """Compares the description, and the results of the optimizer's functions of the tree (such as masks, labels).

        Raises:
            RankError: ranks disagree, or run another call.
        """
        # The user's functions are asked about the tree here, and may raise only on this rank.
        with told_before(comms.control):
            constant = self.constant(plan)
        agree_on_step(comms.control, what, constant=constant)

    def agree_once(self, plan: Plan, what: str) -> None:
        """Compares the description, before the first of several calls of a pure function."""
        mesh = plan.mesh
        if not has_peers(mesh) or (id(plan), what) in self._agreed:
            return
        constant = self.constant(plan)
        with untransformed():
            agree_on_step(comms_of(mesh).control, what, constant=constant)
        # Only after success: else the next call compares again.
        self._agreed.add((id(plan), what))

    def constant(self, plan: Plan, opt_state: PyTree = None) -> Constant:
        """Returns the hashed description that all calls with this plan share.

        With an optimizer state, the description has the state's layout, too.
        """
        treedef = None if opt_state is None else tree_structure(opt_state)
        key = id(plan), treedef
        if key not in self._constants:
            kept = [] if treedef is None else [f"the state of the optimizer: {treedef}"]
            self._constants[key] = Constant.of("\n".join([*self._lines(plan), plan.describe(), *kept]))
        return self._constants[key]
