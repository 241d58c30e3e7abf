"""Covers shardfn/metrics/_values.py: metrics as numbers."""

import pytest
import torch

import shardfn as sf
from shardfn.metrics import to_floats


def test_all_metrics_of_a_step_are_floats_in_their_order() -> None:
    step = sf.sharded_step(lambda w, x: (w * x).square().mean(), sf.optim.sgd(0.5))
    _, metrics = step(step.init(torch.tensor(1.0)), torch.tensor([1.0, 3.0]))
    got = to_floats(metrics)
    assert list(got) == list(metrics)
    assert got == {name: float(x) for name, x in metrics.items()} and {type(x) for x in got.values()} == {float}


def test_no_value_is_rounded() -> None:
    values = {"tokens": torch.tensor(2**24 + 1), "small": torch.tensor(1e-40), "half": torch.tensor(0.1).bfloat16()}
    assert to_floats(values) == {name: x.item() for name, x in values.items()}
    assert to_floats({}) == {}


def test_they_come_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: calls.append(x.numel()) or plain(x))
    monkeypatch.setattr(torch.Tensor, "item", lambda x: pytest.fail("a metric came alone"))
    to_floats({str(i): torch.tensor(float(i)) for i in range(5)})
    assert calls == [5]


def test_every_other_value_is_named() -> None:
    with pytest.raises(TypeError, match=r"'a'\] is a tensor of shape \(2,\)") as error:
        to_floats({"a": torch.ones(2), "b": "text", "c": 1})
    assert "'b'] is a str" in str(error.value) and "'c'" not in str(error.value)
