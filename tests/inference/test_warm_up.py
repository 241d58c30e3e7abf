"""Covers `Engine.warm_up`: afterwards no request builds C++."""

import os
import pathlib
import subprocess
import sys

import pytest

from shardfn.kernels import cxx_compiler

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import sys
from shardfn.inference import Engine, Sampling, limits_of
from shardfn.kernels import _build
from shardfn.models.moe import Experts
from tests.inference.stories import model

changes = {"experts": Experts(num=4, d_ff=9)} if sys.argv[1] == "experts" else {}
small = model(**changes)
adapters = small.adapters if sys.argv[1] == "adapters" else {}
limits = limits_of(small.decoder, running=2, buckets=(4,), cache_bytes=1 << 20)
engine = Engine(small.decoder, small.params[0], limits=limits, adapters=adapters)
engine.warm_up(penalties=True, adapters=bool(adapters))
built = _build._load_library.cache_info().misses
samplings = [Sampling(max_tokens=3, temperature=0.8, top_p=0.9), Sampling(max_tokens=3, repetition_penalty=1.2)]
engine.generate([[1, 2, 3], [4, 5]], samplings)
for name in adapters:
    engine.add([1, 2], Sampling(max_tokens=2), adapter=name)
while not engine.idle:
    engine.step()
print(built > 3, _build._load_library.cache_info().misses - built)
"""


@pytest.mark.day("plain")
@pytest.mark.skipif(cxx_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("kind", ["plain", "experts", "adapters"])
def test_no_request_builds_afterwards(kind: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "True 0\n"
