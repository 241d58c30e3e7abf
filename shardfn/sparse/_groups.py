"""Groups of weights, as maps from leaves to index sets.

A group has all elements of a unit, for example of a hidden unit of an LSTM: rows of some leaves, and columns of other
leaves. A family has K groups of the same form, so a place of the family in a leaf is K indices of a dim. Group k has
the index `start + k`. The rows and the columns of a recurrent matrix share elements: an element in row j and column k
is in both groups. But an index of a dim belongs to one group only, as an index is either removed or kept.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shardfn import core


class LeafIndices(NamedTuple):
    """Indices of a family of K groups in a leaf: indices start to start + K of a dim.

    Attributes:
        path: path of the leaf, with points, as "layers.0.w_x".
        dim: dim of the leaf.
        start: index of group 0.
    """

    path: str
    dim: int
    start: int = 0


class GroupFamily(NamedTuple):
    """Groups of the same form, such as the hidden units of a layer.

    Attributes:
        size: number of groups K.
        places: index sets of the groups, in leaves.
    """

    size: int
    places: tuple[LeafIndices, ...]


@dataclasses.dataclass(frozen=True)
class WeightGroups:
    """Families of groups in the leaves of a tree.

    Attributes:
        families: families by name.
        shapes: shapes of the whole leaves, by path. `leaf_shapes(params)` makes them.

    Raises:
        ValueError: lists all places of absent leaves, dims or indices, and indices that two groups share.

    Example:
        >>> units = GroupFamily(4, (LeafIndices("w", 0), LeafIndices("head", 1)))
        >>> WeightGroups({"units": units}, {"w": (4, 3), "head": (2, 5)}).families["units"].size
        4
        >>> WeightGroups({"units": GroupFamily(4, (LeafIndices("w", 0), LeafIndices("w", 0, 2)))}, {"w": (8, 3)})
        Traceback (most recent call last):
        ValueError: groups:
          - index 2 of dim 0 of w is in group 2 of 'units' and in group 0 of 'units'; give each index to one group
    """

    families: Mapping[str, GroupFamily]
    shapes: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        taken: dict[tuple[str, int, int], str] = {}
        problems: list[str] = []
        for name, family in self.families.items():
            if family.size < 1 or not family.places:
                problems.append(f"{name!r} has {family.size} groups in {len(family.places)} places; it needs 1 of each")
            for at in family.places:
                problems += self._check_slice(name, family, at) or _take_indices(taken, name, family, at)
        core.raise_all(ValueError, "groups:", problems)

    def _check_slice(self, name: str, family: GroupFamily, at: LeafIndices) -> list[str]:
        shape = self.shapes.get(at.path)
        if shape is None:
            return [f"{name!r} is in {at.path}, which is not a leaf.{core.did_you_mean(at.path, self.shapes)}"]
        if not 0 <= at.dim < len(shape):
            return [f"{name!r} is in dim {at.dim} of {at.path} of shape {shape}; dims are 0 to {len(shape) - 1}"]
        if at.start < 0 or at.start + family.size > shape[at.dim]:
            last = at.start + family.size - 1
            return [f"{name!r} is in indices {at.start} to {last} of dim {at.dim} of {at.path} of shape {shape}"]
        return []

    def list_places(self, path: str) -> list[tuple[str, int, LeafIndices]]:
        """Returns name, size and place of each family in a leaf."""
        return [(name, f.size, at) for name, f in self.families.items() for at in f.places if at.path == path]


def _take_indices(taken: dict[tuple[str, int, int], str], name: str, family: GroupFamily, at: LeafIndices) -> list[str]:
    """Notes the indices of a place. Returns the first index that another group has, as a problem."""
    for k in range(family.size):
        spot, group = (at.path, at.dim, at.start + k), f"group {k} of {name!r}"
        if (other := taken.setdefault(spot, group)) != group or _is_repeated(family, at):
            return [
                f"index {spot[2]} of dim {at.dim} of {at.path} is in {other} and in {group}; give each index to one"
                " group"
            ]
    return []


def _is_repeated(family: GroupFamily, at: LeafIndices) -> bool:
    return family.places.count(at) > 1


def leaf_names(tree: core.PyTree) -> list[str]:
    """Returns the path of each leaf, with points.

    Example:
        >>> leaf_names({"layers": [{"w": 1}]})
        ['layers.0.w']
    """
    return [".".join(map(str, entries)) for entries in core.tree_entries(tree)]


def leaf_shapes(tree: core.PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each whole leaf, by path with points."""
    return {name: tuple(x.shape) for name, x in zip(leaf_names(tree), core.tree_leaves(tree), strict=True)}


def read_groups(source: str | Path | Mapping[str, list[dict[str, object]]], params: core.PyTree) -> WeightGroups:
    """Returns the groups of a module from JSON of the published form.

    The JSON has a list of places for each family: `{"units": [{"var_name": "lstm.weight_ih_l0", "axis": 0, "start": 0,
    "end": 64}, ...]}`.

    Args:
        source: file of JSON, or the read JSON.
        params: tree of whole leaves, as from `sf.from_module`. Only shapes count.

    Raises:
        ValueError: lists places of other lengths than the family's first place, places without a field, and as
            `WeightGroups`.

    Example:
        >>> import torch
        >>> rows = {"var_name": "w", "axis": 0, "start": 4, "end": 8}
        >>> columns = {"var_name": "head", "axis": 1, "start": 0, "end": 4}
        >>> params = {"w": torch.ones(8, 3), "head": torch.ones(2, 4)}
        >>> read_groups({"units": [rows, columns]}, params).families["units"].size
        4

    References:
        Wen et al., Learning Intrinsic Sparse Structures within LSTM, 2017, https://arxiv.org/abs/1709.05027
    """
    rows = json.loads(Path(source).read_text()) if isinstance(source, str | Path) else source
    fields, problems, families = ("var_name", "axis", "start", "end"), [], {}
    for name, places in rows.items():
        lacking = [f"{name!r}: a place must have {', '.join(fields)}, got {p}" for p in places if {*fields} - {*p}]
        if lacking or not places:
            problems += lacking or [f"{name!r} has no places"]
            continue
        sizes = [int(p["end"]) - int(p["start"]) for p in places]  # pyright: ignore[reportArgumentType]
        problems += [
            f"{name!r}: a place must have {sizes[0]} indices, as the first place, got {p}"
            for p, size in zip(places, sizes, strict=True)
            if size != sizes[0]
        ]
        families[name] = GroupFamily(
            sizes[0],
            tuple(LeafIndices(str(p["var_name"]), int(p["axis"]), int(p["start"])) for p in places),  # pyright: ignore[reportArgumentType]
        )
    core.raise_all(ValueError, "read_groups:", problems)
    return WeightGroups(families, leaf_shapes(params))
