"""Covers the counters of guessing and of the cache in `serve`: those of the engine, so far."""

import pytest

pytest.importorskip("starlette")

from shardfn.inference import CacheUse, Guesses
from shardfn.serve._calls import Calls
from shardfn.serve._link import Report
from shardfn.serve._metrics import Metrics

VALUES = {
    "spec_decode_num_drafts": 3,
    "spec_decode_num_draft_tokens": 9,
    "spec_decode_num_accepted_tokens": 5,
    "prefix_cache_queries": 40,
    "prefix_cache_hits": 32,
    "num_preemptions": 1,
}


def test_counts_of_the_engine_are_on_the_page() -> None:
    metrics = Metrics("m")
    calls = Calls(lambda event: None, metrics, 10)
    last = Guesses(3, 9, 5), CacheUse(40, 32, 1)
    for so_far in ((Guesses(), CacheUse()), (Guesses(2, 6, 3), CacheUse(8, 0, 0)), last, last):
        calls.report(Report([], {}, 0, {}, {}, *so_far))
    lines = metrics.text({}).splitlines()
    for name, value in VALUES.items():
        assert f'vllm:{name}_total{{model_name="m"}} {value}' in lines
