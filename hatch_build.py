"""Builds the C++ of the kernels into a wheel, if `SHARDFN_SHIP=1` is set; without it a wheel is pure Python.

The wheel then has a library for each generation of x86-64 that the kernels know, and its tag names the oldest glibc
that has all functions which these libraries use. `scripts/wheel` makes such a wheel.
"""

import importlib.util
import os
import pathlib
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The libraries of the compiler are part of the files, so that they run on systems with older ones.
_STATIC = ("-static-libstdc++", "-static-libgcc", "-Wl,--strip-all")


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the built libraries to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds all files, several at a time."""
        if version == "editable" or os.environ.get("SHARDFN_SHIP", "0") in ("", "0"):
            return
        sources = _sources(pathlib.Path(self.root))
        machine = sources.platform.machine()
        if sources.sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
            raise RuntimeError(
                f"SHARDFN_SHIP=1 builds for Linux on x86-64, and this is {sources.sys.platform} on {machine}"
            )
        folder = pathlib.Path(self.directory) / "shipped"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        forms = {
            sources.file_of(source, form): (source, form) for source in sources.FLAGS for form in sources.GENERATIONS
        }
        with ThreadPoolExecutor(sources.num_processors()) as threads:
            for name, made in {
                name: threads.submit(_build, sources, *form, folder / name) for name, form in forms.items()
            }.items():
                made.result()
                self.app.display_info(f"built {name}")
        place = sources.SHIPPED.relative_to(sources.PACKAGE.parent)
        build_data["force_include"] |= {str(folder / name): str(place / name) for name in forms}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{_glibc(folder)}_x86_64"


def _sources(root: pathlib.Path) -> Any:
    """The table of the C++ files, without an import of the package, which needs torch."""
    spec = importlib.util.spec_from_file_location("_sources", root / "shardfn" / "kernels" / "_sources.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(sources: Any, source: str, form: int, out: pathlib.Path) -> None:
    sources.compile_source(sources.PACKAGE / source, (*sources.flags_of(source, form), *_STATIC), out)


def _glibc(folder: pathlib.Path) -> int:
    """The minor number of the oldest glibc that has all functions of the built files; at least 17."""
    found = [re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes()) for path in folder.iterdir()]
    return max([17, *(int(minor) for minors in found for minor in minors)])
