"""Images in examples: placeholders that grow to one token for each feature, batches, and files.

C channels, h and w pixels, N images, B rows, T tokens.
"""

import base64
import binascii
import io
import os
import re
import stat
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from shardfn.core import raise_all

from ._collate import IGNORED, Collate, pad

# Formats of files, by Pillow's names. Other formats have decoders with more risks, such as vector graphics.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
MOST_PIXELS = 1 << 24


def expand_images(example: Any, *, image_token: int, count: int | Sequence[int]) -> dict[str, Any]:
    """Returns an example in which the placeholder of each image has become a token for each feature of the image.

    Images and text may alternate in any order, over several rounds of a conversation.

    Args:
        example: {"tokens": ids with `image_token` once for each image, "images": images in order, "labels"?: ids}. An
            example without images may be a list of tokens.
        image_token: id of the placeholder.
        count: tokens of each image, or a number for each image in order.

    Returns:
        {"tokens", "images", "labels"}. Image tokens have the label -100.

    Raises:
        ValueError: there are more or fewer placeholders than images, or numbers in `count`.

    Example:
        >>> example = {"tokens": [5, 99, 6, 99], "images": ["a", "b"]}
        >>> expand_images(example, image_token=99, count=(2, 3))["tokens"]
        [5, 99, 99, 6, 99, 99, 99]
    """
    given: Mapping[str, Any] = example if isinstance(example, Mapping) else {"tokens": example}
    tokens, images = [int(t) for t in given["tokens"]], list(given.get("images", ()))
    labels, found = [int(t) for t in given.get("labels", tokens)], tokens.count(image_token)
    if found != len(images):
        raise ValueError(
            f"an example must have a placeholder {image_token} for each image, got {found} placeholders and"
            f" {len(images)} images. Remove the placeholder, or add the image."
        )
    counts = [count] * found if isinstance(count, int) else list(count)
    if len(counts) != found:
        raise ValueError(f"count must have a number for each of {found} images, got {len(counts)} numbers.")
    left, out, out_labels = iter(counts), list[int](), list[int]()
    for token, label in zip(tokens, labels, strict=True):
        num, label = (next(left), IGNORED) if token == image_token else (1, label)
        out += [token] * num
        out_labels += [label] * num
    return {"tokens": out, "labels": out_labels, "images": images}


def pad_images(
    shape: Sequence[int], length: int | None = None, *, image_token: int, count: int, token: int = 0
) -> Collate:
    """Returns a collator of examples with images: `pad` after `expand_images`, and "images" of all rows together.

    "images" are float32 [N, ...], the images of the first row, then of the second row, and so on. N is 0 where no row
    has an image.

    Args:
        shape: shape of each image, such as (3, 224, 224).
        length: see `pad`.
        image_token: see `expand_images`.
        count: tokens of each image.
        token: id for padding, other than `image_token`.

    Raises:
        ValueError: (on use) as `pad` and `expand_images`, or an image has another shape. The message lists all such
            examples. Or (at once) padding would be images.

    Example:
        >>> rows = [{"tokens": [5, 99, 6], "images": [torch.zeros(3, 8, 8)]}, [7]]
        >>> batch = pad_images((3, 8, 8), image_token=99, count=2)(rows)
        >>> batch["tokens"].tolist(), tuple(batch["images"].shape)
        ([[5, 99, 99, 6], [7, 0, 0, 0]], (1, 3, 8, 8))
    """
    if token == image_token:
        raise ValueError(f"pad_images: token must be another id than image_token, got {token} for both.")
    collate = pad(length, token=token)

    def collate_images(examples: list[Any]) -> dict[str, Tensor]:
        rows, problems = list[dict[str, Any]](), list[str]()
        for i, example in enumerate(examples):
            try:
                rows.append(expand_images(example, image_token=image_token, count=count))
            except ValueError as error:
                problems.append(f"example {i}: {error}")
        images = [torch.as_tensor(x).float() for row in rows for x in row["images"]]
        problems += [
            f"an image must have shape {tuple(shape)}, got {tuple(x.shape)}. Resize it before the collator."
            for x in images
            if x.shape != tuple(shape)
        ]
        raise_all(ValueError, "pad_images:", problems)
        return {**collate(rows), "images": torch.stack(images) if images else torch.zeros(0, *shape)}

    return collate_images


def read_image(source: bytes | str | os.PathLike[str], *, max_pixels: int = MOST_PIXELS) -> UInt8[Tensor, "3 h w"]:
    """Returns the pixels of an image file: red, green and blue, from 0 to 255.

    The size is read from the header and checked before any pixel is decoded. Transparent pixels lie on white. A photo
    is turned as its EXIF data ask. Needs Pillow.

    Args:
        source: content of a file, or a path. A string is never an address of a network.
        max_pixels: largest width times height.

    Raises:
        ImportError: Pillow is not installed.
        FileNotFoundError: there is no such file.
        ValueError: the file is no image in BMP, GIF, JPEG, PNG or WebP, is damaged, is an animation, or has too many
            pixels.

    Example:
        >>> import io
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (3, 2), "red").save(file, "PNG")
        >>> read_image(file.getvalue())[:, 0, 0].tolist()
        [255, 0, 0]
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("read_image needs Pillow. Install it: pip install 'shardfn[images]'") from error
    name = f"{len(source)} bytes" if isinstance(source, bytes) else os.fspath(source)
    file = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")
    with file:
        try:
            opened = Image.open(file, formats=FORMATS)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ValueError(_describe_size(max_pixels, f"{name}: {error}")) from error
        except (OSError, ValueError, SyntaxError) as error:
            known = ", ".join(FORMATS)
            text = f"read_image: a file must be an image in one of {known}, got {name}, which Pillow cannot read."
            raise ValueError(text) from error
        width, height = opened.size
        if width * height > max_pixels:
            raise ValueError(_describe_size(max_pixels, f"{width} x {height} = {width * height:,} in {name}"))
        if getattr(opened, "is_animated", False):
            frames = getattr(opened, "n_frames", 2)
            text = f"read_image: an image must have 1 frame, got {frames} frames in {name}. Send one frame of the"
            raise ValueError(f"{text} animation.")
        try:
            drawn = ImageOps.exif_transpose(opened).convert("RGBA")
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            raise ValueError(f"read_image: the pixels must be readable, got a damaged file, {name}: {error}") from error
    white = Image.new("RGBA", drawn.size, "white")
    pixels = Image.alpha_composite(white, drawn).convert("RGB").tobytes()
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1).contiguous()


def _describe_size(most: int, found: str) -> str:
    return f"read_image: an image must have at most {most:,} pixels, got {found}. Make the image smaller."


_DATA_URL = re.compile(r"data:image/[a-zA-Z0-9.+-]+;base64,")
MOST_BYTES = 16 << 20


def read_image_url(url: str, *, root: str | os.PathLike[str] | None = None, max_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of an image's address: a `data:` URL in base64, or a file below a directory.

    No address of a network is opened. A file's path may have no `..`, and no symbolic link below the directory.

    Args:
        url: `data:image/png;base64,...`, or `file:///directory/name.png`.
        root: directory whose files may be read. None permits no file.
        max_bytes: most bytes of the content.

    Raises:
        ValueError: the address is of another kind, or is no base64, or the file is missing or outside of the
            directory, or has too many bytes.

    Example:
        >>> read_image_url("data:image/png;base64,aGVsbG8=")
        b'hello'
    """
    if url.startswith("file:"):
        return _read_file(url, root, max_bytes)
    found = _DATA_URL.match(url)
    if found is None:
        raise ValueError(
            "an image's address must be data:image/png;base64,... or file:///..., got"
            f" {url[:40]!r}. No address of a network is opened: send the image itself."
        )
    if len(url) - found.end() > (max_bytes + 2) // 3 * 4:
        raise ValueError(_describe_bytes(max_bytes, f"{(len(url) - found.end()) * 3 // 4:,}"))
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"an image in a data: URL must be base64, got {url[:40]!r}: {error}.") from error


def _read_file(url: str, root: str | os.PathLike[str] | None, max_bytes: int) -> bytes:
    """Returns the content of a file below a directory. Each part of the path is opened without following links."""
    parsed = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(parsed.path)
    if root is None:
        raise ValueError("a file: URL needs a directory of images, but none was given. Send data:image/png;base64,...")
    top = os.path.realpath(root)
    outside = f"a file: URL must be a file below the directory of images, got {url[:60]!r}."
    parts = path.removeprefix(top.rstrip("/") + "/").split("/")
    if parsed.netloc not in ("", "localhost") or not path.startswith(top.rstrip("/") + "/") or "\0" in path:
        raise ValueError(outside)
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(outside)
    held = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for last, part in ((i + 1 == len(parts), part) for i, part in enumerate(parts)):
            # A pipe would wait for its other end.
            kind = os.O_NONBLOCK if last else os.O_DIRECTORY
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=held)
            os.close(held)
            held = inner
        info = os.fstat(held)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(outside)
        with open(held, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        reason = "it is missing, or is a symbolic link" if error.errno else str(error)
        raise ValueError(f"{outside} The file cannot be read: {reason}.") from error
    finally:
        os.close(held)
    if len(content) > max_bytes:
        raise ValueError(_describe_bytes(max_bytes, f"{info.st_size:,}"))
    return content


def _describe_bytes(most: int, found: str) -> str:
    return f"an image must have at most {most:,} bytes, got {found}. Make the image smaller."
