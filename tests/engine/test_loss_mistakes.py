"""Covers mistakes in losses: their arguments, results, gradients, random numbers, and axes of the model."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import shardfn
from shardfn import P, optim
from shardfn.engine.loss._error_context import noting_leaves
from shardfn.graph import AxisTypeError
from shardfn.testing import distributed
from tests.mistakes import Mistake, batch_of, cases, check, check_on_all_ranks, loss_of, made, mesh_of, params_of, run

sf: Any = shardfn  # many of these are errors of types, too


def _noisy(params: dict, batch: dict, key: Tensor) -> Tensor:
    del key
    return loss_of(params, batch)


def _backward_inside(params: dict, batch: dict) -> Tensor:
    value = loss_of(params, batch)
    value.backward()
    return value


def _draws(params: dict, batch: dict) -> Tensor:
    return loss_of(params, batch) * torch.rand(())


def _with_aux(aux: Any) -> Any:
    return run(lambda p, b: (loss_of(p, b), aux), has_aux=True)


_NOT_A_LOSS = "the loss must return a 0-d tensor or a WeightedMean, got "
_AT = r"cannot be called as this step calls it, "
_WEIGHT = "the weight of the loss's WeightedMean must be at least 0, got "
_ORDER = "Return WeightedMean(total, weight), in this order"
_MEET = ", and the parameters are torch.float32; where they meet"
_CAST = "write batch['x'].to(torch.float32)"
_DRAWS = "the loss draws from torch's generator"
MISTAKES = [
    # Its arguments.
    Mistake("the loss has been called", lambda: made(loss_of(params_of(), batch_of())),
            TypeError, "takes a function, and this is a tensor of shape ()", "Pass the function itself"),
    Mistake("loss and optimizer are swapped", lambda: made(optim.adamw(0.1), loss_of),
            TypeError, "the loss is an optimizer", "The loss comes first: sf.sharded_step(loss, "),
    Mistake("the key is not announced", lambda: made(_noisy),
            TypeError, f"_noisy(params: ... {_AT}_noisy(params, batch)", "sharded_step(..., key=sf.key(0))"),
    Mistake("the key is not announced under transforms", lambda: made(sf.jit(sf.accumulate(_noisy, 2))),
            TypeError, f"_noisy(params: ... {_AT}_noisy(params, batch)", "sharded_step(..., key=sf.key(0))"),
    Mistake("the loss takes no key", lambda: made(key=sf.key(0)),
            TypeError, f"loss_of(params: ... {_AT}loss_of(params, batch, key)", "or drop key="),
    Mistake("the loss takes the batch only", lambda: made(lambda batch: batch["x"].mean()),
            TypeError, f"<lambda>(batch) {_AT}<lambda>(params, batch)", "functools.partial(loss, name=...)"),
    Mistake("the loss takes no model state", lambda: made(has_state=True),
            TypeError, f"{_AT}loss_of(params, model_state, batch)", "or drop has_state="),
    # Its result.
    Mistake("the loss has a value for each row", lambda: run(lambda p, b: (b["x"] @ p["w"])[:, 0]),
            ValueError, "the loss must be a 0-d tensor, got shape (4,)", "Take its mean or sum"),
    Mistake("the loss is a float", lambda: run(lambda p, b: loss_of(p, b).item()),
            TypeError, _NOT_A_LOSS + "float", "leave out item()"),
    Mistake("the loss is not returned", lambda: run(lambda p, b: None),
            TypeError, _NOT_A_LOSS + "NoneType", "Is there a return at its end?"),
    Mistake("the loss is in a dict", lambda: run(lambda p, b: {"loss": loss_of(p, b)}),
            TypeError, _NOT_A_LOSS + "dict", "Return its loss: out.loss, or out['loss']"),
    Mistake("the losses are a list", lambda: run(lambda p, b: [loss_of(p, b)]),
            TypeError, _NOT_A_LOSS + "list", "Return one tensor: their sum, or their mean"),
    Mistake("the loss is a count", lambda: run(lambda p, b: (b["x"] @ p["w"] > 0).sum()),
            TypeError, "the loss must be a floating-point tensor, got torch.int64", "and counts as aux"),
    Mistake("aux is not announced", lambda: run(lambda p, b: (loss_of(p, b), {"x": 1.0})),
            TypeError, "the loss returned a tuple of 2", "Did you mean has_aux=True?"),
    Mistake("aux is announced and missing", lambda: run(has_aux=True),
            TypeError, "with has_aux=True the loss must return (loss, aux), got Tensor", "or drop has_aux=True"),
    Mistake("aux is a number", lambda: _with_aux(3), TypeError, "got int", "aux must be a dict of scalars"),
    Mistake("aux has rows", lambda: _with_aux({"x": torch.ones(4, 3)}),
            ValueError, "aux['x'] must be 0-d, got shape (4, 3)", "Reduce it inside the loss"),
    Mistake("aux has the name of a metric", lambda: _with_aux({"loss": 1.0}),
            ValueError, "aux['loss'] has the name of a metric of the step", "Choose another"),
    Mistake("the weight is negative", lambda: run(lambda p, b: sf.WeightedMean(loss_of(p, b), -4)),
            ValueError, _WEIGHT + "-4", _ORDER),
    Mistake("the weight is a negative tensor",
            lambda: run(lambda p, b: sf.WeightedMean(loss_of(p, b), b["x"].sum() - 99)),
            ValueError, _WEIGHT + "-87", _ORDER),
    # Its gradient.
    Mistake("the loss is detached", lambda: run(lambda p, b: loss_of(p, b).detach()),
            ValueError, "the loss has no gradient ... none of params['w']", "without detach(), item() or no_grad()"),
    Mistake("the loss calls backward", lambda: run(_backward_inside),
            ValueError, "the loss called backward()", "Return the loss alone"),
    # Its random numbers.
    Mistake("the loss draws from torch", lambda: run(_draws), UserWarning, _DRAWS, "sharded_step(..., key=sf.key(0))"),
    Mistake("the loss draws from torch in a graph", lambda: run(sf.jit(_draws, backend="graph")),
            UserWarning, f"{_DRAWS} at {__file__}:", "sharded_step(..., key=sf.key(0))"),
    Mistake("the key is a seed", lambda: made(_noisy, key=0), TypeError, "key is 0, an int", "sf.key(0)"),
    # Its batch.
    Mistake("the batch is in double precision", lambda: run(batch={"x": torch.ones(4, 3, dtype=torch.float64)}),
            RuntimeError, "batch['x'] is torch.float64" + _MEET, _CAST),
    Mistake("the batch is of integers", lambda: run(batch={"x": torch.ones(4, 3, dtype=torch.int64)}),
            RuntimeError, "batch['x'] is torch.int64" + _MEET, _CAST),
    Mistake("the batch is in half precision", lambda: run(batch={"x": torch.ones(4, 3, dtype=torch.bfloat16)}),
            RuntimeError, "batch['x'] is torch.bfloat16" + _MEET, _CAST),
    Mistake("the batch is a list of examples", lambda: run(batch=[{"x": torch.ones(3)}, {"x": torch.ones(3)}]),
            TypeError, "The batch is a list of 2", "torch.utils.data.default_collate(examples)"),
    Mistake("the batch is a pair", lambda: run(batch=(torch.ones(4, 3), torch.ones(4))),
            TypeError, "The batch is a tuple of 2", "pass a dict of tensors ... or take them by number"),
    Mistake("the batch has another name", lambda: run(batch={"xs": torch.ones(4, 3)}),
            KeyError, "'x'\nThe batch has 'xs'.", "Did you mean 'xs'?\nThe parameters have 'w'.\n"),
    Mistake("an index is too large",
            lambda: run(lambda p, b: functional.embedding(b["i"], p["w"]).mean(),
                        batch={"i": torch.arange(4).roll(mesh_of().rank)}),
            IndexError, "out of range", "batch['i'] has values from 0 to 3.\n"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@pytest.mark.nightly
@distributed(world=2, timeout=120)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)


def _never_sums(p: Any, x: Tensor) -> Tensor:
    return (x @ p["up"]).relu().matmul(p["down"]).square().mean()  # of a part of the features


def _features() -> tuple[dict[str, Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    up, down, x = (torch.randn(shape, generator=g) for shape in ((3, 8), (8, 3), (4, 3)))
    return {"up": up, "down": down}, x


def _cut(loss: Any, mesh: Any = None) -> Any:
    params, x = _features()
    specs = {"up": P(None, "tp"), "down": P("tp")}
    step = made(loss, mesh=mesh or mesh_of(), specs=specs, batch=P())
    return step(step.init(params), x)


_ALONG_TP = [
    Mistake("the loss never sums over an axis of its specs", lambda: _cut(_never_sums),
            (AxisTypeError, sf.RankError), f"the loss varies along 'tp' ... {__file__}:", "sf.psum(x, 'tp')"),
    Mistake("the captured loss never sums over an axis of its specs",
            lambda: _cut(sf.jit(_never_sums, backend="graph")),
            (AxisTypeError, sf.RankError), "varies along 'tp'", "sf.psum(x, 'tp')"),
]  # fmt: skip


@pytest.mark.nightly
@distributed(world=2)
def test_a_loss_that_never_sums_over_an_axis_of_its_specs_is_refused_and_the_remedy_works() -> None:
    check_on_all_ranks(_ALONG_TP, {"tp": 2})
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        remedied = _cut(sf.partition(_never_sums, axes="tp"), mesh)
        torch.testing.assert_close(remedied[1]["loss"], _never_sums(*_features()))


def test_leaves_on_another_device_are_named() -> None:
    batch = {"x": torch.ones(2, device="meta"), "y": torch.ones(2)}
    with pytest.raises(RuntimeError) as caught, noting_leaves({"w": torch.ones(2)}, (batch,)):
        _ = torch.ones(2) @ batch["x"]
    assert caught.value.__notes__ == [
        "The batch has batch['x'] (2,), batch['y'] (2,).",
        "The parameters have params['w'] (2,).",
        "batch['x'] is on meta, and the parameters are on cpu. Write batch['x'].to(mesh.device).",
    ]


def test_a_write_that_torch_refuses_is_named_with_its_line() -> None:
    def writes(params: dict, batch: dict) -> Tensor:
        params["w"].add_(1)
        return loss_of(params, batch)

    line = re.escape("`params[\"w\"].add_(1)`, variables hold params['w']")
    message = rf"(?s)written to inside the loss.*write to a clone.*test_loss_mistakes\.py:\d+, {line}"
    with pytest.raises(ValueError, match=message):
        run(writes)


@pytest.mark.day("0")
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world=2)
def test_a_batch_of_another_width_is_named_with_its_remedy(stage: int) -> None:
    mesh = sf.make_mesh(device="cpu")
    for transposed, apply in ((False, loss_of), (True, lambda p, b: functional.linear(b["x"], p["w"]).sum())):
        step = sf.sharded_step(apply, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage, persist_elements=0))
        state = step.init({"w": torch.ones(2, 3) if transposed else torch.ones(3, 2)})
        with pytest.raises(RuntimeError) as caught:
            step(state, {"x": torch.ones(4, 5)})
        said = "The last dim of batch['x'] has size 5, and params['w'] takes 3: pass rows of 3 numbers"
        assert any(note.startswith(said) for note in caught.value.__notes__), caught.value.__notes__


def _scales(params: dict, batch: dict) -> Tensor:
    w = params["w"]
    w *= 2
    return loss_of({"w": w}, batch)


def _adds(params: dict, batch: dict) -> Tensor:
    params["w"].add_(1)
    return loss_of(params, batch)


def _assigns(params: dict, batch: dict) -> Tensor:
    params["w"][0] = 1
    return loss_of(params, batch)


@pytest.mark.nightly
@pytest.mark.parametrize("jit", [False, True])
@distributed(world=2)
def test_a_write_is_one_error_at_all_stages(jit: bool) -> None:
    mesh = sf.make_mesh(device="cpu")
    head = (
        "parameters are written to inside the loss. Parameters are immutable there: write to a clone(), or return the"
        " new value as aux. The state passed in is unchanged.\n  - "
    )
    for loss in (_scales, _adds, _assigns):
        for stage in (0, 2, 3):
            taken = sf.jit(loss, backend="graph") if jit else loss
            step = sf.sharded_step(taken, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage, persist_elements=0))
            with pytest.raises(ValueError) as caught:
                step(step.init(params_of()), batch_of())
            said = str(caught.value)
            assert said.startswith(head) and "params['w']" in said, (loss, stage, said)


def test_losses_that_look_like_mistakes_are_taken() -> None:
    def wrapped(*args: Any) -> Tensor:
        return loss_of(*args[:2])

    wrapped.__wrapped__ = _noisy  # type: ignore[attr-defined]
    run(wrapped)
    run(_noisy, key=sf.key(0))
    run(lambda params, batch, scale=2.0: scale * loss_of(params, batch))
    run(lambda p, b: b["i"].float() @ p["w"][:, 0] @ torch.ones(4), batch={"i": torch.ones(4, 3, dtype=torch.int64)})
    with torch.no_grad():
        run()
