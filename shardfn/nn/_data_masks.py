"""Masks as data of a batch or a model: counted keys, and numbers added to scores.

    Keys(keep_BS)          only some keys: padding
    Added(numbers)         a number for each pair, -inf where a pair does not count
    Relative(table_HD)     a number for each distance

Such masks compose by `&` like all masks. Only `Dense()` gives gradients of the data: the other bodies compute gradients
by separate formulas.

B samples, T queries, S keys, H query heads.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from shardfn.kernels import Given

from ._masks import Cover, Mask, Span


@dataclasses.dataclass(frozen=True, eq=False)
class Keys(Mask):
    """Boolean key padding mask: only some keys count, such as the keys outside of padding.

    Attributes:
        keep_BS: True for the counted keys of the whole sequence.

    Example:
        >>> Keys(torch.tensor([[True, True, False]])).pairs((0, 2), (0, 3)).int().tolist()
        [[[[1, 1, 0], [1, 1, 0]]]]
    """

    keep_BS: Bool[Tensor, "b s"]

    @property
    def lead(self) -> tuple[int, int]:
        return self.keep_BS.shape[0], 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.keep_BS,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Mask:
        return Keys(*tensors)

    def cover(self, queries: Span, keys: Span) -> Cover:
        return _cover_some(queries, keys)

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        rows = max(queries[1] - queries[0], 0)
        return self.keep_BS[:, None, None, keys[0] : keys[1]].expand(-1, 1, rows, -1).to(device)

    def make_data(self, queries: Span, keys: Span) -> Given:
        ids_BS = self.keep_BS[:, slice(*keys)].long() - 1
        return Given(ids_BS.new_zeros(ids_BS.shape[0], queries[1] - queries[0]), ids_BS)

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        own = self.keep_BS.shape[-1]
        return [] if own == keys else [f"Keys of {own} tokens for {keys} keys: give each key a bool, whether it counts"]


@dataclasses.dataclass(frozen=True, eq=False)
class Added(Mask):
    """Numbers added to the scores, where -inf leaves a pair out. A boolean mask is `torch.where(keep, 0.0, -inf)`.

    Attributes:
        numbers: [T, S], [H, T, S] or [B, H, T, S], of the whole sequence. Each may be 1 for all.

    Example:
        >>> Added(torch.tensor([[0.5, -torch.inf]])).pairs((0, 2), (0, 2)).int().tolist()
        [[1, 0], [1, 0]]
    """

    numbers: Float[Tensor, "*bh t s"]

    @property
    def lead(self) -> tuple[int, int]:
        return (1, 1, *self.numbers.shape[:-2])[-2:]  # pyright: ignore[reportReturnType]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.numbers,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Mask:
        return Added(*tensors)

    def of_heads(self, start: int, stop: int) -> Mask:
        return self if self.lead[1] == 1 else Added(self.numbers[..., start:stop, :, :])

    def cover(self, queries: Span, keys: Span) -> Cover:
        return _cover_some(queries, keys)

    def bias(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        x = self.numbers
        for dim, (start, stop) in ((-2, queries), (-1, keys)):
            rows = x.narrow(dim, start, max(stop - start, 0)) if x.shape[dim] > 1 else x
            x = rows.expand(*(stop - start if d == dim % x.ndim else -1 for d in range(x.ndim)))
        return x.to(device)

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        return self.bias(queries, keys, device) > -math.inf

    def make_data(self, queries: Span, keys: Span) -> Given:
        x = self.numbers[(None,) * (4 - self.numbers.ndim)]
        for dim, (start, stop) in ((2, queries), (3, keys)):
            x = x.narrow(dim, start, stop - start) if x.shape[dim] > 1 else x
        return Given(added=x)

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        (T, S), H, shape = self.numbers.shape[-2:], self.lead[1], tuple(self.numbers.shape)
        fits = T in (1, queries) and S in (1, keys) and H in (1, heads) and self.numbers.ndim <= 4
        problem = (
            f"Added of shape {shape} for {queries} queries, {keys} keys and {heads} heads: give [B, H, T, S], or 1"
        )
        return [] if fits else [problem + " for all of a kind"]


@dataclasses.dataclass(frozen=True, eq=False)
class Relative(Mask):
    """Numbers added to the scores by the distance s - t of a key from a query: relative position bias.

    Attributes:
        table_HD: table [H or 1, 2 R + 1], of distances -R .. R. Greater distances have the number of R, or -R.

    Example:
        >>> Relative(torch.tensor([[-1.0, 0, 1]])).bias((0, 2), (0, 3)).tolist()
        [[[0.0, 1.0, 1.0], [-1.0, 0.0, 1.0]]]
    """

    table_HD: Float[Tensor, "h d"]

    @property
    def lead(self) -> tuple[int, int]:
        return 1, self.table_HD.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table_HD,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Mask:
        return Relative(*tensors)

    def of_heads(self, start: int, stop: int) -> Mask:
        return self if self.lead[1] == 1 else Relative(self.table_HD[start:stop])

    def cover(self, queries: Span, keys: Span) -> Cover:
        return "all" if _cover_some(queries, keys) == "some" else "none"

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        sizes = (max(stop - start, 0) for start, stop in (queries, keys))
        return torch.ones(*sizes, dtype=torch.bool, device=device)

    def bias(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        table = self.table_HD.to(device)
        return self._look_up(
            torch.arange(*keys, device=table.device) - torch.arange(*queries, device=table.device)[:, None]
        )

    def make_data(self, queries: Span, keys: Span) -> Given:
        nearest, furthest = keys[0] - queries[1] + 1, keys[1] - queries[0]
        return Given(table=self._look_up(torch.arange(nearest, furthest, device=self.table_HD.device)))

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        H, D = self.table_HD.shape
        problem = f"Relative of shape {(H, D)} for {heads} heads: give [H or 1, 2 R + 1], of distances -R .. R"
        return [] if H in (1, heads) and D % 2 else [problem]

    def _look_up(self, distance: Tensor) -> Tensor:
        R = self.table_HD.shape[1] // 2
        return self.table_HD[:, distance.clamp(-R, R) + R]


def relative_buckets(num: int, max_distance: int = 128, *, causal: bool) -> Int64[Tensor, " d"]:
    """Returns T5's bucket of each distance from -max_distance to max_distance, so that distances share numbers.

    `table_NH[buckets].T` is the table of `Relative`. Near distances have buckets of their own, and further distances
    share buckets of growing width. Without `causal`, each sign has half of the buckets.

    Args:
        num: number of buckets, even and at least 2.
        max_distance: distance from which all distances are in the last bucket.
        causal: whether keys are never later than queries. Later keys are in bucket 0 then.

    Raises:
        ValueError: the number is odd or below 2, or the distance leaves no room for the buckets.

    Example:
        >>> relative_buckets(4, 4, causal=True).tolist()
        [3, 3, 2, 1, 0, 0, 0, 0, 0]

    References:
        Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020,
        https://arxiv.org/abs/1910.10683
    """
    if num < 2 or num % 2:
        raise ValueError(f"relative buckets must be an even number of 2 or more, got {num}. T5 has 32.")
    own = num if causal else num // 2
    exact = own // 2
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must be above {exact}, the distances with buckets of their own, got {max_distance}."
        )
    ahead = torch.arange(-max_distance, max_distance + 1)
    away = (-ahead).clamp(min=0) if causal else ahead.abs()
    if exact:
        # In float32, as in the models that were trained so: borders of buckets depend on it.
        share = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
        far = (exact + (share * (own - exact)).long()).clamp(max=own - 1)
        away = torch.where(away < exact, away, far)
    else:
        away = torch.zeros_like(away)
    return away if causal else away + own * (ahead > 0)


def together(found: Iterable[Given]) -> Given:
    """Joins several `Given`: added numbers are summed, and two tokens attend if all of their ids are equal.

    Example:
        >>> a, b = (Given(torch.tensor([ids]), torch.tensor([ids])) for ids in ([7, 7, 9], [1, 2, 1]))
        >>> ids = together((a, b)).ids_q[0]
        >>> (ids[:, None] == ids).int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    return functools.reduce(_join_given, found, Given())


def _join_given(a: Given, b: Given) -> Given:
    added, table = (x if y is None else y if x is None else x + y for x, y in ((a.added, b.added), (a.table, b.table)))
    if a.dropped is not None and b.dropped is not None:
        raise ValueError(
            "attention: BlockSparse() supports one PairDropout, but the mask has several. Use Blockwise(), or a single"
            " PairDropout with the rate 1 - (1 - rate1) (1 - rate2)."
        )
    rest = added, table, a.dropped or b.dropped
    if a.ids_q is None or a.ids_k is None or b.ids_q is None or b.ids_k is None:
        own = b if a.ids_q is None else a
        return Given(own.ids_q, own.ids_k, *rest)
    sizes = [a.ids_q.shape[1], a.ids_k.shape[1]]
    first, second = (_renumber_ids(torch.cat(x, 1)) for x in ((a.ids_q, a.ids_k), (b.ids_q, b.ids_k)))
    ids_q, ids_k = (first * sum(sizes) + second).split(sizes, 1)
    return Given(ids_q, ids_k, *rest)


def _renumber_ids(ids_BN: Tensor) -> Tensor:
    """Returns the numbers as 0 .. N - 1, equal where the given numbers are equal."""
    ordered, index = ids_BN.sort(-1)
    new = torch.cat([torch.zeros_like(ordered[:, :1]), (ordered[:, 1:] != ordered[:, :-1]).long()], -1)
    return torch.zeros_like(ids_BN).scatter(-1, index, new.cumsum(-1))


def _cover_some(queries: Span, keys: Span) -> Cover:
    return "some" if queries[0] < queries[1] and keys[0] < keys[1] else "none"
