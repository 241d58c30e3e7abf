"""Random numbers of a single call of a module: by a key, or refused.

A mask is a function of (key, number of the draw in the forward, global number of the sample, position in the sample):
the same on any number of ranks, when a part of the forward runs again, and in a captured step. Draws in an element of
an `nn.ModuleList` have the element's numbers, independent of earlier code on this rank.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.core import fold_in, named_modules, uncompiled, uniform
from shardfn.leaves import LazyLeaf
from shardfn.nn import dropout, dropout_of_rows

KEYED = (
    "apply.keyed(key, index_B)(params, ...), with the key that sharded_step(key=) gives the loss and the global numbers"
    " of this rank's rows"
)
_DRAWS_EACH = 1 << 20  # numbers of an element of a list, and of later draws
_DRAWS = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"}
    | {"multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "normal_", "uniform_", "random_"}
    | {"bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_", "gumbel_softmax", "native_dropout"}
    | {"fractional_max_pool2d", "fractional_max_pool2d_with_indices", "dropout_", "feature_dropout_", "alpha_dropout_"}
    | {"fractional_max_pool3d", "fractional_max_pool3d_with_indices", "feature_alpha_dropout_"}
)
_DRAWS_IN_TRAINING = frozenset({"rrelu", "rrelu_"})


class Draws:
    """Random numbers of a single call of a module.

    Invariant: a part that runs again starts from the `mark` of the first run.

    Attributes:
        count: number of the next draw.
    """

    def __init__(self, module: nn.Module, key: Tensor | None = None, index_B: Tensor | None = None) -> None:
        self.count = 0
        self._module, self._key, self._index_B = module, key, index_B
        self._elements = {} if key is None else _number_elements(module)
        self._begun = set[int]()
        # This rank's positions and the length of the sequence, where attention cuts the sequence. None until a model is
        # called.
        self._tokens: tuple[Sequence[tuple[int, int]], int] | None = None

    @property
    def mark(self) -> tuple[int, frozenset[int]]:
        """Returns the number of the next draw, and the elements of lists with separate numbers so far."""
        return self.count, frozenset(self._begun)

    @mark.setter
    def mark(self, mark: tuple[int, frozenset[int]]) -> None:
        self.count, self._begun = mark[0], set(mark[1])

    def forwards(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Returns the forwards of the elements of lists, with separate numbers for draws."""
        return [(sub, self._number_forward(number, sub.forward)) for number, sub in self._elements.values()]

    def _number_forward(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def numbered_forward(*args: Any, **kwargs: Any) -> Any:
            with self._enter_element(number):
                return forward(*args, **kwargs)

        return numbered_forward

    @contextlib.contextmanager
    def _enter_element(self, number: int) -> Iterator[None]:
        if number in self._begun:  # called again: numbers continue, as no mask is used twice
            yield
            return
        self._begun.add(number)
        self.count = (2 * number + 1) * _DRAWS_EACH
        try:
            yield
        finally:
            self.count = (2 * number + 2) * _DRAWS_EACH

    def skip(self, element: nn.Module) -> None:
        """Goes on with the numbers after an element of a list, without a run of the element."""
        if id(element) in self._elements:
            with self._enter_element(self._elements[id(element)][0]):
                pass

    def handler(self, name: str) -> Callable[..., Any] | None:
        """Returns the replacement of a drawing torch function, called with the function and the arguments."""
        if name in _DRAWS or name in _DRAWS_IN_TRAINING:
            return functools.partial(self.refuse, name)
        return None

    @property
    def num_rows(self) -> int | None:
        """Returns this rank's number of samples, or None without a key."""
        return None if self._index_B is None else len(self._index_B)

    def cut_tokens(self, own: Sequence[tuple[int, int]], length: int) -> None:
        """Declares that dim 1 of tensors under dropout is this rank's tokens: these positions of a sequence."""
        self._tokens = own, length

    def drop(self, what: str, x: Tensor, p: float) -> Tensor:
        """Sets some elements of `x` to zero, and multiplies the other elements by 1 / (1 - p).

        Raises:
            ValueError: there is no key, or dim 0 of `x` is not the rows, or dim 1 not this rank's tokens.
        """
        key, index_B = self.take(what, p)
        if type(x) is LazyLeaf or x.dim() == 0 or x.shape[0] != len(index_B):
            raise ValueError(
                f"{what}(p={p}) in the forward of the module drops from a tensor of shape {tuple(x.shape)}, whose dim 0"
                f" is not the {len(index_B)} row(s) that index_B numbers, so its elements belong to no sample. Put the"
                " batch first (batch_first=True), or set this dropout to 0."
            )
        if self._tokens is None or p == 1:
            return x * 0 if p == 1 else dropout(key, x, p, index_B)
        own, length = self._tokens
        num = sum(stop - start for start, stop in own)
        if x.dim() < 2 or x.shape[1] != num:
            raise ValueError(
                f"{what}(p={p}) in the forward of the module drops from a tensor of shape {tuple(x.shape)}, whose dim 1"
                f" is not this rank's {num} of {length} tokens, so its mask would depend on how they are cut. Set this"
                " dropout to 0."
            )
        return dropout_of_rows(key, x, p, index_B, own, length)

    def scales(self, what: str, like: Tensor, shape: Sequence[int], p: float) -> Tensor:
        """Returns `drop` of a tensor of ones."""
        return self.drop(what, torch.ones(tuple(shape), dtype=like.dtype, device=like.device), p)

    def take(self, what: str, p: float) -> tuple[Tensor, Tensor]:
        """Returns the key of the next draw, and the samples' numbers.

        Raises:
            ValueError: there is no key.
        """
        if self._key is None or self._index_B is None:
            raise ValueError(
                f"{what}(p={p}) in the forward of the module{self._dropout_names()} would draw from torch's generator,"
                " by which all ranks get the same mask, or masks that depend on the number of ranks. Draw by a key:"
                f" {KEYED}; or go without: module.eval(), or p=0."
            )
        key = fold_in(self._key, self.count)
        self.count += 1
        return key, self._index_B

    def _dropout_names(self) -> str:
        found = [
            n for n, m in named_modules(self._module) if getattr(m, "p", 0) and m.training and "Drop" in str(type(m))
        ]
        return f" ({', '.join(found[:3])}{' and others' if len(found) > 3 else ''})" if found else ""

    def refuse(self, name: str, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises for a random op without a key, such as `torch.rand`.

        Allowed are a single number for all samples, and ops that are random only in training if training is off.
        """
        if name in _DRAWS_IN_TRAINING and not _is_training(args, kwargs):
            return func(*args, **kwargs)
        if name == "rand" and kwargs.get("generator") is None and _is_scalar(args, kwargs):
            return self._draw_scalar(kwargs)
        raise ValueError(
            f"the forward of the module draws random numbers ({name}) without a key, so its results would depend on the"
            " number of ranks, and a recomputation in the backward would draw others. Draw outside and pass the numbers"
            " with the batch, or turn off the random parts (module.eval(), or its option in the model's"
            " configuration)."
        )

    def _draw_scalar(self, kwargs: dict[str, Any]) -> Any:
        """Returns a number for the whole batch, by which a forward chooses a path."""
        if self._key is None:
            return LazyRandom(KEYED)
        key, _ = self.take("rand", 0.0)
        return uniform(key, (), dtype=kwargs.get("dtype") or torch.get_default_dtype(), device=kwargs.get("device"))


def _number_elements(module: nn.Module) -> dict[int, tuple[int, nn.Module]]:
    """Returns each element of the lists in a module with a number, by identity."""
    lists = [sub for _, sub in named_modules(module) if isinstance(sub, nn.ModuleList)]
    unique = {id(sub): sub for one in lists for sub in map(uncompiled, one)}
    return {k: (number, sub) for number, (k, sub) in enumerate(unique.items())}


def _is_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns the argument `training` of `rrelu(input, lower, upper, training)`."""
    return bool(kwargs.get("training", args[3] if len(args) > 3 else False))


def _is_scalar(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    size = kwargs.get("size", args[0] if len(args) == 1 else args)
    return isinstance(size, list | tuple) and len(size) == 0


class LazyRandom:
    """Uniform number in [0, 1) that cannot be drawn for lack of a key.

    Models draw such a number for each layer in every configuration, and compare the number with the rate of skipped
    layers, most often 0. A comparison with the same result for all numbers in [0, 1) gives the result, for example `x <
    0`. Any other use is an error.

    Args:
        remedy: words for the way to give a key.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy

    def __lt__(self, other: Any) -> bool:
        return self._compare_known("<", other)

    def __ge__(self, other: Any) -> bool:
        return not self._compare_known(">=", other)

    def _compare_known(self, sign: str, other: Any) -> bool:
        """Returns whether the number is less than `other`, if equal for all numbers in [0, 1)."""
        if isinstance(other, int | float) and not 0 < other < 1:
            return other >= 1
        return self._raise_undrawn(f"asks whether it {sign} {other!r}")

    def __gt__(self, other: Any) -> bool:
        return self._raise_undrawn(f"asks whether it > {other!r}")

    def __le__(self, other: Any) -> bool:
        return self._raise_undrawn(f"asks whether it <= {other!r}")

    def _raise_undrawn(self, what: str) -> Any:
        raise ValueError(
            f"the forward of the module draws a number from torch's generator (rand) and {what}: ranks, or a"
            f" recomputation, would get different ones. Draw by a key: {self._remedy}; or turn off the random parts"
            " (module.eval(), or its option in the model's configuration)."
        )

    def __getattr__(self, name: str) -> Any:
        return self._raise_undrawn(f"takes its {name}")

    def __bool__(self) -> bool:
        return self._raise_undrawn("branches on it")

    def __float__(self) -> float:
        return self._raise_undrawn("takes its value")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, LazyRandom))
        return found._raise_undrawn(f"gives it to {getattr(func, '__name__', func)}")
