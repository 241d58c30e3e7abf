"""How values cross the mesh."""

from ._axis_group import axis_index as axis_index, axis_size as axis_size
from ._axis_group import (
    bind_mesh as bind_mesh,
    bind_mesh_of_graph as bind_mesh_of_graph,
    current_mesh as current_mesh,
    mesh_as_now as mesh_as_now,
    noting_meshes as noting_meshes,
    view_mesh_from as view_mesh_from,
)
from ._primitives import pmax as pmax, pmean as pmean, psum as psum, pvary as pvary
from ._primitives import all_gather as all_gather, all_gather_invariant as all_gather_invariant
from ._primitives import quantized_all_gather as quantized_all_gather
from ._primitives import psum_scatter as psum_scatter, take_own_block as take_own_block
from ._primitives import all_to_all as all_to_all
from ._ragged_ops import HEAD as HEAD
from ._primitive import (
    RematResults as RematResults,
    current_remat_results as current_remat_results,
    keep_remat_results as keep_remat_results,
)
from ._ragged import ragged_all_to_all as ragged_all_to_all, ragged_exchange as ragged_exchange
from ._exchange_rows import check_room as check_room, exchange_rows as exchange_rows
from ._exchange_rows import all_gather_rows as all_gather_rows, psum_scatter_rows as psum_scatter_rows
from ._exchange_rows import values_are_known as values_are_known
from ._exchange_rows import arrived_rows as arrived_rows, rows_as as rows_as
from ._primitives import ppermute as ppermute, ppermute_start as ppermute_start
from ._route import (
    AllGather as AllGather,
    AllToAll as AllToAll,
    Cast as Cast,
    Dequantize as Dequantize,
    Quantize as Quantize,
)
from ._route import Hop as Hop, Move as Move, Psum as Psum, PsumScatter as PsumScatter, Slice as Slice
from ._route import Route as Route, route as route
from .transport import (
    EvenPacking as EvenPacking,
    Packing as Packing,
    Cuts as Cuts,
    Stretch as Stretch,
    dealt as dealt,
)
from ._carry import carry as carry, carry_all as carry_all
from ._cross import Box as Box, blocks_of as blocks_of, Overlap as Overlap, overlaps as overlaps, pieces as pieces
from ._cross import LeafCrossing as LeafCrossing, cross as cross
from ._compressor import Compressor as Compressor, error_feedback as error_feedback
from ._compressor import identity as identity, int4 as int4, int8 as int8, sign as sign, top_k as top_k
from ._residual import Residual as Residual, compressed_init as compressed_init
from ._residual import check_compressor as check_compressor, cut_of as cut_of
from ._residual import global_residuals as global_residuals, recut_residuals as recut_residuals
from ._compressor import padded as padded
from ._compressed import compressed_pmean_codes as compressed_pmean_codes, decompress_codes as decompress_codes
from ._compressed import compressed_pmean as compressed_pmean, compressed_psum as compressed_psum
from ._compressed_scatter import compressed_psum_scatter as compressed_psum_scatter
from ._compressed_scatter import compressed_scatter_init as compressed_scatter_init
from .transport import counting_nothing as counting_nothing
from .transport import Traffic as Traffic, count_traffic as count_traffic, record as record
from .transport import FlightEntry as FlightEntry, FlightRecorder as FlightRecorder
from .transport import flight_recorder_of as flight_recorder_of
from .transport import Channel as Channel, Channels as Channels
from .transport import is_sole_owner as is_sole_owner
from .transport import may_be_added_to as may_be_added_to
from .transport import chosen_channel as chosen_channel
from .transport import forget_loss_channels as forget_loss_channels, set_loss_channels as set_loss_channels
from .transport import TransportError as TransportError, close as close
from ._traced import TracedChannels as TracedChannels, TracedControl as TracedControl
from ._traced import AnyChannel as AnyChannel, AnyChannels as AnyChannels, AnyControl as AnyControl
from ._traced import AnyRounds as AnyRounds
from ._wires import TwoHops as TwoHops
from ._zero_plus_plus import Quantizer as Quantizer
from ._zero_plus_plus import (
    QuantizedGather as QuantizedGather,
    QuantizedReduce as QuantizedReduce,
    Relayed as Relayed,
)
from ._wires import GatherWire as GatherWire, SumWire as SumWire, gather_wires as gather_wires
from ._wire_ops import StoppedError as StoppedError, bind_channels as bind_channels
from ._wire_ops import Sizes as Sizes, as_runs as as_runs, in_runs as in_runs, with_sizes as with_sizes
from ._axis_index import AxisTypeError as AxisTypeError
from ._axis_type_mode import (
    track_axis_types as track_axis_types,
    current_axis_types as current_axis_types,
    note_axes as note_axes,
)
from ._axis_type_mode import (
    no_axis_types as no_axis_types,
    run_one_operation as run_one_operation,
    same_axes as same_axes,
)
from ._axis_type_mode import summed_inside as summed_inside
from ._axis_types import AxisTypeMode as AxisTypeMode
from ._primitive import Applied as Applied, current_application as current_application
from ._primitive import (
    set_call_site as set_call_site,
    current_call_site as current_call_site,
    record_call_sites as record_call_sites,
)
from .transport import Notice as Notice, notice_of as notice_of
from .transport import Rounds as Rounds
from .transport import (
    Agreed as Agreed,
    Constant as Constant,
    Control as Control,
    absent_from as absent_from,
    text_hash as text_hash,
)
from ._global_tensor import GlobalTensor as GlobalTensor, local as local, shard as shard, unshard as unshard
from ._global_tensor import absent as absent, list_blocks as list_blocks, member as member, stack as stack
from ._global_tensor import donate_blocks as donate_blocks, list_sharded as list_sharded, transforming as transforming
