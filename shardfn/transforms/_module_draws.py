"""Random numbers of a module: torch's dropouts, drawn by a key and by sample.

A mask is a function of (key, number of the draw in the forward, global number of the sample, position in the sample):
the same on any number of ranks, when a part of the forward runs again, and in a captured step.
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from shardfn.core import fold_in, uniform
from shardfn.nn import dropout

from ._lazy import LazyLeaf
from ._module_undrawn import Undrawn

# A function that draws by key within itself, which a module around the one that called it sees as well.
_INSIDE = threading.local()
_aten: Any = torch.ops.aten
_SELU_ALPHA = 1.7580993408473766
KEYED = (
    "apply.keyed(key, index_B)(params, ...), with the key that sharded_step(key=) gives the loss and the global numbers"
    " of this rank's rows"
)
_DRAWS = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"}
    | {"multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "normal_", "uniform_", "random_"}
    | {"bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_", "gumbel_softmax", "native_dropout"}
    | {"fractional_max_pool2d", "fractional_max_pool2d_with_indices", "dropout_", "feature_dropout_", "alpha_dropout_"}
    | {"fractional_max_pool3d", "fractional_max_pool3d_with_indices", "feature_alpha_dropout_"}
)
_DRAWS_IN_TRAINING = frozenset({"rrelu", "rrelu_"})


class Draws:
    """The random numbers of one call of a module.

    Invariant: `count` is how many draws the forward has made up to here; what runs again starts from the count that it
    had the first time.

    Attributes:
        count: the number of the next draw.
    """

    def __init__(self, module: nn.Module, key: Tensor | None = None, index_B: Tensor | None = None) -> None:
        self.count = 0
        self._module, self._key, self._index_B = module, key, index_B

    def handler(self, name: str) -> Callable[..., Any] | None:
        """What runs in place of the torch function of that name, called with it and its arguments."""
        if name in _DROPOUTS and not getattr(_INSIDE, "on", False):
            return functools.partial(_DROPOUTS[name], self)
        if name in _DRAWS or name in _DRAWS_IN_TRAINING:
            return functools.partial(self.refuse, name)
        return None

    @property
    def num_rows(self) -> int | None:
        """How many samples this rank has; None where there is no key."""
        return None if self._index_B is None else len(self._index_B)

    def drop(self, what: str, x: Tensor, p: float) -> Tensor:
        """`x` with zeros in place of some elements, and 1 / (1 - p) times the others.

        Raises:
            ValueError: there is no key, or dim 0 of `x` is not the rows.
        """
        key, index_B = self._next(what, p)
        if type(x) is LazyLeaf or x.dim() == 0 or x.shape[0] != len(index_B):
            raise ValueError(
                f"{what}(p={p}) in the forward of the module drops from a tensor of shape {tuple(x.shape)}, whose dim 0"
                f" is not the {len(index_B)} row(s) that index_B numbers, so its elements belong to no sample. Put the"
                " batch first (batch_first=True), or set this dropout to 0."
            )
        return x * 0 if p == 1 else dropout(key, x, p, index_B)

    def scales(self, what: str, like: Tensor, shape: Sequence[int], p: float) -> Tensor:
        """`drop` of ones of a shape."""
        return self.drop(what, torch.ones(tuple(shape), dtype=like.dtype, device=like.device), p)

    def _next(self, what: str, p: float) -> tuple[Tensor, Tensor]:
        if self._key is None or self._index_B is None:
            raise ValueError(
                f"{what}(p={p}) in the forward of the module{self._named()} would draw from torch's generator, by which"
                " all ranks get the same mask, or masks that depend on the number of ranks. Draw by a key:"
                f" {KEYED}; or go without: module.eval(), or p=0."
            )
        key = fold_in(self._key, self.count)
        self.count += 1
        return key, self._index_B

    def _named(self) -> str:
        found = [
            n for n, m in self._module.named_modules() if getattr(m, "p", 0) and m.training and "Drop" in str(type(m))
        ]
        return f" ({', '.join(found[:3])}{' and others' if len(found) > 3 else ''})" if found else ""

    def refuse(self, name: str, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses a draw, unless it is one number for all."""
        if name in _DRAWS_IN_TRAINING and not _trains(args, kwargs):
            return func(*args, **kwargs)
        if name == "rand" and kwargs.get("generator") is None and _is_scalar(args, kwargs):
            return self._scalar(kwargs)
        raise ValueError(
            f"the forward of the module draws from torch's generator ({name}), so its results would depend on the"
            " number of ranks, and what runs again in the backward would draw other numbers. Draw outside and pass the"
            " numbers with the batch, or turn off what draws (module.eval(), or its option in the model's"
            " configuration)."
        )

    def _scalar(self, kwargs: dict[str, Any]) -> Any:
        """A number for the whole batch, by which a forward decides on its path."""
        if self._key is None:
            return Undrawn(KEYED)
        key, _ = self._next("rand", 0.0)
        return uniform(key, (), dtype=kwargs.get("dtype") or torch.get_default_dtype(), device=kwargs.get("device"))


def _trains(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of `rrelu(input, lower, upper, training)`."""
    return bool(kwargs.get("training", args[3] if len(args) > 3 else False))


def _is_scalar(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    size = kwargs.get("size", args[0] if len(args) == 1 else args)
    return isinstance(size, list | tuple) and len(size) == 0


# What takes the place of torch's functions; each is called as the function is.


def _dropout(
    draws: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not training or p == 0 or not 0 <= p <= 1:
        return func(input, p, training)
    return _kept(input, draws.drop("dropout", input, p), inplace)


def _channels(name: str, dims: int) -> Callable[..., Any]:
    """Drops whole channels of [B, C, *dims]."""

    def drop(
        draws: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or p == 0 or not 0 <= p <= 1:
            return func(input, p, training)
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
        if dims and input.dim() != dims + 2:
            raise ValueError(f"{name}(p={p}) takes [B, C{', *' * dims}] inside apply, got shape {tuple(input.shape)}.")
        return _kept(input, input * draws.scales(name, input, shape, p), inplace)

    return drop


def _alpha(name: str, channels: bool) -> Callable[..., Any]:
    """Keeps mean and variance of what a SELU gives (Klambauer et al., 2017, https://arxiv.org/abs/1706.02515)."""

    def drop(
        draws: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Any:
        if not training or p == 0 or not 0 <= p <= 1:
            return func(input, p, training)
        if p == 1:
            return _kept(input, input * 0, inplace)
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if channels else input.shape
        keep = (draws.scales(name, input, shape, p) != 0).to(input.dtype)
        a = 1 / math.sqrt((_SELU_ALPHA**2 * p + 1) * (1 - p))
        return _kept(input, input * (keep * a) + (keep - 1) * (_SELU_ALPHA * a) + _SELU_ALPHA * a * p, inplace)

    return drop


def _kept(x: Tensor, out: Tensor, inplace: bool) -> Tensor:
    return x.copy_(out) if inplace else out


def _attention(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    return func(*args, **kwargs) if p == 0 else _inside("scaled_dot_product_attention", draws, func, args, kwargs)


def _multi_head(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    p = kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0)
    training = kwargs.get("training", args[13] if len(args) > 13 else True)
    if p == 0 or not training:
        return func(*args, **kwargs)
    return _inside("multi_head_attention_forward", draws, func, args, kwargs, parts=True)


def _recurrent(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    packed = isinstance(args[3], list | tuple)
    p, training, layers = (args[6], args[7], args[5]) if packed else (args[5], args[6], args[4])
    if p == 0 or not training or layers < 2:
        return func(*args, **kwargs)
    if packed:
        raise ValueError(
            f"{func.__name__}(dropout={p}) of a packed sequence drops from rows that belong to no sample; pad the"
            " sequences in place of packing them, or set dropout=0."
        )
    return _inside(func.__name__, draws, func, args, kwargs, dim=1)


def _inside(what: str, draws: Draws, func: Any, args: Any, kwargs: Any, *, dim: int = 0, parts: bool = False) -> Any:
    """Runs a function that drops within itself, in the form that is made of plain operations."""
    _INSIDE.on = True
    try:
        with sdpa_kernel(SDPBackend.MATH), _KeyedNoise(what, draws, dim, parts):
            return func(*args, **kwargs)
    finally:
        _INSIDE.on = False


_DROPOUTS: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "dropout1d": _channels("dropout1d", 1),
    "dropout2d": _channels("dropout2d", 2),
    "dropout3d": _channels("dropout3d", 3),
    "feature_dropout": _channels("feature_dropout", 0),
    "alpha_dropout": _alpha("alpha_dropout", channels=False),
    "feature_alpha_dropout": _alpha("feature_alpha_dropout", channels=True),
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
}


class _KeyedNoise(TorchDispatchMode):
    """Gives a function of torch keyed noise where it draws its own.

    Args:
        what: the function.
        draws: where the noise comes from.
        dim: which dim of the noise is the rows.
        parts: whether dim 0 is rows times something (heads), rows first.
    """

    def __init__(self, what: str, draws: Draws, dim: int, parts: bool) -> None:
        super().__init__()
        self._what, self._draws, self._dim, self._parts = what, draws, dim, parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is _aten.bernoulli_.float:
            return args[0].copy_(self._scales(args[0], 1 - args[1]) * args[1])
        if func is _aten.native_dropout.default and args[2]:
            x, p, _ = args
            scales = self._scales(x, p)
            return x * scales, scales != 0
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws.refuse(f"{func} in {self._what}", func)
        return func(*args, **(kwargs or {}))

    def _scales(self, x: Tensor, p: float) -> Tensor:
        shape = list(x.shape)
        shape.insert(0, shape.pop(self._dim))
        rows = self._draws.num_rows
        if self._parts and rows and shape[0] % rows == 0:
            return self._draws.scales(self._what, x, (rows, shape[0] // rows, *shape[1:]), p).reshape(x.shape)
        return self._draws.scales(self._what, x, shape, p).movedim(0, self._dim)
