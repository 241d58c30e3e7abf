"""Covers more mistakes of a first hour, in the batch, in modules, and around the step: each error has its remedy."""

import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn import P, optim
from shardfn.engine.loss._noted import noting_leaves
from shardfn.models import gpt
from shardfn.testing import distributed

from .mistakes import (
    Mistake,
    batch_of,
    begun,
    loss_of,
    made,
    mesh_of,
    params_of,
    problem_of,
    problems_on_one_mesh,
    run,
    using,
)


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


def _backward_inside(params: dict, batch: dict) -> Tensor:
    value = loss_of(params, batch)
    value.backward()
    return value


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


def _collated(*examples: Any) -> Any:
    return sf.data.pad(4)(list(examples))


def _log(*args: Any) -> Any:
    with sf.metrics.Logger(tempfile.mkdtemp(), mesh_of()) as logger:
        return logger.write(*args)


def _after(use: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Uses a step and a state that it has consumed."""

    def does() -> Any:
        step, state = begun()
        step(state, batch_of())
        return use(step, state)

    return does


_GPT = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
_WHERE = "/a/directory/that/is/missing"
_META = torch.ones(4, 3, device="meta")
MISTAKES: dict[str, Mistake] = {
    # A batch.
    "doubles, as numpy makes them": Mistake(
        lambda: run(batch={"x": torch.from_numpy(numpy.ones((4, 3)))}),
        RuntimeError, "batch['x'] is torch.float64", "batch['x'].to(torch.float32)",
    ),
    "integers where floats are computed with": Mistake(
        lambda: run(batch={"x": torch.ones(4, 3, dtype=torch.int64)}),
        RuntimeError, "batch['x'] is torch.int64", "batch['x'].to(torch.float32)",
    ),
    "a batch in half precision": Mistake(
        lambda: run(batch={"x": torch.ones(4, 3, dtype=torch.bfloat16)}),
        RuntimeError, "the parameters are torch.float32", "batch['x'].to(torch.float32)",
    ),
    "parameters in half precision": Mistake(
        lambda: run(params={"w": torch.ones(3, 2, dtype=torch.float16)}),
        UserWarning, "params['w']: trained in torch.float16 without a policy", "sf.mixed_precision(loss, sf.Policy.",
    ),
    "a batch without values": Mistake(
        lambda: run(batch={"x": _META}), ValueError, "batch['x'] of shape (4, 3)", "step.lower takes it"
    ),
    "what a tokenizer returns": Mistake(
        lambda: run(batch=Encoding()), TypeError, "batch is an Encoding", "write dict(batch)"
    ),
    "a number for all rows": Mistake(
        lambda: run(batch=batch_of() | {"n": torch.tensor(3)}), ValueError, "batch['n'] of shape ()", "say sf.P()"
    ),
    "a list of examples": Mistake(
        lambda: run(batch=[{"x": torch.ones(3)}, {"x": torch.ones(3)}]),
        TypeError, "The batch is a list of 2", "torch.utils.data.default_collate(examples)",
    ),
    "a pair for a batch": Mistake(
        lambda: run(batch=(torch.ones(4, 3), torch.ones(4))), TypeError, "The batch is a tuple of 2", "by number"
    ),
    # A module.
    "a module among parameters": Mistake(
        lambda: made().init({"net": nn.Linear(1, 1)}), TypeError, "params['net'] is a Linear", "sf.from_module(module)"
    ),
    "the pair of from_module": Mistake(
        lambda: made().init(_linear()[1:]), TypeError, "params[1] is a ModuleFunction", "params, apply = sf.from_mod"
    ),
    "apply without parameters": Mistake(
        lambda: _of_module(lambda module, apply, p, x: apply(x)),
        TypeError, "and this is a Tensor", "apply(params, ...)",
    ),
    "apply with its arguments swapped": Mistake(
        lambda: _of_module(lambda module, apply, p, x: apply(x, p)),
        TypeError, "takes the parameters first", "apply(params, ...)",
    ),
    "the module in place of apply": Mistake(
        lambda: _of_module(lambda module, apply, p, x: module(x)),
        ValueError, "no gradient", "apply(params, ...), not module(...)",
    ),
    "dropout without a key": Mistake(
        lambda: made(lambda p, b: sf.from_module(nn.Dropout())[1]({}, b["x"] @ p["w"]).mean())(
            begun()[1], batch_of()
        ),
        ValueError, "would draw from torch's generator", "apply.keyed(key, index_B)",
    ),
    "to_module with its arguments swapped": Mistake(
        lambda: sf.to_module(*_state_of_module()[::-1]),  # type: ignore[arg-type]
        TypeError, "got Linear", "write sf.to_module(state, module)",
    ),
    "export with its arguments swapped": Mistake(
        lambda: sf.export(*_state_of_module()[::-1], _WHERE),  # type: ignore[arg-type]
        TypeError, "got Linear", "write sf.export(state, module, directory)",
    ),
    # A loss.
    "backward in the loss": Mistake(
        lambda: run(_backward_inside), ValueError, "the loss called backward()", "Return the loss alone"
    ),
    "losses in a list": Mistake(
        lambda: run(lambda p, b: [loss_of(p, b)]), TypeError, "got list", "their sum, or their mean"
    ),
    "a count for a loss": Mistake(
        lambda: run(lambda p, b: (b["x"] @ p["w"] > 0).sum()), TypeError, "got torch.int64", "counts as aux"
    ),
    "noise of torch": Mistake(
        lambda: run(lambda p, b: loss_of(p, b) * torch.rand(())), UserWarning, "torch's generator", "key=sf.key(0)"
    ),
    "noise of torch in a graph": Mistake(
        lambda: run(sf.jit(lambda p, b: loss_of(p, b) * torch.rand(()), backend="graph")),
        UserWarning, "generator at ", "key=sf.key(0)",
    ),
    "a weight below nothing": Mistake(
        lambda: run(lambda p, b: sf.WeightedMean(loss_of(p, b), -4)), ValueError, "is -4", "WeightedMean(total, weight)"
    ),
    "a tensor of such a weight": Mistake(
        lambda: run(lambda p, b: sf.WeightedMean(loss_of(p, b), b["x"].sum() - 99)),
        ValueError, "is -87", "at least 0",
    ),
    # Methods of torch, with their replacements here.
    "optimizer.step()": Mistake(
        lambda: optim.adamw(0.1).step(), AttributeError, "no attribute 'step'", "state, metrics = "  # type: ignore
    ),
    "optimizer.zero_grad()": Mistake(
        lambda: optim.adamw(0.1).zero_grad(), AttributeError, "'zero_grad'", "Leave it out"  # type: ignore
    ),
    "step.train()": Mistake(lambda: made().train(), AttributeError, "'train'", "module.train(), before"),
    "state.state_dict()": Mistake(
        using(lambda step, state: state.state_dict()), AttributeError, "'state_dict'", "sf.checkpoint.save(directory, "
    ),
    "named parameters": Mistake(
        lambda: made().init(list(nn.Linear(1, 1).named_parameters())),
        TypeError, "pairs of a name and a tensor", "write dict(params)",
    ),
    "apply of a state's leaves": Mistake(
        lambda: _linear()[2](_state_of_module()[0].params, torch.ones(1, 3)),
        TypeError, "params['weight'] is a GlobalTensor", "step.apply(lambda params: apply(params, x), state)",
    ),
    "a mesh by position": Mistake(
        lambda: sf.sharded_step(loss_of, optim.sgd(0.1), mesh_of()),  # type: ignore[misc]
        TypeError, "loss and optimizer by position and got 3", "mesh=, specs=",
    ),
    # A rule.
    "a text for a rate": Mistake(
        lambda: optim.adamw("1e-3"),  # type: ignore[arg-type]
        ValueError, "learning_rate='1e-3'", "without quotes",
    ),
    "a schedule's peak under another name": Mistake(
        lambda: optim.warmup_cosine_decay_schedule(0.0, peak_lr=0.1),  # type: ignore[call-arg]
        TypeError, "no argument 'peak_lr'", "Write peak_value=0.1.",
    ),
    "an optimizer for a schedule": Mistake(
        lambda: optim.cosine_decay_schedule(optim.sgd(0.1), 10),  # type: ignore[arg-type]
        ValueError, "init_value=a GradientTransformation", "a finite number",
    ),
    "steps in floats": Mistake(
        lambda: optim.linear_schedule(0.0, 1.0, 1e3),  # type: ignore[arg-type]
        ValueError, "transition_steps=1000.0", "Write 1000.",
    ),
    "a chain of nothing": Mistake(
        lambda: made(optimizer=optim.chain()), ValueError, "has no learning rate", "optim.adamw(1e-3)"
    ),
    "a clip alone": Mistake(
        lambda: made(optimizer=optim.chain(optim.clip_by_global_norm(1.0))),
        ValueError, "point along the gradient", "optim.scale_by_learning_rate(1e-3)",
    ),
    "Adam's direction without a rate": Mistake(
        lambda: made(optimizer=optim.chain(optim.clip(1.0), optim.scale_by_adam())),
        ValueError, "has no learning rate", "optim.scale_by_learning_rate(1e-3)",
    ),
    "a schedule that returns a text": Mistake(
        lambda: run(optimizer=optim.adamw(lambda count: "0.1")),  # type: ignore[arg-type]
        TypeError, "returned a str", "a number or a 0-d tensor",
    ),
    "a schedule that returns a list": Mistake(
        lambda: run(optimizer=optim.sgd(lambda count: torch.ones(2))),
        TypeError, "a tensor of shape (2,)", "a number or a 0-d tensor",
    ),
    # Specs, rules, meshes.
    "a tuple for a spec": Mistake(
        lambda: made(specs={"w": ("dp", None)}), ValueError, "specs['w'] is ('dp', None)", "P('dp', None)?"
    ),
    "a list for a spec": Mistake(
        lambda: made(specs={"w": [None, "dp"]}), ValueError, "specs['w'] is [None, 'dp']", "P(None, 'dp')?"
    ),
    "a text for a spec": Mistake(lambda: made(batch="dp"), ValueError, "batch is 'dp', not a P", "P('dp')?"),
    "a placement of torch": Mistake(
        lambda: made(specs={"w": [Shard()]}),
        ValueError, "specs['w'][0] is Shard(dim=0)", "Shard(0) on the axis 'dp' is P('dp')",
    ),
    "a dim in a spec": Mistake(lambda: P(0), TypeError, "entry 0 is of type int", "P(None, 'tp') cuts dim 1"),
    "a spec that is too long": Mistake(
        lambda: made(specs=P(None, None, "dp")).init(params_of()), ValueError, "shape (3, 2)", "drop entries"
    ),
    "a spec for the batch with a wrong axis": Mistake(
        lambda: made(batch=P("pd")), ValueError, "axis 'pd' is not in the mesh", "Did you mean 'dp'?"
    ),
    "a spec for the batch with a wrong name": Mistake(
        lambda: made(batch={"y": P("dp")})(begun()[1], batch_of()),
        ValueError, "batch['x'] has no entry", "batch spec['y'] has no leaf in batch",
    ),
    "a rule along another axis": Mistake(
        lambda: made(zero=sf.Zero(3, axis="data")), ValueError, "Zero(axis='data')", "which has ('dp',)"
    ),
    "states on the cpu": Mistake(
        lambda: sf.Zero(3, optimizer="cpu"),  # type: ignore[arg-type]
        ValueError, "Zero(optimizer='cpu')", "Did you mean 'host'?",
    ),
    "states on a disk that is not named": Mistake(
        lambda: sf.Zero(3, optimizer="disk"), ValueError, "Zero(optimizer='disk') keeps", "disk=Disk('/path"
    ),
    "a field that a rule lacks": Mistake(
        lambda: sf.Zero(3, offload="cpu"),  # type: ignore[call-arg]
        TypeError, "no field 'offload'", "optimizer, optimizer_fraction",
    ),
    "a number for a mesh": Mistake(
        lambda: sf.make_mesh(2),  # type: ignore[arg-type]
        TypeError, "of type int", "make_mesh({'dp': 2})",
    ),
    "a mesh for another number of processes": Mistake(
        lambda: sf.make_mesh({"dp": 3, "tp": 2}), ValueError, "does not fit", "torchrun --nproc-per-node 6"
    ),
    "a GPU that there is not": Mistake(
        lambda: sf.make_mesh(device="cuda"), ValueError, "make_mesh(device='cuda'): torch", "device='cpu'"
    ),
    # Calls of a step.
    "a key for each step": Mistake(
        using(lambda step, state: step(state, batch_of(), sf.key(1))),
        TypeError, "step(state, batch) got 1 argument more: a Tensor", "sharded_step(..., key=sf.key(0))",
    ),
    "a key for each step, by name": Mistake(
        using(lambda step, state: step(state, batch_of(), key=sf.key(1))),
        TypeError, "1 argument more: key=", "functools.partial(loss, config)",
    ),
    "parameters and a key for init": Mistake(
        lambda: made().init(params_of(), sf.key(0)), TypeError, "1 argument more", "step.init(f, sf.key(0))"
    ),
    "one batch to evaluate": Mistake(
        using(lambda step, state: step.evaluate(state, batch_of())), TypeError, "this is a dict", "(state, [batch])"
    ),
    "a tensor to evaluate": Mistake(
        using(lambda step, state: step.evaluate(state, torch.ones(3))), TypeError, "a Tensor", "(state, [batch])"
    ),
    "evaluate with its arguments swapped": Mistake(
        using(lambda step, state: step.evaluate([batch_of()], state)), TypeError, "got list", "step.evaluate(state, b"
    ),
    "an iterator that was read": Mistake(
        using(lambda step, state: step.evaluate(state, iter([]))), ValueError, "no rank has a row", "make it again"
    ),
    "metrics that are no function": Mistake(
        using(lambda step, state: step.evaluate(state, [batch_of()], {"loss": loss_of})),
        TypeError, "this is a dict", "metrics(params, batch)",
    ),
    "apply of a state alone": Mistake(
        using(lambda step, state: step.apply(state, batch_of())), TypeError, "got dict", "step.apply(f, state, *args)"
    ),
    "evaluate a state used before": Mistake(
        _after(lambda step, state: step.evaluate(state, [batch_of()])), sf.DonatedError, "was donated", "donate=False"
    ),
    "a leaf of a state used before": Mistake(
        _after(lambda step, state: state.params["w"].full_tensor()), sf.DonatedError, "(3, 2)", "donate=False"
    ),
    "a leaf times a number": Mistake(
        using(lambda step, state: state.params["w"] * 2), TypeError, "__mul__ of a GlobalTensor", "leaf.full_tensor()"
    ),
    "a leaf in a function of torch": Mistake(
        using(lambda step, state: torch.exp(state.params["w"])), TypeError, "exp got a GlobalTensor", "leaf.local"
    ),
    "a method of a leaf": Mistake(
        using(lambda step, state: state.params["w"].mean()), AttributeError, "attribute 'mean'", "leaf.full_tensor()"
    ),
    "a tensor put into a state": Mistake(
        using(lambda step, state: step(state._replace(params=params_of()), batch_of())),
        TypeError, "state's params are not GlobalTensors", "step.init",
    ),
    "the state of another optimizer": Mistake(
        using(lambda step, state: made(optimizer=optim.sgd(0.1))(state, batch_of())),
        ValueError, "sgd keeps a tuple of 1", "that init(params) returned",
    ),
    "a text for a flag": Mistake(lambda: made(donate="no"), TypeError, "donate='no'", "True or False"),
    "names for trainable": Mistake(
        lambda: made(trainable=["w"]), TypeError, "a list of names", "{name: name in ['w'] for name in params}"
    ),
    # A batch of gpt.
    "tokens as a batch": Mistake(
        lambda: gpt.loss(_GPT, {}, torch.ones(2, 9, dtype=torch.int64)),  # type: ignore[arg-type]
        TypeError, "this is a Tensor", "{'tokens': int64 [B, T + 1]}",
    ),
    "tokens of one sequence": Mistake(
        lambda: gpt.loss(_GPT, {}, {"tokens": torch.ones(9, dtype=torch.int64)}),
        TypeError, "of shape (9,)", "int64 [B, T + 1]",
    ),
    "tokens under another name": Mistake(
        lambda: gpt.loss(_GPT, {}, {"input_ids": torch.ones(2, 9, dtype=torch.int64)}),
        TypeError, "a dict with ['input_ids']", "{'tokens': int64 [B, T + 1]}",
    ),
    # Files, lines, examples.
    "restore into a step": Mistake(
        lambda: sf.checkpoint.restore(_WHERE, made()), TypeError, "this is a ShardedStep", "step.init(params))"
    ),
    "a state for metrics": Mistake(
        using(lambda step, state: _log(0, state)), TypeError, "this is a TrainState", "{'loss': loss}"
    ),
    "save with its arguments swapped": Mistake(
        using(lambda step, state: sf.checkpoint.save(state, _WHERE)), TypeError, "a TrainState", "save(directory, "
    ),
    "restore with its arguments swapped": Mistake(
        using(lambda step, state: sf.checkpoint.restore(state, _WHERE)),
        TypeError, "a TrainState", "restore(directory, state)",
    ),
    "a directory that there is not": Mistake(
        using(lambda step, state: sf.checkpoint.restore(_WHERE, state)),
        FileNotFoundError, "which does not exist", "steps(directory)",
    ),
    "a directory of something else": Mistake(
        using(lambda step, state: sf.checkpoint.restore(pathlib.Path(__file__).parent, state)),
        FileNotFoundError, "which has none", "steps(directory)",
    ),
    "a state to torch.save": Mistake(
        using(lambda step, state: torch.save(state, tempfile.mkstemp()[1])),
        TypeError, "cannot be pickled", "save a checkpoint",
    ),
    "metrics without the step": Mistake(
        lambda: _log({"loss": 1.0}), TypeError, "the step's number comes first", "logger.write(step, metrics)"
    ),
    "texts for examples": Mistake(
        lambda: _collated("a b", "c"), TypeError, "example 1 of the batch is a text", "tokenizer(text)['input_ids']"
    ),
    "examples of Hugging Face": Mistake(
        lambda: _collated({"input_ids": [1, 2]}), TypeError, "has ['input_ids']", "{'tokens': example['input_ids']}"
    ),
    "an example that is too long": Mistake(
        lambda: _collated([1] * 9), ValueError, "example 0 of the batch has 9 tokens", "take length=9"
    ),
}  # fmt: skip
# Mistakes that each rank finds by itself, or in files of its own.
_ALONE = ("a dim", "states on", "a field", "texts", "examples", "an example", "a state to torch", "metrics without")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(MISTAKES)]
)
def test_a_misuse_is_told_with_cause_and_remedy(name: str) -> None:
    if name == "a GPU that there is not" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert (problem := problem_of(MISTAKES, name)) is None, problem


@pytest.mark.nightly
@distributed(world=2, timeout=120)
def test_all_ranks_tell_a_misuse() -> None:
    names = [name for name in MISTAKES if not name.startswith((*_ALONE, "a GPU"))]
    problems = problems_on_one_mesh(MISTAKES, names)
    assert not problems, "\n".join(problems)


def test_leaves_on_another_device_are_named() -> None:
    batch = {"x": torch.ones(2, device="meta"), "y": torch.ones(2)}
    with pytest.raises(RuntimeError) as caught, noting_leaves({"w": torch.ones(2)}, (batch,)):
        _ = torch.ones(2) @ batch["x"]
    assert caught.value.__notes__ == [
        "The batch has batch['x'] (2,), batch['y'] (2,).",
        "The parameters have params['w'] (2,).",
        "batch['x'] is on meta, and the parameters are on cpu; write batch['x'].to(mesh.device).",
    ]


def test_a_write_that_torch_refuses_is_named_with_its_line() -> None:
    def writes(params: dict, batch: dict) -> Tensor:
        params["w"].add_(1)
        return loss_of(params, batch)

    line = re.escape("`params[\"w\"].add_(1)`, variables hold params['w']")
    with pytest.raises(ValueError, match=rf"written to inside the loss.*write to a clone.*test_misuse\.py:\d+, {line}"):
        run(writes)


def test_an_index_that_is_too_large_is_shown_with_the_batch() -> None:
    with pytest.raises(IndexError) as caught:
        run(lambda p, b: torch.nn.functional.embedding(b["i"], p["w"]).mean(), batch={"i": torch.arange(4)})
    assert caught.value.__notes__ == ["batch['i'] has values from 0 to 3."]


def test_a_name_that_the_batch_lacks_is_compared_with_its_own() -> None:
    with pytest.raises(KeyError, match="'x'") as caught:
        run(batch={"xs": torch.ones(4, 3)})
    assert caught.value.__notes__ == ["The batch has 'xs'. Did you mean 'xs'?", "The parameters have 'w'."]


def test_what_is_near_a_misuse_is_taken() -> None:
    step, state = begun()
    assert step.evaluate(state, iter([batch_of()])).keys() == {"loss"}
    assert _log(state.step, {"loss": 1.0}) == {"step": 0, "loss": 1.0}
    made(specs=[P(), P()]).init([torch.ones(2), torch.ones(2)])
    run(lambda p, b: b["i"].float() @ p["w"][:, 0] @ torch.ones(4), batch={"i": torch.ones(4, 3, dtype=torch.int64)})
    with torch.no_grad():
        run()
