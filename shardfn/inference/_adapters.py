"""The adapters of an engine, by name and by content."""

from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.core import did_you_mean
from shardfn.lora import LoRA

from ._decoder import Decoder
from ._hooks import EngineHooks
from ._low_rank import Adapter, Factors, LowRank, make_adapter, make_low_rank, stack_adapters
from ._plan import StepPlan
from ._requests import Request

# A description and its values, as `shardfn.lora.load_peft` returns them.
Given = tuple[LoRA, Mapping[str, Mapping[str, Tensor]]]


class Adapters:
    """Adapters by name. Adapters of equal content are kept once.

    Args:
        decoder: model.
        device: device of the model's weights.
        dtype: dtype of the engine's log probabilities.
        list_requests: function that returns the requests in progress by name.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        dtype: torch.dtype,
        list_requests: Callable[[], Mapping[str, Request]],
    ) -> None:
        self._decoder, self._device, self._dtype, self._list_requests = decoder, device, dtype, list_requests
        self._names: dict[str, Adapter] = {}
        self._slots: dict[bytes, int] = {}
        self._sites: dict[str, Factors] = {}

    @property
    def hooks(self) -> EngineHooks:
        """Returns the engine hooks that select the adapter of each row."""
        return EngineHooks(columns=lambda state, plan: {"low": self.of(plan)})

    @property
    def names(self) -> list[str]:
        """Returns the names in the order of addition."""
        return list(self._names)

    def add(self, name: str, given: Given) -> None:
        """Lets requests have an adapter. The next step with an adapter captures graphs again.

        Args:
            name: name for requests.
            given: pair `(lora, values)`: a `LoRA` and its values, whole, as `lora.load_peft(directory, params)`
                returns.

        Raises:
            TypeError: an argument is of another kind.
            ValueError: the name is taken, the decoder is not exact, the engine is in float64, or the adapter does not
                fit the model.
        """
        if self._dtype == torch.float64:
            raise ValueError(
                f"adapter {name!r}: adapters are added in float32, and this engine is in float64. Merge it into the"
                " parameters by LoRA.merge, or take float32."
            )
        if not isinstance(name, str):
            raise TypeError(f"an adapter's name must be a str, got a {type(name).__name__}.")
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], LoRA)):
            raise TypeError(
                f"adapter {name!r} is a {type(given).__name__}. Pass (lora, values), as lora.load_peft returns them."
            )
        if name in self._names:
            raise ValueError(f"an adapter named {name!r} is there. Remove it first, or give the new one another name.")
        if not self._decoder.linear:
            raise ValueError(
                f"adapter {name!r} needs a batch-invariant decoder, but this decoder is not batch-invariant."
            )
        try:
            made = make_adapter(*given, self._decoder.linear)
        except ValueError as error:
            raise ValueError(f"adapter {name!r}: {error}") from error
        self._keep_adapters(self._names | {name: made})

    def remove(self, name: str) -> None:
        """Removes an adapter from the engine.

        Raises:
            ValueError: the name is unknown, or a request in progress has the adapter.
        """
        digest = self.named(name).digest
        if users := sorted(user for user, request in self._list_requests().items() if request.adapter == digest):
            raise ValueError(f"adapter {name!r} is of requests in progress, {users}. Cancel them, or wait.")
        self._keep_adapters({n: a for n, a in self._names.items() if n != name})

    def digest(self, name: Any) -> bytes:
        """Returns the digest of an adapter's content, empty for None.

        Raises:
            ValueError: the name is unknown.
        """
        return b"" if name is None else self.named(name).digest

    def named(self, name: Any) -> Adapter:
        """Returns the adapter of a name.

        Raises:
            ValueError: the name is unknown.
        """
        if not isinstance(name, str) or name not in self._names:
            hint = did_you_mean(name, self._names) if isinstance(name, str) else ""
            raise ValueError(f"adapter must be one of {self.names}, got {name!r}.{hint}")
        return self._names[name]

    def of(self, plan: StepPlan) -> LowRank | None:
        """Returns the adapters of a plan's tokens, or None for a plan without any."""
        return make_low_rank(plan.sequences, plan.adapters, self._slots, self._sites) if plan.adapters else None

    def of_padding(self, bucket: int) -> LowRank | None:
        """Returns the adapters of a plan of padding, as if a row used an adapter, or None if there are no adapters."""
        return make_low_rank(array("i", [0]) * bucket, [], self._slots, self._sites) if self._slots else None

    def _keep_adapters(self, names: dict[str, Adapter]) -> None:
        kept = {adapter.digest: adapter for adapter in names.values()}
        self._names, self._slots = names, {digest: i for i, digest in enumerate(kept)}
        self._sites = stack_adapters(list(kept.values()), self._decoder.linear, self._device) if kept else {}


def split_adapters(adapter: Any, num: int) -> list[Any]:
    """Returns the adapter of each prompt. A single name is the adapter of all prompts.

    Raises:
        ValueError: the numbers of adapters and prompts differ.
    """
    if adapter is None or isinstance(adapter, str):
        return [adapter] * num
    if len(each := list(adapter)) != num:
        raise ValueError(f"{num} prompts and {len(each)} adapters. Give one for all, or one each.")
    return each
