"""Sound in WAV files, and its log-mel features, which a Whisper reads."""

import functools
import math
import os
import pathlib
import struct

import torch
from jaxtyping import Float32
from torch import Tensor

RATE = 16_000  # samples a second of `log_mel`
_WINDOW, _HOP = 400, 160  # samples of a frame, and from a frame to the next
# Kinds of samples: (format, bits) -> dtype, centre and largest number.
_SAMPLES = {
    (1, 8): (torch.uint8, 128, 128),
    (1, 16): (torch.int16, 0, 1 << 15),
    (1, 32): (torch.int32, 0, 1 << 31),
    (3, 32): (torch.float32, 0, 1),
    (3, 64): (torch.float64, 0, 1),
}


def read_wav(source: bytes | str | os.PathLike[str], *, max_seconds: float = 30.0) -> Float32[Tensor, " n"]:
    """Returns the samples of a WAV file at 16,000 a second, from -1 to 1. Channels are averaged.

    Another rate is resampled by the discrete Fourier transform. Sizes are checked before anything is computed.

    Args:
        source: content of a file, or a path.
        max_seconds: longest sound.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the content is no WAV file, was cut short, has samples of another kind, or is too long.

    Example:
        >>> body = struct.pack("<4h", 0, 16384, -16384, 0)
        >>> form = struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16)
        >>> head = b"RIFF" + struct.pack("<I", 36 + len(body)) + b"WAVEfmt " + form
        >>> read_wav(head + b"data" + struct.pack("<I", len(body)) + body).tolist()
        [0.0, 0.5, -0.5, 0.0]
    """
    content = source if isinstance(source, bytes) else pathlib.Path(source).read_bytes()
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise ValueError(f"a sound must be a WAV file, got {len(content)} bytes that begin with {content[:4]!r}.")
    at, form = 12, b""
    while True:
        if at + 8 > len(content):
            raise ValueError(f"a WAV file must have its samples, got the end of {len(content)} bytes before them.")
        name, size = struct.unpack_from("<4sI", content, at)
        if name == b"data":
            break
        form = content[at + 8 : at + 8 + size] if name == b"fmt " else form
        at += 8 + size + size % 2
    if len(form) < 16:
        raise ValueError("a WAV file must describe its samples before them, got no description. Write the file again.")
    kind, channels, rate, _, step, bits = struct.unpack_from("<HHIIHH", form)
    kind = struct.unpack_from("<H", form, 24)[0] if kind == 0xFFFE and len(form) >= 26 else kind
    if (kind, bits) not in _SAMPLES or not 1 <= channels <= 8 or step != channels * bits // 8:
        raise ValueError(
            "a WAV file must have 1 to 8 channels of integers of 8, 16 or 32 bits, or of floats of 32 or 64 bits, got"
            f" {channels} channels of kind {kind} with {bits} bits. Convert it: ffmpeg -i IN -c:a pcm_s16le OUT.wav"
        )
    if not 1_000 <= rate <= 384_000:
        raise ValueError(f"a WAV file must have from 1,000 to 384,000 samples a second, got {rate}.")
    num, left = size // step, (len(content) - at - 8) // step
    if num > left and size != 0xFFFFFFFF:  # the size that a program writes before it knows the end
        raise ValueError(f"a WAV file must have all of its samples, got {left} of {num}: it was cut short.")
    num = min(num, left)
    if not 0 < num <= max_seconds * rate:
        raise ValueError(f"a sound must have from 0 to {max_seconds:g} s, got {num / rate:.2f} s. Send it in parts.")
    dtype, centre, largest = _SAMPLES[kind, bits]
    raw = torch.frombuffer(bytearray(content[at + 8 : at + 8 + num * step]), dtype=dtype)
    samples = (raw.view(num, channels).double().mean(1) - centre) / largest
    made = _resample(samples, rate).float()
    if not bool(made.isfinite().all()):
        raise ValueError("a WAV file must have finite samples in float32, got inf or nan. Write the file again.")
    return made


def _resample(samples: Tensor, rate: int) -> Tensor:
    """Returns samples at `RATE`: the spectrum is cut, or filled up with zeros."""
    if rate == RATE:
        return samples
    num = max(1, round(len(samples) * RATE / rate))
    return torch.fft.irfft(torch.fft.rfft(samples), n=num) * (num / len(samples))


def log_mel(samples: Float32[Tensor, " n"], *, bands: int = 80, frames: int = 3000) -> Float32[Tensor, "f m"]:
    """Returns the features of a sound as a Whisper reads them: logarithms of a spectrogram on the mel scale.

    Equals the `WhisperFeatureExtractor` of transformers. A frame is 10 ms. A shorter sound ends with silence, and a
    longer sound is cut.

    Args:
        samples: samples at 16,000 a second.
        bands: numbers of a frame, 80, or 128 for the third large Whisper.
        frames: number of frames.

    Example:
        >>> log_mel(torch.zeros(RATE), frames=4).tolist()[0][:2]
        [-1.5, -1.5]
    """
    num = frames * _HOP
    padded = torch.nn.functional.pad(samples.float()[:num], (0, max(0, num - len(samples))))
    window = torch.hann_window(_WINDOW)
    spectrum = torch.stft(padded, _WINDOW, _HOP, window=window, return_complex=True)
    power = (spectrum[:, :-1].abs() ** 2).contiguous()
    logs = (_mel_filters(bands).T @ power).clamp(min=1e-10).log10()
    return ((torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).T.contiguous()


@functools.cache
def _mel_filters(bands: int) -> Tensor:
    """Returns triangles over the frequencies of a frame, each of area 1, as of Slaney's Auditory Toolbox."""
    edges = _from_mel(torch.linspace(0.0, _to_mel(RATE / 2), bands + 2, dtype=torch.float64))
    at = torch.linspace(0.0, RATE / 2, _WINDOW // 2 + 1, dtype=torch.float64)[:, None]
    rise = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    return (torch.minimum(rise, fall).clamp(min=0.0) * (2.0 / (edges[2:] - edges[:-2]))).float()


_LINEAR, _STEP = 15.0, 27.0 / math.log(6.4)  # mels at 1,000 Hz, and for a factor of e above


def _to_mel(hertz: float) -> float:
    return _LINEAR + _STEP * math.log(hertz / 1000.0) if hertz >= 1000.0 else 3.0 * hertz / 200.0


def _from_mel(mels: Tensor) -> Tensor:
    return torch.where(mels < _LINEAR, 200.0 * mels / 3.0, 1000.0 * ((mels - _LINEAR) / _STEP).exp())
