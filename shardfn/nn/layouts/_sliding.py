"""Layouts of a sliding window.

N blocks.
Zaheer et al., Big Bird: Transformers for Longer Sequences, 2020, https://arxiv.org/abs/2007.14062
Beltagy et al., Longformer: The Long-Document Transformer, 2020, https://arxiv.org/abs/2004.05150
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from shardfn.nn._block_layout import BlockLayout

from ._parts import Blocks, as_layout, check_fewer, is_causal, num_blocks, random_blocks, ranges


def bigbird(
    length: int,
    *,
    block: int = 16,
    num_heads: int = 1,
    num_window_blocks: int = 3,
    num_global_blocks: int = 1,
    random: tuple[int, Int64[Tensor, "2"]] | None = None,
    attention: str = "bidirectional",
    padded: bool = False,
) -> BlockLayout:
    """Returns BigBird: a sliding window, global blocks at the start, and random blocks.

    Args:
        length: tokens of the sequence.
        block: tokens of a block.
        num_heads: H for a layout per head, 1 for the same layout of all heads.
        num_window_blocks: n: the window has n // 2 blocks on each side.
        num_global_blocks: number of global blocks of the start.
        random: number of random blocks for each block of queries, and the key of the draw. The paper has 3.
        attention: direction of attention. "unidirectional" has no later blocks, and random blocks are then drawn from
            earlier blocks, at most all of them.
        padded: the last block may be shorter.

    Raises:
        ValueError: `attention` is unknown, the sequence has fewer blocks than a number in the arguments, or `block`
            does not divide `length` without `padded`.

    Example:
        >>> from shardfn.core import key
        >>> a, b = (bigbird(256, random=(2, key(0)), num_heads=2).blocks for _ in range(2))
        >>> bool((a == b).all()), bool((a[0] == a[1]).all())
        (True, False)
    """
    N, causal = num_blocks(length, block, padded), is_causal("bigbird", attention)
    asked = {"num_window_blocks": num_window_blocks, "num_global_blocks": num_global_blocks}
    check_fewer("bigbird", asked | ({"random": random[0]} if random else {}), N)
    out = np.empty((num_heads, N, N), bool)
    for h, blocks in enumerate(out):
        blocks[...] = _sliding_window(N, num_window_blocks)
        blocks[:num_global_blocks] = blocks[:, :num_global_blocks] = True
        if random is not None:
            among = np.tril(np.ones((N, N), bool)) if causal else np.ones((N, N), bool)
            blocks |= random_blocks("bigbird", *random, h, among)
    return as_layout(np.tril(out) if causal else out, block, padded)


def bslongformer(
    length: int,
    *,
    block: int = 16,
    num_window_blocks: int = 3,
    global_blocks: Sequence[int | tuple[int, int]] = (0,),
    attention: str = "bidirectional",
    padded: bool = False,
) -> BlockLayout:
    """Returns Longformer by blocks: a sliding window, and chosen global blocks, with attention to and from all blocks.

    Args:
        length: tokens of the sequence.
        block: tokens of a block.
        num_window_blocks: n: the window has n // 2 blocks on each side.
        global_blocks: a block, or (start, stop) of several. Blocks beyond the end are left out.
        attention: "unidirectional": without later blocks.
        padded: the last block may be shorter.

    Raises:
        ValueError: an unknown attention, fewer blocks than the window, ranges of no blocks, or the block does not
            divide the length, and the length is not padded.

    Example:
        >>> bslongformer(5, block=1, attention="unidirectional").blocks.astype(int).tolist()[-1]
        [1, 0, 0, 1, 1]
    """
    N, causal = num_blocks(length, block, padded), is_causal("bslongformer", attention)
    check_fewer("bslongformer", {"num_window_blocks": num_window_blocks}, N)
    blocks = _sliding_window(N, num_window_blocks)
    for start, stop in ranges("bslongformer", global_blocks):
        blocks[start:stop] = blocks[:, start:stop] = True
    return BlockLayout(np.tril(blocks) if causal else blocks, block, padded)


def local_window(
    length: int,
    *,
    block: int = 16,
    num_window_blocks: int = 3,
    attention: str = "unidirectional",
    padded: bool = False,
) -> BlockLayout:
    """Returns a sliding window.

    Args:
        length: tokens of the sequence.
        block: tokens of a block.
        num_window_blocks: n: the window has n // 2 blocks on each side.
        attention: "unidirectional": without later blocks.
        padded: the last block may be shorter.

    Raises:
        ValueError: an unknown attention, fewer blocks than the window, or the block does not divide the length, and the
            length is not padded.

    Example:
        >>> local_window(4, block=1).blocks.astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    N, causal = num_blocks(length, block, padded), is_causal("local_window", attention)
    check_fewer("local_window", {"num_window_blocks": num_window_blocks}, N)
    blocks = _sliding_window(N, num_window_blocks)
    return BlockLayout(np.tril(blocks) if causal else blocks, block, padded)


def _sliding_window(N: int, num_window_blocks: int) -> Blocks:
    return np.abs(np.arange(N)[:, None] - np.arange(N)) <= num_window_blocks // 2
