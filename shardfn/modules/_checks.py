"""Checks of modules for features that a step cannot train, and checks of each call."""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardfn import core
from shardfn._torch import caches_parametrizations

from ._call import ModuleCall, Replacement

HOOKS = (
    "a step keeps parameters elsewhere, and a rank's gradient is a part of the mean. Remove the hook, and change the"
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
            f"from_module expected an nn.Module, got {what}. Call a class first: from_module(Net(...)). A function of"
            " parameters does not need from_module."
        )
    problems = [*_lazy_problems(module)] or [
        *_hook_problems(module),
        *_embedding_problems(module),
        *_shared_memory_problems(module),
    ]
    core.raise_all(ValueError, f"a step cannot train this {type(module).__name__} as torch does:", problems)


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
    core.raise_all(
        ValueError,
        "dropout by sample needs the batch in dim 0:",
        [
            f"{path or 'the module'} is a {type(sub).__name__} with batch_first=False; build it with batch_first=True"
            for path, sub in core.named_modules(module)
            if isinstance(sub, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
            and not sub.self_attn.batch_first
            and any(d.p for d in sub.modules() if isinstance(d, nn.Dropout) and d.training)
        ],
    )


def _describe_value(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


class CallChecks(Replacement):
    """Checks of each call, without a replacement."""

    order = 0

    def check(self, call: ModuleCall) -> None:
        """Refuses cached parametrizations, and warns of buffers and balance losses that are not the step's.

        Raises:
            ValueError: `torch.nn.utils.parametrize.cached()` is active.
        """
        if caches_parametrizations():
            raise ValueError(
                "torch.nn.utils.parametrize.cached() must not be active around a call of a module, since the results"
                " in the cache are of other parameters. Remove it, or use it inside the module's forward."
            )
        _warn_of_requested_balance(call.module, call.kwargs)
        if call.state is None:
            _warn_of_module_buffers(call)


def _lazy_problems(module: nn.Module) -> Iterator[str]:
    tensors = (*core.named_parameters(module), *core.named_buffers(module))
    for name, _ in ((n, x) for n, x in tensors if is_lazy(x)):
        yield f"{name} has no shape yet; call the module once on a batch before from_module"


def _hook_problems(module: nn.Module) -> Iterator[str]:
    for name, p in core.named_parameters(module):
        kinds = {"register_hook": p._backward_hooks, "register_post_accumulate_grad_hook": _post_hooks(p)}
        for kind, hooks in kinds.items():
            if hooks:
                yield f"{name} has {len(hooks)} gradient hook(s) ({kind}): {HOOKS}"


def _post_hooks(p: Tensor) -> Any:
    return getattr(p, "_post_accumulate_grad_hooks", None)


def _embedding_problems(module: nn.Module) -> Iterator[str]:
    for path, sub in core.named_modules(module):
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
    params, seen = {name for name, _ in core.named_parameters(module)}, {}
    for name, x in (*core.named_parameters(module), *core.named_buffers(module)):
        if x.layout != torch.strided or x.device.type == "meta" or type(x.data) is not Tensor or not x.numel():
            continue
        other = seen.setdefault((x.device, x.data_ptr()), name)
        if other != name and (name in params or other in params):
            yield (
                f"{name} shares the memory of {other} but is another tensor; assign the parameter itself to tie them,"
                f" or give {name} a memory of its own: clone()"
            )


_COEFFICIENT = re.compile(r"aux_loss_coef|z_loss_coef|moe_loss_weight")


def warn_of_configured_balance(module: nn.Module) -> None:
    """Warns of a module with a balance loss by configuration."""
    for config in _list_configs(module):
        if getattr(config, "output_router_logits", False):
            _warn_balance(config)
            return


def _warn_of_requested_balance(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Warns of a balance loss by a call's arguments, without the configuration."""
    if kwargs.get("output_router_logits"):
        configs = list(_list_configs(module))
        if configs and not any(getattr(config, "output_router_logits", False) for config in configs):
            _warn_balance(configs[0])


def _list_configs(module: nn.Module) -> Iterator[Any]:
    found: dict[int, Any] = {}
    for _, sub in core.named_modules(module):
        config: Any = getattr(sub, "config", None)
        for one in (config, getattr(config, "text_config", None), getattr(config, "ffn_config", None)):
            found.setdefault(id(one), one)
    yield from (x for x in found.values() if x is not None and any(_loss_coefficients(x)))


def _loss_coefficients(config: Any) -> dict[str, float]:
    named = vars(config) if hasattr(config, "__dict__") else {}
    return {k: v for k, v in named.items() if _COEFFICIENT.search(k) and isinstance(v, float) and v}


def _warn_balance(config: Any) -> None:
    pairs = ", ".join(f"{name}={value}" for name, value in _loss_coefficients(config).items())
    warnings.warn(
        f"output_router_logits=True has the module add a balance loss of its own ({pairs}), computed over the rows of a"
        " call: over several ranks or microbatches a step takes the mean of these losses, which is not that of the"
        " global batch. Set output_router_logits=False and add a balance loss over all rows to the loss, or accept the"
        " difference.",
        UserWarning,
        stacklevel=3,
    )


_KEPT = core.Ambient[Mapping[Any, tuple[int, ...]]]("buffers of the model state", by_thread=True)


def beside_model_state(model_state: core.PyTree) -> AbstractContextManager[Any]:
    """Warns of modules that run with the module's buffers while the context is open.

    The state of the step has other values. For example, a copy of a module in eval mode, made by
    `from_module(copy.deepcopy(module).eval())`, has the statistics from before training.

    Args:
        model_state: model state of the step. A leaf of a dict may be the buffer of the same name.
    """
    pairs = zip(core.tree_entries(model_state), core.tree_leaves(model_state), strict=True)
    return _KEPT.bound({entries[-1]: tuple(x.shape) for entries, x in pairs if entries})


def _warn_of_module_buffers(call: ModuleCall) -> None:
    """Warns if a module runs with the module's values of buffers in the model state."""
    module, parts, given = call.module, call.parts, call.given
    kept = _KEPT.innermost()
    if not kept:
        return
    own = {name: slot.owner._buffers[slot.name] for name, slot in parts.buffers.items() if name not in given.buffers}
    stale = [name for name, x in own.items() if x is not None and kept.get(name) == tuple(x.shape)]
    if stale:
        warnings.warn(
            f"this {type(module).__name__} runs with buffers of its own, {', '.join(stale)}, which are not the"
            " buffers that training has left in the model state. Pass the buffers of the state:"
            " predict(params | model_state, batch), where evaluate(metrics=) passes both, metrics(params, model_state,"
            " batch).",
            stacklevel=4,
        )
