"""An encoder-decoder model in the form that an engine runs.

The keys of a source lie in a cache of their own: layers of cross attention, whose blocks are written once, before the
first step of a request, and shared by all sequences of that source.
"""

import hashlib
from collections.abc import Sequence

from torch import Tensor

from shardfn import nn
from shardfn.core import PyTree, named_leaves
from shardfn.models import seq2seq

from ._cache import CacheLayout
from ._decoder import Decoder, SourceEncoder
from ._layouts import Outputs


def seq2seq_decoder(config: seq2seq.Config, *, tp: str | None = None, batch_invariant: bool | None = None) -> Decoder:
    """Returns the decoder of a `models.seq2seq`. A request's prompt is the source that the encoder reads.

    Sources of a model of features have all `max_len` states of its encoder, so 2 `max_len` frames.

    Args:
        config: shape of the model.
        tp: mesh axis that cuts heads, features and vocabulary. The axis divides the number of key heads.
        batch_invariant: whether a token's logits have the same bits next to any other requests. Parameters are float32
            or float64 then. None: where the decoder's MLP allows it, which is all but "gelu_erf".

    Raises:
        ValueError: a batch-invariant decoder with a part that is not, or experts that are exchanged between ranks, or
            stacked layers.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import Engine, Sampling
        >>> config = seq2seq.Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8, max_len=16)
        >>> engine = Engine(seq2seq_decoder(config), seq2seq.init(config, core.key(0)))
        >>> [completion] = engine.generate([[5, 6, 7, 1]], Sampling(max_tokens=3, temperature=0.0))
        >>> len(completion.tokens)
        3
    """
    if stacked := [name for name, half in config.halves.items() if half.stacked]:
        raise ValueError(
            f"seq2seq_decoder: layers must be lists, got stacked=True in the {' and the '.join(stacked)}. Pass the"
            " config and the parameters of seq2seq.unstack(config, params)."
        )
    if batch_invariant is None:
        batch_invariant = config.decoder.mlp != "gelu_erf"
    served = seq2seq.replace_halves(
        config, {"decoder": seq2seq.replace_half(config.decoder, batch_invariant=batch_invariant)}
    )
    half, longest = config.decoder, config.encoder.max_len
    features = None if config.features is None else (2 * longest, config.features)

    def compute_outputs(
        weights: PyTree,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor,
        bodies: Sequence[nn.AttentionBackend],
        low: None = None,
    ) -> Outputs:
        assert low is None, "adapters are refused"
        return Outputs(seq2seq.decode_tokens(served, weights, tokens_T, positions_T, rows_R, bodies, axis=tp))

    def encode(weights: PyTree, tokens_S: Tensor) -> list[tuple[Tensor, Tensor]]:
        if features is not None:
            tokens_S = tokens_S.to(weights["encoder"]["position"].dtype)
        return seq2seq.encode_tokens(served, weights, tokens_S, axis=tp)

    layers = half.num_layers
    return Decoder(
        vocab=half.vocab_size,
        context=half.max_len,
        cache=CacheLayout(layers, half.kv_heads, half.head_dim, tp, cross_layers=layers),
        specs=seq2seq.specs(config, tp=tp),
        outputs=compute_outputs,
        pack=lambda params: seq2seq.pack(served, params, axis=tp),
        packed=seq2seq.packed_specs(served, tp=tp),
        batch_invariant=batch_invariant,
        digest=hashlib.blake2b(repr(config).encode(), digest_size=8).hexdigest(),
        name_weights=named_leaves,
        sources=SourceEncoder(longest, config.start, encode, features),
    )
