"""Experts of a job of DeepSpeed: the layers, and the ranks of each expert.

Expert e of E is on rank `e // (E / n)` of the n experts' ranks, under the number `e % (E / n)`. For example, expert 5
of 8 on 4 ranks is expert 1 on rank 2. Ranks that have the same experts share the states of the optimizer:

    experts first   ranks 0, n, 2 n, ... have the same experts
    data first      neighbours have the same experts
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardfn.core import named_parameters, raise_all

_EXPERT = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.*)")
_NAME = "{}.deepspeed_moe.experts.deepspeed_experts.{}.{}"
_GATE = "{}.deepspeed_moe.gate.wg.weight"
# DeepSpeed ends a group of experts before it has more elements than this.
_MOST_ELEMENTS = 178956971

Group = tuple[tuple[str, ...], dict[str, Any]]


class ExpertLayout(NamedTuple):
    """Experts of a job. Without layers, each method leaves a name unchanged.

    Attributes:
        ranks: number of ranks with different experts, DeepSpeed's `ep_size`.
        data_first: whether neighbours have the same experts.
        numbers: numbers of experts, by the name of each layer, in the module's order.
    """

    ranks: int
    data_first: bool
    numbers: Mapping[str, int]

    def place(self, rank: int, ranks: int) -> tuple[int, int]:
        """Returns a rank's number among the experts' ranks, and among the ranks with the same experts.

        Example:
            >>> [ExpertLayout(2, False, {}).place(r, 4) for r in range(4)], ExpertLayout(2, True, {}).place(1, 4)
            ([(0, 0), (1, 0), (0, 1), (1, 1)], (0, 1))
        """
        if self.data_first:
            return divmod(rank, ranks // self.ranks)
        return rank % self.ranks, rank // self.ranks

    def first(self, rank: int, ranks: int) -> int:
        """Returns the first of the ranks with the same experts."""
        return rank * (ranks // self.ranks) if self.data_first else rank

    def has(self, name: str) -> bool:
        """Returns whether a tensor is an expert's."""
        found = _EXPERT.fullmatch(name)
        return found is not None and found[1] in self.numbers

    def local(self, name: str) -> tuple[int, str]:
        """Returns the expert-parallel rank that has an expert's tensor, and the tensor's local name on the rank."""
        layer, number, rest = _name_parts(name)
        rank, local = divmod(number, self.numbers[layer] // self.ranks)
        return rank, _NAME.format(layer, local, rest)

    def on(self, rank: int, name: str) -> str:
        """Returns the global name of the tensor with a local name on an expert-parallel rank."""
        if not self.has(name):
            return name
        layer, number, rest = _name_parts(name)
        return _NAME.format(layer, rank * (self.numbers[layer] // self.ranks) + number, rest)

    def everywhere(self, name: str) -> set[str]:
        """Returns the global names of the tensors with a local name, over all expert-parallel ranks."""
        return {self.on(rank, name) for rank in range(self.ranks)}

    def at(self, name: str) -> tuple[int, int]:
        """Returns the number of an expert's layer, and the expert's number in the layer."""
        layer, number, _ = _name_parts(name)
        return list(self.numbers).index(layer), number


def has_experts(module: nn.Module) -> bool:
    """Returns whether a module has native experts."""
    return any(_EXPERT.fullmatch(name) for name, _ in named_parameters(module))


def find_experts(
    shapes: Mapping[str, torch.Size], names: Iterable[str], ranks: int, *, data_first: bool
) -> ExpertLayout:
    """Returns the experts of a module with all experts.

    Args:
        shapes: shapes of the module's parameters.
        names: names of all tensors that the module saves.
        ranks: number of ranks with different experts.
        data_first: whether neighbours have the same experts.

    Raises:
        ValueError: experts of some ranks are missing, or lie where DeepSpeed would not find them. The message lists
            all.
    """
    numbers: dict[str, int] = {}
    for name in shapes:
        if found := _EXPERT.fullmatch(name):
            numbers[found[1]] = max(numbers.get(found[1], 0), int(found[2]) + 1)
    problems = []
    for layer, number in numbers.items():
        gate = shapes.get(_GATE.format(layer))
        if gate is not None and gate[0] != number:
            problems.append(
                f"{layer} has {number} experts in the module, and its gate is for {gate[0]}: make the module with"
                " ep_size=1, so that it has all of them"
            )
        elif number % ranks:
            problems.append(f"{layer} has {number} experts, and ep_size = {ranks} does not divide that")
    if not numbers and ranks > 1:
        problems.append(f"ep_size = {ranks}, and the module has no experts: leave it out")
    names = list(names)
    problems += [
        f"{x}: the layer is the whole module, and DeepSpeed does not find its own files of that; put it in a module"
        for x in names
        if x.startswith("deepspeed_moe.experts.")
    ]
    problems += [
        f"{x} is a buffer of an expert, or a second name of its parameter: DeepSpeed would give all ranks that of one"
        for x in names
        if _EXPERT.fullmatch(x) and x not in shapes
    ]
    raise_all(ValueError, "DeepSpeed has no checkpoint of such experts:", problems)
    return ExpertLayout(ranks, data_first, numbers)


def split(groups: Sequence[Group], experts: ExpertLayout, shapes: Mapping[str, torch.Size]) -> list[tuple[Group, bool]]:
    """Splits groups of the optimizer as DeepSpeed does, in a single rank's names, and marks groups of experts.

    Args:
        groups: groups with parameters by name, including all experts, and settings.
        experts: experts of the job.
        shapes: shapes of all parameters.

    Raises:
        ValueError: DeepSpeed does not split the groups, or ranks would have unequal groups. The message lists all.
    """
    if not experts.numbers:
        return [(group, False) for group in groups]
    dense = [tuple(x for x in names if not experts.has(x)) for names, _ in groups]
    titles = [own.get("name") for _, own in groups]
    problems: list[str] = []
    for i, (_, own) in enumerate(groups):
        if not titles[i] or titles.index(titles[i]) < i:
            problems.append(f"group {i} has the name {titles[i]!r}: give each one of its own, by which they are split")
        if "moe" in own:
            problems.append(f"group {i} has the key 'moe': pass the groups before they are split")
        if not dense[i]:
            problems.append(
                f"group {i} has experts alone, and DeepSpeed leaves an empty group there: join it to another"
            )
    local = [_split_by_rank(i, names, experts, problems) for i, (names, _) in enumerate(groups)]
    raise_all(ValueError, "DeepSpeed does not split such groups of the optimizer:", problems)
    out = [((names, own), False) for names, (_, own) in zip(dense, groups, strict=True)]
    title = {"name": f"ep_size_{experts.ranks}", "moe": True}
    for names, (_, own) in zip(local, groups, strict=True):
        out += [((some, own | title), True) for some in _split_names(names, shapes)]
    return out


def _split_by_rank(i: int, names: Sequence[str], experts: ExpertLayout, problems: list[str]) -> list[str]:
    by_rank: list[list[str]] = [[] for _ in range(experts.ranks)]
    for name in filter(experts.has, names):
        rank, local = experts.local(name)
        by_rank[rank].append(local)
    odd = [rank for rank, own in enumerate(by_rank) if own != by_rank[0]]
    if odd:
        problems.append(
            f"group {i} has other experts' parameters, or another order of them, on the experts' ranks {odd} than on 0"
        )
    return by_rank[0]


def _split_names(names: Sequence[str], shapes: Mapping[str, torch.Size]) -> list[tuple[str, ...]]:
    """Splits parameters in order, up to a number of elements."""
    out: list[list[str]] = []
    held = 0
    for name in names:
        count = shapes[name].numel()
        if not out or held + count > _MOST_ELEMENTS:
            out.append([])
            held = 0
        out[-1].append(name)
        held += count
    return [tuple(x) for x in out]


def _name_parts(name: str) -> tuple[str, int, str]:
    found = _EXPERT.fullmatch(name)
    assert found is not None
    return found[1], int(found[2]), found[3]
