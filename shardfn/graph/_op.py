"""`Op`: the facts about an op. The op table consists of such facts.

Two sources make an `Op`. The op's schema gives views, writes and draws, for any op. The other fields are a row of the
table (`_ops.py`). An op without a row has the defaults.
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
    """Memories that a move connects, and the argument that has the bytes. None: the move's value has the bytes."""

    src: MemoryKind
    dst: MemoryKind
    carried: int | None


@dataclasses.dataclass(frozen=True)
class Op:
    """Op, or a family of overloads.

    Attributes:
        flops: function of the operands and `out_val`. None: torch's formula, or no arithmetic worth counting.
        scratch: bytes that the op holds on CPU while running, beyond operands and results. None: operands that the op
            casts.
        lookup: flag. The op only reads the elements that are returned, not all of the first operand.
        constant: flag. The op makes a value from no tensor.
        casts: flag. The op makes the same elements again, in another dtype or layout.
        copies: flag. The op only copies, casts, packs or encodes, so the op may run where a value is sent, or arrives.
        carries: flag. Elements of results are elements of operands.
        scales: flag. A gradient stays a gradient of the same leaves: cut, cast, scaled, or summed in code.
        fuses: flag. A compiler makes a single kernel of the op and neighbours. Pointwise ops fuse in any case.
        weight: number of ops that the op counts as, when a kernel must be worth the compilation.
        identity: flag. The result is the operand, and costs nothing.
        channel: channel that orders a transfer between ranks, or "" for ops that start no transfer.
        transfer: function from such a start and the graph's metadata to the fields of a `Transfer`.
        waits: flag. The op ends a transfer or a move.
        move: memories that the op connects, if the op starts a move between memories.
        fetches: flag. The op only brings a value nearer to the value's use.
        makes_in: memory in which the op makes a value, if fixed.
        calls: faster binding of the same kernel by overload.
        in_place: op, for a kernel, that writes the result over the first operand, of the same shape, if any.
        strides: function by overload, from torch's abstract result and the operands to a result in the kernel's
            strides.
        abstract: function by overload, from operands without data to the result, where torch's differs in more than
            strides.
        types: change of the types of values along axes (`_type_check.py`), or "" for ops that compute on each rank
            separately.
        rows: use of values that may lack the last rows (`_exact_rows.py`), or "" for whole values only.
        sharding: function from the forms of operands along an axis to strategies (`_forms.py`). None: whole values
            only.
        views: argument that the result is a view of, by the op's schema.
        writes: position and name of the arguments that the op overwrites, by the op's schema.
        written_from: names of the operands that written values depend on. (): all operands.
        draws: flag. The op draws from torch's generator, by the op's tags.
        pointwise: flag, by the op's tags.
        effects: flag. The op returns nothing and writes nothing, so the op must have another effect.
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
    written_from: tuple[str, ...] = ()
    draws: bool = False
    pointwise: bool = False
    effects: bool = False


def with_schema(row: Op, target: Any) -> Op:
    """Returns a row of the table, completed by the schema and the tags of an overload."""
    if not isinstance(target, OpOverload):
        return row
    schema, tags = target._schema, target.tags
    writes = written_arguments(target)
    return dataclasses.replace(
        row,
        # Overloads with `out=` make no new value.
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
    """Caches `f` of each op, as `functools.cache` does, but without a hash: hashing torch's ops is slow.

    Only for arguments that live as long as the program, since the cache keeps arguments alive.

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
            found = known[id(target)] = (target, f(target))  # keeps the op, or the number might be given again
        return found[1]

    return functools.wraps(f)(find_fact)


@by_identity
def written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Returns position and name of the arguments that an op overwrites, by the op's schema."""
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
