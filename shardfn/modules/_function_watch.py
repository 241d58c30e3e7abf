"""Watches a module that runs with parameters from outside: sees each function of torch before it runs.

A forward must be a function of parameters, inputs and key, with the same meaning on every number of ranks. Other
functions are refused by name, in eager steps and in captures. Dropout is drawn by the key. The rest runs unchanged.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn._torch import parse_to
from shardfn.collectives import axis_size, psum, pvary
from shardfn.core import Axes
from shardfn.leaves import LazyLeaf

from ._buffers import Buffers, has_storage, tensors_of, writes
from ._call import ModuleRun, Replacement
from ._checks import BY_FREQUENCY, MAX_NORM
from ._draws import Draws
from ._dropouts import dropout_of
from ._given_tensors import Placed, TensorSlot


class FunctionWatch(Replacement):
    """Runs a forward under `ModuleMode`.

    Args:
        axis: axes along which ranks hold other rows of the batch, for a module with a state.
    """

    order = 90

    def __init__(self, axis: Axes = None) -> None:
        self._axis = axis

    @contextlib.contextmanager
    def running(self, run: ModuleRun) -> Iterator[None]:
        """Watches functions while open. Without an error, refuses state that the forward has left in the module."""
        mode = ModuleMode(run.placed, run.call.draws, run.state, self._axis)
        with mode:
            yield
        if assigned := run.placed.assigned_params():
            raise ValueError(
                f"the forward of the module must not assign parameters, got {', '.join(assigned)}, which the step keeps"
                " and trains. Give its result another name, or convert the module before from_module."
            )
        mode.check()


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
                    f"the forward of the module gives {name} the parameter {self._own[id(x)]!r} of the module instead"
                    " of the parameter that the step trains. The forward has found the parameter in another place,"
                    " such as a list, a function or a hook. Read the parameter by its name."
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
    """Gives a dense gradient with the same values where a sparse gradient is requested."""
    del sparse
    _check_embedding("embedding", max_norm, scale_grad_by_freq)
    return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, False)


def _run_embedding_bag(
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


def _refuse_batch_norm(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    if training:
        raise ValueError(
            "batch_norm in training normalises by the mean and the variance of this rank's rows, which depend on the"
            " number of ranks. Let it use its statistics as constants: eval() of that layer (which has some, if"
            " track_running_stats=True); or use a layer that normalises each sample, such as GroupNorm or LayerNorm;"
            " or hand its statistics on, over the rows of all ranks: from_module(module, has_state=True)."
        )
    return func(*args, **kwargs)


def _refuse_instance_norm(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    at = 1 if func is F.instance_norm else 3  # torch.instance_norm has weight and bias first
    running = kwargs.get("running_mean", args[at] if len(args) > at else None)
    used = kwargs.get("use_input_stats", args[5] if len(args) > 5 else True)
    if running is not None and used:
        raise ValueError(
            "instance_norm in training changes its running statistics, by this rank's rows. Build the layer with"
            " track_running_stats=False, or make the statistics constants: eval() of that layer."
        )
    return func(*args, **kwargs)


def _run_plain_embedding(
    func: Any, weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, *sparse: Any
) -> Tensor:
    """Runs `torch.embedding`, with other arguments than torch.nn.functional's."""
    del sparse
    _check_embedding("embedding", None, scale_grad_by_freq)
    return func(weight, indices, padding_idx, scale_grad_by_freq, False)


def _run_plain_embedding_bag(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `torch.embedding_bag`, with other arguments than torch.nn.functional's."""
    _check_embedding("embedding_bag", None, bool(kwargs.get("scale_grad_by_freq", args[3] if len(args) > 3 else False)))
    return func(*args, **kwargs)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.embedding: _embed_dense,
    F.embedding_bag: _run_embedding_bag,
    F.batch_norm: _refuse_batch_norm,
    torch.batch_norm: _refuse_batch_norm,
    F.instance_norm: _refuse_instance_norm,
    torch.embedding: _run_plain_embedding,
    torch.embedding_bag: _run_plain_embedding_bag,
    torch.instance_norm: _refuse_instance_norm,
    torch.native_batch_norm: _refuse_batch_norm,
}


def global_batch_norm(axis: Axes) -> Callable[..., Tensor]:
    """Returns the replacement of `batch_norm` where ranks along `axis` hold parts of the batch.

    Mean and variance are over all rows, for any number of rows per rank, for example 3, 2 and 2. Gradients of mean and
    variance are summed over ranks, since every rank's output depends on both. Sums are taken in float32 at least.
    Running statistics keep their dtype.
    """
    return functools.partial(_normalize_rows, axis)


def _normalize_rows(
    axis: Axes,
    func: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    count = input.numel() // max(1, input.shape[1])
    if axis_size(axis) == 1 and count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    over = [d for d in range(x.ndim) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(x.ndim)]
    num = psum(torch.tensor(float(count), dtype=x.dtype, device=x.device), axis)
    mean = psum(x.sum(over), axis) / num
    centred = x - pvary(mean, axis).view(shape)
    var = psum(centred.square().sum(over), axis) / num
    _update_running(running_mean, running_var, mean.detach(), (var * (num / (num - 1).clamp(min=1))).detach(), momentum)
    out = centred * torch.rsqrt(pvary(var, axis) + eps).view(shape)
    for scale, op in ((weight, torch.mul), (bias, torch.add)):
        out = out if scale is None else op(out, scale.to(x.dtype).view(shape))
    return out.to(input.dtype)


def _update_running(
    mean: Tensor | None, var: Tensor | None, new_mean: Tensor, new_var: Tensor, momentum: float
) -> None:
    """Updates the running statistics, which are buffers of this call."""
    for old, new in ((mean, new_mean), (var, new_var)):
        if old is not None:
            old.mul_(1 - momentum).add_(momentum * new.to(old.dtype))
