"""The model of every benchmark: a GPT of 33.7M parameters. Peers get it as a module that runs the very same function.

Needs `shardfn` on the path: install the package, or put the repository's root into PYTHONPATH.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.core import key
from shardfn.models import gpt


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the benchmarked model. `batch` counts the rows of all ranks together."""

    num_layers: int = 8
    d_model: int = 512
    num_heads: int = 8
    tokens: int = 256
    vocab: int = 8192
    batch: int = 4
    stacked: bool = False

    @property
    def config(self) -> gpt.Config:
        """The model's own configuration."""
        return gpt.Config(
            self.vocab, self.num_layers, self.d_model, self.num_heads, max_len=self.tokens, stacked=self.stacked
        )


FULL = Size()
SMALL = Size(num_layers=2, d_model=128, num_heads=4, tokens=64, vocab=512, batch=4)
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def params(size: Size) -> dict[str, Any]:
    """The same fresh parameters on every rank."""
    return gpt.init(size.config, key(0))


def loss(size: Size) -> Callable[..., Tensor]:
    """`loss(params, batch)` for `sharded_step`."""
    return functools.partial(gpt.loss, size.config)


class Block(nn.Module):
    """The leaves of one block as a module; called with a function, it hands that function its leaves."""

    def __init__(self, leaves: dict[str, Tensor]) -> None:
        super().__init__()
        _register(self, leaves)

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(leaves, *args)."""
        return function(dict(self._parameters), *args)


class Model(nn.Module):
    """`gpt.loss` as a module: `forward(tokens)`. Each block is called as a module, so that hooks on blocks fire."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.config = size.config
        tree = params(size)
        self.layers = [Block(leaves) for leaves in tree.pop("blocks")]
        self.blocks = nn.ModuleList(self.layers)
        _register(self, tree)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss on tokens [B, T + 1]."""
        tree = dict(self._parameters) | {"blocks": self.layers}
        return gpt.loss(self.config, tree, {"tokens": tokens}, wrap=_call_block)


def batches(size: Size, rank: int, world: int) -> Iterator[Tensor]:
    """Endless token batches [rows, T + 1]: this rank's rows of the global batch."""
    rows = size.batch // world
    made = torch.Generator().manual_seed(1)
    while True:
        whole = torch.randint(size.vocab, (size.batch, size.tokens + 1), generator=made)
        yield whole[rank * rows : (rank + 1) * rows].contiguous()


def num_params(size: Size) -> int:
    """Scalars in the model.

    Example:
        >>> num_params(FULL)
        33739776
    """
    return gpt.num_params(size.config)


def _register(module: nn.Module, leaves: dict[str, Tensor]) -> None:
    for name, leaf in leaves.items():
        module.register_parameter(name, nn.Parameter(leaf))


def _call_block(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda block, *args: block(inner, *args)
