"""Ranks compare the states of their schedules before each step, as a chain of digests of all inputs and plans.

Where the chains differ, for example because two ranks received different events, the ranks compare field by field.
"""

from collections.abc import Mapping
from typing import Any

from shardfn.core import Mesh, RankError
from shardfn.engine import comms_of, losing_no_peer

from ._digest import field_digests, first_difference
from ._state import State

# A round of the control plane takes 60 bits.
_BITS = (1 << 60) - 1


def compare_states(state: State, mesh: Mesh) -> None:
    """Compares the states of all ranks. Collective.

    Raises:
        RankError: states differ. The message names the first field that differs, and the ranks.
    """
    if mesh.size == 1:
        return
    comms = comms_of(mesh)
    with losing_no_peer(comms):
        comms.control.begin(f"step {state.step} of an engine")
        chains = comms.control.exchange(int.from_bytes(state.chain, "little") & _BITS)
        if len(set(chains)) == 1:
            return
        everywhere: list[Any] = comms.control.gather(field_digests(state))
    raise RankError(_describe_difference(everywhere, state.step))


def _describe_difference(everywhere: list[Mapping[str, bytes]], step: int) -> str:
    for rank, theirs in enumerate(everywhere):
        field = first_difference(everywhere[0], theirs)
        if field is not None:
            return (
                f"step {step} of an engine: ranks 0 and {rank} differ in {field}; all ranks must pass the same requests"
                " and events, in the same order, to each step."
            )
    return f"step {step} of an engine: ranks had different inputs or plans before; their states are equal now."
