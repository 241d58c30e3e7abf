"""Lifetimes of the memory of a captured step: when the graph, run in order, allocates and frees each piece.

A value dies after the last use, and memory after the last value that shows the memory. Placeholders belong to the
caller and constants to the graph, and live throughout. Outputs live to the end. A transfer holds the operands until the
wait, and further memory:

    all_gather    the result, from start to its last use
    psum_scatter  the blocks that arrive, (ranks - 1) of them on the first and the last rank; for two ranks they become
                  the result, else the result is added at the wait
    psum          a packed copy of its parts, which becomes the result

A token counts as the bytes on disk that the token names.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from shardfn.core import is_disk

from ._moves import MemoryMove, memory_of, moves, stored_bytes
from ._transfers import Transfer
from ._values import storage_of, tensors_of


@dataclasses.dataclass
class Block:
    """Piece of memory.

    Attributes:
        nbytes: size.
        maker: node that makes the block.
        born: position in the graph of the node at which the block comes to life, or -1 for memory that is there before.
        dies: position of the last node at which the block is alive.
        holders: nodes with values that show the block. Empty for buffers inside a transfer.
        operand: purpose of a buffer inside a transfer.
    """

    nbytes: int
    maker: Node
    born: int
    dies: int
    holders: list[Node] = dataclasses.field(default_factory=list)
    operand: str = ""


def blocks_of(gm: GraphModule, sent: Sequence[Transfer]) -> list[Block]:
    """Returns every piece of memory of the step, in the order of birth.

    Args:
        gm: captured step.
        sent: transfers between ranks.
    """
    nodes = list(gm.graph.nodes)
    at = {n: i for i, n in enumerate(nodes)}
    blocks = _memories_of(nodes, at)
    hidden: list[Block] = []
    for local in moves(gm):
        _hold_operands(local, at, blocks)
    for move in sent:
        _hold_operands(move, at, blocks)
        if move.wait is not None:
            if move.node.target is torch.ops.shardfn.psum_scatter_start.default:
                hidden += _arriving_buffers(move, at, blocks)
    out = [*blocks.values(), *hidden]
    return sorted((b for b in out if b.nbytes), key=lambda b: b.born)


def _memories_of(nodes: Sequence[Node], at: Mapping[Node, int]) -> dict[int, Block]:
    """Returns the memory that the values show, by identity."""
    end, blocks = len(nodes) - 1, dict[int, Block]()
    for i, node in enumerate(nodes):
        given = node.op in ("placeholder", "get_attr")
        last = end if given else max((at[u] for u in node.users), default=i)
        for tensor in tensors_of(node):
            storage = storage_of(tensor)
            if storage not in blocks:
                on_disk = is_disk(memory_of(node))
                size = stored_bytes(node) if on_disk else tensor.untyped_storage().nbytes()
                blocks[storage] = Block(size, node, -1 if given else i, last)
            block = blocks[storage]
            block.dies = max(block.dies, last)
            if not block.holders or block.holders[-1] is not node:
                block.holders.append(node)
    return blocks


def _hold_operands(move: Transfer | MemoryMove, at: Mapping[Node, int], blocks: Mapping[int, Block]) -> None:
    if move.wait is None or move.node.target is torch.ops.shardfn.psum_start.default:
        return  # the transfer sends a packed copy
    for node in move.node.all_input_nodes:
        for tensor in tensors_of(node):
            block = blocks[storage_of(tensor)]
            block.dies = max(block.dies, at[move.wait])


def _arriving_buffers(move: Transfer, at: Mapping[Node, int], blocks: Mapping[int, Block]) -> list[Block]:
    """Returns the buffers of a psum_scatter. The result is allocated at the wait."""
    assert move.wait is not None
    start, wait = at[move.node], at[move.wait]
    result = blocks[storage_of(tensors_of(move.node)[0])]
    index, n, size = int(move.node.args[2]), move.num_ranks, move.dtype.itemsize  # pyright: ignore[reportArgumentType]
    own = move.sizes[index] * size
    if n == 1:
        flat = blocks[storage_of(tensors_of(move.node.all_input_nodes[0])[0])]
        flat.dies, result.nbytes = max(flat.dies, result.dies), 0
        return []
    result.born = wait
    rows = n - 1 if index in (0, n - 1) else n
    # With two ranks the sum overwrites the block that arrives.
    made = [Block(rows * own, move.node, start, wait - 1 if rows == 1 else wait, operand="arriving")]
    if size == 2:
        # A 32-bit total and a row cast to be added to the total. With several rows the result is a separate block.
        wide = 2 * 4 * move.sizes[index] - (own if rows > 1 else 0)
        made.append(Block(wide, move.wait, wait, wait, operand="32-bit sum"))
    return made
