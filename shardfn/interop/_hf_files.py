"""Files next to the weights of a model of transformers, as from `save_pretrained`."""

import os
import pathlib
from typing import Any

import torch
from torch import nn


def write_beside(
    module: nn.Module, directory: str | os.PathLike[str], dtype: torch.dtype | None, tokenizer: Any = None
) -> None:
    """Writes `config.json`, `generation_config.json` and the files of a tokenizer, as far as present.

    Args:
        module: module with `config` and `generation_config`, which are not changed.
        directory: directory for the files.
        dtype: dtype of the written weights, for the config. None leaves the config's dtype.
        tokenizer: a tokenizer or processor of transformers, with its chat template.
    """
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_json_file"):
        saved: Any = type(config).from_dict(config.to_dict())
        saved.architectures = [type(module).__name__]
        if dtype is not None and hasattr(saved, "dtype"):
            saved.dtype = str(dtype).removeprefix("torch.")
        saved.to_json_file(pathlib.Path(directory) / "config.json")
    can_generate: Any = getattr(module, "can_generate", None)
    generation: Any = getattr(module, "generation_config", None)
    if callable(can_generate) and can_generate() and hasattr(generation, "save_pretrained"):
        generation.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def check_tokenizer(tokenizer: Any) -> None:
    """Refuses an object that has no files to write.

    Raises:
        TypeError: the object has no `save_pretrained`.
    """
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise TypeError(
            f"tokenizer={tokenizer!r} has no save_pretrained: pass a tokenizer or processor of transformers, such as"
            " AutoTokenizer.from_pretrained(...) gives."
        )
