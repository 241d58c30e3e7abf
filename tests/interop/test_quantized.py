"""Covers shardfn/interop/quantized: files of other libraries, decoded, served, and trained beside adapters."""

import functools
import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardfn as sf
from shardfn.cli import main
from shardfn.core import tree_leaves, tree_map
from shardfn.inference import Engine, Sampling, decoder
from shardfn.interop import gpt_from_hf, module_from_hf, without_weights
from shardfn.interop.quantized import QuantizedArchive, decode_mxfp4, open_archive
from shardfn.kernels import dequantize_blocks
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.interop.quantized_files import KINDS, mxfp4, write_layer, write_model

transformers = pytest.importorskip("transformers")
N, K = 48, 96
SERVED = ["gptq", "awq", "packed_half", "fp8"]


def opened(folder: pathlib.Path) -> QuantizedArchive:
    made = open_archive(folder)
    assert isinstance(made, QuantizedArchive)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_weights_have_the_bits_of_the_definition(kind: str, tmp_path: pathlib.Path) -> None:
    want = write_layer(tmp_path, kind, N, K)
    archive = opened(tmp_path)
    assert sorted(archive) == ["a.weight", "norm.weight"] and len(archive) == 2
    assert archive["a.weight"].shape == (N, K) and "a.scales" not in archive
    assert torch.equal(archive.box("a.weight", [(0, N), (0, K)]), want)
    for rows, cols in (((3, 38), (5, 77)), ((0, 1), (95, 96)), ((8, 16), (32, 64))):
        assert torch.equal(archive.box("a.weight", [rows, cols]), want[slice(*rows), slice(*cols)])
    got = archive.box("a.weight", [(1, 4), (0, 7), (33, 70)], (4, 12, 96))
    assert torch.equal(got, want.view(4, 12, 96)[1:4, 0:7, 33:70])
    got = archive.box("a.weight", [(9, 30), (1, 3), (5, 24)], (48, 4, 24))
    assert torch.equal(got, want.view(48, 4, 24)[9:30, 1:3, 5:24])
    assert archive.box("a.weight", [(3, 3), (0, K)]).shape == (0, K)
    assert torch.equal(archive.box("norm.weight", [(0, K)]), torch.ones(K))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_codes_have_the_same_bits(kind: str, tmp_path: pathlib.Path) -> None:
    want, codes = write_layer(tmp_path, kind, N, K), KINDS[kind][3]
    archive = opened(tmp_path)
    assert archive.codes == ({} if codes is None else {"a.weight": codes})
    if codes is not None:
        assert torch.equal(dequantize_blocks(archive.blocks("a.weight", (0, N), (0, 3)), K), want)
        assert torch.equal(dequantize_blocks(archive.blocks("a.weight", (7, 31), (1, 3)), 64), want[7:31, 32:])
        assert archive.blocks("a.weight", (5, 5), (0, 3)).shape[0] == 0


@pytest.mark.parametrize("kind", ["packed_half", "packed_asym", "int", "float", "fp8"])
def test_numbers_of_outputs_that_no_word_divides(kind: str, tmp_path: pathlib.Path) -> None:
    want, archive = write_layer(tmp_path, kind, 37, K), opened(tmp_path)
    assert torch.equal(archive.box("a.weight", [(3, 37), (5, 77)]), want[3:, 5:77])
    if archive.codes:
        assert torch.equal(dequantize_blocks(archive.blocks("a.weight", (3, 37), (0, 3)), K), want[3:])


def test_more_rows_than_are_decoded_at_a_time(tmp_path: pathlib.Path) -> None:
    want = write_layer(tmp_path, "gptq_asym_v2", 1040, 32)
    archive = opened(tmp_path)
    assert torch.equal(archive.box("a.weight", [(5, 1039), (0, 32)]), want[5:1039])
    assert torch.equal(dequantize_blocks(archive.blocks("a.weight", (5, 1039), (0, 1)), 32), want[5:1039])


@functools.cache
def sizes() -> dict[str, Any]:
    told = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return told | {"vocab_size": 11, "num_key_value_heads": 2, "max_position_embeddings": 32}


def llama() -> Any:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(bos_token_id=1, eos_token_id=2, initializer_range=0.3, **sizes())
    return transformers.LlamaForCausalLM(config).eval()


def full(params: Any) -> Any:
    return tree_map(lambda x: x.full(), params)


@pytest.mark.day("awq")
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_has_the_bits_and_tokens_of_the_decoded_weights(kind: str, tmp_path: pathlib.Path) -> None:
    model = llama()
    want = write_model(tmp_path, model, kind)
    config, floats = gpt_from_hf(tmp_path, dtype=torch.float32, batch_invariant=True)
    assert torch.equal(floats["blocks"][1]["w_down"].full(), want["model.layers.1.mlp.down_proj.weight"])
    _, coded = gpt_from_hf(tmp_path, dtype=torch.float32, batch_invariant=True, keep_codes=True)
    num = sum(x.dtype == torch.uint8 for x in tree_leaves(coded))
    assert num == (0 if KINDS[kind][3] is None else 14)
    how = Sampling(max_tokens=6, temperature=0.0, prompt_logprobs=True, stop_tokens=(2,))
    prompts = [[1, 3, 4], [5, 6, 7, 8, 9]]
    plain, light = (Engine(decoder(config), full(x)).generate(prompts, how) for x in (floats, coded))
    for one, other, prompt in zip(plain, light, prompts, strict=True):
        assert (one.tokens, one.logprobs, one.prompt_logprobs) == (other.tokens, other.logprobs, other.prompt_logprobs)
        ids = torch.tensor([prompt])
        kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "pad_token_id": 2}
        told = model.generate(ids, max_new_tokens=6, do_sample=False, **kwargs)[0].tolist()
        assert list(one.tokens) == told[len(prompt) :][: len(one.tokens)]


@pytest.mark.parametrize("kind", ["gptq", "fp8"])
def test_modules_of_transformers_read_the_decoded_weights(kind: str, tmp_path: pathlib.Path) -> None:
    transformers.set_seed(0)
    config = transformers.Qwen3Config(head_dim=16, initializer_range=0.3, **sizes())
    model = transformers.Qwen3ForCausalLM(config).eval()
    want = write_model(tmp_path, model, kind)
    with without_weights():
        plain = transformers.Qwen3ForCausalLM(config).eval()
    params = full(module_from_hf(plain, tmp_path))
    assert params.keys() == want.keys() and all(torch.equal(params[name], x) for name, x in want.items())


@distributed(world=[1, 3])
def test_a_base_in_quantised_files_trains_adapters_as_decoded_floats_do(world: int, tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    if mesh.rank == 0:
        write_model(tmp_path, llama(), "awq")
    if world > 1:
        torch.distributed.barrier()
    config, deferred = gpt_from_hf(tmp_path, dtype=torch.float32)
    tokens = torch.arange(42).view(6, 7) % 11

    def trained(params: Any, mesh: Any) -> Any:
        lora = sf.lora.LoRA.of(params, ["wq", "w_down"], rank=2)
        loss = lora.adapt(functools.partial(gpt.loss, config))
        zero = sf.Zero(stage=3, persist_elements=0)
        step = sf.sharded_step(loss, sf.optim.adamw(1e-2), mesh=mesh, trainable=lora.trainable, zero=zero)
        state = step.init({"base": params, "lora": lora.init(sf.key(0))})
        losses = list[float]()
        for _ in range(3):
            state, metrics = step(state, {"tokens": tokens.chunk(world)[mesh.rank]})
            losses.append(float(metrics["loss"]))
        return losses, state

    losses, state = trained(deferred, mesh)
    assert torch.equal(state.params["base"]["blocks"][0]["wq"].full_tensor(), deferred["blocks"][0]["wq"].full())
    want, _ = trained(full(deferred), mesh)
    assert losses == want and losses[2] < losses[0]


def spoiled(folder: pathlib.Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, str(folder / "model.safetensors"))


@pytest.mark.parametrize(
    "kind, changes, words",
    [
        ("gptq", {"bits": 3}, r"bits must be 2 or 4 or 8, got 3"),
        ("gptq", {"checkpoint_format": "gptq_v3"}, r"checkpoint_format must be 'gptq' or 'gptq_v2', got 'gptq_v3'"),
        ("gptq", {"group_size": 0}, r"group_size must be -1, or 1 or more, got 0"),
        (
            "gptq",
            {"group_size": 64},
            r"a of shape \(48, 96\) must have inputs in whole groups, got groups of 64 for 96",
        ),
        ("gptq", {"quant_method": "gtpq"}, r"quant_method must be 'gptq' or .*, got 'gtpq'.*did you mean 'gptq'"),
        ("awq", {"version": "gemv"}, r"version must be 'gemm', got 'gemv'"),
        ("awq", {"bits": 8}, r"bits must be 4, got 8"),
        ("packed", {"format": "nvfp4-pack-quantized"}, r"format must be .*got 'nvfp4-pack-quantized'"),
        ("packed", {"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme must be null"),
        ("packed", {"config_groups": {}}, r"config_groups must be one group with weights, got 0 groups"),
        ("fp8", {"weight_block_size": None}, r"weight_block_size must be two numbers such as \[128, 128\], got None"),
        ("fp8", {"weight_block_size": [32, 32]}, r"a.weight_scale_inv must be .* of shape \(2, 3\), got .*\(2, 2\)"),
    ],
)
def test_unknown_settings_are_named(kind: str, changes: Any, words: str, tmp_path: pathlib.Path) -> None:
    write_layer(tmp_path, kind, N, K, **changes)
    with pytest.raises(ValueError, match=f"(?si){words}"):
        open_archive(tmp_path)


@pytest.mark.parametrize(
    "kind, change, words",
    [
        ("gptq", lambda x: x.pop("a.scales"), r"a.scales is missing"),
        ("gptq", lambda x: x.pop("a.qweight"), r"a.qweight is missing"),
        ("gptq", lambda x: x["a.g_idx"].__setitem__(3, 9), r"a.g_idx must be from 0 to 2, got 0 to 9"),
        (
            "gptq",
            lambda x: x.update({"a.qzeros": x["a.qzeros"].long()}),
            r"a.qzeros must be torch.int32 of shape \(3, 6\)",
        ),
        (
            "awq",
            lambda x: x.update({"a.scales": x["a.scales"][:2].clone()}),
            r"a.scales must be .* of shape \(3, 48\), got",
        ),
        ("packed_asym", lambda x: x.pop("a.weight_zero_point"), r"a.weight_zero_point is missing"),
        (
            "packed",
            lambda x: x.update({"a.weight_shape": torch.tensor([48, 99])}),
            r"a.weight_packed must be .*\(48, 13\)",
        ),
        ("float", lambda x: x.pop("a.weight_scale"), r"a.weight is in e4m3, but its weight_scale is missing"),
        ("fp8", lambda x: x.pop("a.weight_scale_inv"), r"a.weight is in e4m3, but its weight_scale_inv is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(kind: str, change: Any, words: str, tmp_path: pathlib.Path) -> None:
    write_layer(tmp_path, kind, N, K)
    spoiled(tmp_path, change)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        open_archive(tmp_path)


def test_layers_with_transposed_weights_are_refused(tmp_path: pathlib.Path) -> None:
    write_layer(tmp_path, "gptq", N, K)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"but GPT-2 has weights \[inputs, outputs\]"):
        open_archive(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SERVED)
def test_generate_serves_the_directory(kind: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.cli.test_generate import WORDS, tokenizer_of

    model = llama()
    write_model(tmp_path, model, kind)
    tokenizer_of(WORDS).save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "one two", "--temperature", "0", "--max-tokens", "5", "--json"]) == 0
    out = capsys.readouterr()
    row = json.loads(out.out.splitlines()[0])
    ids = torch.tensor([[1, 3, 4]])
    told = model.generate(ids, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=2)
    assert row["tokens"] == told[0, 3 : 3 + len(row["tokens"])].tolist()
    assert ("14 weights in codes of the file's values" in out.err) == (kind != "fp8")


OSS: dict[str, Any] = {
    **{"model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32},
    **{"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4},
}
EXPERTS = {"gate_up_proj": (128, 32), "down_proj": (32, 64)}


def test_mxfp4_has_the_bits_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    made = mxfp4(3, 6, 64)
    made["blocks"][0, 0] = torch.arange(16, dtype=torch.uint8) * 17  # each code
    found = decode_mxfp4(made["blocks"], made["scales"])
    assert torch.equal(found.transpose(1, 2).bfloat16(), theirs(made["blocks"], made["scales"]))
    assert torch.equal(found, found.bfloat16().float())


def _write_mxfp4(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Files of a gpt-oss in mxfp4, and of the decoded floats."""
    from shardfn.interop import gpt_config, gpt_to_hf

    config = gpt_config(OSS)
    params = tree_map(torch.Tensor.bfloat16, gpt.init(config, sf.key(0)))
    gpt_to_hf(path / "floats", config, params)
    tensors = load_file(path / "floats" / "model.safetensors")
    coded = dict(tensors)
    for layer in range(2):
        for i, (name, (n, k)) in enumerate(EXPERTS.items()):
            at = f"model.layers.{layer}.mlp.experts.{name}"
            made = mxfp4(3, n, k, seed=2 * layer + i)
            tensors[at] = decode_mxfp4(made["blocks"], made["scales"] - 20).transpose(1, 2).bfloat16().contiguous()
            del coded[at]
            coded |= {f"{at}_blocks": made["blocks"], f"{at}_scales": made["scales"] - 20}
    (path / "coded").mkdir()
    save_file(tensors, path / "floats" / "model.safetensors")
    save_file(coded, path / "coded" / "model.safetensors")
    told = json.loads((path / "floats" / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "coded" / "config.json").write_text(json.dumps(told))
    return path / "floats", path / "coded"


@pytest.mark.nightly
def test_an_engine_of_mxfp4_draws_the_tokens_of_the_decoded_floats(tmp_path: pathlib.Path) -> None:
    floats, coded = _write_mxfp4(tmp_path)
    tokens = []
    for place in (floats, coded):
        config, params = gpt_from_hf(place, dtype=torch.float32, batch_invariant=True)
        whole = params["blocks"][1]["e_gate_up"]
        assert torch.equal(whole.block((slice(1, 3), slice(1, 2), slice(5, 9))), whole.full()[1:3, 1:2, 5:9])
        params = tree_map(lambda x: x.full(), params)
        limits = sf.inference.Limits(vocab=61, context=32, blocks=20, block=4, buckets=(4, 12), running=4)
        engine = Engine(decoder(config), params, limits=limits)
        found = engine.generate([[5, 6, 7], [8]], Sampling(max_tokens=8, temperature=0.0))
        tokens.append(([one.tokens for one in found], params))
    assert tokens[0][0] == tokens[1][0]
    for a, b in zip(tree_leaves(tokens[0][1]), tree_leaves(tokens[1][1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_a_base_in_mxfp4_trains_adapters_as_decoded_floats_do(world: int, tmp_path: pathlib.Path) -> None:
    mesh, losses = sf.make_mesh({"dp": world}, device="cpu"), list[list[float]]()
    if mesh.rank == 0:
        _write_mxfp4(tmp_path)
    if world > 1:
        torch.distributed.barrier()
    tokens = torch.arange(28).view(4, 7) % 61
    for name in ("floats", "coded"):
        config, params = gpt_from_hf(tmp_path / name, dtype=torch.float32)
        lora = sf.lora.LoRA.of(params, ["wq", "wo"], rank=2)
        loss, zero = lora.adapt(functools.partial(gpt.loss, config)), sf.Zero(stage=3, persist_elements=0)
        step = sf.sharded_step(loss, sf.optim.adamw(1e-2), mesh=mesh, trainable=lora.trainable, zero=zero)
        state, found = step.init({"base": params, "lora": lora.init(sf.key(0))}), list[float]()
        for _ in range(3):
            state, metrics = step(state, {"tokens": tokens.chunk(world)[mesh.rank]})
            found.append(float(metrics["loss"]))
        losses.append(found)
    assert losses[0] == losses[1] and losses[1][2] < losses[1][0]


def test_mxfp4_that_does_not_fit_is_named(tmp_path: pathlib.Path) -> None:
    made = mxfp4(2, 4, 32)
    wrong = {"a_blocks": made["blocks"], "b_scales": made["scales"], "c_blocks": made["blocks"][..., :8].contiguous()}
    save_file(wrong | {"c_scales": made["scales"].clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ValueError) as error:
        open_archive(tmp_path)
    said = str(error.value)
    for words in ("a_scales is missing", "b_blocks is missing", "c_blocks must be uint8 [E, N, K / 32, 16], got"):
        assert words in said
