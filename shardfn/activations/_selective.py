"""`remat` with a policy: keeps or moves chosen results of the forward, and reuses them in the recomputation.

In activation checkpointing the forward numbers the operations with new tensors as results, and puts some of the results
aside. The recomputation runs the same operations. A result that was put aside is taken in place of running the
operation.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardfn._torch import TorchDispatchMode
from shardfn.capture import capturing, in_plumbing, plumbing
from shardfn.collectives import RematResults, current_remat_results, keep_remat_results
from shardfn.core import hearing_names, tree_leaves

from ._offloaded_value import OffloadedTensor, PoolOf, can_leave, flat_of
from .policies import Action, SavePolicy, check_action, describe, keeps_collectives, limit_of, names_of

T = TypeVar("T")

# Transfers among the operations of a function itself always run again: a policy may see other sizes on other ranks, and
# all must take part. Transfers of the package's collectives are numbered as a whole (`SavedResults.saw_transfer`).
_SHARED = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "shardfn")


class _Result:
    """Tensor returned by an operation: here, or away."""

    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = x.detach()
        self.version, self.nbytes = x._version, x.untyped_storage().nbytes()
        self.look = x.size(), x.stride(), x.storage_offset()
        self.away: OffloadedTensor | None = None

    def send(self, to: Action, pool: PoolOf) -> OffloadedTensor | None:
        if self.x is None or not can_leave(self.x):
            return None
        self.away, self.x = OffloadedTensor(flat_of(self.x), to, pool), None
        return self.away

    def take(self) -> Tensor | None:
        """Returns the tensor, or None if the tensor was written to since."""
        if self.x is not None:
            return self.x.detach() if self.x._version == self.version else None
        assert self.away is not None
        return None if self.away.spoiled else self.away.value().as_strided(*self.look)


class _RecordedOp:
    """Operation of the forward, with all results if the results were put aside, else without results.

    Attributes:
        transfers: whether ranks must all keep the results, or all run the operation again.
        parts: transfers of a collective of several transfers. Such a collective has no results, and its transfers share
            an action.
    """

    def __init__(self, func: Any, *, transfers: bool = False, parts: "Sequence[_RecordedOp]" = ()) -> None:
        self.name, self.transfers, self.parts = str(func), transfers, parts
        self.results: list[_Result] = []
        self.makes: Callable[[list[Tensor]], Any] = list
        self.action: Action = "recompute"

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.results)


class SavedResults:
    """Results that a call of a function puts aside for the recomputation.

    Args:
        policy: policy that decides for each value.
        window: bytes in flight at most, on the way out or back ahead of use.
        pool: function that returns the pool of files, for values on disk.
    """

    def __init__(self, policy: SavePolicy, window: int, pool: PoolOf) -> None:
        self._policy, self._window, self._pool = policy, window, pool
        self.ops: list[_RecordedOp] = []
        # By memory, the newest operation with the memory as a result. The weak reference keeps the address from being
        # reused.
        self._of: dict[int, tuple[StorageWeakRef, _RecordedOp]] = {}
        self._last: _RecordedOp | None = None
        self._waiting: list[_RecordedOp] = []
        # The transfers of the running collective, if several.
        self._joining: list[_RecordedOp] | None = None
        self._leaving: list[OffloadedTensor] = []

    # The forward.

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes an operation that has run."""
        for x in _written_tensors(func, args, kwargs):
            self._forget_results(x)
        if not is_numbered(func):
            return
        # A result is named after its operation and before the next operation.
        self.conclude()
        op = _RecordedOp(func)
        self.ops.append(op)
        outs = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, tuple | list) else []
        if not outs or not all(isinstance(x, Tensor) for x in outs) or _draws_numbers(func, args, kwargs):
            return
        inputs = {_storage_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        # The operation returns an argument, against the operation's schema.
        if any(_storage_key(x) in inputs for x in outs):
            return
        op.makes = _single_value if isinstance(out, Tensor) else type(out)
        op.results = [_Result(x) for x in outs]
        op.action = self._ask_policy(None, op, max(outs, key=lambda x: x.nbytes))
        for x in outs:
            self._of[_storage_key(x)] = StorageWeakRef(x.untyped_storage()), op
        self._last = op

    def saw_transfer(self, name: str, out: Tensor) -> Tensor:
        """Notes a transfer.

        The result is kept only by name and by a policy of names, or by a policy of all collectives: equally on all
        ranks.
        """
        joined = self._joining
        if joined is None:
            self.conclude()
        op = self._record_transfer(name)
        self.ops.append(op)
        op.makes, op.results = _single_value, [_Result(out)]
        if joined is None:
            self._set_owner(out, op)
        else:
            joined.append(op)
        return out

    def join(self, run: Callable[[], T]) -> T:
        """Runs a collective of several transfers. The transfers belong to the result."""
        if self._joining is not None:
            return run()
        self.conclude()
        self._joining = parts = []
        try:
            out = run()
        finally:
            self._joining = None
        self.conclude()
        first = out[0] if isinstance(out, tuple) else out
        if parts and isinstance(first, Tensor):
            self._set_owner(first, self._record_transfer("a collective", parts))
        return out

    def _record_transfer(self, name: str, parts: "Sequence[_RecordedOp]" = ()) -> _RecordedOp:
        op = _RecordedOp(name, transfers=True, parts=parts)
        op.action = "keep" if keeps_collectives(self._policy) else op.action
        return op

    def _set_owner(self, x: Tensor, op: _RecordedOp) -> None:
        self._of[_storage_key(x)] = StorageWeakRef(x.untyped_storage()), op
        self._last = op

    def _ask_policy(self, name: str | None, op: _RecordedOp, x: Tensor) -> Action:
        saved = describe(name, x, op.name)
        return check_action(self._policy(saved), saved)

    def name(self, x: Tensor, name: str) -> None:
        """Applies the policy to `x` under the name."""
        op = self._of.get(_storage_key(x), (None, None))[1]
        if op is None or (op.transfers and not names_of(self._policy)):
            return
        action = self._ask_policy(name, op, x)
        if op is not self._last and action != op.action:
            raise ValueError(
                f"checkpoint_name(x, {name!r}): other operations ran since x was made. The policy gave {op.action!r} of"
                f" it then, and for the name it gives {action!r}. Name a value where the value is made."
            )
        op.action = action

    def conclude(self) -> None:
        """Ends the naming of the last operation's results, and parts with the oldest results beyond the budget."""
        op, self._last = self._last, None
        if op is None:
            return
        for part in op.parts:
            part.action = op.action
            self._end_naming(part)
        self._end_naming(op)

    def _end_naming(self, op: _RecordedOp) -> None:
        if not op.results or op.action == "keep":
            return
        if op.transfers:  # never by size
            self._part_with(op)
            return
        limit = limit_of(self._policy)
        self._waiting.append(op)
        over = sum(o.nbytes for o in self._waiting) - limit
        while self._waiting and over > 0:
            oldest = self._waiting.pop(0)
            over -= oldest.nbytes
            self._part_with(oldest)

    def _part_with(self, op: _RecordedOp) -> None:
        if op.action == "recompute":
            op.results = []
            return
        for result in op.results:
            away = result.send(op.action, self._pool)
            self._leaving += [] if away is None else [away]
            self._settle_sent()

    def _settle_sent(self) -> None:
        for away in self._leaving:
            away.settle(wait=False)
        self._leaving = [a for a in self._leaving if a.leaving]
        while sum(a.nbytes for a in self._leaving) > self._window:
            self._leaving.pop(0).settle(wait=True)

    def end(self) -> None:
        """Ends the forward, and removes the notes on its results."""
        self.conclude()
        self._of.clear()

    def _forget_results(self, x: Tensor) -> None:
        op = self._of.get(_storage_key(x), (None, None))[1]
        if op is None:
            return
        if op.transfers and op.action != "recompute":
            raise ValueError(
                f"remat: the result of {op.name} is kept by its name, and is written to in place. Write to a clone()."
            )
        # The operation's result has been overwritten.
        op.results = []

    # The recomputation.

    def take(self, number: int, func: Any) -> Any:
        """Returns the results of operation `number`, or None if the operation must run again.

        Raises:
            RuntimeError: the recomputation runs other operations than the forward did.
        """
        name = self.ops[number].name if number < len(self.ops) else "nothing"
        if name != str(func):
            raise RuntimeError(
                f"remat: the recomputation runs {func} where the forward ran {name} (operation {number}). A function"
                " must do the same each time that it is called with the same arguments."
            )
        op = self.ops[number]
        if not op.results:
            return None
        self._settle_sent()
        self.fetch_ahead(number + 1)
        values = [r.take() for r in op.results]
        if op.transfers and any(v is None for v in values):
            raise RuntimeError(
                f"remat: the result of {op.name} was kept by its name, and was written to in place afterwards. Write to"
                " a clone()."
            )
        # Each result is taken once, so memory is freed as the recomputation proceeds.
        op.results = []
        return None if any(v is None for v in values) else op.makes([v for v in values if v is not None])

    def fetch_ahead(self, number: int) -> None:
        """Prefetches results of the operations from `number` on, up to a window."""
        total = 0
        for op in () if capturing() else self.ops[number:]:
            for away in [r.away for r in op.results if r.away is not None]:
                total += away.nbytes
                if total > self._window:
                    return
                away.begin()


class RecordedForward(TorchDispatchMode):
    """Shows each operation to `SavedResults`."""

    def __init__(self, results: SavedResults) -> None:
        super().__init__()
        self._results = results
        self._hearing, self._keeping = hearing_names(results.name), keep_remat_results(self)
        self._around: RematResults | None = None

    def __enter__(self) -> Any:
        self._around = current_remat_results()
        self._hearing.__enter__()
        self._keeping.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._keeping.__exit__(*error)
        self._hearing.__exit__(*error)
        if error[0] is None:
            self._results.end()

    def transfer(self, name: str, run: Callable[[], Tensor]) -> Tensor:
        """Shows a transfer to `SavedResults`."""
        seen, out = not in_plumbing(), _run_transfer(self._around, name, run)
        return self._results.saw_transfer(name, out) if seen else out

    def run_as_one(self, run: Callable[[], T]) -> T:
        """Shows a collective of several to `SavedResults`."""
        around = self._around
        return self._results.join(run if around is None else lambda: around.run_as_one(run))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        # Neither here nor in `Rerun`: so both count the same operations, whichever leaves have to be fetched.
        if not in_plumbing():
            self._results.saw(func, args, kwargs or {}, out)
        return out


class Rerun(TorchDispatchMode):
    """Takes results in place of running operations. Each result can be taken once."""

    def __init__(self, results: SavedResults) -> None:
        super().__init__()
        self._results, self._number = results, 0
        self._keeping = keep_remat_results(self)
        self._around: RematResults | None = None

    def __enter__(self) -> Any:
        # A backward may run more than once over one graph: each recomputation counts from the start.
        self._number = 0
        self._results.fetch_ahead(0)
        self._around = current_remat_results()
        self._keeping.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._keeping.__exit__(*error)

    def transfer(self, name: str, run: Callable[[], Tensor]) -> Tensor:
        """Returns the kept result of a transfer, or else runs the transfer again."""
        found = None if in_plumbing() else self._take_results(name)
        return _run_transfer(self._around, name, run) if found is None else found

    def run_as_one(self, run: Callable[[], T]) -> T:
        """Runs a collective. Results of some of the collective's transfers may have been kept."""
        return run() if self._around is None else self._around.run_as_one(run)

    def _take_results(self, func: Any) -> Any:
        self._number += 1
        return self._results.take(self._number - 1, func)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = self._take_results(func) if is_numbered(func) and not in_plumbing() else None
        return func(*args, **(kwargs or {})) if found is None else found


def _run_transfer(around: RematResults | None, name: str, run: Callable[[], Tensor]) -> Tensor:
    """Returns the result of a transfer. The operations of a transfer are not numbered."""
    if around is not None:
        return around.transfer(name, run)
    with plumbing():
        return run()


def is_numbered(func: Any) -> bool:
    """Returns whether an operation makes new tensors without other ranks.

    Example:
        >>> is_numbered(torch.ops.aten.mm.default), is_numbered(torch.ops.aten.add_.Tensor)
        (True, False)
    """
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.returns or func.namespace in _SHARED:
        return False
    tensors = [r for r in schema.returns if "Tensor" in str(r.type)]
    return bool(tensors) and all(r.alias_info is None for r in schema.returns)


def _written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors to which an operation writes."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    if func.namespace in _SHARED and func.namespace != "shardfn":  # the schemas do not declare all writes
        return [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    wrote = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in tree_leaves(wrote) if isinstance(x, Tensor)]


def _draws_numbers(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether an operation draws from torch's generator.

    The generator must advance in the recomputation too.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    may_not = any(a.name == "dropout_p" for a in func._schema.arguments) and given.get("dropout_p", 0.0) == 0.0
    return not may_not


def _storage_key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _single_value(values: list[Tensor]) -> Tensor:
    return values[0]
