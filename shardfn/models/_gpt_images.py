"""Images in the GPT: features in place of the embeddings of image tokens, and the rule by which they are read.

B batch, T tokens, N image tokens of all rows, D model.
"""

import torch
from torch import Tensor

from shardfn import nn
from shardfn._torch import FakeTensor, check_tensor_all

from ._gpt_config import Config
from ._gpt_experts import Along

# A finite logit, so that the product with its probability 0 is 0.
_LOWEST = -1e9


def find_images(config: Config, tokens_BT: Tensor) -> Tensor | None:
    """Returns True for the image tokens among this rank's tokens, or None for a model without images."""
    return None if config.images is None else tokens_BT == config.images.token


def place_features(
    config: Config, x_BTD: Tensor, tokens_BT: Tensor, features_ND: Tensor | None, along: Along
) -> Tensor:
    """Returns the embeddings with features in place of image tokens, row by row in order of positions.

    Raises:
        ValueError: there are more or fewer features than image tokens, features of another width, or the model has no
            images.
    """
    images_BT = find_images(config, tokens_BT)
    if images_BT is None:
        if features_ND is not None:
            raise ValueError(
                f"image_features of shape {tuple(features_ND.shape)} need a config with images, got images=None. Give"
                " Config(images=gpt.Images(token))."
            )
        return x_BTD
    D = config.d_model
    features_ND = x_BTD.new_zeros(0, D) if features_ND is None else features_ND
    if features_ND.ndim != 2 or features_ND.shape[1] != D:
        raise ValueError(
            f"image_features must have shape [N, {D}], a row for each image token, got {tuple(features_ND.shape)}. Give"
            f" the projector {D} outputs, and flatten images and patches."
        )
    length = nn.whole_length(config.attention, tokens_BT.shape[1])
    whole_BT = nn.whole_sequence(images_BT.long(), config.attention)
    _check_counts(whole_BT, len(features_ND))
    index_BT = (whole_BT.flatten().cumsum(0) - 1).view(-1, length)
    index_BT = index_BT[:, nn.rank_positions(config.attention, tokens_BT.shape[1], tokens_BT.device)]
    # The last row is of text.
    table_ND = torch.cat([features_ND.to(x_BTD.dtype), x_BTD.new_zeros(1, D)])
    index_BT = index_BT.masked_fill(~images_BT, len(features_ND))
    placed_BTD = nn.rank_tokens(table_ND[index_BT], *along)
    own_BT1 = nn.rank_tokens(images_BT[..., None].to(x_BTD.dtype), *along) > 0
    return torch.where(own_BT1, placed_BTD, x_BTD)


def separate_images(config: Config, impl: nn.AttentionBackend, images_BT: Tensor | None) -> nn.AttentionBackend:
    """Returns the body of attention by the config's rule for images, from the rank's image tokens."""
    if config.images is None or images_BT is None or config.images.rule == "causal":
        return impl
    whole_BT = nn.whole_sequence(images_BT.long(), config.attention) > 0
    return nn.MultimodalCausal(whole_BT, impl, code_rule=config.images.rule == "code")


def hide_images(config: Config, targets_BT: Tensor) -> Tensor:
    """Returns targets without image tokens, which no model learns to predict."""
    images_BT = find_images(config, targets_BT)
    return targets_BT if images_BT is None else targets_BT.masked_fill(images_BT, -100)


def hide_logits(config: Config, logits_V: Tensor, along: Along) -> Tensor:
    """Returns the rank's logits with -1e9 for the image token, of any model with images."""
    if config.images is None:
        return logits_V
    columns_V = torch.arange(*nn.rank_range(config.vocab_size, along.axis), device=logits_V.device)
    lowest = max(_LOWEST, torch.finfo(logits_V.dtype).min / 4)
    return logits_V.masked_fill(columns_V == config.images.token, lowest)


def _check_counts(images_BT: Tensor, num: int) -> None:
    count = images_BT.sum()
    if isinstance(count, FakeTensor):  # in a graph a message is a constant
        check_tensor_all(count == num, lambda: _describe_counts("another number of", num))
    elif not count.is_meta and int(count) != num:
        raise ValueError(_describe_counts(str(int(count)), num))


def _describe_counts(count: str, num: int) -> str:
    return (
        f"a batch must have a row of image_features for each image token, got {count} image tokens and {num} rows. Give"
        " each image one image token for each of its features, by data.expand_images."
    )
