"""Covers `speculators/_files.py`: what is written is read, and other files are refused by name."""

import json
import pathlib
from array import array
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardfn import core
from shardfn.collectives import GlobalTensor
from shardfn.core import P, make_mesh, tree_map
from shardfn.inference import Context, Decoder, Engine, decoder
from shardfn.kernels import quantize_blocks
from shardfn.models import gpt
from shardfn.speculators import (
    EagleConfig,
    MTPConfig,
    RecurrentConfig,
    config_of,
    init,
    load,
    save,
    write_published,
)
from tests.speculators.trained import GREEDY

SIZES: dict[str, Any] = {"vocab_size": 13, "num_layers": 2, "d_model": 24, "num_heads": 4}


def model(**changes: Any) -> tuple[Decoder, Any]:
    config = gpt.Config(**SIZES | changes)
    return decoder(config), gpt.init(config, core.key(7))


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    config = config_of(model()[0], "lstm", d_inner=8)
    save(tmp_path / "made", config, init(config, core.key(0)), *model())
    return tmp_path / "made"


def test_files_are_read_as_written(directory: pathlib.Path) -> None:
    config = RecurrentConfig("lstm", vocab_size=13, d_model=24, num_layers=2, d_inner=8)
    found = load(directory, *model(batch_invariant=True))
    assert found.config == config
    other = load(directory, *model())
    assert found.digest() == other.digest()
    save(directory, config, init(config, core.key(1)), *model())  # in place of the files there
    assert load(directory, *model()).digest() != found.digest()
    assert sorted(x.name for x in directory.iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_of_another_config_is_refused(directory: pathlib.Path) -> None:
    with pytest.raises(
        ValueError, match=r"made: drafter: a speculator of another model(?s:.*)vocab_size is 13, and .*12"
    ):
        load(directory, *model(vocab_size=12))
    with pytest.raises(ValueError, match=r"its model has the digest [0-9a-f]{16}, and this model [0-9a-f]{16}"):
        load(directory, *model(position="rope"))
    config = config_of(model()[0], "mlp")
    with pytest.raises(
        ValueError, match=r"save: a speculator of another model(?s:.*)d_model is 24, and the model has 32"
    ):
        save(directory, config, init(config, core.key(0)), *model(d_model=32))


def test_a_model_of_other_weights_is_refused(directory: pathlib.Path) -> None:
    one, params = model()
    further = tree_map(lambda x: x.clone(), params)
    further["blocks"][1]["w_up"] += 0.01
    del further["position"]
    with pytest.raises(ValueError, match=r"made: a speculator of other weights. Train one") as found:
        load(directory, one, further)
    lines = [line.strip(" -") for line in str(found.value).splitlines()[1:]]
    assert [line.split(" ")[0] for line in lines] == ["['blocks'][1]['w_up']", "['position']"]
    assert "has the digest" in lines[0] and "is missing" in lines[1]
    assert load(directory, one, None).config.d_inner == 8  # only the config


def test_digests_do_not_depend_on_the_form_of_weights(directory: pathlib.Path) -> None:
    one, params = model()
    load(directory, one, tree_map(lambda x: x.bfloat16(), params))
    mesh = make_mesh({}, alone=True)
    load(directory, one, tree_map(lambda x: GlobalTensor(x, x.shape, P(), mesh), params))
    for changes in ({"stacked": True}, {"per_head": True}):
        load(directory, *model(**changes))
    with core.deferred():
        load(directory, *model())
    codes = params | {"head": quantize_blocks(torch.zeros(13, 32), "int8")}  # codes are not compared with floats
    load(directory, one, codes)


def test_damaged_files_are_refused_by_name(directory: pathlib.Path) -> None:
    config, tensors = directory / "config.json", directory / "model.safetensors"
    about, data = json.loads(config.read_text()), tensors.read_bytes()
    for changed, message in (
        ({**about, "format": "gguf"}, r"config.json has the format 'gguf', and must have 'shardfn-speculator'"),
        ({**about, "widht": 3}, r"widht is unknown"),
        ({k: v for k, v in about.items() if k != "d_inner"}, r"d_inner is missing"),
        ({**about, "model_weights": {"embed": 3}}, r"must have a size and a digest for each leaf, got {'embed': 3}"),
        ({**about, "kind": "gru"}, r"kind must be one of mlp, lstm, owl, eagle3, mtp, got 'gru'"),
        ({**about, "d_inner": 9}, r"first is \(32, 24\), and must be \(36, 24\)"),
    ):
        config.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            load(directory, *model())
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load(directory, *model())
    config.write_text(json.dumps(about))
    tensors.write_bytes(data[:-5])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        load(directory, *model())
    tensors.unlink()
    with pytest.raises(FileNotFoundError, match=r"made has no model.safetensors"):
        load(directory, *model())


HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "d_head": 6, "d_ff": 20, "rope_base": 500.0}
DEEP: dict[str, Any] = {"vocab_size": 31, "num_layers": 4, "d_model": 16, "num_heads": 4, "position": "rope"}
PUBLISHED = {
    "eagle3": EagleConfig(31, 16, 4, 16, (1, 2, 3), window=32, norm_eps=1e-6, draft_vocab=11, **HEADS),
    "mtp": MTPConfig(31, 16, 4, 16, num_drafts=2, window=32, norm_eps=1e-6, **HEADS),
}


def published(config: Any) -> dict[str, Any]:
    """Parameters of a speculator, whose norms and draft tokens are of no fresh one."""
    made = init(config, core.key(3))
    made = {name: x * 2 + 0.1 if x.is_floating_point() else x * 2 + 3 for name, x in made.items()}
    return made


def rebuild(config: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Logits after a chain, by the layers of transformers with the tensors of a file."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    more = {"intermediate_size": 20, "rms_norm_eps": 1e-6, "rope_theta": 500.0, "attn_implementation": "eager"}
    how = llama.LlamaConfig(vocab_size=31, **sizes, **more)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        made = llama.LlamaRMSNorm(16, eps=1e-6)
        made.load_state_dict({"weight": tensors[name]})
        return made(x)

    def attend(layer: Any, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        return layer(x, position_embeddings=llama.LlamaRotaryEmbedding(how)(x, at), attention_mask=mask)

    def eagle_logits(states: torch.Tensor, tokens: list[int], chain: list[int]) -> torch.Tensor:
        layer = llama.LlamaDecoderLayer(how, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, torch.nn.Linear(32, old.out_features, bias=False))
        own = {name.removeprefix("midlayer."): x for name, x in tensors.items() if name.startswith("midlayer.")}
        layer.load_state_dict({name: x for name, x in own.items() if name != "hidden_norm.weight"})
        g = states @ tensors["fc.weight"].T
        for token in [None, *chain]:
            tokens = tokens if token is None else [*tokens, token]
            e = norm("midlayer.input_layernorm.weight", tensors["embed_tokens.weight"][tokens])
            x = torch.cat([e, norm("midlayer.hidden_norm.weight", g)], -1)[None]
            h = g[-1] + attend(layer.self_attn, x)[0][0, -1]
            out = h + layer.mlp(layer.post_attention_layernorm(h))
            g = torch.cat([g, out[None]])
        return tensors["lm_head.weight"] @ norm("norm.weight", g[-1])

    def mtp_logits(states: torch.Tensor, tokens: list[int], chain: list[int]) -> torch.Tensor:
        g, known, own, head = states, [*tokens, *chain], dict[str, torch.Tensor](), ""
        for i in range(len(chain) + 1):
            head = f"model.layers.{4 + i}."
            own = {name.removeprefix(head): x for name, x in tensors.items() if name.startswith(head)}
            layer = llama.LlamaDecoderLayer(how, 0)
            layer.load_state_dict({n: x for n, x in own.items() if n.split(".")[0] in dict(layer.named_children())})
            e = own["embed_tokens.weight"][known[i : i + len(g)]]
            x = torch.cat([norm(head + "enorm.weight", e), norm(head + "hnorm.weight", g)], -1)
            g = attend(layer, (x @ own["eh_proj.weight"].T)[None])[0]
        return own["shared_head.head.weight"] @ norm(head + "shared_head.norm.weight", g[-1])

    return eagle_logits if isinstance(config, EagleConfig) else mtp_logits


@pytest.mark.day("eagle3")
@pytest.mark.parametrize("kind", list(PUBLISHED))
def test_published_files_are_read_as_layers_of_transformers_compute_them(kind: str, tmp_path: pathlib.Path) -> None:
    config, params, target = PUBLISHED[kind], published(PUBLISHED[kind]), model(**DEEP)
    write_published(tmp_path, config, params)
    found, tensors = load(tmp_path, *target), load_file(tmp_path / "model.safetensors")
    assert found.config == config
    logits_of, drawn = rebuild(config, tensors), torch.Generator().manual_seed(0)
    ids, chains = params.get("draft_tokens", torch.arange(31)), set()
    for num in (1, 5, 9):
        states = torch.randn(num, 16 * len(config.layers), generator=drawn)
        tokens, chain = torch.randint(31, (num,), generator=drawn).tolist(), list[int]()
        with torch.no_grad():
            for _ in range(config.num_drafts):
                chain.append(int(ids[logits_of(states, tokens, chain).argmax()]))
        context = Context(0, "a", 0, array("q", [0, *tokens]), 1, sampling=GREEDY, states=tuple(states))
        assert list(found.propose(context, 9).tokens) == chain
        chains.add(tuple(chain))
    assert len(chains) > 1


@pytest.mark.day("mtp")
@pytest.mark.parametrize("kind", list(PUBLISHED))
def test_published_files_without_an_embedding_have_the_models(kind: str, tmp_path: pathlib.Path) -> None:
    target, config = model(**DEEP, batch_invariant=True), PUBLISHED[kind]
    write_published(tmp_path, config, published(config))
    tensors, about = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    left = {name: x for name, x in tensors.items() if "embed" not in name and "shared_head.head" not in name}
    save_file(left, tmp_path / "model.safetensors")
    found = load(tmp_path, *target, branches=2)
    plain, guessing = Engine(*target), Engine(*target, drafter=found)
    assert guessing.generate([[5, 6, 7]], GREEDY) == plain.generate([[5, 6, 7]], GREEDY)
    assert guessing.stats.speculation.drafted > 3
    with pytest.raises(ValueError, match=r"embed_tokens.weight is missing"):
        load(tmp_path, target[0], None)
    with pytest.raises(ValueError, match=r"vocab_size is 31, and the model has 13"):
        load(tmp_path, *model(**DEEP | {"vocab_size": 13}))
    first = next(name for name in left if name.endswith("w_gate") or name.endswith("gate_proj.weight"))
    head = first.rsplit("gate_proj", 1)[0]
    save_file({**left, f"{head}experts.0.up_proj.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts.0.up_proj.weight is unknown: only attention of q, k, v and o"):
        load(tmp_path, *target)
    for changed, message in (
        (
            {"attention_bias": True, "norm_before_residual": True},
            r"(?s)attention_bias=True; it must be False.*residual",
        ),
        ({"rope_scaling": {"factor": 8.0}}, r"rope_scaling=\{'factor': 8.0\}; it must be None"),
        ({"hidden_size": "16"}, r"published speculator:\n  - hidden_size must be an integer, got '16'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(about | changed))
        with pytest.raises(ValueError, match=message):
            load(tmp_path, *target)


def test_heads_that_do_not_fit_are_refused() -> None:
    wrong: Any = HEADS | {"num_kv_heads": 3}
    with pytest.raises(ValueError, match=r"num_kv_heads=3 must divide num_heads=4"):
        EagleConfig(31, 16, 4, 16, (1, 2), **wrong)
