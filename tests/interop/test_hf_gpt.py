"""Covers shardfn/interop/_hf_gpt.py, _hf_config.py: models of transformers in, and back out."""

import copy
import functools
import json
import pathlib
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import P, tree_leaves, tree_map
from shardfn.inference import Engine, Limits, Sampling, decoder
from shardfn.interop import Archive, ArchiveWriter, gpt_config, gpt_from_hf, gpt_to_hf, module_to_hf
from shardfn.models import gpt
from shardfn.testing import RTOL, distributed

transformers = pytest.importorskip("transformers")

VOCAB = 61
_ROPE = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "max_position_embeddings": 32}
_ROPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 3}
_BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_GEMMA = _ROPE | {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 3}
_NEOX = {name: x for name, x in _ROPE.items() if name not in ("num_key_value_heads", "rms_norm_eps")}


def _stretch(kind: str, **more: float) -> dict[str, Any]:
    own = {"rope_type": kind, "factor": 4.0, "rope_theta": 500.0, **more}
    own |= {} if kind == "linear" else {"original_max_position_embeddings": 16}
    return {"rope_parameters": own}


_LATENT = {name: x for name, x in _ROPE.items() if name != "num_key_value_heads"} | {"num_key_value_heads": 4}
_LATENT |= {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
_LATENT |= {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
_LATENT |= {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
_PLAIN_CHOICE = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0}
_OSS = _ROPE | {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 3}
_OSS |= {"swiglu_limit": 0.6}
MODELS: dict[str, Any] = {
    "gpt2": ("GPT2", {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 32}),
    "llama": ("Llama", _ROPE | _THETA),
    "llama_bias_tied": ("Llama", _ROPE | {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", _ROPE | {"sliding_window": 3}),
    "qwen2": ("Qwen2", _ROPE | {"tie_word_embeddings": True} | _THETA),
    "bloom": ("Bloom", {"hidden_size": 24, "n_layer": 3, "n_head": 3, "seq_length": 32}),
    "llama3": ("Llama", _ROPE | _stretch("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "linear": ("Llama", _ROPE | _stretch("linear")),
    "yarn": ("Llama", _ROPE | _stretch("yarn", beta_fast=4.0) | {"head_dim": 10}),
    "qwen3": ("Qwen3", _ROPE | _THETA | {"head_dim": 10}),
    "qwen3_windows": ("Qwen3", _ROPE | {"head_dim": 8, "attention_bias": True} | _WINDOWS | {"max_window_layers": 1}),
    "qwen2_windows": ("Qwen2", _ROPE | _WINDOWS | {"max_window_layers": 2}),
    "olmo2": ("Olmo2", _ROPE | _THETA),
    "olmo3": ("Olmo3", _ROPE | {"num_hidden_layers": 4, "sliding_window": 3, "rope_parameters": _BY_LAYER}),
    "smollm3": ("SmolLM3", _ROPE | _WINDOWS | {"no_rope_layers": [1, 0, 1]}),
    "phi3": ("Phi3", _ROPE | {"sliding_window": 4, "tie_word_embeddings": True}),
    "gemma": ("Gemma", _ROPE | {"head_dim": 10}),
    "gemma2": ("Gemma2", _GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3", _GEMMA | {"sliding_window_pattern": 2, "rope_parameters": _BY_LAYER}),
    "phi": ("Phi", _ROPE | {"partial_rotary_factor": 0.5, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "gpt_neox": ("GPTNeoX", _NEOX | {"rotary_pct": 0.25, "hidden_size": 64}),
    "deepseek_v3": ("DeepseekV3", _LATENT | _stretch("yarn", beta_fast=4.0, mscale=1.3, mscale_all_dim=0.8)),
    "deepseek_v3_plain": ("DeepseekV3", _LATENT | _PLAIN_CHOICE | {"q_lora_rank": None, "rope_interleave": False}),
    "deepseek_v3_dense": ("DeepseekV3", _LATENT | {"first_k_dense_replace": 3}),
    "deepseek_v2": ("DeepseekV2", _LATENT | {"routed_scaling_factor": 1.5, "tie_word_embeddings": True}),
    "deepseek_v2_groups": ("DeepseekV2", _LATENT | {"topk_method": "group_limited_greedy"}),
    "gpt_oss": ("GptOss", _OSS),
    "gpt_oss_plain": ("GptOss", _OSS | {"attention_bias": False, "tie_word_embeddings": True} | _THETA),
    "gpt_neox_serial": ("GPTNeoX", _NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0}),
}
TOKENS = torch.arange(14).view(2, 7) * 5 % VOCAB


@functools.cache
def model_of(name: str) -> Any:
    kind, told = MODELS[name]
    torch.manual_seed(0)
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(vocab_size=VOCAB, **told, **no_tokens)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, _class(kind))(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for name, x in model.named_buffers():
            if name.endswith("correction_bias"):
                x.add_(0.2 * torch.randn_like(x))
    return model


def bias_of(params: Any) -> dict[str, Any]:
    """The biases of the choice of experts, which are no parameters."""
    return {"bias": params["expert_bias"]} if "expert_bias" in params else {}


def _class(kind: str) -> str:
    return "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"


def saved(name: str, path: pathlib.Path, **how: Any) -> pathlib.Path:
    model_of(name).save_pretrained(path / "in", **how)
    return path / "in"


def full(params: Any) -> Any:
    return tree_map(lambda x: x.full(), params)


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=RTOL[x.dtype], atol=RTOL[x.dtype] * float(y.abs().max()))


@pytest.mark.day("mistral")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(MODELS)]
)
@torch.no_grad()
def test_there_and_back(name: str, tmp_path: pathlib.Path) -> None:
    want, wide = model_of(name)(TOKENS).logits, copy.deepcopy(model_of(name)).double()(TOKENS).logits
    place = saved(name, tmp_path, max_shard_size="9KB" if name in ("gpt2", "llama") else "1GB")
    # Layers with and without experts are not alike.
    alike = gpt_from_hf(place)[0].expert_layers in ([], [0, 1, 2])
    ways: list[dict[str, Any]] = [{}, {"stacked": alike, "per_head": True}]
    for how in ways:
        config, params = gpt_from_hf(place, **how)
        # transformers forms angles in float32 for all dtypes of weights.
        exact = full(gpt_from_hf(place, dtype=torch.float64, **how)[1])
        close(gpt.apply(config, exact, TOKENS, **bias_of(exact)).float(), wide.float())
        params = full(params)
        like = gpt.init(config, sf.key(0))
        shapes = {name: x for name, x in params.items() if name != "expert_bias"}
        assert tree_map(lambda x: x.shape, shapes) == tree_map(lambda x: x.shape, like)
        # A Phi 3 is a Mistral whose projections lie together.
        kind = "phi3" if name == "phi3" else None
        gpt_to_hf(tmp_path / "out", config, params, model_type=kind, file_bytes=9000)
        # The attention of `model_of`: with another kernel float32 is further off than the tolerance on some processors.
        other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
        assert type(other) is type(model_of(name))
        ours, theirs = other.state_dict(), model_of(name).state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
        close(other(TOKENS).logits, want)
    config, params = gpt_from_hf(place)
    params, prompt = full(params), TOKENS[:1, :4]
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    told = other.generate(prompt, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert torch.equal(gpt.generate(config, params, prompt, 5, sf.key(0), temperature=0, **bias_of(params)), told)


def _in_float64(run: Any) -> Any:
    """Runs transformers with float64 in place of the float32 that it has in norms, rotary positions and routers."""

    class Wide:
        def __getattr__(self, name: str) -> Any:
            return torch.float64 if name in ("float32", "float") else getattr(torch, name)

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("deepseek_v2", "deepseek_v3"):
            patch.setattr(f"transformers.models.{kind}.modeling_{kind}.torch", Wide())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return run()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["deepseek_v3_plain", "deepseek_v3_dense", "deepseek_v2"])
def test_latent_attention_in_float64_and_its_gradients(name: str, tmp_path: pathlib.Path) -> None:
    wide = copy.deepcopy(model_of(name)).double().requires_grad_()
    R = wide.config.qk_rope_head_dim
    wide.model.rotary_emb.inv_freq = 10000.0 ** -(torch.arange(0, R, 2).double() / R)
    wanted = _in_float64(lambda: wide(TOKENS).logits)
    wanted.logsumexp(-1).sum().backward()
    config, params = gpt_from_hf(saved(name, tmp_path), dtype=torch.float64)
    params = tree_map(lambda x: x.full().requires_grad_(), params)
    found = gpt.apply(config, params, TOKENS, **bias_of(params))
    found.logsumexp(-1).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    like = tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, params)
    gpt_to_hf(tmp_path / "grads", config, like)
    archive, theirs = Archive(tmp_path / "grads"), dict(wide.named_parameters())
    compared = 0
    for key, x in theirs.items():
        if key in archive and x.grad is not None:
            shape = archive[key].shape
            ours = archive.box(key, [(0, n) for n in shape])
            torch.testing.assert_close(ours, x.grad, rtol=1e-9, atol=1e-9 * float(x.grad.abs().max()))
            compared += 1
    assert compared > 20


SERVED = [name for name in MODELS if not name.startswith("gpt_neox")]


@pytest.mark.nightly
@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_served_tokens_are_those_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
    config, params = gpt_from_hf(saved(name, tmp_path), batch_invariant=True)
    limits = Limits(vocab=VOCAB, context=32, blocks=20, block=4, buckets=(4, 12), running=4)
    engine = Engine(decoder(config), full(params), limits=limits)
    prompts = [[5, 6, 7, 8, 9, 10], [11], [5, 6, 7, 8]]
    together = engine.generate(prompts, Sampling(max_tokens=8, temperature=0.0))
    assert together[2] == engine.generate(prompts[2:], Sampling(max_tokens=8, temperature=0.0))[0]
    for prompt, one in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt])
        how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
        assert list(one.tokens) == model_of(name).generate(ids, **how)[0, len(prompt) :].tolist()


@pytest.mark.nightly
def test_a_model_of_erf_is_served_without_batch_invariance(tmp_path: pathlib.Path) -> None:
    place = saved("gpt_neox", tmp_path)
    with pytest.raises(ValueError, match="batch_invariant=True does not know mlp='gelu_erf'"):
        gpt_from_hf(place, batch_invariant=True)
    config, params = gpt_from_hf(place)
    limits = Limits(vocab=VOCAB, context=32, blocks=20, block=4, buckets=(4, 12), running=4)
    engine = Engine(decoder(config), full(params), limits=limits)
    one, ids = engine.generate([[5, 6, 7]], Sampling(max_tokens=8, temperature=0.0))[0], torch.tensor([[5, 6, 7]])
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    assert list(one.tokens) == model_of("gpt_neox").generate(ids, **how)[0, 3:].tolist()


@pytest.mark.parametrize(
    "name", ["gpt2", pytest.param("bloom", marks=pytest.mark.nightly), pytest.param("llama", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("how", [{}, {"per_head": True}])
def test_a_block_is_the_block_of_the_whole(name: str, how: Any, tmp_path: pathlib.Path) -> None:
    _, params = gpt_from_hf(saved(name, tmp_path), stacked=True, **how)
    for x in tree_leaves(params):
        where = tuple(slice(n // 3, n - n // 4) for n in x.shape)
        assert torch.equal(x.block(where), x.full()[where])
        assert x.block(tuple(slice(0, 0) for _ in x.shape)).numel() == 0


def test_dtypes_are_converted_when_asked(tmp_path: pathlib.Path) -> None:
    _, params = gpt_from_hf(saved("llama", tmp_path), dtype=torch.bfloat16)
    assert {x.dtype for x in tree_leaves(params)} == {torch.bfloat16}
    _, whole = gpt_from_hf(tmp_path / "in")
    assert torch.equal(params["embed"].full(), whole["embed"].full().to(torch.bfloat16))


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_read_their_part_and_write_the_whole(world: int) -> None:
    place = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(place)
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    config = gpt.Config(vocab_size=64, num_layers=3, d_model=24, num_heads=3, tie_embeddings=True, stacked=True)
    whole = gpt.init(config, sf.key(0))
    if mesh.rank == 0:
        gpt_to_hf(place[0] + "/in", config, whole)
    torch.distributed.barrier()
    config, params = gpt_from_hf(place[0] + "/in", stacked=True)
    options: dict[str, Any] = {"specs": gpt.specs(config), "zero": sf.Zero(stage=3, persist_elements=0)}
    step = sf.sharded_step(functools.partial(gpt.loss, config), sf.optim.sgd(0.0), mesh=mesh, **options)
    state = step.init(params)
    for x, y in zip(tree_leaves(state.params), tree_leaves(whole), strict=True):
        assert torch.equal(x.full_tensor(), y)
    gpt_to_hf(place[0] + "/out", config, state.params)
    torch.distributed.barrier()
    again = full(gpt_from_hf(place[0] + "/out", stacked=True)[1])
    assert all(map(torch.equal, tree_leaves(again), tree_leaves(whole)))


@distributed(world=3, timeout=60)
def _cannot_be_written(directory: str, when: str) -> None:
    mesh = sf.make_mesh({"dp": 3}, device="cpu")
    config = gpt.Config(vocab_size=64, num_layers=2, d_model=24, num_heads=3, tie_embeddings=True)
    module = torch.nn.Linear(3, 2)
    whole = gpt.init(config, sf.key(0))
    tree: Any = tree_map(lambda x: sf.shard(x, P("dp"), mesh), whole)
    calls = (
        lambda: gpt_to_hf(directory, config, tree),
        lambda: module_to_hf(
            module, {n: sf.shard(p.detach(), P(), mesh) for n, p in module.named_parameters()}, directory
        ),
    )
    real = ArchiveWriter.put
    for write in calls:
        if when == "later" and mesh.rank == 0:
            puts = iter(range(9))

            def failing(self: Any, name: str, x: torch.Tensor, puts: Any = puts) -> None:
                if next(puts) == 1:
                    raise OSError(28, "No space left on device")
                real(self, name, x)

            ArchiveWriter.put = failing
        try:
            with pytest.raises((OSError, sf.RankError), match=r"No space left|weights need a directory"):
                write()
        finally:
            ArchiveWriter.put = real
    assert torch.equal(tree["embed"].full_tensor(), whole["embed"])  # the ranks still agree


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_writer_that_fails_raises_on_all(tmp_path: pathlib.Path, when: str) -> None:
    """Without a directory to write to, and with a disk that is full after a tensor."""
    place = tmp_path / "out"
    if when == "first":
        place.write_text("")
    _cannot_be_written(str(place), when)
    if when == "later":
        assert not any(place.iterdir())


def test_only_the_bytes_of_the_block_are_read(tmp_path: pathlib.Path) -> None:
    x = torch.arange(64 * 3 * 1024, dtype=torch.float32).view(64, 3 * 1024)
    with ArchiveWriter(tmp_path, {"w": (x.dtype, (64, 3072))}) as out:
        out.put("w", x)
    archive = Archive(tmp_path)
    assert torch.equal(archive.box("w", [(8, 16), (0, 3072)]), x[8:16])
    assert archive.read_bytes == 8 * 3072 * 4
    archive.read_bytes = 0
    # As of the queries of GPT-2, [D, 3, D]: rows of 4 KiB with 8 KiB between them.
    assert torch.equal(archive.box("w", [(2, 64), (1, 2), (0, 1024)], (64, 3, 1024))[:, 0], x[2:, 1024:2048])
    assert archive.read_bytes == 62 * 1024 * 4
    archive.read_bytes = 0
    assert torch.equal(archive.box("w", [(5, 7), (10, 3072)]), x[5:7, 10:])  # gaps are small: whole rows are read
    assert archive.read_bytes == 2 * 3072 * 4


def test_everything_that_does_not_fit_is_listed(tmp_path: pathlib.Path) -> None:
    place = saved("llama", tmp_path)
    told = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(told | {"intermediate_size": 41, "num_hidden_layers": 2}))
    with pytest.raises(ValueError) as error:
        gpt_from_hf(place)
    assert "model.layers.0.mlp.up_proj.weight is (40, 24) in the file, but (41, 24) by config.json" in str(error.value)
    assert "model.layers.2.mlp.up_proj.weight is left over" in str(error.value)
    wrong = {"model_type": "llama", "hidden_act": "gelu", "rope_scaling": {"type": "linear"}, "mlp_bias": True}
    with pytest.raises(ValueError) as error:
        gpt_config(wrong)
    assert all(word in str(error.value) for word in ("hidden_act='gelu'", "rope_type='linear'", "mlp_bias=True"))
    with pytest.raises(ValueError, match="Did you mean 'llama'"):
        gpt_config({"model_type": "lama"})


TOLD: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 64, "n_positions": 16, "n_inner": 64},
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 1, "vocab_size": 64, "seq_length": 16},
    "mistral": {
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1},
        **{"vocab_size": 64, "intermediate_size": 64, "max_position_embeddings": 16, "sliding_window": 8},
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, told in TOLD.items() for name in told])
def test_sizes_that_no_model_has_are_refused_by_name(kind: str, name: str) -> None:
    told = {"model_type": kind, **TOLD[kind]}
    gpt_config(told)
    most = 10_000 if "layer" in name else 2**31 - 1
    for x in (0, -1, most + 1, 10**12, 8.0, "8", True):
        with pytest.raises(ValueError) as error:
            gpt_config(told | {name: x})
        said = f"- {name} is {x!r}; it must be an integer of 1 or more, and at most {most}"
        assert str(error.value).splitlines()[1:] == [f"  {said}"]


def test_the_largest_sizes_pass_and_other_numbers_are_finite() -> None:
    told = {"model_type": "mistral", **TOLD["mistral"]}
    most = {name: 2**31 - 1 for name in ("vocab_size", "intermediate_size", "max_position_embeddings")}
    made = gpt_config(told | most | {"num_hidden_layers": 10_000})
    assert (made.vocab_size, made.ff_dim, made.max_len, made.num_layers) == (*most.values(), 10_000)
    for heads in (12, 2**31 - 1):  # the size of a head follows from their number, and is not named
        with pytest.raises(ValueError, match=rf"num_heads={heads} does not divide d_model=32") as error:
            gpt_config(told | {"num_attention_heads": heads, "num_key_value_heads": None})
        assert "head_dim" not in str(error.value)
    for x in (0, -1.0, float("nan"), float("inf"), 10**400, "1e-5", True):
        for part in ({"rms_norm_eps": x}, {"rope_parameters": {"rope_theta": x}}, {"rope_scaling": {"rope_theta": x}}):
            with pytest.raises(ValueError, match=r"- (rms_norm_eps|rope_theta) is .*; it must be a finite number"):
                gpt_config(told | part)


def test_published_sizes_have_their_numbers_of_parameters() -> None:
    deepseek, oss = (gpt_config({"model_type": kind}) for kind in ("deepseek_v3", "gpt_oss"))
    assert gpt.num_params(deepseek) == 671_026_404_352 and gpt.num_params(oss) == 116_829_156_672
    # A token has 576 numbers in each layer: 1.7% of 128 heads of 128 numbers of keys and of values.
    limits = Limits(vocab=129280, context=64, blocks=2, block=64)
    assert decoder(deepseek).cache.num_bytes(limits) == 2 * 64 * 61 * 576 * 4
    other = {"kv_lora_rank": 0, "n_routed_experts": 2**20, "q_lora_rank": 1.5}
    with pytest.raises(ValueError) as error:
        gpt_config({"model_type": "deepseek_v3", **other})
    assert all(f"{name} is {x!r}; it must be an integer" in str(error.value) for name, x in other.items())
    lacks = {"attention_bias": True, "scoring_func": "softmax", "num_key_value_heads": 8, "n_shared_experts": 0}
    with pytest.raises(ValueError) as error:
        gpt_config({"model_type": "deepseek_v3", **lacks})
    for words in ("attention_bias=True", "scoring_func='softmax'", "num_key_value_heads=8; it must be 128"):
        assert words in str(error.value)


def test_a_model_that_transformers_lacks_is_refused(tmp_path: pathlib.Path) -> None:
    config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, mlp="swiglu")
    with pytest.raises(ValueError, match="mlp='swiglu', but a gpt2 has 'gelu'"):
        gpt_to_hf(tmp_path, config, gpt.init(config, sf.key(0)))


def test_damaged_files_are_refused(tmp_path: pathlib.Path) -> None:
    place = saved("gpt2", tmp_path) / "model.safetensors"
    data = place.read_bytes()
    for bad in (data[:-10], data[:5], b"\xff" * 8 + data[8:], data[:9] + b"x" + data[10:]):
        place.write_bytes(bad)
        with pytest.raises(sf.memory.DamagedError):
            Archive(place.parent)
