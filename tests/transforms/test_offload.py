"""Covers memory kinds: every placement of params, gradients and optimizer state has the bits of none."""

import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.testing import ODD_TRAINABLE, Run, assert_same, distributed, odd_batch, odd_loss, odd_params, on_mesh

KINDS = ("device", "host", "disk")


def _zero(kinds: tuple[str, str, str], directory: pathlib.Path, **fields: Any) -> sf.Zero:
    params, grads, optimizer = kinds
    where = {"directory": str(directory)} if "disk" in kinds else {}
    placed: dict[str, Any] = {"params": params, "grads": grads, "optimizer": optimizer, **where}
    return sf.Zero.flat(persist_elements=0, bucket_bytes=64, chunk_bytes=2048, **placed, **fields)


def _run(mesh: sf.Mesh, zero: sf.Zero) -> Run:
    optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))
    batches = [odd_batch(n) for n in range(2)]
    return on_mesh(odd_loss, optimizer, odd_params(), batches, mesh=mesh, zero=zero, trainable=ODD_TRAINABLE)


# Nine of the 27 placements in which every pair of memories meets.
PAIRS = [(KINDS[i], KINDS[j], KINDS[(i + j) % 3]) for i in range(3) for j in range(3)]


def _compare(stage: int, world: int, placements: Iterable[tuple[str, str, str]]) -> None:
    mesh = sf.make_mesh({"dp": world})
    want = _run(mesh, sf.Zero(stage, persist_elements=0, travel=sf.Travel(bucket_bytes=64)))
    for kinds in placements:
        with tempfile.TemporaryDirectory() as directory:
            got = _run(mesh, _zero(kinds, pathlib.Path(directory), stage=stage))
        assert_same(got, want, exact=True)


@distributed(world=[1, 2])
def _compare_pairs(world: int, stage: int) -> None:
    _compare(stage, world, PAIRS if stage != 3 else PAIRS[::2])


@pytest.mark.parametrize(
    ("world", "stage"),
    [(2, 3), *(pytest.param(*x, marks=pytest.mark.nightly) for x in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)])],
)
def test_placements_have_the_bits_of_none(world: int, stage: int) -> None:
    _compare_pairs(stage=stage, world=world)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=[1, 2, 4], timeout=600)
def test_every_placement_has_the_bits_of_none(world: int, stage: int) -> None:
    _compare(stage, world, [(a, b, c) for a in KINDS for b in KINDS for c in KINDS])


def _stacked_loss(params: dict, batch: dict) -> torch.Tensor:
    h, _ = sf.scan(lambda h, w: (torch.tanh(h @ w), None), batch["x"], params["w"])
    return ((h[:, :3] - batch["y"]) ** 2).mean()


def _tp_loss(params: dict, batch: dict) -> torch.Tensor:
    h = torch.tanh(sf.pvary(batch["x"], "tp") @ params["up"].t())
    return ((sf.psum(h @ params["down"].t(), "tp") + params["shift"] - batch["y"]) ** 2).mean()


def _drawn(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=g) / 2 for name, shape in shapes.items()}


def _compositions(world: int) -> dict[str, tuple[Any, ...]]:
    """By name: loss, optimizer, parameters, options, fields of Zero, mesh."""
    odd: dict[str, Any] = {"trainable": ODD_TRAINABLE}
    adamw, dp = sf.optim.adamw(1e-2), {"dp": world}
    lamb = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.lamb(1e-2))
    labels = lambda p: sf.core.tree_map(lambda x: "a" if x.ndim > 1 else "b", p)  # noqa: E731
    mixed = sf.optim.multi_transform({"a": sf.optim.sgd(1e-3, momentum=0.9), "b": sf.optim.lion(1e-3)}, labels)
    bf16 = sf.mixed_precision(odd_loss, sf.Policy.bf16(reduce=torch.bfloat16, exceptions={"unused": torch.float32}))
    stacks = {"specs": {"w": sf.Sharding(sf.P(), stacked=True)}}
    cut = {"specs": {"up": sf.P("tp"), "down": sf.P(None, "tp"), "shift": sf.P()}}
    sizes = {"up": (7, 5), "down": (3, 7), "shift": (3,)}
    return {
        "accumulate": (sf.accumulate(sf.remat(odd_loss), 3), adamw, odd_params(), odd, {}, dp),
        "accumulate, reduced once": (sf.accumulate(odd_loss, 3), adamw, odd_params(), odd, {"accumulate": "once"}, dp),
        "lamb": (odd_loss, lamb, odd_params(), {**odd, "donate": False}, {}, dp),
        "delayed": (
            odd_loss,
            sf.optim.delayed(sf.optim.chain(sf.optim.clip_by_global_norm(0.5), adamw), 1),
            odd_params(),
            odd,
            {},
            dp,
        ),
        "rules by leaf": (odd_loss, mixed, odd_params(), {**odd, "skip_nonfinite": True}, {}, dp),
        "bf16": (sf.accumulate(bf16, 3), adamw, odd_params(), odd, {}, dp),
        "a part stays": (odd_loss, adamw, odd_params(), odd, {"optimizer_fraction": 0.5}, dp),
        "stacked": (_stacked_loss, adamw, _drawn(w=(3, 5, 5)), stacks, {}, dp),
        "tensor parallel": (_tp_loss, adamw, _drawn(**sizes), {**cut, "batch": sf.P("dp")}, {}, {"dp": 1, "tp": world}),
        "a batch that is not cut": (odd_loss, adamw, odd_params(), {**odd, "batch": sf.P()}, {}, dp),
    }


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
@distributed(world=2)
def test_compositions_have_the_bits_of_none(stage: int) -> None:
    kinds = ("disk", "host", "disk") if stage == 3 else ("host", "disk", "host")
    _compare_compositions(2, stage, [kinds], DAILY[stage])


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world=[1, 2, 4], timeout=600)
def test_compositions_have_the_bits_of_none_anywhere(world: int, stage: int) -> None:
    _compare_compositions(world, stage, PAIRS[1:])


# Others every night.
DAILY = {
    1: ["accumulate, reduced once", "lamb", "rules by leaf", "a batch that is not cut"],
    3: ["delayed", "bf16", "stacked", "tensor parallel"],
}


def _compare_compositions(
    world: int, stage: int, placements: Iterable[tuple[str, str, str]], names: Iterable[str] | None = None
) -> None:
    batches = [odd_batch(n) for n in range(3)]
    compositions = _compositions(world)
    for name in compositions if names is None else names:
        loss, optimizer, params, options, fields, shape = compositions[name]
        mesh = sf.make_mesh(shape)
        once = {k: v for k, v in fields.items() if k != "optimizer_fraction"}
        plain = sf.Zero.flat(stage=stage, persist_elements=0, bucket_bytes=64, **once)
        want = on_mesh(loss, optimizer, params, batches, mesh=mesh, zero=plain, **options)
        for kinds in placements:
            if fields.get("optimizer_fraction") and kinds[2] == "device":
                continue  # where it has no effect, it is refused
            with tempfile.TemporaryDirectory() as directory:
                zero = _zero(kinds, pathlib.Path(directory), stage=stage, **fields)
                got = on_mesh(loss, optimizer, params, batches, mesh=mesh, zero=zero, **options)
            try:
                assert_same(got, want, exact=True)
            except AssertionError as error:
                error.add_note(f"{name}, kept at {kinds}")
                raise
