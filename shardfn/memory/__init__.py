"""How values cross device, host and disk: transfers with a wait, identities, and a ledger that counts them."""

from ._transfer import Transfer as Transfer, arrived as arrived, to_device as to_device, to_host as to_host
from ._put import put as put
from ._host import host_empty as host_empty, return_freed_pages as return_freed_pages
from ._ledger import Ledger as Ledger, ledger as ledger, on_host as on_host
from ._pool import Opened as Opened, Pool as Pool, PoolInfo as PoolInfo
from ._disk import DiskTensor as DiskTensor, DiskWriter as DiskWriter
from ._errors import DamagedError as DamagedError, DiskFullError as DiskFullError, PoolInUseError as PoolInUseError
