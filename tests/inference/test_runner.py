"""Covers the extended steps of `inference`: biases of tokens, and the most probable ones at each place."""

import dataclasses

from shardfn.inference import Sampling
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
