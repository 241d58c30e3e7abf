r"""Sums that do not depend on the number of ranks: `Zero(reduction="canonical")`.

The rows of the global batch are cut in a fixed number of chunks, a power of two. A rank runs chunks one by one, as
microbatches, so the sums of a chunk have the same bits on any rank. Chunks are added up by a fixed binary tree:

    chunks   0   1   2   3   4   5   6   7          3 ranks have 0-1, 2-4, 5-7
              \ /     \ /     \ /     \ /
              0-1     2-3     4-5     6-7
                \     /         \     /
                  0-3             4-7
                     \          /
                         0-7

A rank adds up the nodes that lie in the rank's range entirely (for the second of the three ranks: 2-3 and 4), and sends
each rank a part of them. The owner of a part adds the rest. If ranks are a power of two, each sends one node,
as many bytes as usual. Ranks with fewer chunks than others run their last chunk again and drop the gradients, because
all ranks must take part in collectives of the loss.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardfn.collectives import current_mesh, pmax, psum
from shardfn.core import (
    Pending,
    PyTree,
    StoredValue,
    broadcast_prefix,
    load,
    named_leaves,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.loss import LeafUses, Loss, Value, cut_rows, describe_batch, is_spec, microbatches
from shardfn.engine.plan import (
    Chunks,
    Node,
    Plan,
    push,
    tree_sum,
)
from shardfn.optim import exact_limbs, join_limbs, max_abs

# A gradient, by leaf and by the place of its function among the leaf's uses.
Use = tuple[int, int]


class ChunkSums:
    """Gradients of this rank's chunks, added up along the tree, for each use of a leaf.

    Of each use, backwards run in the order of microbatches, `chunks.parts` of each chunk: `begin`, then `add` at most
    once. The parts of a chunk are added up in order. A chunk without a gradient counts as zeros. After the last chunk,
    `take` returns and drops the nodes of a use.

    Args:
        plan: layout.
        chunks: chunks of this rank.
        uses: uses of leaves that several functions use.
    """

    def __init__(self, plan: Plan, chunks: Chunks, uses: Mapping[int, LeafUses]) -> None:
        self.chunks, self._plan, self._uses = chunks, plan, uses
        # By use, the nodes of all chunks up to the last with a gradient: (start, stop, sum), in order, each as
        # large as the tree allows; and the chunk whose parts are being added up, with the sum so far.
        self._nodes: dict[Use, list[Node]] = {}
        self._open: dict[Use, tuple[int, Tensor]] = {}
        self._chunk = 0

    def begin(self, microbatch: int) -> None:
        """Begins the backward of a microbatch, counted from the first part of this rank's first chunk."""
        self._chunk = self.chunks.bounds[0] + microbatch // self.chunks.parts

    def add(self, use: Use, grad: Tensor) -> None:
        """Adds a gradient of the current microbatch; dropped if the chunk was run before."""
        if self._chunk >= self.chunks.bounds[1]:
            return
        assert self._uses_of(use[0]).here[use[1]], "a leaf was used outside of the functions of a pipeline"
        before = self._open.get(use)
        if before is not None and before[0] == self._chunk:
            grad = before[1] + grad
        else:
            self._close(use)
        self._open[use] = self._chunk, grad
        if self.chunks.parts == 1:
            self._close(use)

    def take(self, use: Use) -> list[Tensor]:
        """Returns the nodes of a use, in order."""
        self._close(use)
        stack = self._nodes.pop(use, [])
        self._fill_tree(use[0], stack, self.chunks.bounds[1])
        return [x for _, _, x in stack]

    def _close(self, use: Use) -> None:
        """Moves the sum of a chunk into the tree."""
        if (done := self._open.pop(use, None)) is not None:
            chunk, grad = done
            stack = self._nodes.setdefault(use, [])
            self._fill_tree(use[0], stack, chunk)
            push(stack, (chunk, chunk + 1, grad))

    def num_uses(self, leaves: Sequence[int]) -> int:
        """Returns the largest number of uses of leaves that travel together."""
        return max(len(self._uses_of(i).here) for i in leaves)

    def send(
        self, leaves: Sequence[int], send: Callable[[list[Tensor]], Pending[Tensor]], *, separate: bool
    ) -> Pending[Tensor]:
        """Sends the nodes of leaves that travel together, one message each; zeros where other ranks have more nodes.

        Args:
            leaves: the leaves, by number.
            send: sends a message with one tensor per leaf, and returns the messages of all ranks for the message.
            separate: whether other ranks have other uses, so that the result has a row for each use.
        """
        runs = [any(place in self._list_places(i) for i in leaves) for place in range(self.num_uses(leaves))]
        runs[0] |= not any(runs)  # all ranks take part in a sum, also without a use
        by_use = [self._send_nodes(leaves, place, send) if here else [] for place, here in enumerate(runs)]
        return JoinedNodes(by_use, self.chunks, separate=separate)

    def _send_nodes(
        self, leaves: Sequence[int], place: int, send: Callable[[list[Tensor]], Pending[Tensor]]
    ) -> list[Pending[Tensor]]:
        own, chunks = [self.take((i, place)) for i in leaves], self.chunks
        most = max(len(chunks.nodes(r)) for r in range(chunks.ranks))
        rows = [
            [nodes[j] if j < len(nodes) else self._zeros(i) for i, nodes in zip(leaves, own, strict=True)]
            for j in range(most)
        ]
        return [send(row) for row in rows]

    def _uses_of(self, leaf: int) -> LeafUses:
        return self._uses.get(leaf, _ONE_USE)

    def _list_places(self, leaf: int) -> list[int]:
        """Returns the places of the functions that this rank runs among the uses of a leaf."""
        return [place for place, here in enumerate(self._uses_of(leaf).here) if here]

    def _zeros(self, leaf: int) -> Tensor:
        layout = self._plan.layers[leaf]
        return torch.full(layout.block, NO_SUMMAND, dtype=layout.dtypes.accum, device=self._plan.mesh.device)

    def _fill_tree(self, leaf: int, stack: list[Node], until: int) -> None:
        for k in range(stack[-1][1] if stack else self.chunks.bounds[0], until):
            push(stack, (k, k + 1, self._zeros(leaf)))


_ONE_USE = LeafUses()


class JoinedNodes(Pending[Tensor]):
    """This rank's part of the sum over all chunks, joined from the arriving nodes of all ranks.

    Args:
        arriving: (use, number of a node on its rank) -> the parts that all ranks have for the node, in rank
            order. Empty for a use of another rank.
        chunks: chunks of this rank.
        separate: whether the result has a row for each use, else the sum.
    """

    def __init__(self, arriving: Sequence[Sequence[Pending[Tensor]]], chunks: Chunks, *, separate: bool) -> None:
        super().__init__()
        self._arriving, self._chunks, self._separate = list(arriving), chunks, separate

    def done(self) -> bool:
        """Returns whether all have arrived."""
        return all(x.done() for of_use in self._arriving for x in of_use)

    def result(self) -> Tensor:
        """Returns the sum."""
        sums = [self._join(of_use) if of_use else None for of_use in self._arriving]
        self._arriving = []
        like = next(x for x in sums if x is not None)
        rows = [torch.full_like(like, NO_SUMMAND) if x is None else x for x in sums]
        if len(rows) == 1:
            return rows[0]
        return torch.cat(rows) if self._separate else add_in_order(rows)

    def _join(self, of_use: Sequence[Pending[Tensor]]) -> Tensor:
        rows = [x.result().view(self._chunks.ranks, -1) for x in of_use]
        nodes = [
            (start, stop, rows[j][rank])
            for rank in range(self._chunks.ranks)
            for j, (start, stop) in enumerate(self._chunks.nodes(rank))
        ]
        ((_, _, total),) = tree_sum(nodes)
        return total.clone() if self._chunks.total == 1 else total

    def wait(self) -> None:
        """Waits for all."""
        for of_use in self._arriving:
            for x in of_use:
                x.wait()


# The zero that changes no summand, not even the sign of another zero.
NO_SUMMAND = -0.0


def add_in_order(rows: Sequence[Tensor]) -> Tensor:
    """Returns the sum of rows, from the first to the last."""
    return functools.reduce(torch.add, rows)


class ChunkStates:
    """Model states that the chunks of this rank return, each from the state of the step, and the sum over ranks.

        float leaves      the mean over all chunks, summed by the tree: for example running statistics
        other leaves      old + the sum of the changes, which are integers: for example counts

    Stages of a pipeline run several chunks at the same time. So each chunk has a separate state.

    Args:
        start: model state of the step, this rank's blocks.
        chunks: chunks of this rank.
    """

    def __init__(self, start: PyTree, chunks: Chunks) -> None:
        self._start, self._chunks = start, chunks
        self._now: dict[int, PyTree] = {}

    def start_part(self, part: int) -> PyTree:
        """Returns the state that part number `part` takes: the first part of a chunk takes the state of the step."""
        return self._now.get(part // self._chunks.parts, self._start)

    def end_part(self, part: int, now: PyTree) -> None:
        """Takes the state that a part returns."""
        self._now[part // self._chunks.parts] = now

    def join_ranks(self, axes: tuple[str, ...]) -> PyTree:
        """Returns the model state after the step. Collective. The states of a chunk that was run before are dropped."""
        leaves, treedef = tree_flatten(self._start)
        columns = zip(*(tree_leaves(self._now[k]) for k in range(self._chunks.num)), strict=True)
        pairs = zip(leaves, columns, strict=True)
        return tree_unflatten(treedef, [self._join_leaf(old, new, axes) for old, new in pairs])

    def _join_leaf(self, old: Tensor, new: Sequence[Tensor], axes: tuple[str, ...]) -> Tensor:
        if not old.is_floating_point():
            return old + psum(torch.stack([x - old for x in new]).sum(0), axes).to(old.dtype)
        (start, stop), total = self._chunks.bounds, self._chunks.total
        zeros = torch.zeros(old.shape, dtype=torch.float64, device=old.device)
        rows = [zeros] * start + [x.double() for x in new] + [zeros] * (total - stop)
        summed = psum(torch.stack(rows), axes)  # for each row, all ranks but one have added zeros
        ((_, _, mean),) = tree_sum([(k, k + 1, row) for k, row in enumerate(summed.unbind())])
        return (mean / total).to(old.dtype)


def check_chunk_states(tree: PyTree, axes: tuple[str, ...]) -> None:
    """Refuses a model state that chunks cannot be joined in.

    Args:
        tree: tree of `GlobalTensor`s.
        axes: axes of the batch.

    Raises:
        ValueError: leaves are bools or complex, or are cut along axes of the batch. All are listed.
    """
    named = named_leaves(tree, "model_state")
    raise_all(
        ValueError,
        "Zero(reduction='canonical') takes the mean of the float leaves of a model state over chunks of the batch, and"
        " adds the changes of integers; got leaves for which there is neither. Keep bools as int8, complex numbers as"
        " torch.view_as_real, and blocks along another axis than those of the batch:",
        [
            f"{path} of {x.dtype}, {x.spec!r}"
            for path, x in named
            if x.dtype == torch.bool or x.dtype.is_complex or set(axes) & set(x.spec.axes)
        ],
    )


def describe_rows(plan: Plan, batch: PyTree) -> tuple[str, tuple[int, ...]]:
    """Returns the description of a batch that ranks compare before a step. See `describe_batch`.

    Canonical sums use the description of a chunk.

    Raises:
        TypeError, ValueError: the batch does not fit the specs, or is not to be cut in this rank's chunks.
    """
    text, sizes = describe_batch(batch, plan.batch, plan.mesh)
    chunks = plan.chunks
    if chunks is None or not chunks.num:
        return text, sizes
    rows = _count_rows(plan, batch)
    uneven = [f"{path} has {n} rows" for path, n in rows if n % chunks.num]
    raise_all(ValueError, f"{_describe_chunks(chunks)}; pass a multiple:", uneven)
    if len({n for _, n in rows}) > 1:
        raise_all(
            ValueError,
            f"{_describe_chunks(chunks)}, and the leaves of the batch have different numbers of rows; give each leaf"
            " one entry for a row:",
            [f"{path} has {n} rows" for path, n in rows],
        )
    return text, tuple(n // chunks.num for n in sizes)


def chunks_of(plan: Plan, chunks: Chunks, loss: Loss, batch: PyTree, *, even: bool) -> tuple[Loss, list[PyTree]]:
    """Returns the loss of a part of a chunk, and the parts of this rank's chunks of a batch from `describe_rows`.

    The last chunk is repeated where other ranks have more.

    Args:
        plan: the layout. Leaves of the batch without a cut are the same for all chunks, as for all ranks.
        chunks: the chunks that this rank runs.
        loss: loss of a chunk, perhaps accumulated over parts of the chunk.
        batch: this rank's rows.
        even: whether ranks have equal numbers of rows a chunk.

    Raises:
        ValueError: other ranks have other numbers of rows a chunk.
    """
    if not even:
        rows = [f"{path} has {n} rows" for path, n in _count_rows(plan, batch)]
        raise_all(ValueError, f"{_describe_chunks(chunks)}; other ranks pass other numbers:", rows)
    own = cut_rows(batch, chunks.num, _is_cut(plan, batch))
    cut = [microbatches(loss, chunk) for chunk in own]
    parts = [part for _, of_chunk in cut for part in of_chunk]
    return cut[0][0], parts + cut[-1][1] * (chunks.most - chunks.num)


def _is_cut(plan: Plan, batch: PyTree) -> list[bool]:
    """Returns whether chunks have different rows, for each leaf of a batch."""
    specs = broadcast_prefix(plan.batch, batch, is_spec, names=("batch spec", "batch"))
    return [bool(spec.dim_axes(0)) for spec in specs]


def _count_rows(plan: Plan, batch: PyTree) -> list[tuple[str, int]]:
    """Returns the paths of the leaves that are cut, with the numbers of rows."""
    named = zip(tree_paths(batch, "batch"), tree_leaves(batch), _is_cut(plan, batch), strict=True)
    return [(path, len(x)) for path, x, is_cut in named if is_cut]


def _describe_chunks(chunks: Chunks) -> str:
    return (
        f"Zero(reduction='canonical', reduction_chunks={chunks.total}): rank {chunks.rank} of the {chunks.ranks} that"
        f" share the batch runs {chunks.num} of the {chunks.total} chunks, all of one number of rows"
    )


def sum_values(values: Sequence[Value], chunks: Chunks, axes: tuple[str, ...]) -> Tensor:
    """Returns the sums over all chunks of loss, weight (1 for a plain mean) and the pairs of aux, in float64.

    Collective.
    """
    first, (start, _) = values[0], chunks.bounds
    rows = torch.zeros(chunks.total, 2 + 2 * len(first.aux), dtype=torch.float64, device=first.total.device)
    for k, value in enumerate(values[: chunks.num * chunks.parts]):
        row = [value.total, torch.ones_like(value.total) if value.weight is None else value.weight]
        row += [x for name in sorted(value.aux) for x in value.aux[name]]
        rows[start + k // chunks.parts] += torch.stack([x.to(rows) for x in row])
    rows = psum(rows, axes)  # for each row, all ranks but one have added zeros
    ((_, _, total),) = tree_sum([(k, k + 1, row) for k, row in enumerate(rows.unbind())])
    return total


def sum_all_squares(parts: Mapping[tuple[str, ...], Sequence[StoredValue]]) -> Tensor:
    """Returns the sum of squares of all ranks' parts, in float64: summed as integers, so in any order. Collective.

    A part that is kept elsewhere is loaded twice, first for the largest value, so that a single part at a time is here.

    Args:
        parts: parts of this rank, by the axes along which the parts of ranks are disjoint.
    """
    device = current_mesh().device
    tops = [pmax(torch.stack([max_abs(load(x)).to(device) for x in own]).max(), axes) for axes, own in parts.items()]
    if not tops:
        return torch.zeros((), dtype=torch.float64, device=device)
    top = torch.stack(tops).max()
    limbs = [
        psum(torch.stack([exact_limbs(x := load(part), top.to(x.device)).to(device) for part in own]).sum(0), axes)
        for axes, own in parts.items()
    ]
    return join_limbs(torch.stack(limbs).sum(0), top)
