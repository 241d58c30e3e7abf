"""Replacements of torch's dropouts, drawn by key, each called like the function of torch."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardfn._torch import TorchDispatchMode
from shardfn.core import Ambient

from ._draws import Draws

# A module around the caller of such a function sees the call as well.
_INSIDE = Ambient[None]("a function draws by key within itself", by_thread=True)
_aten: Any = torch.ops.aten
_SELU_ALPHA = 1.7580993408473766


def dropout_of(draws: Draws, name: str) -> Callable[..., Any] | None:
    """Returns the replacement of the named dropout of torch, or None for other names.

    Args:
        draws: source of masks.
        name: name of the function.
    """
    if name not in _DROPOUTS or _INSIDE:
        return None
    return functools.partial(_named_alike, _DROPOUTS[name], draws)


def _named_alike(dropout: Callable[..., Any], draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Renames the argument `train`, its name outside torch.nn.functional, to `training`."""
    if "train" in kwargs:
        kwargs["training"] = kwargs.pop("train")
    return dropout(draws, func, *args, **kwargs)


def _drop_elements(
    draws: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not training or p == 0 or not 0 <= p <= 1:
        return func(input, p, training)
    return _copy_inplace(input, draws.drop("dropout", input, p), inplace)


def _drop_channels(name: str, dims: int) -> Callable[..., Any]:
    """Drops whole channels of [B, C, *dims]."""

    def drop_values(
        draws: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or p == 0 or not 0 <= p <= 1:
            return func(input, p, training)
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
        if dims and input.dim() != dims + 2:
            raise ValueError(f"{name}(p={p}) takes [B, C{', *' * dims}] inside apply, got shape {tuple(input.shape)}.")
        return _copy_inplace(input, input * draws.scales(name, input, shape, p), inplace)

    return drop_values


def _drop_alpha(name: str, channels: bool) -> Callable[..., Any]:
    """Keeps mean and variance of a SELU's outputs (Klambauer et al., 2017, https://arxiv.org/abs/1706.02515)."""

    def drop_values(
        draws: Draws, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Any:
        if not training or p == 0 or not 0 <= p <= 1:
            return func(input, p, training)
        if p == 1:
            return _copy_inplace(input, input * 0, inplace)
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if channels else input.shape
        keep = (draws.scales(name, input, shape, p) != 0).to(input.dtype)
        a = 1 / math.sqrt((_SELU_ALPHA**2 * p + 1) * (1 - p))
        return _copy_inplace(input, input * (keep * a) + (keep - 1) * (_SELU_ALPHA * a) + _SELU_ALPHA * a * p, inplace)

    return drop_values


def _copy_inplace(x: Tensor, out: Tensor, inplace: bool) -> Tensor:
    return x.copy_(out) if inplace else out


def _drop_attention(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    return func(*args, **kwargs) if p == 0 else _run_inside("scaled_dot_product_attention", draws, func, args, kwargs)


def _multi_head(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    p = kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0)
    training = kwargs.get("training", args[13] if len(args) > 13 else True)
    if p == 0 or not training:
        return func(*args, **kwargs)
    return _run_inside("multi_head_attention_forward", draws, func, args, kwargs, parts=True)


def _drop_recurrent(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    packed = isinstance(args[3], list | tuple)
    p, training, layers = (args[6], args[7], args[5]) if packed else (args[5], args[6], args[4])
    if p == 0 or not training or layers < 2:
        return func(*args, **kwargs)
    if packed:
        raise ValueError(
            f"{func.__name__}(dropout={p}) cannot drop from a packed sequence, whose rows belong to no sample. Pad the"
            " sequences instead, or set dropout=0."
        )
    return _run_inside(func.__name__, draws, func, args, kwargs, dim=1)


def _run_inside(
    what: str, draws: Draws, func: Any, args: Any, kwargs: Any, *, dim: int = 0, parts: bool = False
) -> Any:
    """Runs a function with a dropout inside, in the form of plain operations."""
    with _INSIDE.bound(None), sdpa_kernel(SDPBackend.MATH), _KeyedNoise(what, draws, dim, parts):
        return func(*args, **kwargs)


class _KeyedNoise(TorchDispatchMode):
    """Gives a function of torch keyed noise in place of drawn noise.

    Args:
        what: name of the function.
        draws: source of the noise.
        dim: dim of the rows in the noise.
        parts: whether dim 0 is rows times another size (heads), rows first.
    """

    def __init__(self, what: str, draws: Draws, dim: int, parts: bool) -> None:
        super().__init__()
        self._what, self._draws, self._dim, self._parts = what, draws, dim, parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is _aten.bernoulli_.float:
            keep = args[1] if len(args) > 1 else 0.5  # torch leaves out an argument that equals its default
            return args[0].copy_(self._draw_scales(args[0], 1 - keep) * keep)
        if func is _aten.native_dropout.default and args[2]:
            x, p, _ = args
            scales = self._draw_scales(x, p)
            return x * scales, scales != 0
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws.refuse(f"{func} in {self._what}", func)
        return func(*args, **(kwargs or {}))

    def _draw_scales(self, x: Tensor, p: float) -> Tensor:
        shape = list(x.shape)
        shape.insert(0, shape.pop(self._dim))
        rows = self._draws.num_rows
        if self._parts and rows and shape[0] % rows == 0:
            return self._draws.scales(self._what, x, (rows, shape[0] // rows, *shape[1:]), p).reshape(x.shape)
        return self._draws.scales(self._what, x, shape, p).movedim(0, self._dim)


_DROPOUTS: dict[str, Callable[..., Any]] = {
    "dropout": _drop_elements,
    "dropout1d": _drop_channels("dropout1d", 1),
    "dropout2d": _drop_channels("dropout2d", 2),
    "dropout3d": _drop_channels("dropout3d", 3),
    "feature_dropout": _drop_channels("feature_dropout", 0),
    "alpha_dropout": _drop_alpha("alpha_dropout", channels=False),
    "feature_alpha_dropout": _drop_alpha("feature_alpha_dropout", channels=True),
    "scaled_dot_product_attention": _drop_attention,
    "multi_head_attention_forward": _multi_head,
    "lstm": _drop_recurrent,
    "gru": _drop_recurrent,
    "rnn_tanh": _drop_recurrent,
    "rnn_relu": _drop_recurrent,
}
