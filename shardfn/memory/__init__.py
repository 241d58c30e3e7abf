"""How values cross device, host and disk.

Transfers with a wait, identities, and a ledger that counts bytes and transfers.
"""

from ._transfer import send as send, to_device as to_device, to_host as to_host
from ._ops import rows_to_device as rows_to_device, rows_to_host as rows_to_host
from ._lock import background as background
from ._transfer import put as put
from ._host import (
    Bytes as Bytes,
    as_bytes as as_bytes,
    host_empty as host_empty,
    return_freed_pages as return_freed_pages,
    trim_heap as trim_heap,
)
from ._ledger import Ledger as Ledger, in_host_region as in_host_region, ledger as ledger, on_host as on_host
from ._ledger import is_recorded as is_recorded, record_owner as record_owner, recorded_section as recorded_section
from ._ledger import MemoryTimeline as MemoryTimeline, Section as Section, as_svg as as_svg
from ._pool import POOLS as POOLS, AnyPool as AnyPool, Opened as Opened, Pool as Pool, PoolInfo as PoolInfo
from ._quantized import QuantizedBlocks as QuantizedBlocks
from ._disk import DiskTensor as DiskTensor, DiskWriter as DiskWriter
from ._traced import TracedPool as TracedPool, TracedStored as TracedStored, capturing as capturing
from ._ops import bind_pool as bind_pool, stored_of as stored_of, token_of as token_of
from ._lock import DamagedError as DamagedError, DiskFullError as DiskFullError
from ._lock import InUseError as InUseError, PoolInUseError as PoolInUseError
from ._lock import locked as locked, unlock as unlock
from ._manifest import sync as sync
from ._slots import FULL as FULL
from ._transfer import Fetch as Fetch
