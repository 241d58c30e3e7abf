"""The state of a step between calls, in pieces and in other memories, and the streamed update."""

from ._overlapped_update import OverlappedUpdate as OverlappedUpdate, Promised as Promised
from ._origin import check_origins as check_origins, cuts_of as cuts_of, origin_of as origin_of
from ._storage import (
    Likeness as Likeness,
    Successor as Successor,
    apart as apart,
    as_graph_value as as_graph_value,
    change as change,
    common_kind as common_kind,
    codes_of as codes_of,
    copy_value as copy_value,
    empty_block as empty_block,
    encode as encode,
    entered as entered,
    fetch as fetch,
    graph_inputs as graph_inputs,
    in_memory as in_memory,
    is_read as is_read,
    lies_on_device as lies_on_device,
    lies_on_disk as lies_on_disk,
    load_at as load_at,
    prefetch as prefetch,
    replace as replace,
    returned as returned,
    start_move as start_move,
    store as store,
    succeed as succeed,
    with_codes as with_codes,
    zero_block as zero_block,
)
from ._state import widest as widest
from ._state import check_passed as check_passed
from ._state import (
    TrainState as TrainState,
    check_alive as check_alive,
    peek_blocks as peek_blocks,
    scale_of as scale_of,
)
from ._state import state_owners as state_owners, taken as taken, version_of as version_of
from ._storage import layers_of as layers_of, slices_of as slices_of, stack_values as stack_values
from ._operands import (
    UpdateOperand as UpdateOperand,
    UpdatedLeaves as UpdatedLeaves,
    LeafRows as LeafRows,
    Update as Update,
)
from ._stream import stream as stream
