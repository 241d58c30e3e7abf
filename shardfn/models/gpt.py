"""A transformer of one stack: GPT-2, Llama, Gemma and, with `causal=False`, BERT's encoder are settings of a `Config`.

B batch, T tokens, D model, H heads, G key and value heads, K head dim, F ffn, V vocabulary.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019
Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023, https://arxiv.org/abs/2302.13971
"""

import dataclasses
from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int, Int64
from torch import Tensor

from shardfn import nn
from shardfn.collectives import all_gather_invariant
from shardfn.core import Axes, fold_in, raise_all

from ._gpt_block import Along as _Along
from ._gpt_block import Seen as Seen
from ._gpt_block import Wrap as Wrap
from ._gpt_config import Config as Config
from ._gpt_config import Images as Images
from ._gpt_decode import EXPERT_BIAS as EXPERT_BIAS
from ._gpt_decode import Decoded as Decoded
from ._gpt_decode import TokenParts as TokenParts
from ._gpt_decode import check_decodable as check_decodable
from ._gpt_decode import decode as decode
from ._gpt_decode import linear_sizes as linear_sizes
from ._gpt_decode import pack as pack
from ._gpt_decode import packed_specs as packed_specs
from ._gpt_decode import served_specs as served_specs
from ._gpt_forward import compute_hidden as _compute_hidden
from ._gpt_forward import compute_logits as _compute_logits
from ._gpt_forward import sample_tokens as _sample_tokens
from ._gpt_forward import take_rows as _take_rows
from ._gpt_leaves import Params as Params
from ._gpt_leaves import init as init
from ._gpt_leaves import leaf_shapes as leaf_shapes
from ._gpt_leaves import num_params as num_params
from ._gpt_leaves import specs as specs
from ._gpt_leaves import stack_blocks as stack_blocks
from ._gpt_leaves import unstack_blocks as unstack_blocks
from ._gpt_loss import LogitsLoss as LogitsLoss
from ._gpt_loss import cut_sequences as cut_sequences
from ._gpt_loss import loss as loss
from ._gpt_loss import loss_and_seen as loss_and_seen
from ._gpt_loss import shifted as shifted
from ._gpt_stages import Stages as Stages
from ._gpt_stages import stages as stages
from ._gpt_stages import stages_and_seen as stages_and_seen
from ._gpt_swift import add_swift_kv as add_swift_kv
from ._gpt_swift import drop_swift_kv as drop_swift_kv
from ._gpt_swift import swift_trainable as swift_trainable
from ._latent import Latent as Latent
from ._swift import Swift as Swift


def apply(
    config: Config,
    params: Params,
    tokens_BT: Int64[Tensor, "b t"],
    *,
    key: Int64[Tensor, "2"] | None = None,
    index_B: Int64[Tensor, " b"] | None = None,
    wrap: Wrap = lambda inner: inner,
    axis: Axes = None,
    sequence: bool = False,
    chosen: Int[Tensor, "b t m k"] | None = None,
    bias: Float[Tensor, "m e"] | Sequence[Tensor] | None = None,
    at: Int[Tensor, "b s"] | None = None,
    image_features: Float[Tensor, "n d"] | None = None,
) -> Float[Tensor, "b _ v"]:
    """Returns logits of the next token at each position, or at some positions.

    x = embed[tokens] (+ position); for each block x += attn(norm(x)), x += mlp(norm(x)); logits = norm(x) head^T.

    Args:
        config: shape.
        params: parameters as from `init`.
        tokens_BT: ids, T <= max_len. Where `config.attention` cuts the sequence, this rank's ids.
        key: key that turns dropout on.
        index_B: global numbers of the samples, needed where dropout is on.
        wrap: function applied to the block function, as in `wrap=remat` (activation checkpointing).
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.
        sequence: whether between blocks each rank of `axis` has only some tokens (Megatron's sequence parallelism).
        chosen: experts of each token in each layer with experts, in place of the routers' choices, such as the experts
            of `rl.Rollout.expert_ids`. -1 is a choice without an expert. The routers' weights and gradients are as
            before.
        bias: biases of the experts in each of the m layers with experts, used only in the choice: `model_state["bias"]`
            of `models.moe`, which a config with `bias_rate` needs.
        at: positions of each row whose logits are returned, such as `rl.completion_positions`. The head multiplies only
            them. None is all positions.
        image_features: embeddings of the image tokens, row by row in order of positions, with `Config(images=)`. Ranks
            that cut the sequence pass all of them.

    Returns:
        [B, T, V], or [B, S, V] with `at`: all logits, or this rank's part of V, which `all_gather_invariant(logits,
        axis, dim=-1, size=V)` joins.

    Raises:
        ValueError: too long a sequence, dropout without `index_B`, leaves that are not cut along `axis`, choices or
            biases of other experts, no biases where experts have biases, `at` where a rank has only some of the tokens,
            or other numbers of image tokens and features.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> apply(config, init(config, core.key(0)), torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 64])
    """
    along = _Along(axis, tokens_BT.shape[1] if sequence else None)
    batch = {"tokens": tokens_BT, "index": index_B, "image_features": image_features}
    x_BTD, _ = _compute_hidden(config, params, batch, key, wrap, along, bias=bias, chosen=chosen)
    return _compute_logits(config, params, x_BTD if at is None else _take_rows(config, along, x_BTD, at), along)


def apply_and_hidden(
    config: Config,
    params: Params,
    tokens_BT: Int64[Tensor, "b t"],
    *,
    wrap: Wrap = lambda inner: inner,
    axis: Axes = None,
    positions: Int64[Tensor, " t"] | None = None,
) -> tuple[Float[Tensor, "b t v"], Float[Tensor, "b t d"]]:
    """Returns the logits of `apply`, and the states that the head multiplies, for losses of both.

    Args:
        config: see `apply`.
        params: see `apply`.
        tokens_BT: see `apply`.
        wrap: see `apply`.
        axis: see `apply`.
        positions: position of each token in its text, for several texts or places in a row, packed under a `layout`.
            Windows count places of the row. None is 0, 1, 2, ...

    Raises:
        ValueError: as `apply`, or `positions` with alibi, or of another number.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> apply_and_hidden(config, init(config, core.key(0)), torch.zeros(2, 5, dtype=torch.int64))[1].shape
        torch.Size([2, 5, 32])
    """
    along = _Along(axis)
    _check_positions(config, tokens_BT.shape[1], positions)
    batch = {"tokens": tokens_BT, "positions": positions}
    x_BTD, _ = _compute_hidden(config, params, batch, wrap=wrap, along=along)
    return _compute_logits(config, params, x_BTD, along), x_BTD


def choices(
    config: Config,
    params: Params,
    tokens_BT: Int64[Tensor, "b t"],
    *,
    axis: Axes = None,
    chosen: Int[Tensor, "b t m k"] | None = None,
    bias: Float[Tensor, "m e"] | Sequence[Tensor] | None = None,
) -> Int64[Tensor, "b t m k"]:
    """Returns the experts of each token in each of the m layers with experts, as `apply` uses them.

    Args:
        config: shape, with experts.
        params: see `apply`.
        tokens_BT: see `apply`.
        axis: see `apply`.
        chosen: see `apply`.
        bias: see `apply`.

    Raises:
        ValueError: as `apply`, or the model has no experts.

    Example:
        >>> import shardfn.core as core
        >>> from shardfn.models.moe import mixtral_like
        >>> config = mixtral_like(vocab_size=64, num_layers=3, d_model=32, num_heads=8, d_ff=16)
        >>> choices(config, init(config, core.key(0)), torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 3, 2])
    """
    _, seen = _compute_hidden(config, params, {"tokens": tokens_BT}, along=_Along(axis), bias=bias, chosen=chosen)
    if seen is None:
        raise ValueError(
            "choices: the config has experts=None, so tokens choose none. Give it models.moe.Experts(...)."
        )
    B, T = tokens_BT.shape
    return rearrange(seen.experts, "m (b t) k -> b t m k", b=B, t=T)


@torch.no_grad()
def generate(
    config: Config,
    params: Params,
    prompt_BT: Int64[Tensor, "b t"],
    num_tokens: int,
    key: Int64[Tensor, "2"],
    temperature: float = 1.0,
    axis: Axes = None,
    bias: Float[Tensor, "m e"] | Sequence[Tensor] | None = None,
    image_features: Float[Tensor, "n d"] | None = None,
) -> Int64[Tensor, "b s"]:
    """Samples a continuation: argmax(logits / temperature + Gumbel noise), token by token.

    Every step runs the model on the last `max_len` tokens. A `layout` must take any number of tokens (`padded=True`).
    The noise is a function of (key, step), so all ranks that hold the same prompt sample the same tokens.

    Args:
        config: shape.
        params: parameters as from `init`.
        prompt_BT: prompts of at least one token.
        num_tokens: number of tokens to append.
        key: key of the noise.
        temperature: divisor of logits. 0 takes the likeliest token.
        axis: mesh axes along which the leaves are cut, as in `apply`.
        bias: see `apply`.
        image_features: embeddings of the prompt's image tokens, as of `apply`. No image token is sampled then, and all
            tokens must fit `max_len`.

    Returns:
        The prompt and its continuation, [B, T + num_tokens].

    Raises:
        ValueError: an empty prompt, a negative temperature, a model that looks ahead, or images and more tokens than
            `max_len`.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> params, prompt_BT = init(config, core.key(0)), torch.zeros(2, 1, dtype=torch.int64)
        >>> generate(config, params, prompt_BT, 3, core.key(1)).shape
        torch.Size([2, 4])
    """
    if prompt_BT.shape[1] == 0 or temperature < 0:
        raise ValueError(
            f"generate: prompt of shape {tuple(prompt_BT.shape)}, temperature {temperature}: give at least one token"
            " (for example a start token) and a temperature of 0 or more."
        )
    if not config.causal:
        raise ValueError("generate: a model with causal=False sees later tokens, and cannot continue with a text.")
    if image_features is not None and prompt_BT.shape[1] + num_tokens - 1 > config.max_len:
        raise ValueError(
            f"generate: tokens after images must be at most max_len={config.max_len}, got {prompt_BT.shape[1]} +"
            f" {num_tokens}. Shorten the prompt, or generate fewer tokens."
        )
    tokens_BT, config = prompt_BT, dataclasses.replace(config, attention=nn.Dense())
    for step in range(num_tokens):
        x_BTD, _ = _compute_hidden(
            config,
            params,
            {"tokens": tokens_BT[:, -config.max_len :], "image_features": image_features},
            along=_Along(axis),
            bias=bias,
        )
        own_BV = _compute_logits(config, params, x_BTD[:, -1], _Along(axis))
        logits_BV = all_gather_invariant(own_BV, axis, dim=-1, size=config.vocab_size)
        next_B = _sample_tokens(logits_BV.float(), fold_in(key, step), temperature)
        tokens_BT = torch.cat((tokens_BT, next_B[:, None]), dim=1)
    return tokens_BT


def _check_positions(config: Config, num: int, positions_T: Tensor | None) -> None:
    if positions_T is None:
        return
    problems = ["the biases of alibi are of places in the row"] if config.position == "alibi" else []
    if config.attention.axes:
        problems.append(f"{config.attention} cuts a row by its places")
    if positions_T.shape != (num,):
        problems.append(f"there must be {num} positions, got a tensor of shape {tuple(positions_T.shape)}")
    raise_all(ValueError, "apply_and_hidden(positions=):", problems)
