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

from shardfn import core

from ._lora import LoRA
from ._weight import Site, of_pattern

_PREFIX = "base_model.model."
# The ends of the names of an adapter's tensors.
_SUFFIX = {"a": "lora_A.weight", "b": "lora_B.weight", "m": "lora_magnitude_vector"}
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Features of `peft` that these trees cannot express: a file with any other value is refused.
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
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

    Call on a single rank, with whole tensors: `sf.unshard(sf.master_params(state)["lora"])`. With mixed precision,
    `state.params["lora"]` are rounded copies.

    Args:
        directory: path of the directory, made if missing.
        lora: the adapters' description. Leaves are weights of a module, named as by `from_module`.
        adapters: values.
        base_model: name or directory of the model, for the configuration.
        task_type: task type of `peft`, such as "CAUSAL_LM".

    Raises:
        ValueError: a leaf is not a weight of a module, or adapters have elements that are not finite. The message lists
            all problems.
    """
    tensors, problems, ranks, alphas = {}, [], {}, {}
    modules: dict[bool, list[str]] = {True: [], False: []}
    for path, site in lora.sites.items():
        names = _names_of(site)
        if names is None or not (site.full or names[0].endswith(".weight")):
            problems.append(f"{path} is not a weight of a module, by its name")
            continue
        own = [name.rpartition(".")[0] for name in names]
        modules[site.full] += own
        ranks |= {name: site.rank for name in own if site.rank != lora.rank and not site.full}
        alphas |= {name: site.alpha for name in own if site.alpha != lora.alpha and not site.full}
        for letter, x in adapters[path].items():
            parts = x.detach().cpu().unbind(0) if len(site.entries) > 1 else [x.detach().cpu()]
            named = names if site.full else [f"{name}.{_SUFFIX[letter]}" for name in own]
            tensors |= {_PREFIX + name: part.contiguous().clone() for name, part in zip(named, parts, strict=True)}
    core.raise_all(ValueError, "peft has no names for these adapters:", problems)
    counts = {name: (core.count_nonfinite(x), x.numel()) for name, x in tensors.items()}
    core.raise_nonfinite(f"the adapters for {directory}", {n: c for n, c in counts.items() if c[0]}, len(counts))
    config = _PLAIN | {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "fan_in_fan_out": lora.fan_in_fan_out,
        "target_modules": modules[False],
        "modules_to_save": list(dict.fromkeys(modules[True])) or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "base_model_name_or_path": base_model,
        "task_type": task_type,
        "inference_mode": True,
    }
    place = pathlib.Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / _TENSORS, {"format": "pt"})
    (place / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def load_peft(
    directory: str | os.PathLike[str], params: core.PyTree, *, specs: core.PyTree = core.P()
) -> tuple[LoRA, dict[str, dict[str, Tensor]]]:
    """Reads adapters that `peft` or `save_peft` has written, with ranks by pattern, DoRA and `modules_to_save`.

    The dropout of the file is ignored, because dropout is only for training. To train with dropout, use for example
    `dataclasses.replace(lora, dropout=0.1)`.

    Args:
        directory: directory with both files.
        params: a module's parameters by name, from `from_module`, stacked layers included.
        specs: specs of the parameters.

    Returns:
        The description and the values of the adapters.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the adapters are not LoRA, or belong to leaves that are missing or have other shapes. The message
            lists all such adapters.
    """
    place = pathlib.Path(directory)
    config: dict[str, Any] = json.loads((place / _CONFIG).read_text())
    problems = [
        f"{key} is {config[key]!r}; only {plain!r} is known here"
        for key, plain in _PLAIN.items()
        if key in config and config[key] not in (plain, None)
    ]
    core.raise_all(ValueError, f"{place / _CONFIG} is of adapters of another kind:", problems)
    tensors = {name.removeprefix(_PREFIX): x for name, x in load_file(place / _TENSORS).items()}
    found = _Found(config, tensors).of(params, place)
    thin = [path for path, own in found.values.items() if "full" not in own]
    lora = LoRA.of(
        params,
        [f"^{re.escape(path)}$" for path in thin],
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora", False)),
        fan_in_fan_out=bool(config.get("fan_in_fan_out", False)),
        specs=specs,
        rank_pattern={re.escape(path): int(found.values[path]["a"].shape[-2]) for path in thin},
        alpha_pattern={re.escape(path): found.alphas[path] for path in thin},
        modules_to_save=[f"^{re.escape(path)}$" for path, own in found.values.items() if "full" in own],
        dora=bool(config.get("use_dora", False)),
    )
    adapters = {path: found.values[path] for path in lora.sites}
    like = lora.shapes
    core.raise_all(
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


def _names_of(site: Site) -> list[str] | None:
    """Returns the names of the module's parameters in a leaf.

    A single name, or a name for each layer of a stack. None if the leaf is not a module's parameter.
    """
    *before, name = map(str, site.entries)
    if len(before) > 1 or "." not in name or (not site.full and len(site.shape) != 2 + len(before)):
        return None
    return [f"{before[0]}.{i}.{name}" for i in range(site.shape[0])] if before else [name]


class _Found:
    """Tensors of a file, by leaf.

    Attributes:
        values: the tensors of an adapter by path, with layers stacked as in the leaf.
        alphas: alphas by path.
    """

    def __init__(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.values, self.alphas = dict[str, dict[str, Tensor]](), dict[str, float]()
        self._config, self._tensors, self._taken = config, tensors, set[str]()
        self._letters = "abm" if config.get("use_dora") else "ab"

    def of(self, params: core.PyTree, place: pathlib.Path) -> "_Found":
        """Looks for the tensors of every leaf.

        Raises:
            ValueError: there are tensors without a leaf, missing layers, or different layers in a stack. The message
                lists all.
        """
        problems, known = [], dict[str, Site]()
        for entry, x in zip(core.tree_entries(params), core.tree_flatten(params)[0], strict=True):
            site = Site(entry, tuple(x.shape), core.P(), full=True)
            names, path = _names_of(site) or [], ".".join(map(str, entry))
            known |= {name.rpartition(".")[0]: site for name in names}
            problems += self._read_whole(path, names, len(entry) > 1)
            if names and names[0].endswith(".weight"):
                problems += self._read_thin(path, [name.removesuffix(".weight") for name in names], len(entry) > 1)
        left = [name for name in self._tensors if name not in self._taken]
        modules = [re.sub(r"\.(lora_[AB]\.weight|lora_magnitude_vector|weight|bias)$", "", name) for name in left]
        problems += [
            f"{m} is not a weight of the parameters.{core.did_you_mean(m, known)}" for m in dict.fromkeys(modules)
        ]
        core.raise_all(ValueError, f"adapters in {place} are not of these parameters:", problems)
        return self

    def _read_whole(self, path: str, names: list[str], stacked: bool) -> list[str]:
        if not any(name in self._tensors for name in names):
            return []
        self._taken |= {*names}
        missing = [f"{name} is missing" for name in names if name not in self._tensors]
        if not missing:
            self.values[path] = {"full": self._read_stacked(names, stacked)}
        return missing

    def _read_thin(self, path: str, modules: list[str], stacked: bool) -> list[str]:
        wanted = {letter: [f"{module}.{_SUFFIX[letter]}" for module in modules] for letter in self._letters}
        every = {name for own in wanted.values() for name in own}
        self._taken |= every
        missing = [f"{name} is missing" for own in wanted.values() for name in own if name not in self._tensors]
        if missing or not modules:
            return [] if len(missing) == len(every) else missing
        default = float(self._config["lora_alpha"])
        alphas = {float(of_pattern(self._config.get("alpha_pattern") or {}, m, default)) for m in modules}
        ranks = {self._tensors[name].shape[0] for name in wanted["a"]}
        if len(ranks) > 1 or len(alphas) > 1:
            return [f"{path} stacks layers of ranks {sorted(ranks)}, alphas {sorted(alphas)}; leave out layers="]
        self.values[path] = {letter: self._read_stacked(own, stacked) for letter, own in wanted.items()}
        self.alphas[path] = alphas.pop()
        return []

    def _read_stacked(self, names: list[str], stacked: bool) -> Tensor:
        parts = [self._tensors[name] for name in names]
        return torch.stack(parts) if stacked else parts[0]
