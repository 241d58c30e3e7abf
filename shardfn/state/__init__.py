"""The state of a step between calls, in pieces and in other memories, and the streamed update."""

from ._ahead import Ahead as Ahead, Promised as Promised
from ._origin import check_origins as check_origins, cuts_of as cuts_of, origin_of as origin_of
from ._kept import (
    Likeness as Likeness,
    Successor as Successor,
    closed as closed,
    fetched as fetched,
)
from ._kept import as_graph_value as as_graph_value, entered as entered, graph_inputs as graph_inputs
from ._kept import opened as opened, returned as returned
from ._masters import widest as widest
from ._passed import check_passed as check_passed
from ._state import TrainState as TrainState, check_alive as check_alive, looked_at as looked_at, scale_of as scale_of
from ._state import state_owners as state_owners, taken as taken, version_of as version_of
from ._stored import StoredSlice as StoredSlice, layers_of as layers_of, loaded as loaded, piled as piled
from ._columns import Column as Column, Done as Done, LeafRows as LeafRows, Update as Update
from ._stream import stream as stream
