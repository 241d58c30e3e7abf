"""Experts of tokens, next to the KV cache: a token's experts are in the slot of the token's keys and values.

So tokens of shared or cached blocks have their experts without computing again (prefix caching). Where keys and values
of drafts move to other slots, so do the experts.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from jaxtyping import Int16
from torch import Tensor

from ._decoder import Decoder
from ._hooks import Choice, EngineHooks
from ._limits import Limits
from ._plan import StepPlan
from ._runner import StepResults
from ._schedule import Output
from ._state import State


class ExpertRecorder:
    """Experts of all tokens in the cache, on the host.

    Args:
        limits: limits of the engine.
        decoder: model.

    Raises:
        ValueError: tokens choose no experts.
    """

    def __init__(self, limits: Limits, decoder: Decoder) -> None:
        if decoder.expert_shape == (0, 0):
            raise ValueError(
                "engine: record_experts is True, and the decoder has expert_shape=(0, 0), so that no experts"
                " are known. Leave it out, or take the decoder of a model with experts."
            )
        self._block, self.shape = limits.block, decoder.expert_shape
        self._blocks: dict[Choice, list[int]] = {}
        self._moved: dict[int, int] = {}  # former slots of experts that move with the next step, by new slots
        self._experts = torch.full((limits.blocks * limits.block, *self.shape), -1, dtype=torch.int16)

    @property
    def hooks(self) -> EngineHooks:
        """Returns the engine hooks that record the chosen experts."""
        return EngineHooks(
            before=self.before,
            moved=self.moved,
            fields=self.fields,
            columns=lambda state, plan: {"routed": True},
            ran=self.ran,
        )

    def before(self, state: State) -> None:
        """Keeps the blocks of the sequences in the plan in flight. A sequence loses its blocks when it ends."""
        self._blocks = {(one.name, one.choice): one.blocks[:] for _, one, _ in state.rows_in_flight()}

    def moved(self, moves: Seq[tuple[int, int]]) -> None:
        """Keeps the moves that the next step begins with."""
        self._moved = {new: old for old, new in moves}

    def fields(self, output: Output) -> dict[str, Any]:
        """Returns the experts of a sequence, with its last token.

        Experts are read before a step writes to blocks that are free by now.
        """
        if output.finish_reason is None or output.token is None:
            return {}
        return {"expert_ids": self.of(self._blocks[output.name, output.choice], output.position)}

    def ran(self, plan: StepPlan, results: StepResults) -> None:
        """Keeps the experts of a plan's tokens, after the plan's moves."""
        assert results.experts is not None
        if plan.moves:
            old, new = torch.tensor(plan.moves).unbind(1)
            self._experts[new] = self._experts[old]
        slots = torch.frombuffer(plan.slots, dtype=torch.int32)[: plan.num_tokens].long()
        self._experts[slots] = results.experts.to("cpu", torch.int16)

    def of(self, blocks: list[int], num: int) -> Int16[Tensor, "t m k"]:
        """Returns the experts of the first tokens of a sequence, by its blocks."""
        slots = [blocks[i // self._block] * self._block + i % self._block for i in range(num)]
        return self._experts[torch.tensor([self._moved.get(slot, slot) for slot in slots], dtype=torch.long)]
