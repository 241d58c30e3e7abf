"""Covers `capture_ambient`: code that runs in a backward has the ambient values of its forward, on any thread."""

import functools
import threading
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardfn.core import Ambient, capture_ambient, rebind_ambient, rebind_in_checkpoints

_MOOD = Ambient[str]("mood in a test of recomputation", by_thread=True)


@rebind_ambient
def _same_mood() -> list[Any]:
    return [functools.partial(_MOOD.bound, mood) for mood in _MOOD.all[-1:]]


def test_values_are_bound_again_on_another_thread_and_let_go() -> None:
    seen: list[Any] = []
    with _MOOD.bound("calm"):
        again = capture_ambient()

    def later() -> None:
        with again(), again():
            seen.append(_MOOD.innermost())
        seen.append(_MOOD.innermost())

    thread = threading.Thread(target=later)
    thread.start()
    thread.join()
    assert seen == ["calm", None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_has_the_values_of_its_forward_and_torch_is_left_unchanged(reentrant: bool) -> None:
    before = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator
    seen: list[Any] = []

    def f(x: Tensor) -> Tensor:
        seen.append(_MOOD.innermost())
        return torch.sin(x) ** 2

    x = torch.ones(3, requires_grad=True)
    with _MOOD.bound("calm"), rebind_in_checkpoints():
        with _MOOD.bound("lively"), rebind_in_checkpoints():
            y: Any = checkpoint(f, x, use_reentrant=reentrant)
        assert torch_checkpoint.CheckpointFunction is not before[0]
    assert before == (torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator)
    y.sum().backward()
    assert seen == ["lively", "lively"] and _MOOD.innermost() is None
    torch.testing.assert_close(x.grad, torch.sin(2 * torch.ones(3)))
