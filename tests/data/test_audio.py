"""Covers sound: WAV files and log-mel features, equal to those of transformers."""

import io
import math
import random
import struct
import wave
from typing import Any

import pytest
import torch

from shardfn.data import log_mel, read_wav


def write_wav(samples: torch.Tensor, rate: int = 16_000, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32768).round().clamp(-32768, 32767).short().numpy().tobytes())
    return file.getvalue()


def draw_sound(num: int, seed: int = 0) -> torch.Tensor:
    """Noise, a chord and silence."""
    t = torch.arange(num) / 16_000
    noise = torch.randn(num, generator=torch.Generator().manual_seed(seed))
    sound = 0.02 * noise + 0.3 * torch.sin(2 * math.pi * 440 * t) + 0.2 * torch.sin(2 * math.pi * 3000 * t)
    sound[num // 3 : num // 2] = 0
    return sound


@pytest.mark.parametrize(("bands", "seconds"), [(80, 2), (128, 3), (80, 5)])
def test_features_are_those_of_transformers(bands: int, seconds: int) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.WhisperFeatureExtractor(feature_size=bands, chunk_length=4)
    sound = draw_sound(16_000 * seconds - 77)
    want = theirs(sound.numpy(), sampling_rate=16_000, return_tensors="pt").input_features[0].T
    found = log_mel(sound, bands=bands, frames=400)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_samples_of_each_kind() -> None:
    sound = draw_sound(1600)
    found = read_wav(write_wav(sound))
    torch.testing.assert_close(found, sound, rtol=0, atol=2**-15)
    both = torch.stack([sound, -sound / 2], 1)
    torch.testing.assert_close(read_wav(write_wav(both, channels=2)), sound / 4, rtol=0, atol=2**-14)
    for kind, bits, body in (
        (3, 32, sound.float().numpy().tobytes()),
        (3, 64, sound.double().numpy().tobytes()),
        (1, 8, (sound * 128 + 128).round().byte().numpy().tobytes()),
        (1, 32, (sound.double() * 2**31).int().numpy().tobytes()),
    ):
        form = struct.pack("<HHIIHH", kind, 1, 16_000, 16_000 * bits // 8, bits // 8, bits)
        head = b"RIFF\0\0\0\0WAVELIST\3\0\0\0abc\0fmt " + struct.pack("<I", 16) + form
        found = read_wav(head + b"data" + struct.pack("<I", len(body)) + body)
        torch.testing.assert_close(found, sound, rtol=0, atol=2**-7 if bits == 8 else 1e-6)


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_another_rate_keeps_a_tone(rate: int) -> None:
    tone = torch.sin(2 * math.pi * 1000 * torch.arange(rate).double() / rate)
    want = torch.sin(2 * math.pi * 1000 * torch.arange(16_000).double() / 16_000).float()
    torch.testing.assert_close(read_wav(write_wav(tone, rate)), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: b"", "must be a WAV file, got 0 bytes"),
        (lambda x: b"OggS" + x[4:], "begin with b'OggS'"),
        (lambda x: x[:30], "must have its samples"),
        (lambda x: x[:-10], "was cut short"),
        (lambda x: x[:20] + b"\x11\0" + x[22:], "of kind 17 with 16 bits"),
        (lambda x: x[:22] + b"\0\0" + x[24:], "got 0 channels"),
        (lambda x: x[:24] + bytes(4) + x[28:], "samples a second, got 0"),
        (lambda x: x[:40] + bytes(4), "got 0.00 s"),
    ],
)
def test_other_files_are_refused(change: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_wav(change(write_wav(draw_sound(800))))
    with pytest.raises(ValueError, match=r"from 0 to 0.01 s, got 0.05 s"):
        read_wav(write_wav(draw_sound(800)), max_seconds=0.01)


def test_damaged_files_are_read_or_refused() -> None:
    good, draw, refused = write_wav(draw_sound(400)), random.Random(0), 0
    for _ in range(600):
        made = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            made[draw.randrange(44)] = draw.choice((0, 1, 255, draw.randrange(256)))
        try:
            assert len(read_wav(bytes(made[: draw.randrange(20, len(made) + 1)]))) <= 30 * 16_000
        except ValueError:
            refused += 1
    assert refused > 300
