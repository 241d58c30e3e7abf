"""Low-rank products of several adapters in a single step: each row has the product of the request's adapter.

    y[i] + (x[i] a[e]^T) b[e]^T,  e the adapter of row i

Both products have the expression of `row_linear` for each row, so that a row's bits depend only on the row and the
adapter. A row without an adapter keeps its bits. Ranks are padded inside the chunks of a sum, so that the rank of
another adapter changes no bit either.

T tokens, E adapters, R rank after padding, I inputs, O outputs.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from shardfn.collectives import all_gather_invariant, take_own_block
from shardfn.core import Axes, did_you_mean, first_of, raise_all
from shardfn.kernels import grouped_product
from shardfn.lora import LoRA

_CHUNKS = 8  # of `grouped_product`


class Linear(NamedTuple):
    """Linear layer that may have an adapter.

    Attributes:
        inputs: I.
        outputs: O.
        transposed: whether the weight is [I, O].
    """

    inputs: int
    outputs: int
    transposed: bool = False


class Factors(NamedTuple):
    """Factors A [R, I] and B [O, R] of a single layer, B times the scale, or of E adapters, stacked."""

    a: Tensor
    b: Tensor


class LowRank(NamedTuple):
    """Adapters of a step's tokens.

    Attributes:
        order: tokens sorted by adapter. Tokens without an adapter come last.
        places: places of each token in the order.
        counts: number of tokens of each adapter.
        has: whether a token has an adapter.
        sites: factors of all adapters by layer.
    """

    order: Int64[Tensor, " t"]
    places: Int64[Tensor, " t"]
    counts: Int64[Tensor, " e"]
    has: Bool[Tensor, "t 1"]
    sites: dict[str, Factors]

    def added(
        self, name: str, x: Tensor, y: Tensor, *, axis: Axes = None, joins: bool = False, cut: bool = False
    ) -> Tensor:
        """Returns the result of a layer with the adapters' products added.

        Args:
            name: name of the layer.
            x: input [*, T, I].
            y: result [*, T, O]. Leading dims are 1.
            axis: mesh axes that cut the layer.
            joins: whether x has only this rank's inputs.
            cut: whether y has only this rank's outputs.

        Raises:
            ValueError: the layer does not see one row for each token.
        """
        found = self.sites.get(name)
        if found is None:
            return y
        if joins:
            x = all_gather_invariant(x, axis, dim=-1, size=found.a.shape[2])
        if x.numel() // x.shape[-1] != len(self.order):
            raise ValueError(
                f"{name} cannot have an adapter: it sees {x.numel() // x.shape[-1]} rows of {len(self.order)}."
            )
        b = take_own_block(found.b, axis, dim=1) if cut else found.b
        rows = x.reshape(-1, x.shape[-1]).float()[self.order]
        thin = grouped_product(rows, found.a, self.counts, transposed=True, batch_invariant=True)
        wide = grouped_product(thin, b, self.counts, transposed=True, batch_invariant=True)
        summed = y + wide[self.places].to(y.dtype).reshape(y.shape)
        return torch.where(self.has, summed, y)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Adapter as an engine keeps it.

    Attributes:
        sites: factors by layer, float32.
        digest: digest of the content, equal for equal adapters of any names.
    """

    sites: Mapping[str, Factors]
    digest: bytes

    @property
    def rank(self) -> int:
        """Returns the largest LoRA rank of all layers."""
        return max(f.a.shape[0] for f in self.sites.values())


def make_adapter(lora: LoRA, tree: Mapping[str, Mapping[str, Tensor]], linear: Mapping[str, Linear]) -> Adapter:
    """Returns the adapter of a tree of `shardfn.lora`, for the layers of a decoder.

    Args:
        lora: description of the adapters.
        tree: values, whole, as `lora.init` and `load_peft` make them.
        linear: layers, by the names of their weights.

    Raises:
        ValueError: the tree has leaves that are not such layers, or have other shapes, or parts other than a and b. The
            message lists all.

    Example:
        >>> lora = LoRA.of({"w": torch.ones(4, 3)}, ["w"], rank=2)
        >>> made = make_adapter(lora, {"w": {"a": torch.ones(2, 3), "b": torch.ones(4, 2)}}, {"w": Linear(3, 4)})
        >>> made.rank, len(made.digest)
        (2, 16)
    """
    problems, sites = [], dict[str, Factors]()
    for path in dict.fromkeys([*lora.sites, *tree]):
        if path not in lora.sites or path not in tree:
            problems.append(f"{path} is in the {'description' if path in lora.sites else 'values'} alone")
        elif lora.dora or lora.sites[path].full or {*tree[path]} != {"a", "b"}:
            problems.append(f"{path} has {sorted(tree[path])}; a request's adapter has a and b alone: merge this one")
        else:
            for name, left, right in _split_layers(lora, path, tree[path], linear):
                found = _make_factors(left, right, lora.scale_of(path), linear[name]) if name in linear else None
                sites |= {name: found} if isinstance(found, Factors) else {}
                problems += [f"{name}: {found}"] if isinstance(found, str) else []
                problems += _describe_unknown(path, linear) if name not in linear else []
    if not problems and not sites:
        problems.append("it has no leaves")
    raise_all(ValueError, "this adapter does not fit the model:", first_of(problems, 20))
    return Adapter(sites, _digest_sites(sites))


def _split_layers(lora: LoRA, path: str, own: Mapping[str, Tensor], linear: Mapping[str, Linear]) -> Any:
    """Returns the layers of a leaf, single or stacked, with the factors of w + scale * (left @ right)."""
    a, b = (own[name].detach().to("cpu", torch.float32) for name in ("a", "b"))
    left, right = (a.mT, b.mT) if lora.fan_in_fan_out else (b, a)
    before, _, last = path.rpartition(".")
    if path in linear or not before or f"{before}.0.{last}" not in linear:
        yield path, left, right
        return
    for i, (m, n) in enumerate(zip(left, right, strict=True)):
        yield f"{before}.{i}.{last}", m, n


def _make_factors(left: Tensor, right: Tensor, scale: float, like: Linear) -> Factors | str:
    if like.transposed:
        left, right = right.mT, left.mT
    if left.ndim == 3:  # heads have separate factors: together they are a matrix of blocks
        left, right = torch.block_diag(*left), right.flatten(0, 1)
    want = (like.outputs, like.inputs)
    if left.ndim != 2 or (left.shape[0], right.shape[-1]) != want or left.shape[1] != right.shape[0]:
        return f"b @ a is {tuple(left.shape)} @ {tuple(right.shape)}, and the layer is {want}, outputs and inputs"
    return Factors(right.contiguous(), (left * scale).contiguous())


def _describe_unknown(path: str, linear: Mapping[str, Linear]) -> list[str]:
    return [f"{path} is not a linear layer that may have an adapter.{did_you_mean(path, linear)}"]


def _digest_sites(sites: Mapping[str, Factors]) -> bytes:
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(sites):
        a, b = sites[name]
        whole.update(f"{name} {tuple(a.shape)} {tuple(b.shape)} ".encode())
        whole.update(a.numpy().tobytes())
        whole.update(b.numpy().tobytes())
    return whole.digest()


def stack_adapters(
    adapters: Sequence[Adapter], linear: Mapping[str, Linear], device: torch.device
) -> dict[str, Factors]:
    """Returns the factors of several adapters, with zeros where an adapter does not have a layer."""
    rank = _CHUNKS * -(-max(adapter.rank for adapter in adapters) // _CHUNKS)
    sites = {}
    for name in sorted({name for adapter in adapters for name in adapter.sites}):
        inputs, outputs, _ = linear[name]
        a, b = torch.zeros(len(adapters), rank, inputs), torch.zeros(len(adapters), outputs, rank)
        for e, adapter in enumerate(adapters):
            if name in adapter.sites:
                own = adapter.sites[name]
                at = _spread_summands(own.a.shape[0], rank)
                a[e, at], b[e][:, at] = own.a, own.b
        sites[name] = Factors(a.to(device), b.to(device))
    return sites


def _spread_summands(rank: int, padded: int) -> Tensor:
    """Returns the places of a sum's summands in a longer sum: each chunk of the sum keeps its summands, in order."""
    starts = [c * rank // _CHUNKS for c in range(_CHUNKS + 1)]
    width = padded // _CHUNKS
    chunks = ((c * width, starts[c + 1] - starts[c]) for c in range(_CHUNKS))
    return torch.tensor([start + i for start, num in chunks for i in range(num)], dtype=torch.int64)


def make_low_rank(
    sequences: array, adapters: Sequence[bytes], slots: Mapping[bytes, int], sites: dict[str, Factors]
) -> LowRank:
    """Returns the adapters of a plan's tokens.

    Args:
        sequences: sequence of each token.
        adapters: digest of each sequence's adapter, or empty. Padding has no adapter.
        slots: place of each adapter in the stacks.
        sites: stacks.
    """
    num, device = len(slots), next(iter(sites.values())).a.device
    of = [slots[digest] if digest else num for digest in adapters]
    own = torch.tensor([of[s] if s < len(of) else num for s in sequences])
    order = torch.argsort(own, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = torch.bincount(own, minlength=num + 1)[:num]
    order, places, counts, has = (x.to(device) for x in (order, places, counts, (own < num)[:, None]))
    return LowRank(order, places, counts, has, sites)
