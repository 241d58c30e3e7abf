"""Files of a speculator: `config.json`, with digests of the model's config and weights, and `model.safetensors`.

Files of published speculators have other names, and no digests:

    EAGLE-3    fc, midlayer.*, norm, lm_head, d2t, t2d            embed_tokens is the model's where the file lacks it
    MTP        model.layers.L.*, one layer after the model's L layers for each module, with the names of DeepSeek-V3:
               enorm, hnorm, eh_proj, shared_head.norm, and embed_tokens and shared_head.head or the model's

Token i of a head of EAGLE-3 is the model's token i + d2t[i]. t2d has a flag for each of the model's tokens: whether it
can be guessed. Only attention with projections q, k, v, o and a dense SwiGLU are read.

References:
    https://github.com/SafeAILab/EAGLE, class Model of cnets.py
    DeepSeek-V3, README_WEIGHTS.md, https://huggingface.co/deepseek-ai/DeepSeek-V3
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardfn.core import PyTree, raise_all
from shardfn.inference import Decoder

from ._config import EagleConfig, MTPConfig, SpeculatorConfig, config_from, list_misfits
from ._drafter import Speculator
from ._loss import Params, check_params
from ._target import LeafDigest, digest_weights, find_shared, list_other_weights

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
        directory: directory as of `save`, or files of a published EAGLE-3 speculator or of a model with modules of
            multi-token prediction. Such a speculator attends to the last 32 states.
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
    about = _read_json(place / CONFIG) if (place / CONFIG).is_file() else None
    if isinstance(about, dict) and _is_published(about):
        try:
            config, params = read_published(place, about, decoder, model_params)
            made = Speculator(config, params, branches=branches)
            made.check(decoder)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        return made
    if missing := [name for name in (CONFIG, TENSORS) if not (place / name).is_file()]:
        raise FileNotFoundError(f"{place} has no {' and no '.join(missing)}. Give a directory of shardfn speculate.")
    config, digest, weights = _parse_config(place / CONFIG, about)
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


_WINDOW = 32  # states that a published speculator attends to
_LAYER = {
    **{f"w{x}": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"w_{x}": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
}
_EAGLE = {
    **{name: f"midlayer.{other}" for name, other in _LAYER.items()},
    "embed_norm_w": "midlayer.input_layernorm.weight",
    "state_norm_w": "midlayer.hidden_norm.weight",
    "norm_w": "midlayer.post_attention_layernorm.weight",
    "last_norm_w": "norm.weight",
    "fuse": "fc.weight",
    "head": "lm_head.weight",
    "embed": "embed_tokens.weight",
}
_MODULE = {
    **_LAYER,
    "embed_norm_w": "enorm.weight",
    "state_norm_w": "hnorm.weight",
    "project": "eh_proj.weight",
    "first_norm_w": "input_layernorm.weight",
    "norm_w": "post_attention_layernorm.weight",
    "last_norm_w": "shared_head.norm.weight",
}
_NEEDED = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
_SHARED = {"embed": "embed_tokens.weight", "head": "shared_head.head.weight"}


def write_published(
    directory: str | os.PathLike[str], config: EagleConfig | MTPConfig, params: Params, *, model_type: str = "llama"
) -> None:
    """Writes an EAGLE-3 speculator, or modules of multi-token prediction, under the names of published files.

    Args:
        directory: directory, made where it is missing.
        config: shape.
        params: parameters as from `init`, whole.
        model_type: type of the model in `config.json`.

    Raises:
        ValueError: parameters are of another shape.
    """
    check_params(config, params)
    place = pathlib.Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    about = {
        **{"model_type": model_type, "vocab_size": config.vocab_size, "hidden_size": config.d_model},
        **{"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads or config.num_heads},
        **{"head_dim": config.head_dim, "intermediate_size": _find_features(config), "hidden_act": "silu"},
        **{"rope_theta": config.rope_base, "rms_norm_eps": config.norm_eps},
    }
    if isinstance(config, EagleConfig):
        ids = params.get("draft_tokens", torch.arange(config.vocab_size)).cpu()
        flags = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tensors = {name: params[leaf] for leaf, name in _EAGLE.items()}
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": flags}
        about |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(ids)}
        about["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.layers)}
    else:
        tensors = {
            f"model.layers.{config.num_layers + i}.{name}": params[leaf if leaf in _SHARED else f"{i}.{leaf}"]
            for i in range(config.num_drafts)
            for leaf, name in {**_MODULE, **_SHARED}.items()
        }
        about |= {"num_hidden_layers": config.num_layers, "num_nextn_predict_layers": config.num_drafts}
    save_file({name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}, place / TENSORS)
    (place / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def read_published(
    place: pathlib.Path, about: Mapping[str, Any], decoder: Decoder, model_params: PyTree | None
) -> tuple[EagleConfig | MTPConfig, Params]:
    """Returns the shape and the parameters of a published speculator.

    Args:
        place: directory.
        about: contents of `config.json`.
        decoder: decoder of the model.
        model_params: parameters of the model, for an embedding or a head that the files lack, or None.

    Raises:
        ValueError: a tensor is missing or unknown, or the layer computes something else. The message lists all.
    """
    wrong = [f"{name} must be an integer, got {x!r:.40}" for name in _NEEDED if type(x := about.get(name)) is not int]
    raise_all(ValueError, f"{CONFIG} of a published speculator:", wrong)
    shared = {} if model_params is None else find_shared(decoder, model_params)
    is_eagle, problems = "num_nextn_predict_layers" not in about, _list_other_settings(about)
    if is_eagle:
        L, n = decoder.depth, 4
        layers = about.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids") or (2, L // 2, L - 3)
        own = dict(_EAGLE)
        known, tensors = {*own.values(), "d2t", "t2d"}, _read_tensors(place, ("",))
    else:
        layers, L, n = (), int(about["num_hidden_layers"]), int(about["num_nextn_predict_layers"])
        own = {f"{i}.{leaf}": f"model.layers.{L + i}.{name}" for i in range(n) for leaf, name in _MODULE.items()}
        tensors = _read_tensors(place, tuple(f"model.layers.{L + i}." for i in range(n)))
        copies = {leaf: [f"model.layers.{L + i}.{name}" for i in range(n)] for leaf, name in _SHARED.items()}
        known = {*own.values(), *(name for names in copies.values() for name in names)}
        for leaf, names in copies.items():
            own[leaf] = names[0]
            given = [tensors[name] for name in names if name in tensors]
            problems += [f"{names} differ"] if any(not torch.equal(x, given[0]) for x in given[1:]) else []
    params = {leaf: tensors.get(name, shared.get(leaf)) for leaf, name in own.items()}
    problems += [f"{own[leaf]} is missing" for leaf, x in params.items() if x is None]
    problems += [
        f"{name} is unknown: only attention of q, k, v and o, and a dense SwiGLU"
        for name in tensors
        if name not in known
    ]
    raise_all(ValueError, f"{CONFIG} and tensors of a published speculator:", problems)
    found: Params = {leaf: x for leaf, x in params.items() if x is not None}
    sizes: dict[str, Any] = {
        **{"vocab_size": int(about["vocab_size"]), "num_layers": L},
        "d_model": int(about.get("target_hidden_size") or about["hidden_size"]),
        **{"d_inner": int(about["hidden_size"]), "num_heads": int(about["num_attention_heads"]), "num_drafts": n},
        **{"num_kv_heads": about.get("num_key_value_heads"), "d_head": about.get("head_dim"), "window": _WINDOW},
        **{"d_ff": about.get("intermediate_size"), "rope_base": _find_rope_base(about)},
        "norm_eps": float(about.get("rms_norm_eps", 1e-6)),
    }
    if is_eagle and (offsets := tensors.get("d2t")) is not None:
        found["draft_tokens"] = offsets.long() + torch.arange(len(offsets))
        sizes["draft_vocab"] = len(offsets)
    config = EagleConfig(**sizes, layers=tuple(layers)) if is_eagle else MTPConfig(**sizes)
    raise_all(ValueError, "a speculator of another model:", list_misfits(config, decoder))
    return config, found


def _read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _is_published(about: Mapping[str, Any]) -> bool:
    """Returns whether this is the `config.json` of a published speculator."""
    return "format" not in about and any(x in about for x in ("draft_vocab_size", "num_nextn_predict_layers"))


def _read_tensors(place: pathlib.Path, heads: tuple[str, ...]) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with any of `heads`."""
    files, found = sorted(place.glob("*.safetensors")), dict[str, Tensor]()
    if not files and (place / "pytorch_model.bin").is_file():
        found = torch.load(place / "pytorch_model.bin", map_location="cpu", weights_only=True)
    for path in files:
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if name.startswith(heads)}
    return {name: x for name, x in found.items() if name.startswith(heads)}


def _list_other_settings(about: Mapping[str, Any]) -> list[str]:
    """Returns the settings of a layer that computes something else."""
    only: dict[str, tuple[Any, ...]] = {
        **{"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "use_qk_norm": (False,)},
        **{"rope_scaling": (None,), "partial_rotary_factor": (None, 1, 1.0), "norm_before_residual": (False,)},
        "norm_before_fc": (False,),
    }
    return [
        f"{name}={about[name]!r:.60}; it must be {' or '.join(map(repr, values))}"
        for name, values in only.items()
        if name in about and about[name] not in values
    ]


def _find_rope_base(about: Mapping[str, Any]) -> float:
    return float(about.get("rope_theta") or (about.get("rope_parameters") or {}).get("rope_theta") or 10000.0)


def _find_features(config: EagleConfig | MTPConfig) -> int:
    return next(shape[0] for name, shape in config.shapes.items() if name.endswith("w_up"))


def _parse_config(path: pathlib.Path, about: Any) -> tuple[SpeculatorConfig, str, dict[str, LeafDigest]]:
    """Returns the shape, and the digests of the model's config and weights."""
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
