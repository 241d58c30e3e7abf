"""The tensors that autograd saves in a forward, and where each tensor waits for the backward.

An entry is a storage: all views of it, and all operations that save it, share the entry. The policy decides on an entry
when the next operation saves something, so that a value can be named after it was made.
"""

import collections
import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardfn._torch import CheckpointHolder, sequence_number
from shardfn.capture import capturing
from shardfn.core import hearing_names, saved_tensors_hooks

from ._offloaded_value import OffloadedTensor, PoolOf, can_leave, flat_of
from .policies import Action, SavePolicy, check_action, describe, limit_of

# Number of earlier saved tensors that are searched for tensors to prefetch.
_REACH = 256


class SavedStorage:
    """Storage saved by autograd: here (`flat`), or away."""

    def __init__(self, x: Tensor, name: str | None, turn: int) -> None:
        # Detached, and shared by all views: neither graphs nor shapes of the saving operations are held.
        self.flat: Tensor | None = flat_of(x)
        self.away: OffloadedTensor | None = None
        self.version, self.turn = x._version, turn
        self.saved = describe(name, x)
        self.action: Action | None = None


class SavedUse:
    """Handle that autograd holds in place of a tensor saved by an operation."""

    __slots__ = ("__weakref__", "at", "dtype", "entry", "look")

    def __init__(self, entry: SavedStorage, x: Tensor, at: int) -> None:
        self.entry, self.at, self.dtype = entry, at, x.dtype
        self.look = x.size(), x.stride(), x.storage_offset()


class _Untouched:
    """Tensor that stays on the device, with the version needed by the backward."""

    __slots__ = ("version", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.version = x, x._version


class _Others:
    """Packed form of a tensor taken by the surrounding hooks."""

    __slots__ = ("packed",)

    def __init__(self, packed: Any) -> None:
        self.packed = packed


class SavedValue:
    """Saved tensors of a forward.

    Args:
        policy: policy that decides for each value.
        window: bytes in flight at most, on the way out or back ahead of use.
        pool: function that returns the pool of files, for values on disk.
        held: tensors that stay alive anyway, such as the function's parameters, and are not moved.
    """

    def __init__(self, policy: SavePolicy, window: int, pool: PoolOf, held: Iterable[Tensor]) -> None:
        self._policy, self._window, self._pool = policy, window, pool
        self._held = {x.untyped_storage()._cdata for x in held}
        # Only autograd's graph holds entries and uses: when the graph lets go, memory and files go, too.
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[SavedStorage]]] = {}
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        self._uses: list[weakref.ref[SavedUse]] = []
        self._undecided: list[weakref.ref[SavedStorage]] = []
        self._waiting: collections.deque[tuple[weakref.ref[SavedStorage], int]] = collections.deque()
        self._waiting_bytes = 0
        self._leaving: collections.deque[OffloadedTensor] = collections.deque()
        self._ahead: list[weakref.ref[SavedStorage]] = []
        self._outer: Any = None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Returns a context in which autograd saves by the rules of the policy."""
        self._outer = _hooks_around()
        with (
            hearing_names(self._name_tensor),
            torch.autograd.graph.saved_tensors_hooks(self._pack_tensor, self._unpack_tensor),
        ):
            # Only the forward's bookkeeping ends here: the object unpacks saved tensors whenever a backward runs.
            yield
        self._decide_entries(None)
        self._known.clear()
        self._names.clear()
        self._held.clear()

    # The forward.

    def _pack_tensor(self, x: Tensor) -> Any:
        if self._outer is not None:
            # Surrounding hooks come first: tensors taken by these hooks, mostly gathered lazy leaves, must not be
            # moved.
            packed = self._outer[0](x)
            if isinstance(packed, CheckpointHolder):
                raise ValueError(
                    "offload inside remat has no effect, as every tensor saved in there is dropped. Use"
                    " offload(remat(f), policy), or remat(f, policy=policy)."
                )
            if packed is not x:
                return _Others(packed)
        key = x.untyped_storage()._cdata
        if key in self._held or not can_leave(x):
            # Detached: the result of an operation, kept by the operation's node, would keep the node alive.
            return _Untouched(x.detach())
        # Equal for all tensors saved by an operation.
        turn = sequence_number()
        self._decide_entries(turn)
        use = SavedUse(self._find_entry(x, key, turn), x, len(self._uses))
        self._uses.append(weakref.ref(use))
        return use

    def _find_entry(self, x: Tensor, key: int, turn: int) -> SavedStorage:
        if key in self._known:
            found = self._known[key][1]()
            # After a write the value is another value, with a separate entry. A use of the old value is an error.
            if found is not None and found.version == x._version:
                return found
        entry = SavedStorage(x, self._names[key][1] if key in self._names else None, turn)
        # Weak references keep the address of a freed storage from being reused.
        self._known[key] = StorageWeakRef(x.untyped_storage()), weakref.ref(entry)
        self._undecided.append(weakref.ref(entry))
        return entry

    def _name_tensor(self, x: Tensor, name: str) -> None:
        key = x.untyped_storage()._cdata
        self._names[key] = StorageWeakRef(x.untyped_storage()), name
        entry = self._known[key][1]() if key in self._known else None
        if entry is None or entry.action is None:
            if entry is not None:
                entry.saved = describe(name, x)
            return
        action = self._ask_policy(describe(name, x))
        if action != entry.action:
            raise ValueError(
                f"checkpoint_name(x, {name!r}): x was saved before by an operation, and the policy gave"
                f" {entry.action!r} then, but for the name gives {action!r}. Name a value where the value is made."
            )

    def _decide_entries(self, turn: int | None) -> None:
        """Decides on the entries of earlier operations."""
        rest = []
        for ref in self._undecided:
            entry = ref()
            if entry is not None and entry.turn == turn:
                rest.append(ref)
            elif entry is not None:
                entry.action = self._ask_policy(entry.saved)
                if entry.action != "keep":
                    self._waiting.append((ref, entry.saved.nbytes))
                    self._waiting_bytes += entry.saved.nbytes
        self._undecided = rest
        self._send_oldest()

    def _ask_policy(self, saved: Any) -> Action:
        action = check_action(self._policy(saved), saved)
        if action == "recompute":
            raise ValueError(
                f"the policy gives 'recompute' for {saved}. Offload keeps or moves tensors that autograd has saved. Use"
                " remat(f, policy=policy)."
            )
        return action

    def _send_oldest(self) -> None:
        """Sends values beyond the budget away, oldest first, with at most a window in flight."""
        # A graph has no speeds to go by: the last window's worth would still be leaving, and stays. Counts bytes saved,
        # not bytes alive: dead entries are skipped in turn.
        room = limit_of(self._policy) + (self._window if capturing() else 0)
        while self._waiting and self._waiting_bytes > room:
            ref, nbytes = self._waiting.popleft()
            self._waiting_bytes -= nbytes
            entry = ref()
            if entry is None or entry.flat is None or entry.flat._version != entry.version:
                continue  # dead, or written to since: then an error if the backward uses it
            assert entry.action is not None
            entry.away = OffloadedTensor(entry.flat, entry.action, self._pool)
            entry.flat = None
            self._leaving.append(entry.away)
            self._settle_sent()
        self._settle_sent()

    def _settle_sent(self) -> None:
        """Releases values that have left. Waits while more than a window is in flight."""
        for away in self._leaving:
            away.settle(wait=False)
        self._leaving = collections.deque(a for a in self._leaving if a.leaving)
        total = sum(a.nbytes for a in self._leaving)
        # The oldest first, as the nearest to being gone.
        while self._leaving and total > self._window:
            away = self._leaving.popleft()
            away.settle(wait=True)
            total -= away.nbytes

    # The backward.

    def _unpack_tensor(self, packed: Any) -> Tensor:
        if type(packed) is _Others:
            return self._outer[1](packed.packed)
        if type(packed) is _Untouched:
            _check_version(packed.x, packed.version)
            return packed.x
        entry = packed.entry
        if entry.flat is not None:
            _check_version(entry.flat, entry.version)
            flat = entry.flat
        else:
            self._settle_sent()
            if entry.away.spoiled:
                raise _written_to()
            flat = entry.away.value()
        self._fetch_ahead(packed)
        return (flat if flat.dtype == packed.dtype else flat.view(packed.dtype)).as_strided(*packed.look)

    def _fetch_ahead(self, use: SavedUse) -> None:
        """Prefetches the values saved just before this value, and drops fetched copies outside of the range.

        In a graph the passes decide how far ahead.
        """
        ahead: dict[int, SavedStorage] = {}
        total = 0
        for at in () if capturing() else range(use.at - 1, max(use.at - _REACH, 0) - 1, -1):
            near = self._uses[at]()
            if near is None or near.entry.away is None or id(near.entry) in ahead:
                continue
            total += near.entry.away.nbytes
            if total > self._window:
                break
            ahead[id(near.entry)] = near.entry
        # Including the copy of `use`: the caller holds the row, and another use fetches the copy again.
        for entry in [*(ref() for ref in self._ahead), use.entry]:
            if entry is not None and entry.away is not None and id(entry) not in ahead:
                entry.away.drop()
        for entry in ahead.values():
            assert entry.away is not None
            entry.away.begin()
        self._ahead = [weakref.ref(entry) for entry in ahead.values()]


def _hooks_around() -> Any:
    """Returns the active hooks, as (pack, unpack). Hooks of another `SavedValue` give way to the surrounding hooks."""
    hooks = saved_tensors_hooks(while_tracing=False)
    owner = getattr(hooks[0], "__self__", None) if hooks is not None else None
    return owner._outer if type(owner) is SavedValue else hooks


def _check_version(x: Tensor, version: int) -> None:
    if x._version != version:
        raise _written_to()


def _written_to() -> RuntimeError:
    return RuntimeError(
        "a tensor that the backward needs was modified in place after an operation had saved it. Autograd cannot"
        " differentiate that, with or without offload. Write to a clone()."
    )
