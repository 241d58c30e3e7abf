"""Covers how `accumulate` cuts a batch: uneven microbatches, batches with a cut of their own, and their errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import assert_parity, distributed

PARAMS = {"w": torch.linspace(-1.0, 1.0, 10).reshape(5, 2), "b": torch.zeros(2)}
STAGE3 = sf.Zero(stage=3, persist_elements=0)
WRAPS: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "jit": lambda f: sf.jit(f, backend="graph")}


def _batch(rows: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 5, generator=draw), "y": torch.randn(rows, 2, generator=draw)}


def _squares(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]).square()


def _mean(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return _squares(params, batch).mean()


def _weighted(params: dict[str, Tensor], batch: dict[str, Tensor]) -> sf.WeightedMean:
    squares = _squares(params, batch)
    return sf.WeightedMean(squares.sum(), squares.numel())


@pytest.mark.nightly
@distributed(world=[1, 2, 3])
def test_a_weighted_mean_over_uneven_microbatches_equals_one_device(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    batches = [_batch(8, 1), _batch(7, 2), _batch(world, 3)]  # 7 rows that no number divides; 1 row a rank in 3 parts
    for wrap in WRAPS.values():
        loss = wrap(sf.accumulate(_weighted, 3))
        assert_parity(loss, sf.optim.adamw(1e-2), PARAMS, batches, mesh=mesh, reference=_mean, zero=STAGE3)


def test_outside_of_a_step_uneven_microbatches_are_exact_too() -> None:
    batch = _batch(7)
    for loss in (sf.accumulate(_weighted, 3), sf.accumulate(sf.accumulate(_weighted, 2), 2)):
        torch.testing.assert_close(loss(PARAMS, batch).mean(), _mean(PARAMS, batch))
        value, grads = sf.value_and_grad(loss)(PARAMS, batch)
        want, expected = sf.value_and_grad(_mean)(PARAMS, batch)
        torch.testing.assert_close((value, grads), (want, expected))
        step = sf.sharded_step(loss, sf.optim.sgd(0.1))
        state = step.init(PARAMS)
        torch.testing.assert_close(step.loss(state.params, batch), want)


@distributed(world=2)
def test_a_plain_mean_over_uneven_microbatches_is_refused_on_all_ranks() -> None:
    mesh, batch = sf.make_mesh({"dp": 2}), _batch(7)
    for wrap in WRAPS.values():
        step = sf.sharded_step(wrap(sf.accumulate(_mean, 3)), sf.optim.sgd(0.1), mesh=mesh)
        with pytest.raises(ValueError, match=r"microbatch 0: batch\['x'\] has 3 rows.*WeightedMean.*drop_last"):
            step(step.init(PARAMS), batch)
    for call in (sf.value_and_grad(sf.accumulate(_mean, 3)), sf.accumulate(_mean, 3)):
        with pytest.raises(ValueError, match=r"accumulate\(3\) cuts the batch unevenly.*Return WeightedMean"):
            call(PARAMS, batch)


def _images(sizes: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Packed patches of images, one image a row."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "patches": torch.randn(sum(sizes), 5, generator=draw),
        "sizes": torch.tensor(sizes),
        "y": torch.randn(len(sizes), 2, generator=draw),
    }


def _by_image(batch: dict[str, Tensor], num: int) -> list[dict[str, Tensor]]:
    patches = batch["patches"].split(batch["sizes"].tolist())
    return [
        {"patches": torch.cat([patches[i] for i in rows]), "sizes": batch["sizes"][rows], "y": batch["y"][rows]}
        for rows in torch.arange(len(patches)).tensor_split(num)
    ]


def _image_loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> sf.WeightedMean:
    """The loss of each image's mean over its patches."""
    of = torch.arange(len(batch["sizes"])).repeat_interleave(batch["sizes"], output_size=len(batch["patches"]))
    sums = torch.zeros(len(batch["sizes"]), 5).index_add(0, of, batch["patches"])
    squares = _squares(params, {"x": sums / batch["sizes"][:, None], "y": batch["y"]})
    return sf.WeightedMean(squares.sum(), squares.numel())


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_a_batch_with_its_own_cuts_is_never_cut_inside_an_image(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    sizes = [[3, 1, 4, 2], [5, 2, 1, 1, 6]]
    whole = {k: torch.cat([_images(s, n)[k] for n, s in enumerate(sizes)]) for k in ("patches", "sizes", "y")}
    want = sf.value_and_grad(_image_loss)(PARAMS, whole)[0]
    own = whole if world == 1 else _images(sizes[mesh.rank], mesh.rank)
    for wrap in WRAPS.values():
        plain = sf.sharded_step(wrap(_image_loss), sf.optim.sgd(0.1), mesh=mesh, zero=STAGE3)
        step = sf.sharded_step(
            wrap(sf.accumulate(_image_loss, 2, split=_by_image)), sf.optim.sgd(0.1), mesh=mesh, zero=STAGE3
        )
        expected, _ = plain(plain.init(PARAMS), own)
        state, metrics = step(step.init(PARAMS), own)
        torch.testing.assert_close(metrics["loss"], want)
        torch.testing.assert_close(sf.unshard(state.params), sf.unshard(expected.params))
    assert step.lower(step.init(PARAMS), own).cost_analysis().flops  # type: ignore[reportPossiblyUnboundVariable]


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_packed_images_are_evaluated_by_their_weights(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    step = sf.sharded_step(_image_loss, sf.optim.sgd(0.1), mesh=mesh)
    state = step.init(PARAMS)
    batches = [_images([3, 1, 4], 1), _images([5, 2], 2)]
    whole = {k: torch.cat([b[k] for b in batches]) for k in batches[0]}
    own = batches if world == 1 else [batches[mesh.rank]]
    want = float(_image_loss(PARAMS, whole).mean())
    assert step.evaluate(state, own)["loss"] == pytest.approx(want, rel=1e-5)
    message = r"(?s)'rows' is a mean.*batch\['patches'\] has \d rows.*batch\['y'\] has \d rows"
    with pytest.raises(ValueError, match=message):
        step.evaluate(state, own, metrics=lambda params, batch: {"rows": batch["y"].mean()})


def test_leaves_with_different_numbers_of_rows_are_refused() -> None:
    batch = _images([3, 5])
    message = r"(?s)different numbers of rows.*split=f.*batch\['patches'\] has 8 rows.*batch\['sizes'\] has 2 rows"
    for call in (sf.accumulate(_image_loss, 2), sf.value_and_grad(sf.accumulate(_image_loss, 2))):
        with pytest.raises(ValueError, match=message):
            call(PARAMS, batch)
    step = sf.sharded_step(
        _image_loss, sf.optim.sgd(0.1), zero=sf.Zero(reduction="canonical", reduction_chunks=2), batch=sf.P("dp")
    )
    with pytest.raises(ValueError, match=message.replace("split=f.*", "")):
        step(step.init(PARAMS), batch)
    # An empty leaf is cut in empty ones.
    empty = {"patches": torch.zeros(0, 5), "x": torch.ones(4, 5), "y": torch.ones(4, 2)}
    torch.testing.assert_close(sf.accumulate(_mean, 2)(PARAMS, empty), _mean(PARAMS, empty))


def test_results_that_a_split_may_not_return() -> None:
    batch = _images([3, 5])
    cases = [
        (lambda batch, n: batch, TypeError, r"returned a dict. Return a list of 2 batches"),
        (lambda batch, n: [batch], ValueError, r"returned 1 batches. Return 2"),
        (lambda batch, n: [{"y": batch["y"]}] * n, ValueError, r"(?s)other leaves.*batch 0 has \[\"batch\['y'\]\"\]"),
    ]
    for split, kind, message in cases:
        with pytest.raises(kind, match=message):
            sf.accumulate(_image_loss, 2, split=split)(PARAMS, batch)
    with pytest.raises(TypeError, match=r"split=3"):
        sf.accumulate(_image_loss, 2, split=3)  # type: ignore[arg-type]


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_uneven_microbatches_of_a_pipeline_are_refused(world: int) -> None:
    loss = sf.pipeline(
        lambda params, batch: batch["x"],
        lambda p, h: h * p,
        lambda params, h, batch: sf.WeightedMean(h.sum(), h.numel()),
        num_microbatches=3,
    )
    step = sf.sharded_step(
        loss, sf.optim.sgd(0.1), mesh=sf.make_mesh({"pp": world}), specs={"blocks": sf.P("pp")}, batch=sf.P()
    )
    state = step.init({"blocks": torch.ones(2, 5)})
    with pytest.raises(ValueError, match=r"3 microbatches of a pipeline must have the same shapes.*multiple of 3 rows"):
        step(state, {"x": torch.ones(4, 5)})
