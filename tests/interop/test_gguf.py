"""Covers GGUF files: decoded blocks beside ggml's definition, models, and damaged files."""

import dataclasses
import os
import pathlib
import random
import resource
import signal
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import inference, kernels
from shardfn.core import tree_leaves, tree_map
from shardfn.interop import GGUFFile, gguf_config, gpt_from_gguf
from shardfn.interop._gguf import decode_gguf_blocks, gguf_kind
from shardfn.interop._gguf_model import is_exact_q4_1, widen_q4_0, widen_q4_k, widen_q5_0
from shardfn.memory import DamagedError
from shardfn.models import gpt

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
U32, FLOAT, TEXT, LIST = 4, 6, 8, 9


def text(x: str) -> bytes:
    return struct.pack("<Q", len(x.encode())) + x.encode()


def setting(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + text(value)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}I", LIST, U32, len(value), *value)
    if isinstance(value, list):
        return struct.pack("<IIQ", LIST, TEXT, len(value)) + b"".join(map(text, value))
    return struct.pack("<If" if isinstance(value, float) else "<II", FLOAT if isinstance(value, float) else U32, value)


def file_of(fields: Mapping[str, Any], tensors: Mapping[str, tuple[int, Tensor, tuple[int, ...]]]) -> bytes:
    """A file of settings and of tensors: kind, bytes and shape."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(text(name) + setting(x) for name, x in fields.items())
    body = b""
    for name, (kind, data, shape) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(body))
        raw = data.contiguous().view(torch.uint8).numpy().tobytes()
        body += raw + b"\0" * (-len(raw) % 32)
    return head + b"\0" * (-len(head) % 32) + body


NAMES = {"wq": "attn_q", "wk": "attn_k", "wv": "attn_v", "wo": "attn_output", "norm1_w": "attn_norm"}
NAMES |= {"w_up": "ffn_up", "w_gate": "ffn_gate", "w_down": "ffn_down", "norm2_w": "ffn_norm"}


def model_file(config: gpt.Config, params: Any, kind: str | None = None, **changes: Any) -> tuple[bytes, Any]:
    """A file of a Llama, and its parameters: weights of linear layers are rounded to blocks of a kind."""
    fields: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": config.num_layers}
    fields |= {"llama.embedding_length": config.d_model, "llama.feed_forward_length": config.ff_dim}
    fields |= {"llama.attention.head_count": config.num_heads, "llama.attention.head_count_kv": config.kv_heads}
    fields |= {"llama.context_length": config.max_len, "llama.attention.layer_norm_rms_epsilon": config.norm_eps}
    fields |= {"llama.rope.freq_base": config.rope_base, "tokenizer.ggml.tokens": ["a", "b"]} | changes
    tensors: dict[str, Any] = {}

    def add(name: str, x: Tensor, heads: int = 0) -> Tensor:
        def order(rows: Tensor) -> Tensor:  # the halves of a head alternate in the files of Llama
            return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) if heads else rows

        if kind is None or x.ndim < 2:
            tensors[name] = F32, order(x), tuple(x.shape)
            return x
        codes: Any = "int8" if "attn_v" in name else kind
        blocks = kernels.quantize_blocks(x, codes)
        tensors[name] = {"int8": Q8_0, "int4": Q4_1}[codes], order(blocks), tuple(x.shape)
        return kernels.dequantize_blocks(blocks, x.shape[-1])

    made: dict[str, Any] = {"embed": add("token_embd.weight", params["embed"])}
    made["norm_w"] = add("output_norm.weight", params["norm_w"])
    if not config.tie_embeddings:
        made["head"] = add("output.weight", params["head"])
    heads = {"wq": config.num_heads, "wk": config.kv_heads}
    made["blocks"] = [
        {name: add(f"blk.{i}.{NAMES[name]}.weight", x, heads.get(name, 0)) for name, x in block.items()}
        for i, block in enumerate(params["blocks"])
    ]
    return file_of(fields, tensors), made


CONFIG = gpt.Config.llama_like(vocab_size=48, num_layers=2, d_model=64, num_heads=4, d_ff=96, max_len=16)
CONFIG = dataclasses.replace(CONFIG, num_kv_heads=2, norm_eps=2.0**-17)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [None, "int4", "int8"])
def test_a_model_has_the_decoded_weights_in_the_order_of_transformers(
    kind: str | None, tied: bool, tmp_path: pathlib.Path
) -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    data, want = model_file(config, gpt.init(config, sf.key(0)), kind)
    (tmp_path / "m.gguf").write_bytes(data)
    made, params = gpt_from_gguf(tmp_path / "m.gguf")
    assert made == config
    got = tree_map(lambda x: x.full(), params)
    assert all(map(torch.equal, tree_leaves(got), tree_leaves(want)))
    assert len(tree_leaves(got)) == len(tree_leaves(want))


def test_a_rank_reads_rows_of_a_leaf(tmp_path: pathlib.Path) -> None:
    data, want = model_file(CONFIG, gpt.init(CONFIG, sf.key(0)), "int8")
    (tmp_path / "m.gguf").write_bytes(data)
    _, params = gpt_from_gguf(tmp_path / "m.gguf", dtype=torch.bfloat16, stacked=True)
    part = params["blocks"]["wq"].block((slice(1, 2), slice(16, 48)))
    assert torch.equal(part[0], want["blocks"][1]["wq"][16:48].bfloat16())


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_blocks_are_served_with_the_tokens_and_logits_of_the_decoded_weights(kind: str, tmp_path: pathlib.Path) -> None:
    data, want = model_file(CONFIG, gpt.init(CONFIG, sf.key(0)), kind)
    (tmp_path / "m.gguf").write_bytes(data)
    config, params = gpt_from_gguf(tmp_path / "m.gguf", keep_codes=True, batch_invariant=True)
    assert {name for name, x in params["blocks"][0].items() if x.dtype == torch.uint8} == {
        name for name in NAMES if name.startswith("w")
    }
    greedy = inference.Sampling(max_tokens=6, temperature=0.0, prompt_logprobs=True)
    outputs = [
        inference.Engine(inference.decoder(config), x).generate([[1, 2, 3, 4], [5, 6]], greedy) for x in (params, want)
    ]
    assert outputs[0] == outputs[1]


def oracle(number: int, blocks: Tensor) -> Tensor:
    """Elements of blocks, written a number at a time from ggml's `dequantize_row_*`."""
    kind = gguf_kind(number)
    out: list[float] = []

    def half(b: bytes, at: int) -> float:
        return struct.unpack_from("<e", b, at)[0]

    def f32(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float32))

    def six_bits(b: bytes, j: int) -> tuple[int, int]:
        s = b[4:16]
        if j < 4:
            return s[j] & 63, s[j + 4] & 63
        return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4

    def signed(x: int) -> int:
        return x - 256 if x > 127 else x

    for row in blocks.reshape(-1, kind.bytes):
        b = bytes(row.tolist())
        if kind.name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
            five, least = kind.name[1] == "5", kind.name[3] == "1"
            at = 4 if least else 2
            high = int.from_bytes(b[at : at + 4], "little") if five else 0
            codes = b[at + 4 :] if five else b[at:]
            for j in range(32):
                q = codes[j % 16] >> 4 if j >= 16 else codes[j] & 15
                q |= (high >> j & 1) << 4
                if least:
                    out.append(f32(f32(half(b, 0) * q) + half(b, 2)))
                else:
                    out.append(f32(half(b, 0) * (q - (16 if five else 8))))
        elif kind.name == "Q8_0":
            out += [f32(half(b, 0) * signed(x)) for x in b[2:]]
        elif kind.name == "Q2_K":
            for i in range(256):
                q = b[16 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
                s = b[i // 16]
                out.append(f32(f32(f32(half(b, 80) * (s & 15)) * q) - f32(half(b, 82) * (s >> 4))))
        elif kind.name == "Q3_K":
            for i in range(256):
                q = b[32 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
                q -= 0 if b[i % 32] >> (i // 32) & 1 else 4
                j = i // 16
                low = b[96 + j % 8] >> (4 if j >= 8 else 0) & 15
                s = (low | (b[104 + j % 4] >> (j // 4 * 2) & 3) << 4) - 32
                out.append(f32(f32(half(b, 108) * s) * q))
        elif kind.name in ("Q4_K", "Q5_K"):
            first = 16 if kind.name == "Q4_K" else 48
            for i in range(256):
                j = i // 32
                q = b[first + i // 64 * 32 + i % 32] >> (4 if j % 2 else 0) & 15
                q |= (b[16 + i % 32] >> j & 1) << 4 if kind.name == "Q5_K" else 0
                s, m = six_bits(b, j)
                out.append(f32(f32(f32(half(b, 0) * s) * q) - f32(half(b, 2) * m)))
        elif kind.name == "Q6_K":
            for i in range(256):
                n, j = i // 128, i % 128
                low = b[n * 64 + j % 64] >> (4 if j >= 64 else 0) & 15
                q = (low | (b[128 + n * 32 + j % 32] >> (j // 32 * 2) & 3) << 4) - 32
                out.append(f32(f32(half(b, 208) * signed(b[192 + i // 16])) * q))
    return torch.tensor(out)


@pytest.mark.parametrize("number", [2, 3, 6, 7, 8, 10, 11, 12, 13, 14])
def test_blocks_of_each_kind_have_the_elements_of_their_definition(number: int) -> None:
    kind = gguf_kind(number)
    blocks = torch.randint(0, 256, (3, 2 * kind.bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    # Exponents of float16 that are finite, wherever a scale lies.
    for first in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind.name, (0, 2)):
        blocks.view(3, 2, -1)[..., first + 1] &= 0x3F
    got = decode_gguf_blocks(blocks, kind)
    assert got.shape == (3, 2 * kind.size)
    assert torch.equal(got.flatten(), oracle(number, blocks))


def test_blocks_of_q4_0_become_blocks_with_the_same_values() -> None:
    blocks = torch.randint(0, 256, (3, 5 * 18), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    blocks.view(3, 5, 18)[..., 1] &= 0x9F  # scales of both signs, subnormal ones too
    blocks.view(3, 5, 18)[0, :, 1] = 0
    widened = widen_q4_0(blocks)
    assert widened is not None
    assert torch.equal(kernels.dequantize_blocks(widened, 160), decode_gguf_blocks(blocks, gguf_kind(2)))
    blocks[1, 1] = 0x7A  # 8 times the scale is infinite
    assert not is_exact_q4_1(blocks)


def test_blocks_of_q5_0_become_blocks_with_the_same_values() -> None:
    blocks = torch.randint(0, 256, (3, 5 * 22), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    blocks.view(3, 5, 22)[..., 1] &= 0x9F
    want = decode_gguf_blocks(blocks, gguf_kind(6))
    assert torch.equal(kernels.dequantize_blocks(widen_q5_0(blocks), 160), want)


def test_blocks_of_q4_k_become_blocks_with_the_same_values() -> None:
    blocks = torch.randint(0, 256, (3, 2 * 144), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    blocks.view(3, 2, 144)[..., 1::2][..., :2] &= 0x9F
    want = decode_gguf_blocks(blocks, gguf_kind(12))
    assert torch.equal(kernels.dequantize_blocks(widen_q4_k(blocks), 512), want)


@pytest.mark.nightly
def test_a_file_of_q4_k_is_served_with_the_tokens_and_logits_of_the_decoded_weights(tmp_path: pathlib.Path) -> None:
    fields, tensors = quantized_parts(random.Random(3))
    draw = torch.Generator().manual_seed(5)
    for name, (kind, _, shape) in tensors.items():
        if kind != F32 and "embd" not in name:
            blocks = torch.randint(0, 256, (shape[0], 144), dtype=torch.uint8, generator=draw)
            blocks[:, 1], blocks[:, 3] = 0x18, 0x1C  # small scales
            tensors[name] = 12, blocks, shape
    tensors["token_embd.weight"] = F32, torch.randn(4, 256, generator=draw), (4, 256)
    (tmp_path / "m.gguf").write_bytes(file_of(fields, tensors))
    outputs = []
    for keep in (False, True):
        config, params = gpt_from_gguf(tmp_path / "m.gguf", keep_codes=keep, batch_invariant=True)
        coded = {name for name, x in params["blocks"][0].items() if x.dtype == torch.uint8}
        assert coded == ({name for name in NAMES if name.startswith("w")} if keep else set())
        how = inference.Sampling(max_tokens=6, temperature=0.0, prompt_logprobs=True)
        outputs.append(inference.Engine(inference.decoder(config), params).generate([[1, 2, 3], [0, 2]], how))
    assert outputs[0] == outputs[1]


def test_numbers_and_rows_that_are_empty() -> None:
    x = torch.randn(2, 6)
    for number, dtype in ((0, torch.float32), (1, torch.float16), (30, torch.bfloat16)):
        assert torch.equal(decode_gguf_blocks(x.to(dtype).view(torch.uint8), gguf_kind(number)), x.to(dtype).float())
    assert decode_gguf_blocks(torch.empty(0, 36, dtype=torch.uint8), gguf_kind(2)).shape == (0, 64)


def damaged(change: Callable[[bytearray], Any]) -> bytes:
    data = bytearray(model_file(CONFIG, gpt.init(CONFIG, sf.key(0)), "int4")[0])
    change(data)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(40), "begins with b'GGML'"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "the other order of bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "settings"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 77) + bytes(9), "of kind 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 40) + bytes(9), "1099511627776 bytes are needed"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", LIST, U32, 1 << 50) + bytes(9),
            "elements of 'a'",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("general.alignment") + setting(24),
            "general.alignment must be a power of two of at most 2^20, got 24",
        ),
        (
            file_of({}, {"w": (99, torch.zeros(8), (8,))}),
            "the tensor 'w' is of kind 99, and the known kinds are F32",
        ),
        (file_of({}, {"w": (Q8_0, torch.zeros(9), (33,))}), "rows of 33, and blocks of Q8_0 have 32"),
        (file_of({}, {"w": (F32, torch.zeros(8), (1 << 40, 1 << 20))}), "'w' ends at byte"),
        (file_of({}, {"w": (F32, torch.zeros(8), (1 << 63, 0))}), "each dim must be 1 or more"),
        (damaged(lambda x: x.__delitem__(slice(-64, None))), "ends at byte"),
    ],
)
def test_a_damaged_file_is_named(data: bytes, words: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(DamagedError, match=r"m\.gguf") as caught:
        GGUFFile(tmp_path / "m.gguf")
    assert words in str(caught.value)


ODD = (0, 1, 3, 31, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1)
FIELDS = ("x", "", "llama", 0, 1, 7, (1 << 32) - 1, float("inf"), float("nan"), [], [1, 2], ["a"], ["a"] * 70)
QUANTS = (2, 3, 6, 7, 8, 10, 11, 12, 13, 14)


def quantized_parts(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and tensors of a model of one layer, with weights of random bytes in the kinds that have blocks."""
    fields: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 16}
    fields |= {"llama.embedding_length": 256, "llama.feed_forward_length": 256, "llama.rope.freq_base": 10000.0}
    fields |= {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "general.alignment": 32}
    fields |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.tokens": ["a", "b"]}
    rows = dict.fromkeys([f"blk.0.{name}.weight" for name in NAMES.values() if "norm" not in name], 256)
    rows |= {"blk.0.attn_k.weight": 128, "blk.0.attn_v.weight": 128, "token_embd.weight": 4}
    tensors: dict[str, Any] = {}
    for name, num in rows.items():
        number = draw.choice(QUANTS)
        kind = gguf_kind(number)
        raw = torch.frombuffer(bytearray(draw.randbytes(num * 256 // kind.size * kind.bytes)), dtype=torch.uint8)
        tensors[name] = number, raw, (num, 256)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        tensors[name] = F32, torch.ones(256), (256,)
    return fields, tensors


def damaged_file(draw: random.Random, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> bytes:
    """A file with one to three faults: settings, kinds, shapes, counts, offsets, bytes, or its end."""
    fields, tensors, name = dict(fields), dict(tensors), draw.choice([*tensors])
    faults = draw.choices(("setting", "kind", "shape", "gone", "count", "offset", "bytes", "data", "cut"), k=3)
    faults = faults[: draw.randint(1, 3)]
    kind, raw, shape = tensors[name]
    if "setting" in faults:
        fields[draw.choice([*fields])] = draw.choice(FIELDS)
    if "kind" in faults:
        kind = draw.choice((*QUANTS, 4, 9, 15, 99, (1 << 32) - 1))
    if "shape" in faults:
        shape = tuple(draw.choice((*shape, *ODD)) for _ in range(draw.choice((0, 1, 2, 2, 3, 4, 5))))
    tensors[name] = kind, raw, shape
    if "gone" in faults:
        parts = draw.choice((fields, tensors))
        del parts[draw.choice([*parts])]
    out = bytearray(file_of(fields, tensors))
    if "count" in faults:
        at, odd = draw.choice((8, 16)), draw.choice((*ODD, draw.randrange(40)))
        out[at : at + 8] = struct.pack("<Q", odd)
    if "offset" in faults and name in tensors:
        at = out.find(text(name)) + len(text(name)) + 4 + 8 * len(shape) + 4
        out[at : at + 8] = struct.pack("<Q", draw.choice((*ODD, len(out), len(out) + 32, 64, 1 << 20)))
    head = out.find(b"blk.0.ffn_norm.weight") + 60
    for _ in range(draw.randint(1, 8) if "bytes" in faults else 0):
        out[draw.randrange(head)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
    for _ in range(draw.randint(1, 64) if "data" in faults else 0):
        out[draw.randrange(head, len(out))] ^= 1 << draw.randrange(8)
    return bytes(out[: draw.randrange(len(out))] if "cut" in faults else out)


def read_whole(path: pathlib.Path) -> int:
    """The number of elements of all leaves, with and without codes."""
    file = GGUFFile(path)
    num = sum(file.load(name).numel() for name in file)
    for keep in (False, True):
        leaves = tree_leaves(gpt_from_gguf(file, keep_codes=keep)[1])
        num += sum(leaf.full().numel() for leaf in leaves)
    return num


def fuzz_files(path: pathlib.Path, seed: int, num: int) -> int:
    """The number of refused files. The others are read. A file takes at most 10 s, and no memory beyond its size."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"SHARDFN_FUZZ={case}")

    before = signal.signal(signal.SIGALRM, stop)
    refused, peak = 0, 0
    try:
        for case in range(seed, seed + num):
            draw = random.Random(case)
            path.write_bytes(damaged_file(draw, *quantized_parts(draw)))
            signal.alarm(10)
            try:
                assert read_whole(path) <= 64 * path.stat().st_size, f"SHARDFN_FUZZ={case}"
            except (DamagedError, ValueError) as error:
                assert str(path) in str(error), f"SHARDFN_FUZZ={case}"
                refused += 1
            except Exception as error:
                raise AssertionError(f"SHARDFN_FUZZ={case}") from error
            signal.alarm(0)
            if case == seed + 20:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10, "a file took over 64 MiB"
    return refused


@pytest.mark.parametrize("num", [60, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_files_with_random_damage_are_refused_or_read(num: int, tmp_path: pathlib.Path) -> None:
    """`SHARDFN_FUZZ=<seed>:<number>` begins at another file, with that number of files at night."""
    seed, _, told = os.environ.get("SHARDFN_FUZZ", "0").partition(":")
    num = int(told) if told and num > 60 else num
    assert fuzz_files(tmp_path / "m.gguf", int(seed), num) > num // 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture must be one of ['llama', 'qwen2'], got 'mamba'"),
        ({"llama.attention.head_count": 3}, "attn_q"),
        ({"llama.feed_forward_length": 64}, "is (96, 64) in the file, but (64, 64)"),
        ({"llama.rope.scaling.type": "yarn"}, "rope_type='yarn'"),
        ({"llama.block_count": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
    ],
)
def test_a_model_that_is_not_ours_is_refused(changes: dict[str, Any], words: str, tmp_path: pathlib.Path) -> None:
    data, _ = model_file(CONFIG, gpt.init(CONFIG, sf.key(0)), **changes)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ValueError) as caught:
        gpt_from_gguf(tmp_path / "m.gguf")
    assert words in str(caught.value) or changes == {"llama.attention.head_count": 3}


def test_missing_settings_are_listed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "m.gguf").write_bytes(file_of({"general.architecture": "llama", "llama.block_count": 1}, {}))
    with pytest.raises(ValueError, match="lacks") as caught:
        gguf_config(GGUFFile(tmp_path / "m.gguf"))
    assert "llama.embedding_length" in str(caught.value) and "token_embd.weight" in str(caught.value)
