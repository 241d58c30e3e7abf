"""shardfn: training large models as pure functions over pytrees of sharded tensors."""

# isort: off
from shardfn import waits as waits  # first: it reports that the others are imported
from shardfn import collectives as collectives, core as core, kernels as kernels, memory as memory
from shardfn import graph as graph, nn as nn, optim as optim, schedules as schedules
from shardfn import checkpoint as checkpoint, models as models, transforms as transforms
from shardfn import data as data, distill as distill, inference as inference, interop as interop, lora as lora
from shardfn import metrics as metrics, rl as rl, sparse as sparse, speculators as speculators, testing as testing

from shardfn.collectives import (
    GlobalTensor as GlobalTensor,
    all_gather as all_gather,
    all_gather_invariant as all_gather_invariant,
    all_to_all as all_to_all,
    axis_index as axis_index,
    axis_size as axis_size,
    count_traffic as count_traffic,
    member as member,
    pmax as pmax,
    pmean as pmean,
    ppermute as ppermute,
    psum as psum,
    psum_scatter as psum_scatter,
    pvary as pvary,
    ragged_all_to_all as ragged_all_to_all,
    shard as shard,
    stack as stack,
    unshard as unshard,
)
from shardfn.core import (
    Disk as Disk,
    DonatedError as DonatedError,
    Mesh as Mesh,
    P as P,
    Pace as Pace,
    Policy as Policy,
    RankError as RankError,
    RoundingPolicy as RoundingPolicy,
    Sharding as Sharding,
    Travel as Travel,
    Zero as Zero,
    checkpoint_name as checkpoint_name,
    fold_in as fold_in,
    key as key,
    make_mesh as make_mesh,
    progress as progress,
    split as split,
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_paths as tree_paths,
    tree_structure as tree_structure,
    tree_unflatten as tree_unflatten,
)
from shardfn.interop import eval_state as eval_state
from shardfn.interop import export as export, from_deepspeed_config as from_deepspeed_config
from shardfn.interop import master_params as master_params, to_module as to_module
from shardfn.nn import scan as scan
from shardfn.transforms import (
    CaptureError as CaptureError,
    Donated as Donated,
    Objective as Objective,
    PipelineState as PipelineState,
    TrainState as TrainState,
    WeightedMean as WeightedMean,
    accumulate as accumulate,
    bucketed as bucketed,
    by_parts as by_parts,
    eval_shape as eval_shape,
    from_module as from_module,
    grad as grad,
    jit as jit,
    leaf_norms as leaf_norms,
    mixed_precision as mixed_precision,
    offload as offload,
    pad_layers as pad_layers,
    partition as partition,
    propose_specs as propose_specs,
    pipeline as pipeline,
    pipeline_module as pipeline_module,
    policies as policies,
    remat as remat,
    reshard as reshard,
    shard_map as shard_map,
    sharded as sharded,
    sharded_step as sharded_step,
    switch_step as switch_step,
    tiled as tiled,
    trace_steps as trace_steps,
    unpad_layers as unpad_layers,
    value_and_grad as value_and_grad,
)
from shardfn.pretrained import LLM as LLM

__version__ = "0.1.0"
