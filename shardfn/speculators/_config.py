"""Shape of a speculator, and of the model that the speculator guesses for."""

import dataclasses
from typing import Any, Literal, get_args

from shardfn.core import did_you_mean, raise_all
from shardfn.inference import Decoder

Kind = Literal["mlp", "lstm"]
KINDS: tuple[str, ...] = get_args(Kind)
_SIZES = ("vocab_size", "d_model", "num_layers", "d_inner", "num_heads")


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a speculator.

    Attributes:
        kind: cell of the recurrence, "mlp" or "lstm".
        vocab_size: V, the tokens of the model.
        d_model: D, the width of the model's hidden states.
        num_layers: layers of the model.
        d_inner: E, the width of the speculator.
        num_heads: n, the number of tokens that are guessed after a token.

    Raises:
        ValueError: lists every field that is out of range.

    Example:
        >>> RecurrentConfig("mlp", vocab_size=64, d_model=32, num_layers=2, d_inner=16).num_gates
        1
    """

    kind: Kind
    vocab_size: int
    d_model: int
    num_layers: int
    d_inner: int
    num_heads: int = 3

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be an integer of at least 1, got {value!r}"
            for name in _SIZES
            if type(value := getattr(self, name)) is not int or value < 1
        ]
        if self.kind not in KINDS:
            hint = did_you_mean(str(self.kind), KINDS)
            problems.insert(0, f"kind must be one of {', '.join(KINDS)}, got {self.kind!r:.40}.{hint}")
        raise_all(ValueError, "speculators.RecurrentConfig:", problems)

    @property
    def num_gates(self) -> int:
        """Returns the projections of a cell: three gates and a candidate, or only the next state."""
        return 4 if self.kind == "lstm" else 1


def config_of(decoder: Decoder, kind: Kind, *, d_inner: int | None = None, num_heads: int = 3) -> RecurrentConfig:
    """Returns the shape of a speculator for a model.

    Args:
        decoder: decoder of the model.
        kind: see `RecurrentConfig`.
        d_inner: see `RecurrentConfig`. Default: the model's width.
        num_heads: see `RecurrentConfig`.

    Raises:
        ValueError: the decoder does not give the hidden states that the head multiplies, or a size is out of range.

    Example:
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> model = decoder(gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4))
        >>> config_of(model, "lstm").d_inner
        32
    """
    if not decoder.embeds:
        raise ValueError("speculators: this decoder does not give its hidden states. Take a batch-invariant decoder.")
    sizes = {"vocab_size": decoder.vocab, "d_model": decoder.hidden_size, "num_layers": decoder.cache.layers}
    return RecurrentConfig(
        kind, **sizes, d_inner=decoder.hidden_size if d_inner is None else d_inner, num_heads=num_heads
    )


def list_misfits(config: RecurrentConfig, decoder: Decoder) -> list[str]:
    """Returns the sizes of the model that differ from the sizes that a speculator was made for, with both values."""
    own: dict[str, Any] = {
        "vocab_size": decoder.vocab,
        "d_model": decoder.hidden_size,
        "num_layers": decoder.cache.layers,
    }
    return [
        f"{name} is {getattr(config, name)}, and the model has {value}"
        for name, value in own.items()
        if value != getattr(config, name)
    ]
