"""Covers mistakes with a step: its options, specs, parameters, batches and calls."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import shardfn
from shardfn import P, optim
from shardfn.testing import distributed
from tests.mistakes import (
    Mistake,
    after_a_step,
    batch_of,
    begun,
    cases,
    check,
    check_on_all_ranks,
    loss_of,
    made,
    mesh_of,
    params_of,
    run,
    using,
)

sf: Any = shardfn  # many of these are errors of types, too


def _named(params: dict, batch: dict) -> Tensor:
    return sum((batch["x"] * x).mean() for x in params.values())  # type: ignore[return-value]


def _of_a_model() -> dict:
    return {name: torch.ones(3) for name in ("lm_head.weight", "model.embed.weight", "model.norm.weight")}


def _two() -> dict:
    return {"w": torch.ones(3), "b": torch.zeros(())}


def _not_unpacked() -> Any:
    step, state = begun()
    state = step(state, batch_of())
    return step(state, batch_of())


def _on_meta() -> Any:
    step, _ = begun()
    return step(step.init({"w": torch.ones(3, device="meta")}), batch_of())


def _with_states_of_another(step: Any, state: Any) -> Any:
    other = made(lambda p, b: p["v"].sum()).init({"v": torch.ones(2)})
    return step(state._replace(opt_state=other.opt_state), batch_of())


class Encoding(Mapping[str, Tensor]):
    """The result of a Hugging Face tokenizer: a mapping that is not a dict."""

    def __getitem__(self, name: str) -> Tensor:
        return batch_of()[name]

    def __iter__(self) -> Any:
        return iter(batch_of())

    def __len__(self) -> int:
        return 1


class Shard:
    """A double of torch's placement of this name, whose import is slow."""

    def __repr__(self) -> str:
        return "Shard(dim=0)"


_WEIGHTX, _MEAN_WEIGHT = "lm_head.weightx", "Did you mean 'lm_head.weight'?"
_SINGLE = torch.float32
_NEEDS_STATE = "takes the TrainState that init or a step returned, got "
_ITERABLE = "evaluate takes an iterable of batches, and this is a "
_ONE_BATCH = "Of one batch write step.evaluate(state, [batch])"
OPTIONS = [
    Mistake("the rule is a dict", lambda: made(zero={"stage": 3}),
            TypeError, "zero={'stage': 3} is a dict", "zero=sf.Zero(stage=3)"),
    Mistake("the rule is a flag", lambda: made(zero=True), TypeError, "zero=True is a bool", "zero=3"),
    Mistake("the stage is four", lambda: made(zero=4), ValueError, "Zero(stage=4)", "0, 1, 2 and 3"),
    Mistake("the stage of a function is five", lambda: sf.sharded(loss_of, mesh=mesh_of(), zero=5),
            ValueError, "Zero(stage=5)", "the stages are 0, 1, 2 and 3"),
    Mistake("the stage has its own name", lambda: made(stage=3),
            TypeError, "sharded_step(stage=3): there is no argument 'stage'", "Write zero=3."),
    Mistake("the rule is along another axis", lambda: made(zero=sf.Zero(3, axis="data")),
            ValueError, "Zero(axis='data'): axis 'data' is not in the mesh", "which has ('dp',)"),
    Mistake("the step takes no policy", lambda: made(policy=1),
            TypeError, "sharded_step(policy=1): there is no argument 'policy'", "sf.mixed_precision(loss, policy)"),
    Mistake("the option is misspelt", lambda: made(donat=True),
            TypeError, "sharded_step(donat=True): there is no argument 'donat'", "Did you mean 'donate'?"),
    Mistake("the flag is a text", lambda: made(donate="no"),
            TypeError, "sharded_step(donate='no') ... this is a str", "True or False"),
    Mistake("the mesh is a dict", lambda: made(mesh={"dp": 1}),
            TypeError, "mesh={'dp': 1} is a dict, not a mesh", "mesh=sf.make_mesh({'dp': 1})"),
    Mistake("the mesh has no name", lambda: sf.sharded_step(loss_of, optim.sgd(0.1), mesh_of()),
            TypeError, "loss and optimizer by position and got 3", "Pass the others by name: mesh=, specs="),
    # Specs.
    Mistake("the axis of the specs is misspelt", lambda: made(specs=P("dpp")),
            ValueError, "specs = P('dpp'): axis 'dpp' is not in the mesh, which has ('dp',)", "Did you mean 'dp'?"),
    Mistake("the axis of a leaf's spec is unknown", lambda: made(specs={"w": P("data")}),
            ValueError, "specs['w'] = P('data'): axis 'data' is not in the mesh", "which has ('dp',)"),
    Mistake("the axis of the batch's spec is misspelt", lambda: made(batch=P("pd")),
            ValueError, "batch = P('pd'): axis 'pd' is not in the mesh, which has ('dp',)", "Did you mean 'dp'?"),
    Mistake("the spec is a tuple", lambda: made(specs={"w": ("dp", None)}),
            ValueError, "specs['w'] is ('dp', None), not a P", "Did you mean P('dp', None)?"),
    Mistake("the spec is a list", lambda: made(specs={"w": [None, "dp"]}),
            ValueError, "specs['w'] is [None, 'dp'], not a P", "Did you mean P(None, 'dp')?"),
    Mistake("the spec is a text", lambda: made(batch="dp"),
            ValueError, "batch is 'dp', not a P", "Did you mean P('dp')?"),
    Mistake("the spec is None", lambda: made(specs={"w": None}).init(params_of()),
            ValueError, "specs['w'] is None, but params['w'] has leaves", "Instead of `None`, did you mean `P()`"),
    Mistake("the spec is a placement of torch", lambda: made(specs={"w": [Shard()]}),
            ValueError, "specs['w'][0] is Shard(dim=0), not a P", "Shard(0) on the axis 'dp' is P('dp')"),
    Mistake("the spec is too long", lambda: made(specs=P(None, None, "dp")).init(params_of()),
            ValueError, "params['w'] of shape (3, 2) has spec P(None, None, 'dp')", "drop entries"),
    Mistake("the spec is too long for an axis that the mesh lacks",
            lambda: made(specs={"w": P(), "b": P("tp")}).init(_two()),
            ValueError, "params['b'] of shape () has spec P('tp')", "drop entries"),
    Mistake("the spec has another name", lambda: made(specs={"w": P(), "bb": P()}).init(_two()),
            ValueError, "specs['bb'] has no leaf in params. Did you mean 'b'?", "params['b'] has no entry in specs.\n"),
    Mistake("the batch's spec has another name", lambda: made(batch={"y": P("dp")})(begun()[1], batch_of()),
            ValueError, "batch spec['y'] has no leaf in batch", "batch['x'] has no entry in batch spec"),
    # Options by name of leaf.
    Mistake("the leaf to train is misspelt", lambda: run(_named, _of_a_model(), trainable={_WEIGHTX: True}),
            ValueError, f"trainable['{_WEIGHTX}'] has no leaf in params", _MEAN_WEIGHT),
    Mistake("the leaf to train is a text", lambda: run(_named, _of_a_model(), trainable="lm_head"),
            ValueError, "trainable is 'lm_head', a str", "{name: 'norm' in name for name in params}"),
    Mistake("the leaves to train are a list", lambda: made(trainable=["w"]),
            TypeError, "trainable=['w'] is a list of names", "{name: name in ['w'] for name in params}"),
    Mistake("no leaf is trained",
            lambda: run(_named, _of_a_model(), trainable=dict.fromkeys(_of_a_model(), False)),
            ValueError, "nothing to train. There are params['lm_head.weight'], params['model", "trainable=False"),
    Mistake("the mask is misspelt",
            lambda: run(_named, _of_a_model(), optimizer=optim.adamw(0.1, mask={"model.nrom.weight": True})),
            ValueError, "mask['model.nrom.weight'] has no leaf in params", "Did you mean 'model.norm.weight'?"),
    Mistake("the exception is misspelt",
            lambda: run(sf.mixed_precision(_named, sf.Policy.bf16(exceptions={_WEIGHTX: _SINGLE})), _of_a_model()),
            ValueError, f"match no leaf of params['lm_head.weight'], ... '{_WEIGHTX}'", _MEAN_WEIGHT),
]  # fmt: skip
CALLS = [
    # Parameters.
    Mistake("the function of parameters lacks its key", lambda: made().init(lambda key: params_of()),
            TypeError, "missing a required argument: 'key'", "step.init(<lambda>, sf.key(0))"),
    Mistake("the parameters come with a key", lambda: made().init(params_of(), sf.key(0)),
            TypeError, "got a tree of parameters and 1 argument more", "step.init(f, sf.key(0))"),
    Mistake("a number is among the parameters", lambda: made().init({"w": torch.ones(3), "b": 0.5}),
            TypeError, "params['b'] is a float", "Write torch.tensor(0.5)"),
    Mistake("the parameters are integers", lambda: made().init({"w": torch.ones(3, dtype=torch.int64)}),
            ValueError, "there is nothing to train: params['w'] is torch.int64", "x.float()"),
    Mistake("there are no parameters", lambda: made().init({}),
            ValueError, "the parameters have no leaves", "params, apply = sf.from_module(module)"),
    Mistake("the parameters are on two devices",
            lambda: made().init({"w": torch.ones(3), "b": torch.ones(1, device="meta")}),
            ValueError, "some parameters are on 'meta' ... params['b']", "module.to_empty(device='cpu')"),
    Mistake("the parameters have no values", _on_meta,
            ValueError, "is abstract: it has shapes but no values", "pass values to init ... a function that draws"),
    Mistake("the parameters are in half precision", lambda: run(params={"w": torch.ones(3, 2, dtype=torch.float16)}),
            UserWarning, "params['w']: trained in torch.float16 without a policy", "sf.mixed_precision(loss, sf."),
    # A batch.
    Mistake("the batch is of arrays", lambda: run(batch={"x": numpy.ones((4, 3))}),
            TypeError, "batch['x'] is a ndarray", "torch.from_numpy(batch['x'])"),
    Mistake("the batch is of lists", lambda: run(batch={"x": [[1.0, 2.0]]}),
            TypeError, "batch['x'] is a list of numbers (batch['x'][0][0] is a float)", "torch.tensor(batch['x'])"),
    Mistake("the batch is a loader", lambda: run(batch=torch.utils.data.DataLoader([torch.ones(3)])),  # type: ignore
            TypeError, "batch is a DataLoader", "for batch in ...: step(state, batch)"),
    Mistake("the batch is a mapping of a tokenizer", lambda: run(batch=Encoding()),
            TypeError, "batch is an Encoding", "dict(batch)"),
    Mistake("a text is in the batch", lambda: run(batch={**batch_of(), "name": "a"}),
            TypeError, "batch['name'] is a str", "Leave it out"),
    Mistake("a flag is in the batch", lambda: run(batch=(torch.ones(4, 3), True)),
            TypeError, "batch[1] is a bool", "Write torch.tensor(True)"),
    Mistake("a number is in the batch for all rows", lambda: run(batch=batch_of() | {"n": torch.tensor(3)}),
            ValueError, "batch['n'] of shape () has spec P('dp')", "write sf.P() in sharded_step(batch={...})"),
    Mistake("the batch is an empty dict", lambda: run(batch={}),
            TypeError, "it is empty: no leaf", "the batch must be a tree of tensors"),
    Mistake("the batch has no rows", lambda: run(batch={"x": torch.ones(0, 3)}),
            ValueError, "the batch is empty on every rank ... batch['x'] of shape (0, 3)", "drop_last=True"),
    Mistake("the batch has no values", lambda: run(batch={"x": torch.ones(4, 3, device="meta")}),
            ValueError, "the device 'meta' ... batch['x'] of shape (4, 3)", "step.lower takes it ... Make it on cpu"),
    # A call of the step.
    Mistake("state and batch are swapped", using(lambda step, state: step(batch_of(), state)),
            TypeError, f"step(state, batch) {_NEEDS_STATE}dict", "The arguments are swapped: write step(state, batch)"),
    Mistake("the pair is not unpacked", _not_unpacked,
            TypeError, f"step(state, batch) {_NEEDS_STATE}tuple", "unpack it: state, metrics = step(state, batch)"),
    Mistake("the state is the parameters", using(lambda step, state: step(params_of(), batch_of())),
            TypeError, f"step(state, batch) {_NEEDS_STATE}dict", "state = step.init(params)"),
    Mistake("the state is used twice", after_a_step(lambda step, state: step(state, batch_of())),
            sf.DonatedError, "already consumed by a step (state.params['w'], state.opt_state", "with donate=False"),
    Mistake("a tensor is put into the state",
            using(lambda step, state: step(state._replace(params=params_of()), batch_of())),
            TypeError, "params are not GlobalTensors ... params['w'] is a Tensor", "make the state with step.init"),
    Mistake("the optimizer's states are of other leaves", using(_with_states_of_another),
            ValueError, "params['w'] has no leaf in state.mu. ... state.mu['v'] has no leaf in params", "Did you mean"),
    Mistake("each step is given a key", using(lambda step, state: step(state, batch_of(), sf.key(1))),
            TypeError, "step(state, batch) got 1 argument more: a Tensor", "sharded_step(..., key=sf.key(0))"),
    Mistake("each step is given a key by name", using(lambda step, state: step(state, batch_of(), key=sf.key(1))),
            TypeError, "step(state, batch) got 1 argument more: key=", "functools.partial(loss, config)"),
    # Its other functions.
    Mistake("one batch is evaluated", using(lambda step, state: step.evaluate(state, batch_of())),
            TypeError, f"{_ITERABLE}dict", _ONE_BATCH),
    Mistake("one tensor is evaluated", using(lambda step, state: step.evaluate(state, torch.ones(3))),
            TypeError, f"{_ITERABLE}Tensor", _ONE_BATCH),
    Mistake("evaluate has its arguments swapped", using(lambda step, state: step.evaluate([batch_of()], state)),
            TypeError, f"step.evaluate(state, batches) {_NEEDS_STATE}list", "write step.evaluate(state, batches)"),
    Mistake("the iterator has nothing left", using(lambda step, state: step.evaluate(state, iter([]))),
            ValueError, "evaluate: no rank has a row", "make it again, or pass a list"),
    Mistake("the metrics are a dict",
            using(lambda step, state: step.evaluate(state, [batch_of()], {"loss": loss_of})),
            TypeError, "takes a function metrics(params, batch) ... and this is a dict", "write one that calls them"),
    Mistake("a consumed state is evaluated", after_a_step(lambda step, state: step.evaluate(state, [batch_of()])),
            sf.DonatedError, "leaf of shape (3, 2) was donated", "build the step with donate=False"),
    Mistake("the function to apply is left out", using(lambda step, state: step.apply(state, batch_of())),
            TypeError, f"step.apply(f, state, *args) {_NEEDS_STATE}dict", "write step.apply(f, state, *args)"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases([*OPTIONS, *CALLS]))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@pytest.mark.nightly
@distributed(world=2, timeout=120)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks([*OPTIONS, *CALLS])


@distributed(world=2, timeout=60)
def test_a_mistake_of_one_rank_is_the_error_of_all() -> None:
    step, state = begun()
    rank = torch.distributed.get_rank()
    batches: list[Any] = [batch_of(), {"x": numpy.ones((4, 3))}]
    with sys.modules["shape_checks"].unchecked():
        with pytest.raises((TypeError, sf.RankError)) as caught:
            step(state, batches[rank])
    assert isinstance(caught.value, TypeError) == (rank == 1)
    assert "batch['x'] is a ndarray. Write torch.from_numpy(batch['x'])" in str(caught.value)
    step(state, batch_of())  # no message was sent, so the state is unchanged


@distributed(world=2, timeout=60)
def test_a_rank_without_rows() -> None:
    mine = {"x": torch.ones(4 if torch.distributed.get_rank() else 0, 3)}
    step, state = begun()
    with pytest.raises((ValueError, sf.RankError), match=r"different sizes.*WeightedMean\(total, weight\)"):
        step(state, mine)
    step, state = begun(lambda p, b: sf.WeightedMean((b["x"] @ p["w"]).sum(), len(b["x"])))
    assert step(state, mine)[1]["loss"] == 6


def test_calls_that_look_like_mistakes_are_taken() -> None:
    step, state = begun(zero=3)
    assert step._planner.zero == sf.Zero(stage=3)
    assert step.evaluate(state, iter([batch_of()])).keys() == {"loss"}
    made(specs=[P(), P()]).init([torch.ones(2), torch.ones(2)])
    run(trainable=False)
