"""Layouts of windows without overlap, and of global blocks.

L blocks of a window, g global blocks of a window, N blocks. Child et al., Generating Long Sequences with Sparse
Transformers, 2019, https://arxiv.org/abs/1904.10509
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from shardfn.nn._block_layout import BlockLayout

from ._parts import Blocks, as_layout, is_causal, num_blocks, random_blocks, ranges


def dense(length: int, *, block: int = 16, padded: bool = False) -> BlockLayout:
    """Returns the layout of every block: the baseline for the other layouts.

    Args:
        length: tokens of the sequence.
        block: tokens of a block.
        padded: the last block may be shorter.

    Raises:
        ValueError: the block does not divide the length, and the length is not padded.

    Example:
        >>> int(dense(256).blocks.sum())
        256
    """
    N = num_blocks(length, block, padded)
    return BlockLayout(np.ones((N, N), bool), block, padded)


def fixed(
    length: int,
    *,
    block: int = 16,
    num_heads: int = 1,
    num_local_blocks: int = 4,
    num_global_blocks: int = 1,
    num_patterns: int = 1,
    attention: str = "bidirectional",
    padded: bool = False,
) -> BlockLayout:
    """Returns windows of L blocks with attention inside of a window, and g global blocks of each window.

    All blocks (unidirectional: all later blocks) see the global blocks. The g blocks are the last of the window, or
    with a head's pattern p the blocks p g places earlier. For example with L = 4 and g = 1 pattern 1 has block 2 of
    each window 0 .. 3. A last window of fewer than L blocks has the global blocks at the same offset, or at the
    greatest offset possible.

    Args:
        length: tokens of the sequence.
        block: tokens of a block.
        num_heads: H for a layout per head, 1 for the same layout of all heads.
        num_local_blocks: L.
        num_global_blocks: number g of global blocks, a divisor of L.
        num_patterns: number of patterns of global blocks, at most L / g. Head h has pattern h mod num_patterns.
        attention: direction of attention. "unidirectional" has no later blocks. "horizontal" lets global blocks see all
            blocks, too.
        padded: the last block may be shorter.

    Raises:
        ValueError: g does not divide L, too many patterns, several patterns for a single layout, an unknown attention,
            or the block does not divide the length, and the length is not padded.

    Example:
        >>> fixed(6, block=1, num_local_blocks=2, attention="unidirectional").blocks.astype(int).tolist()[-1]
        [0, 1, 0, 1, 1, 1]
    """
    L, g = num_local_blocks, num_global_blocks
    if g < 1 or L % g:
        raise ValueError(f"fixed: num_global_blocks={g} must divide num_local_blocks={L}.")
    if not 1 <= num_patterns <= L // g:
        raise ValueError(
            f"fixed: num_patterns must be 1 to {L // g}, as windows of {L} blocks have"
            f" {L // g} groups of {g}, got {num_patterns}."
        )
    if num_patterns > 1 and num_heads == 1:
        raise ValueError(f"fixed: num_patterns={num_patterns} differ between heads. Pass num_heads.")
    causal = is_causal("fixed", attention, "horizontal")
    N = num_blocks(length, block, padded)
    local = _window_pairs(np.arange(N) // L)
    out = np.empty((num_heads, N, N), bool)
    for h, blocks in enumerate(out):
        blocks[...] = np.tril(local) if causal else local
        first = L - (1 + h % num_patterns) * g
        starts = [k + first if k + L <= N else min(k + first, max(N - g, 0)) for k in range(0, N, L)]
        for start in starts:
            blocks[start if causal else 0 :, start : start + g] = True
            if attention == "horizontal":
                blocks[start : start + g] = True
    return as_layout(out, block, padded)


def variable(
    length: int,
    *,
    block: int = 16,
    num_heads: int = 1,
    local_window_blocks: Sequence[int] = (4,),
    global_blocks: Sequence[int | tuple[int, int]] = (0,),
    random: tuple[int, Int64[Tensor, "2"]] | None = None,
    attention: str = "bidirectional",
    padded: bool = False,
) -> BlockLayout:
    """Returns windows of several sizes in order, global blocks (unidirectional.

    For all later blocks), and random blocks.

    Args:
        length: tokens of the sequence.
        block: tokens of a block.
        num_heads: H for a layout per head, 1 for the same layout of all heads.
        local_window_blocks: the windows' sizes. The last is repeated to the end.
        global_blocks: blocks seen by all: a block, or (start, stop) of several blocks, for example [0, (4, 6)]. Blocks
            beyond the end, such as of a short sequence, are left out.
        random: number of random blocks for each block of queries, and the key of the draw among all blocks, also later
            blocks: compose with `Causal()` where later blocks must not count.
        attention: direction of attention. "unidirectional" has no later blocks, except random blocks. "horizontal" lets
            global blocks see all blocks, too.
        padded: the last block may be shorter.

    Raises:
        ValueError: windows or ranges of no blocks, more random blocks than there are, an unknown attention, or the
            block does not divide the length, and the length is not padded.

    Example:
        >>> variable(4, block=1, local_window_blocks=(1, 2), global_blocks=()).blocks.astype(int).tolist()
        [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    """
    sizes = list(local_window_blocks)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"variable: local_window_blocks must be one or more sizes of 1 or more blocks, got {sizes}.")
    causal = is_causal("variable", attention, "horizontal")
    N = num_blocks(length, block, padded)
    windows = np.repeat(np.arange(len(sizes) + N), [*sizes, *[sizes[-1]] * N])[:N]
    local = _window_pairs(windows)
    out = np.empty((num_heads, N, N), bool)
    for h, blocks in enumerate(out):
        blocks[...] = np.tril(local) if causal else local
        if random is not None:
            blocks |= random_blocks("variable", *random, h, np.ones((N, N), bool))
        for start, stop in ranges("variable", global_blocks):
            blocks[start if causal else 0 :, start:stop] = True
            if attention == "horizontal":
                blocks[start:stop] = True
    return as_layout(out, block, padded)


def _window_pairs(windows: np.ndarray) -> Blocks:
    return windows[:, None] == windows
