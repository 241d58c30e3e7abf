"""Models of sequence classification of transformers, as decoders of `models.gpt` and a head over their last state."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.core import raise_all
from shardfn.interop.quantized import open_archive
from shardfn.models import gpt

from ._hf_config import gpt_config, read_config
from ._hf_gpt import params_of_archive

_HEAD = "score.weight"


def is_classifier(told: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` describes a model of sequence classification.

    Example:
        >>> is_classifier({"architectures": ["LlamaForSequenceClassification"]})
        True
    """
    return any(str(name).endswith("ForSequenceClassification") for name in told.get("architectures") or ())


def classifier_from_hf(
    directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **changes: Any
) -> tuple[gpt.Config, gpt.Params, Tensor]:
    """Returns a model of sequence classification: a `Config`, deferred parameters, and the classification head.

    The files have no head of tokens, so that the model's head is its table of embeddings.

    Args:
        directory: directory with `config.json` and the weights.
        dtype: see `gpt_from_hf`.
        **changes: see `gpt_from_hf`.

    Returns:
        The config, the parameters, and the weights of the classes, float32 [C, D], a row for each class.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: as `gpt_from_hf`, or the head is missing or has another width.
        DamagedError: a file is not a safetensors file, or was cut short.
    """
    told = read_config(directory)
    config = gpt_config(told, **{**changes, "tie_embeddings": True})
    archive = open_archive(directory)
    problems = [] if _HEAD in archive else [f"{_HEAD} is missing (weights of the classes)"]
    if not problems and (len(archive[_HEAD].shape) != 2 or archive[_HEAD].shape[1] != config.d_model):
        problems = [f"{_HEAD} is {archive[_HEAD].shape} in the file, and must be [classes, {config.d_model}]"]
    raise_all(ValueError, f"the files of {directory} have no classification head:", problems)
    body: Any = _ArchiveBody(archive)
    params = params_of_archive(body, config, told["model_type"], dtype, keep_codes=False)
    box = [(0, num) for num in archive[_HEAD].shape]
    return config, params, archive.box(_HEAD, box).float()


class _ArchiveBody(Mapping[str, Any]):
    """Tensors of files without the classification head."""

    def __init__(self, archive: Any) -> None:
        self._archive, self.directory, self.box = archive, archive.directory, archive.box

    def __getitem__(self, name: str) -> Any:
        return self._archive[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._archive if name != _HEAD)

    def __len__(self) -> int:
        return len(self._archive) - 1
