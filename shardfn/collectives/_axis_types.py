"""The axes along which each value varies, followed operation by operation while a function over blocks runs.

A value is invariant along an axis if all ranks there hold the same value, and varies otherwise. `AxisTypeMode` keeps
the set of axes of every tensor, as JAX's `shard_map` does:

    operation       varies along the union of the axes of its operands; an operand that requires a gradient and lacks
                    some of them is cast first, by `pvary`, whose transpose is the sum
    collective      its operand is cast likewise; the result is invariant along its axes after `psum`, `pmax` and
                    `all_gather_invariant`, and varies there after the others
    `pvary`         refuses a value that requires a gradient and varies already: its gradient would be summed twice
    in-place write  the tensor that is written varies along the union

The axes are an attribute of the tensor object, a number whose high bits name the `AxisTypeMode` that set them. Tensors
without it vary along the default axes. Python numbers carry no axes, with the exception of `axis_index`.

References: JAX, `shard_map` and its `check_vma` (JEP 14273).
"""

import contextlib
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import DisableTorchFunctionSubclass, functorch, transforming
from shardfn.core import Mesh

from ._axis_group import axis_group_along
from ._axis_index import AxisNumber, AxisTypeError, with_plain_numbers
from ._function_modes import NotingMode, interception
from ._primitive import Call, bind, copy_own_block

# The attribute of a tensor with the axes.
NOTED = "_shardfn_axes"
_MADE_AT = "_shardfn_made_at"
_BITS = 16
_CARRY_NOTHING = {int, float, bool, str, type(None), torch.dtype, torch.device, type(...), torch.layout}
_STAMPS = itertools.count(1)
# The primitives with equal results on all ranks.
_JOINS = ("psum", "pmax", "all_gather_invariant")


class AxisTypeMode(NotingMode):
    """Follows the axes along which values vary, and inserts the casts; entered as a context.

    Args:
        mesh: the mesh, which must be bound while the context is open.
        axes: the axes to follow. Ranks along other axes are not followed.
        default: the axes along which tensors from outside vary.
        batch: the axes that cut the batch, over which the mean of a loss is taken. Default: the same.

    Attributes:
        axes: the followed axes with several ranks.
        batch: the batch's axes with several ranks.
    """

    def __init__(
        self, mesh: Mesh, axes: Iterable[str], default: Iterable[str] = (), batch: Iterable[str] | None = None
    ) -> None:
        super().__init__()
        self.axes = tuple(a for a in axes if mesh.axis_size(a) > 1)
        if len(self.axes) > _BITS:
            raise ValueError(f"a mesh of more than {_BITS} axes: {self.axes}.")
        self._bit = {a: 1 << i for i, a in enumerate(self.axes)}
        self._stamp = next(_STAMPS) << _BITS
        self._default = self._mask_of(default)
        self.batch = tuple(a for a in (default if batch is None else batch) if a in self._bit)
        self._names: dict[int, tuple[str, ...]] = {}
        self._wrote = False
        self._around: list[Any] = []

    def __enter__(self) -> "AxisTypeMode":
        """Starts to track differences between ranks by mesh axis."""
        around = interception()
        around.__enter__()
        self._around.append(around)
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """Stops tracking the axes."""
        super().__exit__(*failure)
        self._around.pop().__exit__(None, None, None)

    def axes_of(self, x: Tensor) -> tuple[str, ...]:
        """Returns the axes along which a tensor varies."""
        return self._names_of(self._mask_of_tensor(x))

    def declare(self, x: Tensor, axes: Iterable[str]) -> Tensor:
        """Notes that a tensor varies exactly along `axes`, and returns the tensor."""
        self._note_mask(x, self._mask_of(axes))
        return x

    def cast(self, x: Tensor, axes: Iterable[str]) -> Tensor:
        """Returns the tensor as varying along `axes`, too."""
        missing = self._mask_of(axes) & ~self._mask_of_tensor(x)
        return self._cast_missing(x, missing) if missing and _is_differentiable(x) else x

    def origin(self, x: Tensor) -> str:
        """Returns a text with the line of code that made a tensor."""
        code, line = x.__dict__.get(_MADE_AT, (None, 0))
        return "" if code is None else f", made at {code.co_filename}:{line}"

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, after casts of operands to the same axes."""
        del kinds
        rule = _find_rule(func)
        if rule is not None:
            return rule(self, func, args, kwargs or {})
        return self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation of any kind, which varies along the union of the operands' axes."""
        union, numbered = None if kwargs or self._wrote else self._common_mask(args), False
        if union is None:
            given = args, kwargs
            union, unlike, args, kwargs = self._union_mask(args, kwargs)
            numbered = args is not given[0]
            if unlike and _recording_gradients():
                args, kwargs = self._cast_operand(args, union), self._cast_operand(kwargs, union)
        out = func(*args, **kwargs)
        self._note_result(out, union, sys._getframe(2))
        return AxisNumber(out, self._names_of(union)) if numbered and type(out) in (bool, int, float) else out

    # Masks: bit i is the i-th axis.

    def _mask_of(self, axes: Iterable[str]) -> int:
        mask = 0
        for a in axes:
            mask |= self._bit.get(a, 0)
        return mask

    def _names_of(self, mask: int) -> tuple[str, ...]:
        if mask not in self._names:
            self._names[mask] = tuple(a for a in self.axes if self._bit[a] & mask)
        return self._names[mask]

    def _mask_of_tensor(self, x: Tensor) -> int:
        noted = x.__dict__.get(NOTED, 0) ^ self._stamp
        mask = noted if noted >> _BITS == 0 else self._inherit_mask(x)
        if self._wrote and (base := _base_of(x)) is not None:
            mask |= self._mask_of_tensor(base)
        return mask

    def _inherit_mask(self, x: Tensor) -> int:
        """Returns the axes of a tensor that was made past this mode: a wrapper of torch.func, a view."""
        if functorch.is_functorch_wrapped_tensor(x):
            return self._mask_of_tensor(functorch.get_unwrapped(x))
        base = _base_of(x)
        return self._default if base is None else self._mask_of_tensor(base)

    def _common_mask(self, args: Any) -> int | None:
        """Returns the common axes of operands that all have the same axes (the usual case), else None."""
        stamp, common = self._stamp, None
        for a in args:
            if isinstance(a, Tensor):
                mask = a.__dict__.get(NOTED, 0) ^ stamp
                if mask >> _BITS or (mask != common and common is not None):
                    return None
                common = mask
            elif type(a) not in _CARRY_NOTHING and not (type(a) in (tuple, slice) and _carries_nothing(a)):
                return None
        return common

    def _union_mask(self, args: Any, kwargs: Any) -> tuple[int, bool, Any, Any]:
        """Returns the axes of all operands together, whether they differ, and the operands with plain numbers."""
        masks: list[int] = []
        numbers = [self._collect_masks(x, masks) for x in (*args, *kwargs.values())]
        union = 0
        for m in masks:
            union |= m
        if any(numbers):
            args, kwargs = with_plain_numbers(args), with_plain_numbers(kwargs)
        return union, any(m != union for m in masks), args, kwargs

    def _collect_masks(self, x: Any, into: list[int]) -> bool:
        """Collects the axes of an operand, and returns whether the operand has numbers that remember axes."""
        kind = type(x)
        if kind is Tensor or isinstance(x, Tensor):
            into.append(self._mask_of_tensor(x))
        elif kind is tuple or kind is list or kind is torch.Size:
            return any([self._collect_masks(y, into) for y in x])
        elif kind is AxisNumber:
            into.append(self._mask_of(x.axes))
            return True
        elif kind is slice:
            return self._collect_masks((x.start, x.stop, x.step), into)
        elif kind is dict:
            return self._collect_masks([*x.values()], into)
        return False

    def _note_mask(self, x: Tensor, mask: int) -> None:
        setattr(x, NOTED, self._stamp | mask)
        if transforming():
            while functorch.is_functorch_wrapped_tensor(x):
                x = functorch.get_unwrapped(x)
                setattr(x, NOTED, self._stamp | mask)

    def _note_result(self, out: Any, mask: int, frame: Any) -> None:
        if isinstance(out, Tensor):
            self._note_mask(out, mask)
            if mask and _MADE_AT not in out.__dict__:
                while _is_inside(frame):
                    frame = frame.f_back
                setattr(out, _MADE_AT, (frame.f_code, frame.f_lineno))
        elif isinstance(out, (tuple, list)):
            for x in out:
                self._note_result(x, mask, frame)

    # Casts.

    def _cast_missing(self, x: Tensor, missing: int) -> Tensor:
        return self._bind_primitive(x, "pvary", missing, self._mask_of_tensor(x) | missing)

    def _bind_primitive(self, x: Tensor, name: str, over: int, mask: int) -> Tensor:
        line = axis_group_along(self._names_of(over))
        assert line is not None
        out = bind(x, Call(name, line))
        self._note_mask(out, mask)
        return out

    def _cast_operand(self, x: Any, union: int) -> Any:
        """Returns an operand, or a container of operands, with casts along missing axes."""
        if isinstance(x, Tensor):
            missing = union & ~self._mask_of_tensor(x)
            return self._cast_missing(x, missing) if missing and _is_differentiable(x) else x
        kind = type(x)
        if kind is dict:
            return {k: self._cast_operand(y, union) for k, y in x.items()}
        if kind is tuple or kind is list:
            return kind(self._cast_operand(y, union) for y in x)
        return x

    # Rules of operations that differ.

    def collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of a primitive of the table."""
        x, call = (*args, *kwargs.values())
        has, over = self._mask_of_tensor(x), self._mask_of(call.line.axes)
        self.crossed.update(call.line.axes)
        if call.name == "pvary" and has & over and (_is_differentiable(x) or not self._default):
            named = ", ".join(map(repr, self._names_of(has & over)))
            raise AxisTypeError(
                f"{_line_of_user()}pvary over {named} of a value of shape {tuple(x.shape)} that varies there"
                f" already{self.origin(x)}: each rank's gradient would be the sum of all ranks'. Leave out this pvary:"
                " where a value that is the same on all ranks meets one that is not, the cast is inserted. Or sum the"
                " value first, with sf.psum. (Along an axis that cuts the batch parameters vary from the beginning.)"
            )
        if call.name == "psum" and has & over and over & ~has:
            rest = ", ".join(map(repr, self._names_of(over & ~has)))
            raise AxisTypeError(
                f"{_line_of_user()}psum over {', '.join(map(repr, call.line.axes))} of a value of shape"
                f" {tuple(x.shape)} that is the same along {rest}{self.origin(x)}: it would be counted once a rank"
                f" there. Leave {rest} out of the psum, or pass the value through sf.pvary(x, {rest}) first."
            )
        if call.name == "take_own_block" and has & over:
            out = copy_own_block(x, call)  # the block of a varying value is an ordinary slice
        else:
            missing = over & ~has
            if missing and call.name not in ("pvary", "take_own_block") and _is_differentiable(x):
                if _recording_gradients():
                    x = self._cast_missing(x, missing)
            out = func(x, call)
        self._note_result(out, has & ~over if call.name in _JOINS else has | over, sys._getframe(2))
        return out

    def in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Writes to the first operand, which varies along the union afterwards."""
        union, unlike, args, kwargs = self._union_mask(args, kwargs)
        target = args[0]
        if not unlike or not isinstance(target, Tensor):
            return self.operation(func, args, kwargs)
        rest, kwargs, base = self._cast_operand(args[1:], union), self._cast_operand(kwargs, union), _base_of(target)
        owner = target if base is None else base
        missing = union & ~self._mask_of_tensor(owner)
        if missing and _is_differentiable(owner) and _recording_gradients():
            owner.copy_(self._cast_missing(owner, missing).clone())  # the previous values count as varying, too
        out = func(target, *rest, **kwargs)
        self._wrote = True
        for x in (target, owner):
            self._note_mask(x, union | self._mask_of_tensor(x))
        return out

    def first_alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation that reads only shape or dtype of further operands, such as `type_as`."""
        out = func(*args, **kwargs)
        self._note_result(out, self._mask_of_tensor(args[0]) if isinstance(args[0], Tensor) else 0, sys._getframe(2))
        return out

    def constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation that reads only the shape of the first operand, such as `new_zeros`.

        Other operands are numbers, or data to copy.
        """
        first = args[0] if args else kwargs["input"]
        union, _, rest, kwargs = self._union_mask(args[1:], {k: x for k, x in kwargs.items() if k != "input"})
        out = func(first, *rest, **kwargs)
        self._note_result(out, union, sys._getframe(2))
        return out

    def each(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the results of an operation that only reshapes each operand."""
        out = func(*args, **kwargs)
        given = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        for x, y in zip(out, given, strict=True):
            self._note_mask(x, self._mask_of_tensor(y))
        return out

    def gradient(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of `torch.autograd.grad`. Each gradient varies along the axes of the input."""
        out = func(*args, **kwargs)
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        for g, x in zip(out, [inputs] if isinstance(inputs, Tensor) else inputs, strict=True):
            if g is not None:
                self._note_mask(g, self._mask_of_tensor(x))
        return out


Rule = Callable[[AxisTypeMode, Any, Any, Any], Any]
_RULES: dict[Any, Rule | None] = {
    bind: AxisTypeMode.collective,
    torch.autograd.grad: AxisTypeMode.gradient,
    torch.broadcast_tensors: AxisTypeMode.each,
    **{
        getattr(Tensor, name): AxisTypeMode.first_alone
        for name in ("to", "type_as", "expand_as", "view_as", "reshape_as", "requires_grad_", "retain_grad")
    },
    **{getattr(torch, f"{name}_like"): AxisTypeMode.constant for name in ("zeros", "ones", "full", "empty")},
    **{getattr(Tensor, f"new_{name}"): AxisTypeMode.constant for name in ("zeros", "ones", "full", "empty", "tensor")},
}
_WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__")
_MOST_RULES = 4096


def _find_rule(func: Any) -> Rule | None:
    try:
        return _RULES[func]
    except KeyError:
        name = getattr(func, "__name__", "")
        writes = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
        rule = AxisTypeMode.in_place if writes else None
        if len(_RULES) < _MOST_RULES:
            _RULES[func] = rule
        return rule


def _line_of_user() -> str:
    frame: Any = sys._getframe(1)
    while _is_inside(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}: "


def _is_inside(frame: Any) -> bool:
    """Returns whether a frame belongs to torch or this package, not to the user."""
    known = _CODES.get(frame.f_code)
    if known is None:
        file = frame.f_code.co_filename
        known = frame.f_back is not None and (file.startswith(_INSIDE) or file[0] == "<")
        if len(_CODES) < _MOST_CODES:
            _CODES[frame.f_code] = known
    return known


_INSIDE = *(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__))), contextlib.__file__
_CODES: dict[types.CodeType, bool] = {}
_MOST_CODES = 16384


def _carries_nothing(index: Any) -> bool:
    """Returns whether an index has neither tensors nor numbers that remember axes."""
    parts = index if type(index) is tuple else (index.start, index.stop, index.step)
    return all(type(x) in _CARRY_NOTHING or (type(x) is slice and _carries_nothing(x)) for x in parts)


def _base_of(x: Tensor) -> Tensor | None:
    """Returns the tensor that a view shows."""
    with DisableTorchFunctionSubclass():  # a lazy leaf must stay closed here
        return x._base if x._is_view() else None


def _recording_gradients() -> bool:
    return torch.is_grad_enabled() or transforming()


def _is_differentiable(x: Tensor) -> bool:
    """Returns whether a gradient may be wanted.

    Inside torch.func any tensor of floats may have a tangent at an outer level.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return False
    return x.requires_grad or transforming()
