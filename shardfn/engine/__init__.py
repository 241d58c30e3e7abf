"""The engine of a step: plan, gathers, reductions, update, schedule, agreement; eager, captured and pure."""

from ._admit import Admission as Admission, agree as agree, named_call as named_call
from ._abstract import abstract_leaves as abstract_leaves, is_abstract as is_abstract
from ._accumulated import (
    Accumulated as Accumulated,
    Split as Split,
    cut_ahead as cut_ahead,
    fold as fold,
    num_microbatches as num_microbatches,
)
from ._agreement import Agreement as Agreement
from ._backward import run_forward as run_forward
from ._callable import check_loss as check_loss, function_name as function_name
from ._bound import bind as bind
from ._captured import CapturedSteps as CapturedSteps
from ._canonical import describe_rows as describe_rows
from ._check import agree_on_step as agree_on_step, check_params as check_params
from ._chunks import Chunks as Chunks, tree_sum as tree_sum
from ._check import check_cuts as check_cuts, check_specs as check_specs, default_batch as default_batch
from ._check import describe_batch as describe_batch, is_spec as is_spec, told_before as told_before
from ._collector import uncollected as uncollected
from ._comms import COMMS as COMMS, Comms as Comms, comms_of as comms_of, losing_no_peer as losing_no_peer
from ._comms import losing_no_peer_purely as losing_no_peer_purely
from ._constant import describe_function as describe_function, describe_step as describe_step
from ._crossed import crossed as crossed
from ._descends import check_descends as check_descends, check_leaves_descend as check_leaves_descend
from ._eager_calls import EagerSteps as EagerSteps
from ._evaluation import evaluation as evaluation, has_rows as has_rows, one_row as one_row
from ._evaluation import without_values as without_values
from ._first import abstract_params as abstract_params, abstract_state as abstract_state, drawn as drawn
from ._first import first_params as first_params, first_state as first_state, own_blocks as own_blocks
from ._functional import global_mean as global_mean, pure_apply as pure_apply, pure_loss as pure_loss
from ._functional import pure_gradients as pure_gradients, pure_step as pure_step, pure_update as pure_update
from ._gradients import Found as Found
from ._graph_cache import MAX_GRAPHS as MAX_GRAPHS
from ._graphs import Graphs as Graphs, Ready as Ready, signature as signature
from ._interface import Argument as Argument, Interface as Interface, REMEDY as REMEDY, block_of as block_of
from ._interface import entered_argument as entered_argument
from ._interface import entered_as_rows as entered_as_rows, size_along as size_along
from ._jitted import CacheInfo as CacheInfo, Jitted as Jitted, leaf_signature as leaf_signature
from ._levels import Transform as Transform, check_order as check_order
from ._loss import Loss as Loss, NoGradientError as NoGradientError, WeightedMean as WeightedMean, evaluate as evaluate
from ._mixed import Mixed as Mixed, check_scaled as check_scaled, with_masters as with_masters
from ._model_state import check_alike as check_alike, check_kept as check_kept
from ._model_state import shapes_of as shapes_of
from ._compared import check_replicas as check_replicas
from ._compared import compare_first_batch as compare_first_batch, compare_first_step as compare_first_step
from ._moved import moved as moved, moved_purely as moved_purely
from ._partition_capture import in_section as in_section
from ._partitioned import Partitioned as Partitioned
from ._proposed import SpecSearch as SpecSearch, Unplaced as Unplaced
from ._phases import check_phases as check_phases, in_phase as in_phase
from ._pipelined import Pipelined as Pipelined, PipelinedLayers as PipelinedLayers, stage_axes as stage_axes
from ._masks import Masks as Masks
from ._nothing import check_has_rows as check_has_rows, check_has_values as check_has_values
from ._narrow import warn_of_narrow_updates as warn_of_narrow_updates
from ._nothing import check_trains as check_trains
from ._opened import (
    Passed as Passed,
    refuse_own_averages as refuse_own_averages,
)
from ._padded import padded as padded, unpadded as unpadded
from ._pipelined_functions import PipelinedFunctions as PipelinedFunctions
from ._pipelined_module import PipelinedModule as PipelinedModule
from ._plan import Plan as Plan
from ._planner import OF_A_STATE as OF_A_STATE, Planner as Planner, Words as Words
from ._pools import begin as begin, close_pool as close_pool, commit as commit, disk_of as disk_of, forget as forget
from ._pools import together as together
from ._profiled import Spans as Spans, Spent as Spent, measured_into as measured_into
from ._resume import resumed as resumed
from ._schedule import accumulation as accumulation, check_schedule as check_schedule
from ._several import (
    Objective as Objective,
    Share as Share,
    Source as Source,
    agree_on_all as agree_on_all,
    batches_of as batches_of,
    check_alike_losses as check_alike_losses,
    combined as combined,
    lines_of as lines_of,
    mean_of as mean_of,
)
from ._stage_layout import check_layout as check_layout, first_kept as first_kept
from ._stage_state import PipelineState as PipelineState
from ._step_parts import (
    check_pure as check_pure,
    check_scale as check_scale,
    step_lines as step_lines,
    step_parts as step_parts,
)
from ._step import StepCall as StepCall, StepParts as StepParts, advanced as advanced
from ._traced_function import FunctionProgram as FunctionProgram, capture_function as capture_function
from ._traced_function import tensors_of as tensors_of
from ._transit import Request as Request, Transit as Transit, is_followed as is_followed
from ._unequal import naming_unequal as naming_unequal
from ._unwrap import Unwrapped as Unwrapped, check_state as check_state, unwrap as unwrap
from ._update import decided_on as decided_on
