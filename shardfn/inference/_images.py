"""Images in the prompts of an engine: from files to features, and the positions that attention reads as images.

An `ImageEncoder` is a tower and a projector. An `ImageReader` keeps the features of images that it has read, so that
the rounds of a chat do not compute them again. A request has the features of all image tokens of its prompt. Requests
share a prefix only with the same images. Drawn tokens are text.

N image tokens, D model.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from shardfn.data import read_image, read_image_url

from ._decoder import Decoder
from ._hooks import EngineHooks
from ._image_rows import Grid, ImageRule, RequestImages, place_embeddings, place_images
from ._limits import Limits
from ._plan import StepPlan
from ._requests import Request
from ._state import Sequence as StateSequence
from ._state import State
from ._tensors import make_image_padding


class EncodedImage(NamedTuple):
    """An image as a part of a prompt.

    Attributes:
        features: features of the image's tokens, on the CPU.
        text: text of the image in a prompt, with the image token once for each feature.
        grid: rows and columns of the features.
    """

    features: Float32[Tensor, "n d"]
    text: str
    grid: Grid


class ImageEncoder(NamedTuple):
    """Tower and projector of a model.

    Attributes:
        placeholder: text of an image in the text that a chat template makes.
        rule: rule of the image tokens.
        width: width of the features, D.
        encode: function from red, green and blue pixels, from 0 to 255, to the image as a part of a prompt.
    """

    placeholder: str
    rule: ImageRule
    width: int
    encode: Callable[[UInt8[Tensor, "3 h w"]], EncodedImage]


class ImagePrompt(NamedTuple):
    """Prompt with images.

    Attributes:
        ids: token ids.
        features: features of the image tokens, or None without images.
        grids: rows and columns of each image.
    """

    ids: list[int]
    features: Float32[Tensor, "n d"] | None
    grids: tuple[Grid, ...]


class ImageReader:
    """Images by their addresses. Methods may be called in several threads.

    Args:
        encoder: tower and projector.
        root: directory whose files `file:` URLs may name, or None.
        max_pixels: most pixels of an image, checked before any pixel is decoded.
        max_bytes: most bytes of an image's file.
        kept_bytes: most bytes of kept features.

    Example:
        >>> import base64, io
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (3, 2), "red").save(file, "PNG")
        >>> url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        >>> encode = lambda pixels: EncodedImage(pixels.float().mean((1, 2))[None], "<image>", (1, 1))
        >>> reader = ImageReader(ImageEncoder("<image>", ImageRule(9), 3, encode))
        >>> prompt = reader.expand("a<image>b", [reader.read(url)], lambda text: [1, *[9] * text.count("<image>"), 2])
        >>> prompt.ids, prompt.features.tolist(), reader.num_encoded
        ([1, 9, 2], [[255.0, 0.0, 0.0]], 1)
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        root: str | os.PathLike[str] | None = None,
        *,
        max_pixels: int = 1 << 24,
        max_bytes: int = 16 << 20,
        kept_bytes: int = 256 << 20,
    ) -> None:
        self.encoder, self.num_encoded = encoder, 0
        self._root, self._max_pixels, self._max_bytes, self._kept_bytes = root, max_pixels, max_bytes, kept_bytes
        self._kept, self._size = OrderedDict[bytes, EncodedImage](), 0
        self._lock = threading.Lock()  # a single image is computed at a time, and never twice

    def read(self, url: str) -> EncodedImage:
        """Returns the image of an address. See `data.read_image_url` and `data.read_image`.

        Raises:
            ImportError: Pillow is not installed.
            ValueError: there is no such image, or it is not taken. The message has the reason.
        """
        content = read_image_url(url, root=self._root, max_bytes=self._max_bytes)
        name = hashlib.blake2b(content, digest_size=32).digest()
        with self._lock:
            if (found := self._kept.get(name)) is None:
                found = self._encode(content)
                self._keep(name, found)
            self._kept.move_to_end(name)
        return found

    def read_messages(
        self, messages: Sequence[Mapping[str, Any]], template: str, most: int | None = None
    ) -> tuple[list[dict[str, Any]], list[EncodedImage]]:
        """Returns messages as a chat template takes them, and their images in order.

        Args:
            messages: messages whose "content" is a text, or a list of {"type": "text", "text": ...} and
                {"type": "image_url", "image_url": {"url": ...}}.
            template: source of the chat template. A template that knows images gets lists of parts, and any other gets
                texts with placeholders.
            most: most features of all images together. Images after that are not read.

        Raises:
            ImportError: Pillow is not installed.
            ValueError: a part is wrong, or there are more features. The message begins with its place, such as
                `messages[0].content[1]`.
        """
        made, images, lists = list[dict[str, Any]](), list[EncodedImage](), "image" in template
        for i, message in enumerate(messages):
            content: Any = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            shown = [self._read_part(part, f"messages[{i}].content[{j}]", images, most) for j, part in enumerate(parts)]
            texts = (part.get("text", self.encoder.placeholder) for part in shown)
            made.append({**message, "content": shown if lists else "".join(texts)})
        return made, images

    def _read_part(
        self, part: Mapping[str, Any], at: str, images: list[EncodedImage], most: int | None
    ) -> dict[str, Any]:
        """Returns a part for a template. An image is appended to `images`."""
        kind = part.get("type")
        if kind == "text":
            return {"type": "text", "text": part["text"]}
        url = (part.get("image_url") or {}).get("url")
        if kind != "image_url" or not isinstance(url, str):
            raise ValueError(f"{at}.type: a part must be a text, or an image_url with a url, got {kind!r:.60}.")
        try:
            images.append(self.read(url))
        except ValueError as error:
            raise ValueError(f"{at}.image_url.url: {error}") from error
        rows = sum(len(image.features) for image in images)
        if most is not None and rows > most:
            text = f"the images of a prompt must have at most {most} tokens, the context, got {rows} in {len(images)}"
            raise ValueError(f"{at}.image_url.url: {text} images. Send fewer images.")
        return {"type": "image"}

    def expand(self, text: str, images: Sequence[EncodedImage], encode: Callable[[str], list[int]]) -> ImagePrompt:
        """Returns the prompt of a text with a placeholder for each image.

        Args:
            text: text of a chat template.
            images: images in the order of their placeholders.
            encode: function from a text to token ids.

        Raises:
            ValueError: there are other numbers of placeholders than of images, or of image tokens than of features.
        """
        holder, token = self.encoder.placeholder, self.encoder.rule.token
        parts = text.split(holder)
        if len(parts) - 1 != len(images):
            raise ValueError(
                f"a prompt must have the text {holder!r} once for each image, got {len(parts) - 1} of them and"
                f" {len(images)} images. Send each image as a part, and leave {holder!r} out of texts."
            )
        whole = parts[0] + "".join(image.text + part for image, part in zip(images, parts[1:], strict=True))
        ids, rows = encode(whole), sum(len(image.features) for image in images)
        if ids.count(token) != rows:
            raise ValueError(
                f"a prompt must have an image token for each feature of its images, got {ids.count(token)} image tokens"
                f" and {rows} features. Leave the image token out of texts."
            )
        features = torch.cat([image.features for image in images]) if images else None
        return ImagePrompt(ids, features, tuple(image.grid for image in images))

    def place(self, prompt: ImagePrompt) -> RequestImages | None:
        """Returns the images of a prompt as a request has them, or None without images."""
        rule, width = self.encoder.rule, self.encoder.width
        return make_request_images(prompt.ids, prompt.features, rule, width, prompt.grids or None)

    def _encode(self, content: bytes) -> EncodedImage:
        pixels = read_image(content, max_pixels=self._max_pixels)
        with torch.no_grad():
            made = self.encoder.encode(pixels)
        self.num_encoded += 1
        return made._replace(features=_check_features(made.features, self.encoder.width))

    def _keep(self, name: bytes, image: EncodedImage) -> None:
        self._kept[name] = image
        self._size += image.features.nbytes
        while self._size > self._kept_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.features.nbytes


def _check_features(features: Tensor, width: int) -> Tensor:
    """Returns features as float32 on the CPU.

    Raises:
        ValueError: features have another width, or are not finite.
    """
    if features.ndim != 2 or features.shape[1] != width:
        raise ValueError(
            f"image_features must have shape [N, {width}], a row for each image token, got {tuple(features.shape)}."
            f" Give the projector {width} outputs."
        )
    return _widen_rows("image_features", features, "the tower's input")


def _widen_rows(name: str, rows: Tensor, source: str) -> Tensor:
    """Returns rows as float32 on the CPU.

    Raises:
        ValueError: numbers are not finite. The message names the argument, and the place where they come from.
    """
    rows = rows.detach().to("cpu", torch.float32).contiguous()
    if not bool(rows.isfinite().all()):
        raise ValueError(f"{name} must be finite numbers, got inf or nan. Look at {source}.")
    return rows


def make_request_images(
    prompt: Sequence[int], features: Any, rule: ImageRule | None, width: int, grids: Sequence[Grid] | None = None
) -> RequestImages | None:
    """Returns the images of a request, or None without images.

    Args:
        prompt: token ids.
        features: features of the image tokens, or None.
        rule: rule of the model, or None for a model without images.
        width: width of the model, D.
        grids: rows and columns of each image, for a model that wants them.

    Raises:
        TypeError: features are no tensor.
        ValueError: the model has no images, or there are more or fewer features than image tokens, or features of
            another width, or not finite.
    """
    if rule is None:
        if features is not None or grids is not None:
            raise ValueError(
                "image_features need a model with images, such as gpt.Config(images=), got one without. Leave them out."
            )
        return None
    count = sum(token == rule.token for token in prompt)
    if features is None:
        features = torch.zeros(0, width)
    if not isinstance(features, Tensor):
        raise TypeError(f"image_features must be a tensor, got a {type(features).__name__}.")
    if features.ndim != 2 or features.shape[1] != width or len(features) != count:
        raise ValueError(
            f"image_features must have shape ({count}, {width}), a row for each of {count} image tokens of the prompt,"
            f" got {tuple(features.shape)}. The prompt has the image token {rule.token} once for each feature."
        )
    return place_images(prompt, _check_features(features, width), rule, grids if count else None)


def make_embedded_prompt(prompt: Tensor, width: int) -> tuple[tuple[int, ...], RequestImages]:
    """Returns the tokens of a prompt that is given by its embeddings, all 0, and the embeddings.

    Args:
        prompt: embeddings, float [P, D], as the model's table has them for tokens.
        width: width of the model's table, D, or 0 for a model that takes no embeddings.

    Raises:
        ValueError: the model takes no embeddings, or they have another width, or are not finite.

    Example:
        >>> tokens, found = make_embedded_prompt(torch.zeros(3, 2), 2)
        >>> tokens, found.is_text
        ((0, 0, 0), True)
    """
    if not width:
        raise ValueError("prompt_embeds need a decoder with a table of embeddings. Pass token ids.")
    if prompt.ndim != 2 or prompt.shape[1] != width or not len(prompt):
        raise ValueError(f"prompt_embeds must have shape [P, {width}], a row for each token, got {[*prompt.shape]}.")
    prompt = _widen_rows("prompt_embeds", prompt, "their source")
    return (0,) * len(prompt), place_embeddings(prompt)


def check_embedded(request: Request, width: int) -> None:
    """Refuses options that read the tokens of a prompt, which embeddings do not have.

    Args:
        request: request whose prompt is of embeddings.
        width: width of the model's table, D.

    Raises:
        ValueError: names the option, or the embeddings have another shape.
    """
    how, features = request.sampling, request.images and request.images.features
    assert features is not None
    if features.shape[1] != width or len(features) != len(request.prompt):
        want = [len(request.prompt), width]
        raise ValueError(f"prompt_embeds must have shape {want}, got {[*features.shape]}. Use this model's table.")
    for name, value, plain in (
        ("repetition_penalty", how.repetition_penalty, 1.0),
        ("prompt_logprobs", how.prompt_logprobs, False),
    ):
        if value != plain:
            raise ValueError(f"{name} must be {plain} for a prompt of embeddings, got {value}. Leave it out.")


class ImageInputs:
    """Images of an engine's requests.

    Args:
        limits: limits of the engine.
        decoder: model.
    """

    def __init__(self, limits: Limits, decoder: Decoder) -> None:
        self._limits, self._decoder, self._embedded = limits, decoder, False

    @property
    def hooks(self) -> EngineHooks:
        """Returns the engine hooks that check requests, and find the image tokens of each step."""
        return EngineHooks(admit=self.check, columns=self.columns)

    def make(self, prompt: Sequence[int], features: Any, grids: Sequence[Grid] | None) -> RequestImages | None:
        """Returns the images of a request. See `make_request_images`."""
        return make_request_images(prompt, features, self._decoder.images, self._decoder.hidden_size, grids)

    def embed(self, prompt: Tensor) -> tuple[tuple[int, ...], RequestImages]:
        """Returns the tokens of a prompt that is given by its embeddings, all 0, and the embeddings.

        Args:
            prompt: embeddings, float [P, D], as the model's table has them for tokens.

        Raises:
            ValueError: the model takes no embeddings, or they have another width, or are not finite.
        """
        width = self._decoder.embed_size if self._decoder.sources is None else 0
        made = make_embedded_prompt(prompt, width)
        self._embedded = True
        return made

    def check(self, request: Request) -> None:
        """Refuses a request that has image tokens without their images, or images that no step can hold.

        Raises:
            ValueError: the message has both numbers.
        """
        rule, images = self._decoder.images, request.images
        if images is not None and images.is_text:
            self._embedded = True
            check_embedded(request, self._decoder.embed_size)
            return
        if rule is None:
            return
        count, found = request.prompt.count(rule.token), 0 if images is None else len(images.features)
        if count != found:
            text = f"prompt must have an image for each image token {rule.token}, got {count} image tokens and"
            raise ValueError(f"{text} {found} features of images. Send images as parts of messages.")
        if images is None or images.ahead is None:
            return
        if images.longest > (most := self._limits.budget - self._limits.running):
            raise ValueError(
                f"prompt must have images of at most {most} tokens, the rows of a step beside those of other requests,"
                f" got {images.longest}. Make images smaller, or raise the budget of a step."
            )
        if request.sampling.prompt_logprobs:
            text = "prompt_logprobs must be False for a prompt with images whose tokens read one another, got True."
            raise ValueError(f"{text} Leave it out.")

    def columns(self, state: State, plan: StepPlan) -> dict[str, Any]:
        """Returns the image tokens of a plan, and the given embeddings."""
        rule, decoder, first = self._decoder.images, self._decoder, 0
        if rule is None and not (self._embedded and any(_reads_rows(one) for _, one, _ in state.rows_in_flight())):
            return {}
        found = make_image_padding(plan.bucket, self._limits, rule, decoder.hidden_size if rule else decoder.embed_size)
        for number, (chunk, sequence, _) in enumerate(state.rows_in_flight()):
            begin = sequence.computed
            if (images := sequence.request.images) is not None:
                found.words[number, : len(images.words)] = torch.from_numpy(images.words)
                at = np.arange(begin, begin + chunk.num)
                own = np.nonzero(images.rows[at[at < len(images.rows)]])[0]
                rows = torch.from_numpy(own) + first
                found.rows[rows] = True
                skipped = int(images.rows[:begin].sum())
                found.features[rows] = images.features[skipped : skipped + len(own)]
                if found.shifts is not None and images.shifts is not None:
                    last = images.shifts.shape[1] - 1
                    found.shifts[:, first : first + chunk.num] = torch.from_numpy(images.shifts[:, at.clip(max=last)])
            first += chunk.num
        return {"images": found}


def _reads_rows(sequence: StateSequence) -> bool:
    """Returns whether a sequence's next rows have positions with a given embedding."""
    images = sequence.request.images
    return images is not None and sequence.computed < len(images.rows)
