"""Covers mistakes with modules: in place of functions and parameters, and calls of the function that comes of one."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import shardfn
from shardfn.testing import distributed
from tests.mistakes import Mistake, batch_of, begun, cases, check, check_on_all_ranks, made, run

sf: Any = shardfn  # many of these are errors of types, too


def _linear() -> tuple[nn.Module, dict, Any]:
    module = nn.Linear(3, 2)
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)  # the same on all ranks
    return module, *sf.from_module(module)


def _of_module(call: Callable[..., Any]) -> Any:
    module, params, apply = _linear()
    return run(lambda p, b: call(module, apply, p, b["x"]).mean(), params=params)


def _state_of_module() -> tuple[Any, nn.Module]:
    module, params, apply = _linear()
    return made(lambda p, b: apply(p, b["x"]).mean()).init(params), module


def _dropout(p: Any, b: Any) -> Any:
    return sf.from_module(nn.Dropout())[1]({}, b["x"] @ p["w"]).mean()


_FIRST = "expected the parameters first, apply(params, ...), got a Tensor"
MISTAKES = [
    Mistake("the loss is a module", lambda: made(nn.MSELoss()),
            TypeError, "takes a function of parameters and a batch, and MSELoss is a module", "sf.from_module(module)"),
    Mistake("a class is taken for a module", lambda: sf.from_module(nn.Linear),
            TypeError, "expected an nn.Module, got the class Linear", "Call a class first: from_module(Net(...))"),
    Mistake("the parameters are a module", lambda: made().init(nn.Linear(3, 1)),
            TypeError, "takes a tree of tensors ... and Linear is a module", "params, apply = sf.from_module(module)"),
    Mistake("the parameters are an iterator over those of a module", lambda: made().init(nn.Linear(3, 1).parameters()),
            TypeError, "params is a generator", "params, apply = sf.from_module(module)"),
    Mistake("the parameters have their names in pairs",
            lambda: made().init(list(nn.Linear(1, 1).named_parameters())),
            TypeError, "params is a list of pairs of a name and a tensor", "write dict(params)"),
    Mistake("a module is among the parameters", lambda: made().init({"net": nn.Linear(1, 1)}),
            TypeError, "params['net'] is a Linear", "params, apply = sf.from_module(module)"),
    Mistake("the function of a module is among the parameters", lambda: made().init(_linear()[1:]),
            TypeError, "params[1] is a ModuleFunction", "params, apply = sf.from_module(module)"),
    Mistake("the parameters are left out", lambda: _of_module(lambda module, apply, p, x: apply(x)),
            TypeError, _FIRST, "Pass the first argument of the loss"),
    Mistake("the parameters come last", lambda: _of_module(lambda module, apply, p, x: apply(x, p)),
            TypeError, _FIRST, "Pass the first argument of the loss"),
    Mistake("the module itself is called", lambda: _of_module(lambda module, apply, p, x: module(x)),
            ValueError, "none of params['bias'], params['weight']", "apply(params, ...), not module(...)"),
    Mistake("dropout has no key", lambda: made(_dropout)(begun()[1], batch_of()),
            ValueError, "dropout(p=0.5) ... would draw from torch's generator", "apply.keyed(key, index_B)"),
    Mistake("the mode is set on the step", lambda: made().train(),
            AttributeError, "'ShardedStep' object has no attribute 'train'", "module.train(), before sf.from_module"),
    Mistake("the module is called with a state", lambda: _linear()[2](_state_of_module()[0].params, batch_of()["x"]),
            TypeError, "params['weight'] is a GlobalTensor", "step.apply(lambda params: apply(params, x), state)"),
    Mistake("module and state are swapped in to_module", lambda: sf.to_module(*_state_of_module()[::-1]),
            TypeError, "takes the TrainState ... got Linear", "write sf.to_module(state, module)"),
    Mistake("module and state are swapped in export", lambda: sf.export(*_state_of_module()[::-1], "/missing"),
            TypeError, "takes the TrainState ... got Linear", "write sf.export(state, module, directory)"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@pytest.mark.nightly
@distributed(world=2)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)
