"""OWL: an LSTM speculator on the state of a [SPEC] token, so that neither its inputs nor its cost see the length.

A step of the model has a [SPEC] token after the last known token and after each draft, at the position of the next
token. The [SPEC] token attends to the text and to itself, and no other token attends to it. Its embedding is the only
new leaf of the model, and is trained for the speculator while all leaves of the model are frozen. The state of the
[SPEC] token after the last accepted draft takes the place of the state that the model's head multiplies.

In training, each token of a row is followed by a [SPEC] token: x_0 S_0 x_1 S_1 ... at the positions 0 1 1 2 ... Tokens
attend to the tokens x before, and a [SPEC] token to itself, too.

B samples, S tokens of a row, D model.

References:
    OWL: Overcoming Window Length-Dependence in Speculative Decoding for Long-Context Inputs, 2025,
    https://arxiv.org/abs/2510.07535
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from shardfn import nn
from shardfn.collectives import GlobalTensor
from shardfn.core import P, PyTree, tree_leaves
from shardfn.engine import WeightedMean
from shardfn.inference import Decoder
from shardfn.models import gpt

from ._config import RecurrentConfig
from ._loss import Params, loss


@dataclasses.dataclass(frozen=True)
class _SpecTokens(nn.Mask):
    """Pairs of a row in which each token is followed by a [SPEC] token, together with a causal mask."""

    @property
    def looks_back(self) -> bool:
        return True

    def cover(self, queries: tuple[int, int], keys: tuple[int, int]) -> Any:
        return "none" if queries[0] >= queries[1] or keys[0] >= keys[1] or keys[0] >= queries[1] else "some"

    def pairs(
        self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device | None = None
    ) -> Bool[Tensor, "q k"]:
        keys_K = torch.arange(*keys, device=device)
        distance_QK = torch.arange(*queries, device=device)[:, None] - keys_K
        return ((keys_K % 2 == 0) & (distance_QK > 0)) | (distance_QK == 0)


def compute_spec_states(
    model: gpt.Config, model_params: PyTree, spec_D: Float[Tensor, " d"], tokens_BS: Int64[Tensor, "b s"]
) -> Float[Tensor, "b s d"]:
    """Returns the state of a [SPEC] token after each token, which the head would multiply.

    Args:
        model: shape of the model.
        model_params: parameters of the model, whole.
        spec_D: embedding of the [SPEC] token.
        tokens_BS: ids. S is below `max_len`.

    Raises:
        ValueError: rows are too long, or a [SPEC] token has no position in the model: with alibi, a `layout`, or
            attention over several ranks.

    Example:
        >>> from shardfn import core
        >>> model = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> tokens = torch.zeros(2, 5, dtype=torch.int64)
        >>> compute_spec_states(model, gpt.init(model, core.key(0)), torch.ones(32), tokens).shape
        torch.Size([2, 5, 32])
    """
    S, device = tokens_BS.shape[1], tokens_BS.device
    if model.layout is not None or S >= model.max_len:
        raise ValueError(
            f"compute_spec_states: rows must have fewer tokens than max_len={model.max_len}, got {S}, and"
            f" layout={model.layout} must be None."
        )
    windows = model.window if isinstance(model.window, tuple) else (model.window,) * model.num_layers
    # Tokens are two places apart, so that a window of w tokens is one of 2 w - 1 places.
    doubled = tuple(None if w is None else 2 * w - 1 for w in windows)
    wide: Any = {"window": doubled if any(doubled) else None, "layout": lambda num: _SpecTokens()}
    packed = dataclasses.replace(model, **wide, batch_invariant=False)
    both_BT = torch.stack([tokens_BS, torch.full_like(tokens_BS, model.vocab_size)], -1).flatten(1)
    at_S = torch.arange(S, device=device)
    positions_T = torch.stack([at_S, at_S + 1], -1).flatten()
    given = {**model_params, "spec": spec_D}
    return gpt.apply_and_hidden(packed, given, both_BT, positions=positions_T)[1][:, 1::2]


def owl_loss(
    model: gpt.Config, config: RecurrentConfig, model_params: PyTree, params: Params, batch: Mapping[str, Tensor]
) -> WeightedMean:
    """Returns `loss` of an LSTM on the states of [SPEC] tokens. Its gradient reaches the [SPEC] token's embedding.

    Args:
        model: shape of the model.
        config: shape of the speculator, of the kind "owl".
        model_params: parameters of the frozen model, whole.
        params: parameters as from `init`.
        batch: {"tokens": int64 [B, S]}.

    Raises:
        ValueError: see `loss` and `compute_spec_states`.

    Example:
        >>> from shardfn import core
        >>> from shardfn.speculators import init
        >>> model = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> config = RecurrentConfig("owl", vocab_size=64, d_model=32, num_layers=1, d_inner=16)
        >>> batch = {"tokens": torch.zeros(2, 9, dtype=torch.int64)}
        >>> owl_loss(model, config, gpt.init(model, core.key(0)), init(config, core.key(1)), batch).weight.item()
        10.0
    """
    hidden_BSD = compute_spec_states(model, model_params, params["spec"], batch["tokens"])
    return loss(config, params, {"hidden": hidden_BSD, "tokens": batch["tokens"]})


def add_spec_token(decoder: Decoder, params: PyTree, spec_D: Float[Tensor, " d"]) -> tuple[Decoder, PyTree]:
    """Returns a decoder and its parameters with a [SPEC] token. All other tokens have the same bits as before.

    Args:
        decoder: decoder of a `models.gpt`. Of several layouts only the first is kept.
        params: parameters of the decoder.
        spec_D: embedding of the [SPEC] token.

    Raises:
        ValueError: the decoder is of another model, or the embedding has another width.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import decoder
        >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> made, params = add_spec_token(decoder(config), gpt.init(config, core.key(0)), torch.ones(32))
        >>> made.spec_token, params["spec"].shape
        (True, torch.Size([32]))
    """
    if decoder.config is None or spec_D.shape != (decoder.hidden_size,):
        raise ValueError(
            "add_spec_token: the decoder must be of a models.gpt, and the embedding of its width"
            f" {decoder.hidden_size}, got {tuple(spec_D.shape)}. Take a speculator of this model."
        )
    leaves, made, name_weights = tree_leaves(params), decoder.pack, decoder.name_weights
    if leaves and all(isinstance(x, GlobalTensor) for x in leaves):
        spec: Any = GlobalTensor(spec_D.to(leaves[0].local.device), spec_D.shape, P(), leaves[0].mesh)
    else:
        spec = spec_D

    def drop_spec(tree: Any) -> Any:
        return {name: x for name, x in tree.items() if name != "spec"}

    wrapped = dataclasses.replace(
        decoder,
        specs={**decoder.specs, "spec": P()},
        packed={**decoder.packed, "spec": P()},
        pack=lambda tree: {**made(drop_spec(tree)), "spec": tree["spec"]},
        name_weights=lambda tree: name_weights(drop_spec(tree)),
        more_layouts={},
        spec_token=True,
    )
    return wrapped, {**params, "spec": spec}
