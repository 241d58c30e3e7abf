"""Descriptions of values: trees, specs, the mesh, keys, errors. No tensor moves between ranks here."""

# First, as the other imports may fail with another torch.
from shardfn._torch import check_torch as check_torch
from ._describe import describe as describe, is_own as is_own
from ._texts import DonatedError as DonatedError, RankError as RankError
from ._texts import count_nonfinite as count_nonfinite, raise_nonfinite as raise_nonfinite
from ._texts import (
    a_kind as a_kind,
    did_you_mean as did_you_mean,
    first_of as first_of,
    not_scalar as not_scalar,
    raise_all as raise_all,
)
from ._keywords import explains_attributes as explains_attributes, explains_extra as explains_extra
from ._keywords import explains_keywords as explains_keywords, explains_fields as explains_fields
from ._mesh import HOUSE_AXES as HOUSE_AXES, Axes as Axes, Mesh as Mesh
from ._mesh import MOST_DRAWN as MOST_DRAWN, all_coords as all_coords
from ._groups import is_known as is_known
from ._make_mesh import (
    as_mesh as as_mesh,
    is_first_launched as is_first_launched,
    make_mesh as make_mesh,
    num_launched as num_launched,
)
from ._stored_value import (
    QuantizationPolicy as QuantizationPolicy,
    check_policy as check_policy,
    find_quantization as find_quantization,
)
from ._stored_value import GROUP_BYTES as GROUP_BYTES, GROUP as GROUP
from ._stored_value import AnyQuantization as AnyQuantization, Placement as Placement, dtype_name as dtype_name
from ._saved import save_inputs as save_inputs, save_tensors as save_tensors
from ._saved import saved_tensors_hooks as saved_tensors_hooks
from ._policy import Dtypes as Dtypes, Policy as Policy
from ._policy import Rounding as Rounding, RoundingPolicy as RoundingPolicy
from ._spec import (
    TENSOR_KINDS as TENSOR_KINDS,
    MemoryKind as MemoryKind,
    is_device as is_device,
    is_disk as is_disk,
    is_in_memory as is_in_memory,
)
from ._spec import find_directory_problem as find_directory_problem, kind_when_loaded as kind_when_loaded
from ._spec import Quantization as Quantization, P as P, Sharding as Sharding
from ._spec import block_slices as block_slices, chunk_bounds as chunk_bounds
from ._tree import PyTree as PyTree, broadcast_prefix as broadcast_prefix
from ._tree import tree_entries as tree_entries, tree_flatten as tree_flatten, tree_leaves as tree_leaves
from ._tree import named_leaves as named_leaves, register_pytree_node as register_pytree_node
from ._tree import tree_map as tree_map, tree_path_parts as tree_path_parts, tree_paths as tree_paths
from ._tree import tree_structure as tree_structure, tree_unflatten as tree_unflatten
from ._zero import BITS as BITS, Travel as Travel
from ._zero import IN_FLIGHT_BYTES as IN_FLIGHT_BYTES, PREFETCH_BYTES as PREFETCH_BYTES, Pace as Pace
from ._zero import Disk as Disk
from ._zero import Zero as Zero, zero_spec as zero_spec
from ._zero import as_zero as as_zero
from ._draw import bits as bits, check_key as check_key, fold_in as fold_in, key as key, split as split
from ._draw import threefry2x32 as threefry2x32
from ._draw import Draw as Draw, bernoulli as bernoulli, deferred as deferred, draw_block as draw_block
from ._draw import draw_shapes as draw_shapes
from ._draw import full as full, normal as normal, normal_block as normal_block, ones as ones
from ._draw import stack_draws as stack_draws
from ._draw import uniform as uniform, uniform_block as uniform_block, zeros as zeros
from ._modules import frozen as frozen, is_frozen as is_frozen
from ._modules import named_buffers as named_buffers, named_modules as named_modules
from ._modules import named_parameters as named_parameters, state_names as state_names
from ._modules import is_compiled as is_compiled, uncompiled as uncompiled
from ._metadata import METADATA as METADATA, MetadataTensor as MetadataTensor
from ._ambient import op_by_op as op_by_op, runs_op_by_op as runs_op_by_op
from ._progress import progress as progress
from ._mesh import PerMesh as PerMesh
from ._stored_value import Pending as Pending
from ._ambient import serialize_tracing as serialize_tracing
from ._stored_value import Absent as Absent, Stored as Stored, StoredValue as StoredValue
from ._stored_value import are_tensors as are_tensors, as_stored as as_stored, load as load, read_rows as read_rows
from ._texts import as_html as as_html, columns as columns, size as size
from ._ambient import (
    Ambient as Ambient,
    OfProgram as OfProgram,
    Program as Program,
    adopted as adopted,
    adopting as adopting,
    ambient_names as ambient_names,
    this_program as this_program,
)
from ._ambient import evaluating as evaluating, is_evaluating as is_evaluating
from ._ambient_rebind import Again as Again, Note as Note, Replaced as Replaced, capture_ambient as capture_ambient
from ._ambient_rebind import (
    rebind_ambient as rebind_ambient,
    rebind_in_checkpoints as rebind_in_checkpoints,
    rebind_note as rebind_note,
)
from ._saved import checkpoint_name as checkpoint_name, hearing_names as hearing_names
from ._ambient_rebind import check_recompute as check_recompute
