"""Covers the types of values along axes: `shard_map` computes and refuses the same as JAX's.

`python -m tests.transforms.oracle.verdicts` prints the same comparison program by program.
"""

import os
import secrets

import pytest

from .oracle.by_shardfn import good, verdicts
from .oracle.cases import cases
from .oracle.named import named
from .oracle.programs import MESHES, Results, load
from .oracle.verdicts import GOLDEN, by_jax, golden_names

SEEDS, PART = 200, 20  # each night's, over all meshes, and those of one test


def _agree(names: list[str], jax: Results, world: int, jit: bool = True) -> None:
    bad = {name: v for name, v in verdicts(names, jax, world, jit).items() if not all(map(good, v.values()))}
    lines = [f"{name}: {v}\n    {named(name).text}" for name, v in bad.items()]
    assert not bad, f"{len(bad)} of {len(names)} programs:\n" + "\n".join(lines)


@pytest.mark.day("3")
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.nightly if n == 4 else ()) for n in MESHES])
def test_the_programs_that_are_kept(world: int) -> None:
    _agree(golden_names(world), load(GOLDEN), world, jit=False)


@pytest.mark.nightly
def test_the_known_programs_on_three_ranks(jax_python: str) -> None:
    names = [program.name for program in cases(3)]
    _agree(names, by_jax(names, jax_python), 3)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(SEEDS // PART))
def test_random_programs(part: int, jax_python: str) -> None:
    """`SHARDFN_FUZZ=<seed>` chooses the first seed; otherwise each night has its own."""
    first = int(os.environ.get("SHARDFN_FUZZ", FIRST).partition(":")[0]) + part * PART
    world = list(MESHES)[part % len(MESHES)]
    names = [f"{world}:{seed}" for seed in range(first, first + PART)]
    print(f"\n--world {world} --seeds {first}:{first + PART}")
    _agree(names, by_jax(names, jax_python), world)


FIRST = str(secrets.randbelow(1 << 31))


def test_a_program_is_a_function_of_its_name() -> None:
    for world in MESHES:
        for seed in range(20):
            assert named(f"{world}:{seed}").text == named(f"{world}:{seed}").text
