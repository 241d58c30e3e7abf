"""Exports trained parameters, the widest copy of each, into a module or into files."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardfn import core
from shardfn.interop.leaves import gather_leaf, is_writer, parameter_names
from shardfn.state import TrainState, check_alive, check_passed, widest

from ._hf_module import module_to_hf


def master_params(state: TrainState) -> core.PyTree:
    """Returns the parameters of a state, as master copies where the optimizer keeps them. No leaf is gathered.

    Parameters in 16 bits are roundings of the master copies: use the copies to continue elsewhere.

    Args:
        state: result of a step.

    Returns:
        A tree like `state.params`, of the state's leaves: valid until the next step consumes the state.

    Raises:
        DonatedError: the state was consumed by a step.

    Example:
        >>> import shardfn as sf
        >>> loss = sf.mixed_precision(lambda w, x: (w * x).sum(), sf.Policy.bf16())
        >>> step = sf.sharded_step(loss, sf.optim.sgd(2.0**-10))
        >>> state, _ = step(step.init(torch.ones(1)), torch.ones(1))
        >>> state.params.full_tensor(), master_params(state).full_tensor()
        (tensor([1.], dtype=torch.bfloat16), tensor([0.9990]))
    """
    check_alive(state)
    return widest(state)


def to_module(state: TrainState, module: nn.Module, *, rank0_only: bool = False) -> None:
    """Writes trained parameters into a module: master copies where there are some, and changing buffers.

    Buffers come from the model state, or from a part, by the module's names. Leaves are gathered in sequence.
    Collective.

    Args:
        state: state of a step over the parameters from `from_module(module)`.
        module: module to write into. Parameters keep their dtype, but parameters on `meta` are replaced, in the dtype
            of the state.
        rank0_only: whether the other ranks leave the module unchanged. A written module takes memory on each rank.

    Raises:
        TypeError: `state` is not a state.
        ValueError: names or shapes do not fit the module. The message lists all.
        DonatedError: the state was consumed by a step.

    Example:
        >>> import shardfn as sf
        >>> module = nn.Linear(2, 1, bias=False)
        >>> params, apply = sf.from_module(module)
        >>> step = sf.sharded_step(lambda p, x: apply(p, x).sum(), sf.optim.sgd(1.0))
        >>> before = module.weight.detach().clone()
        >>> state, _ = step(step.init(params), torch.ones(1, 2))
        >>> to_module(state, module)
        >>> torch.allclose(module.weight, before - 1)
        True
    """
    check_passed(state, module, call="sf.to_module(state, module)")
    module = core.uncompiled(module)
    params = master_params(state)
    names, buffers = parameter_names(module), dict(core.named_buffers(module))
    changed = _changed_buffers(state, buffers)
    _check_params(params, {name: tuple(p.shape) for name, p in core.named_parameters(module)}, type(module).__name__)
    writes = not rank0_only or is_writer(core.tree_leaves(params))
    for name, x in params.items():
        value = gather_leaf(x)
        if writes:
            _put_param(module, names[name], value)
    for name, x in changed.items():
        value = gather_leaf(x)
        if writes:
            with torch.no_grad():
                buffers[name].copy_(value)


def export(
    state: TrainState,
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    file_bytes: int = 5 << 30,
    tokenizer: Any = None,
) -> None:
    """Writes trained weights as `save_pretrained` does, for `from_pretrained`: `module_to_hf(master_params)`.

    The files are safetensors, `config.json`, `generation_config.json` and the tokenizer's files, equal byte for byte to
    transformers' for a single file of weights. Leaves are gathered in sequence. The first rank writes. Collective.

    Args:
        state: state of a step over the parameters from `from_module(module)`.
        module: module for names, configurations, and buffers that `state.model_state` lacks. Parameters may be on
            `meta`. A module in `DistributedDataParallel` or `torch.compile` counts as the module inside.
        directory: directory for the files, made if missing.
        dtype: dtype to convert to, for all or by name: `interop.file_dtypes(module, MODEL)` keeps the dtypes of a
            model's files. Default: the dtype of the master copies.
        file_bytes: size in bytes after which another file begins.
        tokenizer: tokenizer of transformers, or a processor, whose files and chat template are written too.

    Raises:
        TypeError: `state` is not a state, or the tokenizer has no `save_pretrained`.
        ValueError: names or shapes do not fit the module, or weights are not finite. The message lists all.
        DonatedError: the state was consumed by a step.

    Example:
        >>> import tempfile
        >>> import shardfn as sf
        >>> module, directory = nn.Linear(2, 1), tempfile.mkdtemp()
        >>> params, apply = sf.from_module(module)
        >>> step = sf.sharded_step(lambda p, x: apply(p, x).sum(), sf.optim.sgd(1.0))
        >>> export(step.init(params), module, directory)
        >>> sorted(sf.interop.Archive(directory))
        ['bias', 'weight']
    """
    check_passed(state, module, call="sf.export(state, module, directory)")
    module = core.uncompiled(module)
    params = master_params(state)
    shapes = {name: tuple(p.shape) for name, p in core.named_parameters(module)}
    _check_params(params, shapes, type(module).__name__)
    own = _changed_buffers(state, dict(core.named_buffers(module)))
    module_to_hf(module, params, directory, dtype=dtype, file_bytes=file_bytes, buffers=own, tokenizer=tokenizer)


def _changed_buffers(state: TrainState, own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the buffers of a module that are in the model state, by name.

    Buffers may be a part of the model state, such as `{"net": buffers, "steps": count}`.

    Args:
        state: state of a step.
        own: buffers of the module by name.

    Raises:
        ValueError: several parts of the model state have a buffer of the same name. The message lists the parts.
    """
    found: dict[str, list[tuple[tuple[Any, ...], str, Any]]] = {}
    named = core.named_leaves(state.model_state, "model_state")
    for entries, (path, x) in zip(core.tree_entries(state.model_state), named, strict=True):
        if entries and entries[-1] in own:
            found.setdefault(entries[-1], []).append((entries, path, x))
    nearest = {name: min(len(entries) for entries, _, _ in rows) for name, rows in found.items()}
    found = {name: [row for row in rows if len(row[0]) == nearest[name]] for name, rows in found.items()}
    core.raise_all(
        ValueError,
        "the model state has several values for buffers of the module. Pass a state with the right part of it,"
        " state._replace(model_state=...):",
        [f"{name}: {', '.join(path for _, path, _ in rows)}" for name, rows in found.items() if len(rows) > 1],
    )
    return {name: rows[0][2] for name, rows in found.items()}


def _check_params(params: core.PyTree, shapes: Mapping[str, tuple[int, ...]], what: str) -> None:
    if not isinstance(params, Mapping):
        raise ValueError(
            f"the parameters of the state must be a dict of names, as from_module({what}) returns, got a"
            f" {type(params).__name__}. Build the step over those parameters."
        )
    problems = [f"{n} is missing.{core.did_you_mean(n, list(params))}" for n in shapes if n not in params]
    problems += [
        f"{n} is no parameter of the module.{core.did_you_mean(n, list(shapes))}" for n in params if n not in shapes
    ]
    both = [(n, tuple(params[n].shape), shape) for n, shape in shapes.items() if n in params]
    problems += [f"{n} is {here}, but {there} in the module" for n, here, there in both if here != there]
    core.raise_all(ValueError, f"the state is not one of the parameters of the {what}:", problems)


@torch.no_grad()
def _put_param(module: nn.Module, names: list[str], value: Tensor) -> None:
    """Writes a parameter. A parameter on `meta` is replaced under all names."""
    p = module.get_parameter(names[0])
    if not p.is_meta:
        p.copy_(value)
        return
    fresh = nn.Parameter(value.clone(), requires_grad=p.requires_grad)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, fresh)
