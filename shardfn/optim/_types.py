"""Types of the values that flow through an optimizer."""

from collections.abc import Callable
from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor

from shardfn.core import PyTree

Params = PyTree
Updates = PyTree
OptState = PyTree
Specs = PyTree
Mask = PyTree | Callable[[Params], PyTree]
# The smallest part of a tree that a rule can step separately.
Grain = Literal["element", "leaf", "tree"]
# A user-defined rule: `(init, update)`, the two fields of optax's GradientTransformation.
Pair = tuple[Callable[..., Any], Callable[..., Any]]
Count = int | Int[Tensor, ""]
Schedule = Callable[[Any], Float[Tensor, ""]]
# A hyperparameter: a tensor where a transform is to map or differentiate over it.
Number = float | int | Float[Tensor, ""]
LearningRate = float | int | Float[Tensor, ""] | Schedule
