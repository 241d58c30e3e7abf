"""Covers shardfn/interop/_hf_seq2seq.py: T5, mT5 and BART of transformers in, and back out."""

import json
import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.core import tree_leaves, tree_map
from shardfn.interop import Archive, ArchiveWriter, seq2seq_config, seq2seq_from_hf, seq2seq_to_hf
from shardfn.models import seq2seq
from shardfn.models.moe import Experts

transformers = pytest.importorskip("transformers")

VOCAB = 61
_T5: dict[str, Any] = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9, "decoder_start_token_id": 0}
_BART: dict[str, Any] = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 24}
_BART |= {
    f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in (("ffn_dim", 24), ("attention_heads", 4))
}
MODELS: dict[str, Any] = {
    "t5": ("T5", _T5),
    "flan": ("T5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "tied": ("T5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("Bart", _BART | {"scale_embedding": True, "pad_token_id": 3}),
}


@pytest.fixture(autouse=True)
def wide_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sums squares in float32 for all dtypes of weights. Here in the dtype of the weights."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for kind in ("T5", "MT5"):
        module = getattr(transformers.models, kind.lower())
        monkeypatch.setattr(
            getattr(getattr(module, f"modeling_{kind.lower()}"), f"{kind}LayerNorm"), "forward", forward
        )


def make_theirs(name: str, directory: pathlib.Path) -> Any:
    """A random model of transformers in float64. Files of flan-T5 have a head of their own."""
    start, sizes = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{start}Config")(vocab_size=VOCAB, dropout=0.0, dropout_rate=0.0, **sizes)
    model = getattr(transformers, f"{start}ForConditionalGeneration")(config).double().eval()
    for x in (*model.parameters(), *(b for n, b in model.named_buffers() if n == "final_logits_bias")):
        x.data.normal_(0.0, 0.35)
    model.save_pretrained(directory)
    if name in ("flan", "mt5"):
        add_head(directory)
        model = type(model).from_pretrained(directory, dtype=torch.float64).eval()
    return model


def add_head(directory: pathlib.Path) -> None:
    """Adds a head of its own to the files of a T5, as published flan-T5s have."""
    archive = Archive(directory)
    tensors = {name: archive.box(name, [(0, n) for n in x.shape]).clone() for name, x in archive.items()}
    tensors["lm_head.weight"] = torch.randn(VOCAB, 16, dtype=torch.float64)
    with ArchiveWriter(directory, {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}) as out:
        for name, x in tensors.items():
            out.put(name, x)
    told = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    told.pop("scale_decoder_outputs", None)
    (directory / "config.json").write_text(json.dumps(told))


def draw_ids(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
    theirs = make_theirs(name, tmp_path)
    config, deferred = seq2seq_from_hf(tmp_path)
    assert (config.decoder.tie_embeddings, config.logits_scale is not None) == {
        "t5": (True, True),
        "tied": (True, False),
        "bart": (True, False),
    }.get(name, (False, False))
    params = tree_map(lambda x: x.full().requires_grad_(), deferred)
    source, targets = draw_ids(3, 21, 0), draw_ids(3, 14, 1)
    mask = torch.arange(21) < torch.tensor([21, 4, 13])[:, None]
    inputs = seq2seq.shift_right(config, targets)
    found = seq2seq.apply(config, params, source, inputs, source_mask=mask)
    want = theirs(input_ids=source, attention_mask=mask.long(), decoder_input_ids=inputs).logits
    torch.testing.assert_close(found, want, rtol=0, atol=1e-10)

    loss = seq2seq.loss(config, params, {"source": source, "source_mask": mask, "targets": targets}).mean()
    loss.backward()
    torch.nn.functional.cross_entropy(want.flatten(0, 1), targets.flatten()).backward()
    gradients, back = tree_map(lambda x: x.grad, params), tmp_path / "gradients"
    seq2seq_to_hf(back, config, gradients, model_type=theirs.config.model_type)
    archive, own = Archive(back), dict(theirs.named_parameters())
    assert set(archive) - {"final_logits_bias"} == set(own)
    for key, x in own.items():
        box = archive.box(key, [(0, n) for n in x.shape])
        torch.testing.assert_close(box, x.grad, rtol=1e-10, atol=1e-10, msg=key)


def make_whisper(directory: pathlib.Path, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A random Whisper of 15 states of its encoder."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"d_model": 16, "num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 3}
    sizes |= {"vocab_size": VOCAB}
    sizes |= {f"{half}_{n}": x for half in ("encoder", "decoder") for n, x in (("ffn_dim", 24), ("attention_heads", 4))}
    ends = {"decoder_start_token_id": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    rules = {"suppress_tokens": None, "begin_suppress_tokens": None, "init_std": 0.3}
    config = transformers.WhisperConfig(
        max_source_positions=15, max_target_positions=24, dropout=0.0, **{**sizes, **ends, **rules, **more}
    )
    model = transformers.WhisperForConditionalGeneration(config).to(dtype).eval()
    model.save_pretrained(directory)
    return model


def test_a_whisper_has_the_logits_and_gradients_of_transformers(tmp_path: pathlib.Path) -> None:
    theirs = make_whisper(tmp_path)
    config, deferred = seq2seq_from_hf(tmp_path)
    params = tree_map(lambda x: x.full().requires_grad_(), deferred)
    source = torch.randn(2, 30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = draw_ids(2, 9, 1)
    inputs = seq2seq.shift_right(config, targets)
    want = theirs(input_features=source.mT, decoder_input_ids=inputs).logits
    torch.testing.assert_close(seq2seq.apply(config, params, source, inputs), want, rtol=0, atol=1e-10)
    seq2seq.loss(config, params, {"source": source, "targets": targets}).mean().backward()
    torch.nn.functional.cross_entropy(want.flatten(0, 1), targets.flatten()).backward()
    own, encoder = theirs.model, params["encoder"]
    for leaf, x in (
        (encoder["conv1_w"], own.encoder.conv1.weight),
        (encoder["conv2_b"], own.encoder.conv2.bias),
        (encoder["blocks"][0]["wk"], own.encoder.layers[0].self_attn.k_proj.weight),
        (params["decoder"]["blocks"][2]["c_wv"], own.decoder.layers[2].encoder_attn.v_proj.weight),
        (params["embed"], own.decoder.embed_tokens.weight),
    ):
        torch.testing.assert_close(leaf.grad, x.grad, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"a source must be features, float \[B, F, 8\], got torch.int64"):
        seq2seq.apply(config, params, draw_ids(2, 9, 0), inputs)
    with pytest.raises(ValueError, match=r"a source of 16 tokens"):
        seq2seq.apply(config, params, torch.zeros(2, 32, 8, dtype=torch.float64), inputs)
    with pytest.raises(TypeError, match=r"'source': float \[B, F, 8\]"):
        seq2seq.loss(config, params, {"source": draw_ids(2, 9, 0), "targets": targets})
    with pytest.raises(ValueError, match=r"whisper is read, and not written"):
        seq2seq_to_hf(tmp_path / "out", config, params)
    with pytest.raises(ValueError, match=r"stages: sources must be token ids, got features=8"):
        seq2seq.stages(config)
    with pytest.raises(ValueError, match=r"features must be 1 or more, with position='learned'"):
        halves = {name: seq2seq.replace_half(half, position=None) for name, half in config.halves.items()}
        seq2seq.replace_halves(config, halves)


@pytest.mark.parametrize("name", MODELS)
def test_written_files_are_read_by_transformers_and_generate_the_same(name: str, tmp_path: pathlib.Path) -> None:
    theirs = make_theirs(name, tmp_path)
    config, deferred = seq2seq_from_hf(tmp_path)
    params, back = tree_map(lambda x: x.full(), deferred), tmp_path / "back"
    seq2seq_to_hf(back, config, params, model_type=theirs.config.model_type)
    again = type(theirs).from_pretrained(back, dtype=torch.float64).eval()
    source = draw_ids(3, 9, 2)
    mask = torch.arange(9) < torch.tensor([9, 4, 7])[:, None]
    how = {"num_beams": 1, "do_sample": False, "max_new_tokens": 12, "min_new_tokens": 0, "forced_eos_token_id": None}
    # Its cache takes the number of layers of the encoder for those of the decoder.
    how |= {
        "use_cache": False,
        "forced_bos_token_id": None,
        "no_repeat_ngram_size": 0,
        "early_stopping": False,
        "eos_token_id": None,
    }
    want = again.generate(source, attention_mask=mask.long(), **how)[:, 1:]
    found = seq2seq.generate(config, params, source, 12, sf.key(0), 0.0, mask=mask)
    assert torch.equal(found, want)
    read, other = seq2seq_from_hf(back)
    assert read == config and all(
        torch.equal(a, b.full()) for a, b in zip(tree_leaves(params), tree_leaves(other), strict=True)
    )


def test_a_rank_reads_its_rows(tmp_path: pathlib.Path) -> None:
    make_theirs("bart", tmp_path)
    _, deferred = seq2seq_from_hf(tmp_path, per_head=True)
    _, flat = seq2seq_from_hf(tmp_path)
    wq, want = deferred["decoder"]["blocks"][1]["c_wq"], flat["decoder"]["blocks"][1]["c_wq"].full()
    assert torch.equal(wq.block((slice(1, 3),)), want.view(4, 4, 16)[1:3])
    position = flat["encoder"]["position"]
    assert torch.equal(position.block((slice(3, 5),)), position.full()[3:5]) and len(position) == 24


def test_other_models_and_damaged_files_are_refused(tmp_path: pathlib.Path) -> None:
    make_theirs("t5", tmp_path)
    with pytest.raises(ValueError, match=r"must be one of \('t5', 'mt5', 'bart', 'whisper'\), got 'gpt2'.*gpt_from_hf"):
        seq2seq_config({"model_type": "gpt2"})
    with pytest.raises(ValueError, match=r"feed_forward_proj must be one of .*got 'gated-swish'"):
        seq2seq_config({"model_type": "t5", "feed_forward_proj": "gated-swish"})
    with pytest.raises(ValueError, match=r"relative buckets must be an even number of 2 or more, got 7"):
        seq2seq_config({"model_type": "t5", "relative_attention_num_buckets": 7})
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | {"vocab_size": 60, "num_layers": 3}))
    with pytest.raises(
        ValueError, match=r"(?s)encoder.block.2.*is missing.*shared.weight is \(61, 16\).*but \(60, 16\)"
    ):
        seq2seq_from_hf(tmp_path)
    config = seq2seq.Config.t5_like(
        vocab_size=32, num_layers=1, d_model=16, encoder={"experts": Experts(2)}, mlp="gelu"
    )
    with pytest.raises(ValueError, match=r"encoder.experts is .*and the file's would be None"):
        seq2seq_to_hf(tmp_path / "out", config, {})
