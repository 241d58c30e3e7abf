"""Activation offloading and checkpointing: policies, saved tensors, and moves to host and disk."""

from ._activation_pool import pool_of as pool_of
from ._away import is_plain as is_plain
from . import policies as policies
from .policies import SavePolicy as SavePolicy, SavedTensor as SavedTensor
from ._heard import noticing_names as noticing_names
from ._saved import SavedValue as SavedValue
from ._selective import RecordedForward as RecordedForward, Rerun as Rerun, SavedResults as SavedResults
