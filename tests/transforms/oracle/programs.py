"""Random SPMD programs over a mesh, and known hard ones, in one description that JAX and shardfn both interpret.

A body is a function of an array library `s` and of blocks: `s` has the collectives of `jax.lax` and a few functions of
arrays, and blocks have Python's operators. A random program is a list of statements, each a function of earlier values.
Functions are smooth and flat far from zero, so that two orders of summation agree to 1e-10 and no maximum has a tie.
"""

import dataclasses
import json
import math
import pathlib
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

Axes = str | tuple[str, ...]
Spec = tuple[Any, ...]  # the entries of a PartitionSpec
MESHES: dict[int, dict[str, int]] = {2: {"x": 2}, 3: {"x": 3}, 4: {"x": 2, "y": 2}}


@dataclasses.dataclass(frozen=True)
class Program:
    """A function under `shard_map`: its arguments, the values that it closes over, and their global shapes."""

    name: str
    mesh: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    in_specs: tuple[Spec, ...]
    closed: tuple[tuple[int, ...], ...]
    out_specs: tuple[Spec, ...]
    body: Callable[..., tuple[Any, ...]]  # body(s, *blocks, *closed)
    text: str = ""

    def parameters(self) -> list[int] | None:
        """The arguments that a training step may take as parameters, where the others are rows along "x"; or None."""
        specs = self._specs()
        rows = [i for i, spec in enumerate(specs) if spec[:1] == ("x",) and not any(spec[1:])]
        others = [i for i in range(len(specs)) if i not in rows]
        whole = [i for i in others if not any(specs[i])]
        return others if rows and whole and not any("x" in str(specs[i]) for i in others) else None

    def loss(self, s: Any, *values: Any) -> Any:
        """A rank's loss, for a training step: a term of its own rows, and what the program computes."""
        own = next(x for x, spec in zip(values, self._specs(), strict=True) if spec[:1] == ("x",))
        weights = sum(s.mean(x) for x, spec in zip(values, self._specs(), strict=True) if not any(spec))
        return s.mean(s.tanh(own * weights)) + sum(s.mean(s.tanh(y)) for y in self.body(s, *values))

    def _specs(self) -> list[Spec]:
        return [*self.in_specs, *((),) * len(self.closed)]

    def draw(self, what: str, shapes: Iterable[tuple[int, ...]] | None = None) -> list[np.ndarray]:
        """Standard normal values named `what`, one for each shape; by default those of all arguments."""
        draw = np.random.default_rng(zlib.crc32(f"{self.name} {what}".encode()))
        return [draw.standard_normal(shape) for shape in shapes or (*self.shapes, *self.closed)]


@dataclasses.dataclass(frozen=True)
class Statement:
    """One operation on earlier values; `body` holds the statements of a rematerialised block."""

    op: str
    refs: tuple[int, ...]
    params: dict[str, Any]
    body: tuple["Statement", ...] = ()

    def __str__(self) -> str:
        inside = f" {{{'; '.join(map(str, self.body))}}}" if self.body else ""
        given = [*(f"v{i}" for i in self.refs), *(f"{name}={value}" for name, value in self.params.items())]
        return f"{self.op}({', '.join(given)}){inside}"


OPS: dict[str, Callable[..., Any]] = {
    # of one value
    "tanh": lambda s, a: s.tanh(a),
    "atan": lambda s, a: s.atan(a),
    "root": lambda s, a: s.sqrt(1 + a * a),
    "exp": lambda s, a: s.exp(s.tanh(a)),
    "ratio": lambda s, a: a / (1 + a * a),
    "scale": lambda s, a: -0.7 * a,
    "softmax": lambda s, a: s.softmax(a),
    "transpose": lambda s, a: s.transpose(a),
    "sum": lambda s, a, dim: s.sum(a, dim),
    "total": lambda s, a: s.sum(a),
    "mean": lambda s, a: s.mean(a),
    "row": lambda s, a: a[0],
    "new": lambda s, a: a[None],
    "detach": lambda s, a: s.detach(a),
    # of two
    "add": lambda s, a, b: a + b,
    "sub": lambda s, a, b: a - b,
    "mul": lambda s, a, b: a * b,
    "div": lambda s, a, b: a / (1 + b * b),
    "matmul": lambda s, a, b: 0.5 * (a @ b),
    "concat": lambda s, a, b: s.concat([a, b]),
    "choose": lambda s, a, b, axis, index: s.where(s.axis_index(axis) == index, a, b),
    # collectives
    "psum": lambda s, a, axis: s.psum(a, axis),
    "pmean": lambda s, a, axis: s.pmean(a, axis),
    "pmax": lambda s, a, axis: s.pmax(s.detach(a), axis),
    "all_gather": lambda s, a, axis, dim: s.all_gather(a, axis, dim),
    "all_gather_invariant": lambda s, a, axis, dim: s.all_gather_invariant(a, axis, dim),
    "psum_scatter": lambda s, a, axis, dim: s.psum_scatter(a, axis, dim),
    "all_to_all": lambda s, a, axis, dim, to: s.all_to_all(a, axis, dim, to),
    "ppermute": lambda s, a, axis, perm: s.ppermute(a, axis, perm),
    "pvary": lambda s, a, axis: s.pvary(a, axis),
    "weigh": lambda s, a, axis: a * (1 + s.axis_index(axis)),
    "shift": lambda s, a: a + s.literal([0.5]),
}
TO_INVARIANT = ("psum", "pmean", "pmax", "all_gather_invariant")
TO_VARYING = ("all_gather", "psum_scatter", "all_to_all", "ppermute", "pvary", "choose", "weigh")
OFTEN = ("add", "mul", "div", "sub", "matmul", "psum", "psum", "pmean", "remat", "remat")


def evaluate(s: Any, statements: Iterable[Statement], values: list[Any]) -> list[Any]:
    """`values` and those of the statements."""
    values = list(values)
    for statement in statements:
        operands = [values[i] for i in statement.refs]
        if statement.op == "remat":
            values.append(s.remat(_block(s, statement, list(values)))(*operands))
        else:
            values.append(OPS[statement.op](s, *operands, **statement.params))
    return values


def _block(s: Any, statement: Statement, around: list[Any]) -> Callable[..., Any]:
    """A block as a function of its operands; it closes over the other values."""

    def block(*operands: Any) -> Any:
        values = list(around)
        for i, x in zip(statement.refs, operands, strict=True):
            values[i] = x
        return evaluate(s, statement.body, values)[-1]

    return block


def shapes(mesh: dict[str, int]) -> SimpleNamespace:
    """The library that the generator draws with: the blocks of one rank in numpy, whose values mean nothing."""

    def size(axis: Axes) -> int:
        return math.prod(mesh[a] for a in ((axis,) if isinstance(axis, str) else axis))

    def same(a: Any, *_: Any) -> Any:
        return a

    def gathered(a: Any, axis: Axes, dim: int) -> Any:
        return np.concatenate([a] * size(axis), dim)

    def scattered(a: Any, axis: Axes, dim: int) -> Any:
        return np.split(a, size(axis), dim)[0]

    return SimpleNamespace(
        **{name: same for name in ("psum", "pmean", "pmax", "ppermute", "pvary", "detach")},
        **{name: getattr(np, name) for name in ("tanh", "sqrt", "exp", "mean", "transpose", "where")},
        sum=lambda a, *dim: np.take(a, 0, *dim) if a.ndim else a[dim],  # numpy has a dim 0 of scalars
        atan=np.arctan,
        concat=np.concatenate,
        literal=np.array,
        softmax=lambda a: a + np.zeros(a.shape[-1]),
        axis_index=lambda axis: np.zeros(()),
        all_gather=gathered,
        all_gather_invariant=gathered,
        psum_scatter=scattered,
        all_to_all=lambda a, axis, dim, to: gathered(scattered(a, axis, dim), axis, to),
        size=size,
    )


class Generator:
    """Draws a program: `values` have the shapes of what the statements compute, `varies` the axes along which."""

    def __init__(self, seed: int, world: int) -> None:
        self.draw, self.mesh = random.Random(8 * seed + world), MESHES[world]
        self.s, self.name = shapes(self.mesh), f"{world}:{seed}"
        self.values: list[np.ndarray] = []
        self.varies: list[set[str]] = []
        self.statements: list[Statement] = []
        self.used = set[int]()
        self.trains = self.draw.random() < 0.6  # whether a training step could take the arguments

    def program(self) -> Program:
        """The program of this seed."""
        draw = self.draw
        inputs = [self._input() for _ in range(draw.choice((1, 2, 2, 3)))]
        closed = [self._whole() for _ in range(draw.choice((0, 0, 1, 1, 2)))]
        length = draw.choice((4, 8, 12))
        while len(self.statements) < length:
            self._append()
        unused = [i for i in range(len(self.values)) if i not in self.used]
        out = [self._output(i) for i in unused[-draw.choice((1, 2, 3)) :]]
        first, statements = len(inputs) + len(closed), tuple(self.statements)

        def body(s: Any, *blocks: Any) -> tuple[Any, ...]:
            values = evaluate(s, statements, list(blocks))
            return tuple(values[i] for i, _ in out)

        lines = [f"v{i}: {shape} {spec}" for i, (shape, spec) in enumerate(inputs)]
        lines += [f"v{len(inputs) + i}: {shape} closed over" for i, shape in enumerate(closed)]
        lines += [f"v{first + i} = {statement}" for i, statement in enumerate(statements)]
        lines += [f"return v{i}: {spec}" for i, spec in out]
        shapes, in_specs = zip(*inputs, strict=True)
        specs = tuple(spec for _, spec in out)
        return Program(self.name, self.mesh, shapes, in_specs, tuple(closed), specs, body, "\n    ".join(lines))

    def _add(self, shape: tuple[int, ...], varies: Iterable[str]) -> None:
        self.values.append(np.zeros(shape))
        self.varies.append(set(varies))

    def _shape(self) -> tuple[int, ...]:
        n = max(self.mesh.values())
        return tuple(self.draw.choice((n, n, 2 * n)) for _ in range(self.draw.choice((1, 2, 2))))

    def _input(self) -> tuple[tuple[int, ...], Spec]:
        block, axes = self._shape(), [axis for axis in self.mesh if self.draw.random() < 0.65]
        if self.trains and "x" in axes:  # the rows of a batch
            axes = ["x"]
        spec = ("x", *[None] * (len(block) - 1)) if self.trains and "x" in axes else self._spec(len(block), axes)
        cuts = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
        self._add(block, axes)
        return tuple(d * math.prod(self.mesh[a] for a in cut) for d, cut in zip(block, cuts, strict=True)), spec

    def _whole(self) -> tuple[int, ...]:
        shape = self.draw.choice((self._shape(), ()))
        self._add(shape, ())
        return shape

    def _spec(self, ndim: int, axes: list[str]) -> Spec:
        """A spec of `ndim` entries in which each axis cuts some dim."""
        cuts: list[list[str]] = [[] for _ in range(ndim)]
        for axis in axes:
            self.draw.choice(cuts).append(axis)
        return tuple(None if not cut else cut[0] if len(cut) == 1 else tuple(cut) for cut in cuts)

    def _append(self) -> None:
        """Appends one more statement."""
        while True:
            op = self.draw.choice((*OPS, *OFTEN))
            statement = self._remat() if op == "remat" else self._statement(op)
            if statement is not None:
                self.statements.append(statement)
                return

    def _remat(self) -> Statement | None:
        """A block of statements, drawn as if they stood here."""
        first, statements, self.statements = len(self.values), self.statements, []
        for _ in range(self.draw.choice((1, 2, 3))):
            self._append()
        body, self.statements = tuple(self.statements), statements
        last, varies = self.values[-1], self.varies[-1]
        del self.values[first:], self.varies[first:]
        self.used = {i for i in self.used if i < first}
        self.values.append(last)
        self.varies.append(varies)
        used = sorted({i for s in _flat(body) for i in s.refs if i < first})
        return Statement("remat", tuple(i for i in used if self.draw.random() < 0.7), {}, body)

    def _statement(self, op: str) -> Statement | None:
        draw, function = self.draw, OPS[op].__code__
        names = function.co_varnames[1 : function.co_argcount]
        refs = tuple(self._ref() for name in names if name in "ab")
        params = {name: self._param(name) for name in names if name not in "ab"}
        axis: Axes = params.get("axis", ())
        if op == "ppermute":
            n = self.s.size(axis)
            ends = draw.sample(range(n), n)
            params["perm"] = tuple(enumerate(ends))[: draw.choice((n, n, n - 1))]
        axes = {axis} if isinstance(axis, str) else set(axis)
        varies = set().union(*(self.varies[i] for i in refs))
        refused = axes & varies if op == "pvary" else len(axes) > 1 and axes - varies
        if refused and draw.random() < 0.9:
            return None  # JAX refuses it
        try:
            value = np.asarray(OPS[op](self.s, *(self.values[i] for i in refs), **params))
        except (ValueError, IndexError):
            return None
        if value.size > 72 or 0 in value.shape:
            return None
        self.used.update(refs)
        self.values.append(value)
        self.varies.append(varies - axes if op in TO_INVARIANT else varies | axes if op in TO_VARYING else varies)
        return Statement(op, refs, params)

    def _ref(self) -> int:
        """A value, more often one that nothing uses so far."""
        unused = [i for i in range(len(self.values)) if i not in self.used]
        return self.draw.choice(unused if unused and self.draw.random() < 0.75 else range(len(self.values)))

    def _param(self, name: str) -> Any:
        if name == "axis":
            both = len(self.mesh) > 1 and self.draw.random() < 0.2
            return tuple(self.mesh) if both else self.draw.choice(list(self.mesh))
        return self.draw.randrange(2)

    def _output(self, i: int) -> tuple[int, Spec]:
        """A value and a spec: one that JAX accepts, in nine of ten cases."""
        axes = [a for a in self.mesh if self.draw.random() < (0.95 if a in self.varies[i] else 0.1)]
        if self.values[i].ndim == 0 and axes:
            self.statements.append(Statement("new", (i,), {}))
            self._add((1,), self.varies[i])
            i = len(self.values) - 1
        return i, self._spec(self.values[i].ndim, axes)


def _flat(statements: Iterable[Statement]) -> Iterator[Statement]:
    for statement in statements:
        yield statement
        yield from _flat(statement.body)


Results = dict[str, dict[str, "np.ndarray | str"]]  # name -> quantity -> its numbers, or why it is refused


def save(results: Results, path: pathlib.Path) -> None:
    """Writes results to one file."""
    index = {name: {q: v if isinstance(v, str) else len(v) for q, v in r.items()} for name, r in results.items()}
    numbers = [v for r in results.values() for v in r.values() if not isinstance(v, str)]
    np.savez_compressed(path, index=np.array(json.dumps(index)), numbers=np.concatenate(numbers))


def load(path: pathlib.Path) -> Results:
    """Reads a file that `save` wrote."""
    with np.load(path) as file:
        index, numbers = json.loads(str(file["index"])), file["numbers"]
    at, results = 0, {}
    for name, lengths in index.items():
        results[name] = {}
        for quantity, v in lengths.items():
            results[name][quantity] = v if isinstance(v, str) else numbers[at : at + v]
            at += 0 if isinstance(v, str) else v
    return results
