"""Mixtures of experts as pure pieces: rows in the order of their experts, and products of groups of rows."""

from ._permute import Permutation as Permutation, combine as combine, dispatch as dispatch, permutation as permutation
from ._grouped import grouped as grouped
