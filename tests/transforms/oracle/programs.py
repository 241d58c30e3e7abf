"""SPMD programs over a mesh, in one description that JAX and shardfn both interpret.

A body is a function of an array library `s` and of blocks: `s` has the collectives of `jax.lax` and a few functions of
arrays, and blocks have Python's operators. A random program is a list of statements, each a function of earlier values.
Functions are smooth and flat far from zero, so that two orders of summation agree to 1e-10 and no maximum has a tie.
"""

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Callable, Iterable
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
        """The arguments that a training step may take as parameters, where the others are rows along "x"; or None.

        None of a program with a `pvary`: in a step parameters vary along the axes of the batch from the beginning.
        """
        if "pvary" in self.text:
            return None
        specs = self._specs()
        rows = [i for i, spec in enumerate(specs) if spec[:1] == ("x",) and not any(spec[1:])]
        others = [i for i in range(len(specs)) if i not in rows]
        whole = [i for i in others if not any(specs[i])]
        return others if rows and whole and not any("x" in str(specs[i]) for i in others) else None

    def loss(self, s: Any, *values: Any) -> Any:
        """A rank's loss, for a training step: a term of its own rows, and the program's results."""
        own = next(x for x, spec in zip(values, self._specs(), strict=True) if spec[:1] == ("x",))
        weights = sum(s.mean(x) for x, spec in zip(values, self._specs(), strict=True) if not any(spec))
        return s.mean(s.tanh(own * weights)) + sum(s.mean(s.tanh(y)) for y in self.body(s, *values))

    def _specs(self) -> list[Spec]:
        return [*self.in_specs, *((),) * len(self.closed)]

    def draw(self, what: str, shapes: Iterable[tuple[int, ...]] | None = None) -> list[np.ndarray]:
        """Standard normal values by name, one for each shape; by default those of all arguments."""
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
    # with a number made of the index `i` of a rank
    "times": lambda s, a, axis, number: _number(s, axis, number) * a,
    "minus": lambda s, a, axis, number: _number(s, axis, number) - a,
    "over": lambda s, a, axis, number: _number(s, axis, number) / (1 + a * a),
    "filled": lambda s, a, axis, number: a * s.literal_number(_number(s, axis, number)),
}


def _number(s: Any, axis: Axes, number: str) -> Any:
    return eval(number, {"i": s.number(axis), "abs": abs})


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


Results = dict[str, dict[str, "np.ndarray | str"]]  # name -> quantity -> its numbers, or why it is refused


def save(results: Results, path: pathlib.Path) -> None:
    """Writes results to one file."""
    index = {name: {q: v if isinstance(v, str) else len(v) for q, v in r.items()} for name, r in results.items()}
    numbers = [v for r in results.values() for v in r.values() if not isinstance(v, str)]
    np.savez_compressed(path, index=np.array(json.dumps(index)), numbers=np.concatenate([np.zeros(0), *numbers]))


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
