"""Names of leaves in torch's profiler; without one that runs, a test of a flag."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

from shardfn.capture import capturing

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


def named_range(what: str, path: str) -> AbstractContextManager[Any]:
    """A range of the profiler, such as "shardfn gather params['w']". A graph that is captured has none."""
    if not profiler._is_profiler_enabled or capturing():
        return _NOTHING
    return profiler.record_function(f"shardfn {what} {path}")
