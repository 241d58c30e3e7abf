"""Covers the published files: sdist and wheel hold every file of the package, and the wheel runs in a fresh venv."""

import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import optree
import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]
BACKEND = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
# pip's messages where no index can be reached, or an index is empty.
_OFFLINE = ("No matching distribution found", "Could not find a version", "Connection", "Max retries", "timed out")

pytestmark = pytest.mark.nightly


def _run(*command: object, cwd: pathlib.Path, **env: str) -> str:
    names = [str(part) for part in command]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(names, cwd=cwd, env=kept | env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{names} in {cwd}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _files() -> set[str]:
    """Every file of the package, as git has it."""
    return set(_run("git", "ls-files", "shardfn", cwd=ROOT).split())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """The sdist, and the wheel that is made from the unpacked sdist alone."""
    work = tmp_path_factory.mktemp("build")
    venv.create(work / "backend", with_pip=True)
    python = work / "backend/bin/python"
    got = subprocess.run([python, "-m", "pip", "install", "-q", *BACKEND], capture_output=True, text=True, timeout=300)
    if got.returncode and any(words in got.stderr for words in _OFFLINE):
        pytest.skip(f"the build backend cannot be fetched: {got.stderr.strip().splitlines()[-1]}")
    assert got.returncode == 0, got.stderr
    _run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", work / "dist", cwd=ROOT)
    (sdist,) = (work / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (source,) = (work / "unpacked").iterdir()
    _run(python, "-m", "hatchling", "build", "-t", "wheel", "-d", work / "dist", cwd=source)
    (wheel,) = (work / "dist").glob("*.whl")
    return sdist, wheel


def test_sdist_and_wheel_hold_the_package_and_no_more(built: tuple[pathlib.Path, pathlib.Path]) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    with zipfile.ZipFile(wheel) as archive:
        wheeled = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert wheeled == _files()
    assert packed >= _files() | {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO"}
    assert not [name for name in packed if name.startswith(("tests/", "benchmarks/", "docs/"))]


def test_the_wheel_runs_in_a_fresh_venv(built: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """On top of the packages that are here: dependencies are not fetched again."""
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh/bin/python"
    _run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", built[1], cwd=tmp_path)
    (site,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    # Paths that a .pth file adds are searched last, and their own .pth files, an editable install's, are not read.
    homes = {str(pathlib.Path(module.__file__ or "").parents[1]) for module in (torch, optree)}
    (site / "present.pth").write_text("\n".join(sorted(homes)))
    program = (
        "import pathlib, torch, shardfn as sf\n"
        "step = sf.sharded_step(lambda p, x: (x @ p['w']).square().mean(), sf.optim.adamw(1e-2), mesh=sf.make_mesh())\n"
        "state, metrics = step(step.init({'w': torch.ones(3, 2)}), torch.ones(4, 3))\n"
        "print(pathlib.Path(sf.__file__).parent, float(metrics['loss']), sf.__version__)\n"
    )
    where, loss, version = _run(python, "-c", program, cwd=tmp_path).split()
    assert (where, loss) == (str(site / "shardfn"), "9.0")
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"shardfn       {version}" in _run(tmp_path / "fresh/bin/shardfn", "env", cwd=tmp_path)
    assert sys.version_info[:2] == tuple(map(int, site.parent.name.removeprefix("python").split(".")))


def test_installing_the_wheel_beside_torch_changes_no_other_package(
    built: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """pip resolves all requirements in an environment with the packages of this one, and would add shardfn alone."""
    report, home = tmp_path / "report.json", tmp_path / "fresh"
    venv.create(home, with_pip=True)
    (site,) = (home / "lib").glob("python*/site-packages")
    present = sorted({str(pathlib.Path(module.__file__ or "").parents[1]) for module in (torch, optree)})
    (site / "present.pth").write_text("\n".join(present))
    # The venv's own setuptools would hide the one that torch asks for.
    _run(home / "bin/python", "-m", "pip", "uninstall", "-q", "-y", "setuptools", cwd=tmp_path)
    python, what = home / "bin/python", [*("-m", "pip", "install", "--dry-run", "--no-index", "--report", report)]
    # An editable install of the project is among the packages that are here; the wheel would replace it.
    _run(python, *what, "--ignore-installed", "--no-deps", built[1], cwd=tmp_path)
    assert _planned(report) == {"shardfn"}
    requirements = [r for r in _requirements(built[1]) if "extra ==" not in r]
    _run(python, *what, *requirements, cwd=tmp_path)
    assert _planned(report) == set()


def _planned(report: pathlib.Path) -> set[str]:
    return {entry["metadata"]["name"] for entry in json.loads(report.read_text())["install"]}


def _requirements(wheel: pathlib.Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
