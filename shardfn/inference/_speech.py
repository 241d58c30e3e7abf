"""Sound as the source of an encoder-decoder model: features of a file, and the first tokens of the transcript."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from shardfn.data import log_mel, read_wav

_FRAMES, _RATE = 100, 16_000  # frames and samples a second


@dataclass(frozen=True, repr=False)
class SourceFeatures:
    """Features of a source, in place of token ids.

    Attributes:
        digest: digest of the values.
        values: float32 [F, M], on the CPU.
    """

    digest: bytes
    values: Tensor = field(compare=False)

    def __repr__(self) -> str:
        return f"SourceFeatures({self.digest!r})"


def make_features(source: Any, shape: tuple[int, int]) -> SourceFeatures:
    """Returns the features of a source.

    Raises:
        ValueError: the source is no tensor of floats of this shape, or has numbers that are not finite.

    Example:
        >>> import torch
        >>> make_features(torch.zeros(4, 2), (4, 2)).values.shape
        torch.Size([4, 2])
    """
    if not isinstance(source, Tensor) or not source.is_floating_point() or tuple(source.shape) != shape:
        got = tuple(source.shape) if isinstance(source, Tensor) else f"a {type(source).__name__}"
        raise ValueError(f"source must be features, float {list(shape)}, got {got}. Make them by data.log_mel.")
    values = source.detach().to("cpu").float().contiguous()
    if not bool(values.isfinite().all()):
        raise ValueError("source must have finite features, got inf or nan. Look at the sound.")
    return SourceFeatures(hashlib.blake2b(values.numpy().tobytes(), digest_size=16).digest(), values)


class SpeechReader(NamedTuple):
    """Reader of sounds for a model.

    Attributes:
        shape: frames, and numbers of a frame.
        begin: function from a language such as "en", or None, to the first tokens of a transcript. A `ValueError`
            refuses a language.
        banned: tokens that no transcript has.
    """

    shape: tuple[int, int]
    begin: Callable[[str | None], tuple[int, ...]]
    banned: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Returns the longest sound."""
        return self.shape[0] / _FRAMES

    def read(self, content: bytes) -> tuple[SourceFeatures, float]:
        """Returns the features of a WAV file, and its seconds. See `data.read_wav`.

        Raises:
            ValueError: the content is no WAV file, or is too long.
        """
        frames, bands = self.shape
        samples = read_wav(content, max_seconds=self.seconds)
        return make_features(log_mel(samples, bands=bands, frames=frames), self.shape), len(samples) / _RATE
