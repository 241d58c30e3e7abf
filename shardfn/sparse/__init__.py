"""Structured sparsity: groups of weights that are trained to 0 together, and then removed from the model."""

from ._groups import (
    GroupFamily as GroupFamily,
    WeightGroups as WeightGroups,
    LeafIndices as LeafIndices,
    leaf_shapes as leaf_shapes,
    read_groups as read_groups,
)
from ._lasso import group_lasso as group_lasso, group_norms as group_norms, group_shrink as group_shrink
from ._compact import Alive as Alive, compact as compact, find_alive as find_alive
