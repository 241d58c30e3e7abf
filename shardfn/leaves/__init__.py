"""A parameter inside a loss: its layout, the lazy leaf that is gathered at its use, the watch on writes."""

from ._layout import LeafLayout as LeafLayout, leaf_layout as leaf_layout, stacked_layout as stacked_layout
from ._layout import with_ratio as with_ratio
from ._lazy import LazyLeaf as LazyLeaf, LeafBook as LeafBook, fetching as fetching, opened as opened
from ._lazy import packs_leaves as packs_leaves
from ._units import Unit as Unit, gather_units as gather_units, reduce_units as reduce_units
from ._units import refresh_units as refresh_units
from ._writes import Watch as Watch, check_graph as check_graph, refused_write as refused_write
