"""Errors about batches that differ between ranks: leaves that some ranks lack, and sizes that do not fit a mean."""

import contextlib
import re
from collections.abc import Iterator, Sequence

from shardfn.core import Mesh, P, PyTree, broadcast_prefix, first_of, raise_all, tree_leaves, tree_paths

_LEAF = re.compile(r"(batch.*): (torch\.\w+) (\[.*\])")


def remedy_of_absent(texts: list[str]) -> str:
    """Returns the remedy for leaves of a batch that only some ranks have, empty without such leaves."""
    found = [{m[1]: m for line in text.splitlines() if (m := _LEAF.fullmatch(line))} for text in texts]
    if not all(found):  # a rank without a batch is at another call
        return ""
    lines = []
    for path in dict.fromkeys(path for leaves in found for path in leaves):
        without = [rank for rank, leaves in enumerate(found) if path not in leaves]
        if without:
            _, dtype, dims = next(leaves[path] for leaves in found if path in leaves).groups()
            sizes = ", ".join(n.strip("' ").replace("*", "0") for n in dims[1:-1].split(",")) + "," * ("," not in dims)
            lines.append(
                f"\n{path} is missing on ranks {without}. A batch has the same leaves on all ranks. A rank without rows"
                f" of one passes an empty tensor: torch.zeros(({sizes}), dtype={dtype})."
            )
    return "".join(first_of(lines, 3))


class UnequalBatchesError(ValueError):
    """Error of batches of different sizes on ranks with a loss that is a plain mean."""


@contextlib.contextmanager
def naming_unequal(batch: PyTree, specs: PyTree, mesh: Mesh, sizes: Sequence[Sequence[int]]) -> Iterator[None]:
    """Names, in a step's error, the leaves of a batch by which ranks differ, if the loss cannot take such batches.

    Args:
        batch: this rank's rows.
        specs: cut of the global batch.
        mesh: the mesh.
        sizes: sizes by rank, from `describe_batch`, empty if equal.
    """
    try:
        yield
    except UnequalBatchesError as error:
        cuts = broadcast_prefix(specs, batch, lambda x: isinstance(x, P), names=("batch spec", "batch"))
        named = zip(tree_paths(batch, "batch"), tree_leaves(batch), cuts, strict=True)
        dims = [(path, d) for path, x, spec in named for d in range(x.ndim) if mesh.axes(spec.dim_axes(d))]
        lines = [
            f"{path}: dim {d} is {', '.join(f'{n} on rank {rank}' for rank, n in enumerate(by_rank))}"
            for (path, d), by_rank in zip(dims, zip(*sizes, strict=True), strict=True)
            if len(set(by_rank)) > 1
        ]
        raise_all(ValueError, f"{error} They differ in:", lines)
        raise
