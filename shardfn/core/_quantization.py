"""Quantization policies: the quantization of each weight."""

import re
from collections.abc import Mapping
from typing import Any

from ._errors import did_you_mean
from ._placement import GROUP_BYTES
from ._spec import Quantization

# The quantization of all weights of linear layers, or by regular expression. None keeps floats.
QuantizationPolicy = Quantization | Mapping[str, Quantization | None] | None


def find_quantization(policy: QuantizationPolicy, name: str) -> Quantization | None:
    """Returns the quantization of a weight.

    The first regular expression that is found in the name counts. None if no expression is found.

    Args:
        policy: quantization of all weights, or by regular expressions.
        name: name of the weight, such as "model.layers.0.mlp.down_proj.weight" or "blocks.0.w_down".

    Example:
        >>> policy = {"embed|head": "int8", "": "int4"}
        >>> find_quantization(policy, "lm_head.weight"), find_quantization(policy, "blocks.0.wq")
        ('int8', 'int4')
    """
    if policy is None or isinstance(policy, str):
        return policy
    return next((quantization for pattern, quantization in policy.items() if re.search(pattern, name)), None)


def check_policy(policy: str | Mapping[str, Any] | None, names: list[str], who: str) -> None:
    """Refuses a policy with unknown names, or with a pattern that fits no weight.

    Raises:
        ValueError: names each problem.
    """
    if policy is None:
        return
    rules = {"": policy} if isinstance(policy, str) else policy
    problems = [
        f"quantization={quantization!r}{f' of {pattern!r}' if pattern else ''}: 'int8' or 'int4'."
        f"{did_you_mean(str(quantization), GROUP_BYTES)}"
        for pattern, quantization in rules.items()
        if quantization is not None and quantization not in GROUP_BYTES
    ]
    problems += [
        f"the pattern {pattern!r} of quantization= matches no name of a linear weight, such as {', '.join(names[:3])}"
        for pattern in rules
        if not any(re.search(pattern, name) for name in names)
    ]
    if problems:
        raise ValueError("\n  - ".join([f"{who}: quantization= does not fit:", *problems]))
