"""Inputs other than text: towers and projectors of models of images and text, and readers of sounds for a Whisper."""

import inspect
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.inference import EncodedImage, ImageEncoder, ImageRule, SpeechReader
from shardfn.interop import IMAGES_RULE, module_from_hf, seq2seq_config, without_weights
from shardfn.modules import find_reading, split_parts

from ._settings import GENERATION_CONFIG, ModelSettings, name_file_in_errors, read_json_object
from ._text import ModelText
from ._tokenizers import FILES_ALONE, import_transformers, load_text


def load_text_and_images(job: ModelSettings) -> ModelText:
    """Loads what makes prompts: the tokenizer, and for a model of images and text the tower and the projector.

    Raises:
        ValueError: as `load_image_encoder`.
        OSError: a file is missing.
        ImportError: a package is missing. The message has the installation.
    """
    text = load_text(job)
    if job.kind != "files":
        return text
    return text._replace(
        images=load_image_encoder(job.model, text.tokenizer), speech=load_speech_reader(job.model, text.token)
    )


def load_image_encoder(directory: str | os.PathLike[str], tokenizer: Any) -> ImageEncoder | None:
    """Returns the tower and the projector of a directory of transformers, or None for a model without images.

    Only the weights of the tower and the projector are read, as float32.

    Args:
        directory: directory of the model, with `preprocessor_config.json`.
        tokenizer: tokenizer of the model.

    Raises:
        ValueError: files are of another model, or sizes do not fit. The message names the file.
        OSError: a file is missing.
    """
    directory = pathlib.Path(directory)
    path = directory / "config.json"
    if not path.is_file() or "vision_config" not in (settings := read_json_object(path)):
        return None
    transformers = import_transformers(directory)
    with name_file_in_errors(path, "its images"), without_weights():
        config = transformers.AutoConfig.from_pretrained(directory, **FILES_ALONE)
        if (reading := find_reading(config)) is None:
            return None
        made = transformers.AutoModelForImageTextToText.from_config(config, **FILES_ALONE).eval()
    with name_file_in_errors(directory, "the weights of its tower"):
        values = module_from_hf(made, directory, dtype=torch.float32)
        _, rest = split_parts(made)
        _place_weights(rest, values)
    with name_file_in_errors(directory, "its image processor"):
        processor = transformers.AutoImageProcessor.from_pretrained(directory, **FILES_ALONE)
    names = inspect.signature(rest.get_image_features).parameters
    spell, token = tokenizer.convert_ids_to_tokens, reading.token
    # Gemma has a token for an image in the template's text, and others in the prompt.
    begins = settings["model_type"] == "gemma3"
    begin, end = (spell(config.boi_token_index), spell(config.eoi_token_index)) if begins else ("", "")

    def encode(pixels: Tensor) -> EncodedImage:
        shape = {"input_data_format": "channels_last", "return_tensors": "pt"}
        inputs = processor(images=[pixels.permute(1, 2, 0).numpy()], **shape)
        found = rest.get_image_features(**{name: x for name, x in inputs.items() if name in names})
        parts = found.pooler_output if hasattr(found, "pooler_output") else found
        features = torch.cat([x.reshape(-1, x.shape[-1]) for x in parts])
        text = spell(token) * len(features)
        grid = _find_grid(inputs, len(features), getattr(processor, "merge_size", 1))
        return EncodedImage(features, f"\n\n{begin}{text}{end}\n\n" if begins else text, grid)

    width = config.get_text_config(decoder=True).hidden_size
    own = settings.get(IMAGES_RULE)
    rule = ImageRule(token, own or ("whole" if reading.whole else "causal"), reading.grid)
    return ImageEncoder(begin or spell(token), rule, width, encode)


def load_speech_reader(directory: str | os.PathLike[str], token: Callable[[str], int | None]) -> SpeechReader | None:
    """Returns the reader of sounds of a directory of a Whisper, or None for another model.

    A transcript begins with the tokens of the language, English by default, of the task and of no times, where the
    tokenizer has them.

    Args:
        directory: directory of the model.
        token: function from a token's text to its id, or None.
    """
    directory = pathlib.Path(directory)
    path = directory / "config.json"
    if not path.is_file() or (settings := read_json_object(path)).get("model_type") != "whisper":
        return None
    config = seq2seq_config(settings)
    assert config.features is not None
    rules = directory / GENERATION_CONFIG
    given = read_json_object(rules) if rules.is_file() else {}
    banned = given.get("suppress_tokens") or settings.get("suppress_tokens") or []
    speaks = token("<|en|>") is not None

    def begin(language: str | None) -> tuple[int, ...]:
        own = token(f"<|{language or 'en'}|>") if speaks else None
        if language is not None and own is None:
            raise ValueError(f"language must be a code that the tokenizer has, such as 'en', got {language[:60]!r}.")
        rest = [token("<|transcribe|>") if speaks else None, token("<|notimestamps|>")]
        return (config.start, *(x for x in (own, *rest) if x is not None))

    shape = 2 * config.encoder.max_len, config.features
    return SpeechReader(shape, begin, tuple(x for x in banned if 0 <= x < config.decoder.vocab_size))


def _place_weights(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Reads the weights of a module on `meta`."""
    for name, p in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        read = nn.Parameter(values[name].full().to(p.dtype), requires_grad=False)
        setattr(module.get_submodule(path), leaf, read)


def _find_grid(inputs: Mapping[str, Any], num: int, merged: int) -> tuple[int, int]:
    """Returns the rows and columns of an image's features."""
    if "image_grid_thw" in inputs:
        _, h, w = inputs["image_grid_thw"][0].tolist()
        return h // merged, w // merged
    side = math.isqrt(num)
    return (side, side) if side * side == num else (1, num)
