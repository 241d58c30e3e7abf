"""Covers mistakes with optimizers and schedules: those of torch, parts of one, other names of arguments."""

from typing import Any

import pytest
import torch
from torch import nn

import shardfn
from shardfn.testing import distributed
from tests.mistakes import Mistake, batch_of, begun, cases, check, check_on_all_ranks, made, using

sf: Any = shardfn  # many of these are errors of types, too
optim = sf.optim


def _of_torch(rate: float) -> torch.optim.Optimizer:
    made = object.__new__(torch.optim.AdamW)  # its own constructor imports much
    made.defaults = {"lr": rate}
    return made


def _run(optimizer: Any, state: Any = None) -> Any:
    step, first = begun(optimizer=optimizer)
    return step(state or first, batch_of())


_PAIR = "an optimizer is a pair of functions (init, update), but this is "
_NO_RATE = "the optimizer has no learning rate: its updates point along the gradient"
_RULES = ("adam", "adamw", "apmsqueeze", "lamb", "lion", "onebit_adam", "onebit_lamb", "sgd", "zero_one_adam")
MISTAKES = [
    # An optimizer.
    Mistake("the optimizer is one of torch", lambda: made(optimizer=_of_torch(0.01)),
            TypeError, _PAIR + "an object of type AdamW", "use shardfn's own, optim.adamw(0.01)"),
    Mistake("the optimizer is a class of torch", lambda: made(optimizer=torch.optim.SGD),
            TypeError, _PAIR + "the class torch.optim.SGD", "use shardfn's own, optim.sgd("),
    Mistake("the optimizer is a list of rules", lambda: made(optimizer=[optim.clip(1.0), optim.adamw(0.1)]),
            TypeError, _PAIR + "a list of 2", "optim.chain(*rules)"),
    Mistake("the rules of a chain are a list", lambda: optim.chain([optim.clip(1.0), optim.adamw(0.1)]),
            TypeError, _PAIR + "a list of 2", "optim.chain(first, second)"),
    Mistake("the optimizer is a function that makes one", lambda: made(optimizer=optim.adamw),
            TypeError, _PAIR + "the function adamw", "Call it: optim.adamw(...)"),
    Mistake("the optimizer is a text", lambda: made(optimizer="adamw"),
            TypeError, _PAIR + "'adamw'", "Write optim.adamw(1e-3)"),
    Mistake("the state is of another optimizer", using(lambda step, state: _run(optim.sgd(0.1), state)),
            ValueError, "sgd expected a tuple of 1 states, got a tuple of 3", "that init(params) returned"),
    Mistake("the optimizer is asked for a step", lambda: optim.adamw(0.1).step(),
            AttributeError, "'GradientTransformation' object has no attribute 'step'", "state, metrics = "),
    Mistake("the optimizer is asked to set gradients to zero", lambda: optim.adamw(0.1).zero_grad(),
            AttributeError, "'GradientTransformation' object has no attribute 'zero_grad'", "Leave it out"),
    # A learning rate.
    Mistake("the chain is empty", lambda: made(optimizer=optim.chain()), ValueError, _NO_RATE, "optim.adamw(1e-3)"),
    Mistake("the chain clips only", lambda: made(optimizer=optim.chain(optim.clip_by_global_norm(1.0))),
            ValueError, _NO_RATE, "optim.chain(optimizer, optim.scale_by_learning_rate(1e-3))"),
    Mistake("the chain has a direction only",
            lambda: made(optimizer=optim.chain(optim.clip(1.0), optim.scale_by_adam())),
            ValueError, _NO_RATE, "optim.chain(optimizer, optim.scale_by_learning_rate(1e-3))"),
    Mistake("the rate is the parameters", lambda: optim.adamw(nn.Linear(3, 1).parameters(), 1e-3),
            TypeError, "adamw: learning_rate is a generator", "step.init(params); write adamw(1e-3)"),
    Mistake("the rate is a scheduler of torch", lambda: optim.adamw(torch.optim.lr_scheduler.StepLR),
            TypeError, "adamw: learning_rate is torch's StepLR", "optim.warmup_cosine_decay_schedule"),
    Mistake("the rate is a text", lambda: optim.adamw("1e-3"),
            ValueError, "adamw: learning_rate='1e-3' must be a finite number >= 0", "without quotes"),
    Mistake("the decay rates have the name of torch", lambda: optim.adamw(0.1, betas=(0.9, 0.95)),
            TypeError, "adamw(betas=(0.9, 0.95)): there is no argument 'betas'", "b1= and b2="),
    *(Mistake(f"the rate of {name} has the name of torch", lambda name=name: getattr(optim, name)(lr=0.1),
              TypeError, f"{name}(lr=0.1): there is no argument 'lr'", "Write learning_rate=0.1.") for name in _RULES),
    # A schedule.
    Mistake("the peak has another name", lambda: optim.warmup_cosine_decay_schedule(0.0, peak_lr=0.1),
            TypeError, "warmup_cosine_decay_schedule(peak_lr=0.1): there is no argument", "Write peak_value=0.1."),
    Mistake("the first value is an optimizer", lambda: optim.cosine_decay_schedule(optim.sgd(0.1), 10),
            ValueError, "cosine_decay_schedule: init_value=a GradientTransformation", "must be a finite number"),
    Mistake("the number of steps is a float", lambda: optim.linear_schedule(0.0, 1.0, 1e3),
            ValueError, "linear_schedule: transition_steps=1000.0 must be an int >= 1", "Write 1000."),
    Mistake("the schedule returns a text", lambda: _run(optim.adamw(lambda count: "0.1")),
            TypeError, "the schedule '<lambda>' returned a str", "must return a number or a 0-d tensor"),
    Mistake("the schedule returns a list", lambda: _run(optim.sgd(lambda count: torch.ones(2))),
            TypeError, "the schedule '<lambda>' returned a tensor of shape (2,)",
            "must return a number or a 0-d tensor"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@pytest.mark.nightly
@distributed(world=2)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)
