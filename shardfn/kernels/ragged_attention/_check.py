"""Checks of a plan's values. A captured program has the values only at the run."""

import torch
from torch import Tensor


def check_plan(
    cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor, window: int | None,
    tree: Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError with the first token where slot, position, sequence, blocks or guesses are out of range."""
    blocks, block = cache.shape[0], cache.shape[3]
    width = tables.shape[1]
    for name, x, count, of in (
        ("slots", slots, blocks * block, f"cache has {blocks} blocks of {block} tokens"),
        ("sequences", sequences, len(tables), f"tables has {len(tables)} sequences"),
        ("positions", positions, width * block, f"tables has {width} blocks of {block} tokens a sequence"),
    ):
        wrong = (x < 0) | (x >= count)
        if wrong.any():
            i = int(wrong.nonzero()[0])
            raise ValueError(f"{name}[{i}] is {int(x[i])}, must be from 0 to {count - 1}: {of}")
    if tree is not None:
        _check_tree(positions, sequences, tree)
    _check_tables(blocks, block, positions, sequences, tables, window, tree)


def num_guesses(tree: Tensor) -> Tensor:
    """Returns how many of each token's last visible positions have the keys of guesses, int64 [T]."""
    return (tree != 0).sum(1)


def _check_tables(
    blocks: int, block: int, positions: Tensor, sequences: Tensor, tables: Tensor, window: int | None,
    tree: Tensor | None,
) -> None:  # fmt: skip
    end = positions + 1 if tree is None else positions + 1 - num_guesses(tree)
    begin = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    index = torch.arange(tables.shape[1], device=tables.device)
    read = (index >= (begin // block)[:, None]) & (index * block < end[:, None])
    rows = tables[sequences.long()]
    wrong = (read & ((rows < 0) | (rows >= blocks))).nonzero()
    if len(wrong):
        i, b = wrong[0].tolist()
        s = int(sequences[i])
        raise ValueError(
            f"tables[{s}, {b}] is {int(tables[s, b])}, which token {i} at position {int(positions[i])} reads; "
            f"must be from 0 to {blocks - 1}: cache has {blocks} blocks"
        )


def _check_tree(positions: Tensor, sequences: Tensor, tree: Tensor) -> None:
    for i in (tree != 0).any(1).nonzero().flatten().tolist():
        tokens = tree[i].nonzero().flatten()
        end, s, found = int(positions[i]) + 1, int(sequences[i]), positions[tokens].tolist()
        if (
            int(tokens[-1]) != i
            or found != list(range(end - len(found), end))
            or not bool((sequences[tokens] == s).all())
        ):
            raise ValueError(
                f"tree[{i}] has tokens {tokens.tolist()} of sequences {sequences[tokens].tolist()} at positions "
                f"{found}; must be tokens of sequence {s} at consecutive positions up to {end - 1}, token {i} the last"
            )
