"""Image tokens of a prompt: their features, the keys of their blocks, and the positions that each token reads.

N image tokens, D model, P tokens of a prompt.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int32
from torch import Tensor

Grid = tuple[int, int]  # rows and columns of an image's features


class ImageRule(NamedTuple):
    """Rule of a decoder's image tokens.

    Attributes:
        token: id of the token at each place of an image's features.
        rule: see `gpt.Images`, or "whole", in which a token of an image also reads all other tokens of the image, as in
            Gemma 3. Image tokens without text between are one image there.
        grid: whether a token has three rotary positions, of time, row and column, as in Qwen2-VL.
    """

    token: int
    rule: Literal["separate", "code", "causal", "whole"] = "causal"
    grid: bool = False


@dataclass(frozen=True, repr=False)
class RequestImages:
    """Images of a prompt.

    Attributes:
        digest: digest of all other attributes.
        features: features of the image tokens, float32 [N, D].
        keys: tokens of the prompt as the keys of blocks have them: in place of an image token, a number of its image.
        rows: True for the image tokens, bool [P].
        words: bits of `rows`, see `kernels.ragged_attention`. int32.
        shifts: differences of the three rotary positions from a token's position, int32 [3, P + 1], or None. The last
            are of drawn tokens.
        ahead: number of tokens after a token that the token reads, int32 [P], or None.
    """

    digest: bytes
    features: Float32[Tensor, "n d"] = field(compare=False)
    keys: array = field(compare=False)
    rows: Bool[np.ndarray, " p"] = field(compare=False)
    words: Int32[np.ndarray, " w"] = field(compare=False)
    shifts: Int32[np.ndarray, "3 p1"] | None = field(default=None, compare=False)
    ahead: Int32[np.ndarray, " p"] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"RequestImages({self.digest!r})"

    def bound_chunk(self, start: int, count: int) -> int:
        """Returns the number of tokens of a chunk, without the first tokens of an image that the chunk would cut."""
        end = start + count
        if self.ahead is None or end > len(self.ahead) or not self.ahead[end - 1]:
            return count
        return max(0, int(np.nonzero(self.ahead[:end] == 0)[0].max(initial=-1)) + 1 - start)

    @property
    def is_text(self) -> bool:
        """Returns whether the features are embeddings of a whole prompt, without an image."""
        return not self.words.any()

    @property
    def longest(self) -> int:
        """Returns the number of tokens that one step must have."""
        return 1 if self.ahead is None else int(self.ahead.max()) + 1


def place_images(
    prompt: Sequence[int], features: Float32[Tensor, "n d"], rule: ImageRule, grids: Sequence[Grid] | None = None
) -> RequestImages | None:
    """Returns the images of a prompt, or None for a prompt of text.

    Args:
        prompt: token ids.
        features: features of the image tokens.
        rule: rule of the decoder.
        grids: rows and columns of each image. Only where the rule wants grids.

    Raises:
        ValueError: there are other numbers of image tokens than of features, or grids, or tokens in grids.

    Example:
        >>> found = place_images([5, 9, 9, 6], torch.zeros(2, 3), ImageRule(9, grid=True), [(1, 2)])
        >>> found.shifts.tolist()
        [[0, 0, -1, 0, 0], [0, 0, -1, 0, 0], [0, 0, 0, 0, 0]]
    """
    rows = np.array(prompt, dtype=np.int64) == rule.token
    if int(rows.sum()) != len(features):
        raise ValueError(
            f"image_features must have a row for each of {rows.sum()} image tokens of the prompt, got {len(features)}."
            f" The prompt has the image token {rule.token} once for each feature."
        )
    if not len(features):
        return None
    data, width = features.numpy(), features.shape[1] * features.element_size()
    begins = np.nonzero(rows)[0]
    spans = _find_spans(begins, rule, grids)
    keys, raw = np.array(prompt, dtype=np.int64), data.tobytes()
    for first, (h, w) in spans:
        # A block's keys and values depend on the whole image, where its tokens read one another.
        own = raw[first * width : (first + h * w) * width] + repr((h, w)).encode()
        stem = hashlib.blake2b(own, digest_size=8).digest()
        for n in range(first, first + h * w):
            name = hashlib.blake2b(stem + (n - first).to_bytes(8, "little"), digest_size=8).digest()
            keys[begins[n]] = int.from_bytes(name, "little", signed=True)
    words = np.packbits(np.pad(rows, (0, -len(rows) % 32)), bitorder="little").view(np.int32)
    more = {
        "shifts": _find_shifts(len(prompt), begins, spans) if rule.grid else None,
        "ahead": _find_ahead(len(prompt), begins, spans) if rule.rule == "whole" else None,
    }
    digest = hashlib.blake2b(raw + keys.tobytes(), digest_size=16).digest()
    return RequestImages(digest, features, array("q", keys.tobytes()), rows, words, **more)


def place_embeddings(features: Float32[Tensor, "p d"]) -> RequestImages:
    """Returns embeddings in place of the tokens of a whole prompt. Blocks are shared with equal embeddings.

    Args:
        features: embedding of each position.

    Example:
        >>> found = place_embeddings(torch.zeros(3, 2))
        >>> found.is_text, found.rows.tolist(), len(set(found.keys))
        (True, [True, True, True], 1)
    """
    rows = [row.tobytes() for row in features.numpy()]
    names = [int.from_bytes(hashlib.blake2b(x, digest_size=8).digest(), "little", signed=True) for x in rows]
    digest, num = hashlib.blake2b(b"".join(rows), digest_size=16).digest(), len(rows)
    return RequestImages(digest, features, array("q", names), np.ones(num, bool), np.zeros(-(-num // 32), np.int32))


def _find_spans(begins: np.ndarray, rule: ImageRule, grids: Sequence[Grid] | None) -> list[tuple[int, Grid]]:
    """Returns the first feature of each image, and the image's grid. Without a rule each feature is an image."""
    if rule.rule == "whole":
        edges = [0, *(np.nonzero(np.diff(begins) > 1)[0] + 1).tolist(), len(begins)]
        return [(first, (1, end - first)) for first, end in pairwise(edges)]
    if not rule.grid:
        return [(n, (1, 1)) for n in range(len(begins))]
    if grids is None or sum(h * w for h, w in grids) != len(begins):
        text = f"image_grids must have the rows and columns of each image, {len(begins)} tokens together"
        raise ValueError(f"{text}, got {grids if grids is None else list(grids)}.")
    found, first = list[tuple[int, Grid]](), 0
    for i, (h, w) in enumerate(grids):
        own = begins[first : first + h * w]
        if h < 1 or w < 1 or int(own[-1] - own[0]) != h * w - 1:
            raise ValueError(
                f"image {i} of {h} x {w} tokens must have its tokens one after another in the prompt, got"
                f" tokens from {own[0] if len(own) else None} on. Put text between images, not inside."
            )
        found.append((first, (h, w)))
        first += h * w
    return found


def _find_shifts(num: int, begins: np.ndarray, spans: list[tuple[int, Grid]]) -> np.ndarray:
    """Returns the shifts of Qwen2-VL's positions: an image of h x w takes the positions of its longer side."""
    at, out = np.arange(num, dtype=np.int32), np.zeros((3, num + 1), dtype=np.int32)
    delta = 0
    for first, (h, w) in spans:
        start = int(begins[first])
        index = np.arange(h * w, dtype=np.int32)
        places = np.stack([np.zeros_like(index), index // w, index % w]) + start + delta
        out[:, start : start + h * w] = places - at[start : start + h * w]
        delta += max(h, w) - h * w
        out[:, start + h * w :] = delta
    return out


def _find_ahead(num: int, begins: np.ndarray, spans: list[tuple[int, Grid]]) -> np.ndarray:
    out = np.zeros(num, dtype=np.int32)
    for first, (h, w) in spans:
        start = int(begins[first])
        out[start : start + h * w] = np.arange(h * w, dtype=np.int32)[::-1]
    return out


class ImageRows(NamedTuple):
    """Image tokens of a step.

    Attributes:
        words: bits of the positions of image tokens of each sequence, see `kernels.ragged_attention`.
        rows: True for the image tokens among the step's tokens.
        features: features of these tokens, and 0 for text.
        shifts: differences of the three rotary positions from each token's position, or None.
    """

    words: Int32[Tensor, "s words"]
    rows: Bool[Tensor, " b"]
    features: Float32[Tensor, "b d"]
    shifts: Int32[Tensor, "3 b"] | None = None

    def to(self, device: torch.device) -> "ImageRows":
        """Returns the tensors on a device."""
        shifts = None if self.shifts is None else self.shifts.to(device)
        return ImageRows(self.words.to(device), self.rows.to(device), self.features.to(device), shifts)
