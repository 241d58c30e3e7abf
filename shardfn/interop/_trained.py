"""Exports trained parameters, the widest copy of each, into a module, into files of weights, or into a program.

A program is a model with its weights for another runtime: ONNX, or a package of AOTInductor that torch loads without
Python code of the model.
"""

import importlib.util
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardfn import core
from shardfn._torch import write_package
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


Format = Literal["safetensors", "onnx", "aoti"]
_SUFFIXES = {"onnx": ".onnx", "aoti": ".pt2"}
_PACKAGES = "onnx", "onnxscript"


def export(
    state: TrainState,
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    format: Format = "safetensors",
    inputs: Sequence[Tensor] | None = None,
    dynamic: Sequence[str] = ("batch", "length"),
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    file_bytes: int = 5 << 30,
    tokenizer: Any = None,
) -> None:
    """Writes trained weights as `save_pretrained` does, for `from_pretrained`, or a program for another runtime.

    The weights are `module_to_hf(master_params)`. See `export_program` for formats "onnx" and "aoti".

    The files are safetensors, `config.json`, `generation_config.json` and the tokenizer's files, equal byte for byte to
    transformers' for a single file of weights. Leaves are gathered in sequence. The first rank writes. Collective.

    Args:
        state: state of a step over the parameters from `from_module(module)`.
        module: module for names, configurations, and buffers that `state.model_state` lacks. Parameters may be on
            `meta`. A module in `DistributedDataParallel` or `torch.compile` counts as the module inside.
        directory: directory for the files, made if missing. For a program the path of the file.
        format: "safetensors", "onnx" or "aoti".
        inputs: tensors with which the module is called. Only for a program.
        dynamic: names of the leading dims of the inputs that may have other sizes. Only for a program.
        dtype: dtype to convert to, for all or by name: `interop.file_dtypes(module, MODEL)` keeps the dtypes of a
            model's files. Default: the dtype of the master copies.
        file_bytes: size in bytes after which another file begins.
        tokenizer: tokenizer of transformers, or a processor, whose files and chat template are written too.

    Raises:
        TypeError: `state` is not a state, or the tokenizer has no `save_pretrained`.
        ValueError: names or shapes do not fit the module, or weights are not finite. The message lists all. Or an
            argument belongs to another format.
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
    if (format == "safetensors") != (inputs is None):
        raise ValueError(
            f"export: inputs must be given for the formats onnx and aoti only, got format={format!r} and"
            f" {'no inputs' if inputs is None else 'inputs'}. Pass inputs=(tokens,) for a program, or leave inputs out."
        )
    if inputs is not None:
        buffers = {name: gather_leaf(x) for name, x in own.items()}

        def call(params: dict[str, Any], *args: Tensor) -> Any:
            return torch.func.functional_call(module, params | buffers, args)

        export_program(params, call, inputs, directory, format=format, dynamic=dynamic)
        return
    module_to_hf(module, params, directory, dtype=dtype, file_bytes=file_bytes, buffers=own, tokenizer=tokenizer)


def export_program(
    params: core.PyTree,
    apply: Callable[..., Any],
    inputs: Sequence[Tensor],
    path: str | os.PathLike[str],
    *,
    format: Format = "onnx",
    dynamic: Sequence[str] = ("batch", "length"),
) -> None:
    """Writes a function with its parameters as a program: ONNX, or a package of AOTInductor. Collective.

    A program of ONNX runs in onnxruntime, with inputs named `input_0`, `input_1` and so on. A package runs in torch by
    `torch._inductor.aoti_load_package(path)`, on a processor of the same kind.

    Args:
        params: state, parameters of a state, or a tree of tensors, such as the result of `sparse.compact`.
        apply: function `apply(params, *inputs)`, for example `functools.partial(gpt.apply, config)`. The program
            returns its tensor, or the logits of an output of transformers.
        inputs: example of each input. Dims with names must be 2 or more here.
        path: file, which ends in ".onnx" or ".pt2".
        format: "onnx" or "aoti".
        dynamic: names of the leading dims of all inputs that may have other sizes. (): all sizes are fixed.

    Raises:
        ValueError: another format, another suffix, an example too small, or a program that fixes a dynamic dim.
        ImportError: a package for ONNX is missing.
        DonatedError: the state was consumed by a step.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> params, inputs = {"w": torch.ones(3, 2)}, [torch.ones(2, 3)]
        >>> export_program(params, lambda p, x: x @ p["w"], inputs, f"{directory}/model.bin")
        Traceback (most recent call last):
        ValueError: export_program: a file of format 'onnx' must end in '.onnx', got 'model.bin'. Rename the path.

    References:
        ONNX, https://onnx.ai. AOTInductor, https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
    """
    file = pathlib.Path(path)
    if format not in _SUFFIXES:
        raise ValueError(f"export_program: format must be 'onnx' or 'aoti', got {format!r}. For weights, call export.")
    if file.suffix != _SUFFIXES[format]:
        raise ValueError(
            f"export_program: a file of format {format!r} must end in {_SUFFIXES[format]!r}, got {file.name!r}. Rename"
            " the path."
        )
    small = [
        f"inputs[{i}] of shape {tuple(x.shape)} must have 2 or more along dim {d} ({name})"
        for i, x in enumerate(inputs)
        for d, name in enumerate(dynamic[: x.ndim])
        if x.shape[d] < 2
    ]
    core.raise_all(ValueError, "export_program: torch takes sizes 0 and 1 as fixed. Pass a larger example:", small)
    missing = [name for name in _PACKAGES if format == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"format 'onnx' needs {' and '.join(missing)}: pip install 'shardfn[onnx]'")
    leaves = core.tree_leaves(params.params if isinstance(params, TrainState) else params)
    tree = master_params(params) if isinstance(params, TrainState) else params
    program = _ExportedFunction(core.tree_map(gather_leaf, tree), apply)
    if is_writer(leaves):
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_program(program, tuple(inputs), file, format, dynamic)


class _ExportedFunction(nn.Module):
    """A function as a module, whose parameters have the names of the tree's leaves."""

    def __init__(self, params: core.PyTree, apply: Callable[..., Any]) -> None:
        super().__init__()
        leaves, self.treedef = core.tree_flatten(params)
        self.apply_to = apply
        self.names = [re.sub(r"\W+", "_", path).strip("_") or "leaf" for path in core.tree_paths(params, "")]
        for name, x in zip(self.names, leaves, strict=True):
            self.register_buffer(name, x.detach())

    def forward(self, *inputs: Tensor) -> Any:
        params = core.tree_unflatten(self.treedef, [self.get_buffer(name) for name in self.names])
        result = self.apply_to(params, *inputs)
        return result.logits if hasattr(result, "logits") else result


def _write_program(
    program: nn.Module, inputs: tuple[Tensor, ...], file: pathlib.Path, format: Format, dynamic: Sequence[str]
) -> None:
    # A range follows from the function, such as the longest text of a table of positions.
    shapes = tuple(dict.fromkeys(range(min(len(dynamic), x.ndim)), torch.export.Dim.DYNAMIC) for x in inputs)
    with warnings.catch_warnings():  # torch and onnx warn of parts of themselves
        warnings.simplefilter("ignore")
        try:
            with torch.no_grad():
                exported = torch.export.export(program.eval(), inputs, dynamic_shapes=(shapes,), strict=False)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"export_program: the function must run for any {' and '.join(dynamic) or 'sizes'} as given in dynamic,"
                f" got {type(error).__name__}: {error}"
            ) from error
        if format == "aoti":
            _compile_package(exported, file)
            return
        names = [f"input_{i}" for i in range(len(inputs))]
        made = torch.onnx.export(exported, dynamo=True, input_names=names, output_names=["output"], verbose=False)
        assert made is not None
        made.save(str(file))


def _compile_package(exported: Any, file: pathlib.Path) -> None:
    try:
        write_package(exported, str(file))
    except RuntimeError as error:
        raise ValueError(
            "export_program: AOTInductor must compile the function, and compiles no loop over a dynamic length, got"
            f" {type(error).__name__}: {error}. Pass dynamic=('batch',) or dynamic=(), or format='onnx'"
        ) from error


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
        f"{n} is not a parameter of the module.{core.did_you_mean(n, list(shapes))}" for n in params if n not in shapes
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
