"""Types of the values of a captured step: how a value compares with the same value on other ranks, axis by axis.

    invariant  the same on all ranks, and counts once
    declared   the same on all ranks, and counts as varying: it comes out of `pvary`, or is gathered
    varying    ranks hold different values; as the gradient of an invariant value it is unreduced: each has a part
    unknown    none of this is certain

Types start at the inputs of a step and go through the step op by op. A type describes the *values*. "declared" adds how
cotangents count, so that detached values need no separate rule. Uncertain values are unknown, and no error follows from
unknown values. Numbers that a rank puts in by the rank's index cannot be seen, and look invariant.

    inputs        a leaf varies along the axes that cut it, a batch along its axes; the rest is invariant
    the loss      sees every leaf as declared along the batch's axes, for the step sums the gradient there
    local ops     varying if an operand is; unknown if one is; lists whose members differ are unknown, as are
                  comparisons and integers made of varying floats, since ranks may agree on them
    messages      values from another stage of a pipeline are unknown, along all axes
    collectives   by the table in `shardfn/collectives/_primitive.py`

A capture adds facts that ops do not show, in `gm.meta` ("batch_axes") and in the metadata of nodes: "enters" of inputs
and "whole_of" of gathered leaves (a `Leaf`), "collective" of the ops of a primitive (an `Applied`).

The types prove errors: collectives of the loss that are missing, or applied twice.

Each check is certain. An error means that values differ that must be the same on all ranks, or that a gradient is
counted on every rank. Unknown types pass.
"""

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from shardfn.collectives import Applied, AxisTypeError
from shardfn.core import raise_all

from ._op import Op
from ._ops import op_of
from ._values import num_bytes, phases_of, storage_of, tensors_of, where_of

# Bits of an axis. Types are joined by `or`. The highest bit counts.
DECLARED, VARIES, UNKNOWN = 1, 2, 4
_BITS = 3


class Leaf(NamedTuple):
    """Parameter, or another leaf of a step's arguments, as a rank holds the leaf.

    Attributes:
        path: name.
        axes: axes that cut the leaf.
        trained: whether the leaf has a gradient.
    """

    path: str
    axes: tuple[str, ...] = ()
    trained: bool = False


class Applications(NamedTuple):
    """Application of a collective of the program.

    Attributes:
        node: collective's op that takes the operand.
        applied: collective.
        taken: type of the operand.
    """

    node: Node
    applied: Applied
    taken: int


class Types:
    """Type of every value of a captured step.

    Attributes:
        axes: mesh axes of more than one rank.
        batch: mesh axes that cut the batch.
        of: type of each node, as a number, read by `is_invariant` and similar methods.
        applications: collectives of the program, in order.
        foreign: axes of torch's collectives. Their author answers for the transposes.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.axes = tuple(a for a, n in gm.meta.get("mesh_shape", {}).items() if n > 1)
        self.batch = tuple(a for a in gm.meta.get("batch_axes", ()) if a in self.axes)
        self.phases = phases_of(gm)
        self.of: dict[Node, int] = {}
        self.applications: list[Applications] = []
        self.foreign: set[str] = set()
        self._at = {a: _BITS * i for i, a in enumerate(self.axes)}
        self._trained = 1 << _BITS * len(self.axes)
        self._all = {bit: self._axes_mask(bit, self.axes) for bit in (DECLARED, VARIES, UNKNOWN)}
        self._entered = self._axes_mask(DECLARED, self.batch)
        self._own = self._axes_mask(DECLARED, [a for a in self.axes if a not in self.batch])
        self._columns: dict[Node, list[int]] = {}
        # The type last written to each memory.
        self._written: dict[int, int] = {}
        for node in gm.graph.nodes:
            if node.op != "output":
                type = self._type_of(node)
                # Other ranks may have elements, so values made of an empty value, such as the empty sum, may differ
                # from other ranks'.
                self.of[node] = self._add_unsure(type) if _is_empty(node) else type

    def is_invariant(self, type: int, axis: str) -> bool:
        """Returns whether a value is certainly the same on all ranks along an axis, and counts once."""
        return not type >> self._at[axis] & 7

    def is_varying(self, type: int, axis: str) -> bool:
        """Returns whether ranks along an axis certainly hold different values."""
        return type >> self._at[axis] & 6 == VARIES

    def is_trained(self, type: int) -> bool:
        """Returns whether a value depends on a leaf that has a gradient."""
        return bool(type & self._trained)

    def words(self, node: Node) -> dict[str, str]:
        """Returns the type of a node's value along each axis."""
        return {a: _WORDS[self.of[node] >> self._at[a] & 7] for a in self.axes}

    def seen(self, node: Node, by: Node) -> int:
        """Returns the type of a value where an op takes it."""
        type = self.of[node]
        if self._written:
            for tensor in tensors_of(node):
                type = self._written.get(storage_of(tensor), type)
        phase = self.phases[by]
        if phase == "update":
            return type
        if node.op == "placeholder":
            return type | self._entered
        # A declared forward value does not determine how a cotangent multiplied with the value is summed.
        return type & ~self._own if phase == "backward" and self.phases[node] == "forward" else type

    # A single node.

    def _type_of(self, node: Node) -> int:
        if node.op == "placeholder":
            return self._leaf_type(node.meta["enters"]) if "enters" in node.meta else 0
        if node.op != "call_function":
            return 0
        for leaf in node.meta.get("whole_of", ()):
            return self._leaf_type(leaf) | self._entered
        applied, op = node.meta.get("collective"), op_of(node)
        type = self._local_type(node, op) if applied is None else self._part_type(node, applied)
        if op.types in _STEP_TYPES:
            type = self._transfer_type(node, op, type)
        elif applied is None and op.types in ("collective", "foreign"):
            type = self._unmarked_type(node, op, type)
        if op.writes:
            self._write_operands(node, op, type)
        return type

    def _local_type(self, node: Node, op: Op) -> int:
        """Returns the type of the result of an op that only uses this rank's values."""
        if op.constant or op.types == "filled" or (op.types == "product" and 0 in node.args):
            return 0
        if op.draws and _argument_of(node, "dropout_p") != 0:  # attention has the tag even without dropout
            return self._all[UNKNOWN]
        if node.target is operator.getitem and node.args[0] in self._columns:
            return self._columns[node.args[0]][node.args[1]]  # pyright: ignore[reportArgumentType, reportCallIssue]
        # The overwritten operand of a copy does not count.
        type = self._join_operands(node, node.args[1:] if op.types == "copied" else node.args)
        return self._add_unsure(type) if type & self._all[VARIES] and _is_deciding(node) else type

    def _join_operands(self, node: Node, args: Sequence[Any]) -> int:
        """Returns the joined type of the operands.

        Unequal types packed into a list may be unpacked again, and are unknown.
        """
        if len(node.all_input_nodes) == 1:
            return self.seen(node.all_input_nodes[0], node)
        type, lists = 0, list[list[int]]()
        for value in (*args, *node.kwargs.values()):
            if isinstance(value, Node):
                type |= self.seen(value, node)
            elif isinstance(value, (list, tuple)) and any(isinstance(v, Node) for v in value):
                lists.append([self.seen(v, node) if isinstance(v, Node) else 0 for v in value])
        if not lists:
            return type
        num = len(lists[0])
        self._columns[node] = [
            type | _join_types(row) for row in zip(*(x for x in lists if len(x) == num), strict=True)
        ]
        return type | _join_types(self._pack_types(x) for x in lists)

    def _pack_types(self, types: Sequence[int]) -> int:
        either, both = _join_types(types), functools.reduce(operator.and_, types)
        return either | (either & ~both & self._all[VARIES]) << 1

    def _add_unsure(self, type: int) -> int:
        return type | (type & self._all[VARIES]) << 1

    def _leaf_type(self, leaf: Leaf) -> int:
        return self._axes_mask(VARIES, leaf.axes) | (self._trained if leaf.trained else 0)

    def _axes_mask(self, bit: int, axes: Iterable[str]) -> int:
        return _join_types(bit << self._at[a] for a in axes if a in self._at)

    def _set_bits(self, type: int, axes: Iterable[str], bit: int) -> int:
        axes = tuple(axes)
        return type & ~self._axes_mask(7, axes) | self._axes_mask(bit, axes)

    # Memory that is written.

    def _write_operands(self, node: Node, op: Op, type: int) -> None:
        columns = self._columns.get(node)
        if op.written_from:
            given = (_argument_of(node, name) for name in op.written_from)
            type = _join_types(self.seen(x, node) for x in given if isinstance(x, Node))
        for position, name in op.writes:
            value: Any = node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
            several = isinstance(value, (list, tuple))
            for i, written in enumerate(value if several else [value]):
                if isinstance(written, Node):
                    self._overwrite_value(written, columns[i] if several and columns else type)

    def _overwrite_value(self, node: Node, type: int) -> None:
        for tensor in tensors_of(node):
            key, whole = storage_of(tensor), num_bytes(tensor) == tensor.untyped_storage().nbytes()
            before = self._written.get(key, self.of[node])
            self._written[key] = type if whole else self._pack_types([type, before])

    # Transfers and collectives.

    def _transfer_type(self, node: Node, op: Op, type: int) -> int:
        """Returns the type of a `shardfn` op's result.

        Whole gathers and sums are the same along the axes of the op.
        """
        axes = [a for a in str(node.args[-1]).split(",") if a in self._at]
        if op.types == "receive":
            # The type is in the program of another stage.
            return self._all[UNKNOWN] | self._trained
        if op.types == "gather":
            # The last operand is the leaf's block. A destination, the first operand, does not count.
            own = node.all_input_nodes[-1]
            entered = self._entered if self.phases[node] != "update" else 0
            return self._set_bits(self.seen(own, node), axes, 0) | entered & self._axes_mask(DECLARED, axes)
        if op.types == "declare":
            return type | self._axes_mask(DECLARED, axes)
        return self._set_bits(type, axes, {"sum": 0, "scatter": VARIES, "exchange": UNKNOWN}[op.types])

    def _unmarked_type(self, node: Node, op: Op, type: int) -> int:
        """Returns the type of a collective that applies no primitive.

        Torch's collective, or part of a compressed sum.
        """
        if op.types == "foreign":
            self.foreign.update(self.axes)
            return self._set_bits(type, self.axes, UNKNOWN)
        axes = str(node.args[-1]).split(",")
        self.foreign.update(axes)
        return self._set_bits(type, axes, DECLARED if node.target in _SAME else UNKNOWN)

    def _part_type(self, node: Node, applied: Applied) -> int:
        """Returns the type of an op of a collective. From the first op on, all ops have the type of the result."""
        inside = [n for n in node.all_input_nodes if n.meta.get("collective") == applied]
        outside = [n for n in node.all_input_nodes if n not in inside]
        type = _join_types(self.of[n] for n in inside)
        if outside or not inside:
            taken = _join_types(self.seen(n, node) for n in outside)
            self.applications.append(Applications(node, applied, taken))
            type |= self._apply_primitive(node, applied, taken)
        return type

    def _apply_primitive(self, node: Node, applied: Applied, taken: int) -> int:
        """Returns the type of a primitive's result, by the table of primitives."""
        name, axes = applied.name, applied.axes
        if name == "pvary":
            return taken | self._axes_mask(DECLARED, axes)
        if name in ("psum", "pmax", "all_gather_invariant"):
            return self._set_bits(taken, axes, 0)
        if name in ("all_gather", "quantized_all_gather"):
            return self._set_bits(taken, axes, DECLARED)
        # Blocks of a sum or of a whole: of constants, counts and masks ranks may hold equal blocks.
        floats = all(t.is_floating_point() for t in tensors_of(node))
        blocks = name in ("psum_scatter", "take_own_block") and taken and floats
        return self._set_bits(taken, axes, VARIES if blocks else UNKNOWN)


def _is_deciding(node: Node) -> bool:
    """Returns whether an op makes booleans or integers of floats: a comparison, an index, a rounding."""
    if any(t.is_floating_point() for t in tensors_of(node)):
        return False
    return any(t.is_floating_point() for n in node.all_input_nodes for t in tensors_of(n))


def _argument_of(node: Node, name: str) -> Any:
    """Returns the value of a named argument, or the default, or None where the op has no such argument."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _is_empty(node: Node) -> bool:
    """Returns whether a value has no elements on this rank."""
    found = tensors_of(node)
    return bool(found) and not any(x.numel() for x in found)


def _join_types(types: Iterable[int]) -> int:
    return functools.reduce(operator.or_, types, 0)


_WORDS = ("invariant", "declared", "varying", "varying", "unknown", "unknown", "unknown", "unknown")
_STEP_TYPES = ("gather", "sum", "scatter", "exchange", "declare", "receive")
_WIRE = torch.ops.shardfn
_SAME = (_WIRE.loss_psum_start.default, _WIRE.loss_pmax_start.default, _WIRE.loss_all_gather_start.default)


_HEAD = "ranks would not compute the results of one device (if this is intended, pass check_types=False to jit):"


def value_types(gm: GraphModule) -> dict[Node, dict[str, str]]:
    """Returns for each value of a captured step and each axis: "invariant", "declared", "varying" or "unknown".

    Args:
        gm: captured step.

    Example:
        >>> from torch.fx import symbolic_trace
        >>> gm = symbolic_trace(lambda x: x + 1)
        >>> gm.meta["mesh_shape"] = {"tp": 2}
        >>> [types["tp"] for types in value_types(gm).values()]
        ['invariant', 'invariant']
    """
    types = Types(gm)
    return {node: types.words(node) for node in types.of}


def check_types(gm: GraphModule) -> None:
    """Refuses a captured step in which a collective of the loss is certainly missing, or certainly applied twice.

    Args:
        gm: captured step, before any pass. `gm.meta["results"]` lists path and axes of outputs.

    Raises:
        AxisTypeError: a collective is wrong. The message names the op, the line, the axis and the remedy.

    Example:
        >>> from torch.fx import symbolic_trace
        >>> check_types(symbolic_trace(lambda x: x + 1))
    """
    types = Types(gm)
    if not types.axes:
        return
    sizes = gm.meta["mesh_shape"]
    # Causes come before consequences.
    for found in (
        _check_collectives(types, sizes),
        _check_results(types, sizes),
        _check_gradients(types),
        _check_outputs(gm, types),
    ):
        raise_all(AxisTypeError, _HEAD, list(dict.fromkeys(found)))


def _check_collectives(types: Types, sizes: dict[str, int]) -> Iterator[str]:
    """Yields errors about collectives of values that need no collective."""
    # A transpose has the number of the primal collective: a collective without a number has no gradient to be wrong.
    differentiated = {a.applied.transposes for a in types.applications}
    for found in types.applications:
        applied = found.applied
        for axis in applied.axes:
            if axis in types.foreign or axis not in types.axes:
                continue
            if applied.transposes:
                yield from _never_summed(types, found, axis, sizes[axis])
            # A needless collective without a gradient only changes the collective's value, perhaps on purpose.
            elif applied.number in differentiated:
                yield from _check_needless(types, found, axis, sizes[axis])


def _check_needless(types: Types, found: Applications, axis: str, num: int) -> Iterator[str]:
    name, taken = found.applied.name, found.taken
    where = where_of(found.node) or "a line unknown"
    if name == "psum" and types.is_invariant(taken, axis) and types.is_trained(taken):
        yield (
            f"{where}: psum over {axis!r} of a value that is the same on its {num} ranks already, so that it, or its"
            f" gradient, is {num} times off. Leave out this psum (or pmean). If ranks make it differ by their index,"
            f" pass its inputs through sf.pvary(x, {axis!r})."
        )
    if name == "pvary" and axis not in types.batch and types.is_varying(taken, axis):
        yield (
            f"{where}: pvary over {axis!r} of a value that varies along it already, so that each rank's gradient is the"
            f" sum of all ranks'. Leave out this pvary, or sum the value first, with sf.psum(x, {axis!r})."
        )


def _never_summed(types: Types, found: Applications, axis: str, num: int) -> Iterator[str]:
    """Yields errors about `pvary`s and `all_gather`s whose transposes sum equal values of all ranks."""
    name = {"psum": "pvary", "psum_scatter": "all_gather"}.get(found.applied.name)
    again = found.node.meta.get("again") or types.phases[found.node] != "backward"
    if name is None or again or axis in types.batch or not found.taken or not types.is_invariant(found.taken, axis):
        return
    remedy = "leave out this pvary" if name == "pvary" else "use sf.all_gather_invariant"
    yield (
        f"{where_of(found.node) or 'a line unknown'}: {name} over {axis!r}, whose uses are the same on its {num} ranks:"
        f" their gradients are summed, and come out {num} times too large. If all ranks must continue alike, {remedy};"
        f" if each has a part of the rest, sum the parts with sf.psum(x, {axis!r})."
    )


def _check_results(types: Types, sizes: dict[str, int]) -> Iterator[str]:
    """Yields errors about loss and aux. Both must be the same along axes that do not cut the batch."""
    for node, type in types.of.items():
        for what in node.meta.get("result", ()):
            for axis in types.axes:
                if axis not in types.batch and types.is_varying(type, axis):
                    yield (
                        f"{what} varies along {axis!r}: each of its {sizes[axis]} ranks has a value of its own. It is"
                        f" made by {_op_text(node)}; {_origin_of(types, node, axis)}. Sum the ranks' parts where they"
                        f" are complete, with sf.psum(x, {axis!r}), before anything that is not linear."
                    )


def _check_gradients(types: Types) -> Iterator[str]:
    """Yields errors about gradients unreduced along axes where the step does not sum."""
    for node, type in types.of.items():
        for leaf in node.meta.get("gradient_to", ()):
            for axis in types.axes:
                if axis not in (*types.batch, *leaf.axes) and types.is_varying(type, axis):
                    yield _check_unreduced(types, leaf, axis)


def _check_unreduced(types: Types, leaf: Leaf, axis: str) -> str:
    met = _first_mixed(types, leaf.path, axis)
    at = "" if met is None else f" It meets a value that varies along {axis!r} in {_op_text(met)}."
    return (
        f"the gradient of {leaf.path}, which is whole along {axis!r}, is unreduced there: each rank has its own part,"
        f" and nothing sums them.{at} Pass what is made of {leaf.path} through sf.pvary(x, {axis!r}) before that: the"
        " gradient of a pvary is the sum."
    )


def _check_outputs(gm: GraphModule, types: Types) -> Iterator[str]:
    """Yields errors about the new state and the metrics, where the step would be wrong."""
    output = next(iter(reversed(gm.graph.nodes)))
    for node, (path, axes) in zip(output.all_input_nodes and output.args[0], gm.meta.get("results", ()), strict=False):
        for axis in types.axes:
            if isinstance(node, Node) and axis not in axes and types.is_varying(types.seen(node, output), axis):
                yield f"the {path} varies along {axis!r}; {_origin_of(types, node, axis)}."


def _op_text(node: Node) -> str:
    applied = node.meta.get("collective")
    name = applied.name if applied is not None else str(node.target).removesuffix(".default")
    return f"{name} ({where_of(node) or 'line unknown'})"


def _origin_of(types: Types, node: Node, axis: str) -> str:
    """Returns the origin of a value's variation along an axis, in words."""
    while True:
        before = next((n for n in node.all_input_nodes if types.is_varying(types.of[n], axis)), None)
        leaf = None if before is None else _leaf_of(before)
        if before is None:
            return f"it begins to vary at {_op_text(node)}"
        if leaf is not None:
            return f"it begins to vary at {_op_text(node)}, by {leaf.path}, which {axis!r} cuts"
        node = before


def _leaf_of(node: Node) -> Leaf | None:
    if node.op == "placeholder":
        return node.meta.get("enters")
    return next(iter(node.meta.get("whole_of", ())), None)


def _first_mixed(types: Types, path: str, axis: str) -> Node | None:
    """Returns the first op of the forward that combines a still invariant value made of a leaf with a varying value."""
    reached: set[Node] = set()
    for node in types.of:
        leaf = _leaf_of(node)
        if leaf is not None and leaf.path == path:
            reached.add(node)
        elif types.phases[node] == "forward" and reached.intersection(node.all_input_nodes):
            if types.is_varying(types.of[node], axis):
                return node
            reached.add(node)
    return None
