"""Covers exceptions of a policy in a Hugging Face decoder: its norms compute in float32, eagerly and captured."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import shardfn as sf
from shardfn.testing import distributed

POLICY = sf.Policy.bf16(exceptions={"norm": torch.float32})
TOKENS = torch.arange(32).view(4, 8) % 13


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 16}
    heads: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def _steps(loss: Any, params: Any, tokens: Tensor, num: int = 2, **options: Any) -> tuple[Any, list[float]]:
    step = sf.sharded_step(sf.mixed_precision(loss, POLICY), sf.optim.adamw(1e-2), **options)
    state, losses = step.init(params), []
    for _ in range(num):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.nightly
@distributed(world=[1, 2], timeout=180)
def test_norms_in_float32(world: int) -> None:
    module = _llama()
    seen: dict[str, set[torch.dtype]] = {"norm": set(), "q_proj": set()}
    for name, sub in module.named_modules():
        if name.endswith(("norm", "q_proj")):
            kind = "norm" if name.endswith("norm") else "q_proj"
            sub.register_forward_pre_hook(lambda sub, args, kind=kind: seen[kind].add(sub.weight.dtype))
    params, apply = sf.from_module(module)

    def loss(params: dict, tokens: Tensor) -> Tensor:
        return apply(params, input_ids=tokens, labels=tokens).loss

    mesh = sf.make_mesh()
    mine = TOKENS.chunk(world)[mesh.rank]
    options = {"mesh": mesh, "zero": sf.Zero(3, persist_elements=0)}
    state, losses = _steps(loss, params, mine, **options)
    assert seen == {"norm": {torch.float32}, "q_proj": {torch.bfloat16}}
    kept = {name: x.dtype for name, x in state.params.items()}
    assert all(dtype == (torch.float32 if "norm" in name else torch.bfloat16) for name, dtype in kept.items())
    captured, again = _steps(sf.jit(loss, backend="graph"), params, mine, **options)
    assert losses == again and losses[1] < losses[0]
    for name, x in state.params.items():
        assert torch.equal(x.full_tensor(), captured.params[name].full_tensor()), name


@pytest.mark.nightly
def test_without_from_module_the_exceptions_are_named() -> None:
    module = _llama()
    params = {name: x.detach() for name, x in module.named_parameters()}

    def loss(params: dict, tokens: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (), {"input_ids": tokens, "labels": tokens}).loss

    for transformed in (loss, sf.jit(loss, backend="graph")):
        with pytest.raises(RuntimeError) as error:
            _steps(transformed, params, TOKENS)
        (note,) = [note for note in error.value.__notes__ if "exceptions of the Policy" in note]
        assert "sf.from_module" in note and "params['model.norm.weight'] is computed in torch.float32" in note
        assert "q_proj" not in note
