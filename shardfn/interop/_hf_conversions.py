"""Tensors of files of transformers as parameters of its modules, and back: experts one by one against fused leaves.

A file has `experts.3.w1.weight`, and the module of transformers 5 has `experts.gate_up_proj` [E, 2F, D]. The tables of
transformers name the parts of a leaf, and operations join the parts. Here operations are applied to headers, for
shapes, and to the parts of a block, so a rank reads only the rank's experts.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.core import raise_all
from shardfn.interop.leaves import Archive
from shardfn.interop.quantized import QuantizedArchive

Box = Sequence[tuple[int, int]]


class Kept(NamedTuple):
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


class ConvertedArchive(Mapping[str, Kept]):
    """Tensors of an archive under a module's names, converted during the reading.

    Args:
        archive: files with the tensors.
        conversions: conversions of all tensors.

    Raises:
        ValueError: parts of a leaf do not fit together. The message lists all.
    """

    def __init__(self, archive: Archive | QuantizedArchive, conversions: Iterable[WeightConversion]) -> None:
        self.directory, self._archive = archive.directory, archive
        self._kept: dict[str, Kept] = {}
        self._made_by: dict[str, WeightConversion] = {}
        problems = []
        for made in conversions:
            try:
                leaves = made.run(lambda _, name: _meta_tensor(archive, name))
            except (RuntimeError, ValueError, IndexError) as error:
                parts = ", ".join(f"{len(names)} of {pattern}" for pattern, names in made.sources.items())
                problems.append(f"{made.key} cannot be made of {parts}: {error}")
                continue
            self._kept |= {name: Kept(x.dtype, tuple(x.shape)) for name, x in leaves.items()}
            self._made_by |= dict.fromkeys(leaves, made)
        raise_all(ValueError, f"tensors of {archive.directory} do not fit together:", problems)

    def __getitem__(self, name: str) -> Kept:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def num_experts(self, name: str) -> int | None:
        """Returns the number of a leaf's experts in the files, or None for leaves without experts."""
        made = self._made_by[name]
        return self._kept[name].shape[0] if made.by_expert else None

    def box(self, name: str, box: Box) -> Tensor:
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


def as_module(
    archive: Archive | QuantizedArchive, module: nn.Module, known: Iterable[str]
) -> Archive | QuantizedArchive | ConvertedArchive:
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


def saved_together(module: nn.Module, names: Iterable[str]) -> list[list[str]]:
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


def as_saved(module: nn.Module, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
    archive: Archive | QuantizedArchive, module: Any, known: Mapping[str, bool], table: Sequence[Any]
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


def _meta_tensor(archive: Archive | QuantizedArchive, name: str) -> Tensor:
    kept = archive[name]
    return torch.empty(kept.shape, dtype=kept.dtype, device="meta")


def _split_box(made: WeightConversion, shapes: Mapping[str, Sequence[int]], box: Box) -> dict[str, Box]:
    """Returns the box of each pattern's tensors, of leaves [E, ...] in a row along dim `made.joint_dim`."""
    assert made.joint_dim is not None
    out: dict[str, Box] = {}
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
