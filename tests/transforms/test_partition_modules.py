"""`partition` of unmodified Hugging Face decoders in a pipeline: tp x pp x dp by specs alone."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import shardfn as sf
from shardfn import P, Sharding, Zero, optim
from shardfn.testing import assert_parity, distributed

transformers = pytest.importorskip("transformers")

NIGHTLY = pytest.mark.nightly
SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 3, "use_cache": False}
HEADS: dict[str, Any] = {"intermediate_size": 36, "num_attention_heads": 4, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ROWS, COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj.weight", "down_proj.weight")
PATHS = {"GPT2": "transformer.h"}


def model(name, tied):
    torch.manual_seed(0)
    if name == "GPT2":
        sizes = {"vocab_size": 40, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 16, "use_cache": False}
        config = transformers.GPT2Config(**sizes, **NO_DROPOUT, tie_word_embeddings=tied)
        module = transformers.GPT2LMHeadModel(config)
    else:
        config = getattr(transformers, f"{name}Config")(**SIZES, **HEADS, tie_word_embeddings=tied)
        module = getattr(transformers, f"{name}ForCausalLM")(config)
    for path, norm in list(module.named_modules()):  # those of transformers compute in float32
        if type(norm).__name__.endswith("RMSNorm"):
            parent, _, last = path.rpartition(".")
            setattr(module.get_submodule(parent), last, torch.nn.RMSNorm(24, eps=1e-6))
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return sf.from_module(module.double(), layers=PATHS.get(name, "model.layers"))


def spec(name):
    """Megatron's, of a layer's leaf; GPT-2's weights are [in, out]."""
    if name.endswith("c_proj.weight") or any(part in name for part in ROWS):
        return ("tp",)
    if any(part in name for part in ("c_fc", "c_attn")):
        return (None, "tp") if name.endswith("weight") else ("tp",)
    return (None, "tp") if name.endswith(COLUMNS) else ()


def specs(params, path, *, stacked=False):
    """The embedding is cut by the vocabulary, too."""
    layers = {name: P("pp", *spec(name)) for name in params[path]}
    layers = {name: Sharding(x, stacked=True) for name, x in layers.items()} if stacked else layers
    return {
        name: layers if name == path else P("tp") if "embed_tokens" in name or "wte" in name else P() for name in params
    }


def check(name, mesh, *, tied=True, stage=None, jitted=False, outside=True, stacked=False, m=2, **how):
    params, apply = model(name, tied)

    def loss(params, tokens):
        logits = apply(params, input_ids=tokens).logits  # their own loss is in float32, too
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    parted: Any
    options: dict[str, Any] = {"num_microbatches": m, "schedule": how.pop("schedule", "1f1b")}
    if outside:
        parted = sf.partition(sf.pipeline_module(loss, apply, **options), **how)
    else:
        parted = sf.pipeline_module(sf.partition(loss, **how), apply, **options)
    tokens = [torch.randint(0, 40, (8, 9), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with sf.make_mesh(mesh) as on:
        assert_parity(
            sf.jit(parted, backend="graph") if jitted else parted,
            optim.sgd(0.5),
            params,
            tokens,
            mesh=on,
            reference=loss,
            specs=specs(params, apply.path, stacked=stacked),
            batch=P("dp"),
            zero=None if stage is None else Zero(stage=stage, axis="dp", persist_elements=0),
        )
        assert not apply.needs_params
        own = on.coords["pp"]
    return own, [[x.name for x in program.sent for _ in range(x.times)] for program in parted.programs()]


@distributed(world=4, timeout=240)
def four_ranks(name, **how):
    return check(name, {"pp": 2, "tp": 2}, **how)


@distributed(world=8, timeout=300)
def eight_ranks(name, **how):
    return check(name, {"dp": 2, "pp": 2, "tp": 2}, **how)


@NIGHTLY
@pytest.mark.parametrize("name", ["Qwen2", "Llama", "Mistral", "GPT2"])
def test_a_decoder_in_stages_is_cut_by_specs(name):
    joined = ["all_gather_invariant", "take_own_block"] if name == "GPT2" else []  # of queries, keys and values in one
    layer = ["pvary", *joined, "psum", "pvary", "psum"]
    logits = ["pvary", "pmax and psum of a number a row", "psum"]
    for own, programs in four_ranks(name):
        assert programs == [["psum", *layer, *layer] if own == 0 else [*layer, *logits]]


@NIGHTLY
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_three_axes(name, stage):
    eight_ranks(name, stage=stage, tied=stage < 2, stacked=stage == 3, outside=stage != 1)


@NIGHTLY
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_captured_split_and_with_the_sequence_cut(name):
    four_ranks(name, jitted=True)
    four_ranks(name, schedule="zb-h1", m=4, stacked=True)
    four_ranks(name, sequence=True)
