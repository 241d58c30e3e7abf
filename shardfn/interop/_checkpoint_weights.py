"""Parameters of a checkpoint as files for other tools, and such files as a checkpoint, without a mesh."""

import os
import re

import torch
from torch import Tensor

from shardfn.checkpoint import read_leaves, save, stored
from shardfn.core import dtype_name
from shardfn.interop.leaves import Archive, ArchiveWriter, join_keys

_PARAMS = re.compile(r"params(\[.*\])")
_MASTERS = re.compile(r"opt_state(?:\[\d+\]|\.\w+|\['[^']*'\])*?\.master(\[.*\])")
_FLOATS = {dtype_name(d): d for d in (torch.float32, torch.bfloat16, torch.float16)}


def export_checkpoint(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    step: int | None = None,
    *,
    dtype: str | None = None,
) -> list[str]:
    """Writes the parameters of a checkpoint as `out/model.safetensors`, or several files with an index.

    Names are the module's where the state was made by `from_module`, else the keys of the tree with dots between:
    `blocks.0.w` of `params['blocks'][0]['w']`. One leaf is in memory at a time.

    Args:
        directory: directory of a run's checkpoints, or a checkpoint.
        out: directory for the files, made if missing.
        step: number of the checkpoint in a run. Default: the newest.
        dtype: "float32", "bfloat16" or "float16", to which floating-point leaves are rounded. Default: each leaf's
            dtype.

    Returns:
        The names of the written tensors.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: the checkpoint has no leaves below `params`, two leaves would have the same name, or weights are not
            finite.
        DamagedError: files have changed since they were written.

    Example:
        >>> import tempfile
        >>> a, b = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> _ = save(a, {"w": torch.ones(3)}, step=7, at="params")
        >>> export_checkpoint(a, b)
        ['w']
    """
    leaves = stored(directory, step)
    # The widest copy: a parameter in 16 bits is its master copy, rounded.
    masters = {found[1]: path for path in leaves if (found := _MASTERS.fullmatch(path))}
    sources = {found[1]: masters.get(found[1], path) for path in leaves if (found := _PARAMS.fullmatch(path))}
    if not sources:
        raise ValueError(
            f"{directory} must have leaves below params, got {', '.join(list(leaves)[:6]) or 'none'}. Save the state"
            " of a step, or a tree of parameters with save(..., at='params')."
        )
    names = {rest: join_keys(rest) for rest in sources}
    if len(set(names.values())) < len(names):
        raise ValueError(f"{directory}: several parameters would have the same name: {sorted(names.values())}.")
    kept = {path: _file_dtype(leaves[path].dtype, dtype) for path in sources.values()}
    entries = {names[rest]: (kept[path], tuple(leaves[path].shape)) for rest, path in sources.items()}
    with ArchiveWriter(out, entries) as writer:
        for name, (path, x) in zip(entries, read_leaves(directory, sources.values(), step), strict=True):
            writer.put(name, x.to(kept[path]))
    return list(names.values())


def import_weights(weights: str | os.PathLike[str], directory: str | os.PathLike[str], step: int = 0) -> list[str]:
    """Makes a checkpoint of parameters from `weights/model.safetensors`, or the files in the index.

    `restore(directory, state.params, at="params")` reads the checkpoint under any mesh. All parameters are in memory
    during the call.

    Args:
        weights: directory of the files.
        directory: directory of the run's checkpoints.
        step: number of the checkpoint.

    Returns:
        The names of the tensors.

    Raises:
        FileNotFoundError: there are no such files.
        DamagedError: a file is not a safetensors file.
        FileExistsError: the step has a checkpoint already.
    """
    archive = Archive(weights)
    tree: dict[str, Tensor] = {name: archive.box(name, [(0, n) for n in x.shape]) for name, x in archive.items()}
    save(directory, tree, step, at="params")
    return list(tree)


def _file_dtype(dtype: torch.dtype, wanted: str | None) -> torch.dtype:
    """Returns the dtype that a leaf has in the file."""
    if wanted is None or not dtype.is_floating_point:
        return dtype
    if wanted not in _FLOATS:
        raise ValueError(f"dtype={wanted!r} is not one of {', '.join(_FLOATS)}.")
    return _FLOATS[wanted]
