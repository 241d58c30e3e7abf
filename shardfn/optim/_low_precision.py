"""Optimizer states of low precision: in codes of 8 bits a block, or in bfloat16 with keyed stochastic rounding.

A rule around another rule: states are decoded, the inner rule steps in float32, and the new states are encoded. Blocks
and random numbers are functions of global positions, so a sharded run keeps the bits of a single device.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor

from shardfn.collectives import GlobalTensor, current_mesh, pmax
from shardfn.core import (
    P,
    block_slices,
    check_key,
    fold_in,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
    uniform_block,
)

from ._base import GradientTransformation, OptState, Pair, Params, Specs, Updates
from ._checks import check_num_steps
from ._chunked_update import in_pieces
from ._decide import Resolved, check_whole
from ._leaves import check_params, check_state, leaves_like, spec_leaves, zero_count
from ._needs import join_needs, refuse_phases, resolve_masks
from ._pair import as_transformation, inplace, owners

# Fields of states that are averages, by sign. Other fields, such as copies of parameters, keep their precision.
_SIGNED = frozenset({"mu", "m1", "m2", "trace", "ema", "exp_avg", "grad_sum"})
_POSITIVE = frozenset({"nu", "sum_of_squares", "exp_avg_sq"})
_GROUP = 1 << 22  # elements that are decoded at once
# Fractions of 2^32: powers of the inverses of the plastic number and of the golden ratio.
_IRRATIONAL = (3242174889, 2654435769, 2447445414)


class LowPrecisionState(NamedTuple):
    """State of `quantize_states` and `round_states`.

    Attributes:
        count: int32, 0-d: steps taken.
        scales: float32 scale of each block, for each leaf of `inner` that is in codes, in order.
        inner: state of the inner rule, with leaves of low precision: uint8 codes, or bfloat16.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    scales: tuple[Any, ...]
    inner: OptState


def quantize_states(
    inner: GradientTransformation | Pair, *, code: str = "dynamic", block_size: int = 256, min_size: int = 4096
) -> GradientTransformation:
    """Keeps the averages of `inner` in 8 bits: `block = scale * table[codes]`, with the block's largest value as scale.

    A block is `block_size` neighbours along the last dim of the whole leaf, for example 4 blocks for a row of 1,000
    elements, or some short rows, for example 4 rows of 64 elements. The table is the dynamic map of bitsandbytes,
    signed for means, unsigned for the roots of means of squares, or linear. Values between two of the table are rounded
    up or down in turn, evenly over steps and elements, so that small changes add up. Codes are cut and placed like the
    parameter. If ZeRO cuts a dim of blocks, ranks exchange the scales of a leaf by a `pmax`. With AdamW, a parameter
    has 2 + 2 * 4 / 256 bytes of states in place of 8: 0.254 of them.

    Averages are the state's fields `mu`, `nu`, `m1`, `m2`, `trace`, `ema`, `exp_avg`, `exp_avg_sq`, `grad_sum` and
    `sum_of_squares`. Put `master_weights` and `sam` around `quantize_states`.

    Args:
        inner: rule with such averages.
        code: table of values. "dynamic" has more values near 0, "linear" has equal distances.
        block_size: number of elements that share a scale.
        min_size: number of elements of the smallest leaf in codes. Smaller leaves keep their precision.

    Returns:
        The corresponding `GradientTransformation`, with a `LowPrecisionState` as state.

    Raises:
        ValueError: a number is out of range, `code` is unknown, the rule averages gradients, or (on use) the state has
            no such averages.

    Example:
        >>> from shardfn.optim import adamw
        >>> state = quantize_states(adamw(1e-3)).init({"w": torch.zeros(64, 128)})
        >>> state.inner[0].mu["w"].dtype, state.scales[0].shape
        (torch.uint8, torch.Size([32, 1]))

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021, https://arxiv.org/abs/2110.02861
    """
    check_num_steps("quantize_states", block_size=block_size, min_size=min_size)
    if code not in ("dynamic", "linear"):
        raise ValueError(f"quantize_states: code must be 'dynamic' or 'linear', got {code!r}.")
    return _wrap("quantize_states", inner, _BlockCodes(code, block_size), min_size)


def round_states(inner: GradientTransformation | Pair, key: Int64[Tensor, "2"]) -> GradientTransformation:
    """Keeps the averages of `inner` in bfloat16, rounded up or down at random: the expected value is exact.

    Rounding to nearest would lose every change below 1/256 of an average, for example all changes of `nu` with
    `b2 = 0.999`. The random number of an element is a function of the key, the leaf, the step and the element's global
    position, so all meshes round equally. For the averages see `quantize_states`.

    Args:
        inner: rule with averages.
        key: key, as from `sf.key(0)`.

    Returns:
        The corresponding `GradientTransformation`, with a `LowPrecisionState` as state.

    Raises:
        ValueError: the rule averages gradients, or (on use) the state has no averages.

    Example:
        >>> from shardfn.core import key
        >>> from shardfn.optim import adamw
        >>> round_states(adamw(1e-3), key(0)).init([torch.zeros(3)]).inner[0].nu
        [tensor([0., 0., 0.], dtype=torch.bfloat16)]

    References:
        Zamirai et al., Revisiting BFloat16 Training, 2020, https://arxiv.org/abs/2010.06192
    """
    check_key("round_states", key)
    first, second = key.tolist()
    return _wrap("round_states", inner, _StochasticRounding((first, second)), 1)


def dynamic_map(*, signed: bool) -> Float[Tensor, "256"]:
    """Returns the 256 values of the dynamic code, ascending: fractions that are finer for larger powers of ten.

    Example:
        >>> dynamic_map(signed=False)[[0, 1, 255]].tolist() == [0.0, float(torch.tensor(3.25e-7)), 1.0]
        True
    """
    return torch.tensor(_list_dynamic(signed))


@functools.lru_cache(maxsize=2)
def _list_dynamic(signed: bool) -> list[float]:
    values = [0.0, 1.0]
    for i in range(7):
        num = 2 ** (i if signed else i + 1)
        means = [10.0 ** (i - 6) * (0.1 + 0.9 * (k + 0.5) / num) for k in range(num)]
        values += means + ([-x for x in means] if signed else [])
    return sorted(values)


def linear_map(*, signed: bool) -> Float[Tensor, "256"]:
    """Returns the 256 values of the linear code, ascending. Signed, 0 is a value, and 1 stands twice.

    Example:
        >>> linear_map(signed=False)[51].item() == torch.tensor(0.2).item()
        True
    """
    if not signed:
        return torch.arange(256) / 255
    return torch.cat([torch.arange(-127, 128) / 127, torch.ones(1)])


class _LeafPlace(NamedTuple):
    """Place of a block in a whole leaf.

    Attributes:
        shape: shape of the whole leaf.
        spec: layout.
    """

    shape: tuple[int, ...]
    spec: P

    @property
    def box(self) -> tuple[slice, ...]:
        mesh = current_mesh()
        return block_slices(self.shape, self.spec, mesh.shape, mesh.coords)


@runtime_checkable
class _StateCodec(Protocol):
    def encode_zeros(self, zeros: Tensor, place: _LeafPlace) -> tuple[Tensor, Any]:
        """Returns the first codes of a leaf of zeros, and the scales or ()."""
        ...

    def encode(self, x: Tensor, place: _LeafPlace, number: int, count: Tensor, signed: bool) -> tuple[Tensor, Any]:
        """Returns the codes of a block, and the scales or (). Collective."""
        ...

    def decode(self, codes: Tensor, scales: Any, place: _LeafPlace, signed: bool) -> Tensor:
        """Returns a block in float32."""
        ...


class _BlockSpan(NamedTuple):
    """Blocks along a dim that a rank's elements touch.

    Attributes:
        first: number of the first block.
        num: number of blocks.
        before: elements of the first block that other ranks have.
        after: elements of the last block that other ranks have, or that lie behind the leaf.
        total: number of blocks of the leaf.
        size: elements of a block.
    """

    first: int
    num: int
    before: int
    after: int
    total: int
    size: int

    def spread(self, scales: Tensor, dim: int, length: int) -> Tensor:
        """Returns the scale of each of a rank's elements along a dim."""
        own = scales.narrow(dim, self.first, self.num).repeat_interleave(self.size, dim=dim)
        return own.narrow(dim, self.before, length)


class _BlockCodes(NamedTuple):
    """Codes of 8 bits, with a scale for each block: some neighbours of the last dim, in a row or in several rows.

    Averages of squares are kept as square roots, since an update divides by the root: half the powers of ten are
    enough. A value between two of the table is rounded up or down in turn, by a sequence over steps and positions that
    is spread evenly (Weyl, 1916). Otherwise changes below half a distance would be lost in every step: with b2 = 0.999
    an average of squares would stand still.
    """

    code: str
    size: int

    def table(self, signed: bool, device: torch.device) -> Tensor:
        return (dynamic_map if self.code == "dynamic" else linear_map)(signed=signed).to(device)

    def num_rows(self, shape: Sequence[int]) -> int:
        """Returns the number of rows of a block, so that short rows share a scale."""
        return max(1, min(shape[-2], self.size // max(shape[-1], 1))) if len(shape) > 1 else 1

    def scales_shape(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape of the scales of a whole leaf."""
        out = [*shape[:-1], -(-shape[-1] // self.size)]
        if len(shape) > 1:
            out[-2] = -(-shape[-2] // self.num_rows(shape))
        return out

    def spans(self, place: _LeafPlace) -> list[_BlockSpan]:
        """Returns the blocks of this rank along the last dim, and along the dim before if blocks have several rows."""
        sizes = [self.size] if self.num_rows(place.shape) == 1 else [self.num_rows(place.shape), self.size]
        spans = []
        for d, size in zip(range(len(place.shape) - len(sizes), len(place.shape)), sizes, strict=True):
            cut = place.box[d]
            first, last = cut.start // size, -(-cut.stop // size)
            num = last - first if cut.stop > cut.start else 0
            before = cut.start - first * size if num else 0
            after = num * size - before - (cut.stop - cut.start)
            spans.append(_BlockSpan(first, num, before, after, -(-place.shape[d] // size), size))
        return spans

    def encode_zeros(self, zeros: Tensor, place: _LeafPlace) -> tuple[Tensor, Any]:
        spans = self.spans(place)
        lead = zeros.shape[: zeros.ndim - len(spans)]
        scales = zeros.new_zeros((*lead, *(span.total for span in spans)), dtype=torch.float32)
        return torch.zeros_like(zeros, dtype=torch.uint8), scales

    def encode(self, x: Tensor, place: _LeafPlace, number: int, count: Tensor, signed: bool) -> tuple[Tensor, Any]:
        x = x.float() if signed else x.float().sqrt()
        spans = self.spans(place)
        cut = [axis for d in range(x.ndim - len(spans), x.ndim) for axis in place.spec.dim_axes(d)]
        axes = current_mesh().axes(tuple(cut))
        tops = x.abs()
        for d, span in zip(range(x.ndim - len(spans), x.ndim), spans, strict=True):
            tops = tops.movedim(d, -1)
            if span.num:
                tops = F.pad(tops, (span.before, span.after)).unflatten(-1, (span.num, span.size)).amax(-1)
            tops = F.pad(tops, (span.first, span.total - span.first - span.num)).movedim(-1, d)
        scales = pmax(tops, axes) if axes else tops
        wide = self._spread(scales, spans, x.shape)
        ratios, table = x / torch.where(wide == 0, 1.0, wide), self.table(signed, x.device)
        high = torch.bucketize(ratios, table).clamp(max=len(table) - 1)
        low = (high - 1).clamp(min=0)
        part = (ratios - table[low]) / torch.where(high > low, table[high] - table[low], 1.0)
        codes = torch.where(_spread_evenly(place, number, count.to(x.device)) < part, high, low)
        return codes.to(torch.uint8), scales

    def decode(self, codes: Tensor, scales: Any, place: _LeafPlace, signed: bool) -> Tensor:
        values = self.table(signed, codes.device)[codes.int()] * self._spread(scales, self.spans(place), codes.shape)
        return values if signed else values.square_()

    def _spread(self, scales: Tensor, spans: Sequence[_BlockSpan], shape: torch.Size) -> Tensor:
        """Returns the scale of each element of a rank's block, or of elements that share a row."""
        for d, span in zip(range(len(shape) - len(spans), len(shape)), spans, strict=True):
            scales = span.spread(scales, d, shape[d])
        return scales


def _spread_evenly(place: _LeafPlace, number: int, count: Tensor) -> Tensor:
    """Returns numbers from 0 to 1 for the elements of a block: fractions of multiples of irrational numbers.

    They depend on the element's place in the whole leaf, and on the step, so all meshes round equally.
    """
    place_of, stride = torch.zeros((), dtype=torch.int64, device=count.device), 1
    for d in range(len(place.shape) - 1, -1, -1):
        at = torch.arange(place.box[d].start, place.box[d].stop, device=count.device) * stride
        place_of = place_of + at.view(-1, *[1] * (len(place.shape) - 1 - d))
        stride *= place.shape[d]
    bits = place_of * _IRRATIONAL[0] + count.long() * _IRRATIONAL[1] + number * _IRRATIONAL[2]
    return (bits >> 8 & 0xFFFFFF).float() * 2.0**-24


class _StochasticRounding(NamedTuple):
    """bfloat16, rounded at random."""

    key: tuple[int, int]

    def encode_zeros(self, zeros: Tensor, place: _LeafPlace) -> tuple[Tensor, Any]:
        del place
        return zeros.to(torch.bfloat16), ()

    def encode(self, x: Tensor, place: _LeafPlace, number: int, count: Tensor, signed: bool) -> tuple[Tensor, Any]:
        del signed
        key = fold_in(fold_in(torch.tensor(self.key, device=x.device), number), count.to(x.device))
        # 16 random bits are added to the 16 bits that are cut off.
        noise = (uniform_block(key, place.shape, place.box) * (1 << 16)).int()
        bits = x.float().contiguous().view(torch.int32) + noise
        up = (bits & -(1 << 16)).view(torch.float32)
        return torch.where(x.isfinite(), up, x.float()).to(torch.bfloat16), ()

    def decode(self, codes: Tensor, scales: Any, place: _LeafPlace, signed: bool) -> Tensor:
        del scales, place, signed
        return codes.float()


def _wrap(who: str, inner: GradientTransformation | Pair, codec: _StateCodec, least: int) -> GradientTransformation:
    tx = as_transformation(inner)
    refuse_phases(who, tx)
    return _LowPrecision(who, tx, codec, least).rule()


class _StateLeaf(NamedTuple):
    """Leaf of the inner state.

    Attributes:
        owner: number of the parameter. None: a counter, or a leaf with a placement of its own.
        place: place of the leaf if it has low precision, else None.
        signed: whether the leaf has negative values.
        is_average: whether the leaf is an average, possibly a small leaf.
    """

    owner: int | None
    place: _LeafPlace | None
    signed: bool
    is_average: bool


@dataclass(frozen=True, eq=False)
class _LowPrecision:
    """The rule. `places` has the shape, and the spec if known, of each whole leaf."""

    who: str
    tx: GradientTransformation
    codec: _StateCodec
    least: int
    places: Resolved | None = None

    def rule(self) -> GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        needs = join_needs([self.tx], lambda tx: replace(self, tx=tx).rule(), states=lambda s: (s.inner,))
        decide = self.decide if self.places is None else None
        # Scales cannot be cut with rows of the leaf, so the rule steps whole trees, in groups of its own.
        needs = needs._replace(granularity="tree", measure=None, bind_stats=None, resolve_masks=decide)
        return GradientTransformation(self.init, self.update, self.apply, needs._replace(ascends=self.tx.needs.ascends))

    def decide(self, params: Params) -> GradientTransformation:
        slots = tree_flatten(params, none_is_leaf=True)[0]
        places = {
            str(i): None if x is None else (tuple(x.shape), x.spec if isinstance(x, GlobalTensor) else None)
            for i, x in enumerate(slots)
        }
        return replace(self, tx=resolve_masks(self.tx, params), places=Resolved(places)).rule()

    def _find_places(self, params: Params, specs: Specs) -> list[_LeafPlace]:
        ps = tree_leaves(params)
        if self.places is None:
            check_whole(self.who, params, specs)
            return [_LeafPlace(tuple(p.shape), P()) for p in ps]
        cuts = [None] * len(ps) if specs is None else spec_leaves(specs, params)
        pairs = zip(self.places.of(params), cuts, strict=True)
        return [_LeafPlace(shape, cut or spec or P()) for (shape, spec), cut in pairs]

    def _find_kept(self, inner: OptState, params: Params, specs: Specs) -> list[_StateLeaf]:
        places, names = self._find_places(params, specs), tree_paths(params)
        out = []
        for path, owner in zip(tree_paths(inner), owners(inner, params), strict=True):
            # For example, the field of "[0].mu['w']", which belongs to "['w']", is "mu".
            field = "" if owner is None else path.removesuffix(names[owner]).rpartition(".")[2]
            place = places[owner] if owner is not None and field in _SIGNED | _POSITIVE else None
            small = place is None or not place.shape or math.prod(place.shape) < self.least
            out.append(_StateLeaf(owner, None if small else place, field in _SIGNED, field in _SIGNED | _POSITIVE))
        return out

    def init(self, params: Params) -> LowPrecisionState:
        inner = self.tx.init(params)
        leaves, treedef = tree_flatten(inner)
        kept = self._find_kept(inner, params, None)
        if tree_leaves(params) and not any(k.is_average for k in kept):
            raise ValueError(
                f"{self.who}: the state of the inner rule has none of the averages {sorted(_SIGNED | _POSITIVE)}, so"
                " nothing would be kept in low precision. Put the wrapper directly around the rule with the averages."
            )
        rows = [
            (x, None) if k.place is None else self.codec.encode_zeros(x, k.place)
            for x, k in zip(leaves, kept, strict=True)
        ]
        pairs = zip(rows, kept, strict=True)
        scales = tuple(self._place_scales(s, k.place) for (_, s), k in pairs if isinstance(s, Tensor) and k.place)
        return LowPrecisionState(zero_count(params), scales, tree_unflatten(treedef, [x for x, _ in rows]))

    def _place_scales(self, scales: Tensor, place: _LeafPlace) -> Tensor | GlobalTensor:
        """Returns the scales of a leaf, cut like the leaf except along the dims of blocks."""
        if self.places is None:
            return scales
        codec: Any = self.codec
        entries = [place.spec.dim_axes(d) or None for d in range(len(place.shape) - len(codec.spans(place)))]
        shape = torch.Size(codec.scales_shape(place.shape))
        return GlobalTensor(scales, shape, P(*entries), current_mesh())

    def _decode(self, state: LowPrecisionState, kept: Sequence[_StateLeaf]) -> tuple[list[Tensor], list[Any], Any]:
        """Returns the codes of all leaves, the scales of each leaf (or None), and the structure."""
        codes, treedef = tree_flatten(state.inner)
        scales = iter(state.scales)
        return codes, [next(scales, None) if k.place is not None else None for k in kept], treedef

    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        check_params(self.who, params)
        check_state(self.who, state, LowPrecisionState)
        kept = self._find_kept(state.inner, params, specs)
        codes, scales, treedef = self._decode(state, kept)
        inner = tree_unflatten(treedef, [self._wide(c, s, k) for c, s, k in zip(codes, scales, kept, strict=True)])
        us, new = self.tx.update(updates, inner, params, specs=specs)
        rows = [
            (x, None) if k.place is None else self.codec.encode(x, k.place, i, state.count, k.signed)
            for i, (x, k) in enumerate(zip(leaves_like(new, treedef, "the new state", "the state"), kept, strict=True))
        ]
        after = tuple(s for _, s in rows if isinstance(s, Tensor))
        return us, LowPrecisionState(state.count + 1, after, tree_unflatten(treedef, [x for x, _ in rows]))

    def _wide(self, codes: Tensor, scales: Any, kept: _StateLeaf) -> Tensor:
        return codes if kept.place is None else self.codec.decode(codes, scales, kept.place, kept.signed)

    @torch.no_grad()
    def apply(self, grads: Updates, state: OptState, params: Params, *, specs: Specs = None) -> tuple[Params, OptState]:
        check_state(self.who, state, LowPrecisionState)
        ps, treedef = tree_flatten(params)
        gs, kept = leaves_like(grads, treedef, "grads", "params"), self._find_kept(state.inner, params, specs)
        codes, scales, of = self._decode(state, kept)
        cuts = None if specs is None else tree_unflatten(treedef, spec_leaves(specs, params))
        pieces = in_pieces(self.tx, params) if self.tx.needs.measure is None else None
        whole = pieces is None or pieces.granularity == "tree"
        token = None if pieces is None or whole else pieces.begin(state.inner, specs=cuts)
        for group in [range(len(ps))] if whole else _groups([p.numel() for p in ps]):
            here = [k.owner is None or k.owner in group for k in kept]
            columns = zip(here, codes, scales, kept, strict=True)
            wide = [self._wide(c, s, k) if on else None for on, c, s, k in columns]
            own, rows = (
                tree_unflatten(treedef, [x if i in group else None for i, x in enumerate(xs)]) for xs in (gs, ps)
            )
            part = tree_unflatten(of, wide)
            if pieces is None or token is None:
                _, part = inplace(self.tx)(own, part, rows, specs=cuts)
            else:
                _, part = pieces.apply(token, own, part, rows, specs=cuts)
            new = iter(tree_leaves(part))
            for i, (on, c, s, k) in enumerate(zip(here, codes, scales, kept, strict=True)):
                if on:
                    self._write(next(new), c, s, k, i, state.count)
        inner = tree_unflatten(of, codes)
        inner = inner if pieces is None or token is None else pieces.end(token, inner)
        return params, LowPrecisionState(state.count.add_(1), state.scales, inner)

    def _write(self, x: Tensor, codes: Tensor, scales: Any, kept: _StateLeaf, number: int, count: Tensor) -> None:
        """Writes a new leaf of the inner state over the old leaf."""
        if kept.place is None:
            if x is not codes:
                codes.copy_(x)
            return
        new, top = self.codec.encode(x, kept.place, number, count, kept.signed)
        codes.copy_(new)
        if isinstance(top, Tensor):
            scales.copy_(top)


def _groups(sizes: Sequence[int]) -> list[range]:
    """Returns ranges of leaves, each with few enough elements, or one leaf."""
    out, start, total = list[range](), 0, 0
    for i, n in enumerate(sizes):
        if i > start and total + n > _GROUP:
            out.append(range(start, i))
            start, total = i, 0
        total += n
    return [*out, range(start, len(sizes))] if sizes else []
