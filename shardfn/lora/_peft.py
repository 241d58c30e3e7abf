"""Adapter files of `peft`: `adapter_config.json` and `adapter_model.safetensors`."""

import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardfn.core import P, PyTree, did_you_mean, raise_all, tree_entries, tree_flatten

from ._lora import LoRA, Site

_PREFIX = "base_model.model."
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Features of `peft` that these trees cannot express: a file with any other value is refused.
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "trainable_token_indices": None,
}


def save_peft(
    directory: str | os.PathLike[str],
    lora: LoRA,
    adapters: Mapping[str, Mapping[str, Tensor]],
    *,
    base_model: str | None = None,
    task_type: str | None = "CAUSAL_LM",
) -> None:
    """Writes adapters of a module's parameters so that `peft.PeftModel.from_pretrained(model, directory)` reads them.

    Call it on one rank, with whole tensors: `sf.unshard(state.params["lora"])`.

    Args:
        directory: made if it is not there.
        lora: the adapters' description; its leaves are weights of a module, named as by `from_module`.
        adapters: their values.
        base_model: the name or directory of the model, which the configuration states.
        task_type: of `peft`.

    Raises:
        ValueError: a leaf is not a weight of a module.
    """
    tensors, modules, problems = {}, [], []
    for path, site in lora.sites.items():
        names = _modules_of(site)
        if names is None:
            problems.append(f"{path} is no weight of a module, by its name")
            continue
        modules += names
        for letter, own in (("A", adapters[path]["a"]), ("B", adapters[path]["b"])):
            parts = own.detach().cpu().unbind(0) if own.ndim == 3 else [own.detach().cpu()]
            tensors |= {
                f"{_PREFIX}{name}.lora_{letter}.weight": x.contiguous() for name, x in zip(names, parts, strict=True)
            }
    raise_all(ValueError, "peft has no names for these adapters:", problems)
    config = _PLAIN | {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "fan_in_fan_out": lora.fan_in_fan_out,
        "target_modules": modules,
        "base_model_name_or_path": base_model,
        "task_type": task_type,
        "inference_mode": True,
    }
    place = pathlib.Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / _TENSORS, {"format": "pt"})
    (place / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def load_peft(
    directory: str | os.PathLike[str], params: PyTree, *, specs: PyTree = P()
) -> tuple[LoRA, dict[str, dict[str, Tensor]]]:
    """Reads adapters that `peft` or `save_peft` has written.

    Their dropout is ignored, as it acts in training alone.

    Args:
        directory: with both files.
        params: a module's parameters by name, from `from_module`, stacked layers included.
        specs: of the parameters.

    Returns:
        The adapters' description, and their values.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: they are of another kind than plain LoRA, or belong to leaves that are missing or have other shapes;
            lists all.
    """
    place = pathlib.Path(directory)
    config: dict[str, Any] = json.loads((place / _CONFIG).read_text())
    problems = [
        f"{key} is {config[key]!r}; only {plain!r} is known here"
        for key, plain in _PLAIN.items()
        if key in config and config[key] not in (plain, None)
    ]
    raise_all(ValueError, f"{place / _CONFIG} is of adapters of another kind:", problems)
    tensors = load_file(place / _TENSORS)
    found = _sites(params, {name.removeprefix(_PREFIX): x for name, x in tensors.items()}, place)
    lora = LoRA.of(
        params,
        [f"^{re.escape(path)}$" for path in found],
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora", False)),
        fan_in_fan_out=bool(config.get("fan_in_fan_out", False)),
        specs=specs,
    )
    adapters = {path: found[path] for path in lora.sites}
    like = lora.shapes
    raise_all(
        ValueError,
        f"adapters in {place} do not fit the parameters:",
        [
            f"{path}, {letter}: {tuple(x.shape)} in the file, {like[path][letter]} wanted"
            for path, own in adapters.items()
            for letter, x in own.items()
            if tuple(x.shape) != like[path][letter]
        ],
    )
    return lora, adapters


def _modules_of(site: Site) -> list[str] | None:
    """The modules whose weight a leaf is: one, or one per layer of a stack. None if it is not a module's weight."""
    *before, last = map(str, site.entries)
    if not last.endswith(".weight") or len(before) > 1 or len(site.shape) != 2 + len(before):
        return None
    name = last.removesuffix(".weight")
    return [f"{before[0]}.{i}.{name}" for i in range(site.shape[0])] if before else [name]


def _sites(params: PyTree, tensors: Mapping[str, Tensor], place: pathlib.Path) -> dict[str, dict[str, Tensor]]:
    """The file's tensors by the path of their leaf, with layers stacked as in the leaf.

    Raises:
        ValueError: lists tensors without a leaf, and missing layers.
    """
    sites = [
        Site(entry, tuple(x.shape), P()) for entry, x in zip(tree_entries(params), tree_flatten(params)[0], strict=True)
    ]
    out: dict[str, dict[str, Tensor]] = {}
    seen, taken, problems = set[str](), set[str](), []
    known = {name: site for site in sites for name in _modules_of(site) or ()}
    for module, site in known.items():
        path = ".".join(map(str, site.entries))
        names = _modules_of(site) or [module]
        wanted = {letter: [f"{name}.lora_{letter}.weight" for name in names] for letter in "AB"}
        missing = [name for own in wanted.values() for name in own if name not in tensors]
        if path in seen or len(missing) == 2 * len(names):
            continue
        seen.add(path)
        problems += [f"{name} is missing" for name in missing]
        if not missing:
            parts = {letter: [tensors[name] for name in own] for letter, own in wanted.items()}
            stacked = len(site.entries) > 1
            out[path] = {k.lower(): torch.stack(v) if stacked else v[0] for k, v in parts.items()}
        taken |= {name for own in wanted.values() for name in own}
    modules = [re.sub(r"\.lora_[AB]\.weight$", "", name) for name in tensors if name not in taken]
    problems += [f"{m} is no weight of the parameters.{did_you_mean(m, known)}" for m in dict.fromkeys(modules)]
    raise_all(ValueError, f"adapters in {place} are not of these parameters:", problems)
    return out
