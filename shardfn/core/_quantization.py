"""Policies of codes: the codes in which each weight is kept."""

import re
from collections.abc import Mapping
from typing import Any

from ._errors import did_you_mean
from ._placement import GROUP_BYTES
from ._spec import Codes

# The codes of all weights of linear layers, or codes by regular expression. None keeps floats.
CodePolicy = Codes | Mapping[str, Codes | None] | None


def codes_of(policy: CodePolicy, name: str) -> Codes | None:
    """Returns the codes of a weight.

    The first regular expression that is found in the name counts. None if no expression is found.

    Args:
        policy: codes for all weights, or codes by regular expressions.
        name: name of the weight, such as "model.layers.0.mlp.down_proj.weight" or "blocks.0.w_down".

    Example:
        >>> policy = {"embed|head": "int8", "": "int4"}
        >>> codes_of(policy, "lm_head.weight"), codes_of(policy, "blocks.0.wq"), codes_of("int8", "blocks.0.wq")
        ('int8', 'int4', 'int8')
    """
    if policy is None or isinstance(policy, str):
        return policy
    return next((codes for pattern, codes in policy.items() if re.search(pattern, name)), None)


def check_policy(policy: str | Mapping[str, Any] | None, names: list[str], who: str) -> None:
    """Refuses a policy with unknown codes, or with a pattern that fits no weight.

    Raises:
        ValueError: names each problem.
    """
    if policy is None:
        return
    rules = {"": policy} if isinstance(policy, str) else policy
    problems = [
        f"codes={codes!r}{f' of {pattern!r}' if pattern else ''}: 'int8' or 'int4'."
        f"{did_you_mean(str(codes), GROUP_BYTES)}"
        for pattern, codes in rules.items()
        if codes is not None and codes not in GROUP_BYTES
    ]
    problems += [
        f"the pattern {pattern!r} of codes= is found in no name of a linear weight, such as {', '.join(names[:3])}"
        for pattern in rules
        if not any(re.search(pattern, name) for name in names)
    ]
    if problems:
        raise ValueError("\n  - ".join([f"{who}: codes= does not fit:", *problems]))
