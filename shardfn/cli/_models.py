"""Models by name: published models, and any other model by the fields of `models.gpt.Config`."""

import ast
import dataclasses
import functools
import importlib.util
import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from shardfn import core
from shardfn.interop import gpt_config
from shardfn.models import gpt, moe
from shardfn.nn.moe import top_k

_SWITCHES = ("tie_embeddings", "bias", "stacked", "embedding_norm", "norm_plus_one", "sinks", "head_bias")
_WORDS = ("norm", "mlp", "position", "qk_norm", "norm_place", "parallel")
_NUMBERS = ("dropout", "softcap", "logits_softcap", "attention_scale", "embedding_scale")
_LITERALS = {"true": True, "false": False, "none": None}
_OPTIONAL = ("num_kv_heads", "d_ff", "d_head", "window", "softcap", "logits_softcap")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Published model that `--model NAME` finds.

    Attributes:
        config: config of the model.
        source: publication of the shape, and values that were chosen here.
    """

    config: gpt.Config
    source: str


def parse_model(text: str) -> gpt.Config:
    """Returns the model that `text` names: a preset, `gpt:field=value,...`, or a `config.json` (or its directory).

    Fields after a name change it: `gpt2:num_layers=2`, `config.json:max_len=4096`.

    Raises:
        ValueError: no such preset, or lists every field that does not exist, has a bad value or is missing.

    Example:
        >>> parse_model("gpt2").num_layers, parse_model("gpt2:num_layers=2").num_layers
        (12, 2)
        >>> parse_model("gpt2:bias=false").bias
        False
    """
    name, _, rest = text.partition(":")
    path = pathlib.Path(name.strip())
    if path.suffix == ".json" or (path / "config.json").is_file():
        return _read_config_json(path, rest)
    name = name.strip().lower()
    if name != "gpt" and name not in PRESETS:
        known = ("gpt", *PRESETS)
        listed = ", ".join(PRESETS)
        raise ValueError(
            f"--model {name!r} is not known.{core.did_you_mean(name, known)} Known: {listed}; or gpt:num_layers=..,"
            "d_model=..,num_heads=..,vocab_size=..; or a config.json of transformers"
        )
    fields = _parse_fields(rest)
    if name == "gpt":
        missing = [f for f in ("vocab_size", "num_layers", "d_model", "num_heads") if f not in fields]
        core.raise_all(ValueError, f"--model {text}:", [f"{f} is missing; add {f}=.." for f in missing])
        return gpt.Config(**fields)
    return dataclasses.replace(PRESETS[name].config, **fields)


def _read_config_json(path: pathlib.Path, rest: str) -> gpt.Config:
    """Returns the model of a `config.json` of transformers, or for a family outside of the table a stand-in.

    Scaling of rotary positions changes no plan, and is ignored.
    """
    try:
        told = json.loads((path if path.suffix == ".json" else path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--model {path}: no JSON: {error}.") from error
    if not isinstance(told, dict):
        raise ValueError(f"--model {path}: a config.json is an object, this is a {type(told).__name__}.")
    kept = {name: x for name, x in told.items() if name not in ("rope_scaling", "rope_parameters")}
    try:
        config = gpt_config(kept)
    except ValueError as refused:
        config = make_stand_in(told, refused)
        text = f"--model {path}: {told['model_type']} is planned by a Llama-like shape of {gpt.num_params(config):,}"
        warnings.warn(f"{text} parameters; its activations and times are of this shape.", stacklevel=3)
    return dataclasses.replace(config, **_parse_fields(rest))


def make_stand_in(told: Mapping[str, Any], refused: ValueError) -> gpt.Config:
    """Returns a Llama-like config with the width, layers, heads, vocabulary and number of parameters of a model.

    transformers makes the model without memory, to count its parameters. The width of the feed-forward layers is chosen
    so that the numbers agree.

    Args:
        told: contents of a `config.json`.
        refused: reason why the model has no config of `models.gpt`.

    Raises:
        ValueError: `refused`, for a family that transformers does not know as a causal model, or without attention, or
            with experts, or a size that no such shape has.
    """
    if importlib.util.find_spec("transformers") is None:
        raise refused
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = told.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "auto_map" in told:
        raise refused
    try:
        settings = transformers.AutoConfig.for_model(str(kind), **{x: y for x, y in told.items() if x != "model_type"})
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(settings)
        total, inner = sum(p.numel() for p in module.parameters()), settings.get_text_config()
        names = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads")
        V, L, D, H = (getattr(inner, name) for name in names)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{refused} It cannot be made without memory either: {error}") from error
    if any("expert" in name for name, _ in module.named_parameters()):
        raise ValueError(f"{refused} Its experts are of another shape than those of models.moe.") from refused
    shape: dict[str, Any] = {"num_kv_heads": getattr(inner, "num_key_value_heads", None) or H}
    shape |= {"max_len": getattr(inner, "max_position_embeddings", None) or 2048}
    shape |= {"d_head": getattr(inner, "head_dim", None) or D // H, "tie_embeddings": settings.tie_word_embeddings}
    plain = functools.partial(gpt.Config.llama_like, vocab_size=V, num_layers=L, d_model=D, num_heads=H, **shape)
    one, two = gpt.num_params(plain(d_ff=1)), gpt.num_params(plain(d_ff=2))
    d_ff = 1 + round((total - one) / (two - one))
    if d_ff < 1 or abs(gpt.num_params(plain(d_ff=max(1, d_ff))) - total) > 0.01 * total:
        raise ValueError(f"{refused} No Llama-like shape has its {total:,} parameters.") from refused
    return plain(d_ff=d_ff)


def _parse_fields(text: str) -> dict[str, Any]:
    known = [f.name for f in dataclasses.fields(gpt.Config)]
    fields: dict[str, Any] = {}
    problems = []
    for item in filter(None, (i.strip() for i in text.split(","))):
        name, sep, word = (part.strip() for part in item.partition("="))
        if name not in known:
            problems.append(f"{name!r} is not a field of models.gpt.Config.{core.did_you_mean(name, known)}")
        elif not sep:
            problems.append(f"{name!r} has no value; write {name}=..")
        else:
            fields[name] = _parse_value(word)
            problems += _type_problem(name, fields[name])
    core.raise_all(ValueError, "--model:", problems)
    return fields


def _parse_value(word: str) -> Any:
    if word.lower() in _LITERALS:
        return _LITERALS[word.lower()]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _type_problem(name: str, value: Any) -> list[str]:
    """Returns at most one error in the type of a field's value. The config checks the range."""
    if name in _WORDS or (name in _OPTIONAL and value is None):
        return []
    if name in _SWITCHES:
        return [] if isinstance(value, bool) else [f"{name}={value!r} must be True or False."]
    kinds = (int, float) if name in _NUMBERS else (int,)
    good = isinstance(value, kinds) and not isinstance(value, bool)
    return [] if good else [f"{name}={value!r} must be {'a number' if name in _NUMBERS else 'an integer'}."]


def _gpt_config(layers: int, width: int, heads: int, vocab: int = 50257, length: int = 1024, **more: Any) -> gpt.Config:
    return gpt.Config(vocab, layers, width, heads, max_len=length, **{"tie_embeddings": True, **more})


def _llama_config(layers: int, width: int, heads: int, ff: int, **more: Any) -> gpt.Config:
    return gpt.Config.llama_like(num_layers=layers, d_model=width, num_heads=heads, d_ff=ff, **more)


def _moe_config(layers: int, num: int | tuple[int, ...], *, residual: bool) -> gpt.Config:
    """Returns DeepSpeed-MoE's model over a GPT of 1.3B, with experts in every second layer."""
    route = functools.partial(top_k, renormalise=False)
    rule = moe.Experts(num=num, every=2, top_k=1, route=route, residual=residual)
    return _gpt_config(layers, 2048, 16, length=2048, experts=rule)


_DEEPSPEED_MOE = "Rajbhandari et al. 2022, arXiv 2201.05596, tables 1 and 4; GPT-2's vocabulary"
_GPT2 = "Radford et al. 2019, table 2"
_LLAMA = "Touvron et al. 2023, arXiv 2302.13971, table 2"

PRESETS: Mapping[str, Preset] = {
    "gpt2": Preset(_gpt_config(12, 768, 12), _GPT2),
    "gpt2-medium": Preset(_gpt_config(24, 1024, 16), _GPT2),
    "gpt2-large": Preset(_gpt_config(36, 1280, 20), _GPT2),
    "gpt2-xl": Preset(_gpt_config(48, 1600, 25), _GPT2),
    "llama-7b": Preset(_llama_config(32, 4096, 32, 11008), _LLAMA),
    "llama-13b": Preset(_llama_config(40, 5120, 40, 13824), _LLAMA),
    "llama-65b": Preset(_llama_config(80, 8192, 64, 22016), _LLAMA),
    "llama2-70b": Preset(
        _llama_config(80, 8192, 64, 28672, num_kv_heads=8, max_len=4096), "Touvron et al. 2023, arXiv 2307.09288"
    ),
    "llama3-8b": Preset(
        _llama_config(32, 4096, 32, 14336, num_kv_heads=8, vocab_size=128256, max_len=8192), "arXiv 2407.21783, table 3"
    ),
    "mixtral-8x7b": Preset(moe.mixtral_like(), "Jiang et al. 2024, arXiv 2401.04088, table 1"),
    "qwen3-30b-a3b": Preset(
        moe.qwen3_moe_like(), "Qwen Team 2025, arXiv 2505.09388, table 2; heads of 64, not of 128 as there"
    ),
    "deepseek-v3-like": Preset(
        moe.deepseek_v3_like(),
        "DeepSeek-AI 2024, arXiv 2412.19437: its feed-forward layers; attention is Llama's, not the latent one",
    ),
    "moe-1.3b-128": Preset(_moe_config(24, 128, residual=False), _DEEPSPEED_MOE),
    "pr-moe-1.3b-128": Preset(_moe_config(24, (64,) * 10 + (128,) * 2, residual=True), _DEEPSPEED_MOE),
    "pr-mos-1.3b-128": Preset(_moe_config(21, (64,) * 8 + (128,) * 2, residual=True), _DEEPSPEED_MOE),
    "zero-7.5b": Preset(
        _gpt_config(36, 4096, 32, vocab=59136, length=2048),
        "Rajbhandari et al. 2019, arXiv 1910.02054, figure 1, which gives the count 7.5e9 alone: 36 layers of 4096, and"
        " the vocabulary that makes it so",
    ),
    "turing-nlg-17b": Preset(
        _gpt_config(78, 4256, 28),
        "Rosset 2020, Microsoft Research blog: 78 layers, hidden 4256, 28 heads; GPT-2's vocabulary",
    ),
    "gpt3-175b": Preset(_gpt_config(96, 12288, 96, length=2048), "Brown et al. 2020, arXiv 2005.14165, table 2.1"),
    "bloom-176b": Preset(
        gpt.Config.bloom_like(), "BigScience 2022, arXiv 2211.05100, table 3; its vocabulary padded as in training"
    ),
    "mt-nlg-530b": Preset(
        _gpt_config(105, 20480, 128, vocab=51200, length=2048),
        "Smith et al. 2022, arXiv 2201.11990: 105 layers of 20480",
    ),
    "zero-offload-13b": Preset(_gpt_config(65, 4096, 32), "Ren et al. 2021, arXiv 2101.06840: 65 layers of 4096"),
    "zero-offload-70b": Preset(_gpt_config(69, 9216, 96), "Ren et al. 2021, arXiv 2101.06840: 69 layers of 9216"),
    "ted-40b": Preset(
        _gpt_config(32, 4096, 32, length=2048, experts=moe.Experts(num=16, every=2, top_k=1)),
        "Singh et al. 2023, arXiv 2303.06318: a base of 6.7 billion, with 16 experts in every second layer",
    ),
    "zero-infinity-32t": Preset(
        _gpt_config(203, 114688, 512, vocab=51200),
        "Rajbhandari et al. 2021, arXiv 2104.07857, which gives the count of 32e12 alone: 203 layers of 114688 make it",
    ),
    "1t": Preset(
        _gpt_config(128, 25600, 160, vocab=51200, length=2048),
        "Narayanan et al. 2021, arXiv 2104.04473, table 1: 128 layers of 25600, 160 heads",
    ),
}
