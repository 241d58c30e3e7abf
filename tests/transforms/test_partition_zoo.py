"""`partition` of unmodified Hugging Face decoders: collectives, and parity with one device."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, optim
from shardfn.core import tree_leaves
from shardfn.testing import assert_parity, distributed

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "use_cache": False}
HEADS: dict[str, Any] = {"intermediate_size": 36, "num_attention_heads": 4, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ROWS, COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj.weight", "down_proj.weight")


def model(name, exact=False):
    torch.manual_seed(0)
    if name == "GPT2":
        sizes = {"vocab_size": 40, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16, "use_cache": False}
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **NO_DROPOUT))
    else:
        more = {"pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if name == "Phi3" else {}
        config = getattr(transformers, f"{name}Config")(**SIZES, **HEADS, **more)
        module = getattr(transformers, f"{name}ForCausalLM")(config)
    if exact:  # the norms of transformers compute in float32, which shows where sums have another order
        for path, norm in list(module.named_modules()):
            if type(norm).__name__.endswith("RMSNorm"):
                parent, _, last = path.rpartition(".")
                setattr(module.get_submodule(parent), last, torch.nn.RMSNorm(24, eps=1e-6))
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return sf.from_module(module.double())


PARTS: dict[str, Any] = {
    "GPT2": {r"c_attn\.weight": (1, 3), r"c_attn\.bias": (0, 3)},
    "Phi3": {r"qkv_proj\.weight": (0, (24, 12, 12)), r"gate_up_proj\.weight": (0, 2)},
}


def specs(params, parts=False):
    """Megatron's; GPT-2's weights are [in, out], and its queries, keys and values one leaf."""

    def spec(name):
        if parts and "c_attn" in name:
            return P(None, None, "tp") if name.endswith("weight") else P(None, "tp")
        if "qkv_proj" in name:
            return (P("tp"),) * 3
        if "gate_up_proj" in name:
            return P(None, "tp")
        if any(part in name for part in ("c_fc", "c_attn")):
            return P(None, "tp") if name.endswith("weight") else P("tp")
        if name.endswith("c_proj.weight") or any(part in name for part in ROWS):
            return P("tp")
        return P(None, "tp") if name.endswith(COLUMNS) else P()

    return {name: spec(name) for name in params}


def loss_of(apply):
    return lambda params, tokens: apply(params, input_ids=tokens, labels=tokens).loss


@distributed(world=2, timeout=240)
def two_ranks(name, parts=False, jitted=False, **how):
    params, apply = model(name, exact="sequence" in how)
    inner = loss_of(apply)
    if parts:
        params, whole = sf.by_parts(params, PARTS[name])
        inner = functools.partial(joined, inner, whole)
    loss = sf.partition(inner, **how)
    tokens = [torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with sf.make_mesh({"tp": 2}) as mesh:
        how = {"mesh": mesh, "specs": specs(params, parts), "batch": P(), "reference": inner}
        run = [assert_parity(loss, optim.sgd(0.5), params, tokens, **how)]
        if jitted:
            run.append(assert_parity(sf.jit(loss, backend="graph"), optim.sgd(0.5), params, tokens, **how))
            for eager, captured in zip(*map(tree_leaves, run), strict=True):
                assert torch.equal(torch.as_tensor(eager), torch.as_tensor(captured))
    return [x.name for x in loss.programs()[0].sent], loss.as_text()


def joined(inner, whole, params, tokens):
    return inner(whole(params), tokens)


MEGATRON = ["pvary", "psum"] * 4  # two layers of two pairs; the transpose of each is one too


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Qwen2", "Llama", "Mistral"])
def test_a_decoder_has_megatrons_collectives_and_equals_one_device(name):
    assert two_ranks(name)[0][0] == MEGATRON


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["GPT2", "Phi3"])
def test_fused_projections_by_parts_have_megatrons_collectives_too(name):
    assert two_ranks(name, parts=True)[0][0] == MEGATRON


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen2", "Mistral"])
def test_a_captured_step_of_a_decoder_computes_the_bits_of_the_eager_one(name):
    assert two_ranks(name, parts=name in PARTS, jitted=True)[0][0] == MEGATRON


@pytest.mark.nightly
def test_a_fused_projection_is_joined_and_its_values_cut_by_heads():
    # An all_to_all to samples and a gather back, which greedy takes, sends an eighth more.
    names, _ = two_ranks("GPT2")[0]
    attention, mlp = ["pvary", "all_gather_invariant", "take_own_block", "psum"], ["pvary", "psum"]
    assert names == (attention + mlp) * 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_a_decoder_with_its_sequence_cut_between_blocks_equals_one_device(name):
    sent, _ = two_ranks(name, jitted=True, sequence=True)[0]
    pairs = [x for x in sent if x in ("psum_scatter", "all_gather")]
    # Three of four pairs: before the first the embedding is whole.
    assert pairs.count("psum_scatter") == pairs.count("all_gather") == 3, sent


@distributed(world=2, timeout=240)
def experts_on_two_ranks(kind, num, whole=None):
    """In float32, as torch multiplies groups in no wider dtype."""
    torch.manual_seed(0)
    sizes = SIZES | HEADS | {"num_hidden_layers": 1, "num_local_experts": num, "num_experts_per_tok": 2}
    sizes |= {"head_dim": 8, "layer_types": ["full_attention"]} if kind == "GptOss" else {}
    module = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.1)
    params, apply = sf.from_module(module)
    loss = sf.partition(loss_of(apply))
    own = {name for name in params if "experts" in name and not (whole and name.endswith(whole))}
    cut = {name: P("tp") if name in own else P() for name in params}
    tokens = [torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with sf.make_mesh({"tp": 2}) as mesh:
        assert_parity(loss, optim.sgd(0.5), params, tokens, mesh=mesh, specs=cut, batch=P(), reference=loss_of(apply))
    return [x.name for x in loss.programs()[0].sent]


@pytest.mark.nightly
@pytest.mark.parametrize("num", [4, 3])
def test_experts_that_are_cut_add_up_over_ranks(num):
    sent = experts_on_two_ranks("Mixtral", num)[0]
    # The transposes of tokens and of their weights, and one sum.
    assert sent == ["pvary", "pvary", "psum"]


@pytest.mark.nightly
@pytest.mark.parametrize("num", [4, 3])
def test_experts_of_gpt_oss_look_up_their_biases(num):
    # Besides, the transposes of two biases, which all ranks hold.
    assert experts_on_two_ranks("GptOss", num, whole="bias")[0] == ["pvary"] * 4 + ["psum"]
    # Biases that are cut are gathered, and the results still summed once.
    sent = experts_on_two_ranks("GptOss", num)[0]
    assert sent.count("psum") == 1 and [x for x in sent if x.startswith("all_")] == [
        "all_gather_invariant",
        "all_gather",
    ]


@distributed(world=3, timeout=240)
def on_three_ranks():
    """GPT-2 with a tied embedding that is cut along its features, and two heads: one rank has no head."""
    sizes = {"vocab_size": 29, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "n_inner": 6}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, **NO_DROPOUT, use_cache=False)
    params, apply = sf.from_module(transformers.GPT2LMHeadModel(config).double())
    cut = {name: P(None, "tp") if "wte" in name else P() for name in params}
    tokens = [torch.randint(0, 29, (2, 10), generator=torch.Generator().manual_seed(0))]
    inner = loss_of(apply)
    with sf.make_mesh({"tp": 3}) as mesh:
        loss = sf.jit(sf.partition(inner), backend="graph")
        assert_parity(loss, optim.sgd(0.5), params, tokens, mesh=mesh, specs=cut, batch=P(), reference=inner)


@pytest.mark.nightly
def test_a_captured_step_with_a_rank_without_a_head_equals_one_device():
    on_three_ranks()
