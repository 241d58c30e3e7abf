"""Warnings for a loss that draws from torch's generator: such numbers depend neither on ranks nor on rows."""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from shardfn.capture import draws


@contextlib.contextmanager
def warning_of_draws(device: torch.device) -> Iterator[None]:
    """Warns if the loss inside has drawn from the generator of the CPU or of the device.

    Ranks with equal seeds then draw the same numbers for different rows. With different seeds the result is not equal
    to the result on a single device. And recomputation draws new numbers.
    """
    before = _generator_states(device)
    yield
    if not all(map(torch.equal, before, _generator_states(device))):
        _warn_unkeyed("")


def warn_of_draws_in(gm: GraphModule) -> None:
    """Warns if a captured step draws from torch's generator, and names the first such line."""
    drawing = [node for node in gm.graph.nodes if draws(node)]
    if drawing:
        where = drawing[0].meta.get("where")
        _warn_unkeyed(f" at {where}" if where else "")


def _warn_unkeyed(where: str) -> None:
    warnings.warn(
        f"the loss draws from torch's generator{where} (torch.randn, dropout, ...), so that it depends on the number of"
        " ranks, and is another when it is computed again. Draw by a key: sharded_step(..., key=sf.key(0)) passes one"
        " to loss(params, batch, key), for sf.nn.dropout and apply.keyed.",
        stacklevel=3,
    )


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    on = [torch.get_rng_state()]
    return [*on, torch.cuda.get_rng_state(device)] if device.type == "cuda" else on
