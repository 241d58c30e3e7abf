"""Prints how shardfn's `shard_map` compares with JAX's, program by program.

    python -m tests.transforms.oracle.verdicts --world 2 --seeds 0:200   # random programs
    python -m tests.transforms.oracle.verdicts --world 2                 # the known ones
    python -m tests.transforms.oracle.verdicts --names 2:softmax 3:17    # these, with their text
    python -m tests.transforms.oracle.verdicts --golden tests/transforms/oracle/golden.npz

The last one writes the file that the tests of the day compare with. `$JAX_PYTHON` names a Python that has JAX.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from collections import Counter

from .by_shardfn import good, verdicts
from .cases import cases
from .named import named
from .programs import MESHES, Results, load, save

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = pathlib.Path(__file__).with_name("golden.npz")


def golden_names(world: int) -> list[str]:
    """The programs whose results are kept: the known ones, and a few random ones."""
    known = [program.name for program in cases(world)] if world != 3 else []
    return known + [f"{world}:{seed}" for seed in range(6)]


def by_jax(names: list[str], python: str) -> Results:
    """JAX's results, by a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "jax.npz"
        command = [python, "-m", f"{__package__}.by_jax", str(path), *names]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
        if done.returncode:
            raise RuntimeError(done.stderr.decode())
        return load(path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, choices=list(MESHES), default=2)
    parser.add_argument("--seeds", metavar="FIRST:END", help="random programs")
    parser.add_argument("--names", nargs="+", default=[], help="programs by name, whose text is printed too")
    parser.add_argument("--quiet", action="store_true", help="only programs that disagree, and the sums")
    parser.add_argument("--golden", type=pathlib.Path, help="writes JAX's results of the day's programs")
    given = parser.parse_args()
    python = os.environ.get("JAX_PYTHON", sys.executable)
    if given.golden:
        save(by_jax([name for world in MESHES for name in golden_names(world)], python), given.golden)
        print(f"{given.golden}: {given.golden.stat().st_size} bytes")
        return
    if given.seeds:
        names = [f"{given.world}:{seed}" for seed in range(*map(int, given.seeds.split(":")))]
    else:
        names = given.names or [program.name for program in cases(given.world)]
    sums = Counter[str]()
    for at in range(0, len(names), 20):
        sums += _print(names[at : at + 20], python, given.quiet, bool(given.names))
    print(", ".join(f"{n} {what}" for what, n in sorted(sums.items())))


def _print(names: list[str], python: str, quiet: bool, text: bool) -> Counter[str]:
    """Prints the verdicts of some programs of one mesh."""
    jax, sums = by_jax(names, python), Counter[str]()
    for name, found in verdicts(names, jax, int(names[0].partition(":")[0])).items():
        bad = {quantity: verdict for quantity, verdict in found.items() if not good(verdict)}
        sums["programs that disagree" if bad else "programs that agree"] += 1
        sums.update(f"{q}: {v.split(':')[0].split(' by ')[0].split(', on')[0]}" for q, v in bad.items())
        if bad or not quiet:
            print(name, "" if bad else next(iter(found.values())))
        if text:
            print(f"    {named(name).text}")
        for quantity, verdict in bad.items():
            print(f"    {quantity}: {verdict.splitlines()[0][:300]}", flush=True)
    return sums


if __name__ == "__main__":
    main()
