"""Weights of encoder-decoder models of transformers, T5, mT5 and BART, as parameters of `models.seq2seq`, and back.

Whisper is read, and not written.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from shardfn import core
from shardfn.interop.leaves import Archive, ArchiveWriter, WrittenByFirst, gather_leaf
from shardfn.models import gpt, seq2seq

from ._hf_config import read_config

Told = Mapping[str, Any]
SEQ2SEQ_TYPES = ("t5", "mt5", "bart", "whisper")

_T5: dict[str, Any] = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
_T5 |= {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6}
_MT5 = _T5 | {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "tie_word_embeddings": False}
_BART: dict[str, Any] = {
    "vocab_size": 50265,
    "d_model": 1024,
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
}
_BART |= {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in (("layers", 12), ("ffn_dim", 4096))}
_BART |= {"encoder_attention_heads": 16, "decoder_attention_heads": 16, "decoder_start_token_id": 2}
_WHISPER = _BART | {"vocab_size": 51865, "d_model": 384, "num_mel_bins": 80, "decoder_start_token_id": 50257}
_WHISPER |= {"max_source_positions": 1500, "max_target_positions": 448}
for _half in ("encoder", "decoder"):
    _WHISPER |= {f"{_half}_layers": 4, f"{_half}_attention_heads": 6, f"{_half}_ffn_dim": 1536}
_ACTS = {"relu": "relu", "gelu_new": "gelu", "gelu": "gelu_erf", "gated-gelu": "geglu", "gated-silu": "swiglu"}
_BART_ACTS = {"gelu": "gelu_erf", "gelu_new": "gelu", "relu": "relu"}
_LENGTHS = {"encoder": "max_source_positions", "decoder": "max_target_positions"}
# Rows of BART's positions before the first.
_OFFSET = 2


class _TensorPlace(NamedTuple):
    """Tensor of a leaf: its name and shape, the leaf's shape, and the tensor's rows before the leaf's.

    A leaf that is `absent` from files is zeros.
    """

    name: str
    shape: tuple[int, ...]
    leaf: tuple[int, ...]
    skipped: int
    absent: bool = False

    @property
    def view(self) -> tuple[int, ...]:
        """Returns the dims of the tensor, seen as those of the leaf."""
        return (self.leaf[0] + self.skipped, *self.leaf[1:])


def seq2seq_config(told: Told, **changes: Any) -> seq2seq.Config:
    """Returns a `Config` with the computation of the model of this `config.json`.

    Args:
        told: contents of `config.json`. Missing values are the defaults of transformers.
        **changes: fields of both halves, as of `gpt.Config`, such as `max_len=256`.

    Raises:
        ValueError: the model is of another type, or computes something else. The message lists every setting.

    Example:
        >>> seq2seq_config({"model_type": "t5", "feed_forward_proj": "gated-gelu"}).decoder.mlp
        'geglu'
    """
    kind = told.get("model_type")
    if kind not in SEQ2SEQ_TYPES:
        raise ValueError(
            f"config.json: model_type must be one of {SEQ2SEQ_TYPES}, got"
            f" {kind!r}.{core.did_you_mean(str(kind), SEQ2SEQ_TYPES)} For a decoder without an encoder use gpt_from_hf,"
            " and to train another model of torch from_module."
        )
    return _bart_config(told, changes) if kind in ("bart", "whisper") else _t5_config(told, changes)


def _t5_config(told: Told, changes: Told) -> seq2seq.Config:
    told = (_MT5 if told["model_type"] == "mt5" else _T5) | {n: x for n, x in told.items() if x is not None}
    act = told.get("feed_forward_proj", "relu" if told["model_type"] == "t5" else "gated-gelu")
    if act not in _ACTS:
        raise ValueError(f"config.json: feed_forward_proj must be one of {tuple(_ACTS)}, got {act!r}.")
    scaled = told.get("scale_decoder_outputs", told.get("tie_word_embeddings") is not False)
    return seq2seq.Config.t5_like(
        tied=scaled,
        decoder={"num_layers": told.get("num_decoder_layers", told["num_layers"])},
        buckets=told["relative_attention_num_buckets"],
        max_distance=told["relative_attention_max_distance"],
        start=told.get("decoder_start_token_id", told.get("pad_token_id", 0)),
        **{
            "vocab_size": told["vocab_size"],
            "d_model": told["d_model"],
            "num_heads": told["num_heads"],
            "num_layers": told["num_layers"],
            "d_head": told["d_kv"],
            "d_ff": told["d_ff"],
            "mlp": _ACTS[act],
            "norm_eps": told["layer_norm_epsilon"],
            "max_len": told.get("n_positions", 512),
            **changes,
        },
    )


def _bart_config(told: Told, changes: Told) -> seq2seq.Config:
    kind, whisper = told["model_type"], told["model_type"] == "whisper"
    told = (_WHISPER if whisper else _BART) | {n: x for n, x in told.items() if x is not None}
    refused = [
        f"{name}={told[name]!r}; it must be {wanted!r}"
        for name, wanted in (
            ("tie_word_embeddings", True),
            ("add_final_layer_norm", False),
            ("normalize_before", False),
        )
        if told.get(name, wanted) != wanted
    ]
    if told["activation_function"] not in _BART_ACTS:
        refused.append(f"activation_function={told['activation_function']!r}; it must be in {tuple(_BART_ACTS)}")
    core.raise_all(ValueError, f"config.json: this {kind} has parts that models.seq2seq lacks:", refused)

    def make_half(name: str) -> gpt.Config:
        sizes: dict[str, Any] = {
            "vocab_size": told["vocab_size"],
            "num_layers": told[f"{name}_layers"],
            "d_model": told["d_model"],
            "num_heads": told[f"{name}_attention_heads"],
            "d_ff": told[f"{name}_ffn_dim"],
            "max_len": told[_LENGTHS[name] if whisper else "max_position_embeddings"],
            "mlp": _BART_ACTS[str(told["activation_function"])],
            "embedding_scale": told["d_model"] ** 0.5 if told.get("scale_embedding") and not whisper else None,
        }
        style: dict[str, Any] = {"tie_embeddings": True}
        style |= {} if whisper else {"embedding_norm": True, "head_bias": name == "decoder"}
        return gpt.Config(**{**sizes, **style, "causal": name == "decoder", **changes})

    halves, start = (make_half("encoder"), make_half("decoder")), told["decoder_start_token_id"]
    if whisper:
        return seq2seq.Config(*halves, start=start, features=told["num_mel_bins"])
    return seq2seq.Config(*halves, start=start, norm_sums=True)


def seq2seq_from_hf(
    directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **changes: Any
) -> tuple[seq2seq.Config, seq2seq.Params]:
    """Returns an encoder-decoder model of transformers as a `Config` and parameters that are read at their use.

    Only headers are read here. The leaves are deferred: `step.init(params)` reads only this rank's rows and columns.

    Args:
        directory: directory with `config.json`, and `model.safetensors` or several files with an index.
        dtype: dtype to convert to. Default: the dtype of the files.
        **changes: fields of both halves, as of `gpt.Config`.

    Returns:
        The config, and a tree as of `seq2seq.init(config, key)`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model is of another type, or tensors are missing, left over, or of another shape. The message
            lists all.

    Example:
        >>> import tempfile
        >>> from shardfn.core import key
        >>> config = seq2seq.Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8)
        >>> directory = tempfile.mkdtemp()
        >>> seq2seq_to_hf(directory, config, seq2seq.init(config, key(0)))
        >>> seq2seq_from_hf(directory)[1]["encoder"]["relative"]
        Draw(shape=(32, 4), dtype=torch.float32, device=cpu)
    """
    told, archive = read_config(directory), Archive(directory)
    config = seq2seq_config(told, **changes)
    if not config.decoder.tie_embeddings and "lm_head.weight" not in archive:
        config = _tie_halves(config)
    places = _list_places(config, told["model_type"])
    _check_names(archive, places)
    made = dtype or archive[next(iter(places.values())).name].dtype

    def draw_leaf(place: _TensorPlace) -> core.Draw:
        def read_block(slices: tuple[slice, ...]) -> torch.Tensor:
            if place.absent:
                return torch.zeros(place.leaf, dtype=made)[slices]
            given = zip((*slices, *[slice(None)] * len(place.leaf)), place.leaf, strict=False)
            (low, high), *rest = [(lo, max(lo, hi)) for lo, hi, _ in (s.indices(n) for s, n in given)]
            box = [(low + place.skipped, high + place.skipped), *rest]
            return archive.box(place.name, box, place.view).to(made)

        return core.Draw(read_block, place.leaf, made, torch.device("cpu"))

    tree = core.tree_structure(seq2seq.leaf_shapes(config), is_leaf=_is_shape)
    return config, core.tree_unflatten(tree, [draw_leaf(place) for place in places.values()])


def seq2seq_to_hf(
    directory: str | os.PathLike[str],
    config: seq2seq.Config,
    params: seq2seq.Params,
    *,
    model_type: str | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 << 30,
) -> None:
    """Writes a model so that `transformers.AutoModelForSeq2SeqLM.from_pretrained(directory)` has the same logits.

    Leaves are gathered in sequence, and the first rank writes. Collective over the mesh of the leaves.

    Args:
        directory: directory for the files, made if missing.
        config: config of the model.
        params: parameters as of `seq2seq.init(config, key)`, sharded or not.
        model_type: model type of transformers. Default: "bart" for `norm_sums=True`, or else "t5".
        dtype: dtype to convert to. Default: the dtype of the leaves.
        file_bytes: size in bytes after which another file begins.

    Raises:
        ValueError: transformers has no such model, or leaves do not fit the config. The message lists all.
        OSError: the first rank could not write. No files are left.
    """
    told = hf_seq2seq_config(config, model_type)
    places, leaves = _list_places(config, told["model_type"]), dict(core.named_leaves(params, "params"))
    problems = [f"{path} is missing" for path in places if path not in leaves]
    problems += [
        f"{path} is {tuple(x.shape)}, but {places[path].leaf if path in places else 'no leaf'} by the config"
        for path, x in leaves.items()
        if path not in places or tuple(x.shape) != places[path].leaf
    ]
    core.raise_all(
        ValueError, "seq2seq_to_hf: these leaves do not fit. Pass the config that they were made with:", problems
    )
    entries = {place.name: (dtype or leaves[path].dtype, place.shape) for path, place in places.items()}
    first = next(iter(entries.values()))[0]
    text = json.dumps(told | {"dtype": str(first).removeprefix("torch.")}, indent=2)
    with WrittenByFirst(
        core.tree_leaves(params),
        "interop.seq2seq_to_hf",
        lambda: ArchiveWriter(directory, entries, file_bytes=file_bytes),
        lambda: (pathlib.Path(directory) / "config.json").write_text(text + "\n"),
    ) as out:
        for path, place in places.items():
            x = gather_leaf(leaves[path]).to(entries[place.name][0])
            x = torch.cat([x.new_zeros(place.skipped, *place.leaf[1:]), x]) if place.skipped else x
            out.put(place.name, x.reshape(place.shape))


def hf_seq2seq_config(config: seq2seq.Config, model_type: str | None = None) -> dict[str, Any]:
    """Returns the contents of `config.json` for this model, for transformers.

    Args:
        config: config of the model.
        model_type: model type of transformers. Default: "bart" for `norm_sums=True`, or else "t5".

    Raises:
        ValueError: transformers has no such model. The message has the fields that differ.

    Example:
        >>> hf_seq2seq_config(seq2seq.Config.t5_like())["architectures"]
        ['T5ForConditionalGeneration']
    """
    kind = model_type or ("bart" if config.norm_sums else "t5")
    if kind not in SEQ2SEQ_TYPES:
        raise ValueError(f"model_type={kind!r} is not one of {SEQ2SEQ_TYPES}.{core.did_you_mean(kind, SEQ2SEQ_TYPES)}")
    if kind == "whisper" or config.features is not None:
        raise ValueError(
            f"a model of features must stay in shardfn's files, got model_type={kind!r} and features={config.features}."
            " A whisper is read, and not written."
        )
    told = _write_bart(config) if kind == "bart" else _write_t5(config, kind)
    back = seq2seq_config(told)
    if config.decoder.tie_embeddings and not back.decoder.tie_embeddings:
        back = _tie_halves(back)
    problems = [
        f"{name} is {getattr(config, name)!r}, and the file's would be {getattr(back, name)!r}"
        for name in ("buckets", "max_distance", "logits_scale", "start", "norm_sums")
        if getattr(config, name) != getattr(back, name)
    ]
    for name, half in config.halves.items():
        theirs = back.halves[name]
        problems += [
            f"{name}.{field} is {a!r}, and the file's would be {b!r}"
            for field in (x.name for x in dataclasses.fields(half) if x.name not in _FREE)
            if (a := getattr(half, field)) != (b := getattr(theirs, field))
        ]
    core.raise_all(ValueError, f"this Config is no {kind} of transformers:", problems)
    return told


# Fields that change no function of the weights, or only how it is computed.
_FREE = ("dropout", "attention_dropout", "per_head", "batch_invariant", "chunks", "loss_tile", "d_head", "d_ff")


def _write_t5(config: seq2seq.Config, kind: str) -> dict[str, Any]:
    e, d, acts = config.encoder, config.decoder, {mlp: act for act, mlp in _ACTS.items()}
    scaled = config.logits_scale is not None
    return {
        "model_type": kind,
        "architectures": ["T5ForConditionalGeneration" if kind == "t5" else "MT5ForConditionalGeneration"],
        **{"vocab_size": d.vocab_size, "d_model": d.d_model, "d_kv": d.head_dim, "d_ff": d.ff_dim},
        **{"num_heads": d.num_heads, "num_layers": e.num_layers, "num_decoder_layers": d.num_layers},
        **{"feed_forward_proj": acts.get(d.mlp, "relu"), "layer_norm_epsilon": d.norm_eps, "n_positions": d.max_len},
        "relative_attention_num_buckets": config.buckets or 32,
        "relative_attention_max_distance": config.max_distance,
        **{"decoder_start_token_id": config.start, "pad_token_id": 0, "eos_token_id": 1, "is_encoder_decoder": True},
        "tie_word_embeddings": scaled,
        **({} if scaled or not d.tie_embeddings else {"scale_decoder_outputs": False}),
    }


def _write_bart(config: seq2seq.Config) -> dict[str, Any]:
    d, acts = config.decoder, {mlp: act for act, mlp in _BART_ACTS.items()}
    sizes = {
        f"{name}_{key}": n
        for name, half in config.halves.items()
        for key, n in (("layers", half.num_layers), ("attention_heads", half.num_heads), ("ffn_dim", half.ff_dim))
    }
    return {
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        **{"vocab_size": d.vocab_size, "d_model": d.d_model, "max_position_embeddings": d.max_len, **sizes},
        **{"activation_function": acts.get(d.mlp, "gelu"), "scale_embedding": d.embedding_scale is not None},
        **{"decoder_start_token_id": config.start, "is_encoder_decoder": True, "tie_word_embeddings": True},
    }


def _tie_halves(config: seq2seq.Config) -> seq2seq.Config:
    halves = {name: dataclasses.replace(half, tie_embeddings=True) for name, half in config.halves.items()}
    return dataclasses.replace(config, **halves)


# Names of leaves of a layer after the layer's name. {f} is the number of T5's part with the MLP.
_T5_BLOCK = {f"w{x}": f"0.SelfAttention.{x}.weight" for x in "qkvo"}
_T5_BLOCK |= {f"c_w{x}": f"1.EncDecAttention.{x}.weight" for x in "qkvo"}
_T5_BLOCK |= {"norm1_w": "0.layer_norm.weight", "c_norm1_w": "1.layer_norm.weight", "norm2_w": "{f}.layer_norm.weight"}
_T5_BLOCK |= {"w_gate": "{f}.DenseReluDense.wi_0.weight", "w_down": "{f}.DenseReluDense.wo.weight"}
_T5_HALF = {"relative": "block.0.layer.0.SelfAttention.relative_attention_bias.weight"}
_T5_HALF |= {"norm_w": "final_layer_norm.weight"}
_WB = (("w", "weight"), ("b", "bias"))
_BART_BLOCK = {
    f"{start}{kind}{x}": f"{part}.{'out' if x == 'o' else x}_proj.{suffix}"
    for start, part in (("", "self_attn"), ("c_", "encoder_attn"))
    for x in "qkvo"
    for kind, suffix in _WB
}
_BART_BLOCK |= {
    f"{name}_{kind}": f"{part}.{suffix}"
    for name, part in (
        ("norm1", "self_attn_layer_norm"),
        ("c_norm1", "encoder_attn_layer_norm"),
        ("norm2", "final_layer_norm"),
    )
    for kind, suffix in _WB
}
_BART_BLOCK |= {f"{k}_{n}": f"{fc}.{s}" for n, fc in (("up", "fc1"), ("down", "fc2")) for k, s in _WB}
_BART_HALF = {f"embed_norm_{kind}": f"layernorm_embedding.{suffix}" for kind, suffix in _WB}
_BART_HALF |= {"position": "embed_positions.weight"} | {f"norm_{kind}": f"layer_norm.{suffix}" for kind, suffix in _WB}
_BART_HALF |= {f"{conv}_{kind}": f"{conv}.{suffix}" for conv in ("conv1", "conv2") for kind, suffix in _WB}
# Entries of files that repeat others.
_REPEATED = re.compile(
    r"^(model\.)?((en|de)coder\.embed_tokens|lm_head|proj_out)\.weight$|EncDecAttention\.relative_attention_bias"
)


def _name_leaf(path: str, kind: str, gated: bool) -> str:
    """Returns the name of the tensor of a leaf, such as of "params['decoder']['blocks'][0]['c_wq']"."""
    _, half, *rest = re.findall(r"\w+", path)
    bart = kind in ("bart", "whisper")
    if not rest:
        top = {"embed": "shared.weight", "head": "lm_head.weight"}
        table = "model.decoder.embed_tokens.weight" if kind == "whisper" else "model.shared.weight"
        return {"embed": table, "head_b": "final_logits_bias"}[half] if bart else top[half]
    start = f"model.{half}." if bart else f"{half}."
    if len(rest) == 1:
        return start + (_BART_HALF if bart else _T5_HALF)[rest[0]]
    _, i, name = rest
    if bart:
        return f"{start}layers.{i}.{_BART_BLOCK[name]}"
    part = 1 if half == "encoder" else 2
    up = f"{part}.DenseReluDense.{'wi_1' if gated else 'wi'}.weight"
    return f"{start}block.{i}.layer." + (up if name == "w_up" else _T5_BLOCK[name].format(f=part))


def _list_places(config: seq2seq.Config, kind: str) -> dict[str, _TensorPlace]:
    """Returns the tensor of each leaf, by the leaf's path."""
    halves = {name: dataclasses.replace(half, per_head=False) for name, half in config.halves.items()}
    flat = core.tree_leaves(seq2seq.leaf_shapes(dataclasses.replace(config, **halves)), is_leaf=_is_shape)
    own = core.named_leaves(seq2seq.leaf_shapes(config), "params", is_leaf=_is_shape)
    found = {}
    for (path, leaf), shape in zip(own, flat, strict=True):
        name, skipped = _name_leaf(path, kind, config.decoder.is_gated), 0
        if path.endswith("['position']") and kind != "whisper":
            skipped, shape = _OFFSET, (shape[0] + _OFFSET, *shape[1:])
        absent = kind == "whisper" and path.endswith(("['bk']", "['c_bk']"))
        found[path] = _TensorPlace(name, (1, *shape) if path.endswith("['head_b']") else shape, leaf, skipped, absent)
    return found


def _check_names(archive: Archive, places: Mapping[str, _TensorPlace]) -> None:
    wanted = {place.name: (path, place.shape) for path, place in places.items() if not place.absent}
    problems = [f"{name} is missing ({path} of the model)" for name, (path, _) in wanted.items() if name not in archive]
    problems += [f"{name} is left over" for name in archive if name not in wanted and not _REPEATED.search(name)]
    problems += [
        f"{name} is {archive[name].shape} in the file, but {shape} by config.json"
        for name, (_, shape) in wanted.items()
        if name in archive and tuple(archive[name].shape) != shape
    ]
    core.raise_all(
        ValueError, f"the files of {archive.directory} are not those of the model in its config.json:", problems
    )


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)
