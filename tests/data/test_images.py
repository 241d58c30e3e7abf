"""Covers images in examples: placeholders, batches, and files that are wrong, damaged or too large."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfn import data

Image = pytest.importorskip("PIL.Image")


def save(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_bomb(width: int, height: int) -> bytes:
    """A file of some bytes that says it has many pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_images_and_rounds_alternate() -> None:
    example = {"tokens": [9, 5, 9, 6, 7, 9], "labels": [-100, -100, -100, 6, 7, -100], "images": "abc"}
    found = data.expand_images(example, image_token=9, count=(1, 3, 2))
    assert found["tokens"] == [9, 5, 9, 9, 9, 6, 7, 9, 9]
    assert found["labels"] == [-100, -100, -100, -100, -100, 6, 7, -100, -100]
    assert found["images"] == ["a", "b", "c"]


def test_a_batch_has_the_images_of_its_rows_in_order() -> None:
    images = torch.arange(3.0)[:, None, None].expand(3, 2, 2)
    rows = [{"tokens": [1, 9, 9], "images": images[:2]}, [4, 5], {"tokens": [9], "images": images[2:]}]
    collate = data.pad_images((2, 2), 6, image_token=9, count=2)
    batch = collate(rows)
    assert batch["tokens"].tolist() == [[1, 9, 9, 9, 9, 0], [4, 5, 0, 0, 0, 0], [9, 9, 0, 0, 0, 0]]
    assert torch.equal(batch["images"], images)
    assert (batch["labels"] == 9).sum() == 0
    assert collate([[1]])["images"].shape == (0, 2, 2)


def test_a_mixture_of_texts_and_images() -> None:
    seen = [{"tokens": [1, 9], "images": [torch.full((2, 2), float(i))]} for i in range(5)]
    mixture = data.Mixture({"text": [[7, 7, 7]], "seen": seen}, weights={"text": 1, "seen": 3})
    batch = mixture.batches(64, data.pad_images((2, 2), 4, image_token=9, count=2))(0)
    rows = (batch["tokens"] == 9).any(1)
    assert len(batch["images"]) == int(rows.sum()) == mixture.counts(64)["seen"]


def test_counts_that_differ() -> None:
    with pytest.raises(ValueError, match="got 2 placeholders and 1 images"):
        data.expand_images({"tokens": [9, 9], "images": ["a"]}, image_token=9, count=1)
    with pytest.raises(ValueError, match="got 0 placeholders and 1 images"):
        data.expand_images({"tokens": [1], "images": ["a"]}, image_token=9, count=1)
    with pytest.raises(ValueError, match="a number for each of 1 images, got 2 numbers"):
        data.expand_images({"tokens": [9], "images": ["a"]}, image_token=9, count=(1, 2))
    rows = [[9], [1], {"tokens": [9], "images": [torch.zeros(3, 2)]}]
    with pytest.raises(
        ValueError, match=r"example 0: .* got 1 placeholders and 0 images[\s\S]*shape \(2, 2\), got \(3"
    ):
        data.pad_images((2, 2), image_token=9, count=1)(rows)
    with pytest.raises(ValueError, match="got 9 for both"):
        data.pad_images((2, 2), image_token=9, count=1, token=9)


def test_files_of_all_formats(tmp_path: Path) -> None:
    drawn = torch.randint(256, (5, 4, 3), dtype=torch.uint8)
    image = Image.fromarray(drawn.numpy())
    for kind in ("PNG", "BMP"):
        assert torch.equal(data.read_image(save(image, kind)), drawn.permute(2, 0, 1))
    assert torch.equal(data.read_image(save(image, "WEBP", lossless=True)), drawn.permute(2, 0, 1))
    for kind in ("JPEG", "GIF"):
        assert data.read_image(save(image, kind)).shape == (3, 5, 4)
    (tmp_path / "one.png").write_bytes(save(image, "PNG"))
    assert torch.equal(data.read_image(tmp_path / "one.png"), drawn.permute(2, 0, 1))
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    assert data.read_image(save(clear, "PNG")).tolist() == [[[255, 255]]] * 3
    assert data.read_image(save(Image.new("I;16", (2, 1)), "PNG")).shape == (3, 1, 2)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    for content in (
        b"",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        save(Image.new("RGB", (2, 2)), "TIFF"),
    ):
        with pytest.raises(ValueError, match=f"must be an image in one of BMP, .* got {len(content)} bytes"):
            data.read_image(content)
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(ValueError, match=r"must be an image .* got .*a\.png"):
        data.read_image(tmp_path / "a.png")
    with pytest.raises(FileNotFoundError):
        data.read_image("http://example.com/a.png")
    whole = save(Image.fromarray(torch.randint(256, (64, 64, 3), dtype=torch.uint8).numpy()), "PNG")
    with pytest.raises(ValueError, match="got a damaged file"):
        data.read_image(whole[: len(whole) // 2])


def test_large_images_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(ValueError, match="at most 11 pixels, got 4 x 3 = 12"):
        data.read_image(save(Image.new("RGB", (4, 3)), "PNG"), max_pixels=11)
    for size in ((100_000, 100_000), (2**31 - 1, 1), (12_000, 9_000)):
        with pytest.raises(ValueError, match="must have at most 16,777,216 pixels, got"):
            data.read_image(make_bomb(*size))
