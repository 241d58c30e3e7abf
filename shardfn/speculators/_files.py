"""Files of a speculator: `config.json`, with digests of the model's config and weights, and `model.safetensors`."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from safetensors.torch import load_file, save_file

from shardfn.core import PyTree, raise_all
from shardfn.inference import Decoder

from ._config import SpeculatorConfig, config_from, list_misfits
from ._drafter import Speculator
from ._loss import Params, check_params
from ._target import LeafDigest, digest_weights, list_other_weights

CONFIG, TENSORS = "config.json", "model.safetensors"
_FORMAT = "shardfn-speculator"
_OF_MODEL = ("model_digest", "model_weights")


def save(
    directory: str | os.PathLike[str], config: SpeculatorConfig, params: Params, decoder: Decoder, model_params: PyTree
) -> None:
    """Writes a speculator of a model. Files of the same names are replaced once the new files are whole.

    Args:
        directory: directory, made where it is missing.
        config: shape.
        params: parameters as from `init`, whole.
        decoder: decoder of the model that the speculator was trained for.
        model_params: parameters of the model. Digests of some values of each leaf are written.

    Raises:
        ValueError: parameters or model are of another shape.

    Example:
        >>> import tempfile
        >>> from shardfn import core
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> from shardfn.speculators import config_of, init
        >>> shape = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> model, weights = decoder(shape), gpt.init(shape, core.key(0))
        >>> config = config_of(model, "mlp")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(directory, config, init(config, core.key(0)), model, weights)
        ...     load(directory, model, weights).config == config
        True
    """
    check_params(config, params)
    raise_all(ValueError, "save: a speculator of another model:", list_misfits(config, decoder))
    place = pathlib.Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    of_model = dict(zip(_OF_MODEL, (decoder.digest, digest_weights(decoder, model_params)), strict=True))
    about = {"format": _FORMAT, **dataclasses.asdict(config), **of_model}
    new = {name: place / f"{name}.new" for name in (TENSORS, CONFIG)}
    save_file({name: x.detach().cpu().contiguous() for name, x in params.items()}, new[TENSORS])
    new[CONFIG].write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    for name, path in new.items():
        os.replace(path, place / name)


def load(
    directory: str | os.PathLike[str], decoder: Decoder, model_params: PyTree | None, *, branches: int = 1
) -> Speculator:
    """Returns the speculator of a directory as a drafter of a model.

    Args:
        directory: directory as of `save`.
        decoder: decoder of the model.
        model_params: parameters of the model. None compares only configs, for example to keep the speculator of a model
            that was trained further.
        branches: see `Speculator`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or has other fields or leaves, or the speculator is of another model: of another
            config, or of other weights. The message lists the leaves.
    """
    place = pathlib.Path(directory)
    if missing := [name for name in (CONFIG, TENSORS) if not (place / name).is_file()]:
        raise FileNotFoundError(f"{place} has no {' and no '.join(missing)}. Give a directory of shardfn speculate.")
    config, digest, weights = _read_config(place / CONFIG)
    try:
        params = load_file(place / TENSORS)
    except Exception as error:  # safetensors' own class is not part of its interface
        raise ValueError(f"{place / TENSORS} cannot be read: {error}") from error
    try:
        made = Speculator(config, params, digest=digest, branches=branches)
        made.check(decoder)
        problems = [] if model_params is None else list_other_weights(weights, digest_weights(decoder, model_params))
        raise_all(ValueError, "a speculator of other weights. Train one for this model:", problems)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return made


def _read_config(path: pathlib.Path) -> tuple[SpeculatorConfig, str, dict[str, LeafDigest]]:
    """Returns the shape, and the digests of the model's config and weights."""
    try:
        about: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    kind = about.get("format") if isinstance(about, dict) else None
    if kind != _FORMAT:
        raise ValueError(
            f"{path} has the format {kind!r:.40}, and must have {_FORMAT!r}. Give a speculator's directory."
        )
    raise_all(ValueError, f"{path}:", [f"{name} is missing" for name in _OF_MODEL if name not in about])
    del about["format"]
    digest, weights = (about.pop(name) for name in _OF_MODEL)
    try:
        leaves = {name: LeafDigest(int(size), str(values)) for name, (size, values) in weights.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: model_weights must have a size and a digest for each leaf, got {weights!r:.60}. Train again."
        ) from error
    try:
        return config_from(about), str(digest), leaves
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
