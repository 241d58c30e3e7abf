"""The experts that tokens have chosen, beside the cache: a token's are kept in the slot of its keys and values.

So tokens whose blocks are shared, or cached, have theirs without being computed again.
"""

from typing import Any

import torch
from jaxtyping import Int16
from torch import Tensor

from ._decoder import Decoder
from ._drafters import Drafter
from ._follower import Follower
from ._limits import Limits
from ._plan import Plan
from ._runner import Results
from ._schedule import Output
from ._state import State

Choice = tuple[str, int]  # the name of a request, and its choice


class Routes:
    """The experts of all tokens in the cache, on the host.

    Args:
        limits: of the engine.
        decoder: the model.
        drafter: of the engine, which must have none: drafts that branch lie in other slots than those of their places.

    Raises:
        ValueError: tokens choose no experts, or there is a drafter.
    """

    def __init__(self, limits: Limits, decoder: Decoder, drafter: Drafter | None) -> None:
        if drafter is not None:
            raise ValueError(f"engine: routes is True, and the drafter is {drafter!r:.80}; leave one of them out.")
        if decoder.routes == (0, 0):
            raise ValueError(
                "engine: routes is True, and the decoder has routes=(0, 0), so that no experts are known; leave it out,"
                " or take the decoder of a models.gpt with experts."
            )
        self._block, self.shape = limits.block, decoder.routes
        self._blocks: dict[Choice, list[int]] = {}
        self._experts = torch.full((limits.blocks * limits.block, *self.shape), -1, dtype=torch.int16)

    @property
    def follower(self) -> Follower:
        """The hooks."""
        return Follower(
            before=self.before, fields=self.fields, columns=lambda state, plan: {"routed": True}, ran=self.ran
        )

    def before(self, state: State) -> None:
        """Keeps the blocks of the sequences in the plan in flight, which lose them where they end."""
        sequences = (state.sequences[chunk.serial] for chunk in state.flight)
        self._blocks = {(one.name, one.choice): one.blocks[:] for one in sequences}

    def fields(self, output: Output) -> dict[str, Any]:
        """The experts of a sequence, with its last token. They are read before a step writes to blocks free by now."""
        if output.finish is None or output.token is None:
            return {}
        return {"routes": self.of(self._blocks[output.name, output.choice], output.position)}

    def ran(self, plan: Plan, results: Results) -> None:
        """The experts of a plan's tokens."""
        assert results.experts is not None
        slots = torch.frombuffer(plan.slots, dtype=torch.int32)[: plan.num_tokens].long()
        self._experts[slots] = results.experts.to("cpu", torch.int16)

    def of(self, blocks: list[int], num: int) -> Int16[Tensor, "t m k"]:
        """The experts of the first tokens of a sequence, which has these blocks."""
        slots = torch.tensor(blocks)[:, None] * self._block + torch.arange(self._block)
        return self._experts[slots.flatten()[:num]]
