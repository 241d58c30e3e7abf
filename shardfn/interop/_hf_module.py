"""Weights of any module of transformers, by the module's names, for `from_module`, and back.

Tensors of files of transformers as parameters of its modules, and back: experts one by one against fused leaves.

A file has `experts.3.w1.weight`, and the module of transformers 5 has `experts.gate_up_proj` [E, 2F, D]. The tables of
transformers name the parts of a leaf, and operations join the parts. Here operations are applied to headers, for
shapes, and to the parts of a block, so a rank reads only the rank's experts.
"""

import contextlib
import copy
import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardfn import core
from shardfn.interop.leaves import ArchiveWriter, WrittenByFirst, gather_leaf, parameter_names
from shardfn.interop.quantized import OpenedArchive, open_archive

_Box = Sequence[tuple[int, int]]


class _Kept(NamedTuple):
    """Dtype and shape of a leaf in the files.

    Attributes:
        dtype: dtype of the files.
        shape: shape after the conversion.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class WeightConversion:
    """Tensors of files that a conversion of transformers joins, or divides.

    Attributes:
        key: first leaf that the conversion makes.
        converter: converter of transformers. None leaves the tensor unchanged.
        sources: names in the files by the converter's pattern, in the order of experts.
        module: module, with a config that some operations read.
    """

    key: str
    converter: Any
    sources: Mapping[str, Sequence[str]]
    module: nn.Module

    def run(self, read: Callable[[str, str], Tensor], experts: slice = slice(None)) -> dict[str, Tensor]:
        """Returns the leaves made of tensors `read(pattern, name)`.

        Only of some experts, where `by_expert`.
        """
        if self.converter is None:
            ((pattern, (name,)),) = self.sources.items()
            return {self.key: read(pattern, name)}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names[experts]:
                converter.add_tensor(self.key, name, pattern, read(pattern, name))
        return converter.convert(self.key, model=self.module, config=self.module.config)

    @functools.cached_property
    def by_expert(self) -> bool:
        """Returns whether dim 0 of the leaf counts the tensors of each pattern: experts, never mixed."""
        kinds = [type(op).__name__ for op in self._list_operations]
        dims = [d for op in self._list_operations[1:] for d in _changed_dims(op)]
        return kinds[:1] == ["MergeModulelist"] and self._list_operations[0].dim == 0 and all(d > 0 for d in dims)

    @functools.cached_property
    def joint_dim(self) -> int | None:
        """Returns the dim of the leaf along which the patterns lie in sequence.

        None where the patterns do not lie so.
        """
        kinds = [type(op).__name__ for op in self._list_operations]
        if not self.by_expert or kinds[1:] not in ([], ["Concatenate"]):
            return None
        return self._list_operations[1].dim if kinds[1:] else 1

    @property
    def _list_operations(self) -> list[Any]:
        return [] if self.converter is None else self.converter.operations


class ConvertedArchive(Mapping[str, _Kept]):
    """Tensors of an archive under a module's names, converted during the reading.

    Args:
        archive: files with the tensors.
        conversions: conversions of all tensors.

    Raises:
        ValueError: parts of a leaf do not fit together. The message lists all.
    """

    def __init__(self, archive: OpenedArchive, conversions: Iterable[WeightConversion]) -> None:
        self.directory, self._archive = archive.directory, archive
        self._kept: dict[str, _Kept] = {}
        self._made_by: dict[str, WeightConversion] = {}
        problems = []
        for made in conversions:
            try:
                leaves = made.run(lambda _, name: _meta_tensor(archive, name))
            except (RuntimeError, ValueError, IndexError) as error:
                parts = ", ".join(f"{len(names)} of {pattern}" for pattern, names in made.sources.items())
                problems.append(f"{made.key} cannot be made of {parts}: {error}")
                continue
            self._kept |= {name: _Kept(x.dtype, tuple(x.shape)) for name, x in leaves.items()}
            self._made_by |= dict.fromkeys(leaves, made)
        core.raise_all(ValueError, f"tensors of {archive.directory} do not fit together:", problems)

    def __getitem__(self, name: str) -> _Kept:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def num_experts(self, name: str) -> int | None:
        """Returns the number of a leaf's experts in the files, or None for leaves without experts."""
        made = self._made_by[name]
        return self._kept[name].shape[0] if made.by_expert else None

    def box(self, name: str, box: _Box) -> Tensor:
        """Returns a box of a leaf, in the file's dtype. Only experts in the box are read."""
        made, kept = self._made_by[name], self._kept[name]
        if made.converter is None:
            return self._archive.box(made.sources[made.key][0], box)
        if any(lo >= hi for lo, hi in box):
            return torch.empty([hi - lo for lo, hi in box], dtype=kept.dtype)
        experts = slice(*box[0]) if made.by_expert else slice(None)
        if made.joint_dim is not None:
            parts = _split_box(made, {p: self._archive[names[0]].shape for p, names in made.sources.items()}, box)
            return made.run(lambda pattern, name: self._archive.box(name, parts[pattern]), experts)[name]
        whole = made.run(lambda _, name: self._load_tensor(name), experts)[name]
        for dim, (lo, hi) in enumerate(box):
            whole = whole.narrow(dim, 0 if dim == 0 and made.by_expert else lo, hi - lo)
        return whole

    def _load_tensor(self, name: str) -> Tensor:
        return self._archive.box(name, [(0, n) for n in self._archive[name].shape])


def as_module(archive: OpenedArchive, module: nn.Module, known: Iterable[str]) -> OpenedArchive | ConvertedArchive:
    """Returns the archive under the names of the module: unchanged where the files have the same names.

    Args:
        archive: files with the tensors.
        module: module of transformers, or any module with the names of the files.
        known: names of the module's parameters and buffers, including tied parameters.
    """
    names = dict.fromkeys(known, True)
    if all(name in names for name in archive) or (tables := _conversion_tables(module)) is None:
        return archive
    return ConvertedArchive(
        archive, _find_conversions(archive, module, names, tables.get_model_conversion_mapping(module))
    )


def _saved_together(module: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """Returns the groups of leaves converted together for the files of transformers.

    Args:
        module: any module. Outside of transformers, each leaf is a group.
        names: names of the leaves.
    """
    if _conversion_tables(module) is None:
        return [[name] for name in names]
    from transformers.core_model_loading import WeightConverter, apply_converters

    table: list[Any] = [t.reverse_transform() for t in reversed(_table_of_saving(module))]
    converters = [t for t in table if isinstance(t, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        key, pattern = apply_converters(name, converters)
        groups.setdefault(name if pattern is None else key, []).append(name)
    return list(groups.values())


def _as_saved(module: nn.Module, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a group of leaves as `save_pretrained` writes them: under the names of the files, experts one by one."""
    if _conversion_tables(module) is None:
        return dict(leaves)
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = module
    return revert_weight_conversion(model, dict(leaves))


def _conversion_tables(module: nn.Module) -> Any:
    """Returns the conversions of transformers, or None for other modules, or without conversions."""
    try:
        from transformers import PreTrainedModel, conversion_mapping
    except ImportError:
        return None
    return conversion_mapping if isinstance(module, PreTrainedModel) else None


def _table_of_saving(module: Any) -> list[Any]:
    """Returns the table of the model's loading, or the default without prefixes, as `save_pretrained` does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    loaded = getattr(module, "_weight_conversions", None)
    if loaded is not None:
        return loaded
    return [t for t in get_model_conversion_mapping(module, add_legacy=False) if not isinstance(t, PrefixChange)]


def _find_conversions(
    archive: OpenedArchive, module: Any, known: Mapping[str, bool], table: Sequence[Any]
) -> Iterator[WeightConversion]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [t for t in table if isinstance(t, WeightRenaming)]
    converters = [t for t in table if isinstance(t, WeightConverter)]
    of_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    rename: Any = functools.partial(
        rename_source_key, base_model_prefix=module.base_model_prefix, meta_state_dict=dict(known)
    )
    joined: dict[str, dict[str, list[str]]] = {}
    for name in sorted(archive, key=dot_natural_key):
        key, pattern = rename(name, renamings, converters)
        if key not in known and name in known:
            key, pattern = rename(name, [], [])
        if key not in known:  # left over: under the name that the file has
            key, pattern = name, None
        if pattern is None:
            yield WeightConversion(key, None, {key: [name]}, module)
        else:
            joined.setdefault(key, {}).setdefault(pattern, []).append(name)
    for key, sources in joined.items():
        yield WeightConversion(key, of_pattern[next(iter(sources))], sources, module)


def _meta_tensor(archive: OpenedArchive, name: str) -> Tensor:
    kept = archive[name]
    return torch.empty(kept.shape, dtype=kept.dtype, device="meta")


def _split_box(made: WeightConversion, shapes: Mapping[str, Sequence[int]], box: _Box) -> dict[str, _Box]:
    """Returns the box of each pattern's tensors, of leaves [E, ...] in a row along dim `made.joint_dim`."""
    assert made.joint_dim is not None
    out: dict[str, _Box] = {}
    start, (lo, hi) = 0, box[made.joint_dim]
    for pattern in (p for p in made.converter.source_patterns if p in shapes):
        n = shapes[pattern][made.joint_dim - 1]
        own = min(max(lo - start, 0), n), min(max(hi - start, 0), n)
        out[pattern] = [own if dim == made.joint_dim else b for dim, b in enumerate(box)][1:]
        start += n
    return out


def _changed_dims(op: Any) -> list[int]:
    """Returns the dims that an operation on [E, ...] changes, or 0 where unknown."""
    if type(op).__name__ in ("Concatenate", "Interleave"):
        return [op.dim]
    return [op.dim0, op.dim1] if type(op).__name__ == "Transpose" and not op.check_dims else [0]


def write_beside(
    module: nn.Module, directory: str | os.PathLike[str], dtype: torch.dtype | None, tokenizer: Any = None
) -> None:
    """Writes `config.json`, `generation_config.json` and the files of a tokenizer, as far as present.

    Args:
        module: module with `config` and `generation_config`, which are not changed.
        directory: directory for the files.
        dtype: dtype of the written weights, for the config. None leaves the config's dtype.
        tokenizer: a tokenizer or processor of transformers, with its chat template.
    """
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_json_file"):
        saved: Any = type(config).from_dict(config.to_dict())
        saved.architectures = [type(module).__name__]
        if dtype is not None and hasattr(saved, "dtype"):
            saved.dtype = str(dtype).removeprefix("torch.")
        saved.to_json_file(pathlib.Path(directory) / "config.json")
    can_generate: Any = getattr(module, "can_generate", None)
    generation: Any = getattr(module, "generation_config", None)
    if callable(can_generate) and can_generate() and hasattr(generation, "save_pretrained"):
        generation.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def check_tokenizer(tokenizer: Any) -> None:
    """Refuses an object that has no files to write.

    Raises:
        TypeError: the object has no `save_pretrained`.
    """
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise TypeError(
            f"tokenizer={tokenizer!r} has no save_pretrained: pass a tokenizer or processor of transformers, such as"
            " AutoTokenizer.from_pretrained(...) gives."
        )


# Tables of rotary positions in older files, which modules compute themselves.
_OLD = (r"rotary_emb\.inv_freq$",)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Makes modules with parameters of only shape and dtype, on `meta`, while open. Buffers are real.

    Tied parameters stay tied. A single parameter at a time is in memory while a module is made.

    Example:
        >>> with without_weights():
        ...     module = nn.Linear(3, 2)
        >>> module.weight.device
        device(type='meta')
    """

    def replace_param(module: nn.Module, name: str, p: nn.Parameter | None) -> nn.Parameter | None:
        del module, name
        if p is None or p.device.type == "meta":
            return None
        return nn.Parameter(p.data.to("meta"), requires_grad=p.requires_grad)

    register: Any = register_module_parameter_registration_hook  # its type allows only hooks without a result
    handle = register(replace_param)
    try:
        yield
    finally:
        handle.remove()


def module_from_hf(
    module: nn.Module, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Returns the parameters of a module from `model.safetensors`, or several files, under `from_module`'s names.

    Where the files of a model of transformers have other names, or experts one by one, the tables of transformers
    convert the files. Of fused experts a rank reads only the rank's part. Quantised files of GPTQ, AWQ,
    compressed-tensors and fp8 in blocks are decoded during the reading, for a module of plain layers.

    Parameters are deferred: `step.init(params)` reads this rank's parts, leaf by leaf. The module's parameters are not
    touched, and may be on `meta` (`without_weights`). Buffers in the files are read into the module. Tensors that
    transformers drops at loading are ignored. Parameters with `requires_grad=False` are frozen, as from `from_module`.

    Args:
        module: module for names, shapes, tied and frozen parameters.
        directory: directory of the files.
        dtype: dtype to convert to. Default: float32 for tensors of 16 bits, which small updates would not change, and
            no conversion for other tensors. `Policy.bf16()` rounds parameters to bfloat16 and keeps master copies.

    Returns:
        A dict from names to deferred tensors, with a tied parameter once, under the first name.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: tensors are missing, left over, or of another shape, such as another number of experts, or a buffer
            is on `meta`. The message lists all.

    Example:
        >>> import tempfile
        >>> directory, module = tempfile.mkdtemp(), nn.Linear(3, 2)
        >>> module_to_hf(module, dict(module.named_parameters()), directory)
        >>> with without_weights():
        ...     other = nn.Linear(3, 2)
        >>> params = module_from_hf(other, directory)
        >>> torch.equal(params["weight"].full(), module.weight)
        True
    """
    module = core.uncompiled(module)
    names = parameter_names(module)
    archive, found = _archive_of(module, directory)
    buffers = {name: x for name, x in core.named_buffers(module) if name in archive}
    shapes = {name: tuple(p.shape) for name, p in core.named_parameters(module)}
    known = {name for every in names.values() for name in every} | buffers.keys()
    problems = [f"{n} is missing.{core.did_you_mean(n, archive)}" for n, at in found.items() if at is None]
    problems += [
        f"{n} is left over.{core.did_you_mean(n, known)}" for n in archive if not (n in known or _is_dropped(module, n))
    ]
    pairs = [(n, archive[at].shape, shapes[n]) for n, at in found.items() if at is not None]
    pairs += [(n, archive[n].shape, tuple(x.shape)) for n, x in buffers.items()]
    problems += [
        f"{n} is {there} in the file, but {here} in the module{_expert_note(archive, n, here)}"
        for n, there, here in pairs
        if there != here
    ]
    problems += [
        f"buffer {n} is on meta; make the module under `without_weights()`, which leaves buffers unchanged"
        for n, x in core.named_buffers(module)
        if x.is_meta
    ]
    core.raise_all(ValueError, f"the files of {archive.directory} do not fit the {type(module).__name__}:", problems)
    with torch.no_grad():
        for name, x in buffers.items():
            x.copy_(archive.box(name, [(0, n) for n in x.shape]))
    out = {first: _defer_leaf(archive, at, dtype) for first, at in found.items() if at is not None}
    return {name: x if module.get_parameter(name).requires_grad else core.frozen(x) for name, x in out.items()}


def file_dtypes(module: nn.Module, directory: str | os.PathLike[str]) -> dict[str, torch.dtype]:
    """Returns the dtype that each parameter of a module has in files, to write the same dtype.

    `export(state, module, out, dtype=file_dtypes(module, directory))` writes files like in `directory`, where
    `module_from_hf` has read tensors of 16 bits as float32.

    Args:
        module: module for names, tied parameters, and the conversions of transformers.
        directory: directory with `model.safetensors`, or several files with an index.

    Raises:
        FileNotFoundError: there are no such files.

    Example:
        >>> import tempfile
        >>> directory, module = tempfile.mkdtemp(), nn.Linear(3, 2, bias=False)
        >>> module_to_hf(module, dict(module.named_parameters()), directory, dtype=torch.bfloat16)
        >>> file_dtypes(module, directory)
        {'weight': torch.bfloat16}
    """
    archive, found = _archive_of(core.uncompiled(module), directory)
    return {first: archive[at].dtype for first, at in found.items() if at is not None}


def module_to_hf(
    module: nn.Module,
    params: Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    file_bytes: int = 5 << 30,
    buffers: Mapping[str, Any] = MappingProxyType({}),
    tokenizer: Any = None,
) -> None:
    """Writes parameters, buffers and configurations of a module, as `save_pretrained` does.

    Names are the module's. A model of transformers gets the names of the model's files, with experts one by one.

    Configurations are `config.json` and `generation_config.json`, where the module has such. Leaves are gathered one
    after another. The first rank writes. Collective over the mesh of the leaves.

    Args:
        module: module of the parameters.
        params: parameters from `from_module`, sharded or not.
        directory: directory for the files, made if missing.
        dtype: dtype to convert parameters to, for all or by name, as from `file_dtypes`. Default: the dtype of the
            leaves.
        file_bytes: size in bytes after which another file begins. Several files have an index.
        buffers: buffers by name to write in place of the module's, sharded or not, such as `state.model_state`.
        tokenizer: tokenizer of transformers, or a processor, whose files and chat template are written too.

    Raises:
        TypeError: the tokenizer has no `save_pretrained`.
        ValueError: the names or shapes do not fit the module, a buffer is on `meta`, or a parameter has elements that
            are not finite. The message lists all.
        OSError: the first rank could not write. No files are left. The other ranks raise a `RankError` with the
            message.

    Example:
        >>> import tempfile
        >>> directory, module = tempfile.mkdtemp(), nn.Linear(3, 2)
        >>> module_to_hf(module, dict(module.named_parameters()), directory)
        >>> sorted(Archive(directory))
        ['bias', 'weight']
    """
    check_tokenizer(tokenizer)
    module = core.uncompiled(module)
    shapes = {name: tuple(p.shape) for name, p in core.named_parameters(module)}
    problems = [f"{n} is missing.{core.did_you_mean(n, params)}" for n in shapes if n not in params]
    problems += [
        f"{n} is not a parameter of the module.{core.did_you_mean(n, shapes)}" for n in params if n not in shapes
    ]
    both = [(n, tuple(params[n].shape), shape) for n, shape in shapes.items() if n in params]
    problems += [f"{n} is {here}, but {there} in the module" for n, here, there in both if here != there]
    kept = set(core.state_names(module))
    written = {name: buffers.get(name, x) for name, x in core.named_buffers(module) if name in kept}
    problems += [
        f"{n} is a buffer on meta. Pass its value in buffers=" for n, x in written.items() if x.device.type == "meta"
    ]
    core.raise_all(ValueError, f"module_to_hf: these are not the parameters of the {type(module).__name__}:", problems)
    kinds = dtype if isinstance(dtype, Mapping) else dict.fromkeys(params, dtype)
    leaves = {name: (x, kinds.get(name) or x.dtype) for name, x in params.items()}
    leaves |= {name: (x, x.dtype) for name, x in written.items()}
    groups, entries, masks = _saved_together(module, leaves), {}, set[str]()
    for group in groups:
        like = {name: torch.empty(leaves[name][0].shape, dtype=leaves[name][1], device="meta") for name in group}
        saved = {name: (x.dtype, tuple(x.shape)) for name, x in _as_saved(module, like).items()}
        entries |= saved
        masks |= {*saved} if written.keys() >= {*group} else set()  # a buffer may be a mask of -inf
    # The config has the dtype of most elements.
    sizes: dict[torch.dtype, int] = {}
    for x, kind in leaves.values():
        sizes[kind] = sizes.get(kind, 0) + (x.numel() if kind.is_floating_point else 0)
    wide = max(sizes, key=lambda kind: sizes[kind]) if any(sizes.values()) else None

    def describe_files() -> None:
        write_beside(module, directory, wide, tokenizer)

    with WrittenByFirst(
        list(params.values()),
        "interop.module_to_hf",
        lambda: ArchiveWriter(directory, entries, file_bytes=file_bytes, allow_nonfinite=masks),
        describe_files,
    ) as out:
        for group in groups:
            gathered = {name: gather_leaf(leaves[name][0]) for name in group}
            converted = {name: x.to(leaves[name][1]) for name, x in gathered.items()}
            out.put_all(functools.partial(_as_saved, module, converted))


def _archive_of(
    module: nn.Module, directory: str | os.PathLike[str]
) -> tuple[OpenedArchive | ConvertedArchive, dict[str, str | None]]:
    """Returns the tensors of files by the module's names, and each parameter's name in the files."""
    names = parameter_names(module)
    every_name = {name for every in names.values() for name in every} | {name for name, _ in core.named_buffers(module)}
    archive = as_module(open_archive(directory), module, every_name)
    return archive, {first: next((name for name in every if name in archive), None) for first, every in names.items()}


def _is_dropped(module: nn.Module, name: str) -> bool:
    """Returns whether transformers drops a tensor at loading."""
    patterns: Any = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in (*patterns, *_OLD))


def _expert_note(archive: OpenedArchive | ConvertedArchive, name: str, shape: tuple[int, ...]) -> str:
    num = archive.num_experts(name) if isinstance(archive, ConvertedArchive) else None
    return "" if num is None or num == shape[0] else f": the files have {num} experts, and the module {shape[0]}"


def _defer_leaf(archive: OpenedArchive | ConvertedArchive, name: str, dtype: torch.dtype | None) -> core.Draw:
    kept = archive[name]
    to = dtype or (torch.float32 if kept.dtype in (torch.bfloat16, torch.float16) else kept.dtype)

    def read_block(slices: tuple[slice, ...]) -> Tensor:
        rest = (slice(None),) * (len(kept.shape) - len(slices))
        box = [s.indices(n)[:2] for s, n in zip((*slices, *rest), kept.shape, strict=True)]
        return archive.box(name, [(lo, max(lo, hi)) for lo, hi in box]).to(to)

    return core.Draw(read_block, kept.shape, to, torch.device("cpu"))
