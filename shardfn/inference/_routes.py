"""The experts that tokens have chosen, beside the cache: a token's are kept in the slot of its keys and values.

So tokens whose blocks are shared, or cached, have theirs without being computed again. Where keys and values of drafts
move to other slots, so do their experts.
"""

from collections.abc import Sequence as Seq

import torch
from jaxtyping import Int, Int16
from torch import Tensor

from ._decoder import Decoder
from ._limits import Limits
from ._plan import Plan
from ._state import State

Choice = tuple[str, int]  # the name of a request, and its choice


class Routes:
    """The experts of all tokens in the cache, on the host.

    Args:
        limits: of the engine.
        decoder: the model.

    Raises:
        ValueError: tokens choose no experts.
    """

    def __init__(self, limits: Limits, decoder: Decoder) -> None:
        if decoder.routed is None:
            raise ValueError(
                "engine: routes is True, and the decoder has routed=None, so that no experts are known; leave it out,"
                " or take the decoder of a model with experts."
            )
        self._block, self.shape = limits.block, decoder.routes
        self._experts = torch.full((limits.blocks * limits.block, *self.shape), -1, dtype=torch.int16)

    def take(self, plan: Plan, experts_Tmk: Int[Tensor, "t m k"]) -> None:
        """The experts of a plan's tokens, after its moves."""
        if plan.moves:
            old, new = torch.tensor(plan.moves).unbind(1)
            self._experts[new] = self._experts[old]
        slots = torch.frombuffer(plan.slots, dtype=torch.int32)[: plan.num_tokens].long()
        self._experts[slots] = experts_Tmk.to("cpu", torch.int16)

    def of(self, blocks: list[int], num: int, moves: Seq[tuple[int, int]] = ()) -> Int16[Tensor, "t m k"]:
        """The experts of the first tokens of a sequence.

        Args:
            blocks: of the sequence.
            num: the number of tokens.
            moves: those that the next step begins with.
        """
        held = {new: old for old, new in moves}
        slots = [blocks[i // self._block] * self._block + i % self._block for i in range(num)]
        return self._experts[torch.tensor([held.get(slot, slot) for slot in slots], dtype=torch.long)]


def blocks_in_flight(state: State) -> dict[Choice, list[int]]:
    """The blocks of the sequences in the plan in flight, which lose them where they end."""
    sequences = (state.sequences[chunk.serial] for chunk in state.flight)
    return {(one.name, one.choice): one.blocks[:] for one in sequences}
