"""Masks of attention as values: `Causal() & Segments(ids_BT)`.

A mask refers to global positions, so a rank with some tokens of a sequence uses the same value as a single device. For
a rectangle of positions, such as queries (0, 4) and keys (0, 8), a mask tells whether all pairs, some or no pair count,
which pairs, and how many. Bodies of attention skip rectangles without pairs.

An answer "none" or "all" depends on values known to the program (positions, lengths, layouts) and never on a tensor's:
ranks agree on the skipped rectangles, and a capture is good for all batches.

B samples, T tokens, H query heads, N and M tiles of queries and keys. Dong et al., Flex Attention, 2024,
https://arxiv.org/abs/2412.05496
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from shardfn.kernels import Given

Span = tuple[int, int]
Cover = Literal["all", "none", "some"]
# The values of `Mask.grid`, ordered so that the cover of an intersection is the least value.
COVERS: tuple[Cover, ...] = ("none", "some", "all")
NONE, SOME, ALL = range(3)
Array = np.ndarray

# Elements of the largest dense block made to count pairs.
_COUNTED = 4096


class Mask(abc.ABC):
    """Pairs of a query and a key. `a & b` are the pairs of both."""

    @abc.abstractmethod
    def cover(self, queries: Span, keys: Span) -> Cover:
        """Returns whether all pairs of a rectangle count, none, or (as far as is known without data) some."""

    @abc.abstractmethod
    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Bool[Tensor, "*bh q k"]:
        """Returns the pairs of a rectangle, [Q, K], [H, Q, K], [B, 1, Q, K] or [B, H, Q, K]."""

    @property
    def looks_back(self) -> bool:
        """Returns whether no query attends to a later key."""
        return False

    @property
    def lead(self) -> tuple[int, int]:
        """Returns the numbers of samples and of heads with separate masks. A number is 1 if all share a mask."""
        return 1, 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the data of the mask. `with_tensors` replaces the data."""
        return ()

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Mask":
        """Returns the same mask of other data."""
        del tensors
        return self

    @property
    def parts(self) -> tuple["Mask", ...]:
        """Returns the masks whose intersection the mask is."""
        return (self,)

    @property
    def tile(self) -> int | None:
        """Returns the number of tokens of the mask's blocks, or None without blocks."""
        return None

    def grid(self, queries: Array, keys: Array) -> Array:
        """Returns `cover` of the tiles between edges 0, .., T of queries and of keys: int8 [heads or 1, N, M]."""
        rows, columns = (list(itertools.pairwise(edges.tolist())) for edges in (queries, keys))
        found = [[COVERS.index(self.cover(q, k)) for k in columns] for q in rows]
        return np.array(found, np.int8).reshape(1, len(rows), len(columns))

    def bias(self, queries: Span, keys: Span, device: torch.device | None = None) -> Float[Tensor, "*bh q k"] | None:
        """Returns the numbers added to the scores of a rectangle, [Q, K], [H, Q, K] or [B, H or 1, Q, K]."""
        del queries, keys, device

    def scales(self, queries: Span, keys: Span, heads: int, like: Tensor) -> Float[Tensor, "#b #h q k"] | None:
        """Returns the factors of a rectangle's probabilities after the softmax, in the dtype of `like`."""
        del queries, keys, heads, like

    @property
    def of_positions(self) -> bool:
        """Returns whether `cover` and `pairs` define the mask: no data, no added numbers, no factors."""
        own = type(self)
        return not self.tensors and own.bias is Mask.bias and own.scales is Mask.scales

    @property
    def in_kernels(self) -> bool:
        """Returns whether the kernels of attention take the mask: a mask of positions, or with data in `make_data`."""
        return self.of_positions or type(self).make_data is not Mask.make_data

    def make_data(self, queries: Span, keys: Span) -> Given:
        """Returns the data of the mask for a rectangle, in the form for the kernels of attention.

        Raises:
            ValueError: the kernels do not support the mask.
        """
        del queries, keys
        problem = f"BlockSparse() does not know the data of {type(self).__name__}. Give that mask a method given(), or"
        raise ValueError(f"attention: {problem} take Blockwise().")

    def of_heads(self, start: int, stop: int) -> "Mask":
        """Returns the mask of some query heads."""
        del start, stop
        return self

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        """Returns the reasons why the mask does not fit given numbers of queries, keys and heads."""
        del queries, keys, heads
        return []

    def count(self, queries: Span, keys: Span) -> int:
        """Returns the number of counted pairs in a rectangle, over all samples and heads with separate masks.

        Example:
            >>> Causal().count((0, 4), (0, 4))
            10
        """
        cover, (q, k) = self.cover(queries, keys), (size_of(queries), size_of(keys))
        if cover != "some":
            return q * k * math.prod(self.lead) * (cover == "all")
        if q * k <= _COUNTED:
            return int(self.pairs(queries, keys).expand(*self.lead, q, k).sum())
        if q >= k:
            return sum(self.count(half, keys) for half in _split_span(queries))
        return sum(self.count(queries, half) for half in _split_span(keys))

    def __and__(self, other: "Mask") -> "Mask":
        members = [m for mask in (self, other) for m in mask.parts]
        members = [m for m in members if not isinstance(m, Full)]
        return Both(tuple(members)) if len(members) > 1 else members[0] if members else Full()


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every pair. `Full() & mask` is `mask`.

    Example:
        >>> (Full() & Causal()).cover((0, 2), (2, 4))
        'none'
    """

    def cover(self, queries: Span, keys: Span) -> Cover:
        return "all" if size_of(queries) * size_of(keys) else "none"

    def grid(self, queries: Array, keys: Array) -> Array:
        return np.full((1, len(queries) - 1, len(keys) - 1), ALL, np.int8)

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        return torch.ones(size_of(queries), size_of(keys), dtype=torch.bool, device=device)


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """Token t attends to tokens t - left .. t + right. Mistral's window of w tokens is `Window(w - 1)`.

    Attributes:
        left: how far back. None is all the way.
        right: how far ahead. None is all the way.

    Raises:
        ValueError: a negative distance.

    Example:
        >>> Window(1).pairs((0, 3), (0, 3)).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        if min(self.left or 0, self.right or 0) < 0:
            raise ValueError(f"{self}: distances are 0 or more, or None for no limit.")

    @property
    def looks_back(self) -> bool:
        return self.right == 0

    def cover(self, queries: Span, keys: Span) -> Cover:
        (a, b), (c, d) = queries, keys
        left, right = (math.inf if x is None else x for x in (self.left, self.right))
        nearest, furthest = c - (b - 1), (d - 1) - a  # of key - query
        if a >= b or c >= d or furthest < -left or nearest > right:
            return "none"
        return "all" if -left <= nearest and furthest <= right else "some"

    def grid(self, queries: Array, keys: Array) -> Array:
        left, right = (math.inf if x is None else x for x in (self.left, self.right))
        nearest, furthest = keys[:-1] - (queries[1:, None] - 1), (keys[1:] - 1) - queries[:-1, None]
        every = (-left <= nearest) & (furthest <= right)
        return np.where(every, ALL, np.where((furthest < -left) | (nearest > right), NONE, SOME)).astype(np.int8)[None]

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        ahead = torch.arange(*keys, device=device) - torch.arange(*queries, device=device)[:, None]
        near = [] if self.left is None else [ahead >= -self.left]
        near += [] if self.right is None else [ahead <= self.right]
        return functools.reduce(torch.logical_and, near) if near else torch.ones_like(ahead, dtype=torch.bool)

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        return alike(self, queries, keys)


@dataclasses.dataclass(frozen=True)
class Causal(Window):
    """Token t attends to tokens s <= t.

    Example:
        >>> Causal().cover((4, 8), (0, 4)), Causal().cover((0, 4), (0, 4))
        ('all', 'some')
    """

    left: int | None = dataclasses.field(default=None, init=False, repr=False)
    right: int | None = dataclasses.field(default=0, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """Causal mask with a visible prefix: every token also sees the first `length` tokens (prefix language model).

    Attributes:
        length: tokens of the prefix.

    Example:
        >>> Prefix(2).pairs((0, 3), (0, 3)).int().tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    length: int

    def cover(self, queries: Span, keys: Span) -> Cover:
        if keys[1] <= self.length:
            return Full().cover(queries, keys)
        causal = Causal().cover(queries, keys)
        ahead = causal == "none" and size_of(queries) * size_of(keys) > 0
        return "some" if ahead and keys[0] < self.length else causal

    def grid(self, queries: Array, keys: Array) -> Array:
        some = np.where(keys[:-1] < self.length, SOME, NONE)
        return np.where(keys[1:] <= self.length, ALL, np.maximum(Causal().grid(queries, keys), some)).astype(np.int8)

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        return Causal().pairs(queries, keys, device) | (torch.arange(*keys, device=device) < self.length)

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        return alike(self, queries, keys)


@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Mask):
    """Attention within a document: packed sequences. Usually `Causal() & Segments(ids_BT)`.

    Attributes:
        ids_BT: document of each token of the whole sequence, any integers, for example [[0, 0, 1, 1, 1]].

    Example:
        >>> Segments(torch.tensor([[0, 0, 1]])).pairs((0, 3), (0, 3)).int().tolist()
        [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
    """

    ids_BT: Int64[Tensor, "b t"]

    @property
    def lead(self) -> tuple[int, int]:
        return self.ids_BT.shape[0], 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids_BT,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Mask:
        return Segments(*tensors)

    def make_data(self, queries: Span, keys: Span) -> Given:
        return Given(self.ids_BT[:, slice(*queries)], self.ids_BT[:, slice(*keys)])

    def cover(self, queries: Span, keys: Span) -> Cover:
        return "some" if size_of(queries) * size_of(keys) else "none"

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        q_BQ, k_BK = (self.ids_BT[:, start:stop] for start, stop in (queries, keys))
        return (q_BQ[:, :, None] == k_BK[:, None]).unsqueeze(1).to(device)

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        own = self.ids_BT.shape[-1]
        problem = f"Segments of {own} tokens for {queries} queries and {keys} keys: give the ids of the whole sequence"
        return [] if own == queries == keys else [problem]


@dataclasses.dataclass(frozen=True)
class Both(Mask):
    """Intersection of several masks, made by `&`.

    Attributes:
        masks: two or more masks, none of them an intersection.

    Example:
        >>> (Causal() & Window(1)).masks
        (Causal(), Window(left=1, right=0))
    """

    masks: tuple[Mask, ...]

    @property
    def looks_back(self) -> bool:
        return any(m.looks_back for m in self.masks)

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    @property
    def tile(self) -> int | None:
        return min((m.tile for m in self.masks if m.tile), default=None)

    def grid(self, queries: Array, keys: Array) -> Array:
        return functools.reduce(np.minimum, (m.grid(queries, keys) for m in self.masks))

    def bias(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor | None:
        found = [x for m in self.masks if (x := m.bias(queries, keys, device)) is not None]
        return functools.reduce(torch.add, found) if found else None

    def scales(self, queries: Span, keys: Span, heads: int, like: Tensor) -> Tensor | None:
        found = [x for m in self.masks if (x := m.scales(queries, keys, heads, like)) is not None]
        return functools.reduce(torch.mul, found) if found else None

    @property
    def lead(self) -> tuple[int, int]:
        samples, heads = zip(*(m.lead for m in self.masks), strict=True)
        return max(samples), max(heads)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for m in self.masks for t in m.tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Mask:
        left = iter(tensors)
        return Both(tuple(m.with_tensors([next(left) for _ in m.tensors]) for m in self.masks))

    def of_heads(self, start: int, stop: int) -> Mask:
        return Both(tuple(m.of_heads(start, stop) for m in self.masks))

    def cover(self, queries: Span, keys: Span) -> Cover:
        found = [m.cover(queries, keys) for m in self.masks]
        return "none" if "none" in found else "some" if "some" in found else "all"

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        some = [m for m in self.masks if m.cover(queries, keys) != "all"]
        found = [m.pairs(queries, keys, device) for m in some or self.masks[:1]]
        return functools.reduce(torch.logical_and, found)

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        return [p for m in self.masks for p in m.problems(queries, keys, heads)]


def segments(position_ids_BT: Int64[Tensor, "b t"]) -> Segments:
    """Returns the documents of packed sequences, from positions with a new start at 0, for example [0, 1, 0, 1, 2].

    Args:
        position_ids_BT: position ids of the whole sequence.

    Example:
        >>> segments(torch.tensor([[0, 1, 0, 1, 2]])).ids_BT.tolist()
        [[1, 1, 2, 2, 2]]
    """
    return Segments((position_ids_BT == 0).cumsum(-1))


def size_of(span: Span) -> int:
    """Positions of a span."""
    return max(span[1] - span[0], 0)


def _split_span(span: Span) -> tuple[Span, Span]:
    middle = (span[0] + span[1]) // 2
    return (span[0], middle), (middle, span[1])


def alike(mask: Mask, queries: int, keys: int) -> list[str]:
    """Returns the problem of a mask of positions if the numbers of queries and keys differ."""
    mismatch = f"{mask} of {queries} queries over {keys} keys: the counts must agree, or positions do not meet"
    return [mismatch] if queries != keys else []
