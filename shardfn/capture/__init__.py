"""Capture of functions as graphs: recording, its errors, and copies of recorded parts."""

from ._capture import CaptureError as CaptureError, Recorder as Recorder, capture as capture, capturing as capturing
from ._capture import (
    draws as draws,
    is_traced as is_traced,
    mark as mark,
    quiet as quiet,
    recomputing as recomputing,
    recorder as recorder,
)
from ._copies import Copy as Copy, Written as Written, alias as alias, node_of as node_of, steps_after as steps_after
from ._copies import find_alias as find_alias, traced_once as traced_once
from ._fakes import fake as fake, fakes as fakes
from ._fakes import in_plumbing as in_plumbing, plumbing as plumbing
