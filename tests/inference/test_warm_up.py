"""Covers `Engine.warm_up`: afterwards no request builds C++; and first steps without a capture."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import shardfn as sf
from shardfn.inference import Engine, Sampling, decoder, logprobs
from shardfn.kernels import cxx_compiler
from shardfn.models import gpt

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


def test_steps_without_a_capture_have_the_bits_of_one_forward() -> None:
    config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32, batch_invariant=True)
    params = gpt.init(config, sf.key(0))
    engine = Engine(decoder(config), params, eager_steps=100)
    engine.warm_up(capture=False)
    for made, prompt in zip(engine.generate([[5, 6, 7], [8]], Sampling(max_tokens=4)), ([5, 6, 7], [8]), strict=True):
        tokens = torch.tensor([[*prompt, *made.tokens]])
        logits = gpt.apply(config, params, tokens)[0, len(prompt) - 1 : -1]
        assert logprobs(logits, tokens[0, len(prompt) :]).tolist() == made.logprobs
    assert not engine.runner._bound
