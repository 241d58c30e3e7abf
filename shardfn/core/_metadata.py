"""`MetadataTensor`: the base of tensors whose metadata is free and whose values are not."""

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from shardfn._torch import DisableTorchFunctionSubclass, make_wrapper_subclass

_TENSOR: Any = Tensor
T = TypeVar("T", bound="MetadataTensor")
# The functions of torch that read no element. `is_leaf` and the like describe the tensor without values.
METADATA = frozenset(
    {
        getattr(_TENSOR, name).__get__
        for name in (
            *("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "names"),
            *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
            *("requires_grad", "is_leaf", "grad", "grad_fn", "_backward_hooks"),
        )
        if hasattr(getattr(_TENSOR, name, None), "__get__")
    }
    | {
        *(_TENSOR.size, _TENSOR.dim, _TENSOR.ndimension, _TENSOR.numel, _TENSOR.nelement, _TENSOR.element_size),
        *(_TENSOR.stride, _TENSOR.is_contiguous, _TENSOR.storage_offset, _TENSOR.get_device),
        *(_TENSOR.is_floating_point, _TENSOR.is_complex, _TENSOR.__len__, _TENSOR.__hash__),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    }
)


class MetadataTensor(Tensor):
    """Tensor without memory: functions of `METADATA` are answered, all other functions go to `on_values`. Abstract.

    Attributes:
        computed: functions of `METADATA` that go to `on_values` all the same.
    """

    computed: ClassVar[frozenset[Any]] = frozenset()

    @classmethod
    def empty(
        cls: type[T],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int] | None = None,
        offset: int | torch.SymInt | None = None,
    ) -> T:
        """Returns a tensor of a shape, dtype and device, contiguous where no strides are given."""
        return make_wrapper_subclass(cls, tuple(shape), strides, offset, dtype=dtype, device=device)

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a function of torch on such tensors. The function may read values."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in METADATA and func not in cls.computed:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.on_values(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op that bypassed `__torch_function__`."""
        del types
        return cls.on_values(func, args, kwargs or {})
