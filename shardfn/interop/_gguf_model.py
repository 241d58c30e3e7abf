"""Models of GGUF files as parameters of `models.gpt`: Llama, Mistral and Qwen2."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn import kernels
from shardfn.core import raise_all
from shardfn.interop.quantized import QuantizedEntry, Span
from shardfn.models import gpt

from ._gguf import GGUFFile, read_q4_k, read_q5_0
from ._hf_config import gpt_config
from ._hf_gpt import params_of_archive

_TYPES = {"llama": "llama", "qwen2": "qwen2"}
# Settings of a file, after the architecture's name -> settings of transformers.
_SETTINGS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Kinds of blocks -> codes of the kernels with the same values. Blocks of Q4_0, Q5_0 and Q4_K are converted.
_CODES: dict[str, kernels.Codes] = {"Q8_0": "int8", "Q4_1": "int4", "Q4_0": "int4", "Q5_0": "int8"}
_CODES |= {"Q4_K": "int4_wide"}


class GGUFArchive(Mapping[str, QuantizedEntry]):
    """Tensors of a GGUF file under the names of transformers, with rows in the order of transformers.

    Args:
        file: file of a model.
        heads: number of heads of queries and of keys whose rows alternate between the halves of a head, as in files
            of Llama. None: rows have transformers' order.

    Attributes:
        directory: path of the file.
    """

    def __init__(self, file: GGUFFile, heads: tuple[int, int] | None) -> None:
        self.directory, self._file = file.path, file
        self._heads = {} if heads is None else {"attn_q": heads[0], "attn_k": heads[1]}
        self._names = {_name_in_transformers(name): name for name in file}
        self._codes: dict[str, kernels.Codes] | None = None

    def __getitem__(self, name: str) -> QuantizedEntry:
        return QuantizedEntry(torch.float32, self._file[self._names[name]].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def box(self, name: str, box: Sequence[Span], shape: Sequence[int] | None = None) -> Tensor:
        """Returns a box of a tensor: see `CodedArchive`."""
        whole = self._order(name, self._file.load(self._names[name]))
        return whole.view(tuple(shape or whole.shape))[tuple(slice(lo, hi) for lo, hi in box)]

    @property
    def codes(self) -> dict[str, kernels.Codes]:
        """Returns the codes that hold a tensor exactly, by name: see `CodedArchive`."""
        if self._codes is None:
            self._codes = {
                name: _CODES[self._file[own].kind.name] for name, own in self._names.items() if self._has_codes(own)
            }
        return self._codes

    def _has_codes(self, own: str) -> bool:
        kind, shape = self._file[own].kind.name, self._file[own].shape
        return kind in _CODES and len(shape) == 2 and (kind != "Q4_0" or is_exact_q4_1(self._file.blocks(own)))

    def blocks(self, name: str, rows: Span, groups: Span) -> Tensor:
        """Returns blocks of codes of a tensor: see `CodedArchive`."""
        own, size = self._names[name], kernels.BLOCK_BYTES[self.codes[name]]
        found, widen = self._file.blocks(own), {"Q4_0": widen_q4_0, "Q5_0": widen_q5_0, "Q4_K": widen_q4_k}
        found = widen.get(self._file[own].kind.name, lambda x: x)(found)
        return self._order(name, found)[slice(*rows), groups[0] * size : groups[1] * size]

    def _order(self, name: str, rows: Tensor) -> Tensor:
        found = _IN_BLOCK.fullmatch(self._names[name])
        heads = self._heads.get(found[2]) if found else None
        if heads is None:
            return rows
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def widen_q4_0(blocks: Tensor) -> Tensor:
    """Returns rows of blocks of Q4_0 as blocks of Q4_1 with the same values: scale (q - 8) = scale q - 8 scale."""
    parts = blocks.unflatten(1, (-1, 18))
    return torch.cat([parts[..., :2], _least_q4_0(parts).view(torch.uint8), parts[..., 2:]], -1).flatten(1)


def widen_q5_0(blocks: Tensor) -> Tensor:
    """Returns rows of blocks of Q5_0 as blocks of Q8_0 with the same values: the scale, and codes from -16 to 15."""
    parts = blocks.unflatten(1, (-1, 22))
    codes = read_q5_0(parts.flatten(0, 1)).view(torch.uint8).view(*parts.shape[:2], 32)
    return torch.cat([parts[..., :2], codes], -1).flatten(1)


def widen_q4_k(blocks: Tensor) -> Tensor:
    """Returns rows of blocks of Q4_K as blocks of "int4_wide" with the same values: products of its two scales."""
    scale, least, q = read_q4_k(blocks.unflatten(1, (-1, 144)).flatten(0, 1))
    numbers = torch.stack([scale, -least], -1).view(torch.uint8)
    nibbles = q[..., :16] | q[..., 16:] << 4
    return torch.cat([numbers, nibbles], -1).view(len(blocks), -1)


def is_exact_q4_1(blocks: Tensor) -> bool:
    """Returns whether 8 times each scale of blocks of Q4_0 is a float16, as blocks of Q4_1 need."""
    return bool(_least_q4_0(blocks.unflatten(1, (-1, 18))).isfinite().all())


def _least_q4_0(parts: Tensor) -> Tensor:
    return -8 * parts[..., :2].contiguous().view(torch.float16)


def gpt_from_gguf(
    path: str | os.PathLike[str] | GGUFFile,
    *,
    dtype: torch.dtype | None = None,
    keep_codes: bool = False,
    **changes: Any,
) -> tuple[gpt.Config, gpt.Params]:
    """Returns the model of a GGUF file as a `Config` and parameters that are read at their use.

    The header is read here, and a tensor when its leaf is used: no float32 copy of the model is in memory. Kinds of
    tensors are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, and Q2_K to Q6_K.

    Args:
        path: path of a file with a Llama, Mistral or Qwen2, or the file.
        dtype: dtype of the parameters. Default: float32, to which blocks are decoded without rounding of ours.
        keep_codes: whether weights of linear layers in blocks of Q8_0, Q5_0, Q4_1, Q4_0 and Q4_K stay blocks, uint8 of
            shape (rows, bytes of a row). An engine serves these as they are, with the bits of the decoded weights.
            Blocks of Q4_0 become blocks of Q4_1 with the same values, blocks of Q5_0 blocks of Q8_0, and blocks of
            Q4_K blocks of 4 bits with scales in float32.
        **changes: other fields of the `Config`, such as `batch_invariant=True`.

    Returns:
        The config, and a tree as of `gpt.init(config, key)`.

    Raises:
        FileNotFoundError: the file is missing.
        DamagedError: the file is damaged, or was cut short. The message has the place.
        ValueError: the model is of another architecture, or tensors are missing, left over, or of another shape. The
            message lists all.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "empty.gguf"
        >>> _ = path.write_bytes(b"GGUF" + bytes([3, *[0] * 19]))
        >>> gpt_from_gguf(path)
        Traceback (most recent call last):
        ValueError: ...empty.gguf: general.architecture must be one of ['llama', 'qwen2'], got None.
    """
    file = path if isinstance(path, GGUFFile) else GGUFFile(path)
    settings = gguf_config(file)
    try:
        config = gpt_config(settings, **changes)
    except ValueError as error:
        raise ValueError(
            f"{file.path}: {str(error).removeprefix('config.json: ').replace('config.json has', 'its header has')}"
        ) from None
    permuted = (config.num_heads, config.kv_heads) if settings["model_type"] == "llama" else None
    archive = GGUFArchive(file, permuted)
    return config, params_of_archive(archive, config, settings["model_type"], dtype or torch.float32, keep_codes)


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the settings of a GGUF file under the names of `config.json` of transformers.

    Raises:
        ValueError: the architecture is another, or settings are missing. The message lists all.
    """
    kind = file.fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(f"{file.path}: general.architecture must be one of {sorted(_TYPES)}, got {kind!r:.60}.")
    missing = [f"{kind}.{name}" for name in _SETTINGS if f"{kind}.{name}" not in file.fields]
    missing += [] if "token_embd.weight" in file else ["the tensor token_embd.weight"]
    raise_all(ValueError, f"{file.path} has a {kind}, but lacks:", missing)
    told = {new: file.fields[f"{kind}.{name}"] for name, new in _SETTINGS.items()}
    told |= {new: file.fields[f"{kind}.{name}"] for name, new in _OPTIONAL.items() if f"{kind}.{name}" in file.fields}
    told |= {"model_type": _TYPES[kind], "vocab_size": file["token_embd.weight"].shape[0]}
    told |= {"tie_word_embeddings": "output.weight" not in file}
    told |= {"use_sliding_window": "sliding_window" in told} if kind == "qwen2" else {}
    if kind == "llama" and "blk.0.attn_q.bias" in file:
        told["attention_bias"] = True
    scaling = file.fields.get(f"{kind}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file or scaling != "none":
        told["rope_scaling"] = {"rope_type": scaling if scaling != "none" else "llama3"}
    return told


def _name_in_transformers(name: str) -> str:
    found = _IN_BLOCK.fullmatch(name)
    if found and found[2] in _INNER:
        return f"model.layers.{found[1]}.{_INNER[found[2]]}.{found[3]}"
    return _OUTER.get(name, name)
