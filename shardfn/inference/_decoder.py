"""A model as an engine runs it."""

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from shardfn import nn
from shardfn.core import P, PyTree
from shardfn.kernels import Codes
from shardfn.models import gpt

from ._cache import CacheLayout

# From served weights, tokens [T], positions [T], rows [R] and a body of attention for each layer to logits [R, V].
Logits = Callable[[PyTree, Tensor, Tensor, Tensor, Sequence[nn.Body]], Tensor]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model as an engine runs it: pure functions, and the layouts of their arguments.

    Args:
        vocab: token ids are 0 to `vocab - 1`.
        context: the most tokens of a sequence.
        cache: the form of the cache.
        specs: compute specs of the parameters.
        logits: `logits(weights, tokens, positions, rows, bodies)`, of this rank's blocks of `weights`.
        pack: from this rank's blocks of the parameters to those of the weights that `logits` takes.
        packed: the specs of the result of `pack`, a prefix tree.
        exact: whether a token's logits have the same bits in all company.
    """

    vocab: int
    context: int
    cache: CacheLayout
    specs: PyTree
    logits: Logits
    pack: Callable[[PyTree], PyTree] = lambda params: params
    packed: PyTree = P()
    exact: bool = False


def decoder(config: gpt.Config, *, tp: str | None = None, codes: Codes | None = None) -> Decoder:
    """The decoder of a `models.gpt`.

    Args:
        config: the shape. With `exact=True`, logits are those of `gpt.apply`, bit for bit.
        tp: the mesh axis that cuts heads, features and vocabulary; it divides the number of key heads.
        codes: "int8" or "int4" keeps the weights of linear layers in these codes; logits are those of the rounded
            weights, bit for bit. Leaves that are blocks of codes already, as of a GGUF file, are not rounded again.

    Raises:
        ValueError: tokens of the model look ahead, or its masks are those of whole sequences; or codes of layers that
            are not exact.

    Example:
        >>> decoder(gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)).cache
        CacheLayout(layers=2, heads=4, head_dim=8, axis=None)
    """
    gpt.check_decodable(config)
    if codes is not None and not config.exact:
        raise ValueError(f"decoder: codes={codes!r} of layers that are not exact; take Config(exact=True).")
    flat = dataclasses.replace(config, stacked=False)

    def logits(
        weights: PyTree, tokens_T: Tensor, positions_T: Tensor, rows_R: Tensor, bodies: Sequence[nn.Body]
    ) -> Tensor:
        return gpt.decode(flat, weights, tokens_T, positions_T, rows_R, bodies, axis=tp)

    return Decoder(
        vocab=config.vocab_size,
        context=config.max_len,
        cache=CacheLayout(config.num_layers, config.kv_heads, config.head_dim, tp),
        specs=gpt.specs(config, tp=tp),
        logits=logits,
        pack=lambda params: gpt.pack(config, params, axis=tp, codes=codes),
        packed=gpt.packed_specs(config, tp=tp),
        exact=config.exact,
    )
