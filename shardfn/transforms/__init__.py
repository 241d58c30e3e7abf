"""Functions to functions of the same meaning."""

from ._accumulate import Accumulated as Accumulated, accumulate as accumulate
from ._from_module import from_module as from_module
from ._mixed_precision import Mixed as Mixed, mixed_precision as mixed_precision
from ._loss import WeightedMean as WeightedMean
from ._offload import Offloaded as Offloaded, offload as offload
from . import policies as policies
from .policies import SavedTensor as SavedTensor
from ._reshard import reshard as reshard
from ._remat import remat as remat
from ._shard_map import shard_map as shard_map
from ._capture import CaptureError as CaptureError
from ._eval_shape import eval_shape as eval_shape
from ._lower import Lowered as Lowered
from ._jit import CacheInfo as CacheInfo, Jitted as Jitted, jit as jit
from ._layout import LeafLayout as LeafLayout, leaf_layout as leaf_layout
from ._units import gather_units as gather_units, reduce_units as reduce_units, refresh_units as refresh_units
from ._check import default_batch as default_batch
from ._sharded import Sharded as Sharded, sharded as sharded
from ._sharded_step import ShardedStep as ShardedStep, sharded_step as sharded_step
from ._state import TrainState as TrainState
from ._value_and_grad import grad as grad, value_and_grad as value_and_grad
