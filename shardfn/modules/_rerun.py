"""Forwards that run again: parts of a forward in the backward, and choices of experts that are given.

Activation checkpointing by `torch.utils.checkpoint` calls a function a second time after the module's call has ended
and the module's weights are back. The function then runs as a part of the call again. Other code with a use of the
weights after the call is refused.

A router chooses by `topk` of the scores [S, E] of the tokens. While a layer with experts runs, `topk` returns the given
experts and the scores of these experts. The model's code makes weights of the scores: a replay has the weights and
gradients of the router's present parameters.

S tokens of this rank, m layers with experts, k choices in each, E experts.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfn import core
from shardfn._torch import unbound
from shardfn.nn import moe

from ._call import Forwards, ModuleCall, ModuleRun, Replacement
from ._experts import experts_in

_CALLS = core.Ambient[ModuleCall]("calls of modules", by_thread=True)


class Recomputation(Replacement):
    """Lets checkpointed functions run later as parts of the call. Calls nest: the innermost is entered last."""

    order = 30

    @contextlib.contextmanager
    def running(self, run: ModuleRun) -> Iterator[None]:
        """Binds the call while open."""
        # Names of torch are replaced for all threads; each thread looks in `_CALLS` for the thread's calls.
        with _CALLS.bound(run.call), core.rebind_in_checkpoints(), _REFUSALS:
            yield


@core.rebind_ambient
def _enter_same_calls() -> list[core.Again]:
    return [run.again() for run in _CALLS.all]


@functools.cache
def _wrap_conversion(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `nn.Module.to` and similar: a forward may only ask for the present dtype and device."""

    @functools.wraps(original)
    def _apply_conversion(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        if any(run.converted(self, fn) for run in reversed(_CALLS.all)):
            return self
        return original(self, fn, recurse)

    return _apply_conversion


@functools.cache
def _wrap_application(original: Any) -> Any:
    """Wraps `autograd.Function.apply` to refuse parts of the module among the arguments.

    The backward cannot find the call of the module, and would run the parts with the module's weights.
    """

    def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for sub in _modules_in((args, kwargs)):
            path = next((path for run in reversed(_CALLS.all) if (path := run.path_of(sub)) is not None), None)
            if path is not None and any(True for _ in sub.parameters()):
                raise ValueError(
                    f"the forward of the module gives its part {path or 'itself'!r} to an autograd.Function"
                    f" ({cls.__name__}). The backward would use the weights that the module was created with."
                    " Pass only tensors to the Function. Or call the part itself, under torch.utils.checkpoint if the"
                    " saved tensors take too much memory."
                )
        return unbound(original)(cls, *args, **kwargs)

    return classmethod(apply_function)


_REFUSALS = core.Replaced(
    lambda: [(nn.Module, "_apply", _wrap_conversion), (torch.autograd.Function, "apply", _wrap_application)]
)


def _modules_in(value: Any) -> Iterator[nn.Module]:
    """Yields the modules in arguments: directly, in containers, and behind methods and partial functions."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _modules_in(item)
    elif isinstance(value, dict):
        yield from _modules_in(list(value.values()))
    elif isinstance(value, functools.partial):
        yield from _modules_in((value.func, value.args, value.keywords))
    elif isinstance(owner := getattr(value, "__self__", None), nn.Module):
        yield owner


_TOPK = (torch.topk, torch.Tensor.topk)


class ModuleReplay(Replacement):
    """Choices of all tokens of a call.

    Args:
        module: module with models of transformers inside.
        chosen: experts of each token in each layer, in the order of the layers. -1 leaves a token to the router.

    Raises:
        TypeError: `chosen` has no integers.
        ValueError: no layer of the module has experts of transformers' table, or `chosen` has another number of layers.
    """

    order = 80

    def __init__(self, module: nn.Module, chosen: Int[Tensor, "*tokens m k"]) -> None:
        name, found = type(module).__name__, experts_in(module)
        if not found:
            raise ValueError(
                f"replaying needs experts that transformers looks up in ExpertsInterface, got a {name} without."
                " Call the function itself, without choices."
            )
        if chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise TypeError(
                f"replaying: chosen must be numbers of experts, such as rollout.expert_ids, got {chosen.dtype}."
            )
        if chosen.ndim < 3 or chosen.shape[-2] != len(found):
            raise ValueError(
                f"replaying: chosen has shape {tuple(chosen.shape)}, and {len(found)} layers of this {name} have"
                f" experts. Pass [B, T, {len(found)}, k]: the routes of an engine of this model."
            )
        parts = dict(core.named_modules(module))
        chosen_mSk = rearrange(chosen, "... m k -> m (...) k")
        self._layers = [
            (parts[path.rpartition(".")[0]], _Chosen(path, experts.num_experts, own_Sk.long()))
            for own_Sk, (path, experts) in zip(chosen_mSk, found.items(), strict=True)
        ]

    def forwards(self, run: ModuleRun) -> Forwards:
        """Returns forwards of the layers with experts, which take the given experts."""
        del run
        return [(layer, _replay_choices(layer.forward, own)) for layer, own in self._layers]


def _replay_choices(forward: Callable[..., Any], own: "_Chosen") -> Callable[..., Any]:
    @functools.wraps(forward)
    def replay_forward(*args: Any, **kwargs: Any) -> Any:
        with _Router(own) as router:
            out = forward(*args, **kwargs)
        router.check()
        return out

    return replay_forward


class _Chosen:
    """Choices [S, k] of a single layer's tokens, among E experts."""

    def __init__(self, path: str, num_experts: int, experts_Sk: Tensor) -> None:
        self.path, self.num_experts, self.experts_Sk = path, num_experts, experts_Sk
        num, k = experts_Sk.shape
        moe.check_chosen(experts_Sk, num, k, num_experts, f"replaying: {path}")


class _Router(TorchFunctionMode):
    """Run of a layer, which sees the router's choice."""

    def __init__(self, own: _Chosen) -> None:
        super().__init__()
        self._own, self._num = own, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function, or takes the given experts."""
        del types
        kwargs = kwargs or {}
        if func not in _TOPK or not self._is_choice(*args, **kwargs):
            return func(*args, **kwargs)
        self._num += 1
        scores_SE, best = args[0] if args else kwargs["input"], func(*args, **kwargs)
        given_Sk = self._own.experts_Sk
        experts_Sk = torch.where((given_Sk < 0).any(-1, keepdim=True), best.indices, given_Sk)
        return torch.return_types.topk((scores_SE.gather(-1, experts_Sk), experts_Sk))  # pyright: ignore

    def _is_choice(self, input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> bool:
        del args, kwargs
        own = self._own
        if input.ndim != 2 or input.shape[1] != own.num_experts or dim not in (1, -1):
            return False
        if (len(input), k) != tuple(own.experts_Sk.shape):
            num, wanted = own.experts_Sk.shape
            raise ValueError(
                f"replaying: {own.path} has {len(input)} tokens with {k} choices each, and chosen has {num} tokens with"
                f" {wanted}. Pass the routes of these tokens, cut over ranks and microbatches as they are."
            )
        return True

    def check(self) -> None:
        """Refuses a layer whose router has not chosen exactly once.

        Raises:
            ValueError: the router has chosen never, or more than once.
        """
        if self._num != 1:
            own = self._own
            raise ValueError(
                f"replaying: beside {own.path} {self._num} calls of topk choose among {own.num_experts} experts, and 1"
                " is expected, so that its router cannot be replayed. Take the forward without replaying, whose"
                " metrics show the tokens with other probabilities."
            )
