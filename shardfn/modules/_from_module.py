"""`from_module`: an `nn.Module` as a pure function of its parameters.

Parts of a module compute in the dtypes of the parameters that arrive, if these differ from the module's.
"""

import collections
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Int, Int64
from torch import Tensor, nn

from shardfn import core
from shardfn._torch import BatchNorm
from shardfn.core import Axes, P, explains_keywords, frozen, named_buffers, named_parameters, state_names
from shardfn.nn import AttentionBackend, BatchInvariant, is_rounding, moe

from ._attention import AttentionRoute, models_in
from ._batch_invariant import BatchInvariance
from ._call import (
    EvalMode,
    Forwards,
    ModuleCall,
    ModuleRun,
    NumberedDraws,
    Replacement,
    UncompiledParts,
    uncompiled_module,
)
from ._checks import CallChecks, check_keyed, check_module, warn_of_configured_balance
from ._draws import Draws
from ._experts import ExpertsRoute, experts_in
from ._function_watch import FunctionWatch
from ._given_tensors import GivenTensors, ModuleParts, first_names, resolve
from ._layers import LayeredFunction, layered
from ._rerun import ModuleReplay, Recomputation

_COMPUTE = core.Ambient[tuple[torch.dtype | None]]("dtype in which the loss computes", by_thread=True)
# (own dtype, dtype of the given parameter) -> number of elements.
_Moves = collections.Counter[tuple[torch.dtype, torch.dtype]]


class Casts(NamedTuple):
    """Casts that follow from a change of the parameters' dtypes.

    Attributes:
        buffers: new dtype of each buffer that changes.
        apart: submodules with a separate dtype, and the dtype.
        main: dtype of everything else, or None if not needed.
    """

    buffers: dict[str, torch.dtype]
    apart: dict[str, torch.dtype]
    main: torch.dtype | None


def computing_in(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Sets the dtype in which the loss computes, except for a policy's exceptions. None means unknown."""
    return _COMPUTE.bound((dtype,))


class ParamDtypes(Replacement):
    """Lets a module compute in the dtypes of the given parameters.

    Args:
        keep: patterns. A buffer keeps the dtype if `re.search` finds a pattern in the name.
    """

    order = 40

    def __init__(self, keep: Sequence[str]) -> None:
        self._keep = tuple(keep)
        # By the given dtypes: a module's structure does not change.
        self._casts: dict[Any, Casts] = {}

    def of_call(self, call: ModuleCall) -> "Replacement":
        """Returns the casts of submodules for a single call, and casts the buffers of the call."""
        found = self._find_casts(call.parts, call.given)
        call.given.buffers.update(_cast_buffers(call.parts, call.given, found, call.state or {}))
        return _CastForwards(found)

    def _find_casts(self, parts: ModuleParts, given: GivenTensors) -> Casts:
        own = {name: _module_param(parts, name).dtype for name in given.params}
        dtypes = {name: x.dtype for name, x in given.params.items()}
        bound = _COMPUTE.innermost()
        compute, key = bound[0] if bound else None, (tuple(own.items()), tuple(dtypes.values()), tuple(parts.buffers))
        known = self._casts.get(key)
        # Recomputation in the backward runs outside the loss: there the answer found in the forward is used.
        if known is None or compute not in (None, known.main):
            known = self._casts[key] = find_casts(parts, own, dtypes, self._keep, compute)
        return known


class _CastForwards(Replacement):
    """Casts of a single call: a submodule with a separate dtype casts inputs to the dtype, and results back."""

    order = ParamDtypes.order

    def __init__(self, casts: Casts) -> None:
        assert casts.main is not None or not casts.apart
        self._casts = casts

    def forwards(self, run: ModuleRun) -> Forwards:
        """Returns the forwards of the submodules with a separate dtype."""
        modules, main = run.call.parts.modules, self._casts.main
        unique = {id(modules[path]): (modules[path], dtype) for path, dtype in self._casts.apart.items()}
        return [(sub, _run_in_dtype(dtype, main, sub.forward)) for sub, dtype in unique.values()]


def find_casts(
    parts: ModuleParts,
    own: Mapping[str, torch.dtype],
    given: Mapping[str, torch.dtype],
    keep: Sequence[str],
    compute: torch.dtype | None,
) -> Casts:
    """Returns the casts for parameters of dtypes `given` in a module with dtypes `own`.

    A floating-point buffer changes like the nearest parameters of equal dtype, as by `module.to(dtype)`, unless a
    pattern of `keep` matches in the name. A submodule with parameters of a single dtype other than `compute` (or other
    than the narrowest, if `compute` is not known) computes in the single dtype, for example a norm in float32 under
    bfloat16.
    """
    floating = {n: (own[n], d) for n, d in given.items() if own[n].is_floating_point and d.is_floating_point}
    if all(a == b for a, b in floating.values()):
        return Casts({}, {}, compute)
    moves: dict[str, _Moves] = collections.defaultdict(collections.Counter)
    direct: dict[str, set[torch.dtype]] = collections.defaultdict(set)
    for name, move in floating.items():
        owner = name.rpartition(".")[0]
        direct[owner].add(move[1])
        slot = parts.params[name]
        size = max(1, slot.owner._parameters[slot.name].numel())  # pyright: ignore[reportOptionalMemberAccess]
        for path in _list_ancestors(owner):
            moves[path][move] += size
    # Exceptions are wider than the rest, unless a policy makes them narrower. `compute` is then known.
    main = compute or min((to for _, to in moves[""]), key=lambda d: d.itemsize)
    buffers = {}
    for name, slot in parts.buffers.items():
        dtype = slot.owner._buffers[slot.name].dtype  # pyright: ignore[reportOptionalMemberAccess]
        if dtype.is_floating_point and not any(re.search(p, name) for p in keep):
            to = _nearest_dtype(moves, name.rpartition(".")[0], dtype, main)
            if to not in (None, dtype):
                buffers[name] = to
    wide = {path: max(dtypes, key=lambda d: d.itemsize) for path, dtypes in direct.items() if main not in dtypes}
    return Casts(buffers, wide, main)


def _run_in_dtype(dtype: torch.dtype, main: torch.dtype | None, forward: Callable[..., Any]) -> Callable[..., Any]:
    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in core.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        came = next((x.dtype for x in tensors if x.is_floating_point()), main)
        if not tensors or came is None:
            return forward(*args, **kwargs)
        args, kwargs = core.tree_map(lambda x: _cast_tensor(x, dtype), (args, kwargs))  # pyright: ignore[reportGeneralTypeIssues]
        return core.tree_map(lambda x: _cast_tensor(x, came), forward(*args, **kwargs))

    return cast_forward


def _cast_tensor(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _module_param(parts: ModuleParts, name: str) -> Tensor:
    slot = parts.params[name]
    own = slot.owner._parameters[slot.name]
    assert own is not None
    return own


def _cast_buffers(
    parts: ModuleParts, given: GivenTensors, found: Casts, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the buffers cast to another dtype. Buffers of a state keep the dtype."""
    out = {}
    for name, dtype in found.buffers.items():
        if name in state:
            continue
        slot = parts.buffers[name]
        x: Any = given.buffers.get(name, slot.owner._buffers[slot.name])
        out[name] = x.to(dtype)
    return out


def _list_ancestors(path: str) -> list[str]:
    out = [path]
    while path:
        path = path.rpartition(".")[0]
        out.append(path)
    return out


def _nearest_dtype(moves: Mapping[str, _Moves], path: str, dtype: torch.dtype, main: torch.dtype) -> torch.dtype | None:
    """Returns the new dtype of the nearest parameters of a dtype, `main` if some have `main`."""
    for above in _list_ancestors(path):
        to = {b: n for (a, b), n in moves.get(above, _Moves()).items() if a == dtype}
        if to:
            return main if main in to else max(to, key=lambda d: to[d])
    return None


def _list_replacements(
    module: nn.Module,
    *,
    keep_dtype: Sequence[str],
    axis: Axes,
    attention: AttentionBackend | None,
    experts: moe.Exchange | None,
    batch_invariant: bool,
) -> list[Replacement]:
    """Returns the replacements for the arguments of `from_module`. The numbers of the classes give their order.

    Raises:
        ValueError: attention or experts cannot be routed, or are not batch-invariant.
    """
    if batch_invariant:
        _check_batch_invariant(attention, experts)
        attention = BatchInvariant() if models_in(module) else None
        experts = moe.Local() if experts is None and experts_in(module) else experts
    return [
        CallChecks(),
        UncompiledParts(),
        EvalMode(),
        Recomputation(),
        ParamDtypes(keep_dtype),
        NumberedDraws(),
        *([AttentionRoute(module, attention)] if attention is not None else []),
        *([ExpertsRoute(module, experts, batch_invariant=batch_invariant)] if experts is not None else []),
        FunctionWatch(axis),
        *([BatchInvariance()] if batch_invariant else []),
    ]


def _check_batch_invariant(attention: AttentionBackend | None, experts: moe.Exchange | None) -> None:
    if attention is not None and not isinstance(attention, BatchInvariant):
        raise ValueError(
            "from_module(batch_invariant=True) needs batch-invariant attention, on one device or on ranks with whole"
            f" rows, got attention={attention}. Leave out attention=, or pass nn.BatchInvariant()."
        )
    if isinstance(experts, moe.AllReduce) and not experts.in_order:
        raise ValueError(
            "from_module(batch_invariant=True) needs sums over ranks in the order of a token's choices, got"
            f" experts={experts}. Use moe.AllReduce({experts.axis!r}, in_order=True)."
        )


class ModuleFunction:
    """Forward of a module as a function of the parameters. See `from_module`.

    Attributes:
        trainable: values of `requires_grad` by name, for `sharded_step(trainable=)`, needed only where the state begins
            with tensors from elsewhere than `from_module` or `module_from_hf`.
        specs: compute specs of the parameters by name. With `from_module(experts=)` the parameters of experts are cut
            as the exchange needs, and all other parameters are whole.
    """

    def __init__(self, module: nn.Module, replacements: Sequence[Replacement]) -> None:
        self.module, self._replacements = module, tuple(replacements)
        self.specs = {name: P() for name, _ in named_parameters(module)}
        for one in replacements:
            self.specs |= one.specs
        self._firsts = first_names(module)
        self.trainable = {name: p.requires_grad for name, p in named_parameters(module)}

    def __call__(self, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's forward.

        Args:
            params: parameters by name. Missing parameters are the module's, as constants.
            *args: the module's arguments.
            **kwargs: arguments by name.

        Raises:
            ValueError: a name is not in the module, or the result would depend on the number of ranks, or be lost: the
                forward draws from torch's generator, changes a buffer, normalises over the batch, or assigns a
                parameter.
            RuntimeError: another thread runs the module at this moment.
        """
        return self.run(Draws(self.module), params, None, args, kwargs)[0]

    def within(self, forward: Callable[..., Any], params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Runs `forward(*args, **kwargs)`, where the module and all parts of the module have these parameters.

        Args:
            forward: function to run in place of the module.
            params: parameters by name.
            *args: arguments of `forward`.
            **kwargs: arguments by name.

        Example:
            >>> import torch
            >>> module = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
            >>> params, apply = from_module(module)
            >>> apply.within(lambda x: module[0](x), params, torch.zeros(1, 2)).shape
            torch.Size([1, 3])
        """
        return self.run(Draws(self.module), params, None, args, kwargs, forward)[0]

    def keyed(
        self, key: Int64[Tensor, "2"], index_B: Int64[Tensor, " b"], forward: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Returns the same function with dropout: a mask depends only on the key and the sample's number.

        For example, sample 5 gets the same mask on rank 0 of 1 and on rank 2 of 3. With `from_module(attention=)` the
        dropout of attention is `nn.PairDropout`. Where the body cuts the tokens, other dropouts take tensors with this
        rank's tokens in dim 1, and masks are as on a single device.

        Args:
            key: key for this step.
            index_B: global number of each row of the batch, which is dim 0 of the tensors under dropout.
            forward: function to run in place of the module, as in `within`.

        Returns:
            `f(params, *args, **kwargs)`.

        Raises:
            ValueError: a dropout layer of torch.nn has the batch in dim 1, or (when called) a tensor under dropout has
                another number of rows or of a rank's tokens, or another function draws.

        Example:
            >>> import torch
            >>> from shardfn.core import key
            >>> params, apply = from_module(nn.Dropout(0.5))
            >>> x, index_B = torch.ones(4, 3), torch.arange(4)
            >>> whole = apply.keyed(key(0), index_B)(params, x)
            >>> torch.equal(whole[2:], apply.keyed(key(0), index_B[2:])(params, x[2:]))
            True
        """
        draws = self.draws(key, index_B)

        def f(params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
            return self.run(draws(), params, None, args, kwargs, forward)[0]

        return f

    def replaying(self, chosen: Int[Tensor, "*tokens m k"]) -> "ModuleFunction":
        """Returns the same function, with given experts for the routers of models of transformers.

        Weights of the experts, and gradients of the router, come from the present scores. The tokens of each call must
        be the tokens of `chosen`, in the same order.

        Args:
            chosen: the k experts of each token in each of the m layers with experts, such as `rollout.expert_ids` of an
                `Engine(record_experts=True)` of the model; -1 leaves a token to the router.

        Raises:
            TypeError: `chosen` has no integers.
            ValueError: `chosen` does not fit the module's layers and experts, or (when called) the tokens, or a router
                chooses in another way than by `topk` of scores [tokens, experts].

        Example:
            >>> import torch
            >>> from transformers import MixtralConfig, MixtralForCausalLM
            >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
            >>> config = MixtralConfig(vocab_size=8, num_local_experts=3, num_key_value_heads=2, **sizes)
            >>> model = MixtralForCausalLM(config).eval()
            >>> params, apply = from_module(model)
            >>> chosen = torch.tensor([[[[2, 1]], [[0, 1]]]])  # B = 1, T = 2, m = 1, k = 2
            >>> apply.replaying(chosen)(params, torch.tensor([[3, 5]])).logits.shape
            torch.Size([1, 2, 8])
        """
        replay, made = ModuleReplay(self.module, chosen), copy.copy(self)
        made._replacements = (*(one for one in self._replacements if type(one) is not ModuleReplay), replay)
        return made

    def draws(self, key: Int64[Tensor, "2"], index_B: Int64[Tensor, " b"]) -> Callable[[], Draws]:
        """Makes the random numbers of one call."""
        check_keyed(self.module, key, index_B)
        return lambda: Draws(self.module, key, index_B)

    def run(
        self,
        draws: Draws,
        params: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: Callable[..., Any] | None = None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Returns the forward's result, and the new values of the buffers in `state`.

        The forward may change these buffers, and no other buffers.

        `forward` runs in place of the module, and calls the module.
        """
        if is_rounding():
            raise ValueError(
                "from_module: the layers of a module are not rounded, got Policy(products=). Use a models.gpt, as from"
                " interop.gpt_from_hf, or leave products out."
            )
        # At each call: between calls the module's owner may move or replace its tensors.
        parts = ModuleParts.of(self.module)
        given = resolve(parts, self._firsts, params)
        call = ModuleCall(parts, given, draws, state, kwargs, self._replacements)
        return call.run(forward or self.module, args)


class StatefulFunction:
    """Forward of a module as a function of parameters and buffers. See `from_module(has_state=True)`.

    Attributes:
        trainable: values as of a `ModuleFunction`.
        specs: specs as of a `ModuleFunction`.
    """

    def __init__(self, function: ModuleFunction, like: Mapping[str, Tensor]) -> None:
        self._function, self._names = function, set(like)
        self.trainable, self.specs = function.trainable, function.specs

    def __call__(
        self, params: Mapping[str, Tensor], model_state: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Returns the module's forward, and the new values of the buffers. See `ModuleFunction`.

        Args:
            params: parameters by name.
            model_state: model state by name, not changed.
            *args: the module's arguments.
            **kwargs: arguments by name.

        Raises:
            ValueError: the names of the model state are not the names from `from_module`, or as `ModuleFunction`.
        """
        return self._run_forward(Draws(self._function.module), params, model_state, args, kwargs)

    def keyed(self, key: Int64[Tensor, "2"], index_B: Int64[Tensor, " b"]) -> Callable[..., Any]:
        """Returns the same function with dropout. See `ModuleFunction.keyed`."""
        draws = self._function.draws(key, index_B)

        def f(
            params: Mapping[str, Tensor], model_state: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
        ) -> tuple[Any, dict[str, Tensor]]:
            return self._run_forward(draws(), params, model_state, args, kwargs)

        return f

    def _run_forward(
        self, draws: Draws, params: Any, state: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        if set(state) != self._names:
            missing, others = sorted(self._names - set(state)), sorted(set(state) - self._names)
            raise ValueError(
                f"the model state does not fit the module: {missing} are missing, {others} are not in the module."
            )
        return self._function.run(draws, params, state, args, kwargs)


@overload
def from_module(
    module: nn.Module,
    *,
    keep_dtype: Sequence[str] = ...,
    has_state: Literal[False] = ...,
    axis: Axes = ...,
    attention: AttentionBackend | None = ...,
    experts: moe.Exchange | None = ...,
    batch_invariant: bool = ...,
) -> tuple[dict[str, Tensor], ModuleFunction]: ...
@overload
def from_module(
    module: nn.Module,
    *,
    keep_dtype: Sequence[str] = ...,
    has_state: Literal[True],
    axis: Axes = ...,
    attention: AttentionBackend | None = ...,
    experts: moe.Exchange | None = ...,
    batch_invariant: bool = ...,
) -> tuple[dict[str, Tensor], dict[str, Tensor], StatefulFunction]: ...
@overload
def from_module(
    module: nn.Module,
    *,
    keep_dtype: Sequence[str] = ...,
    layers: str,
    attention: AttentionBackend | None = ...,
    experts: moe.Exchange | None = ...,
    batch_invariant: bool = ...,
) -> tuple[dict[str, Any], LayeredFunction]: ...
@explains_keywords(exact="batch_invariant={value!r}")
def from_module(
    module: nn.Module,
    *,
    keep_dtype: Sequence[str] = ("inv_freq",),
    has_state: bool = False,
    axis: Axes = "dp",
    layers: str | None = None,
    attention: AttentionBackend | None = None,
    experts: moe.Exchange | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Splits a module into parameters and a pure function of the parameters.

    Tied parameters appear once, under the first name, and stay tied. Buffers are constants of the function: a forward
    that would change a buffer is refused, by name, before the change. The module itself is not changed. After
    `step.init(params)`, `module.to("meta")` frees the memory of the module's parameters, if there are no buffers.

    Code under `torch.utils.checkpoint` (activation checkpointing) inside the module runs again in the backward with the
    parameters and draws of the forward. `use_reentrant=True` has no effect. Dropout needs a key: `apply.keyed(key,
    index_B)(params, ...)`.

    If parameters have another dtype, as under `mixed_precision`, floating-point buffers follow the nearest parameters
    of equal dtype, as with `module.to(dtype)`. If all parameters of a submodule are exceptions of the policy, such as a
    norm in float32, the submodule computes in the dtype of the exceptions, and returns the dtype of the input.

    Args:
        module: any module, in the mode to run in (train or eval). Inside of `step.evaluate` the mode is eval.
        keep_dtype: patterns. A buffer keeps the dtype if `re.search` finds a pattern in the name.
        has_state: whether the buffers in `state_dict` become model state, so that a forward may change them: running
            statistics, counters.
        axis: mesh axes along which ranks hold other rows of the batch, with `has_state`: `BatchNorm` in training
            normalises by the statistics of all rows.
        layers: name of the list of layers, to put layers on several ranks (`pipeline_module`): an `nn.ModuleList` of
            layers, each called once on the result of the previous layer. Layers may differ. Layers with equal leaves
            are stacked.
        attention: attention backend for models of transformers inside: `nn.Blockwise()`, or `nn.Ulysses(axis, length)`
            and `nn.Ring(axis, length)` on ranks that each have some tokens of a sequence. Positions then count all
            tokens. Where given positions start again, a new document begins.
        experts: exchange of `nn.moe` by which tokens meet the experts of models of transformers inside, such as
            `nn.moe.AllToAll("ep")`, an all-to-all. The module's routers choose. The step needs `specs=apply.specs`.
            With `layers`, specs such as `P("pp", "ep")` for the stacked leaves of experts.
        batch_invariant: whether each token's results are batch-invariant, with the bits of an engine of
            `hf_decoder(module, batch_invariant=True)`: for float32 parameters, and causal attention. Gradients are not
            batch-invariant.

    Returns:
        `(params, apply)`: detached parameters by name, and `apply(params, *args, **kwargs)` = the module's forward.
        With `has_state`, `(params, model_state, apply)`, and `apply(params, model_state, *args, **kwargs)` = the
        forward and the new model state. With `layers`, `params[layers]` has the layers' leaves by name, stacked along
        dim 0. If layers differ in leaves or shapes, `params[layers]` has a dict of leaves for each kind, under the
        number of the first layer of the kind, as a string, for example "0" and "3". Parameters with
        `requires_grad=False` are frozen: steps train them only if `trainable=` includes them.

    Raises:
        ValueError: the module cannot be trained as in torch: a parameter has gradient hooks, no shape yet, or shares
            memory with another tensor, or an embedding has max_norm or scale_grad_by_freq. Or there are no buffers for
            `has_state`, or layers share parameters. The message lists every leaf. Or attention cannot be routed, with
            each reason, or (when called) masks, labels or dropout are not known for all tokens.

    Example:
        >>> import torch
        >>> params, apply = from_module(nn.Linear(2, 1, bias=False))
        >>> sorted(params), apply(params, torch.zeros(3, 2)).shape
        (['weight'], torch.Size([3, 1]))
    """
    check_module(module)
    module = uncompiled_module(module)
    warn_of_configured_balance(module)
    chosen: dict[str, Any] = {"attention": attention, "experts": experts, "batch_invariant": batch_invariant}
    replacements = _list_replacements(module, keep_dtype=keep_dtype, axis=axis if has_state else None, **chosen)
    function = ModuleFunction(module, replacements)
    params = {name: p.detach() if p.requires_grad else frozen(p.detach()) for name, p in named_parameters(module)}
    if layers is not None:
        if has_state:
            raise ValueError("from_module(layers=..., has_state=True): buffers that change are not cut in stages.")
        stacked, kinds = layered(module, layers, params)
        return stacked, LayeredFunction(function, kinds)
    if not has_state:
        return params, function
    kept = set(state_names(module))
    state = {name: x.detach().clone() for name, x in named_buffers(module) if name in kept}
    if not state and not any(isinstance(sub, BatchNorm) for sub in module.modules()):
        raise ValueError(
            f"from_module(has_state=True) has no effect: this {type(module).__name__} has no buffers in its state_dict."
        )
    return params, state, StatefulFunction(function, state)
