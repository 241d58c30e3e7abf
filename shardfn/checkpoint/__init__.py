"""Trees of sharded leaves as files, and back under any other mesh: one format, written by all ranks, opened by any."""

from ._save import save as save
from ._restore import Restored as Restored, restore as restore
from ._directory import steps as steps
from ._job import Saved as Saved
