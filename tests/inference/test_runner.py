"""Covers the steps of `inference`: biases of tokens, the most probable ones at each place, and threads."""

import dataclasses
from typing import Any

import pytest
import torch

from shardfn import core
from shardfn.engine import BoundCall
from shardfn.inference import Engine, Sampling, decoder
from shardfn.models import gpt
from tests.inference.test_engine import engine


def test_biases_of_tokens() -> None:
    how = Sampling(max_tokens=6, temperature=0.0, top_logprobs=2)
    one = engine()
    [free] = one.generate([[1, 2, 3]], how)
    assert [len(top) for top in free.top_logprobs] == [2] * 6
    for token, logprob, top in zip(free.tokens, free.logprobs, free.top_logprobs, strict=True):
        assert top[0] == (token, logprob)  # the most probable one is drawn, with one value
    [never, always] = one.generate(
        [[1, 2, 3]] * 2,
        [
            dataclasses.replace(how, logit_bias=((free.tokens[0], -100.0),)),
            dataclasses.replace(how, logit_bias=((4, 100.0),)),
        ],
    )
    assert never.tokens[0] == free.top_logprobs[0][1][0]
    assert always.tokens == [4] * 6 and always.top_logprobs[0] == free.top_logprobs[0]
    assert one.generate([[1, 2, 3]], Sampling(max_tokens=6, temperature=0.0))[0].top_logprobs == ()


@pytest.mark.nightly
@pytest.mark.parametrize("exact", [True, False])
def test_torch_takes_one_thread_beside_kernels(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()  # by torch in the pure step, when it is captured and when it runs
    config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32, batch_invariant=exact)
    made = decoder(config)

    def outputs(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return made.outputs(*args)

    def call(self: BoundCall, *args: Any, run: Any = BoundCall.__call__) -> Any:
        seen.append(torch.get_num_threads())
        return run(self, *args)

    monkeypatch.setattr(BoundCall, "__call__", call)
    one = Engine(dataclasses.replace(made, outputs=outputs), gpt.init(config, core.key(0)))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        one.generate([[1, 2, 3]], Sampling(max_tokens=2))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert len(seen) >= 4 and set(seen) == {1 if exact else 3}
