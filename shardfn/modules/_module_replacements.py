"""Replacements of parts of a module's code: attention, experts, choices of experts, batch-invariant functions."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from shardfn.nn import AttentionBackend, BatchInvariant, moe

from ._expert_table import experts_in
from ._module_attention import AttentionRoute, RoutedCall, models_in
from ._module_draws import Draws
from ._module_exact import BatchInvariantForward
from ._module_experts import ExpertsRoute
from ._module_parts import shadowed
from ._module_replay import ModuleReplay


@dataclass(frozen=True)
class Replacements:
    """Replacements for one module. None is the module's code.

    Attributes:
        attention: route to a body of `nn.attention`.
        experts: route to an exchange of `nn.moe`.
        batch_invariant: whether rows have the bits of a batch-invariant decoder.
        replay: the experts that routers take.
    """

    attention: AttentionRoute | None = None
    experts: ExpertsRoute | None = None
    batch_invariant: bool = False
    replay: ModuleReplay | None = None

    def of_call(self, draws: Draws) -> RoutedCall | None:
        """Returns the attention of one call."""
        return None if self.attention is None else self.attention.of_call(draws)

    @contextlib.contextmanager
    def running(self, routed: RoutedCall | None) -> Iterator[None]:
        """Runs all replacements while open, except `exactly`."""
        with contextlib.ExitStack() as stack:
            for part in (routed, self.experts):
                if part is not None:
                    stack.enter_context(part.running())
            if self.replay is not None:
                stack.enter_context(shadowed(self.replay.forwards()))
            yield

    def exactly(self, params: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[object]:
        """Returns a mode that computes rows exactly, to open inside of all other modes."""
        return BatchInvariantForward(params) if self.batch_invariant else contextlib.nullcontext()


def replacements_of(
    module: nn.Module, attention: AttentionBackend | None, experts: moe.Exchange | None, batch_invariant: bool
) -> Replacements:
    """Returns the replacements for the arguments of `from_module`.

    Raises:
        ValueError: attention or experts cannot be routed, or are not batch-invariant.
    """
    if batch_invariant:
        _check_batch_invariant(attention, experts)
        attention = BatchInvariant() if models_in(module) else None
        experts = moe.Local() if experts is None and experts_in(module) else experts
    route = None if attention is None else AttentionRoute(module, attention)
    return Replacements(
        route,
        None if experts is None else ExpertsRoute(module, experts, batch_invariant=batch_invariant),
        batch_invariant,
    )


def _check_batch_invariant(attention: AttentionBackend | None, experts: moe.Exchange | None) -> None:
    if attention is not None and not isinstance(attention, BatchInvariant):
        raise ValueError(
            f"from_module(batch_invariant=True, attention={attention}): batch-invariant attention is"
            " nn.BatchInvariant(), on one device or on ranks that have whole rows. Remove attention=."
        )
    if isinstance(experts, moe.AllReduce) and not experts.in_order:
        raise ValueError(
            f"from_module(batch_invariant=True, experts={experts}): a sum over ranks has other bits than over a token's"
            f" choices; take moe.AllReduce({experts.axis!r}, in_order=True)."
        )
