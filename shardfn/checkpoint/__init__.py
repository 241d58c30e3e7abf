"""Trees of sharded leaves as files, and back under any other mesh. All ranks write one format."""

from ._job import save as save
from ._match import ByKind as ByKind
from ._restore import Restored as Restored, restore as restore
from ._read_into import restore_tensors as restore_tensors
from ._dcp import restore_dcp as restore_dcp, save_dcp as save_dcp
from ._manager import Manager as Manager, latest as latest
from ._manager import best as best
from ._manager import Preemption as Preemption
from ._located import steps as steps
from ._job import Saved as Saved
from ._inspect import Difference as Difference, Verified as Verified
from ._inspect import diff as diff, inspect as inspect, read_leaves as read_leaves, stored as stored, verify as verify
from ._safetensors import SAFETENSORS_DTYPES as SAFETENSORS_DTYPES, SafetensorsEntry as SafetensorsEntry
from ._safetensors import safetensors_entries as safetensors_entries, safetensors_header as safetensors_header
from ._read import read_box as read_box
