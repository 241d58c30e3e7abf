"""Weights in safetensors files of Hugging Face, several files with an index: read and written in parts.

Only the bytes of a requested box of a tensor are read, including gaps of less than a page between runs.
https://github.com/huggingface/safetensors
"""

import copy
import errno
import json
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor

from shardfn import checkpoint, core, memory

INDEX = ".safetensors.index.json"
# The order of tensors in a file of the safetensors library: the last of these dtypes first, then by name.
_ORDER = [
    checkpoint.SAFETENSORS_DTYPES[code]
    for code in "BOOL U8 I8 F8_E5M2 F8_E4M3 I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64".split()
]


class Archive(Mapping[str, checkpoint.SafetensorsEntry]):
    """Tensors of `directory/stem.safetensors`, or of the files in `stem.safetensors.index.json`.

    Args:
        directory: directory of the files.
        stem: prefix of the files' names, such as "model".

    Attributes:
        read_bytes: number of bytes of tensors read so far.

    Raises:
        FileNotFoundError: the files are missing.
        DamagedError: a header is damaged, or the index names tensors that are in no file.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with ArchiveWriter(directory, {"w": (torch.float32, (2, 3))}) as out:
        ...     out.put("w", torch.arange(6.0).view(2, 3))
        >>> archive = Archive(directory)
        >>> archive.box("w", [(0, 2), (1, 2)])
        tensor([[1.],
                [4.]])
    """

    def __init__(self, directory: str | os.PathLike[str], stem: str = "model") -> None:
        self.directory, self.read_bytes = pathlib.Path(directory), 0
        self._kept: dict[str, checkpoint.SafetensorsEntry] = {}
        one, index = self.directory / f"{stem}.safetensors", self.directory / (stem + INDEX)
        if not one.exists() and not index.exists():
            if not self.directory.is_dir():
                what = "is a file: pass the directory that it is in" if self.directory.exists() else "does not exist"
                raise FileNotFoundError(f"no weights in {self.directory}, which {what}.")
            found = sorted(p.name for p in self.directory.iterdir())
            raise FileNotFoundError(f"{self.directory} must have {one.name} or {index.name}, got {found}.")
        if one.exists():
            self._kept = checkpoint.safetensors_entries(one)
            return
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        if odd := sorted({f for f in names.values() if pathlib.PurePath(f).name != f}):
            raise memory.DamagedError(f"{index} names files outside of its directory: {odd}.")
        files = {f: checkpoint.safetensors_entries(self.directory / f) for f in sorted(set(names.values()))}
        lost = [f"{name} is not in {f}" for name, f in names.items() if name not in files[f]]
        core.raise_all(memory.DamagedError, f"{index} does not fit its files:", lost)
        self._kept = {name: files[f][name] for name, f in names.items()}

    def __getitem__(self, name: str) -> checkpoint.SafetensorsEntry:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def rename(self, name: Callable[[str], str | None]) -> "Archive":
        """Returns the archive under other names, without the tensors for whose name the function returns None."""
        out = copy.copy(self)
        out._kept = {new: kept for old, kept in self._kept.items() if (new := name(old)) is not None}
        return out

    def box(self, name: str, box: Sequence[tuple[int, int]], shape: Sequence[int] | None = None) -> Tensor:
        """Returns a box of a tensor.

        Args:
            name: name of the tensor.
            box: start and stop in each dim, for example [(0, 2), (0, 4)].
            shape: dims to which `box` refers, with the tensor's number of elements. Default: the tensor's shape.

        Returns:
            The box, in the file's dtype.

        Raises:
            DamagedError: the file is shorter than it was.
        """
        kept = self._kept[name]
        dims = tuple(kept.shape if shape is None else shape)
        assert math.prod(dims) == math.prod(kept.shape)
        out = torch.empty([hi - lo for lo, hi in box], dtype=kept.dtype, device="cpu")
        fd = os.open(kept.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            checkpoint.read_box(dims, box, out, lambda start, data: self._read(fd, kept, start, data))
        finally:
            os.close(fd)
        return out

    def _read(self, fd: int, kept: checkpoint.SafetensorsEntry, start: int, data: memory.Bytes) -> None:
        done = 0
        while done < len(data):
            got = os.preadv(fd, [data[done:].data], kept.start + start + done)
            if not got:
                raise memory.DamagedError(f"{kept.file} ends before its tensors do. Fetch it again.")
            done += got
        self.read_bytes += len(data)


class ArchiveWriter:
    """Writes tensors one by one, in any order, to one or more files. The files get their names on leaving.

    Args:
        directory: directory for the files.
        entries: name -> dtype and shape.
        stem: prefix of the files' names.
        file_bytes: size after which another file begins.
        allow_nonfinite: names of tensors that may have infinite elements and NaN, such as masks, or True for all of
            them.

    Raises:
        ValueError: (on leaving) another tensor has elements that are not finite. Existing files stay. The message names
            all tensors.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        stem: str = "model",
        file_bytes: int = 5 << 30,
        allow_nonfinite: bool | Collection[str] = False,
    ) -> None:
        self._allowed: Collection[str] = (
            (entries if allow_nonfinite else ()) if isinstance(allow_nonfinite, bool) else allow_nonfinite
        )
        self._nonfinite: dict[str, tuple[int, int]] = {}
        self.directory, self._stem = pathlib.Path(directory), stem
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as problem:
            text = f"{self.directory} is a file, or lies below one: weights need a directory."
            raise NotADirectoryError(errno.ENOTDIR, text) from problem
        wrong = [
            f"{name} is {dtype}"
            for name, (dtype, _) in entries.items()
            if dtype not in checkpoint.SAFETENSORS_DTYPES.values()
        ]
        core.raise_all(TypeError, "safetensors files have no such dtype. Convert first:", wrong)
        sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in entries.items()}
        self.total, groups = sum(sizes.values()), _group_by_size(sizes, file_bytes)
        self._numel = sum(math.prod(shape) for _, shape in entries.values())
        many = len(groups) > 1
        self._names = [
            f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors" if many else f"{stem}.safetensors"
            for i in range(len(groups))
        ]
        self._at: dict[str, tuple[int, checkpoint.SafetensorsEntry]] = {}
        for i, group in enumerate(groups):
            self._create_file(i, {name: entries[name] for name in group})
        self._left = set(entries)

    def _create_file(self, number: int, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Makes a file of full length, with the header. On an error all files are removed."""
        path = self.directory / f"{self._names[number]}.tmp"
        entries = dict(sorted(entries.items(), key=lambda item: (-_ORDER.index(item[1][0]), item[0])))
        try:
            text = checkpoint.safetensors_header([(name, *entry) for name, entry in entries.items()], {"format": "pt"})
            at = len(text)
            for name, (dtype, shape) in entries.items():
                self._at[name] = number, checkpoint.SafetensorsEntry(path, dtype, shape, at)
                at += dtype.itemsize * math.prod(shape)
            with open(path, "wb") as f:
                f.write(text)
                f.truncate(at)
        except BaseException:
            self._remove_files()
            raise

    def _remove_files(self) -> None:
        for name in self._names:
            (self.directory / f"{name}.tmp").unlink(missing_ok=True)

    def put(self, name: str, x: Tensor) -> None:
        """Writes a tensor of the dtype and shape in `entries`."""
        kept = self._at[name][1]
        assert (x.dtype, tuple(x.shape)) == (kept.dtype, tuple(kept.shape)) and name in self._left
        data = memory.as_bytes(x.detach().cpu().contiguous())
        with open(kept.file, "r+b") as f:
            f.seek(kept.start)
            f.write(data.data)
        self._left.remove(name)
        if name not in self._allowed and (bad := core.count_nonfinite(x)):
            self._nonfinite[name] = bad, x.numel()

    def __enter__(self) -> "ArchiveWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._remove_files()
            return
        paths = [self.directory / f"{name}.tmp" for name in self._names]
        try:
            assert not self._left, f"not written: {sorted(self._left)}"
            core.raise_nonfinite(f"the weights for {self.directory}", self._nonfinite, len(self._at))
            # All are on the disk before the first has its name.
            for path in paths:
                with open(path, "rb") as f:
                    os.fsync(f.fileno())
            self._rename_files(paths)
        except BaseException:
            self._remove_files()
            raise

    def _rename_files(self, paths: list[pathlib.Path]) -> None:
        """Gives files their names.

        A reader during the call, or after a kill, finds the old weights, the new or no file.
        """
        one, index = self.directory / f"{self._stem}.safetensors", self.directory / (self._stem + INDEX)
        if len(paths) == 1:
            paths[0].rename(one)  # read before any index
            index.unlink(missing_ok=True)
            return
        weights = {name: self._names[i] for name, (i, _) in self._at.items()}
        contents = {"metadata": {"total_parameters": self._numel, "total_size": self.total}, "weight_map": weights}
        named = [path.with_suffix("") for path in paths]
        # An index of these files must not exist while only some files are new.
        old = index.read_bytes() if any(path.exists() for path in named) and index.exists() else None
        if old is not None:
            index.unlink()
        try:
            paths[0].rename(named[0])
        except BaseException:
            if old is not None:
                index.write_bytes(old)
            raise
        for path, name in zip(paths[1:], named[1:], strict=True):
            path.rename(name)
        new = index.with_name(index.name + ".tmp")
        new.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")
        new.rename(index)
        one.unlink(missing_ok=True)


def _group_by_size(sizes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups
