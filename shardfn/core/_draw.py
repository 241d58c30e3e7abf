"""Keys and draws: explicit, stateless randomness by threefry2x32, and tensors as functions of (key, shape).

Law: a random word is a function of only (key, position), so any block of a draw has the same bits on every rank, under
every mesh, remat and microbatch size. The words equal `jax.random`'s with partitionable threefry.

Law: `normal_block(key, shape, slices)` is bit-equal to `normal(key, shape)[slices]`, and in the same way for the other
draws. Inside `deferred()` the functions return a `Draw`, drawn when used or cut, so that the same `init(config, key)`
serves a laptop and a mesh on which no rank could hold the whole.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, https://doi.org/10.1145/2063384.2063405
"""

import functools
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, SupportsInt

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32, Int64, Shaped
from torch import Tensor

from ._ambient import Ambient
from ._metadata import MetadataTensor
from ._modules import COPIES, frozen, is_frozen
from ._texts import a_kind
from ._tree import tree_map

MASK = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def key(seed: int, *, device: torch.device | str | None = None) -> Int64[Tensor, "2"]:
    """Returns a key from a seed: the two halves of the seed as unsigned 32-bit words, high half first.

    A key is an ordinary tensor, so a key lives in a state tree and is traced like any other leaf.

    Args:
        seed: any integer of 64 bits, signed or unsigned.
        device: the default device of draws from the key.

    Returns:
        int64 of shape [2], each word in [0, 2**32).

    Raises:
        ValueError: `seed` has more than 64 bits.

    Example:
        >>> key(42).tolist()
        [0, 42]
    """
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"key({seed!r}): a seed is an integer, as in key(0).")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"key({seed}): a seed must have at most 64 bits. Use {seed & (2**64 - 1)}, its low 64 bits.")
    return torch.tensor([(seed >> 32) & MASK, seed & MASK], dtype=torch.int64, device=device)


def split(key: Int64[Tensor, "2"], num: int = 2) -> Int64[Tensor, "n 2"]:
    """Returns `num` independent keys: `split(key, n)[i] == fold_in(key, i)`.

    Args:
        key: the parent key. Do not draw from the parent as well.
        num: number of keys.

    Returns:
        int64 of shape [num, 2], to unpack or index.

    Raises:
        ValueError: `num` is negative.

    Example:
        >>> a, b = split(key(0))
        >>> torch.equal(b, fold_in(key(0), 1))
        True
    """
    _check_tensor("split", key)
    if num < 0:
        raise ValueError(f"split(key, {num}): the number of keys must not be negative.")
    return fold_in(key, torch.arange(num, device=key.device))


def fold_in(key: Int64[Tensor, "*k 2"], data: SupportsInt | Int[Tensor, "*n"]) -> Int64[Tensor, "*m 2"]:
    """Returns the key of (key, data): threefry of the two words of `data`. A tensor of data gives a key for each entry.

    Args:
        key: a key, or keys with leading dims that broadcast with the dims of `data`.
        data: an integer such as a step, layer or sample number.

    Returns:
        int64 keys of shape [*m, 2], `m` the broadcast of the leading dims and the shape of `data`.

    Raises:
        ValueError: an integer `data` has more than 64 bits.
        TypeError: `data` is a float.

    Example:
        >>> fold_in(key(42), 7).tolist()
        [2547012911, 1371500959]
    """
    _check_tensor("fold_in", key)
    if not isinstance(data, Tensor):
        number: Any = data  # an `axis_index`, too, which has no order
        if not -(1 << 63) <= int(number) < 1 << 64:
            raise ValueError(f"fold_in(key, {data}): data must have at most 64 bits.")
        data = torch.tensor(number - (1 << 64) if int(number) >> 63 > 0 else number, device=key.device)
        if data.is_floating_point():
            raise TypeError(f"fold_in(key, {number}): data must be an integer, got a float. Pass int(data).")
    words = threefry2x32(key, data.to(device=key.device, dtype=torch.int64))
    return torch.stack(words, dim=-1).to(torch.int64) & MASK


def check_key(who: str, key: Any) -> None:
    """Refuses anything but a key.

    Raises:
        TypeError: `key` is not a key. The message shows how to make a key.

    Example:
        >>> check_key("sharded_step", key(0))
    """
    _check_tensor(who, key)
    if key.shape != (2,) or key.dtype != torch.int64:
        raise TypeError(
            f"{who}: a key must be int64 of shape (2,), got {key.dtype} of shape {tuple(key.shape)}. Make a key from a"
            " seed: key=sf.key(0)."
        )


def _check_tensor(who: str, key: Any) -> None:
    if not isinstance(key, Tensor):
        seed = key if isinstance(key, int) else 0
        raise TypeError(f"{who}: key is {key!r}, {a_kind(key)}. Make a key of a seed: sf.key({seed}).")


def bits(key: Int64[Tensor, "2"], start: int, count: int) -> Int64[Tensor, " n"]:
    """Returns the 32-bit words of flat positions start .. start + count: `hi ^ lo` of threefry2x32(key, position).

    Args:
        key: the key.
        start: first position.
        count: number of positions.

    Returns:
        int64 of shape [count], each in [0, 2**32).

    Example:
        >>> bits(key(42), 0, 2).tolist()
        [2098992034, 2919706841]
    """
    hi, lo = threefry2x32(key, torch.arange(start, start + count, device=key.device))
    return (hi ^ lo).to(torch.int64) & MASK


def threefry2x32(
    key: Int64[Tensor, "*k 2"], index: Int64[Tensor, "*n"]
) -> tuple[Int32[Tensor, "*m"], Int32[Tensor, "*m"]]:
    """Returns Threefry-2x32 with 20 rounds of the counters (index >> 32, index & 0xffffffff).

    int32 arithmetic wraps around exactly as the cipher's uint32 does, and CPUs vectorise it best.

    Args:
        key: keys. The leading dims broadcast with `index`.
        index: counters.

    Returns:
        The two words, as the int32 of the same bits.

    Example:
        >>> [hex(w.item() & 0xffffffff) for w in threefry2x32(key(0), torch.tensor(0))]
        ['0x6b200159', '0x99ba4efe']
    """
    k0, k1 = key.to(torch.int32).unbind(-1)
    ks = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = (index >> 32).to(torch.int32) + k0, index.to(torch.int32) + k1
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = _rotate_left(x1, r) ^ x0
        x0 = x0 + ks[(i + 1) % 3]
        x1 = x1 + (ks[(i + 2) % 3] + (i + 1))
    return x0, x1


def _rotate_left(x: Tensor, r: int) -> Tensor:
    # The shift right is arithmetic, hence the mask. The sum with alpha is the shift left and the or in a single pass.
    low = (x >> (32 - r)) & ((1 << r) - 1)
    return torch.add(low, x, alpha=1 << r)


Device = torch.device | str | None
Slices = tuple[slice, ...]
# Elements drawn at a time: the cipher's temporaries stay in a core's cache, and torch splits no kernel of so few
# elements over threads. Barriers of threads (a hundred a chunk) cost far more than threads save where ranks share
# cores.
CHUNK = 1 << 15
# Chunks are padded to whole vectors, because a kernel's scalar tail may round otherwise than the vector body.
_VECTOR = 64
_HALF_DTYPES = (torch.float16, torch.bfloat16)

_DEFERRED = Ambient[None]("draws are deferred")
_SHAPES = Ambient[None]("draws are shapes", by_thread=True)


def deferred() -> AbstractContextManager[None]:
    """Makes `normal`, `uniform`, `zeros`, `ones` and `full` return a `Draw` instead of drawing. Nests.

    Example:
        >>> with deferred():
        ...     w = ones((1 << 20, 1 << 20))
        >>> draw_block(w, (slice(0, 1), slice(0, 3)))
        tensor([[1., 1., 1.]])
    """
    return _DEFERRED.bound(None)


def draw_shapes() -> AbstractContextManager[None]:
    """Leaves numbers of a key uncomputed: draws have shape and dtype, and arbitrary values. Nests.

    Only for tensors without data, where the cipher's hundred operations a draw would compute nothing.

    Example:
        >>> with draw_shapes():
        ...     normal(torch.zeros(2, dtype=torch.int64, device="meta"), (1 << 20, 1 << 20)).shape
        torch.Size([1048576, 1048576])
    """
    return _SHAPES.bound(None)


def uniform(
    key: Int64[Tensor, "2"],
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
    device: Device = None,
) -> Float[Tensor, "..."]:
    """Returns uniform numbers in [minval, maxval): the upper 23 bits of a word as a fraction, then scaled.

    float64 takes 52 bits. float16 and bfloat16 are drawn as float32 and rounded, perhaps up to `maxval`.

    Args:
        key: the key. Do not draw from the same key twice.
        shape: shape of the result.
        dtype: a floating dtype.
        minval: inclusive lower end.
        maxval: upper end.
        device: device of the result. Default: the key's device.

    Raises:
        TypeError: `dtype` is not a floating dtype.

    Example:
        >>> from shardfn.core import key
        >>> uniform(key(42), (2,)).tolist()
        [0.48870956897735596, 0.6797971725463867]
    """
    draw = functools.partial(
        uniform_block, key, shape, dtype=dtype, minval=minval, maxval=maxval, device=device or key.device
    )
    return _maybe_deferred(draw, shape, dtype, device or key.device)


def normal(
    key: Int64[Tensor, "2"],
    shape: Sequence[int],
    *,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: Device = None,
) -> Float[Tensor, "..."]:
    """Returns normal numbers: mean + stddev * sqrt(2) * erfinv(u), u uniform in (-1, 1).

    Args:
        key: the key. Do not draw from the same key twice.
        shape: shape of the result.
        mean: mean.
        stddev: standard deviation. Scale here and not afterwards, so that a deferred draw stays deferred.
        dtype: a floating dtype. 16-bit dtypes are drawn as float32 and rounded.
        device: device of the result. Default: the key's device.

    Raises:
        TypeError: `dtype` is not a floating dtype.

    Example:
        >>> from shardfn.core import key
        >>> normal(key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    draw = functools.partial(
        normal_block, key, shape, mean=mean, stddev=stddev, dtype=dtype, device=device or key.device
    )
    return _maybe_deferred(draw, shape, dtype, device or key.device)


def bernoulli(key: Int64[Tensor, "2"], p: float, shape: Sequence[int]) -> Bool[Tensor, "..."]:
    """Returns bools, True with probability `p`: `uniform(key, shape) < p`.

    Args:
        key: the key. Do not draw from the same key twice.
        p: probability of True.
        shape: shape of the result.

    Raises:
        ValueError: `p` is not in [0, 1].

    Example:
        >>> from shardfn.core import key
        >>> bernoulli(key(0), 1.0, (2,)).tolist()
        [True, True]
    """
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli(p={p}): a probability lies in [0, 1].")
    return uniform_block(key, shape, ()) < p


def full(
    shape: Sequence[int], value: float | int | bool, *, dtype: torch.dtype = torch.float32, device: Device = None
) -> Shaped[Tensor, "..."]:
    """Returns a tensor filled with `value`; a `Draw` inside `deferred()`.

    Args:
        shape: shape of the result.
        value: the value.
        dtype: any dtype.
        device: device of the result. Default: torch's default device.

    Example:
        >>> full((2,), 3.0).tolist()
        [3.0, 3.0]
    """
    device = device or torch.get_default_device()
    draw = functools.partial(_full_block, shape, value=value, dtype=dtype, device=device)
    return _maybe_deferred(draw, shape, dtype, device)


def zeros(shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: Device = None) -> Shaped[Tensor, "..."]:
    """Returns a tensor of zeros; a `Draw` inside `deferred()`.

    Example:
        >>> zeros((2,)).tolist()
        [0.0, 0.0]
    """
    return full(shape, 0, dtype=dtype, device=device)


def ones(shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: Device = None) -> Shaped[Tensor, "..."]:
    """Returns a tensor of ones; a `Draw` inside `deferred()`.

    Example:
        >>> ones((2,)).tolist()
        [1.0, 1.0]
    """
    return full(shape, 1, dtype=dtype, device=device)


def uniform_block(
    key: Int64[Tensor, "2"],
    shape: Sequence[int],
    slices: Slices,
    *,
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
    device: Device = None,
) -> Float[Tensor, "..."]:
    """Returns the block `uniform(key, shape, ...)[slices]`, bit for bit, at the cost of the block.

    Args:
        key: the key.
        shape: shape of the full draw.
        slices: slices of step 1, a slice for each dim. Dims without a slice are whole.
        dtype: see `uniform`.
        minval: see `uniform`.
        maxval: see `uniform`.
        device: see `uniform`.

    Raises:
        TypeError: `dtype` is not a floating dtype.
        ValueError: more slices than dims, or a step other than 1.

    Example:
        >>> from shardfn.core import key
        >>> block = uniform_block(key(0), (4, 6), (slice(1, 3),))
        >>> torch.equal(block, uniform(key(0), (4, 6))[1:3])
        True
    """
    work = _work_dtype(dtype)

    def sample_uniform(hi: Tensor, lo: Tensor) -> Tensor:
        u = _unit_floats(hi, lo, work).mul_(maxval - minval).add_(minval)
        return u.clamp_(min=minval)

    return _draw_block(key, shape, slices, dtype, device, sample_uniform)


def normal_block(
    key: Int64[Tensor, "2"],
    shape: Sequence[int],
    slices: Slices,
    *,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: Device = None,
) -> Float[Tensor, "..."]:
    """Returns the block `normal(key, shape, ...)[slices]`, bit for bit, at the cost of the block.

    Args:
        key: the key.
        shape: shape of the full draw.
        slices: slices of step 1, a slice for each dim. Dims without a slice are whole.
        mean: see `normal`.
        stddev: see `normal`.
        dtype: see `normal`.
        device: see `normal`.

    Raises:
        TypeError: `dtype` is not a floating dtype.
        ValueError: more slices than dims, or a step other than 1.

    Example:
        >>> from shardfn.core import key
        >>> block = normal_block(key(0), (4, 6), (slice(1, 3), slice(0, 5)))
        >>> torch.equal(block, normal(key(0), (4, 6))[1:3, 0:5])
        True
    """
    work = _work_dtype(dtype)
    # nextafter(-1, 0): the open end keeps erfinv finite.
    lowest = -1.0 + torch.finfo(work).eps / 2

    def sample_normal(hi: Tensor, lo: Tensor) -> Tensor:
        u = _unit_floats(hi, lo, work).mul_(2.0).add_(lowest)
        return u.erfinv_().mul_(math.sqrt(2)).mul_(stddev).add_(mean)

    return _draw_block(key, shape, slices, dtype, device, sample_normal)


def draw_block(leaf: Shaped[Tensor, "..."], slices: Slices) -> Shaped[Tensor, "..."]:
    """Returns the block `leaf[slices]` as a separate tensor: a `Draw` draws only the block, a tensor is copied.

    Args:
        leaf: a `Draw` or a tensor.
        slices: slices of step 1, a slice for each dim. Dims without a slice are whole.

    Example:
        >>> draw_block(torch.arange(4), (slice(1, 3),)).tolist()
        [1, 2]
    """
    if isinstance(leaf, Draw):
        return leaf.block(slices)
    return leaf[slices].clone(memory_format=torch.contiguous_format)


def stack_draws(draws: Sequence[Shaped[Tensor, "..."]]) -> Shaped[Tensor, "..."]:
    """Returns `torch.stack(draws)`, deferred for deferred draws, so that a block of the stack draws only the block.

    Args:
        draws: tensors of the same shape.

    Example:
        >>> with deferred():
        ...     w = stack_draws([ones((1 << 20,)), zeros((1 << 20,))])
        >>> draw_block(w, (slice(0, 2), slice(0, 3)))
        tensor([[1., 1., 1.],
                [0., 0., 0.]])
    """
    if not any(isinstance(x, Draw) for x in draws):
        return torch.stack(list(draws))

    def block(slices: Slices) -> Tensor:
        first, *rest = slices or (slice(None),)
        chosen = draws[first]
        drawn = [draw_block(x, tuple(rest)) for x in chosen or draws[:1]]
        return torch.stack(drawn)[: len(chosen)]

    return Draw(block, (len(draws), *draws[0].shape), draws[0].dtype, draws[0].device)


class Draw(MetadataTensor):
    """Tensor that is drawn when needed. Shape, dtype and device cost nothing. Any other use draws the whole.

    Made by `normal`, `uniform`, `zeros`, `ones` and `full` inside `deferred()`, and by `stack_draws` of draws.
    """

    _draw: Callable[[Slices], Tensor]

    @staticmethod
    def __new__(
        cls, draw: Callable[[Slices], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> "Draw":
        self = cls.empty(shape, dtype, device)
        self._draw = draw
        return self

    def block(self, slices: Slices) -> Tensor:
        """Returns the block `self.full()[slices]`, bit for bit, at the cost of the block."""
        return self._draw(slices)

    def full(self) -> Tensor:
        """Returns the whole tensor."""
        return self._draw(())

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Draw(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function with its deferred arguments drawn."""
        name = getattr(func, "__name__", "")
        if isinstance(kwargs.get("out"), Draw) or (_is_write(name) and isinstance(args[0], Draw)):
            raise TypeError(f"{name} would write into a deferred draw, which is immutable. Call .full() on it first.")
        call: Any = (tuple(args), kwargs)
        whole, kwargs = tree_map(lambda x: x.full() if isinstance(x, Draw) else x, call)
        out = func(*whole, **kwargs)
        return frozen(out) if func in COPIES and is_frozen(args[0]) else out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"a deferred draw reached {func} without being drawn. Call .full() on it first.")


def _is_write(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def _maybe_deferred(draw: Callable[[Slices], Tensor], shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
    return Draw(draw, shape, dtype, torch.device(device)) if _DEFERRED else draw(())


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype in (torch.float32, torch.float64):
        return dtype
    if dtype in _HALF_DTYPES:
        return torch.float32
    raise TypeError(f"random numbers of {dtype}: draw float64, float32, bfloat16 or float16 and convert.")


def _unit_floats(hi: Tensor, lo: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns floats in [0, 1): the upper bits as a fraction, as if written under the exponent of 1.0, less 1."""
    if dtype == torch.float64:
        word = (hi.to(torch.int64) << 32) | (lo.to(torch.int64) & 0xFFFFFFFF)
        return ((word >> 12) & ((1 << 52) - 1)).to(dtype).mul_(2.0**-52)
    return (((hi ^ lo) >> 9) & ((1 << 23) - 1)).to(dtype).mul_(2.0**-23)


def _full_block(
    shape: Sequence[int], slices: Slices, *, value: float | int | bool, dtype: torch.dtype, device: Device
) -> Tensor:
    return torch.full([b - a for a, b in _slice_bounds(shape, slices)], value, dtype=dtype, device=device)


def _draw_block(
    key: Tensor,
    shape: Sequence[int],
    slices: Slices,
    dtype: torch.dtype,
    device: Device,
    sample: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Returns `sample(words)` at every position of the block."""
    bounds = _slice_bounds(shape, slices)
    sizes = [b - a for a, b in bounds]
    count = math.prod(sizes)
    key = key.to(device) if device is not None else key
    if count == 0 or _SHAPES:
        return key.new_empty(sizes, dtype=dtype)
    # A traced key (a subclass of Tensor) draws at once: a graph has no cache to fit, and no loop to unroll.
    chunk = CHUNK if type(key) is Tensor else count
    if count <= chunk:
        (index,) = _index_chunks(shape, bounds, count, key.device)
        return _sample_padded(key, index, sample).to(dtype).reshape(sizes)
    out, start = key.new_empty(count, dtype=dtype), 0
    for index in _index_chunks(shape, bounds, chunk, key.device):
        out[start : start + len(index)] = _sample_padded(key, index, sample)
        start += len(index)
    return out.view(sizes)


def _sample_padded(key: Tensor, index: Tensor, sample: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    n = len(index)
    return sample(*threefry2x32(key, F.pad(index, (0, -n % _VECTOR))))[:n]


def _slice_bounds(shape: Sequence[int], slices: Slices) -> list[tuple[int, int]]:
    """Returns start and stop in each dim."""
    if len(slices) > len(shape):
        raise ValueError(f"{len(slices)} slices for shape {tuple(shape)}, which has {len(shape)} dims.")
    if bad := [s for s in slices if s.step not in (None, 1)]:
        raise ValueError(f"slices of a draw must have step 1, got {bad[0]}. Slice the drawn block further.")
    cuts = [s.indices(n)[:2] for s, n in zip(slices, shape, strict=False)]
    return [(a, max(a, b)) for a, b in cuts] + [(0, n) for n in shape[len(slices) :]]


def _index_chunks(
    shape: Sequence[int], bounds: list[tuple[int, int]], chunk: int, device: torch.device
) -> Iterator[Tensor]:
    """Yields the flat positions of a block of `shape`, in order, in pieces of about `chunk`.

    A block is a set of rows (the dims before `cut`), each a contiguous run of positions (the dims from `cut` on).
    """
    cut = len(shape)
    while cut > 0 and bounds[cut - 1] == (0, shape[cut - 1]):
        cut -= 1
    cut = max(cut - 1, 0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first, last = (bounds[cut][0] * strides[cut], bounds[cut][1] * strides[cut]) if shape else (0, 1)
    dims = list(zip(bounds[:cut], strides[:cut], strict=True))
    if last - first >= chunk:
        for row in itertools.product(*(range(a * s, b * s, s) for (a, b), s in dims)):
            for start in range(sum(row) + first, sum(row) + last, chunk):
                yield torch.arange(start, min(start + chunk, sum(row) + last), device=device)
        return
    run = torch.arange(first, last, device=device)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for (a, b), s in dims:
        rows = (rows[:, None] + torch.arange(a, b, device=device) * s).flatten()
    for some in rows.split(max(1, chunk // len(run))):
        yield (some[:, None] + run).flatten()
