"""Covers models of transformers on ranks that each have some tokens: their results equal those of one device."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import nn, optim
from shardfn.interop import causal_lm_batch, causal_lm_loss
from shardfn.testing import assert_parity, distributed

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
# Values narrower than keys; attention sinks, windows; tokens that attend within chunks.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 3, "pad_token_id": 0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "experts_implementation": "eager"},
    ),
    "llama4": (
        "Llama4Text",
        {"head_dim": 4, "attention_chunk_size": 3, "moe_layers": [], "intermediate_size_mlp": 20, "use_qk_norm": False}
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "pad_token_id": 0},
    ),
}
BODIES = {
    "ulysses": lambda T: nn.Ulysses("sp", T),
    "ring": lambda T: nn.Ring("sp", T, zigzag=True, block=4),
}


def model_of(name: str, kv_heads: int = 2, rate: float = 0.0) -> Any:
    """In float64 throughout: the norms of transformers compute in float32, whose rounding shows the order of sums."""
    model = made(name, kv_heads, rate)
    for path, norm in list(model.named_modules()):
        if type(norm).__name__.endswith("RMSNorm"):
            parent, _, last = path.rpartition(".")
            size = len(norm.weight)
            setattr(model.get_submodule(parent), last, torch.nn.RMSNorm(size, eps=1e-6, dtype=torch.float64))
    return model


def made(name: str, kv_heads: int, rate: float) -> Any:
    torch.manual_seed(0)
    if name == "gpt2":
        off = {"resid_pdrop": rate, "embd_pdrop": rate, "attn_pdrop": rate, "bos_token_id": None, "eos_token_id": None}
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
        config = transformers.GPT2Config(vocab_size=13, use_cache=False, **sizes, **off)
        return transformers.GPT2LMHeadModel(config).double()
    if name in OTHERS:
        kind, more = OTHERS[name]
        sizes = {**SIZES, "vocab_size": 13, "num_key_value_heads": kv_heads, "use_cache": False, **more}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).double()
        for p in model.parameters():  # sinks are uninitialised, and norms alike
            torch.nn.init.normal_(p, std=0.3)
        return model
    kind = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}[name]
    more: dict[str, Any] = {"sliding_window": 4} if name == "mistral" else {}
    more |= {
        "use_cache": False,
        "num_key_value_heads": kv_heads,
        "attention_dropout": rate,
    }  # with a cache transformers does not see documents
    config = getattr(transformers, f"{kind}Config")(vocab_size=13, **SIZES, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def rows_of(T: int, packed: bool, n: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n)
    rows = {"input_ids": torch.randint(13, (2, T), generator=g)}
    rows["labels"] = rows["input_ids"].masked_fill(torch.rand(2, T, generator=g) < 0.3, -100)
    rows["labels"][0, T // 2 :] = -100
    if packed:
        rows["position_ids"] = torch.stack([torch.arange(T) - n * (torch.arange(T) >= n) for n in (2, 3)])
    return rows


def parity(name: str, body: Any, T: int, mesh: sf.Mesh, *, stage: int, packed: bool, **how: Any) -> None:
    torch.set_num_threads(1)
    rate = how.get("rate", 0.0)
    model, plain = (model_of(name, how.get("kv_heads", 2), rate).train() for _ in range(2))
    if how.get("checkpoint"):
        model.activation_checkpointing_enable()
    params, apply = sf.from_module(model, attention=body)
    _, dense = sf.from_module(plain, attention=nn.Dense() if rate else None)
    order = nn.sequence_order(body, T, mesh.axis_size("sp"))
    batches = [causal_lm_batch(nn.Dense(), rows_of(T, packed, n), mesh) for n in range(2)]
    index = {"index": torch.tensor([5, 3])} if rate else {}

    def reference(params: Any, batch: Any, *key: Tensor) -> Any:
        back = {k: x[:, order.argsort()] for k, x in batch.items() if k != "index"}
        given = {k: x for k, x in back.items() if k != "targets"}
        function = dense.keyed(key[0], batch["index"]) if key else dense
        total, count = nn.cross_entropy_sum(function(params, **given).logits, back["targets"])
        return sf.WeightedMean(total, count)

    loss: Any = causal_lm_loss(apply, tile=how.get("tile"))
    assert_parity(
        sf.jit(loss, backend="graph") if how.get("jit") else loss,
        optim.sgd(0.1, momentum=0.9),
        params,
        [{k: x[:, order] for k, x in batch.items()} | index for batch in batches],
        mesh=mesh,
        reference=reference,
        key=sf.key(3) if rate else None,
        batch=dict.fromkeys(batches[0], sf.P(None, "sp")) | dict.fromkeys(index, sf.P()),
        zero=sf.Zero(stage=stage, axis="sp", persist_elements=0) if stage else None,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("body", ["ulysses", "ring"])
@distributed(world=[2, 3])
def test_llama_along_a_sequence(body: str, world: int) -> None:
    """Stages 0 and 3; packed documents; 7 tokens, which no mesh divides; and a key head that all ranks share."""
    mesh = sf.make_mesh({"sp": world})
    parity("llama", BODIES[body](7), 7, mesh, stage=3, packed=True, tile=2)
    parity("llama", BODIES[body](7), 7, mesh, stage=0, packed=False, kv_heads=1)


@pytest.mark.nightly
@distributed(world=2)
def test_llama_captured() -> None:
    parity("llama", BODIES["ulysses"](7), 7, sf.make_mesh({"sp": 2}), stage=3, packed=True, tile=3, jit=True)


@pytest.mark.nightly
@distributed(world=2)
def test_other_models_and_a_checkpoint_within() -> None:
    mesh = sf.make_mesh({"sp": 2})
    parity("qwen2", BODIES["ring"](7), 7, mesh, stage=3, packed=False, checkpoint=True)
    parity("mistral", BODIES["ulysses"](7), 7, mesh, stage=3, packed=True)
    parity("gpt2", BODIES["ring"](7), 7, mesh, stage=3, packed=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
@distributed(world=2)
def test_other_kinds_of_attention(name: str) -> None:
    mesh = sf.make_mesh({"sp": 2})
    # transformers' own gpt-oss attends across documents.
    parity(name, BODIES["ring"](7), 7, mesh, stage=3, packed=name != "gpt_oss")
    parity(name, BODIES["ulysses"](7), 7, mesh, stage=0, packed=False)


@pytest.mark.nightly
@distributed(world=2)
def test_dropout_has_the_masks_of_one_device() -> None:
    """In attention, and in the residual stream, whose tokens are cut in two stretches a rank; and again in remat."""
    mesh = sf.make_mesh({"sp": 2})
    parity("llama", BODIES["ulysses"](7), 7, mesh, stage=3, packed=True, rate=0.25, tile=2)
    parity("gpt2", BODIES["ring"](7), 7, mesh, stage=0, packed=False, rate=0.25, checkpoint=True)


def test_a_key_asks_for_the_samples_numbers() -> None:
    _, apply = sf.from_module(model_of("llama", rate=0.1).train(), attention=nn.Dense())
    batch = causal_lm_batch(nn.Dense(), {"input_ids": torch.arange(6)[None]}, sf.make_mesh({}))
    with pytest.raises(ValueError, match=r'key.*"index"'):
        causal_lm_loss(apply)({}, batch, sf.key(0))


@pytest.mark.nightly
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gpt2"])
@distributed(world=[2, 3], timeout=600)
def test_grid(name: str, jit: bool, world: int) -> None:
    mesh = sf.make_mesh({"sp": world})
    for body in BODIES.values():
        for stage in (0, 3):
            parity(name, body(8), 8, mesh, stage=stage, packed=stage == 3, tile=3, jit=jit)


def test_labels_are_shifted_before_the_cut() -> None:
    rows = {"input_ids": torch.arange(5)[None], "labels": torch.tensor([[0, 1, -100, 3, 4]])}
    batch = causal_lm_batch(nn.Dense(), rows, sf.make_mesh({}))
    assert batch["targets"].tolist() == [[1, -100, 3, 4, -100]]
    assert set(batch) == {"input_ids", "targets"}
    with pytest.raises(ValueError, match=r"length must be the number of tokens of a row, 5, got"):
        causal_lm_batch(nn.Ring("sp", 6), rows, sf.make_mesh({}))


def test_packed_rows_have_positions() -> None:
    packed = {"input_ids": torch.arange(5)[None], "seq_idx": torch.tensor([[0, 0, 1, 1, 1]])}
    with pytest.raises(ValueError, match=r"\"position_ids\" of the shape \(1, 5\).*got \{.*'seq_idx': \(1, 5\)\}"):
        causal_lm_batch(nn.Dense(), packed, sf.make_mesh({}))
    positions = {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    assert causal_lm_batch(nn.Dense(), packed | positions, sf.make_mesh({}))["position_ids"].shape == (1, 5)


def test_logits_that_are_no_product_are_not_tiled() -> None:
    config = transformers.Gemma2Config(vocab_size=13, head_dim=4, num_key_value_heads=2, **SIZES)
    _, apply = sf.from_module(transformers.Gemma2ForCausalLM(config))
    with pytest.raises(ValueError, match=r"(?s)tile=2.*got a Gemma2ForCausalLM. Leave tile out"):
        causal_lm_loss(apply, tile=2)
