"""Covers keywords and fields that were renamed: the old name goes on, with a warning that has the new one."""

import pytest
import torch

import shardfn as sf
from shardfn import optim


def test_old_keywords_go_on() -> None:
    with pytest.warns(DeprecationWarning, match=r"jit\(schedule=\) is now graph_schedule="):
        old = sf.jit(torch.sin, backend="graph", schedule=sf.graph.Schedule(prefetch=0))  # pyright: ignore
    assert old.schedule == sf.graph.Schedule(prefetch=0)
    with pytest.warns(DeprecationWarning, match=r"stateless\(grain=\) is now granularity="):
        rule = optim.stateless(lambda updates, params, specs: updates, grain="leaf")  # pyright: ignore
    assert rule.needs.granularity == "leaf"
    with pytest.warns(DeprecationWarning, match=r"master_weights\(kept=\) is now param_dtypes="):
        optim.master_weights(optim.sgd(0.1), kept=torch.bfloat16)  # pyright: ignore


def test_old_fields_go_on() -> None:
    with pytest.warns(DeprecationWarning, match=r"Needs\(grain=\) is now granularity="):
        needs = optim.Needs(grain="element")  # pyright: ignore
    with pytest.warns(DeprecationWarning, match=r"Needs.grain is now .granularity"):
        assert needs.grain == "element"  # pyright: ignore
    with pytest.warns(DeprecationWarning, match=r"Phases\(over=\) is now axes="):
        phases = optim.Phases(over=("dp",), next=lambda state: optim.Phase("all", True))  # pyright: ignore
    with pytest.warns(DeprecationWarning, match=r"Phases.last is now .is_last"):
        assert phases.axes == ("dp",) and not phases.last  # pyright: ignore


def test_both_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Needs got grain= and granularity="):
        optim.Needs(grain="leaf", granularity="leaf")  # pyright: ignore
