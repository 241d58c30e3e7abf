"""Covers unmodified Hugging Face models: sharded they equal the plain torch loop; and the example that trains them."""

import difflib
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import assert_parity, distributed

transformers = pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/huggingface.py"
VOCAB, STEPS = 61, 3
# The gradients of GPT-2's key biases are rounding; eps keeps Adam from scaling these to a full step.
LR, EPS = 1e-2, 1e-3


def _llama() -> torch.nn.Module:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB, use_cache=False, **sizes, **heads)
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> torch.nn.Module:
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    rest = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **sizes, **off, **rest))


MODELS = {"llama": _llama, "gpt2": _gpt2}


def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def _batches() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [{"tokens": torch.randint(VOCAB, (4, 9), generator=g)} for _ in range(STEPS)]


def _plain_loop(model: torch.nn.Module) -> dict[str, Tensor]:
    """Torch alone: the module, its own gradients, torch's AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), LR, eps=EPS)
    for batch in _batches():
        optimizer.zero_grad()
        model(input_ids=batch["tokens"], labels=batch["tokens"]).loss.backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.nightly)])
@distributed(world=2)
def test_unmodified_models_equal_one_device(world: int, name: str) -> None:
    model, mesh = _model(name), sf.make_mesh({"dp": world})
    assert bool(list(model.buffers())) == (name == "llama")  # rotary frequencies, which the step closes over
    params, apply = sf.from_module(model)

    def loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return apply(params, input_ids=batch["tokens"], labels=batch["tokens"]).loss

    def checkpointed(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return sf.remat(apply)(params, input_ids=batch["tokens"], labels=batch["tokens"]).loss

    want = _plain_loop(_model(name))
    for stage, f, microbatches in [
        (0, loss, 2),
        (0, checkpointed, 1),
        (3, loss, 1),
        (3, loss, 2),
        (3, checkpointed, 2),
    ]:
        run = assert_parity(
            sf.accumulate(f, microbatches),
            sf.optim.adamw(LR, eps=EPS),
            params,
            _batches(),
            mesh=mesh,
            reference=loss,
            zero=sf.Zero(stage=stage, persist_elements=0, travel=sf.Travel(bucket_bytes=1000)),
        )
        torch.testing.assert_close(run.params, want, rtol=1e-9, atol=1e-12)


def _dropping() -> Any:
    """GPT-2 as its configuration has it: dropout 0.1 in four places."""
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32, "loss_type": "ForCausalLM"}
    off = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **sizes, **off)).double()


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["eager", "jit"])
@distributed(world=2)
def test_dropout_by_key_and_checkpoints_inside_the_model(world: int, how: str) -> None:
    def loss_of(model: Any) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
        params, apply = sf.from_module(model)

        def loss(params: dict[str, Tensor], batch: dict[str, Tensor], key: Tensor) -> Tensor:
            tokens = batch["tokens"]
            return apply.keyed(key, batch["index"])(params, input_ids=tokens, labels=tokens).loss

        return params, loss

    model = _dropping()
    model.activation_checkpointing_enable()
    params, loss = loss_of(model)
    assert_parity(
        sf.jit(loss, backend="graph") if how == "jit" else loss,
        sf.optim.sgd(LR),
        params,
        [batch | {"index": torch.arange(4) + 4 * n} for n, batch in enumerate(_batches()[:2])],
        mesh=sf.make_mesh({"dp": world}),
        reference=loss_of(_dropping())[1],
        zero=sf.Zero(stage=3, persist_elements=0),
        key=sf.key(0),
    )


def test_dropout_without_a_key_is_refused_by_name() -> None:
    params, apply = sf.from_module(_dropping())
    tokens = _batches()[0]["tokens"]
    with pytest.raises(ValueError, match=r"dropout\(p=0.1\) in the forward of the module \(transformer\.drop"):
        apply(params, input_ids=tokens, labels=tokens)


@pytest.mark.nightly
@distributed(world=2)
def test_tied_weights_stay_tied() -> None:
    model = _model("gpt2")
    params, apply = sf.from_module(model)
    assert "transformer.wte.weight" in params
    assert "lm_head.weight" not in params
    step = sf.sharded_step(
        lambda p, b: apply(p, input_ids=b["tokens"], labels=b["tokens"]).loss,
        sf.optim.adamw(LR, eps=EPS),
        mesh=sf.make_mesh({"dp": -1}),
        zero=sf.Zero(stage=3, persist_elements=0),
    )
    state = step.init(params)
    for batch in _batches():
        state, _ = step(state, {"tokens": batch["tokens"].chunk(2)[torch.distributed.get_rank()]})
    tokens = _batches()[0]["tokens"]
    sharded = step.apply(lambda p: apply(p, input_ids=tokens).logits, state)
    missing, unexpected = model.load_state_dict(sf.unshard(state.params), strict=False)
    assert not unexpected
    assert set(missing) == {"lm_head.weight"}  # it is the embedding, which is in the file
    named = dict(model.named_parameters(remove_duplicate=False))
    assert named["lm_head.weight"] is named["transformer.wte.weight"]
    with torch.no_grad():
        torch.testing.assert_close(sharded, model(input_ids=tokens).logits, rtol=1e-9, atol=1e-12)


def _lines(name: str) -> list[str]:
    text = EXAMPLE.read_text()
    body = re.search(rf"^def {name}\(.*?(?=^def )", text, re.M | re.S)
    assert body is not None
    return [line.split("#")[0].strip() for line in body.group().splitlines()[1:] if line.strip()]


def test_the_example_changes_fewer_than_ten_lines() -> None:
    diff = difflib.ndiff(_lines("plain"), _lines("sharded"))
    added = [line for line in diff if line.startswith("+ ")]
    assert 0 < len(added) < 10
    assert len(added) == EXAMPLE.read_text().count("  # shardfn\n")


def _losses(*arguments: str) -> list[float]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments, "--steps", "5"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(x) for x in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.M)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_the_example_prints_the_plain_loop_s_losses(name: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    want = _losses(str(EXAMPLE), "--model", name, "--plain")
    got = _losses(*torchrun, str(EXAMPLE), "--model", name)
    assert len(want) == 5
    assert want[-1] < want[0] - 0.5
    assert got == pytest.approx(want, rel=1e-4)
