"""Parts shared by the layouts: numbers of blocks, ranges of blocks, random blocks, and checks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
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
        raise ValueError(f"a layout of {length} tokens in blocks of {block}: both must be 1 or more.")
    if length % block and not padded:
        raise ValueError(
            f"a layout of {length} tokens in blocks of {block}, which do not divide them: pass padded=True for a"
            f" shorter last block, or pad the sequence to {-(-length // block) * block} tokens."
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
