"""Transfers of a single step: gathers, reductions, sums of gradients, refreshes."""

from ._canonical import (
    ChunkStates as ChunkStates,
    check_chunk_states as check_chunk_states,
    chunks_of as chunks_of,
    describe_rows as describe_rows,
    sum_all_squares as sum_all_squares,
    sum_values as sum_values,
)
from ._gather import (
    DONE as DONE,
    Gatherer as Gatherer,
    IDLE as IDLE,
)
from ._gradients import (
    Blocks as Blocks,
    FoundGradients as FoundGradients,
    added as added,
    as_tree as as_tree,
    by_leaf as by_leaf,
    check_gradients as check_gradients,
    measured as measured,
    of_update as of_update,
    scaled as scaled,
)
from ._lazy_params import (
    check_capture as check_capture,
    enter as enter,
    make_write_detector as make_write_detector,
)
from ._gradients import (
    MicrobatchRunner as MicrobatchRunner,
    BackwardRoots as BackwardRoots,
    Seed as Seed,
    LocalRunner as LocalRunner,
)
from ._reduce import (
    BackwardResult as BackwardResult,
    WEIGHTED as WEIGHTED,
    agree_on_outcome as agree_on_outcome,
    outcome_of as outcome_of,
)
from ._pools import (
    begin as begin,
    close_pool as close_pool,
    commit as commit,
    cut_parts as cut_parts,
    disk_of as disk_of,
    forget as forget,
    pool_of as pool_of,
    reopen as reopen,
    together as together,
)
from ._pure_transfers import (
    enter_purely as enter_purely,
    shard_rows as shard_rows,
    reduce_purely as reduce_purely,
    refresh_purely as refresh_purely,
)
from ._reduce import (
    Reducer as Reducer,
)
from ._refresh import (
    refresh as refresh,
)
from ._gradients import (
    accumulation as accumulation,
    check_schedule as check_schedule,
)
from ._gradients import (
    Metrics as Metrics,
    StepParts as StepParts,
    advanced as advanced,
    rescaled as rescaled,
)
