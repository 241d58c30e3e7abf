"""Layers of a model of transformers between which a rank's features need not be joined.

Each weight is cut by outputs, so ranks may join the results of each layer, which is right for any code. Models of
transformers declare in `_tp_plan` between which layers their code also runs on a part of the heads or features. A
declaration is used if a probe confirms it: a forward in which a single rank of several has only its part.

T tokens, H query heads, G key heads, K head dim.
"""

import functools
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.modules import AttentionScores, DecodingFunction, ExactRows, RowEdge

_LOG = logging.getLogger("shardfn.inference")
_KINDS = {"colwise": RowEdge.ENTER, "rowwise": RowEdge.LEAVE}


def edges_of(function: DecodingFunction, linear: Mapping[str, bool], key_heads: int) -> dict[str, RowEdge]:
    """Returns the linear layers that need not join their features, by the names of their weights.

    Args:
        function: model.
        linear: weights of the linear layers, [inputs, outputs] where the value is True.
        key_heads: number of key heads of each layer of attention. Ranks divide the key heads.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from shardfn.modules import decoding
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> function = decoding(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval())
        >>> names = [f"model.layers.0.mlp.{layer}_proj.weight" for layer in ("gate", "up", "down")]
        >>> [edge.value for edge in edges_of(function, dict.fromkeys(names, False), key_heads=2).values()]
        ['enter', 'enter', 'leave']
    """
    plan = getattr(function.module, "_tp_plan", None) or {}
    kinds = {name: plan.get(re.sub(r"\.\d+(?=\.)", ".*", name.rpartition(".")[0])) for name in linear}
    edges = {name: _KINDS[kind] for name, kind in kinds.items() if kind in _KINDS}
    ranks = next((n for n in range(2, key_heads + 1) if key_heads % n == 0), 1)
    if not edges or ranks == 1:
        return {}
    problem = next(_list_problems(function, linear, edges, ranks), None)
    if problem is None:
        return edges
    name = type(function.module).__name__
    _LOG.info("%s: ranks join the results of each layer, as its tp_plan does not hold: %s", name, problem)
    return {}


@dataclass
class _RankPart:
    """One of several ranks: its part of each value, and the values of a forward on one device, in order."""

    rank: int
    ranks: int
    wholes: Iterator[Tensor]

    def of(self, x: Tensor) -> Tensor:
        """Returns the block of the last dim."""
        size = -(-x.shape[-1] // self.ranks)
        return x[..., self.rank * size : (self.rank + 1) * size]


@dataclass
class _Forward:
    """A forward of a whole model, or of one rank's part, in which layers have the bits of the whole model."""

    function: DecodingFunction
    linear: Mapping[str, bool]
    edges: Mapping[str, RowEdge]
    part: _RankPart | None = None
    left: list[Tensor] = field(default_factory=list)  # inputs of layers that lead out

    def __call__(self) -> Tensor:
        params = self.function.params
        layers = {id(params[name]): functools.partial(self._run_layer, name, params[name]) for name in self.linear}
        at_T = torch.arange(3, device=next(iter(params.values())).device)
        with torch.no_grad():
            logits, _ = self.function(params, at_T % 2, at_T, at_T, _attend_stand_in, ExactRows(layers))
        return logits

    def _run_layer(self, name: str, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        edge = self.edges.get(name, RowEdge.WHOLE)
        if edge is RowEdge.LEAVE:
            x = self._join_output(name, x)
        y = F.linear(x, weight.T if self.linear[name] else weight, bias)
        return y if self.part is None or edge is not RowEdge.ENTER else self.part.of(y)

    def _join_output(self, name: str, x: Tensor) -> Tensor:
        if self.part is None:
            self.left.append(x)
            return x
        whole = next(self.part.wholes)
        if not torch.equal(x, self.part.of(whole)):
            raise ValueError(f"before {name} a rank's part has other bits than the whole")
        return whole


def _list_problems(
    function: DecodingFunction, linear: Mapping[str, bool], edges: Mapping[str, RowEdge], ranks: int
) -> Iterator[str]:
    """Yields the reasons why a rank cannot run only its part: errors of the model's code, or different bits."""
    whole = _Forward(function, linear, edges)
    logits = whole()
    for rank in range(ranks):
        part = _RankPart(rank, ranks, iter(whole.left))
        try:
            same = torch.equal(_Forward(function, linear, edges, part)(), logits)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            yield str(error)
            return
        if not same:
            yield "a rank has other logits"


def _attend_stand_in(scores: AttentionScores, q_1THK: Tensor, k_1TGK: Tensor, v_1TGK: Tensor) -> Any:
    """Returns, in place of attention, a function of the same heads."""
    del scores
    return q_1THK + (k_1TGK - v_1TGK).repeat_interleave(q_1THK.shape[2] // k_1TGK.shape[2], dim=2)
