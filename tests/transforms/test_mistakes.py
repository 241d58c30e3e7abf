"""Covers mistakes of a first hour: each raises where it is made, on all ranks, with its cause and its remedy."""

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn import optim
from shardfn.testing import distributed

from .mistakes import Mistake, batch_of, begun, loss_of, made, params_of, problem_of, problems_on_one_mesh, run


def _noisy(params: dict, batch: dict, key: Tensor) -> Tensor:
    del key
    return loss_of(params, batch)


def _loss_of_named(params: dict, batch: dict) -> Tensor:
    return (sf.checkpoint_name(batch["x"] @ params["w"], "hidden") ** 2).mean()


def _of_torch(rate: float) -> torch.optim.Optimizer:
    made = object.__new__(torch.optim.AdamW)  # its own constructor imports much
    made.defaults = {"lr": rate}
    return made


def _named(params: dict, batch: dict) -> Tensor:
    return sum((batch["x"] * x).mean() for x in params.values())  # type: ignore[return-value]


def _of_a_model() -> dict:
    return {name: torch.ones(3) for name in ("lm_head.weight", "model.embed.weight", "model.norm.weight")}


def _swapped() -> Any:
    step, state = begun()
    return step(batch_of(), state)


def _not_unpacked() -> Any:
    step, state = begun()
    state = step(state, batch_of())
    return step(state, batch_of())


def _params_for_a_state() -> Any:
    return begun()[0](params_of(), batch_of())


def _used_twice() -> Any:
    step, state = begun()
    step(state, batch_of())
    return step(state, batch_of())


def _on_meta() -> Any:
    step, _ = begun()
    return step(step.init({"w": torch.ones(3, device="meta")}), batch_of())


def _mixed(loss: Any, policy: Any) -> Any:
    return sf.mixed_precision(loss, policy)


_RULES = ("adam", "adamw", "apmsqueeze", "lamb", "lion", "onebit_adam", "onebit_lamb", "sgd", "zero_one_adam")


def _with_lr(name: str) -> Callable[[], Any]:
    return lambda: getattr(optim, name)(lr=0.1)


_NETS = nn.Linear(3, 1)
_HALF, _SINGLE = torch.bfloat16, torch.float32
MISTAKES: dict[str, Mistake] = {
    # An optimizer.
    "an optimizer of torch": Mistake(
        lambda: made(optimizer=_of_torch(0.01)),
        TypeError, "of type AdamW", "optim.adamw(0.01)",
    ),
    "the class of one": Mistake(
        lambda: made(optimizer=torch.optim.SGD), TypeError, "the class torch.optim.SGD", "optim.sgd("
    ),
    "a list of rules": Mistake(
        lambda: made(optimizer=[optim.clip(1.0), optim.adamw(0.1)]), TypeError, "a list of 2", "optim.chain(*rules)"
    ),
    "a chain of a list": Mistake(
        lambda: optim.chain([optim.clip(1.0), optim.adamw(0.1)]),  # type: ignore[arg-type]
        TypeError, "a list of 2", "optim.chain(first, second)",
    ),
    "a rule that is not made": Mistake(
        lambda: made(optimizer=optim.adamw), TypeError, "the function adamw", "Call it: optim.adamw(...)"
    ),
    "the name of a rule": Mistake(lambda: made(optimizer="adamw"), TypeError, "'adamw'", "optim.adamw(1e-3)"),
    "loss and optimizer swapped": Mistake(
        lambda: made(optim.adamw(0.1), loss_of), TypeError, "the loss is an optimizer", "sf.sharded_step(loss, "
    ),
    "parameters for a learning rate": Mistake(
        lambda: optim.adamw(_NETS.parameters(), 1e-3),  # type: ignore[arg-type]
        TypeError, "learning_rate is a generator", "step.init(params)",
    ),
    "a scheduler of torch": Mistake(
        lambda: optim.adamw(torch.optim.lr_scheduler.StepLR),  # type: ignore[arg-type]
        TypeError, "torch's StepLR", "optim.warmup_cosine_decay_schedule",
    ),
    "betas": Mistake(
        lambda: optim.adamw(0.1, betas=(0.9, 0.95)),  # type: ignore[call-arg]
        TypeError, "adamw(betas=(0.9, 0.95))", "b1= and b2=",
    ),
    **{
        f"lr of {name}": Mistake(_with_lr(name), TypeError, f"{name}(lr=0.1)", "Write learning_rate=0.1.")
        for name in _RULES
    },
    # A loss.
    "a module for a loss": Mistake(lambda: made(nn.MSELoss()), TypeError, "MSELoss is a module", "sf.from_module"),
    "a loss that is called": Mistake(
        lambda: made(loss_of(params_of(), batch_of())), TypeError, "this is a tensor of shape ()", "Pass the function"
    ),
    "a key forgotten": Mistake(
        lambda: made(_noisy), TypeError, "_noisy(params, batch)", "sharded_step(..., key=sf.key(0))"
    ),
    "a key forgotten under transforms": Mistake(
        lambda: made(sf.jit(sf.accumulate(_noisy, 2))), TypeError, "_noisy(params, batch)", "key=sf.key(0)"
    ),
    "a key that the loss does not take": Mistake(
        lambda: made(key=sf.key(0)), TypeError, "loss_of(params, batch, key)", "drop key="
    ),
    "a loss of the batch alone": Mistake(
        lambda: made(lambda batch: batch["x"].mean()), TypeError, "(params, batch)", "functools.partial(loss"
    ),
    "a loss without a state": Mistake(
        lambda: made(has_state=True), TypeError, "loss_of(params, model_state, batch)", "drop has_state="
    ),
    "a loss a row": Mistake(
        lambda: run(lambda p, b: (b["x"] @ p["w"])[:, 0]), ValueError, "got shape (4,)", "take its mean or sum"
    ),
    "a loss that is a float": Mistake(
        lambda: run(lambda p, b: loss_of(p, b).item()), TypeError, "got float", "leave out item()"
    ),
    "a loss that returns nothing": Mistake(lambda: run(lambda p, b: None), TypeError, "got NoneType", "return"),
    "a loss in a dict": Mistake(
        lambda: run(lambda p, b: {"loss": loss_of(p, b)}), TypeError, "got dict", "Return its loss"
    ),
    "aux without has_aux": Mistake(
        lambda: run(lambda p, b: (loss_of(p, b), {"x": 1.0})), TypeError, "a tuple of 2", "has_aux=True"
    ),
    "has_aux without aux": Mistake(lambda: run(has_aux=True), TypeError, "got Tensor", "drop has_aux=True"),
    "a loss without a gradient": Mistake(
        lambda: run(lambda p, b: loss_of(p, b).detach()), ValueError, "has no gradient", "without detach()"
    ),
    "jit of a step": Mistake(lambda: sf.jit(made()), ValueError, "jit(sharded(f))", "sharded(jit(f), ...)"),
    "accumulate(2, loss)": Mistake(
        lambda: sf.accumulate(2, loss_of),  # type: ignore[arg-type]
        TypeError, "of type int", "loss(params, batch)",
    ),
    # Options.
    "zero of a dict": Mistake(lambda: made(zero={"stage": 3}), TypeError, "is a dict", "zero=sf.Zero(stage=3)"),
    "zero of True": Mistake(lambda: made(zero=True), TypeError, "zero=True", "zero=3"),
    "a stage that there is not": Mistake(lambda: made(zero=4), ValueError, "stage=4", "0, 1, 2 and 3"),
    "a stage in the step": Mistake(lambda: made(stage=3), TypeError, "sharded_step(stage=3)", "Write zero=3."),
    "a policy in the step": Mistake(
        lambda: made(policy=1), TypeError, "no argument 'policy'", "sf.mixed_precision(loss, policy)"
    ),
    "a misspelt option": Mistake(lambda: made(donat=True), TypeError, "no argument 'donat'", "Did you mean 'donate'?"),
    "a seed for a key": Mistake(lambda: made(_noisy, key=0), TypeError, "key is 0", "sf.key(0)"),
    "a seed to fold in": Mistake(
        lambda: sf.fold_in(7, 1),  # type: ignore[arg-type]
        TypeError, "key is 7", "sf.key(7)",
    ),
    "a dtype for a policy": Mistake(
        lambda: _mixed(loss_of, _HALF), TypeError, "torch.bfloat16", "sf.Policy.bf16()"
    ),
    "a name that no value has": Mistake(
        lambda: run(sf.offload(_loss_of_named, sf.policies.offload_only_these_names("hiden"))),
        UserWarning, "'hiden', which no value", "Did you mean 'hidden'?",
    ),
    "a name that no value has under remat": Mistake(
        lambda: run(sf.remat(_loss_of_named, sf.policies.save_only_these_names("hiden"))),
        UserWarning, "'hiden', which no value", "Did you mean 'hidden'?",
    ),
    "exceptions in a list": Mistake(
        lambda: sf.Policy.bf16(exceptions=["norm"]), TypeError, "['norm']", "{'norm': torch.float32}"
    ),
    # A mesh.
    "a tuple of axes": Mistake(
        lambda: sf.make_mesh(("dp",)),  # type: ignore[arg-type]
        TypeError, "make_mesh(('dp',))", "make_mesh({'dp': -1})",
    ),
    "axes by keyword": Mistake(
        lambda: sf.make_mesh(dp=2),  # type: ignore[call-arg]
        TypeError, "no argument 'dp'", "make_mesh({'dp': 2})",
    ),
    "a size that is no number": Mistake(
        lambda: sf.make_mesh({"dp": 2.0}),  # type: ignore[dict-item]
        TypeError, "'dp': 2.0", "names and sizes",
    ),
    "more ranks than there are": Mistake(
        lambda: sf.make_mesh({"dp": 8}), ValueError, "{'dp': 8} does not fit", "torchrun --nproc-per-node"
    ),
    "a dict for a mesh": Mistake(lambda: made(mesh={"dp": 1}), TypeError, "is a dict", "sf.make_mesh({'dp': 1})"),
    "a device that there is not": Mistake(lambda: sf.make_mesh(device="gpu"), ValueError, "'gpu'", "'cuda' or 'cpu'"),
    "an axis that the mesh lacks": Mistake(
        lambda: made(specs=sf.P("dpp")), ValueError, "axis 'dpp' is not in the mesh", "Did you mean 'dp'?"
    ),
    # Parameters.
    "init of a module": Mistake(lambda: made().init(_NETS), TypeError, "Linear is a module", "sf.from_module(module)"),
    "init of its parameters": Mistake(
        lambda: made().init(_NETS.parameters()), TypeError, "params is a generator", "sf.from_module(module)"
    ),
    "init of a function without its key": Mistake(
        lambda: made().init(lambda key: params_of()), TypeError, "missing a required argument: 'key'", "sf.key(0)"
    ),
    "numbers among parameters": Mistake(
        lambda: made().init({"w": torch.ones(3), "b": 0.5}), TypeError, "params['b'] is a float", "torch.tensor(0.5)"
    ),
    "integers alone": Mistake(
        lambda: made().init({"w": torch.ones(3, dtype=torch.int64)}), ValueError, "is torch.int64", "x.float()"
    ),
    "no parameters": Mistake(lambda: made().init({}), ValueError, "have no leaves", "sf.from_module(module)"),
    "parameters on two devices": Mistake(
        lambda: made().init({"w": torch.ones(3), "b": torch.ones(1, device="meta")}),
        ValueError, "params['b']", "to_empty",
    ),
    "parameters without values": Mistake(_on_meta, ValueError, "has shapes and no values", "a function that draws"),
    "from_module of a class": Mistake(
        lambda: sf.from_module(nn.Linear),  # type: ignore[arg-type]
        TypeError, "the class Linear", "called first",
    ),
    # Names of leaves.
    "trainable of a wrong name": Mistake(
        lambda: run(_named, _of_a_model(), trainable={"lm_head.weightx": True}),
        ValueError, "trainable['lm_head.weightx'] has no leaf in params", "Did you mean 'lm_head.weight'?",
    ),
    "trainable of a text": Mistake(
        lambda: run(_named, _of_a_model(), trainable="lm_head"), ValueError, "'lm_head', a str", "for name in params"
    ),
    "trainable of nothing": Mistake(
        lambda: run(_named, _of_a_model(), trainable=dict.fromkeys(_of_a_model(), False)),
        ValueError, "nothing to train", "trainable=False",
    ),
    "a mask of a wrong name": Mistake(
        lambda: run(_named, _of_a_model(), optimizer=optim.adamw(0.1, mask={"model.nrom.weight": True})),
        ValueError, "mask['model.nrom.weight'] has no leaf", "Did you mean 'model.norm.weight'?",
    ),
    "an exception of a wrong name": Mistake(
        lambda: run(_mixed(_named, sf.Policy.bf16(exceptions={"lm_head.weightx": _SINGLE})), _of_a_model()),
        ValueError, "'lm_head.weightx'", "Did you mean 'lm_head.weight'?",
    ),
    "a spec of a wrong name": Mistake(
        lambda: made(_named, specs={"lm_head.wight": sf.P()}).init({"lm_head.weight": torch.ones(3)}),
        ValueError, "specs['lm_head.wight'] has no leaf", "Did you mean 'lm_head.weight'?",
    ),
    "an exception that meets the others": Mistake(
        lambda: run(_mixed(loss_of, sf.Policy.bf16(exceptions={"w": _SINGLE}))),
        RuntimeError, "params['w'] is computed in torch.float32", "x @ w.to(x.dtype)",
    ),
    # A call of the step.
    "state and batch swapped": Mistake(_swapped, TypeError, "got dict", "swapped: write step(state, batch)"),
    "the pair not unpacked": Mistake(_not_unpacked, TypeError, "got tuple", "state, metrics = step(state, batch)"),
    "parameters for a state": Mistake(_params_for_a_state, TypeError, "got dict", "state = step.init(params)"),
    "a state used twice": Mistake(_used_twice, sf.DonatedError, "already consumed", "donate=False"),
    "a batch of arrays": Mistake(
        lambda: run(batch={"x": numpy.ones((4, 3))}),
        TypeError, "batch['x'] is a ndarray", "torch.from_numpy(batch['x'])",
    ),
    "a batch of lists": Mistake(
        lambda: run(batch={"x": [[1.0, 2.0]]}), TypeError, "batch['x'] is a list", "torch.tensor(batch['x'])"
    ),
    "a loader for a batch": Mistake(
        lambda: run(batch=torch.utils.data.DataLoader([torch.ones(3)])),  # type: ignore[arg-type]
        TypeError, "batch is a DataLoader", "for batch in",
    ),
    "a text in the batch": Mistake(
        lambda: run(batch={**batch_of(), "name": "a"}), TypeError, "batch['name'] is a str", "leave it out"
    ),
    "a flag in the batch": Mistake(
        lambda: run(batch=(torch.ones(4, 3), True)), TypeError, "batch[1] is a bool", "write torch.tensor(True)"
    ),
    "out_specs with more entries than dims": Mistake(
        lambda: sf.shard_map(lambda x: x.sum(), mesh=sf.make_mesh(), in_specs=sf.P(), out_specs=sf.P(None, "dp"))(
            torch.ones(4)
        ),
        ValueError, "result of shape ()", "more entries than it has dims",
    ),
    "an empty batch": Mistake(
        lambda: run(batch={"x": torch.ones(0, 3)}), ValueError, "batch['x'] of shape (0, 3)", "drop_last=True"
    ),
    "rows that microbatches do not divide": Mistake(
        lambda: run(sf.accumulate(loss_of, 3)), ValueError, "batch['x'] has 2 rows", "a divisor"
    ),
}  # fmt: skip
# Errors about an argument alone, the same on one rank.
_ALONE = re.compile(
    r"lr of|betas|a scheduler|the (name|class)|parameters for a l|from_module|accumulate\(2"
    r"|a (list|chain|rule|dtype|stage)|exceptions|a policy in|a misspelt|a module|aux|zero of|a seed to"
)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(MISTAKES)]
)
def test_a_mistake_is_told_with_cause_and_remedy(name: str) -> None:
    assert (problem := problem_of(MISTAKES, name)) is None, problem


@distributed(world=2, timeout=120)
def test_all_ranks_tell_it() -> None:
    problems = problems_on_one_mesh(MISTAKES, [name for name in MISTAKES if not _ALONE.match(name)])
    assert not problems, "\n".join(problems)


@distributed(world=2, timeout=60)
def test_a_mistake_of_one_rank_is_told_by_all() -> None:
    step, state = begun()
    rank = torch.distributed.get_rank()
    batches: list[Any] = [batch_of(), {"x": numpy.ones((4, 3))}]
    with sys.modules["shape_checks"].unchecked():
        with pytest.raises((TypeError, sf.RankError)) as caught:
            step(state, batches[rank])
    assert isinstance(caught.value, TypeError) == (rank == 1)
    assert "batch['x'] is a ndarray; write torch.from_numpy(batch['x'])" in str(caught.value)
    step(state, batch_of())  # no message was sent, so the state is unchanged


@distributed(world=2, timeout=60)
def test_a_rank_without_rows() -> None:
    mine = {"x": torch.ones(4 if torch.distributed.get_rank() else 0, 3)}
    step, state = begun()
    with pytest.raises((ValueError, sf.RankError), match=r"different sizes.*WeightedMean\(total, weight\)"):
        step(state, mine)
    step, state = begun(lambda p, b: sf.WeightedMean((b["x"] @ p["w"]).sum(), len(b["x"])))
    assert step(state, mine)[1]["loss"] == 6


def test_a_stage_is_a_rule() -> None:
    step = sf.sharded_step(loss_of, optim.adamw(0.1), zero=3)
    assert step._planner.zero == sf.Zero(stage=3)
    with pytest.raises(ValueError, match=r"the stages are 0, 1, 2 and 3"):
        sf.sharded(loss_of, zero=5)


def test_what_is_no_mistake_is_taken() -> None:
    def wrapped(*args: Any) -> Tensor:
        return loss_of(*args[:2])

    wrapped.__wrapped__ = _noisy  # type: ignore[attr-defined]
    run(wrapped)
    run(_noisy, key=sf.key(0))
    run(lambda params, batch, scale=2.0: scale * loss_of(params, batch))
    run(trainable=False)
    assert sf.make_mesh({}).shape == {}
