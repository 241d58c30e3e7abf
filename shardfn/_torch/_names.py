"""Parts of torch without a public name, for all of the package: a new minor of torch is checked here.

Every name exists in torch 2.11 to 2.14 unless the name's line says otherwise. Modules with an import of seconds, such
as inductor and dynamo, are imported on use.
"""

import ctypes
import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._guards import tracing as tracing
from torch._library.autograd import Info as AutogradInfo
from torch._library.autograd import make_autograd_impl as make_autograd_impl
from torch._ops import OpOverload as OpOverload
from torch._prims_common import (
    compute_elementwise_output_strides as compute_elementwise_output_strides,
)
from torch._prims_common import (
    make_contiguous_strides_for as make_contiguous_strides_for,
)
from torch._prims_common import (
    suggest_memory_format as suggest_memory_format,
)

# Tensors without data, and the errors of ops with results that depend on values.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
)
from torch._subclasses.fake_tensor import (
    FakeTensorMode as FakeTensorMode,
)
from torch.autograd import forward_ad, profiler

# A graph without code that is compiled at the first call.
from torch.fx._lazy_graph_module import (
    _make_graph_module as make_graph_module,
)
from torch.fx._lazy_graph_module import (
    _use_lazy_graph_module as use_lazy_graph_module,
)
from torch.fx.experimental.proxy_tensor import _ProxyTensor as ProxyTensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack as function_modes

# Modes that see every op; torch's own registry of trees.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
)
from torch.utils._python_dispatch import (
    _disable_current_modes as disable_current_modes,
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as dispatch_modes,
)

__all__ = [
    "AutogradInfo",
    "BatchNorm",
    "ConvNd",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "ProxyTensor",
    "TorchDispatchMode",
    "TracingContext",
    "compute_elementwise_output_strides",
    "detect_fake_mode",
    "disable_current_modes",
    "dispatch_modes",
    "function_modes",
    "has_kernel_for_dispatch_key",
    "make_contiguous_strides_for",
    "make_graph_module",
    "pytree",
    "suggest_memory_format",
    "tracing",
    "use_lazy_graph_module",
]

from ._version import minor_of

# Kernels for a list of leaves, one launch each.
foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sign = torch._foreach_sign
foreach_sqrt = torch._foreach_sqrt
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_

_C: Any = torch._C

# The running transforms of `torch.func`, and the wrapped values.
functorch: Any = _C._functorch
is_functorch_wrapped_tensor: Any = functorch.is_functorch_wrapped_tensor
maybe_get_level: Any = functorch.maybe_get_level
peek_interpreter_stack: Any = functorch.peek_interpreter_stack
transforming: Any = _C._are_functorch_transforms_active
DisableFuncTorch: Any = _C._DisableFuncTorch

# Subclasses of tensors and modes, hidden for a while; the stacks of modes.
DisableTorchFunctionSubclass: Any = _C.DisableTorchFunctionSubclass
DisableTorchDispatch: Any = _C._DisableTorchDispatch
num_function_modes: Any = _C._len_torch_function_stack
pop_function_mode: Any = _C._pop_torch_function_stack
push_function_mode: Any = _C._push_on_torch_function_stack
num_dispatch_modes: Any = _C._len_torch_dispatch_stack
dispatch_mode: Any = _C._get_dispatch_mode
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
has_kernel_for_dispatch_key = _C._dispatch_has_kernel_for_dispatch_key
FAKE, PROXY = _C._TorchDispatchModeKey.FAKE, _C._TorchDispatchModeKey.PROXY

# Autograd: hooks of saved tensors, the number of the next node, the backward that runs.
top_saved_hooks: Any = _C._autograd._top_saved_tensors_default_hooks
push_saved_hooks: Any = _C._autograd._push_saved_tensors_default_hooks
pop_saved_hooks: Any = _C._autograd._pop_saved_tensors_default_hooks
sequence_number: Any = _C._autograd._get_sequence_nr
current_graph_task: Any = _C._current_graph_task_id


def _stash_counted(name: str, value: Any) -> None:
    """Stashes a value with an added reference: torch 2.11 takes a reference without counting, and releases it later."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _C._stash_obj_in_tls(name, value)


# Objects of a thread, by name. The threads of autograd get the objects of the thread that calls a backward.
stash: Any = _C._stash_obj_in_tls if minor_of(torch.__version__) >= (2, 12) else _stash_counted
stashed: Any = _C._get_obj_in_tls
is_stashed: Any = _C._is_key_in_tls
# A value that a checkpoint drops.
CheckpointHolder: Any = torch_checkpoint._Holder
preserve_version: Any = torch.autograd._unsafe_preserve_version_counter

# How many tensors hold a storage; how `nn.Module.to` reads its arguments.
storage_use_count: Any = _C._storage_Use_Count
parse_to: Any = _C._nn._parse_to

# Collectives of a single tensor, with other names in torch 2.11 and 2.12.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The names of modules that other code may have imported.
DYNAMO, CHECKPOINT = "torch._dynamo", "torch.distributed._composable.checkpoint_activation"
# The function that runs checkpoints. In torch 2.14 it takes the arguments separately, as a tuple and a dict.
# The function in the pickle of each tensor of torch.save.
REBUILD_TENSOR = "torch._utils", "_rebuild_tensor_v2"
CHECKPOINT_APART: bool = hasattr(torch_checkpoint, "_checkpoint_without_reentrant_generator_impl")
CHECKPOINT_GENERATOR: str = "_checkpoint_without_reentrant_generator" + ("_impl" if CHECKPOINT_APART else "")

# A check of a tensor's values with a message, kept by captures, not in torch's stubs.
grouped_mm: Any = getattr(torch, "_grouped_mm")  # noqa: B009
check_tensor_all: Callable[[torch.Tensor, Callable[[], str]], None] = getattr(torch, "_check_tensor_all")  # noqa: B009


def forward_level() -> int:
    """Returns the open level of forward-mode differentiation, or -1."""
    return forward_ad._current_level


def is_batched(x: torch.Tensor) -> bool:
    """Returns whether a vmap of `torch.func` runs over the tensor, also inside other transforms."""
    while is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def is_profiled() -> bool:
    """Returns whether torch's profiler records."""
    return profiler._is_profiler_enabled


def caches_parametrizations() -> bool:
    """Returns whether `torch.nn.utils.parametrize.cached()` is open."""
    return bool(parametrize._cache_enabled)


def clear_interpreter_stack() -> Any:
    """Returns a context without the running transforms of `torch.func`."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def inductor(name: str) -> Any:
    """Returns a module of inductor, which compiles graphs, such as `inductor("config")`.

    Example:
        >>> inductor("config").__name__
        'torch._inductor.config'
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on import
        return importlib.import_module(f"torch._inductor.{name}")


def dynamo_counters() -> Any:
    """Returns the counters of inductor's cache."""
    from torch._dynamo.utils import counters

    return counters


def graph_break(message: str) -> None:
    """Ends the graph that `torch.compile` captures."""
    torch._dynamo.graph_break(msg=message)


def derivatives_of_decompositions() -> ModuleType:
    """Registers the forward derivatives of ops that have decompositions."""
    return importlib.import_module("torch._decomp.decompositions_for_jvp")


def unbound(method: Any) -> Callable[..., Any]:
    """Returns the function of a class method, which takes the class first.

    `autograd.Function.apply` is a C function in torch 2.14.

    Example:
        >>> unbound(vars(dict)["fromkeys"])(dict, "a")
        {'a': None}
    """
    if hasattr(method, "__func__"):
        return method.__func__

    def call_unbound(cls: type, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    return call_unbound


def exported_scan(f: Callable[..., Any], init: list[Any], xs: list[Any], more: tuple[Any, ...]) -> list[Any]:
    """Calls torch's scan: a single node of an exported graph, where `f(*carry, *x, *more)` returns carry and ys."""
    from torch._higher_order_ops.scan import scan_op

    return list(scan_op(f, init, xs, more))


def write_package(program: Any, path: str) -> None:
    """Compiles an exported program into a package of AOTInductor."""
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(program, package_path=path)
