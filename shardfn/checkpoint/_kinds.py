"""States of an optimizer by kind: found in the checkpoint wherever their rule was in the chain.

A kind is the fields of a state, such as `count, mu, nu` of Adam. With a clip in front of it, or inside of a wrapper,
Adam's state has another path and the same fields:

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
        path: path.
        fields: the fields with leaves of its own.
        leaves: the paths of these leaves inside of the state.
    """

    path: str
    fields: frozenset[str]
    leaves: frozenset[str]

    def has(self, path: str) -> bool:
        """Returns whether a leaf is one of its own, and not of a state inside of it."""
        return any(_begins(path, f"{self.path}.{field}") for field in self.fields)


class KindMatch(NamedTuple):
    """The states of the optimizer of a tree, and those of a checkpoint that go on in them.

    Attributes:
        moved: by state of the tree, the path of the one in the checkpoint. None: the state begins anew.
        left: the states of the checkpoint that nothing goes on with.
        problems: states of a kind of which both sides have some, in different numbers.
    """

    moved: dict[OptimizerState, str | None]
    left: tuple[OptimizerState, ...]
    problems: list[str]

    @property
    def keeps_some(self) -> bool:
        """Returns whether some state goes on, and it is known which."""
        return not self.problems and any(self.moved.values())

    def rename(self, otherwise: Rename | None) -> Rename:
        """Returns the function from a path of the tree to one of the checkpoint. Other leaves follow `otherwise`."""

        def found(path: str) -> str | None:
            state = next((state for state in self.moved if state.has(path)), None)
            if state is None:
                return path if otherwise is None else otherwise(path)
            old = self.moved[state]
            return None if old is None else old + path.removeprefix(state.path)

        return found

    def leaves_out(self, path: str) -> bool:
        """Returns whether a leaf of the checkpoint belongs to a state that nothing goes on with."""
        return any(state.has(path) for state in self.left)

    def text(self) -> str:
        """Returns the states that go on, begin anew and are left out, in words."""
        on = {state: old for state, old in self.moved.items() if old is not None}
        parts = [f"{s.path}{f' goes on with {old}' if s.path != old else ' goes on'}" for s, old in on.items()]
        parts += [f"{_own(s)} begins anew" for s, old in self.moved.items() if old is None]
        parts += [f"{_own(s)} of the checkpoint is left out" for s in self.left]
        return ", ".join(parts)


def match_kinds(targets: Sequence[Target], there: Iterable[str]) -> KindMatch:
    """Finds the states of a checkpoint in which those of a tree go on, by their fields.

    Args:
        targets: the leaves of the tree.
        there: the paths of the checkpoint.
    """
    here, old = _states([t.path for t in targets]), _states(there)
    moved: dict[OptimizerState, str | None] = {}
    # States of which the leaves are the same first: those of several groups of parameters have one kind.
    for key in (lambda s: (s.fields, s.leaves), lambda s: s.fields):
        here, old = _pair_up(here, old, key, moved)
    both = {s.fields for s in here} & {s.fields for s in old}
    problems = [
        f"states with {', '.join(sorted(fields))}: here {_named(here, fields)}, in the checkpoint {_named(old, fields)}"
        for fields in sorted(both, key=sorted)
    ]
    moved |= {s: None for s in here if s.fields not in both}
    return KindMatch(moved, tuple(s for s in old if s.fields not in both), problems)


def copying(
    like: PyTree, targets: Sequence[Target], manifest: Manifest, rename: Rename | None, *, partial: bool
) -> Rename | None:
    """Returns `rename`, with the parameters of the checkpoint for copies of them that would keep those of `like`.

    An average or master copies begin as the parameters with which `step.init` was called. Beside parameters that are
    read they have to begin as these, or the next step would bring the first ones back.

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

    def found(path: str) -> str | None:
        at = next((p for p in fresh if _begins(path, p)), None)
        read = None if at is None else "params" + path.removeprefix(at)
        if at is None or read is None or (rename is not None and rename(read) is None):
            return path if rename is None else rename(path)
        wide = (p for p in manifest.leaves if p.startswith(_ROOT) and p.endswith(f".master{path.removeprefix(at)}"))
        return next(wide, read if rename is None else rename(read))

    return found


def _pair_up(
    here: list[OptimizerState],
    old: list[OptimizerState],
    key: Callable[[OptimizerState], object],
    moved: dict[OptimizerState, str | None],
) -> tuple[list[OptimizerState], list[OptimizerState]]:
    """Pairs states of one key in their order, where both sides have as many, and returns those that are left over."""
    for wanted in dict.fromkeys(map(key, here)):
        a, b = ([s for s in side if key(s) == wanted] for side in (here, old))
        if len(a) == len(b):
            moved |= {x: y.path for x, y in zip(a, b, strict=True)}
    used = {*moved.values()}
    return [s for s in here if s not in moved], [s for s in old if s.path not in used]


def _states(paths: Iterable[str]) -> list[OptimizerState]:
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


def _begins(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", ".", "[")


def _own(state: OptimizerState) -> str:
    """Returns a state by its fields, as states inside of it may go on."""
    return f"{state.path} ({', '.join(sorted(state.fields))})"


def _named(states: Sequence[OptimizerState], fields: frozenset[str]) -> str:
    return ", ".join(s.path for s in states if s.fields == fields)
