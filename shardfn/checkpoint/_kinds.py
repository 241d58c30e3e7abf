"""States of an optimizer by kind: found in the checkpoint at any place of the rule in the chain.

A kind is the fields of a state, such as `count, mu, nu` of Adam. Behind a clip, or inside of a wrapper, Adam's state
has another path but the same fields:

the tree has                        the checkpoint has
opt_state[1][0].mu['w']             opt_state[0].mu['w']           chain(clip, adamw) for adamw
opt_state.inner[0].mu['w']          opt_state[0].mu['w']           apply_if_finite(adamw) for adamw
opt_state[1][2].count                                              a schedule for a number: a new state
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shardfn.core import PyTree, tree_leaves
from shardfn.optim import AverageParamsState, LookaheadState, MasterState, ScheduleFreeState

from ._manifest import Manifest
from ._match import Rename, Target, source_of

_PART = re.compile(r"""\.?[^\W\d]\w*|\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]""")
_ROOT = "opt_state"
# The fields that begin as copies of the parameters.
_COPIES = {AverageParamsState: "average", LookaheadState: "slow", MasterState: "master", ScheduleFreeState: "z"}


class OptimizerState(NamedTuple):
    """A state with fields.

    Attributes:
        path: path of the state, such as "opt_state[0]".
        fields: fields with leaves outside of inner states.
        leaves: the paths of these leaves inside of the state.
    """

    path: str
    fields: frozenset[str]
    leaves: frozenset[str]

    def has(self, path: str) -> bool:
        """Returns whether a leaf belongs to the state, and not to an inner state."""
        return any(_starts_with(path, f"{self.path}.{field}") for field in self.fields)


class KindMatch(NamedTuple):
    """Optimizer states of a tree, with the states of a checkpoint that continue in the tree.

    Attributes:
        moved: by state of the tree, path of the state in the checkpoint. None: the state is initialized.
        left: states of the checkpoint that no state of the tree continues.
        problems: kinds with different numbers of states on both sides, for example 2 Adam states here and 1 there.
    """

    moved: dict[OptimizerState, str | None]
    left: tuple[OptimizerState, ...]
    problems: list[str]

    @property
    def keeps_some(self) -> bool:
        """Returns whether a state is continued, and the match is unambiguous."""
        return not self.problems and any(self.moved.values())

    def rename(self, otherwise: Rename | None) -> Rename:
        """Returns the function from paths of the tree to paths of the checkpoint. Other leaves follow `otherwise`."""

        def find_source(path: str) -> str | None:
            state = next((state for state in self.moved if state.has(path)), None)
            if state is None:
                return path if otherwise is None else otherwise(path)
            old = self.moved[state]
            return None if old is None else old + path.removeprefix(state.path)

        return find_source

    def leaves_out(self, path: str) -> bool:
        """Returns whether a leaf of the checkpoint belongs to a state that is left out."""
        return any(state.has(path) for state in self.left)

    def text(self) -> str:
        """Returns a text with the states that are continued, initialized and left out."""
        on = {state: old for state, old in self.moved.items() if old is not None}
        parts = [f"{s.path}{f' goes on with {old}' if s.path != old else ' goes on'}" for s, old in on.items()]
        parts += [f"{_show_state(s)} begins anew" for s, old in self.moved.items() if old is None]
        parts += [f"{_show_state(s)} of the checkpoint is left out" for s in self.left]
        return ", ".join(parts)


def match_kinds(targets: Sequence[Target], there: Iterable[str]) -> KindMatch:
    """Matches the optimizer states of a tree with the states of a checkpoint, by fields.

    Args:
        targets: the leaves of the tree.
        there: paths of the checkpoint.
    """
    here, old = _find_states([t.path for t in targets]), _find_states(there)
    moved: dict[OptimizerState, str | None] = {}
    # States with the same leaves first: the states of several groups of parameters have one kind.
    for key in (lambda s: (s.fields, s.leaves), lambda s: s.fields):
        here, old = _pair_up(here, old, key, moved)
    both = {s.fields for s in here} & {s.fields for s in old}
    problems = [
        f"states with {', '.join(sorted(fields))}: here {_show_states(here, fields)}, in the checkpoint"
        f" {_show_states(old, fields)}"
        for fields in sorted(both, key=sorted)
    ]
    moved |= {s: None for s in here if s.fields not in both}
    return KindMatch(moved, tuple(s for s in old if s.fields not in both), problems)


def copying(
    like: PyTree, targets: Sequence[Target], manifest: Manifest, rename: Rename | None, *, partial: bool
) -> Rename | None:
    """Returns `rename`, extended so that kept copies of parameters are read from the checkpoint's parameters.

    An average or master copies begin as the parameters that `step.init` was given. If parameters are read from a
    checkpoint, the copies must begin as the read parameters. Else the next step would restore the first parameters.

    Args:
        like: the tree.
        targets: leaves.
        manifest: manifest of the checkpoint.
        rename: function from a path of the tree to one of the checkpoint. None: the leaf keeps its value.
        partial: whether leaves that the checkpoint lacks keep their values.
    """
    nodes = tree_leaves(like, is_leaf=lambda x: isinstance(x, tuple(_COPIES)))
    own = {id(x) for node in nodes if type(node) in _COPIES for x in tree_leaves(getattr(node, _COPIES[type(node)]))}
    fresh: set[str] = set()
    for target, x in zip(targets, tree_leaves(like), strict=True):
        found = source_of(target, manifest, rename) if id(x) in own else target.path
        if found is None or (partial and found == target.path and id(x) in own):
            at = max(k for k, part in enumerate(target.parts) if part.startswith(".") and part[1:] in _COPIES.values())
            fresh.add("".join(target.parts[: at + 1]).removeprefix("."))
    if not fresh:
        return rename

    def find_source(path: str) -> str | None:
        at = next((p for p in fresh if _starts_with(path, p)), None)
        read = None if at is None else "params" + path.removeprefix(at)
        if at is None or read is None or (rename is not None and rename(read) is None):
            return path if rename is None else rename(path)
        wide = (p for p in manifest.leaves if p.startswith(_ROOT) and p.endswith(f".master{path.removeprefix(at)}"))
        return next(wide, read if rename is None else rename(read))

    return find_source


def _pair_up(
    here: list[OptimizerState],
    old: list[OptimizerState],
    key: Callable[[OptimizerState], object],
    moved: dict[OptimizerState, str | None],
) -> tuple[list[OptimizerState], list[OptimizerState]]:
    """Pairs states of equal keys in order, where both sides have equally many, and returns the remaining states."""
    for wanted in dict.fromkeys(map(key, here)):
        a, b = ([s for s in side if key(s) == wanted] for side in (here, old))
        if len(a) == len(b):
            moved |= {x: y.path for x, y in zip(a, b, strict=True)}
    used = {*moved.values()}
    return [s for s in here if s not in moved], [s for s in old if s.path not in used]


def _find_states(paths: Iterable[str]) -> list[OptimizerState]:
    """Returns the states with fields among the leaves of an optimizer, in the order of their first leaves."""
    own: dict[str, dict[str, str]] = {}
    for path in paths:
        parts = _PART.findall(path)
        if not parts or parts[0] != _ROOT or "".join(parts) != path:
            continue
        at = max((k for k, part in enumerate(parts) if k and part.startswith(".")), default=0)
        if at:
            own.setdefault("".join(parts[:at]), {})["".join(parts[at:])] = parts[at].removeprefix(".")
    return [OptimizerState(path, frozenset(leaves.values()), frozenset(leaves)) for path, leaves in own.items()]


def _starts_with(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", ".", "[")


def _show_state(state: OptimizerState) -> str:
    """Returns a text with the fields of a state, because inner states may be continued separately."""
    return f"{state.path} ({', '.join(sorted(state.fields))})"


def _show_states(states: Sequence[OptimizerState], fields: frozenset[str]) -> str:
    return ", ".join(s.path for s in states if s.fields == fields)
