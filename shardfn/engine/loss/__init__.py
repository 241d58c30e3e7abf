"""A loss and the transforms around: order, microbatches, precision, model state, checks."""

from ._model_state import (
    abstract_leaves as abstract_leaves,
    is_abstract as is_abstract,
)
from ._accumulated import (
    Accumulated as Accumulated,
    Split as Split,
    cut_ahead as cut_ahead,
    cut_rows as cut_rows,
    cuts_by_function as cuts_by_function,
    fold as fold,
    microbatches as microbatches,
    num_microbatches as num_microbatches,
    of_whole_batch as of_whole_batch,
)
from ._jitted import BoundedCache as BoundedCache
from ._callable import (
    check_count as check_count,
    check_loss as check_loss,
    check_metrics as check_metrics,
    function_name as function_name,
    module_name as module_name,
)
from ._check import (
    agree_on_step as agree_on_step,
    check_cuts as check_cuts,
    check_params as check_params,
    check_same_loss as check_same_loss,
    check_specs as check_specs,
    check_travel as check_travel,
    checksum as checksum,
    corner as corner,
    default_batch as default_batch,
    describe_batch as describe_batch,
    is_spec as is_spec,
    told_before as told_before,
)
from ._unwrap import (
    describe_function as describe_function,
)
from ._model_state import (
    Finish as Finish,
    check_finish as check_finish,
    finished as finished,
)
from ._generator import (
    warn_of_draws_in as warn_of_draws_in,
    warning_of_draws as warning_of_draws,
)
from ._jitted import (
    GraphCache as GraphCache,
    MAX_GRAPHS as MAX_GRAPHS,
    argument_shapes as argument_shapes,
)
from ._jitted import (
    CacheInfo as CacheInfo,
    Jitted as Jitted,
    ResultSlot as ResultSlot,
    ambient as ambient,
    leaf_signature as leaf_signature,
    plain_arithmetic as plain_arithmetic,
    report as report,
    slot_of as slot_of,
)
from ._leaf_uses import (
    FIRST as FIRST,
    LAST as LAST,
    LAYERS as LAYERS,
    LeafUses as LeafUses,
    LeavesByUse as LeavesByUse,
    is_separating as is_separating,
    leaves_for as leaves_for,
    separating as separating,
)
from ._loss import (
    Loss as Loss,
    NoGradientError as NoGradientError,
    Value as Value,
    WeightedMean as WeightedMean,
    called as called,
    evaluate as evaluate,
    naming_used_up as naming_used_up,
    refuse_gradient_of as refuse_gradient_of,
    refuse_negative as refuse_negative,
    totals as totals,
    varying_along as varying_along,
)
from ._masks import (
    Masks as Masks,
)
from ._unwrap import (
    Mixed as Mixed,
    check_scaled as check_scaled,
    policy_in as policy_in,
    with_masters as with_masters,
)
from ._model_state import (
    ModelState as ModelState,
    check_alike as check_alike,
    check_kept as check_kept,
    check_same_state as check_same_state,
    first_model_state as first_model_state,
    innermost_state as innermost_state,
    put_in as put_in,
    shapes_of as shapes_of,
    wrapped_like as wrapped_like,
)
from ._error_context import (
    noting_exceptions as noting_exceptions,
)
from ._scan_copy import (
    copied_loop as copied_loop,
    taking_early as taking_early,
)
from ._layer_trace import (
    differing as differing,
    without_data as without_data,
)
from ._transform_order import (
    Transform as Transform,
    check_order as check_order,
    find_transforms as find_transforms,
)
from ._check import (
    UnequalBatchesError as UnequalBatchesError,
    naming_unequal as naming_unequal,
)
from ._unwrap import (
    pass_count as pass_count,
    trained_leaves as trained_leaves,
    Unwrapped as Unwrapped,
    check_state as check_state,
    unwrap as unwrap,
)
