"""Errors that the types of a captured step prove: collectives of the loss that are missing, or applied twice.

Each check is certain. An error means that values differ that must be the same on all ranks, or that a gradient is
counted on every rank. Unknown types pass.
"""

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from shardfn.collectives import AxisTypeError
from shardfn.core import raise_all

from ._types import Applications, Leaf, Types
from ._values import where_of

_HEAD = (
    "ranks would not compute the results of one device (if they are not meant to, jit(..., check_types=False) goes on):"
)


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
        f" their gradients are summed, and come out {num} times too large. If all ranks are to go on alike, {remedy};"
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
