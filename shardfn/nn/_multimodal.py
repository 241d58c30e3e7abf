"""Multi-modal causal attention: text reads text and images by two softmaxes, and a token of an image reads itself.

    text row t      y = softmax over text keys <= t (V) + softmax over image keys <= t (V)
    image row t     y = v_t

Each softmax is normalised separately, so that the weights of a text row after an image sum to 2. A softmax without keys
is 0, for example before the first image. Published code lets image rows also add the softmax over text keys.

B samples, T queries, S keys, H query heads, G key heads, K head dim. Yao et al., DeepSpeed-VisualChat, 2023,
https://arxiv.org/abs/2309.14327
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shardfn.kernels import Given

from ._attention import attention
from ._attention_backends import DENSE, AttentionBackend, Local, Ulysses
from ._dropout import PairDropout
from ._masks import Cover, Mask, Span
from ._online import OnlineScores, Rows


@dataclasses.dataclass(frozen=True, eq=False)
class Modality(Mask):
    """Pairs of a text row and a key of one kind: text, or images.

    Attributes:
        images_BT: True for tokens of images of the whole sequence.
        of_images: whether the keys are tokens of images.
        image_rows: whether image rows count, too.

    Example:
        >>> Modality(torch.tensor([[True, False]]), of_images=True).pairs((0, 2), (0, 2)).int().tolist()
        [[[[0, 0], [1, 0]]]]
    """

    images_BT: Bool[Tensor, "b t"]
    of_images: bool
    image_rows: bool = False

    @property
    def branch(self) -> str:
        """Returns the branch of `kernels.ragged_attention`. There image rows may also read themselves."""
        return "images" if self.of_images else "text_of_all" if self.image_rows else "text"

    @property
    def lead(self) -> tuple[int, int]:
        return self.images_BT.shape[0], 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.images_BT,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Mask:
        return dataclasses.replace(self, images_BT=tensors[0])

    def cover(self, queries: Span, keys: Span) -> Cover:
        return "some" if queries[0] < queries[1] and keys[0] < keys[1] else "none"

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        rows_BQ, keys_BK = self._find_rows(queries), self._find_keys(keys)
        return (rows_BQ[:, :, None] & keys_BK[:, None]).unsqueeze(1).to(device)

    def make_data(self, queries: Span, keys: Span) -> Given:
        return Given(self._find_rows(queries).long() - 1, 2 * self._find_keys(keys).long() - 2)

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        own = self.images_BT.shape[-1]
        problem = f"images_BT of {own} tokens for {queries} queries and {keys} keys: give a bool for each token"
        return [] if own == queries == keys else [problem + " of the whole sequence"]

    def _find_rows(self, queries: Span) -> Tensor:
        images_BQ = self.images_BT[:, slice(*queries)]
        return torch.ones_like(images_BQ) if self.image_rows else ~images_BQ

    def _find_keys(self, keys: Span) -> Tensor:
        images_BK = self.images_BT[:, slice(*keys)]
        return images_BK if self.of_images else ~images_BK


@dataclasses.dataclass(frozen=True, eq=False)
class MultimodalCausal(Local):
    """Multi-modal causal attention by another body, for example `MultimodalCausal(images_BT, Blockwise())`.

    The mask of the call, such as `Causal()`, counts for both softmaxes. `Ulysses` exchanges heads once for both. With
    `Ring`, keys and values go round twice.

    Attributes:
        images_BT: True for tokens of images of the whole sequence, in the order of positions.
        inner: body of each softmax.
        code_rule: whether image rows also read the text before them, as in the published code.

    Example:
        >>> from shardfn import nn
        >>> x, images_BT = torch.randn(1, 4, 2, 8), torch.tensor([[False, True, True, False]])
        >>> y = nn.attention(x, x, x, impl=MultimodalCausal(images_BT))
        >>> torch.equal(y[:, 1:3], x[:, 1:3])
        True
    """

    images_BT: Bool[Tensor, "b t"]
    inner: AttentionBackend = DENSE
    code_rule: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes along which tokens are cut, major to minor."""
        return self.inner.axes

    @property
    def lengths(self) -> frozenset[int]:
        """Returns the lengths of the whole sequence that the inner bodies were given."""
        return self.inner.lengths

    @property
    def shuffled_axes(self) -> tuple[str, ...]:
        """Returns the axes over which tokens are dealt out of order, major to minor."""
        return self.inner.shuffled_axes

    def rows(self, length: int) -> Rows:
        """Returns the positions of the rank's tokens of a sequence."""
        return self.inner.rows(length)

    def order(self, length: int, num_ranks: Sequence[int]) -> Rows:
        """Returns the positions of all tokens, in the order before the cut."""
        return self.inner.order(length, num_ranks)

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""
        if isinstance(self.inner, Ulysses):
            body = dataclasses.replace(self.inner, inner=dataclasses.replace(self, inner=self.inner.inner))
            return body.attend(q_BTHK, k_BSGK, v_BSGK, how, length)
        self._check(q_BTHK, k_BSGK, how, length)

        def attend_kind(**kind: bool) -> Tensor:
            own = how._replace(mask=how.mask & Modality(self.images_BT, **kind))
            return self.inner.attend(q_BTHK, k_BSGK, v_BSGK, own, length)

        y_BTHK, z_BTHK = attend_kind(of_images=False, image_rows=self.code_rule), attend_kind(of_images=True)
        device, repeats = q_BTHK.device, q_BTHK.shape[2] // max(k_BSGK.shape[2], 1)
        own_BT = torch.cat([self.images_BT[:, a:b] for a, b in (*self.inner.rows(length), (0, 0))], 1).to(device)
        return y_BTHK + torch.where(own_BT[..., None, None], v_BSGK.repeat_interleave(repeats, 2), z_BTHK)

    def _check(self, q_BTHK: Tensor, k_BSGK: Tensor, how: OnlineScores, length: int) -> None:
        own, needed = tuple(self.images_BT.shape), (q_BTHK.shape[0], length)
        if own != needed or q_BTHK.shape[1] != k_BSGK.shape[1]:
            raise ValueError(
                f"MultimodalCausal: images_BT must be {needed}, a bool for each token of the whole sequence, got {own}"
                f" for {q_BTHK.shape[1]} queries and {k_BSGK.shape[1]} keys of this rank. Gather it by"
                " nn.whole_sequence."
            )
        if how.sinks_H is not None or any(isinstance(m, PairDropout) for m in how.mask.parts):
            part = "sinks" if how.sinks_H is not None else "PairDropout"
            raise ValueError(
                f"MultimodalCausal: a token of an image must have the weight 1 of itself, got {part}. Leave it out."
            )
        if not how.mask.looks_back:
            raise ValueError(f"MultimodalCausal: the mask must look back, got {how.mask}. Take Causal() or Window(n).")


def multimodal_attention(
    q_BTHK: Float[Tensor, "b t h k"],
    k_BTGK: Float[Tensor, "b t g k"],
    v_BTGV: Float[Tensor, "b t g v"],
    images_BT: Bool[Tensor, "b s"],
    *,
    code_rule: bool = False,
    impl: AttentionBackend = DENSE,
    **options: Any,
) -> Float[Tensor, "b t h v"]:
    """Returns multi-modal causal attention: the sum of two softmaxes for text, and v itself for tokens of images.

    Rows of samples without an image have the bits of causal attention by the same body and mask.

    Args:
        q_BTHK: queries. Where `impl` cuts the sequence, the rank's queries.
        k_BTGK: keys.
        v_BTGV: values.
        images_BT: True for tokens of images, of the whole sequence in the order of positions.
        code_rule: whether image rows also read the text before them, as in the published code.
        impl: body of each softmax, as of `attention`.
        **options: `mask`, `scale`, `slopes_H` and `softcap` of `attention`. The mask looks back.

    Raises:
        ValueError: `images_BT` has another number of samples or tokens, the mask looks ahead or drops pairs, or there
            are sinks, or as `attention`.

    Example:
        >>> q, kv = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
        >>> multimodal_attention(q, kv, kv, torch.arange(5).expand(2, -1) < 3).shape
        torch.Size([2, 5, 4, 8])

    References:
        Yao et al., DeepSpeed-VisualChat, 2023, https://arxiv.org/abs/2309.14327
    """
    return attention(q_BTHK, k_BTGK, v_BTGV, impl=MultimodalCausal(images_BT, impl, code_rule), **options)
