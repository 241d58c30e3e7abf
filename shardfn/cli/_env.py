"""`shardfn env`: the used libraries and devices, found or missing, and the features lost without them."""

import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardfn.graph import machine_memory
from shardfn.kernels import NoCompilerError, build, cxx_compiler

_PACKAGES = (
    "torch",
    "triton",
    "optree",
    "einops",
    "jaxtyping",
    "numpy",
    "safetensors",
    "transformers",
    "llguidance",
    "starlette",
    "uvicorn",
    "peft",
    "deepspeed",
)
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_PROBE = 'extern "C" int answer() { return 42; }\n'


class Fact(NamedTuple):
    """Line of `shardfn env`.

    Attributes:
        what: name of the library or device.
        found: version or description.
        lacks: features that do not work without the library or device, empty if found.
    """

    what: str
    found: str
    lacks: str = ""


def facts() -> list[Fact]:
    """Looks at this machine. Builds a line of C++ as a check, and starts no process group."""
    return [*_list_software(), *_list_hardware(), *_list_transports()]


def env_text() -> str:
    """Returns the facts as text, with missing parts last."""
    rows = facts()
    width = max(len(x.what) for x in rows)
    lines = [f"{x.what:<{width}}  {x.found}" for x in rows]
    lacking = [f"  {x.what}: {x.lacks}" for x in rows if x.lacks]
    return "\n".join([*lines, "", *(["not there:", *lacking] if lacking else ["all of it works"])])


def _list_software() -> Iterator[Fact]:
    yield Fact("shardfn", _find_version("shardfn") or "not installed, run from its sources")
    yield Fact("python", f"{platform.python_version()}, {platform.platform()}")
    needs = {
        "triton": "kernels on a GPU; elsewhere C++ and torch do without",
        "transformers": "models of Hugging Face",
        "starlette": "shardfn serve",
        "uvicorn": "shardfn serve",
        "llguidance": "grammars of generated text",
        "peft": "nothing but the comparison with it",
        "deepspeed": "nothing but the comparison with it (pytest -m deepspeed)",
    }
    for name in _PACKAGES:
        version = _find_version(name)
        yield Fact(name, version or "-", "" if version or name not in needs else needs[name])
    yield _describe_compiler(cxx_compiler())


def _describe_compiler(compiler: str | None) -> Fact:
    lacks = "kernels in C++ and the channel through memory; torch and gloo do without, more slowly"
    if compiler is None:
        return Fact("C++ compiler", "-", lacks)
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    found = f"{compiler}, {(said.splitlines() or ['?'])[0]}"
    source = pathlib.Path(os.environ.get("TMPDIR", "/tmp")) / f"shardfn-env-{os.getpid()}.cpp"
    try:
        source.write_text(_PROBE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            works = build("env", source).answer() == 42
        return Fact("C++ compiler", found, "" if works else lacks)
    except (NoCompilerError, OSError, subprocess.SubprocessError) as problem:
        return Fact("C++ compiler", f"{found}: {type(problem).__name__}: {str(problem)[:200]}", lacks)
    finally:
        source.unlink(missing_ok=True)


def _list_hardware() -> Iterator[Fact]:
    yield Fact("cores", f"{len(os.sched_getaffinity(0))} for this process, {torch.get_num_threads()} threads of torch")
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        lines = dict(x.split(":", 1) for x in text.split("\n\n")[0].splitlines() if ":" in x)
        fields = {k.strip(): v.strip() for k, v in lines.items()}
        flags = set(fields.get("flags", "").split())
        yield Fact(
            "processor", f"{fields.get('model name', '?')}, {', '.join(f for f in _FLAGS if f in flags) or 'no AVX2'}"
        )
    except OSError:
        yield Fact("processor", platform.processor() or "?")
    yield Fact("memory", f"{machine_memory() / 2**30:.1f} GiB")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(i)
            yield Fact(f"cuda:{i}", f"{about.name}, {about.total_memory / 2**30:.1f} GiB, {about.major}.{about.minor}")
    else:
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, and finds no device" if built else "torch is built for CPUs"
        yield Fact("GPU", f"- ({why})")


def _list_transports() -> Iterator[Fact]:
    for name, there, lacks in (
        ("gloo", dist.is_available() and dist.is_gloo_available(), "several ranks on CPUs, and ranks' agreements"),
        (
            "nccl",
            dist.is_available() and dist.is_nccl_available(),
            "several ranks on GPUs" if torch.cuda.is_available() else "",
        ),
    ):
        yield Fact(name, "yes" if there else "-", "" if there else lacks)
    shared = pathlib.Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = "NCCL wants some hundred MiB" if free < 2**28 and torch.cuda.is_available() else ""
        yield Fact("/dev/shm", f"{free / 2**30:.2f} GiB free", small)
    cache = pathlib.Path.home()
    yield Fact("home", f"{cache}, {shutil.disk_usage(cache).free / 2**30:.1f} GiB free")


def _find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
