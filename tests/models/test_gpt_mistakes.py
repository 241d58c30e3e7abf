"""Covers mistakes with the batch of a GPT."""

from typing import Any

import pytest
import torch

from shardfn.core import key
from shardfn.models import gpt
from shardfn.models.moe import Experts
from tests.mistakes import Mistake, cases, check

_GPT = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
_ROUTES = torch.zeros(2, 8, 1, dtype=torch.int64)
_BATCH = "a batch of gpt is {'tokens': int64 [B, T + 1]}"


def _loss(batch: Any) -> Any:
    return gpt.loss(_GPT, {}, batch)


def _at() -> Any:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    return gpt.apply(_GPT, gpt.init(_GPT, key(0)), tokens, sequence=True, at=torch.zeros(2, 1, dtype=torch.int64))


def _latent(**changes: Any) -> gpt.Config:
    sizes: dict[str, Any] = {"vocab_size": 64, "num_layers": 2, "d_model": 32, "num_heads": 4}
    return gpt.Config.llama_like(**{**sizes, "latent": gpt.Latent(8, 4, 4, 4), **changes})


MISTAKES = [
    Mistake("the batch is the tokens", lambda: _loss(torch.ones(2, 9, dtype=torch.int64)),
            TypeError, "this is a Tensor", _BATCH),
    Mistake("the tokens are those of one sequence", lambda: _loss({"tokens": torch.ones(9, dtype=torch.int64)}),
            TypeError, "a dict whose tokens are torch.int64 of shape (9,)", _BATCH),
    Mistake("the tokens have another name", lambda: _loss({"input_ids": torch.ones(2, 9, dtype=torch.int64)}),
            TypeError, "this is a dict with ['input_ids']", _BATCH),
    Mistake("positions and experts in a batch of the mean cross entropy",
            lambda: _loss({"tokens": torch.ones(2, 9, dtype=torch.int64), "at": _ROUTES[..., 0], "routes": _ROUTES}),
            ValueError, "loss: the batch has 'at' and 'routes', and the mean cross entropy is of all tokens",
            "Take a loss of apply(..., at=, chosen=), or leave them out"),
    Mistake("logits at positions, of tokens that ranks share out", _at,
            ValueError, "apply(at=) takes positions of whole rows, but with",
            "sequence=True a rank has only some tokens of each row. Drop one of the two"),
    Mistake("latent attention with heads of keys", lambda: _latent(num_kv_heads=2),
            ValueError, "latent does not know num_kv_heads=2", "Leave one of them out"),
    Mistake("latent attention with learned positions", lambda: _latent(position="learned"),
            ValueError, "latent does not know position='learned'", "Leave one of them out"),
    Mistake("latent attention with biases", lambda: _latent(bias=True),
            ValueError, "latent does not know bias=True", "Leave one of them out"),
    Mistake("an odd number of rotated dims", lambda: gpt.Latent(8, 4, 3, 4),
            ValueError, "rope_dim=3 must be even", "as pairs are rotated"),
    Mistake("a gate of experts without gates", lambda: gpt.Config(
                vocab_size=64, num_layers=1, d_model=32, num_heads=4, experts=Experts(num=2, biases=True)),
            ValueError, "experts with gate= or biases=True need mlp='swiglu'", "got mlp='gelu'"),
    Mistake("a width of a shared expert that is not there", lambda: Experts(num=4, shared_d_ff=8),
            ValueError, "shared_d_ff=8 needs shared=True or residual=True", "residual=True"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)
