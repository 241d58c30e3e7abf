"""Covers the counters of guessing in `serve`: those of the engine, so far."""

import pytest

pytest.importorskip("starlette")

from shardfn.inference import Guesses
from shardfn.serve._calls import Calls
from shardfn.serve._link import Report
from shardfn.serve._metrics import Metrics

VALUES = {"drafts": 3, "draft_tokens": 9, "accepted_tokens": 5}


def test_counts_of_the_engine_are_on_the_page() -> None:
    metrics = Metrics("m")
    calls = Calls(lambda event: None, metrics, 10)
    for guesses in (Guesses(), Guesses(2, 6, 3), Guesses(3, 9, 5), Guesses(3, 9, 5)):
        calls.report(Report([], {}, 0, {}, {}, guesses))
    lines = metrics.text({}).splitlines()
    for name, value in VALUES.items():
        assert f'vllm:spec_decode_num_{name}_total{{model_name="m"}} {value}' in lines
