"""Activation offloading and checkpointing: policies, saved tensors, and moves to host and disk."""

from ._offloaded_value import pool_of as pool_of
from ._offloaded_value import is_plain as is_plain
from . import policies as policies
from .policies import SavePolicy as SavePolicy, SavedTensor as SavedTensor
from .policies import check_policy_names as check_policy_names
from ._saved import SavedValue as SavedValue
from ._selective import RecordedForward as RecordedForward, Rerun as Rerun, SavedResults as SavedResults
