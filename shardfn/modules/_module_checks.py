"""Checks of `from_module` for features that a step cannot train."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardfn._torch import caches_parametrizations
from shardfn.core import named_buffers, named_modules, named_parameters, raise_all

HOOKS = (
    "a step keeps parameters elsewhere, and a rank's gradient is a part of the mean; remove the hook, and change the"
    " gradients in the optimizer: optim.chain(your transformation, ...)"
)
MAX_NORM = (
    "max_norm writes to the weight in the forward, by the rows of this rank's batch; build it with max_norm=None, and"
    " scale the rows that you look up, or add weight_decay"
)
BY_FREQUENCY = (
    "scale_grad_by_freq divides by how often a word is in this rank's batch, which depends on the number of ranks;"
    " build it without"
)


def check_module(module: nn.Module) -> None:
    """Refuses modules that a step cannot train as torch does.

    Raises:
        TypeError: the argument is not a module.
        ValueError: lists every unsupported parameter and submodule, with a remedy.
    """
    if not isinstance(module, nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"of type {type(module).__name__}"
        raise TypeError(
            f"from_module takes an nn.Module, and this is {what}. A class is to be called first,"
            " from_module(Net(...)); a function of parameters needs no from_module."
        )
    problems = [*_lazy_problems(module)] or [
        *_hook_problems(module),
        *_embedding_problems(module),
        *_shared_memory_problems(module),
    ]
    raise_all(ValueError, f"a step cannot train this {type(module).__name__} as torch does:", problems)


def check_keyed(module: nn.Module, key: Any, index_B: Any) -> None:
    """Refuses to draw by sample in layers of torch.nn with the batch in another dim than 0.

    Raises:
        ValueError: lists every such layer.
        TypeError: `key` is not a key, or `index_B` not numbers of rows.
    """
    if not isinstance(key, Tensor) or key.shape != (2,) or key.dtype != torch.int64:
        raise TypeError(f"apply.keyed(key, index_B): key is {_describe_value(key)}, not a key, int64 of shape (2,).")
    if not isinstance(index_B, Tensor) or index_B.dim() != 1 or index_B.is_floating_point():
        raise TypeError(
            f"apply.keyed(key, index_B): index_B is {_describe_value(index_B)}, not a row of sample numbers."
        )
    raise_all(
        ValueError,
        "dropout by sample needs the batch in dim 0:",
        [
            f"{path or 'the module'} is a {type(sub).__name__} with batch_first=False; build it with batch_first=True"
            for path, sub in named_modules(module)
            if isinstance(sub, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
            and not sub.self_attn.batch_first
            and any(d.p for d in sub.modules() if isinstance(d, nn.Dropout) and d.training)
        ],
    )


def _describe_value(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def check_cache() -> None:
    """Refuses to run a module while parametrizations are cached from other parameters.

    Raises:
        ValueError: `torch.nn.utils.parametrize.cached()` is active.
    """
    if caches_parametrizations():
        raise ValueError(
            "torch.nn.utils.parametrize.cached() around a call of a module would hand it results of other parameters;"
            " leave it out, or use it inside the module's forward."
        )


def _lazy_problems(module: nn.Module) -> Iterator[str]:
    tensors = (*named_parameters(module), *named_buffers(module))
    for name, _ in ((n, x) for n, x in tensors if is_lazy(x)):
        yield f"{name} has no shape yet; call the module once on a batch before from_module"


def _hook_problems(module: nn.Module) -> Iterator[str]:
    for name, p in named_parameters(module):
        kinds = {"register_hook": p._backward_hooks, "register_post_accumulate_grad_hook": _post_hooks(p)}
        for kind, hooks in kinds.items():
            if hooks:
                yield f"{name} has {len(hooks)} gradient hook(s) ({kind}): {HOOKS}"


def _post_hooks(p: Tensor) -> Any:
    return getattr(p, "_post_accumulate_grad_hooks", None)


def _embedding_problems(module: nn.Module) -> Iterator[str]:
    for path, sub in named_modules(module):
        if isinstance(sub, nn.Embedding | nn.EmbeddingBag):
            kind = f"{path or 'the module'} is an {type(sub).__name__}"
            if sub.max_norm is not None:
                yield f"{kind}(max_norm={sub.max_norm}): {MAX_NORM}"
            if sub.scale_grad_by_freq:
                yield f"{kind}(scale_grad_by_freq=True): {BY_FREQUENCY}"


def _shared_memory_problems(module: nn.Module) -> Iterator[str]:
    """Yields problems with distinct tensors in shared memory.

    A step moves parameters, and would separate the tensors.
    """
    params, seen = {name for name, _ in named_parameters(module)}, {}
    for name, x in (*named_parameters(module), *named_buffers(module)):
        if x.layout != torch.strided or x.device.type == "meta" or type(x.data) is not Tensor or not x.numel():
            continue
        other = seen.setdefault((x.device, x.data_ptr()), name)
        if other != name and (name in params or other in params):
            yield (
                f"{name} shares the memory of {other} but is another tensor; assign the parameter itself to tie them,"
                f" or give {name} a memory of its own: clone()"
            )
