"""Covers shardfn/engine/plan/_checks.py: a warning of parameters of 16 bits that are updated without wider copies."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim

HALF = {"w": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(1)}


def _loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ p["w"].float() + p["b"]).square().mean()


def _step(loss: Any = _loss, tx: Any = None, **options: Any) -> Any:
    return sf.sharded_step(loss, tx or optim.adamw(1e-5), **options)


def test_init_warns_and_names_the_remedies() -> None:
    for given in (HALF, {name: x.to("meta") for name, x in HALF.items()}):
        with pytest.warns(
            UserWarning, match=r"params\['w'\]: trained in torch.bfloat16.*Policy.bf16\(\).*dtype="
        ) as told:
            _step().init(given)
        assert len(told) == 1 and "params['b']" not in str(told[0].message)


def test_it_is_silent_where_precision_was_chosen() -> None:
    pure = sf.mixed_precision(_loss, sf.Policy(param=torch.bfloat16, master=None, exceptions={"b": torch.float32}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(sf.mixed_precision(_loss, sf.Policy.bf16())).init(HALF)
        _step(pure).init(HALF)
        _step(tx=optim.master_weights(optim.adamw(1e-5))).init({"w": HALF["w"]})
        _step(trainable={"w": False, "b": True}).init(HALF)
        _step().init({name: x.float() for name, x in HALF.items()})
