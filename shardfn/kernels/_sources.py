"""The C++ of the package: the files, the flags of each file, and the command that builds a file.

The module imports only Python's standard library, so a wheel is built without torch.
"""

import functools
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).parents[1]
SHIPPED = PACKAGE / "kernels" / "_shipped"  # made by scripts/wheel
SHARED, POOL, CHAIN = "kernels/_shared.cpp", "kernels/_pool.cpp", "kernels/_chain.cpp"
MEMORY = "collectives/transport/_memory.cpp"
COMMON = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# Sources without the reference's bits use threads, and fused multiply-adds. The sources mark the loops to unroll, so
# -O2 suffices, and builds in a third of the time of -O3. A short unaligned loop may take a tenth longer.
_FAST = ("-O2", "-falign-loops=64", "-ffp-contract=fast", "-pthread", "-Wno-psabi")
# Sources with the reference's bits: all operations except named fused multiply-adds are rounded separately.
_EXACT = ("-O2", "-pthread", "-Wno-psabi")
# GCC must not split the chains of operations that stand side by side in the source.
_CHAINED = ("-fno-tree-ter", "-pthread", "-Wno-psabi")
# The files, slow builds first.
FLAGS: dict[str, tuple[str, ...]] = {
    "kernels/_row_linear.cpp": _FAST,
    "kernels/_integer_linear.cpp": _EXACT,
    "kernels/_grouped_product.cpp": _FAST,
    "kernels/_ragged_attention.cpp": _EXACT,
    "kernels/_block_sparse_attention.cpp": _FAST,
    MEMORY: ("-pthread",),
    "kernels/_draw.cpp": _CHAINED,
    SHARED: (),
    "kernels/_pointwise.cpp": _EXACT,
    "kernels/_row_norm.cpp": _EXACT,
    POOL: ("-pthread",),
    # Loops without explicit vectors. Only -O3 vectorises such loops.
    "kernels/_gather_rows.cpp": ("-pthread",),
    "kernels/_penalise.cpp": _CHAINED,
    CHAIN: (),
}
# Files without loops over elements: a single form serves all processors.
_ONE_FORM = (POOL, CHAIN)
_WIDE = {"kernels/_draw.cpp": ("-mprefer-vector-width=512",)}  # of generation 4
GENERATIONS = (1, 3, 4)  # of x86-64, or 0 for other processors
_NEEDS = {
    3: {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"},
    4: {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
PATIENCE = 900.0  # seconds for a compiler at most: a machine with other work needs many


def name_of(source: str) -> str:
    """Returns the short name of a source.

    Example:
        >>> name_of("kernels/_row_linear.cpp")
        'row_linear'
    """
    return pathlib.PurePosixPath(source).stem.removeprefix("_")


@functools.cache
def processor() -> int:
    """Returns the processor's newest generation of x86-64, or 0 for other processors."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return 0
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return 1
    flags = set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
    if not flags >= _NEEDS[3]:
        return 1
    return 4 if flags >= _NEEDS[4] else 3


def num_processors() -> int:
    """Returns the number of processors available to the process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compiler() -> str | None:
    """Returns the path of the C++ compiler, or None without a compiler."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def flags_of(source: str, generation: int) -> tuple[str, ...]:
    """Returns the flags of all files, of a file, and of a generation."""
    if generation < 3 or source in _ONE_FORM:
        return *COMMON, *FLAGS[source]
    wide = _WIDE.get(source, ()) if generation == 4 else ()
    return *COMMON, *FLAGS[source], f"-march=x86-64-v{generation}", *wide


def file_of(source: str, generation: int, *more: str) -> str:
    """Returns the name of a library, a digest of everything behind the results: texts, flags and `more`."""
    flags = flags_of(source, generation)
    form = f"-v{generation}" if generation and source not in _ONE_FORM else ""
    return f"{name_of(source)}{form}-{digest(PACKAGE / source, flags, *more)}.so"


def digest(source: pathlib.Path, flags: tuple[str, ...], *more: str) -> str:
    """Returns a digest of a source with its included files, flags, and more."""
    texts = [path.read_text() for path in list_included(source)]
    return hashlib.sha256("\0".join([*texts, *flags, *more]).encode()).hexdigest()[:16]


@functools.cache
def list_included(source: pathlib.Path) -> list[pathlib.Path]:
    """Returns a source, and the files of the package that the source includes, directly or not."""
    found = [source.resolve()]
    for path in found:  # grows while the loop runs
        named = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        found += [x for x in ((path.parent / name).resolve() for name in named) if x not in found]
    return found


def compile_source(source: pathlib.Path, flags: tuple[str, ...], out: pathlib.Path) -> None:
    """Builds a library.

    Raises:
        OSError: there is no compiler, or the compiler cannot be started.
        subprocess.SubprocessError: the compiler failed, or took too long.
    """
    path = compiler()
    if path is None:
        raise FileNotFoundError("there is no C++ compiler (c++, g++ or clang++)")
    plain = tuple(flag for flag in flags if not flag.startswith(("-march=", "-mprefer-")))
    if plain != flags and not _makes_generations(path):
        flags = plain
    run = [path, *flags, "-o", str(out), str(source)]
    subprocess.run(run, check=True, capture_output=True, text=True, timeout=PATIENCE)


@functools.cache
def _makes_generations(path: str) -> bool:
    """Returns whether a compiler has the instructions that `_generations.h` names: GCC from 12 on."""
    run = subprocess.run(
        [path, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    version = re.search(r"#define __GNUC__ (\d+)", run.stdout)
    return version is not None and int(version[1]) >= 12 and "__clang__" not in run.stdout
