"""`Op`: the facts about one op. The op table consists of these.

Two sources make an `Op`. Its schema gives views, writes and draws, for any op. The other fields are a row of the table
(`_ops.py`). An op without a row has their defaults.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from shardfn._torch import OpOverload
from shardfn.core import MemoryKind

from ._forms import Rule

Channel = Literal["", "gather", "reduce", "loss", "between"]
_Fact = TypeVar("_Fact")


class Crossing(NamedTuple):
    """The memories that a move connects, and the argument that has its bytes; None: its own value has them."""

    src: MemoryKind
    dst: MemoryKind
    carried: int | None


@dataclasses.dataclass(frozen=True)
class Op:
    """One op, or a family of overloads.

    Attributes:
        flops: flops of its operands and `out_val`; None: torch's formula, or no arithmetic worth counting.
        scratch: bytes that it holds on CPU while it runs, beyond operands and results; None: operands that it casts.
        lookup: it reads only the elements that it returns, not all of its first operand.
        constant: it makes a value from no tensor.
        casts: it makes the same elements again, in another dtype or layout.
        copies: it only copies, casts, packs or encodes, which may be done where a value is sent, or arrives.
        carries: elements are those of its operands.
        scales: a gradient stays that of the same leaves: cut, cast, scaled, or summed in code.
        fuses: a compiler makes one kernel of it and its neighbours; pointwise ops do in any case.
        weight: the number of ops that it counts as, when a kernel must be worth its compilation.
        identity: it is its operand, and costs nothing.
        channel: the channel in whose order a transfer between ranks takes its turn, or "" for ops that start no
            transfer.
        transfer: function from such a start and the graph's metadata to the fields of a `Transfer`.
        waits: it ends a transfer or a move.
        move: the memories that it connects, if it starts a move between memories.
        fetches: it only brings a value nearer to its use.
        makes_in: the memory in which it makes its value, if that is fixed.
        calls: a faster binding of the same kernel by overload.
        in_place: of a kernel, the op that writes the result over its first operand, of the same shape, if any.
        strides: by overload, from torch's abstract result and the operands to a result in the kernel's strides.
        abstract: by overload, from operands without data to the result, where torch's differs in more than strides.
        types: how it changes the types of values along axes (`_types.py`), or "" for ops that compute on each rank
            alone.
        rows: how it takes values that may lack their last rows (`_exact_rows.py`); "": whole values only.
        sharding: function from the forms of its operands along an axis to strategies (`_forms.py`); None: whole values
            only.
        views: the argument that its result is a view of, by its schema.
        writes: position and name of the arguments that it overwrites, by its schema.
        draws: it draws from torch's generator, by its tags.
        pointwise: by its tags.
        effects: it returns nothing and writes nothing, so it must have another effect.
    """

    flops: Callable[..., int] | None = None
    scratch: Callable[[Node], int] | None = None
    lookup: bool = False
    constant: bool = False
    casts: bool = False
    copies: bool = False
    carries: bool = False
    scales: bool = False
    fuses: bool = False
    weight: int = 1
    identity: bool = False
    channel: Channel = ""
    transfer: Callable[[Node, Mapping[str, Any]], Any] | None = None
    waits: bool = False
    move: Crossing | None = None
    fetches: bool = False
    makes_in: MemoryKind | None = None
    calls: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    in_place: Any = None
    strides: Mapping[str, Callable[[Tensor, Sequence[Any]], Tensor]] = dataclasses.field(default_factory=dict)
    abstract: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    types: str = ""
    rows: str = ""
    sharding: Rule | None = None
    views: int | None = None
    writes: tuple[tuple[int, str], ...] = ()
    draws: bool = False
    pointwise: bool = False
    effects: bool = False


def with_schema(row: Op, target: Any) -> Op:
    """Returns a row of the table, completed by the schema and the tags of one overload."""
    if not isinstance(target, OpOverload):
        return row
    schema, tags = target._schema, target.tags
    writes = written_arguments(target)
    return dataclasses.replace(
        row,
        # Overloads with `out=` make nothing of their own.
        constant=row.constant and not writes,
        casts=row.casts and not writes,
        copies=row.copies and not writes,
        views=None if writes else _viewed_argument(schema) if row.views is None else row.views,
        writes=writes,
        draws=torch.Tag.nondeterministic_seeded in tags,
        pointwise=torch.Tag.pointwise in tags,
        effects=not schema.returns and not schema.is_mutable,
    )


def by_identity(f: Callable[[Any], _Fact]) -> Callable[[Any], _Fact]:
    """Caches `f` of each op, as `functools.cache` does, but without a hash, which is slow for torch's ops.

    Only for arguments that live as long as the program, since the cache keeps them alive.

    Example:
        >>> asked = []
        >>> once = by_identity(asked.append)
        >>> once(torch.add), once(torch.add), len(asked)
        (None, None, 1)
    """
    known: dict[int, tuple[Any, _Fact]] = {}

    def find_fact(target: Any) -> _Fact:
        found = known.get(id(target))
        if found is None:
            found = known[id(target)] = (target, f(target))  # the op itself, too, or its number might be given again
        return found[1]

    return functools.wraps(f)(find_fact)


@by_identity
def written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an op overwrites, by its schema."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def _viewed_argument(schema: Any) -> int | None:
    """Returns the argument that the op's only result is a view of."""
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor" or schema.returns[0].alias_info is None:
        return None
    seen = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    return seen[0] if seen else None
