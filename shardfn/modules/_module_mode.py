"""Watches a module that runs with parameters from outside: sees each function of torch before it runs.

A forward must be a function of parameters, inputs and key, with the same meaning on every number of ranks. Other
functions are refused by name, in eager steps and in captures. Dropout is drawn by the key. The rest runs unchanged.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn._torch import parse_to
from shardfn.core import Axes
from shardfn.leaves import LazyLeaf

from ._module_buffers import Buffers, has_storage, tensors_of, writes
from ._module_checks import BY_FREQUENCY, MAX_NORM
from ._module_draws import Draws
from ._module_dropouts import dropout_of
from ._module_parts import Placed, TensorSlot
from ._module_statistics import global_batch_norm


class ModuleMode(TorchFunctionMode):
    """Sees each call of a torch function in a module's forward.

    Args:
        placed: module with the given tensors.
        draws: source of random numbers.
        state: buffers that the forward may change.
        axis: axes along which ranks hold other rows of the batch, with `state`.
    """

    def __init__(
        self, placed: Placed, draws: Draws, state: frozenset[TensorSlot] | None = None, axis: Axes = None
    ) -> None:
        super().__init__()
        self._own, self._buffers, self._draws = placed.own, Buffers(placed, state or frozenset()), draws
        self._batch_norm = None if state is None else global_batch_norm(axis)
        self._given = placed.given.params
        # Tensors made only of parameters, by identity: parameters and views. None is kept alive.
        self._of_params: dict[int, Callable[[], Any]] = {id(p): weakref.ref(p) for p in self._given.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function, or refuses a function that a forward must not call."""
        del types
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):  # x.T, x.data
                self._check_params("a view", args)
                self._buffers.shown(args[0], out)
            return out
        if name == "__set__":
            return self._set_attribute(func, *args)
        overwrites = bool(args) and self._buffers.overwrites(name, args[0])
        self._check_params(name, (args[1:] if overwrites else args, tuple(kwargs.values())))
        if overwrites:
            return self._buffers.overwrite(func, *args, **kwargs)
        if kwargs.get("out") is not None or writes(name):
            written = (args or tuple(kwargs.values()))[:1] if writes(name) else ()  # nn.init passes the tensor by name
            self._buffers.check_write(name, (written, kwargs.get("out", ())))
        # A lazy leaf need not be gathered for a conversion to the same dtype and device.
        if name == "to" and type(args[0]) is LazyLeaf and _is_unchanged(*args, **kwargs):
            return args[0]
        handler = None if func is F.batch_norm and self._is_of_params(args) else self._find_handler(func)
        handler = handler or dropout_of(self._draws, name) or self._draws.handler(name)
        out = func(*args, **kwargs) if handler is None else handler(func, *args, **kwargs)
        if args:
            self._buffers.converted(name, args[0], out)
            if name in _VIEWS and self._is_of_params(args):
                # By identity and weakly: a reused id is detected, and no whole leaf is kept.
                self._of_params[id(out)] = weakref.ref(out)
        return out

    def _find_handler(self, func: Any) -> Any:
        return self._batch_norm if func is F.batch_norm and self._batch_norm is not None else _HANDLERS.get(func)

    def _is_of_params(self, args: tuple[Any, ...]) -> bool:
        """Returns whether the first argument is a parameter or a view of a parameter."""
        known = self._of_params.get(id(args[0])) if args else None
        return known is not None and known() is args[0]

    def check(self) -> None:
        """Refuses state that the forward has left in buffers, at the end of the forward.

        Raises:
            ValueError: names the buffer, and the remedy.
        """
        self._buffers.check()

    def _set_attribute(self, func: Any, x: Any, *value: Any) -> Any:
        if func == _SET_DATA:
            if _is_same_memory(x, *value):
                return None
            self._buffers.check_data(x)
            if path := next((path for path, p in self._given.items() if p is x), None):
                raise ValueError(
                    f"the forward of the module gives its parameter {path!r} other memory (.data = ...), which the step"
                    " would not keep. Compute a new tensor, or convert the module before from_module."
                )
        return func(x, *value)

    def _check_params(self, name: str, given: Any) -> None:
        for x in tensors_of(given):
            if id(x) in self._own:
                raise ValueError(
                    f"the forward of the module gives {name} its own parameter {self._own[id(x)]!r} in place of the one"
                    " that the step trains, so it has that by another way than its name (a list, a function, a hook)."
                    " Take it by its name."
                )
            self._buffers.see(name, x)


_VIEWS = frozenset({"reshape", "view", "flatten", "unsqueeze", "to", "float", "double"})
_SET_DATA: Any = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


def _is_same_memory(x: Any, new: Any) -> bool:
    """Returns whether `x.data = new` changes nothing."""
    if x is new:
        return True
    plain = isinstance(new, Tensor) and has_storage(x) and has_storage(new)
    return plain and new.dtype == x.dtype and new.is_set_to(x)


def _is_unchanged(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Returns whether `x.to(...)` is x."""
    if kwargs.pop("copy", False):
        return False
    device, dtype, _, memory_format = parse_to(*args, **kwargs)
    return dtype in (None, x.dtype) and device in (None, x.device) and memory_format is None


def _embed_dense(
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Gives a dense gradient with the same values where a sparse one is requested."""
    del sparse
    _check_embedding("embedding", max_norm, scale_grad_by_freq)
    return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, False)


def _embedding_bag(
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    del sparse
    _check_embedding("embedding_bag", max_norm, scale_grad_by_freq)
    return func(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, False, *args, **kwargs)


def _check_embedding(name: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    if max_norm is not None:
        raise ValueError(f"{name}(max_norm={max_norm}) in the forward of the module: {MAX_NORM}.")
    if scale_grad_by_freq:
        raise ValueError(f"{name}(scale_grad_by_freq=True) in the forward of the module: {BY_FREQUENCY}.")


def _batch_norm(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    if training:
        raise ValueError(
            "batch_norm in training normalises by the mean and the variance of this rank's rows, which depend on the"
            " number of ranks. Let it use its statistics as constants: eval() of that layer (which has some, if"
            " track_running_stats=True); or use a layer that normalises each sample, such as GroupNorm or LayerNorm;"
            " or hand its statistics on, over the rows of all ranks: from_module(module, has_state=True)."
        )
    return func(*args, **kwargs)


def _instance_norm(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    at = 1 if func is F.instance_norm else 3  # torch.instance_norm has weight and bias first
    running = kwargs.get("running_mean", args[at] if len(args) > at else None)
    used = kwargs.get("use_input_stats", args[5] if len(args) > 5 else True)
    if running is not None and used:
        raise ValueError(
            "instance_norm in training changes its running statistics, by this rank's rows. Build the layer with"
            " track_running_stats=False, or make the statistics constants: eval() of that layer."
        )
    return func(*args, **kwargs)


def _plain_embedding(
    func: Any, weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, *sparse: Any
) -> Tensor:
    """Runs `torch.embedding`, with other arguments than torch.nn.functional's."""
    del sparse
    _check_embedding("embedding", None, scale_grad_by_freq)
    return func(weight, indices, padding_idx, scale_grad_by_freq, False)


def _plain_embedding_bag(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `torch.embedding_bag`, with other arguments than torch.nn.functional's."""
    _check_embedding("embedding_bag", None, bool(kwargs.get("scale_grad_by_freq", args[3] if len(args) > 3 else False)))
    return func(*args, **kwargs)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.embedding: _embed_dense,
    F.embedding_bag: _embedding_bag,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    torch.embedding: _plain_embedding,
    torch.embedding_bag: _plain_embedding_bag,
    torch.instance_norm: _instance_norm,
    torch.native_batch_norm: _batch_norm,
}
