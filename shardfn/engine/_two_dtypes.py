"""Explains errors of operations that get two dtypes or two devices, by naming the leaves that have them."""

import contextlib
import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.core import Policy, PyTree, did_you_mean, first_of, tree_leaves, tree_paths

# What torch says of the operands of a product, of attention and of a convolution.
_SAYS = re.compile(r"same dtype|expected scalar type|type .* should be the same")
_SAYS_DEVICES = re.compile(r"same device|device type|different devices?|is on (cpu|cuda|meta)")
_SAYS_LIST = re.compile(r"(list|tuple) indices must be integers|must be a mapping, not (list|tuple)")
_SAYS_WRITTEN = re.compile(r"leaf Variable that requires grad is being used|functions with out=\.\.\. arg")
# The last key of a path.
_LAST_KEY = re.compile(r"\w+(?=\W*$)")
# What it says of operands whose sizes do not fit.
_SAYS_SHAPES = re.compile(
    r"shapes? .*(cannot be multiplied|invalid|mismatch)|must match the size|[Ee]xpected size|normalized_shape"
)
_SHOWN = 6


@contextlib.contextmanager
def naming_exceptions(policy: Policy | None, leaves: Callable[[], Iterable[tuple[str, torch.dtype]]]) -> Iterator[None]:
    """Around what runs a loss under a policy: an error of two dtypes names the leaves that have one of their own.

    Args:
        policy: the policy, or None.
        leaves: gives the paths of the parameters, and the dtypes in which the loss sees them; asked after errors.

    Raises:
        ValueError: in place of torch's error, which is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        # Errors of ranks and of transfers are of classes of their own.
        if policy is None or type(error) is not RuntimeError or not _SAYS.search(str(error)):
            raise
        apart = [(path, d) for path, d in leaves() if d.is_floating_point and d != policy.compute]
        own = [f"{path} is computed in {d}" for path, d in apart]
        if not own:
            raise
        raise _noted(ValueError(_text(policy, own, str(error).splitlines()[0])), error) from error


@contextlib.contextmanager
def naming_batch(params: PyTree, batch: tuple[PyTree, ...]) -> Iterator[None]:
    """Around a loss: an error of two dtypes or devices names the leaves of the batch that are unlike the parameters.

    Args:
        params: what the loss gets.
        batch: the batch, or nothing.

    Raises:
        TypeError: in place of Python's, where names are looked up in a batch that is a list.
        ValueError: in place of torch's error, which is its cause.
    """
    try:
        yield
    except TypeError as error:
        if not (batch and isinstance(batch[0], list | tuple) and _SAYS_LIST.search(str(error))):
            raise
        raise TypeError(_text_of_list(batch[0], str(error))) from error
    except KeyError as error:
        if batch and isinstance(batch[0], Mapping) and error.args and error.args[0] not in batch[0]:
            error.add_note(f"The batch has {list(batch[0])}.{did_you_mean(str(error.args[0]), map(str, batch[0]))}")
        if isinstance(params, Mapping) and error.args and error.args[0] not in params:
            known = first_of([repr(name) for name in params], _SHOWN)
            error.add_note(
                f"The parameters have {', '.join(known)}.{did_you_mean(str(error.args[0]), map(str, params))}"
            )
        raise
    except IndexError as error:
        for line in _ranges(*batch) if "index out of range" in str(error) else ():
            error.add_note(line)
        raise
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        if _SAYS_WRITTEN.search(str(error)):
            raise _noted(ValueError(_text_of_written(params, error)), error) from error
        said, own = str(error), [x for x in tree_leaves(params) if isinstance(x, Tensor) and x.is_floating_point()]
        unlike = []
        if own and batch and _SAYS.search(said):
            unlike = _other_dtypes(own[0].dtype, *batch)
        elif own and batch and _SAYS_DEVICES.search(said):
            unlike = _other_devices(own[0].device, *batch)
        if not unlike:
            if _SAYS_SHAPES.search(said):
                error.add_note(_shapes("The batch has", "batch", *batch))
                error.add_note(_shapes("The parameters have", "params", params))
            raise
        first = f"an operation of the loss failed: {said.splitlines()[0]}. The parameters are {own[0].dtype} on"
        lines = [f"{first} {own[0].device}, and of the batch", *(f"  - {x}" for x in first_of(unlike, _SHOWN))]
        raise _noted(ValueError("\n".join(lines)), error) from error


def _text_of_written(params: PyTree, error: RuntimeError) -> str:
    """Names the parameters at the line that writes to one; torch refuses the write, and does not say to which."""
    own = {
        x.untyped_storage()._cdata: path
        for path, x in zip(tree_paths(params, "params"), tree_leaves(params), strict=True)
        if type(x) is Tensor and x.requires_grad
    }
    found, where = list(own.values()), ""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        text = linecache.getline(frame.f_code.co_filename, line)
        tensors = [x for x in tree_leaves([*frame.f_locals.values()]) if type(x) is Tensor]
        here = dict.fromkeys(own[k] for x in tensors if (k := x.untyped_storage()._cdata) in own)
        if here:
            keys = {p: key[0] for p in here if (key := _LAST_KEY.search(p))}
            found = [p for p in keys if re.search(rf"\b{keys[p]}\b", text)] or list(here)
            where = f" at {frame.f_code.co_filename}:{line}, `{text.strip()}`"
            break
    lines = "\n".join(f"  - {path}" for path in first_of(found, _SHOWN))
    return (
        f"parameters are written to inside the loss{where}. Parameters are immutable there: write to a clone(), or"
        f" return the new value as aux. The state passed in is as it was. The line has:\n{lines}"
    )


def _shapes(text: str, name: str, tree: PyTree = ()) -> str:
    """The shapes of the leaves of a tree."""
    named = zip(tree_paths(tree, name), tree_leaves(tree), strict=True)
    return f"{text} {', '.join(first_of([f'{path} {tuple(x.shape)}' for path, x in named], _SHOWN))}."


def _text_of_list(batch: Sequence[Any], error: str) -> str:
    text = f"the batch is a {type(batch).__name__} of {len(batch)}, and the loss looks up names in it ({error})."
    if isinstance(batch[0], Mapping):
        return (
            f"{text} Make one dict of them, whose tensors have a row for each: sf.data.pad(length)(examples), or"
            " torch.utils.data.default_collate(examples)."
        )
    return f"{text} Pass a dict of tensors, step(state, {{'name': tensor}}), or take them by number in the loss."


def _other_dtypes(dtype: torch.dtype, batch: PyTree) -> list[str]:
    """Floats of another dtype; where there are none, integers."""
    named = list(zip(tree_paths(batch, "batch"), tree_leaves(batch), strict=True))
    others = [(path, x) for path, x in named if x.dtype != dtype]
    floats = [(path, x) for path, x in others if x.is_floating_point()]
    return [f"{path} is {x.dtype}; write {path}.to({dtype})" for path, x in floats or others]


def _ranges(batch: PyTree) -> list[str]:
    """The least and largest values of integer leaves: one may be an index that a table does not have."""
    named = list(zip(tree_paths(batch, "batch"), tree_leaves(batch), strict=True))
    of_integers = [(path, x) for path, x in named if not (x.is_floating_point() or x.is_complex()) and x.numel()]
    return [f"{path} has values from {int(x.min())} to {int(x.max())}." for path, x in of_integers]


def _other_devices(device: torch.device, batch: PyTree) -> list[str]:
    return [
        f"{path} is on {x.device}; write {path}.to(mesh.device)"
        for path, x in zip(tree_paths(batch, "batch"), tree_leaves(batch), strict=True)
        if x.device != device
    ]


def _noted(told: ValueError, error: RuntimeError) -> ValueError:
    for note in getattr(error, "__notes__", []):  # of a captured step, the line
        told.add_note(note)
    return told


def _text(policy: Policy, own: Sequence[str], error: str) -> str:
    lines = [
        f"an operation of the loss got two dtypes: {error}. All is computed in {policy.compute} but for exceptions of"
        " the Policy. Cast where they meet, as in x @ w.to(x.dtype), or (norm(x) * w).to(x.dtype): sf.nn.rms_norm and"
        " layer_norm do so, and sf.from_module does it at the borders of submodules of which all parameters are"
        " exceptions (so name weight and bias alike). Exceptions are:",
        *(f"  - {line}" for line in first_of(own, _SHOWN)),
    ]
    return "\n".join(lines)
