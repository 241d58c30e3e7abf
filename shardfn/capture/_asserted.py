"""Checks of values in a captured function, recorded as operations of the graph.

A branch on a value has no place in a graph. But a branch that only raises has a single outcome in every step that goes
on. The graph takes this outcome, and an operation checks at run time that the outcome was right. So an `if` whose body
is a `raise`, an `assert`, and `torch._check_tensor_all` need no change.
"""

import ast
import dis
import functools
import inspect
import linecache
import pathlib
import sys
from types import CodeType, FrameType
from typing import Any

import jaxtyping
import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.overrides import TorchFunctionMode

from shardfn._torch import FakeTensor, function_modes
from shardfn.collectives import AxisTypeMode
from shardfn.core import Again, rebind_ambient

_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")
_LIBRARY.define("check(Tensor flag, bool expected, str text) -> ()")
# Recognised by its code object, as only the caller's frame is known.
_CHECKS: Any = getattr(torch, "_check_tensor_all_with").__code__  # noqa: B009  # not in torch's stubs
_TENSOR: Any = Tensor
_FOLLOWED = inspect.unwrap(AxisTypeMode.operation).__code__
_CHECKERS = ("<@beartype", str(pathlib.Path(jaxtyping.__file__).parent))


def _check_flag(flag: Tensor, expected: bool, text: str) -> None:
    """Raises ValueError if a flag is other than expected.

    On a GPU the program ends later, without a wait for the flag.
    """
    if flag.is_cuda:
        # To read the flag here would make each step wait for the device.
        torch._assert_async(flag if expected else ~flag, text)
    elif bool(flag) != expected:
        raise ValueError(text)


_LIBRARY.impl("check", _check_flag, "CompositeExplicitAutograd")


@torch.library.register_fake("shardfn::check", lib=_LIBRARY)
def _(flag: Tensor, expected: bool, text: str) -> None:
    del flag, expected, text


# Without this registration, dead-code elimination would remove the check, as the result has no use.
has_side_effect(torch.ops.shardfn.check.default)


class Asserting(TorchFunctionMode):
    """Lets checks of tensors without data pass while active, and records the checks as ops of the graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_TENSOR.__bool__, _TENSOR.item) and isinstance(args[0], FakeTensor):
            taken = _result_taken(func, args[0], _find_caller(sys._getframe(1)))
            if taken is not None:
                return taken
        return func(*args, **(kwargs or {}))


# Torch runs a backward past the modes: a function that runs again there would have no checks.
@rebind_ambient
def _asserting_again() -> list[Again]:
    return [Asserting] if any(isinstance(m, Asserting) for m in function_modes()) else []


def _find_caller(frame: FrameType) -> FrameType:
    """Returns the frame that uses the value, past the frames of signature checkers and of other modes."""

    def passes_on(code: CodeType) -> bool:
        return code.co_filename.startswith(_CHECKERS) or code.co_name == "__torch_function__" or code is _FOLLOWED

    # Checkers of signatures (for example beartype) put further frames between the branch and the question.
    while passes_on(frame.f_code) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _result_taken(func: Any, x: Tensor, frame: FrameType) -> Any:
    """Returns the result of `func(x)` for which `frame` raises no error.

    None if the value decides more than an error.
    """
    code, at = frame.f_code, frame.f_lasti
    if func is _TENSOR.item:
        if code is _CHECKS:
            text = _message_text(frame.f_locals.get("message"))
            caller = frame.f_back
            while caller is not None and caller.f_code.co_filename == code.co_filename:
                caller = caller.f_back
            where = "" if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}: "
            torch.ops.shardfn.check(x, True, f"{where}{text}")
            return True
        # The value is compared there. The truth value of the result is used next.
        return x if _find_passing(code, at, inside=True) is not None else None
    found = _find_passing(code, at)
    if found is None:
        return None
    expected, text = found
    flag = x if x.dtype == torch.bool else x != 0
    torch.ops.shardfn.check(flag.reshape(()), expected, f"{code.co_filename}:{frame.f_lineno}: {text}")
    return expected


# Cached without end: code objects are immutable, and a file is assumed unchanged since the import.
@functools.cache
def _find_passing(code: CodeType, at: int, inside: bool = False) -> tuple[bool, str] | None:
    """Returns the truth value of the tested expression for which no error is raised, and the statement's text.

    None if the expression decides more than an error, for example which of two sums is computed.

    Args:
        code: code of the function.
        at: offset of the instruction that runs.
        inside: flag. The expression may be only a part of the tested expression.
    """
    tree, span = _parse_file(code.co_filename), _consumed_span(code, at, inside)
    if span is None:
        return None
    for node in ast.walk(tree) if tree is not None else ():
        wanted = _passing_truth(node)
        # Where the error is caught, both outcomes continue. Such a branch has no place in a graph.
        if wanted is not None and _has_span(node.test, span) and not _is_caught(tree, span):  # pyright: ignore[reportAttributeAccessIssue]
            found = wanted if inside else _wanted_truth(node.test, span, wanted)  # pyright: ignore[reportAttributeAccessIssue]
            return None if found is None else (found, ast.unparse(node)[:400])
    return None


def _passing_truth(node: ast.AST) -> bool | None:
    """Returns the truth of a statement's test with which the statement does nothing at all.

    None if the statement can do more than raise.
    """
    if isinstance(node, ast.If):
        return False if not node.orelse and [type(x) for x in node.body] == [ast.Raise] else None
    return True if isinstance(node, ast.Assert) else None


def _is_caught(tree: Any, span: Any) -> bool:
    """Returns whether the function continues after an error at `span`."""
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
    return any(_has_span(x, span) for node in tries for x in node.body)


def _has_span(node: Any, span: Any) -> bool:
    begin, stop = _span_of(node)
    return begin <= span[0] and span[1] <= stop


def _consumed_span(code: CodeType, at: int, inside: bool) -> Any:
    """Returns the span of the expression that an instruction consumes.

    With `inside`, the span of the instruction itself.
    """
    before = None
    for step in dis.get_instructions(code):
        if step.offset == at:
            # A jump tests the value of the instruction before, so the earlier instruction has the position. From Python
            # 3.13 on a comparison tests the value itself.
            tested = step if inside or before is None or step.opname == "COMPARE_OP" else before
            p = tested.positions
            if p is None or None in p:
                return None
            return (p.lineno, p.col_offset), (p.end_lineno, p.end_col_offset)
        before = step
    return None


def _wanted_truth(test: ast.expr, span: Any, wanted: bool) -> bool | None:
    """Returns the truth that the expression at `span` must have for `test` to be `wanted`.

    None if other expressions may decide the test.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _wanted_truth(test.operand, span, not wanted) if _span_of(test) != span else not wanted
    if isinstance(test, ast.BoolOp):
        for i, value in enumerate(test.values):
            if _has_span(value, span):
                # All of `and` must be true, all of `or` false. Else the last operand decides, once Python asks for the
                # operand.
                every = isinstance(test.op, ast.And) == wanted
                return _wanted_truth(value, span, wanted) if every or i == len(test.values) - 1 else None
        return None
    return wanted if _span_of(test) == span else None


def _span_of(node: Any) -> Any:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


@functools.lru_cache(maxsize=256)
def _parse_file(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None


def _message_text(message: Any) -> str:
    try:
        return str(message() if callable(message) else message or "a check of a tensor's values failed")
    except Exception:  # the message may format values of tensors that do not exist yet
        return "a check of a tensor's values failed"
