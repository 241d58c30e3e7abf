"""Leaves of a tree for files of other libraries: gathered in sequence, with the names of the library."""

from ._archive import Archive as Archive, ArchiveWriter as ArchiveWriter
from ._gather import Turns as Turns, Writer as Writer, WrittenByFirst as WrittenByFirst, is_writer as is_writer
from ._gather import gather_layer as gather_layer, gather_leaf as gather_leaf, gather_own_rows as gather_own_rows
from ._gather import join_keys as join_keys, parameter_names as parameter_names
