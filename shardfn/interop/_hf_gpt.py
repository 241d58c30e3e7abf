"""Weights of decoders of transformers, such as Qwen3 and Gemma 3, as parameters of `models.gpt`, and back.

D model, H heads, G key and value heads, K head dim, F ffn, V vocabulary.
"""

import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import core
from shardfn.interop.leaves import Archive, ArchiveWriter, WrittenByFirst, gather_layer, gather_leaf
from shardfn.interop.quantized import CodedArchive, open_archive
from shardfn.kernels import BLOCK_BYTES, GROUP
from shardfn.models import gpt

from ._hf_config import gpt_config, hf_config, read_config, split_llava
from ._hf_rows import Row, rows


def _empty_for(row: Row, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised flat tensor of the size of `row`'s tensor."""
    return torch.empty(torch.Size(row.view).numel(), dtype=dtype, device="cpu")


Slices = tuple[slice, ...]

# Entries of older files: buffers without information, and heads equal to the embedding.
_PASSED_OVER = re.compile(r"\.(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$|attention\.mask$")


def gpt_from_hf(
    directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, keep_codes: bool = False, **changes: Any
) -> tuple[gpt.Config, gpt.Params]:
    """Returns a model of transformers as a `Config` and parameters that are read at their use.

    Only headers are read here. The leaves are deferred: `step.init(params)` reads only the rows and columns of this
    rank, so that at most one leaf is in memory beyond the rank's own parts.

    Quantised files of GPTQ, AWQ, compressed-tensors and fp8 in blocks are decoded during the reading. The
    language model of a LLaVA is read, with `images`.

    Args:
        directory: directory with `config.json`, and `model.safetensors` or several files with an index.
        dtype: dtype to convert to. Default: the dtype of the files, which must then be a single dtype.
        keep_codes: whether weights of quantised files are blocks of codes, uint8, as `decoder(config)` of a
            batch-invariant config reads them. Only weights that codes of the kernels hold exactly. All other weights
            are decoded.
        **changes: other fields of the `Config`, such as `stacked=True` or `per_head=True`.

    Returns: The config, and a tree as of `gpt.init(config, key)`. Any use except by `step.init` reads the whole leaf:
        `tree_map(lambda x: x.full(), params)` on a single device.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model is of another type, or tensors are missing, left over, or of another shape. The message
            lists all.
        DamagedError: a file is not a safetensors file, or was cut short.

    Example:
        >>> import tempfile
        >>> from shardfn.core import key
        >>> directory = tempfile.mkdtemp()
        >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, tie_embeddings=True)
        >>> gpt_to_hf(directory, config, gpt.init(config, key(0)))
        >>> config, params = gpt_from_hf(directory, stacked=True)
        >>> params["blocks"]["wq"]
        Draw(shape=(2, 32, 32), dtype=torch.float32, device=cpu)
    """
    told = read_config(directory)
    config, archive = gpt_config(told, **changes), open_archive(directory)
    language, _ = split_llava(told)
    if language is not told:
        if not isinstance(archive, Archive):
            raise ValueError(f"{directory}: weights of a llava must be floats, got codes. Use the files of floats.")
        archive = archive.rename(_name_of_llava)
    return config, params_of_archive(archive, config, language["model_type"], dtype, keep_codes)


def _name_of_llava(name: str) -> str | None:
    """Returns the name of a tensor in the files of the language model itself, or None for other tensors.

    Example:
        >>> _name_of_llava("language_model.model.norm.weight"), _name_of_llava("model.language_model.norm.weight")
        ('model.norm.weight', 'model.norm.weight')
        >>> _name_of_llava("vision_tower.post_layernorm.bias")
    """
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.") if name.startswith(("language_model.", "lm_head.")) else None


def params_of_archive(
    archive: Archive | CodedArchive, config: gpt.Config, kind: str, dtype: torch.dtype | None, keep_codes: bool = False
) -> gpt.Params:
    """Returns deferred parameters of a model from tensors under the names of transformers.

    Args:
        archive: files of the model.
        config: config of the model.
        kind: model type of transformers, which has the layout.
        dtype: dtype of the parameters. None: the dtype of the tensors.
        keep_codes: whether weights of linear layers stay blocks of codes where the archive has codes.

    Raises:
        ValueError: tensors are missing, left over, or of another shape or dtype. The message lists all. Or blocks of
            codes are asked for a config without such layers.
    """
    if keep_codes and (config.stacked or config.per_head):
        raise ValueError(
            "keep_codes=True must have layers one by one and heads in one dim, got"
            f" stacked={config.stacked}, per_head={config.per_head}."
        )
    coded = archive if keep_codes and not isinstance(archive, Archive) else None
    # The rows of an embedding are looked up, unless the table is the head, too.
    floats = () if config.tie_embeddings else ("embed",)
    table = rows(config, kind)
    prefix = _name_prefix(archive, table)
    _check_names(archive, table, config, prefix, dtype)
    made: torch.dtype = dtype or archive[prefix(table[0].name)].dtype

    def draw_leaf(row: Row, i: int | None = None) -> core.Draw:
        names = [prefix(name) for name in row.list_names(0 if i is None else i)]
        name, alone = names[0], row.pick is None and row.span is None and row.path[-1] not in floats
        if coded is not None and name in coded.codes and alone:
            return _draw_blocks(coded, name)
        shape = _leaf_shape(config, row)
        return core.Draw(
            lambda at: _read_leaf(archive, names, row, shape, at).to(made), shape, made, torch.device("cpu")
        )

    params: dict[str, Any] = {row.path[0]: draw_leaf(row) for row in table if len(row.path) == 1}
    per_block = [row for row in table if len(row.path) == 2]
    num = config.num_layers
    layers = [{row.path[1]: draw_leaf(row, i) for row in per_block if i in row.list_layers(num)} for i in range(num)]
    params["blocks"] = layers
    return gpt.stack_blocks(config, params, _stack_layers) if config.stacked else params


def gpt_to_hf(
    directory: str | os.PathLike[str],
    config: gpt.Config,
    params: gpt.Params,
    *,
    model_type: str | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 << 30,
) -> None:
    """Writes a model so that `transformers.AutoModelForCausalLM.from_pretrained(directory)` has the same logits.

    Leaves are gathered in sequence, stacked leaves layer by layer. The first rank writes. Collective over the mesh of
    the leaves.

    Args:
        directory: directory for the files, made if missing.
        config: config of the model.
        params: parameters as of `gpt.init(config, key)`, sharded or not.
        model_type: model type of transformers. Default: the type that fits.
        dtype: dtype to convert to. Default: the dtype of the leaves.
        file_bytes: size in bytes after which another file begins. Several files have an index.

    Raises:
        ValueError: transformers has no such model, leaves do not fit the config, or weights are not finite. The message
            lists all.
        OSError: the first rank could not write. No files are left. The other ranks raise a `RankError` with the
            message.

    Example:
        >>> import tempfile
        >>> from shardfn.core import key
        >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> directory = tempfile.mkdtemp()
        >>> gpt_to_hf(directory, config, gpt.init(config, key(0)))
        >>> sorted(os.listdir(directory))
        ['config.json', 'model.safetensors']
    """
    values = hf_config(config, model_type)
    table = rows(config, values["model_type"])
    leaves = {row.path: _find_leaf(params, config, row) for row in table}
    _check_leaves(leaves, config, table)
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for row in sorted(table, key=lambda row: len(row.path)):
        for i in row.list_layers(config.num_layers):
            entries |= dict.fromkeys(row.list_names(i), (dtype or leaves[row.path][i].leaf.dtype, row.shape))
    first = next(iter(entries.values()))[0]
    text = json.dumps(values | {"dtype": str(first).removeprefix("torch.")}, indent=2)
    with WrittenByFirst(
        core.tree_leaves(params),
        "interop.gpt_to_hf",
        lambda: ArchiveWriter(directory, entries, file_bytes=file_bytes),
        lambda: (pathlib.Path(directory) / "config.json").write_text(text + "\n"),
    ) as out:
        for group in _group_rows(table):
            _yield_tensors(config, leaves, group, out.put, dtype)


def _yield_tensors(
    config: gpt.Config, leaves: dict[Any, Any], group: list[Row], put: Callable[[str, Tensor], None], dtype: Any
) -> None:
    """Passes the tensors of the file to `put` one after another, and gathers the leaves for each."""
    for i in group[0].list_layers(config.num_layers):
        target = None
        for row in group:
            leaf, place = leaves[row.path][i]
            one = gather_leaf(leaf) if place is None else gather_layer(leaf, place)
            if row.spread:
                for name, x in zip(row.list_names(i), one.flatten(0, len(row.spread) - 1), strict=True):
                    put(name, x.to(dtype or x.dtype).contiguous())
                continue
            target = _empty_for(row, dtype or one.dtype) if target is None else target
            row.of(target).copy_(one.reshape(row.base))
        if target is None:
            continue
        put(group[0].name.format(i), target.view(group[0].shape))


def _group_rows(table: list[Row]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in table:
        groups.setdefault(row.name, []).append(row)
    return list(groups.values())


def _leaf_shape(config: gpt.Config, row: Row) -> tuple[int, ...]:
    """Returns the leaf's shape: with heads and features as one dim, or two with `config.per_head`."""
    return row.base if config.per_head or row.heads is None else _merge_heads(row.base, row.heads)


def _merge_heads(base: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*base[:at], base[at] * base[at + 1], *base[at + 2 :])


def _read_leaf(
    archive: Archive | CodedArchive, names: Sequence[str], row: Row, shape: tuple[int, ...], slices: Slices
) -> Tensor:
    """Returns the part `slices` of a leaf, also of a leaf that is spread over tensors."""
    num = len(row.spread)
    if not num:
        return _read_block(archive, names[0], row, shape, slices)
    slices = (*slices, *[slice(None)] * len(shape))
    chosen = torch.arange(len(names)).view(row.spread)[slices[:num]]
    numbers: list[int] = chosen.flatten().tolist()
    one, inner = row._replace(spread=(), names=()), tuple(slices[num : len(shape)])
    parts = [_read_block(archive, names[at], one, shape[num:], inner) for at in numbers]
    if not parts:
        return torch.empty(torch.empty(shape, device="meta")[slices[: len(shape)]].shape)
    return torch.stack(parts).unflatten(0, chosen.shape)


def _read_block(archive: Archive | CodedArchive, name: str, row: Row, shape: tuple[int, ...], slices: Slices) -> Tensor:
    """Returns the part `slices` of a leaf, read from a box of the tensor."""
    box = [s.indices(n)[:2] for s, n in zip((*slices, *[slice(None)] * len(shape)), shape, strict=False)]
    box = [(lo, max(lo, hi)) for lo, hi in box]
    at = row.heads if len(shape) < len(row.base) else None
    inner = box
    if at is not None:  # the heads of these features
        K, (lo, hi) = row.base[at + 1], box[at]
        heads = lo // K, max(-(-hi // K), lo // K)
        inner = [*box[:at], heads, (0, K), *box[at + 1 :]]
    wanted: list[tuple[int, int]] = [(0, 0)] * len(row.view)
    kept = [d for d in range(len(row.view)) if row.pick is None or d != row.pick[0]]
    for d, span in zip(row.order, inner, strict=True):
        start = row.span[1] if row.span is not None and row.span[0] == kept[d] else 0
        wanted[kept[d]] = start + span[0], start + span[1]
    if row.pick is not None:
        wanted[row.pick[0]] = row.pick[1], row.pick[1] + 1
    x = archive.box(name, wanted, row.view)
    x = (x if row.pick is None else x.squeeze(row.pick[0])).permute(row.order)
    if at is not None:
        K, (lo, hi) = row.base[at + 1], box[at]
        x = x.reshape(_merge_heads(tuple(x.shape), at)).narrow(at, lo - lo // K * K, hi - lo)
    return x.contiguous()


def _draw_blocks(archive: CodedArchive, name: str) -> core.Draw:
    """Returns the blocks of codes of a weight [N, K], uint8, that are read at their use."""
    n, k = archive[name].shape
    size = BLOCK_BYTES[archive.codes[name]]

    def read_blocks(slices: Slices) -> Tensor:
        rows, columns = (s.indices(m)[:2] for s, m in zip((*slices, *[slice(None)] * 2), shape, strict=False))
        groups = columns[0] // size, -(-columns[1] // size)
        found = archive.blocks(name, (rows[0], max(rows)), (groups[0], max(groups)))
        return found[:, columns[0] - groups[0] * size :][:, : max(columns) - columns[0]]

    shape = n, k // GROUP * size
    return core.Draw(read_blocks, shape, torch.uint8, torch.device("cpu"))


def _stack_layers(layers: list[core.Draw]) -> core.Draw:
    """Returns the layers' leaves as a single leaf. A block is filled layer by layer."""
    like = layers[0]

    def read_block(slices: Slices) -> Tensor:
        first, *rest = slices or (slice(None),)
        chosen, out = layers[first], None
        for i, x in enumerate(chosen or layers[:1]):
            part = x.block(tuple(rest))
            out = part.new_empty((len(chosen), *part.shape)) if out is None else out
            if chosen:
                out[i] = part
        assert out is not None
        return out

    return core.Draw(read_block, (len(layers), *like.shape), like.dtype, like.device)


def _name_prefix(archive: Archive | CodedArchive, table: list[Row]) -> Callable[[str], str]:
    """Returns the prefix of names: files of a model without its head lack the model's name."""
    start = table[0].name.split(".")[0] + "."
    bare = not any(name.startswith(start) for name in archive)
    return lambda name: name.removeprefix(start) if bare else name


def _check_names(
    archive: Archive | CodedArchive, table: list[Row], config: gpt.Config, prefix: Any, dtype: torch.dtype | None
) -> None:
    wanted = {prefix(name): r for r in table for i in r.list_layers(config.num_layers) for name in r.list_names(i)}
    problems = [
        f"{name} is missing ({'/'.join(r.path)} of the model)" for name, r in wanted.items() if name not in archive
    ]
    later = prefix(f"model.layers.{config.num_layers}.") if config.latent is not None else " "  # guesses of tokens
    extra = [x for x in archive if x not in wanted and not _PASSED_OVER.search(x) and not x.startswith(later)]
    problems += [f"{name} is left over" for name in extra if not (config.tie_embeddings and name == "lm_head.weight")]
    problems += [
        f"{name} is {archive[name].shape} in the file, but {row.shape} by config.json"
        for name, row in wanted.items()
        if name in archive and archive[name].shape != row.shape
    ]
    core.raise_all(
        ValueError, f"the files of {archive.directory} are not those of the model in its config.json:", problems
    )
    dtypes = {archive[name].dtype for name in wanted}
    if dtype is None and len(dtypes) > 1:
        raise ValueError(f"{archive.directory} has tensors of several dtypes, {dtypes}. Pass dtype=.")


class _LeafSource(NamedTuple):
    """A leaf of the parameters, or a layer of a stacked leaf."""

    leaf: Any
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        if self.leaf is None:
            return None
        return tuple(self.leaf.shape) if self.layer is None else tuple(self.leaf.shape[1:])


def _find_leaf(params: gpt.Params, config: gpt.Config, row: Row) -> list[_LeafSource]:
    """Returns the place of a row's leaf, or of each layer's, where None stands for a missing leaf."""
    if len(row.path) == 1:
        return [_LeafSource(params.get(row.path[0]))]
    blocks, name, num = params.get("blocks"), row.path[1], config.layers_a_block
    if not config.stacked:
        return [_LeafSource(p.get(name)) for p in blocks] if isinstance(blocks, list) else [_LeafSource(None)]
    if not isinstance(blocks, dict):
        return [_LeafSource(None)]
    names = [name if num == 1 else f"{i}.{name}" for i in range(num)]
    return [_LeafSource(blocks.get(names[i % num]), i // num) for i in range(config.num_layers)]


def _check_leaves(leaves: dict[tuple[str, ...], list[_LeafSource]], config: gpt.Config, table: list[Row]) -> None:
    problems = []
    for row in table:
        found = leaves[row.path]
        own = found if len(found) == 1 else [found[i] for i in row.list_layers(config.num_layers)]
        shape, shapes = _leaf_shape(config, row), {place.shape for place in own}
        num = config.num_layers // config.layers_a_block
        lengths = {p.leaf.shape[0] for p in leaves[row.path] if p.layer is not None and p.leaf is not None}
        if shapes != {shape} or lengths - {num}:
            found = sorted(map(str, shapes)) if not lengths - {num} else f"of {sorted(lengths)} layers, not {num}"
            problems.append(f"params/{'/'.join(row.path)} is {found}, but {shape} by the config")
    core.raise_all(
        ValueError, "gpt_to_hf: these leaves do not fit. Pass the config that they were made with:", problems
    )
