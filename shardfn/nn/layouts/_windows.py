"""Layouts of windows, with and without overlap, and of global and random blocks.

L blocks of a window, g global blocks of a window, N blocks.
Child et al., Generating Long Sequences with Sparse Transformers, 2019, https://arxiv.org/abs/1904.10509
Zaheer et al., Big Bird: Transformers for Longer Sequences, 2020, https://arxiv.org/abs/2007.14062
Beltagy et al., Longformer: The Long-Document Transformer, 2020, https://arxiv.org/abs/2004.05150
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from shardfn._torch import DisableFuncTorch, disable_current_modes, is_functorch_wrapped_tensor
from shardfn.core import bits, fold_in
from shardfn.nn._block_layout import BlockLayout

Blocks = np.ndarray


def num_blocks(length: int, block: int, padded: bool = False) -> int:
    """Returns the number of blocks of a sequence.

    Args:
        length: tokens of the sequence.
        block: tokens of a block.
        padded: the last block may be shorter.

    Raises:
        ValueError: the block does not divide the length, and the length is not padded.

    Example:
        >>> num_blocks(17, 16, padded=True)
        2
    """
    if block < 1 or length < 1:
        raise ValueError(f"length and block must be at least 1, got {length} tokens in blocks of {block}.")
    if length % block and not padded:
        raise ValueError(
            f"the block size must divide the number of tokens, got {length} tokens in blocks of {block}: pass"
            f" padded=True for a shorter last block, or pad the sequence to {-(-length // block) * block} tokens."
        )
    return -(-length // block)


def as_layout(out: Blocks, block: int, padded: bool) -> BlockLayout:
    """Returns a `BlockLayout`, without the dim of heads for a single head."""
    return BlockLayout(out[0] if len(out) == 1 else out, block, padded)


def ranges(name: str, chosen: Sequence[int | tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns (start, stop) of each chosen block or range."""
    out = [(x, x + 1) if isinstance(x, int) else x for x in chosen]
    wrong = [x for x in out if not 0 <= x[0] < x[1]]
    if wrong:
        raise ValueError(f"{name}: ranges of global_blocks must have 0 <= start < stop, got {wrong} in {list(chosen)}.")
    return out


def random_blocks(name: str, num: int, key: Tensor, head: int, among: Blocks) -> Blocks:
    """Returns `num` random blocks of each row, or all if fewer are available. All choices are equally likely."""
    N = among.shape[0]
    if not 0 <= num <= N:
        raise ValueError(f"{name}: random blocks must be at most {N}, the number of blocks, got {num}.")
    known = _check_key(name, key)
    with DisableFuncTorch(), disable_current_modes():  # part of a program, and not computed in the program
        words = bits(fold_in(known.cpu(), head), 0, N * N).view(N, N).numpy()
    rank = np.where(among, words, np.iinfo(np.int64).max).argsort(-1, kind="stable").argsort(-1)
    return (rank < num) & among


def is_causal(name: str, attention: str, *more: str) -> bool:
    """Returns whether later blocks are left out."""
    known = ("bidirectional", "unidirectional", *more)
    if attention not in known:
        raise ValueError(f"{name}: attention={attention!r} is not one of {', '.join(map(repr, known))}.")
    return attention == "unidirectional"


def check_fewer(name: str, asked: dict[str, int], N: int) -> None:
    """Raises for numbers of blocks that are negative or above N."""
    wrong = [f"{option}={n}" for option, n in asked.items() if not 0 <= n <= N]
    if wrong:
        raise ValueError(
            f"{name} of {N} blocks cannot have {', '.join(wrong)}. Use smaller blocks or lower the number."
        )


def _check_key(name: str, key: Any) -> Tensor:
    wrapped = is_functorch_wrapped_tensor(key)
    if type(key) is not Tensor or wrapped or key.device.type == "meta":
        raise ValueError(
            f"{name}: random blocks are part of the program, but their key is computed by the program. Pass a key made"
            " outside of the captured or differentiated function."
        )
    return key


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
