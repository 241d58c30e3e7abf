"""Quantised files for tests, packed by the definitions of the formats: GPTQ, AWQ, compressed-tensors and fp8 in blocks.

Each packer loops over elements, and returns the tensors of a layer with the values that a decoder must give.
"""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Packed(NamedTuple):
    """Tensors of a layer by the name behind its path, and the weight [N, K] in float32."""

    tensors: dict[str, Tensor]
    weight: Tensor


def word(values: list[int], bits: int) -> int:
    """An int32 with the first value in the lowest bits."""
    found = sum((v & (2**bits - 1)) << (bits * i) for i, v in enumerate(values))
    return found - 2**32 if found >= 2**31 else found


def pack(q: Tensor, bits: int, dim: int) -> Tensor:
    """Integers in int32 along a dim, padded with zeros."""
    rows, per_word = (q if dim == 1 else q.T).tolist(), 32 // bits
    out = [[word((row + [0] * per_word)[i : i + per_word], bits) for i in range(0, len(row), per_word)] for row in rows]
    made = torch.tensor(out, dtype=torch.int32).view(len(rows), -1)
    return (made if dim == 1 else made.T).contiguous()


def numbers(n: int, k: int, groups: int, bits: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [N, K], zero points [N, G] from 1 on, and scales [N, G]."""
    made = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 2**bits, (n, k), generator=made)
    zero = torch.randint(1, 2**bits, (n, groups), generator=made)
    return q, zero, (torch.rand(n, groups, generator=made) * 0.02 + 0.001).to(dtype)


def values(q: Tensor, zero: Tensor, scale: Tensor, order: Tensor) -> Tensor:
    """The definition, element by element: w = scale (q - zero)."""
    out = torch.empty(q.shape)
    for i in range(q.shape[0]):
        for j in range(q.shape[1]):
            g = int(order[j])
            out[i, j] = float(scale[i, g]) * (int(q[i, j]) - int(zero[i, g]))
    return out


def gptq(
    n: int,
    k: int,
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    version: int = 1,
    act: bool = False,
    seed: int = 0,
) -> Packed:
    size = k if group == -1 else group
    q, zero, scale = numbers(n, k, k // size, bits, seed, torch.float16)
    zero = torch.full_like(zero, 2 ** (bits - 1)) if sym else zero
    order = torch.arange(k) // size
    order = order[torch.randperm(k, generator=torch.Generator().manual_seed(seed))] if act else order
    stored = zero.T - (1 if version == 1 else 0)
    tensors = {"qweight": pack(q.T, bits, 0), "qzeros": pack(stored, bits, 1), "scales": scale.T.contiguous()}
    return Packed(tensors | {"g_idx": order.int()}, values(q, zero, scale, order))


def awq(n: int, k: int, *, group: int = 32, seed: int = 0) -> Packed:
    size = k if group == -1 else group
    q, zero, scale = numbers(n, k, k // size, 4, seed, torch.float16)

    def packed(x: Tensor) -> Tensor:  # [_, N]
        rows = [[word([row[i + o] for o in AWQ_ORDER], 4) for i in range(0, n, 8)] for row in x.tolist()]
        return torch.tensor(rows, dtype=torch.int32)

    tensors = {"qweight": packed(q.T), "qzeros": packed(zero.T), "scales": scale.T.contiguous()}
    return Packed(tensors, values(q, zero, scale, torch.arange(k) // size))


def pack_quantized(
    n: int,
    k: int,
    *,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    dtype: Any = torch.bfloat16,
    seed: int = 0,
) -> Packed:
    size = group or k
    q, zero, scale = numbers(n, k, k // size, bits, seed, dtype)
    zero = torch.full_like(zero, 2 ** (bits - 1)) if symmetric else zero
    tensors = {"weight_packed": pack(q, bits, 1), "weight_shape": torch.tensor([n, k]), "weight_scale": scale}
    if not symmetric:
        tensors["weight_zero_point"] = pack(zero, bits, 0)
    return Packed(tensors, values(q, zero, scale, torch.arange(k) // size))


def int_quantized(n: int, k: int, *, seed: int = 0) -> Packed:
    q, zero, scale = numbers(n, k, 1, 8, seed, torch.float32)
    weight = values(q, torch.full_like(zero, 128), scale, torch.zeros(k))
    return Packed({"weight": (q - 128).to(torch.int8), "weight_scale": scale, "input_scale": torch.ones(1)}, weight)


def float_quantized(n: int, k: int, *, seed: int = 0) -> Packed:
    made = torch.Generator().manual_seed(seed)
    q = torch.randn(n, k, generator=made).to(torch.float8_e4m3fn)
    scale = torch.rand(n, 1, generator=made) * 0.05
    return Packed({"weight": q, "weight_scale": scale}, q.float() * scale)


def fp8(n: int, k: int, *, block: tuple[int, int] = (32, 48), seed: int = 0) -> Packed:
    made, (a, b) = torch.Generator().manual_seed(seed), block
    q = torch.randn(n, k, generator=made).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // a), -(-k // b), generator=made) * 0.05
    weight = torch.empty(n, k)
    for i in range(n):
        for j in range(k):
            weight[i, j] = float(q[i, j]) * float(scale[i // a, j // b])
    return Packed({"weight": q, "weight_scale_inv": scale}, weight)


def scheme(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}
# A packer, its arguments, the config, and the codes of the kernels that hold the values.
KINDS: dict[str, tuple[Callable[..., Packed], dict[str, Any], dict[str, Any], str | None]] = {
    "gptq": (gptq, {}, GPTQ, "int4"),
    "gptq_asym_v2": (gptq, {"sym": False, "version": 2}, GPTQ | {"checkpoint_format": "gptq_v2"}, "int8"),
    "gptq_act": (gptq, {"act": True}, GPTQ | {"desc_act": True}, None),
    "gptq_2": (gptq, {"bits": 2}, GPTQ | {"bits": 2}, "int4"),
    "gptq_8": (gptq, {"bits": 8}, GPTQ | {"bits": 8}, "int8"),
    "gptq_whole": (gptq, {"group": -1}, GPTQ | {"group_size": -1}, "int4"),
    "gptq_16": (gptq, {"group": 16}, GPTQ | {"group_size": 16}, None),
    "awq": (awq, {}, AWQ, "int8"),
    "packed": (pack_quantized, {}, scheme("pack-quantized", num_bits=4, strategy="group", group_size=32), "int4"),
    "packed_half": (
        pack_quantized,
        {"dtype": torch.float16},
        scheme("pack-quantized", num_bits=4, strategy="group", group_size=32),
        "int4",
    ),
    "packed_asym": (
        pack_quantized,
        {"symmetric": False, "dtype": torch.float16},
        scheme("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        "int8",
    ),
    "packed_8": (
        pack_quantized,
        {"bits": 8, "group": None, "dtype": torch.float16},
        scheme("pack-quantized", num_bits=8, strategy="channel"),
        "int8",
    ),
    "int": (int_quantized, {}, scheme("int-quantized", num_bits=8, strategy="channel"), None),
    "float": (
        float_quantized,
        {},
        scheme("float-quantized", num_bits=8, strategy="channel", type="float"),
        None,
    ),
    "fp8": (fp8, {}, FP8, None),
}


def write_layer(folder: pathlib.Path, kind: str, n: int, k: int, **changes: Any) -> Tensor:
    """Writes a layer "a.weight" in a format, and a float tensor, and returns the weight."""
    packer, how, config, _ = KINDS[kind]
    made = packer(n, k, **how)
    tensors = {f"a.{name}": x for name, x in made.tensors.items()} | {"norm.weight": torch.ones(k)}
    save_file({name: x.contiguous() for name, x in tensors.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"quantization_config": config | changes}))
    return made.weight


def write_model(folder: pathlib.Path, model: Any, kind: str, skip: tuple[str, ...] = ("lm_head",)) -> dict[str, Tensor]:
    """Writes a model of transformers with its linear layers in a format. Returns all weights in float32.

    The model's own weights take the returned values.
    """
    packer, how, config, _ = KINDS[kind]
    model.save_pretrained(folder)
    whole: Mapping[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    out: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for seed, (name, x) in enumerate(whole.items()):
        path = name.removesuffix(".weight")
        if isinstance(model.get_submodule(path), torch.nn.Linear) and not path.endswith(skip):
            made = packer(*x.shape, **how, seed=seed)
            out[name] = made.weight
            tensors |= {f"{path}.{part}": y for part, y in made.tensors.items()}
        else:
            out[name] = tensors[name] = x
    save_file({name: x.contiguous() for name, x in tensors.items()}, str(folder / "model.safetensors"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(out[name])
    return out


def mxfp4(e: int, n: int, k: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Blocks and scales of experts, with all codes and exponents from 2^-20 to 2^20."""
    made = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (e, n, k // 32, 16), generator=made, dtype=torch.uint8)
    return {"blocks": blocks, "scales": torch.randint(107, 148, (e, n, k // 32), generator=made, dtype=torch.uint8)}
