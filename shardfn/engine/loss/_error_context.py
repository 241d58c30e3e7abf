"""Notes on errors that a loss raises: facts about the parameters and the batch."""

import contextlib
import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn import core
from shardfn._torch import FakeTensor, is_functorch_wrapped_tensor
from shardfn.leaves import refused_write

_SHOWN = 6
# The only text of torch that is compared: torch has no class of errors here, and refuses the write itself.
_REFUSED = "a leaf Variable that requires grad is being used in an in-place operation"
_PRODUCT = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x(\d+)\)")
# Functions of modes, through which operations of the loss pass: lines of these functions are not the loss's.
_MODES = ("__torch_function__", "__torch_dispatch__")


@contextlib.contextmanager
def noting_exceptions(
    policy: core.Policy | None, leaves: Callable[[], Iterable[tuple[str, torch.dtype]]]
) -> Iterator[None]:
    """Adds a note to torch's errors in a loss under a policy: the leaves with another dtype than the rest.

    Args:
        policy: the policy, or None.
        leaves: function that returns the paths of the parameters, and their dtypes in the loss. Called after errors.
    """
    try:
        yield
    except RuntimeError as error:
        # Errors of ranks and of transfers have separate classes.
        if policy is None or type(error) is not RuntimeError:
            raise
        apart = [(path, d) for path, d in leaves() if d.is_floating_point and d != policy.compute]
        if apart:
            error.add_note(_note_exceptions(policy, [f"{path} is computed in {d}" for path, d in apart]))
        raise


@contextlib.contextmanager
def noting_leaves(params: core.PyTree, batch: tuple[core.PyTree, ...]) -> Iterator[None]:
    """Adds notes on the parameters and the batch to errors of a loss.

    Args:
        params: the parameters that the loss gets.
        batch: the batch, or nothing.

    Raises:
        ValueError: the loss writes to a parameter. Replaces torch's error, at all stages of ZeRO. The message names
            the parameter.
    """
    try:
        yield
    except (TypeError, KeyError, IndexError, RuntimeError) as error:
        if _REFUSED in str(error):
            lines = [*_note_line(params, error)] or ["a parameter is written to inside the loss"]
            refused = refused_write(" ".join(lines))
            for note in getattr(error, "__notes__", ()):  # of a captured step, the line
                refused.add_note(note)
            raise refused from error
        for note in _make_notes(error, params, batch):
            error.add_note(note)
        raise


def _make_notes(error: Exception, params: core.PyTree, batch: tuple[core.PyTree, ...]) -> Iterator[str]:
    if isinstance(error, TypeError):
        if batch and isinstance(batch[0], list | tuple):
            yield _note_list(batch[0])
    elif isinstance(error, KeyError):
        for name, tree in (("batch", batch[0] if batch else ()), ("parameters", params)):
            if isinstance(tree, Mapping) and error.args and error.args[0] not in tree:
                known = ", ".join(core.first_of([repr(key) for key in tree], _SHOWN))
                yield f"The {name} {'has' if name == 'batch' else 'have'} {known}." + core.did_you_mean(
                    str(error.args[0]), map(str, tree)
                )
    elif isinstance(error, IndexError):
        yield from _note_ranges(*batch)
    elif type(error) is RuntimeError:  # errors of ranks and of transfers have separate classes
        yield from _note_line(params, error)
        yield f"The batch has {_note_shapes('batch', *batch)}."
        yield f"The parameters have {_note_shapes('params', params)}."
        yield from core.first_of(_note_unlike(params, *batch), _SHOWN)
        yield from _note_widths(error, params, *batch)


def _note_line(params: core.PyTree, error: Exception) -> Iterator[str]:
    """Names the parameters on the innermost line with parameters: torch names no operand."""
    own = {
        _storage_of(x): path for path, x in core.named_leaves(params, "params") if _has_storage(x) and x.requires_grad
    }
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_name in _MODES:
            continue
        tensors = [x for x in core.tree_leaves([*frame.f_locals.values()]) if _has_storage(x)]
        here = dict.fromkeys(own[k] for x in tensors if (k := _storage_of(x)) in own)
        if here:
            code = frame.f_code
            text = linecache.getline(code.co_filename, line).strip()
            yield f"At {code.co_filename}:{line}, `{text}`, variables hold {', '.join(core.first_of([*here], _SHOWN))}."
            return


def _has_storage(x: Any) -> bool:
    """Returns whether `x` is a plain tensor, or a tensor of a capture.

    Other tensors, and values inside torch.func, have no storage.
    """
    return type(x) in (Tensor, FakeTensor) and not is_functorch_wrapped_tensor(x)


def _storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _named_tensors(name: str, tree: core.PyTree = ()) -> list[tuple[str, Tensor]]:
    return [(path, x) for path, x in core.named_leaves(tree, name) if isinstance(x, Tensor)]


def _note_shapes(name: str, tree: core.PyTree = ()) -> str:
    return ", ".join(core.first_of([f"{path} {tuple(x.shape)}" for path, x in _named_tensors(name, tree)], _SHOWN))


def _note_unlike(params: core.PyTree, batch: core.PyTree = ()) -> list[str]:
    """Returns the leaves of the batch with another dtype or device than the parameters, with the remedy."""
    own = [x for _, x in _named_tensors("params", params) if x.is_floating_point()]
    if not own:
        return []
    dtype, device, out = own[0].dtype, own[0].device, list[str]()
    for path, x in _named_tensors("batch", batch):
        if x.dtype != dtype:
            out.append(
                f"{path} is {x.dtype}, and the parameters are {dtype}; where they meet, write {path}.to({dtype})."
            )
        if x.device != device:
            out.append(f"{path} is on {x.device}, and the parameters are on {device}. Write {path}.to(mesh.device).")
    return out


def _note_widths(error: Exception, params: core.PyTree, batch: core.PyTree = ()) -> Iterator[str]:
    """Yields the leaf of the batch with another last dim than the matrix in its product, with the remedy."""
    found = _PRODUCT.search(str(error))
    if found is None:
        return
    width, rows, cols = map(int, found.groups())
    # A layer of torch has the transpose of the matrix that enters the product.
    matrices = [path for path, x in _named_tensors("params", params) if tuple(x.shape) in ((rows, cols), (cols, rows))]
    for path, x in _named_tensors("batch", batch):
        if matrices and x.ndim and x.shape[-1] == width:
            yield (
                f"The last dim of {path} has size {width}, and {matrices[0]} takes {rows}: pass rows of {rows} numbers,"
                f" or init parameters for {width}."
            )


def _note_list(batch: Sequence[Any]) -> str:
    text = f"The batch is a {type(batch).__name__} of {len(batch)}."
    if batch and isinstance(batch[0], Mapping):
        return (
            f"{text} Make one dict of them, whose tensors have a row for each: sf.data.pad(length)(examples), or"
            " torch.utils.data.default_collate(examples)."
        )
    return f"{text} To look up names, pass a dict of tensors, step(state, {{'name': tensor}}); or take them by number."


def _note_ranges(batch: core.PyTree = ()) -> list[str]:
    """Returns the least and largest values of integer leaves: a value may be an index outside of a table."""
    return [
        f"{path} has values from {int(x.min())} to {int(x.max())}."
        for path, x in core.named_leaves(batch, "batch")
        if type(x) is Tensor and not (x.is_meta or x.is_floating_point() or x.is_complex()) and x.numel()
    ]


def _note_exceptions(policy: core.Policy, own: Sequence[str]) -> str:
    lines = [
        f"The loss is computed in {policy.compute} but for exceptions of the Policy. Cast where they meet, as in"
        " x @ w.to(x.dtype), or (norm(x) * w).to(x.dtype): sf.nn.rms_norm and layer_norm do so, and sf.from_module does"
        " it at the borders of submodules whose parameters are all exceptions (so name weight and bias alike)."
        " Exceptions are:",
        *(f"  - {line}" for line in core.first_of(own, _SHOWN)),
    ]
    return "\n".join(lines)
