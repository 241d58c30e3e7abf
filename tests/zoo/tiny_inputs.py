"""Inputs for any of Hugging Face's architectures, made from the names that its forward takes."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROWS, LENGTH, LABELS = 4, 8, 2


def inputs(model: Any, given: Mapping[str, Any], seed: int, images: int = 0) -> dict[str, Tensor]:
    """A batch of four rows.

    Args:
        model: the model.
        given: shapes that do not follow from the names, or None for inputs that are left out.
        seed: of the values.
        images: the number of places in front of the text that an image takes.
    """
    g = torch.Generator().manual_seed(seed)
    takes = inspect.signature(model.forward).parameters
    config, out = model.config, {}
    for name in takes:
        shape = given.get(name, ...)
        if shape is None:
            continue
        value = _given(shape, g) if shape is not ... else _input(name, takes, config, g)
        if value is not None:
            out[name] = value
    if "labels" in takes and given.get("labels", ...) is ...:
        labels = _labels(type(model).__name__, config, g)
        if labels is not None:
            out["labels"] = labels
    return _seeing(out, takes, config, images, g) if images else out


def _seeing(batch: dict[str, Tensor], takes: Any, config: Any, images: int, g: torch.Generator) -> dict[str, Tensor]:
    """An image in front of each text."""
    token = getattr(config, "image_token_id", None) or config.image_token_index
    fill = {"input_ids": token, "attention_mask": 1, "labels": -100, "token_type_ids": 1}
    if "token_type_ids" in takes:
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    longer = {k: torch.nn.functional.pad(x, (images, 0), value=fill[k]) for k, x in batch.items()}
    return longer | {"pixel_values": _pixels(config, g)}


def _given(shape: Any, g: torch.Generator) -> Tensor:
    if isinstance(shape, Tensor):
        return shape
    if isinstance(shape[0], str):
        return torch.randint(0, shape[1], (ROWS, *shape[2:]), generator=g)
    return torch.randn(ROWS, *shape, generator=g, dtype=torch.float64)


def _input(name: str, takes: Any, config: Any, g: torch.Generator) -> Tensor | None:
    first = next(iter(takes))
    if name == "input_ids" and (first == name or "pixel_values" in takes):
        return torch.randint(7, 39, (ROWS, LENGTH), generator=g)
    if name == "attention_mask" and "input_ids" in takes and first in ("input_ids", "pixel_values"):
        mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        mask[1::2, -2:] = 0
        return mask
    if name == "decoder_input_ids" and "labels" not in takes:
        return torch.randint(7, 39, (ROWS, LENGTH), generator=g)
    if name == "bbox" and first == "input_ids":
        corner = torch.randint(0, 20, (ROWS, LENGTH, 2), generator=g)
        return torch.cat([corner, corner + torch.randint(1, 20, (ROWS, LENGTH, 2), generator=g)], -1)
    if name in ("pixel_values", "images") and (
        first == name or not hasattr(config, "text_config") or _contrasts(takes)
    ):
        return _pixels(config, g)
    if name in ("input_values", "input_features") and first == name:
        return _sound(name, config, g)
    if name in ("start_positions", "end_positions"):
        return torch.randint(0, LENGTH, (ROWS,), generator=g)
    return None


def _contrasts(takes: Any) -> bool:
    return "return_loss" in takes


def _pixels(config: Any, g: torch.Generator) -> Tensor:
    config = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
    size = getattr(config, "image_size", None) or 32
    size = list(size) if isinstance(size, list | tuple) else [size, size]
    channels = getattr(config, "num_channels", None) or 3
    frames = getattr(config, "num_frames", None)
    return torch.randn(ROWS, *([frames] if frames else []), channels, *size, generator=g, dtype=torch.float64)


def _sound(name: str, config: Any, g: torch.Generator) -> Tensor:
    if name == "input_values" and not hasattr(config, "num_mel_bins"):
        return torch.randn(ROWS, 4000, generator=g, dtype=torch.float64)
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 16)
    if hasattr(config, "max_source_positions"):
        return torch.randn(ROWS, mels, 2 * config.max_source_positions, generator=g, dtype=torch.float64)
    return torch.randn(ROWS, getattr(config, "max_length", 32), mels, generator=g, dtype=torch.float64)


def _labels(kind: str, config: Any, g: torch.Generator) -> Tensor | None:
    if kind.endswith(("ForImageClassification", "SequenceClassification", "ForVideoClassification")):
        return torch.randint(0, LABELS, (ROWS,), generator=g)
    if kind.endswith("AudioClassification"):
        return torch.randint(0, LABELS, (ROWS,), generator=g)
    if kind.endswith("ForCTC"):
        return torch.randint(1, 30, (ROWS, 3), generator=g)
    if kind.endswith("SemanticSegmentation"):
        return torch.randint(0, LABELS, (ROWS, 32, 32), generator=g)
    if kind.endswith("TokenClassification"):
        return torch.randint(0, LABELS, (ROWS, LENGTH), generator=g)
    if kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "WithLMHeadModel")):
        return torch.randint(7, 39, (ROWS, LENGTH), generator=g)
    return None
