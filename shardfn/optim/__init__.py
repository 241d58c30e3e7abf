"""Optimizers: pure `(init, update)` pairs, with in-place forms. No gradient is computed here."""

from ._adafactor import adafactor as adafactor
from ._adam import ScaleByAdamState as ScaleByAdamState
from ._adam import adam as adam, adamw as adamw, nadamw as nadamw, scale_by_adam as scale_by_adam
from ._adam_variants import ScaleByAdemamixState as ScaleByAdemamixState
from ._adam_variants import ademamix as ademamix, scale_by_ademamix as scale_by_ademamix
from ._adam_variants import adopt as adopt, scale_by_adopt as scale_by_adopt
from ._loss_scale import ApplyIfFiniteState as ApplyIfFiniteState, apply_if_finite as apply_if_finite
from ._averages import AverageParamsState as AverageParamsState, average_params as average_params
from ._base import EmptyState as EmptyState, GradientTransformation as GradientTransformation
from ._base import Measure as Measure, Needs as Needs, Phase as Phase, Phases as Phases, WholeLeaf as WholeLeaf
from ._base import identity as identity, reduce_gradient as reduce_gradient, stateless as stateless
from ._chain import chain as chain, named_chain as named_chain
from ._bounds import clip as clip, clip_by_global_norm as clip_by_global_norm
from ._bounds import adaptive_grad_clip as adaptive_grad_clip, clip_by_block_rms as clip_by_block_rms
from ._schedules import cosine_onecycle_schedule as cosine_onecycle_schedule
from ._schedules import linear_onecycle_schedule as linear_onecycle_schedule
from ._schedules import piecewise_constant_schedule as piecewise_constant_schedule, sgdr_schedule as sgdr_schedule
from ._bounds import clamp_params as clamp_params, keep_params_nonnegative as keep_params_nonnegative
from ._bounds import project_params as project_params
from ._learning_rate import add_decayed_weights as add_decayed_weights
from ._delayed import DelayedState as DelayedState, delayed as delayed
from ._adafactor import FactoredState as FactoredState, scale_by_factored_rms as scale_by_factored_rms
from ._phased import FreezeState as FreezeState, VarianceStability as VarianceStability
from ._galore import ScaleByGaloreState as ScaleByGaloreState, Subspace as Subspace
from ._galore import galore as galore, scale_by_galore as scale_by_galore
from ._pair import apply_updates as apply_updates, inplace as inplace
from ._lamb import ScaleByBiasCorrectionState as ScaleByBiasCorrectionState
from ._lamb import ScaleByMomentRatioState as ScaleByMomentRatioState
from ._lamb import lamb as lamb, scale_by_bias_correction as scale_by_bias_correction
from ._lamb import scale_by_moment_ratio as scale_by_moment_ratio
from ._trust_ratio import lars as lars
from ._learning_rate import ScaleByScheduleState as ScaleByScheduleState, scale as scale
from ._learning_rate import scale_by_learning_rate as scale_by_learning_rate, scale_by_schedule as scale_by_schedule
from ._momentum import ScaleByLionState as ScaleByLionState, lion as lion, scale_by_lion as scale_by_lion
from ._low_precision import LowPrecisionState as LowPrecisionState
from ._low_precision import dynamic_map as dynamic_map, linear_map as linear_map
from ._low_precision import quantize_states as quantize_states, round_states as round_states
from ._averages import LookaheadState as LookaheadState, lookahead as lookahead
from ._loss_scale import DynamicScaleState as DynamicScaleState, LossScale as LossScale
from ._loss_scale import StaticScaleState as StaticScaleState
from ._loss_scale import dynamic_loss_scale as dynamic_loss_scale, static_loss_scale as static_loss_scale
from ._masks import MultiTransformState as MultiTransformState, freeze as freeze, masked as masked
from ._masks import multi_transform as multi_transform, partition as partition, set_to_zero as set_to_zero
from ._master import MasterState as MasterState, master_weights as master_weights
from ._muon import MatrixDims as MatrixDims, hidden_matrices as hidden_matrices
from ._averages import EmaState as EmaState, ema as ema
from ._muon import ScaleByMuonState as ScaleByMuonState, muon as muon, scale_by_muon as scale_by_muon
from ._needs import (
    find_ascending as find_ascending,
    resolve_masks as resolve_masks,
    bind_stats as bind_stats,
    join_needs as join_needs,
)
from ._muon import NewtonSchulz as NewtonSchulz
from ._norm import (
    dtype_of_squares as dtype_of_squares,
    exact_limbs as exact_limbs,
    global_norm as global_norm,
    is_small as is_small,
    large_square as large_square,
    max_abs as max_abs,
    join_limbs as join_limbs,
    leaf_squares as leaf_squares,
    sum_squares as sum_squares,
    sum_exactly as sum_exactly,
)
from ._onebit_adam import OneBitAdamState as OneBitAdamState
from ._onebit_adam import apmsqueeze as apmsqueeze, onebit_adam as onebit_adam
from ._onebit_lamb import OneBitLambState as OneBitLambState, onebit_lamb as onebit_lamb
from ._pair import as_transformation as as_transformation, owners as owners
from ._masks import per_leaf as per_leaf
from ._chunked_update import Pieces as Pieces, in_pieces as in_pieces
from ._prodigy import ProdigyState as ProdigyState, prodigy as prodigy
from ._adam_variants import radam as radam, scale_by_radam as scale_by_radam
from ._rebalance import (
    check_in_round as check_in_round,
    is_compressing as is_compressing,
    rebalance_residuals as rebalance_residuals,
)
from ._rmsprop import ScaleByRmsState as ScaleByRmsState, ScaleByRssState as ScaleByRssState
from ._rmsprop import adagrad as adagrad, rmsprop as rmsprop, scale_by_rms as scale_by_rms
from ._rmsprop import scale_by_rss as scale_by_rss, scale_by_stddev as scale_by_stddev
from ._sam import SamState as SamState, is_perturbed as is_perturbed, sam as sam
from ._averages import ScheduleFreeState as ScheduleFreeState, schedule_free as schedule_free
from ._averages import schedule_free_eval_params as schedule_free_eval_params
from ._schedules import constant_schedule as constant_schedule, cosine_decay_schedule as cosine_decay_schedule
from ._schedules import exponential_decay as exponential_decay, polynomial_schedule as polynomial_schedule
from ._schedules import join_schedules as join_schedules, linear_schedule as linear_schedule
from ._schedules import warmup_constant_schedule as warmup_constant_schedule
from ._schedules import warmup_cosine_decay_schedule as warmup_cosine_decay_schedule
from ._schedules import warmup_linear_decay_schedule as warmup_linear_decay_schedule
from ._momentum import TraceState as TraceState, sgd as sgd, trace as trace
from ._sophia import SophiaState as SophiaState, is_hessian_step as is_hessian_step, sophia as sophia
from ._trust_ratio import scale_by_trust_ratio as scale_by_trust_ratio
from ._base import Grain as Grain, LearningRate as LearningRate, Pair as Pair, Schedule as Schedule
from ._zero_one_adam import Interval as Interval, ZeroOneAdamState as ZeroOneAdamState
from ._zero_one_adam import is_in_round as is_in_round, zero_one_adam as zero_one_adam
