"""Modules of transformers for an engine, with or without their weights."""

import pathlib
from collections.abc import Mapping
from typing import Any

from shardfn.core import first_of, named_parameters, raise_all
from shardfn.interop import module_from_hf, without_weights
from shardfn.interop.quantized import can_decode, read_quantization
from shardfn.modules import find_reading, split_parts

from ._settings import DTYPES, ModelSettings, name_file_in_errors
from ._tokenizers import FILES_ALONE, import_transformers

# A model of transformers, and weights for a model without weights.
HFModule = tuple[Any, Mapping[str, Any] | None]
_WIDE = "_keep_in_fp32_modules_strict"  # names layers that from_pretrained leaves in float32


def make_module(directory: pathlib.Path, job: ModelSettings, axis: str | None) -> HFModule:
    """Returns a model of transformers, without weights on several ranks, where each rank reads a part."""
    transformers = import_transformers(directory)
    with name_file_in_errors(directory, "its config.json"):
        config = transformers.AutoConfig.from_pretrained(directory, **FILES_ALONE)
    quantized = getattr(config, "quantization_config", None) is not None
    decoded = quantized and can_decode(read_quantization(directory))
    if decoded:  # read as floats, into a module of plain layers
        del config.quantization_config
    if not decoded and (axis is None or quantized):
        return load_module(directory, job), None
    with name_file_in_errors(directory, "its config.json"), without_weights():
        automatic = _choose_class(transformers, config)
        made = automatic.from_config(config, dtype=DTYPES[job.dtype], **FILES_ALONE).eval()
    if job.dtype != "float32" and getattr(made, _WIDE, None) and not decoded:
        return load_module(directory, job), None
    values = module_from_hf(made, directory, dtype=DTYPES[job.dtype])
    language = _take_language(made)
    return language, {name: values[name] for name, _ in named_parameters(language)}


def load_module(directory: pathlib.Path, job: ModelSettings, **more: Any) -> Any:
    """Returns a model of transformers with the weights."""
    transformers = import_transformers(directory)
    automatic = transformers.AutoModelForCausalLM
    if "gguf_file" not in more:
        automatic = _choose_class(transformers, transformers.AutoConfig.from_pretrained(directory, **FILES_ALONE))
    more |= FILES_ALONE if "gguf_file" in more else {"use_safetensors": True, **FILES_ALONE}
    with name_file_in_errors(directory, "its model"):
        how = {"dtype": DTYPES[job.dtype], "output_loading_info": True, **more}
        made, about = automatic.from_pretrained(directory, **how)
    # transformers fills these with random values.
    missing = [f"{name} is missing" for name in sorted(about["missing_keys"])]
    raise_all(
        ValueError, f"the files of {directory} are not those of the model in its config.json:", first_of(missing, 20)
    )
    return _take_language(made.eval())


def _choose_class(transformers: Any, config: Any) -> Any:
    """Returns the class of transformers that loads a model."""
    reads = find_reading(config) is not None
    return transformers.AutoModelForImageTextToText if reads else transformers.AutoModelForCausalLM


def _take_language(made: Any) -> Any:
    """Returns a model without its towers, which no rank of a server computes."""
    return made if find_reading(made.config) is None else split_parts(made)[0]
