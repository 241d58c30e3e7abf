"""Functions to functions of the same meaning."""

from shardfn.engine import Accumulated as Accumulated, Mixed as Mixed, Objective as Objective
from shardfn.engine import WeightedMean as WeightedMean
from shardfn.engine import PipelineState as PipelineState
from shardfn.engine import CacheInfo as CacheInfo, Jitted as Jitted, Spent as Spent, default_batch as default_batch
from shardfn.modules import from_module as from_module
from shardfn.activations import policies as policies, SavedTensor as SavedTensor
from shardfn.capture import CaptureError as CaptureError
from shardfn.leaves import LeafLayout as LeafLayout, leaf_layout as leaf_layout, gather_units as gather_units
from shardfn.leaves import reduce_units as reduce_units, refresh_units as refresh_units
from shardfn.state import TrainState as TrainState

from ._value_and_grad import accumulate as accumulate
from ._by_parts import by_parts as by_parts
from ._value_and_grad import mixed_precision as mixed_precision
from ._remat import Offloaded as Offloaded, offload as offload
from ._pipeline import pad_layers as pad_layers, unpad_layers as unpad_layers
from ._partition import partition as partition
from ._partition import propose_specs as propose_specs
from ._pipeline import pipeline as pipeline
from ._pipeline import pipeline_module as pipeline_module
from shardfn.engine import reshard as reshard
from ._remat import remat as remat
from ._tiled import tiled as tiled
from ._shard_map import shard_map as shard_map
from ._jit import eval_shape as eval_shape
from ._leaf_norms import leaf_norms as leaf_norms
from shardfn.engine import Lowered as Lowered
from shardfn.engine import Predicted as Predicted, StepProfile as StepProfile
from ._jit import jit as jit
from ._bucketed import BoundBuckets as BoundBuckets, BucketCounts as BucketCounts, BucketInfo as BucketInfo
from ._bucketed import Bucketed as Bucketed, bucketed as bucketed
from shardfn.engine import BoundCall as BoundCall, Donated as Donated, Sharded as Sharded, sharded as sharded
from shardfn.engine import ShardedStep as ShardedStep
from shardfn.engine import trace_steps as trace_steps
from ._sharded_step import sharded_step as sharded_step
from ._switch_step import StepSwitch as StepSwitch, switch_step as switch_step
from ._value_and_grad import grad as grad, value_and_grad as value_and_grad
