"""What is said where an operation of a loss gets two dtypes, because a policy has exceptions."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shardfn.core import Policy, first_of

# What torch says of the operands of a product, of attention and of a convolution.
_SAYS = re.compile(r"same dtype|expected scalar type|type .* should be the same")
_SHOWN = 6


@contextlib.contextmanager
def naming_exceptions(policy: Policy | None, leaves: Callable[[], Iterable[tuple[str, torch.dtype]]]) -> Iterator[None]:
    """Around what runs a loss under a policy: an error of two dtypes names the leaves that have one of their own.

    Args:
        policy: None is without one.
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
        told = ValueError(_text(policy, own, str(error).splitlines()[0]))
        for note in getattr(error, "__notes__", []):  # of a captured step, the line
            told.add_note(note)
        raise told from error


def _text(policy: Policy, own: Sequence[str], error: str) -> str:
    lines = [
        f"an operation of the loss got two dtypes: {error}. All is computed in {policy.compute} but for exceptions of"
        " the Policy. Cast where they meet, as in x @ w.to(x.dtype), or (norm(x) * w).to(x.dtype): sf.nn.rms_norm and"
        " layer_norm do so, and sf.from_module does it at the borders of submodules of which all parameters are"
        " exceptions (so name weight and bias alike). Exceptions are:",
        *(f"  - {line}" for line in first_of(own, _SHOWN)),
    ]
    return "\n".join(lines)
