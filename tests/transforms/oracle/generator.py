"""Random programs: each a function of its seed and of the number of ranks."""

import math
import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from .programs import MESHES, OPS, Axes, Program, Spec, Statement, evaluate

TO_INVARIANT = ("psum", "pmean", "pmax", "all_gather_invariant")
TO_VARYING = ("all_gather", "psum_scatter", "all_to_all", "ppermute", "pvary", "choose", "weigh")
NUMBERS = ("times", "minus", "over", "filled")
OFTEN = ("add", "mul", "div", "sub", "matmul", "psum", "psum", "pmean", "remat", "remat")


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
        number=lambda axis: np.zeros((), np.int64),
        literal_number=np.array,
        all_gather=gathered,
        all_gather_invariant=gathered,
        psum_scatter=scattered,
        all_to_all=lambda a, axis, dim, to: gathered(scattered(a, axis, dim), axis, to),
        size=size,
    )


class Generator:
    """Draws a program: `values` have the shapes of its statements' results, `varies` the axes along which they vary."""

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
        self.varies.append(
            varies - axes if op in TO_INVARIANT else varies | axes if op in (*TO_VARYING, *NUMBERS) else varies
        )
        return Statement(op, refs, params)

    def _ref(self) -> int:
        """A value, more often one that nothing uses so far."""
        unused = [i for i in range(len(self.values)) if i not in self.used]
        return self.draw.choice(unused if unused and self.draw.random() < 0.75 else range(len(self.values)))

    def _param(self, name: str) -> Any:
        if name == "axis":
            both = len(self.mesh) > 1 and self.draw.random() < 0.2
            return tuple(self.mesh) if both else self.draw.choice(list(self.mesh))
        return self._number(3) if name == "number" else self.draw.randrange(2)

    def _number(self, depth: int) -> str:
        """An expression of the index `i`, of numbers that are exact in binary, with `i` on both sides of operators."""
        draw = self.draw
        if depth == 0:
            return "i"
        inner, c = self._integer(depth - 1), draw.choice(("0.5", "-1.5", "2.25", "3", "True"))
        one = f"({c} {draw.choice('+-*/')} (1 + i))"
        return draw.choice((
            f"({c} {draw.choice('+-*')} {inner})", f"({inner} {draw.choice('+-*')} {c})", f"({inner} / 4)", one,
            f"({c} // (i + 1))", f"({c} % (i + 1))", f"(0.5 ** i * {inner})", f"({c} * {self._truth(depth - 1)})",
            f"({self._truth(depth - 1)} * {inner} - {c})", f"({one} + {self._number(depth - 1)})", inner,
        ))  # fmt: skip

    def _integer(self, depth: int) -> str:
        draw = self.draw
        if depth == 0:
            return "i"
        inner, c = self._integer(depth - 1), draw.choice(("1", "2", "5", "-3", "True"))
        return draw.choice((
            f"({c} {draw.choice('+-*')} {inner})", f"({inner} {draw.choice('+-*')} {c})", f"({c} // (i + 1))",
            f"({c} % (i + 1))", f"({inner} // 2)", f"({inner} % 3)", "2 ** i", "(3 << i)", f"(6 ^ {inner})",
            f"({inner} & 5)", f"(1 | {inner})", f"abs({inner})", f"(-{inner})", f"({self._truth(0)} * {inner})",
        ))  # fmt: skip

    def _truth(self, depth: int) -> str:
        draw, inner, c = self.draw, self._integer(depth), self.draw.choice(("0.5", "1", "0"))
        op = draw.choice(("<", "<=", ">", ">=", "==", "!="))
        return draw.choice((f"({c} {op} {inner})", f"({inner} {op} {c})", f"~({inner} {op} {c})"))

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
