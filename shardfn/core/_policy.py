"""`Policy`: the precision in which each part of a training step is kept, computed, sent and added up.

    keep         compute        send           add up        update
    param -----> compute -----> reduce ------> accum ------> master (then cast to param)

A step without a policy uses each leaf's dtype for everything. Micikevicius et al., Mixed Precision Training, 2017,
https://arxiv.org/abs/1710.03740
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from ._texts import did_you_mean, raise_all

_NO_DTYPES = ("exceptions", "products")
_ALLOWED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Dtypes(NamedTuple):
    """Dtypes of a leaf.

    Attributes:
        param: dtype of the leaf between steps.
        master: dtype in the optimizer's update. If wider than `param`, a copy is in the optimizer's state.
        compute: dtype in the loss, and in gathers.
        reduce: dtype of the gradient on the wire.
        accum: dtype in which the gradient is added up and handed to the optimizer.
    """

    param: torch.dtype
    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    accum: torch.dtype

    @staticmethod
    def plain(dtype: torch.dtype) -> "Dtypes":
        """Returns a single dtype for everything.

        Example:
            >>> Dtypes.plain(torch.float32).reduce
            torch.float32
        """
        return Dtypes(dtype, dtype, dtype, dtype, dtype)


Rounding = Literal["int8", "int4", "fp8", "mxfp8"]


@dataclasses.dataclass(frozen=True)
class RoundingPolicy:
    """Rounding of the operands of products in layers: training in 8 bits, or quantization-aware training.

    `nn.round_operand` defines the values. A step equals a step on a single device with the same rounded operands.

    Attributes:
        weights: weights of layers. "int8" and "int4" are the codes that `inference.decoder(quantization=)` serves, so
            that a model trained with them is served with the values that it was trained with.
        inputs: inputs of layers, in the forward.
        grads: gradients of outputs, in the product for the gradient of inputs. The gradient of weights is not rounded.

    Raises:
        ValueError: an unknown rounding, or "int4" of inputs or gradients, or nothing is rounded.

    Example:
        >>> Policy(products=RoundingPolicy("mxfp8", "mxfp8", "mxfp8")).products.grads
        'mxfp8'
        >>> Policy(products=RoundingPolicy(weights="int4")).products.inputs is None  # quantization-aware training
        True

    References:
        Wortsman et al., Stable and Low-Precision Training (SwitchBack), 2023, https://arxiv.org/abs/2304.13013
        Jacob et al., Quantization-Aware Training, 2017, https://arxiv.org/abs/1712.05877
    """

    weights: Rounding | None = None
    inputs: Rounding | None = None
    grads: Rounding | None = None

    def __post_init__(self) -> None:
        given = dataclasses.asdict(self)
        known = {"weights": get_args(Rounding)} | dict.fromkeys(("inputs", "grads"), ("int8", "fp8", "mxfp8"))
        raise_all(
            ValueError,
            "RoundingPolicy:",
            [
                f"{name} must be None or one of {', '.join(map(repr, known[name]))}, got {x!r}"
                for name, x in given.items()
                if x is not None and x not in known[name]
            ],
        )
        if not any(given.values()):
            raise ValueError("RoundingPolicy: at least one operand must be rounded, got None for all.")


@dataclasses.dataclass(frozen=True)
class Policy:
    """Precision of each part of a training step.

    A policy applies to floating-point leaves. Integers, bools and complex numbers keep their dtype.

    Attributes:
        param: the dtype of parameters between steps.
        compute: the dtype in which the loss sees parameters and batch. Stage-3 leaves are cast first and then gathered.
        reduce: the dtype in which gradients are sent between ranks.
        accum: the dtype in which reduced gradients are summed over microbatches and passed to the optimizer.
        output: the dtype of the loss value.
        master: the dtype of a copy of the parameters in the optimizer's state, if `param` is narrower. None means no
            copy: updates smaller than half a unit in the last place of `param` are then lost.
        exceptions: pattern -> dtype. Leaves with the pattern in the path (by `re.search`) are stored and computed in
            the dtype. The last match counts. A path looks like `params['blocks'][0]['norm_w']`.
        products: rounding of the operands of products in the layers of `nn`. None rounds nothing.

    Raises:
        TypeError: `exceptions` is not a dict.
        ValueError: a dtype is not bfloat16, float16, float32 or float64, or a pattern is not a regular expression.

    Example:
        >>> Policy(compute=torch.bfloat16).param
        torch.float32
        >>> Policy.bf16(exceptions={"norm": torch.float32}).dtypes("params['norm_w']", torch.float32).compute
        torch.float32

    References:
        Micikevicius et al., Mixed Precision Training, 2017, https://arxiv.org/abs/1710.03740
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    accum: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    _: dataclasses.KW_ONLY
    master: torch.dtype | None = torch.float32
    exceptions: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict)
    products: RoundingPolicy | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.exceptions, Mapping):
            raise TypeError(
                f"Policy(exceptions={self.exceptions!r}): a dict from patterns to dtypes, as in"
                " exceptions={'norm': torch.float32}."
            )
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NO_DTYPES}
        named |= {f"exceptions[{p!r}]": d for p, d in self.exceptions.items()}
        bad = [f"{n} is {d!r}" for n, d in named.items() if d not in _ALLOWED and not (n == "master" and d is None)]
        raise_all(ValueError, "a Policy's dtypes are bfloat16, float16, float32 and float64:", bad)
        for pattern in self.exceptions:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"the exception {pattern!r} is not a regular expression: {error}.") from error

    def __hash__(self) -> int:
        plain = (getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "exceptions")
        return hash((*plain, frozenset(self.exceptions.items())))

    @staticmethod
    def bf16(**changes: Any) -> "Policy":
        """Returns a policy of bfloat16 parameters and arithmetic. Gradients are sent, summed and applied in float32.

        Args:
            **changes: fields that shall differ.

        Example:
            >>> Policy.bf16(reduce=torch.bfloat16).accum
            torch.float32
        """
        return dataclasses.replace(Policy(torch.bfloat16, torch.bfloat16), **changes)

    @staticmethod
    def fp16(**changes: Any) -> "Policy":
        """Returns a policy as `bf16`, in float16. Use a loss scale.

        Args:
            **changes: fields that shall differ.

        Example:
            >>> Policy.fp16().param
            torch.float16
        """
        return dataclasses.replace(Policy(torch.float16, torch.float16), **changes)

    @staticmethod
    def full(**changes: Any) -> "Policy":
        """Returns a policy of float32 for everything.

        Args:
            **changes: fields that shall differ.

        Example:
            >>> Policy.full() == Policy()
            True
        """
        return dataclasses.replace(Policy(), **changes)

    def dtypes(self, path: str, dtype: torch.dtype) -> Dtypes:
        """Returns the dtypes of one leaf.

        Args:
            path: path, as errors print it.
            dtype: dtype of the leaf. Counts only if not of floating point.
        """
        if not dtype.is_floating_point:
            return Dtypes.plain(dtype)
        own = [d for pattern, d in self.exceptions.items() if re.search(pattern, path)]
        param, compute = (own[-1], own[-1]) if own else (self.param, self.compute)
        wider = self.master is not None and self.master.itemsize > param.itemsize
        return Dtypes(param, self.master if wider and self.master else param, compute, self.reduce, self.accum)

    @property
    def keeps_master(self) -> bool:
        """Returns whether the optimizer keeps wider copies of some leaves.

        Example:
            >>> Policy.bf16().keeps_master, Policy.full().keeps_master
            (True, False)
        """
        kept = (self.param, *self.exceptions.values())
        return self.master is not None and any(d.itemsize < self.master.itemsize for d in kept)

    def check(self, paths: Sequence[str]) -> None:
        """Refuses exceptions that match no leaf.

        Raises:
            ValueError: a pattern is found in no path. All are listed.

        Example:
            >>> Policy.bf16(exceptions={"norm": torch.float32}).check(["params['norm_w']"])
        """
        unused = [p for p in self.exceptions if not any(re.search(p, path) for path in paths)]
        # The names within the quotes of a path: a whole path, with brackets, is not a pattern that matches the path.
        names = dict.fromkeys(name for path in paths for name in re.findall(r"'([^']*)'", path))
        shown = ", ".join(paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
        raise_all(
            ValueError,
            f"exceptions of the policy match no leaf of {shown}:",
            [
                f"{p!r}: drop it, or write a pattern that re.search finds in a path.{did_you_mean(p, names)}"
                for p in unused
            ],
        )
