"""Covers random compositions: they equal one device, or are refused with an error that is listed here.

A case is a function of its seed, which is printed with a failure; `SHARDFN_FUZZ=<seed>` runs that case, and
`SHARDFN_FUZZ=<seed>:<number>` that number of cases, from there on. Each night begins at a seed of its own.
"""

import dataclasses
import functools
import os
import pathlib
import random
import re
import secrets
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.core import MemoryKind, tree_map
from shardfn.testing import assert_same, distributed, on_mesh, one_device
from shardfn.transforms import policies

WORLDS, CASES, CHUNK = (1, 2, 3, 4), 500, 10
# Allowed refusals: a part of the message -> the reason.
REFUSALS = {
    r"has no effect": "an option that would do nothing here",
    r"would have no effect": "an option that would do nothing here",
}
POLICIES: dict[str, Any] = {
    "all": None,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots to host": policies.offload_dot_with_no_batch_dims("host"),
}
MASKS: dict[str, Callable[[Any], Any]] = {
    "matrices": lambda p: tree_map(lambda x: x.ndim > 1, p),
    "long": lambda p: tree_map(lambda x: x.ndim > 0 and x.shape[0] > 3, p),
    "odd": lambda p: tree_map(lambda x: x.numel() % 2 == 1, p),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda m: optim.sgd(0.05),
    "momentum": lambda m: optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda m: optim.adam(0.01, eps=1e-2),
    "adamw": lambda m: optim.adamw(optim.warmup_constant_schedule(0.0, 0.01, 2), eps=1e-2, weight_decay=0.1, mask=m),
    "lamb": lambda m: optim.lamb(0.01, eps=1e-2, weight_decay=0.1, mask=m),
    "masked": lambda m: optim.chain(optim.masked(optim.clip_by_global_norm(0.1), m), optim.sgd(0.05, momentum=0.5)),
    "labels": lambda m: optim.multi_transform(
        {"a": optim.adamw(0.01, eps=1e-2), "b": optim.sgd(0.05, momentum=0.9)},
        lambda p: tree_map(lambda on: "a" if on else "b", m(p)),
    ),
    "freeze": lambda m: optim.chain(optim.adam(0.01, eps=1e-2), optim.freeze(m)),
    "delayed": lambda m: optim.delayed(optim.adamw(0.01, eps=1e-2, mask=m), warmup=1),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A composition; every field is plain, so that its repr is the report's line."""

    seed: int
    world: int
    dim: int
    layers: int
    rows: int
    leaves: tuple[str, ...]
    scan: str  # "", "scan", "stacked"
    weighted: bool
    optimizer: str
    mask: str
    clip: bool
    stage: int
    persist: int
    bucket: int
    prefetch: int
    memory: tuple[MemoryKind, MemoryKind, MemoryKind]  # of params, gradients, optimizer state
    ratio: float
    chunk: int
    microbatches: int
    reduce: str
    remat: str
    where: str  # the rematerialised function: "loss" or "layer"
    offload: str
    precision: str  # float64, which separates a wrong step from rounding where terms cancel; or a policy
    jit: bool

    @staticmethod
    def of(seed: int) -> "Case":
        """The case of a seed."""
        draw = random.Random(seed)
        away = draw.random() < 0.4
        kinds: tuple[MemoryKind, ...] = ("device", "host", "disk")
        stage = draw.randrange(4)
        optimizer = draw.choice(sorted(OPTIMIZERS))
        memory: tuple[MemoryKind, MemoryKind, MemoryKind] = (
            draw.choice(kinds) if away else "device",
            draw.choice(kinds) if away else "device",
            draw.choice(kinds) if away else "device",
        )
        return Case(
            seed=seed,
            world=draw.choice(WORLDS),
            dim=draw.choice((1, 3, 4, 5, 7)),
            layers=draw.choice((1, 2, 3, 5)),
            rows=draw.choice((1, 2, 3)),
            leaves=tuple(
                n for n in ("bias", "empty", "frozen", "one", "scalar", "tied", "unused") if draw.random() < 0.5
            ),
            scan=draw.choice(("", "scan", "stacked")),
            weighted=draw.random() < 0.25,
            optimizer=optimizer,
            mask=draw.choice(sorted(MASKS)),
            clip=draw.random() < 0.3,
            stage=stage,
            persist=draw.choice((0, 0, 6, 8192)),
            bucket=draw.choice((0, 64, 1 << 20)),
            prefetch=draw.choice((0, 150, 32 << 20)),
            memory=memory,
            ratio=0.5 if memory[2] != "device" and draw.random() < 0.25 else 1.0,
            chunk=draw.choice((64, 1 << 20)) if away else 64 << 20,
            microbatches=draw.choice((1, 1, 2, 3)),
            reduce=draw.choice(("each", "once")),
            remat=draw.choice(("", "", *sorted(POLICIES))),
            where=draw.choice(("loss", "layer")),
            offload=draw.choice(("", "", "", "host")),
            precision=draw.choice(("float64", "float64", "float64", "bf16")),
            jit=draw.random() < 0.2,
        )


def make_params(case: Case) -> Any:
    g, d, num = torch.Generator().manual_seed(case.seed % 1000), case.dim, case.layers

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) / max(1, d) ** 0.5).to(dtype_of(case))

    params: dict[str, Any] = {"w": normal(4, d), "out": normal(d, 3)}
    stacked = {"a": normal(num, d, d), "c": normal(num, d)}
    params["blocks"] = stacked if case.scan else [tree_map(lambda x, i=i: x[i], stacked) for i in range(num)]
    shapes = {
        "bias": (d,),
        "empty": (0, d),
        "frozen": (d, d),
        "one": (1,),
        "scalar": (),
        "tied": (d, d),
        "unused": (5, 2),
    }
    return params | {name: normal(*shapes[name]) for name in case.leaves}


def dtype_of(case: Case) -> torch.dtype:
    return torch.float32 if case.precision == "bf16" else torch.float64


def layer(h: Tensor, w: Any) -> Tensor:
    return h + 0.5 * torch.tanh(h @ w["a"] + w["c"])


def make_loss(case: Case, plain: bool) -> Callable[..., Any]:
    """The loss; `plain` has neither scan nor remat."""
    step = layer if plain or case.where == "loss" or not case.remat else sf.remat(layer, POLICIES[case.remat])

    def loss(params: Any, batch: Any) -> Any:
        h = torch.tanh(batch["x"] @ params["w"])
        h = h + params["bias"] if "bias" in params else h
        h = h + h @ params["tied"] @ params["tied"].t() * 0.1 if "tied" in params else h
        if case.scan and not plain:
            h, _ = sf.scan(lambda h, w: (step(h, w), None), h, params["blocks"])
        else:
            num = case.layers
            blocks = (
                [tree_map(lambda x, i=i: x[i], params["blocks"]) for i in range(num)] if case.scan else params["blocks"]
            )
            for block in blocks:
                h = step(h, block)
        h = h @ params["frozen"] if "frozen" in params else h
        h = h * params["scalar"].cos() if "scalar" in params else h
        h = h + params["one"] if "one" in params else h
        error = (h @ params["out"] - batch["y"]).square().mean(1)
        error = error + params["empty"].sum() if "empty" in params else error
        return sf.WeightedMean((error * batch["n"]).sum(), batch["n"].sum()) if case.weighted else error.mean()

    return loss


def make_batches(case: Case) -> list[Any]:
    g, num = torch.Generator().manual_seed(case.seed % 997), case.world * case.microbatches * case.rows
    out = []
    for _ in range(3):
        x, y = torch.randn(num, 4, generator=g), torch.randn(num, 3, generator=g)
        n = torch.randint(1, 4, (num,), generator=g).float()
        out.append(tree_map(lambda t: t.to(dtype_of(case)), {"x": x, "y": y, "n": n}))
    return out


def transformed(case: Case, loss: Any) -> Any:
    loss = sf.remat(loss, POLICIES[case.remat]) if case.remat and case.where == "loss" else loss
    loss = sf.offload(loss, policies.offload_larger_than(1)) if case.offload else loss
    loss = sf.mixed_precision(loss, sf.Policy.bf16()) if case.precision == "bf16" else loss
    loss = sf.accumulate(loss, case.microbatches) if case.microbatches > 1 else loss
    return sf.jit(loss, backend="graph") if case.jit else loss


def run(case: Case, mesh: Any, directory: str) -> None:
    """Runs a case; raises if it is wrong, or refused."""
    tx = OPTIMIZERS[case.optimizer](MASKS[case.mask])
    tx = optim.chain(optim.clip_by_global_norm(0.5), tx) if case.clip else tx
    params, batches = make_params(case), make_batches(case)
    trainable = {name: name != "frozen" for name in params}
    params_at, grads_at, optimizer_at = case.memory
    options: dict[str, Any] = {"directory": directory} if "disk" in case.memory else {}
    zero = sf.Zero.flat(
        stage=case.stage, persist_elements=case.persist, bucket_bytes=case.bucket, prefetch_bytes=case.prefetch,
        accumulate=case.reduce, params=params_at, grads=grads_at, optimizer=optimizer_at,
        optimizer_fraction=case.ratio, chunk_bytes=case.chunk, **options,
    )  # fmt: skip
    specs = {"blocks": sf.Sharding(P(), stacked=case.scan == "stacked")} if case.scan == "stacked" else {}
    got = on_mesh(
        transformed(case, make_loss(case, plain=False)), tx, params, batches, mesh=mesh, zero=zero,
        specs={name: specs.get(name, P()) for name in params}, trainable=trainable,
    )  # fmt: skip
    plain = make_loss(case, plain=True)
    half = case.precision == "bf16"
    want = one_device(
        sf.mixed_precision(plain, sf.Policy.bf16()) if half else plain, tx, params, batches, trainable=trainable,
        parts=case.world * case.microbatches if half else 1,
    )  # fmt: skip
    # Norms and schedules are of 32 bits, also for leaves of 64.
    narrow = case.clip or case.optimizer in ("adamw", "lamb", "masked")
    assert_same(got, want, computed=torch.bfloat16 if half else torch.float32 if narrow else None)


def outcome(case: Case, mesh: Any, directory: str) -> str:
    """ "equal", "refused: ..." with the reason, or the error."""
    try:
        run(case, mesh, directory)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        known = next((why for part, why in REFUSALS.items() if re.search(part, text)), None)
        if known is not None and isinstance(error, ValueError | NotImplementedError):
            return f"refused: {known}"
        trace = "".join(traceback.format_exception(error)[-8:]) if not isinstance(error, AssertionError) else ""
        return f"{text[:1500]}\n{trace[-1500:]}"
    return "equal"


def check(cases: list[Case], world: int, tmp_path: pathlib.Path) -> Counter[str]:
    mesh, seen, wrong = sf.make_mesh({"dp": world}), Counter[str](), []
    for case in cases:
        said = outcome(case, mesh, str(tmp_path / str(case.seed)))
        good = said == "equal" or said.startswith("refused: ")
        seen[said if good else "wrong"] += 1
        if not good:
            wrong.append(f"SHARDFN_FUZZ={case.seed}  {case}\n    {said}")
            mesh = sf.make_mesh({"dp": world})  # a step that ended half done must not affect other cases
    assert not wrong, f"{len(wrong)} of {len(cases)} compositions:\n" + "\n".join(wrong)
    return seen


@functools.cache
def night() -> list[Case]:
    """The cases of this night, or those asked for."""
    first, _, num = os.environ.get("SHARDFN_FUZZ", f"{secrets.randbelow(1 << 31)}:{CASES}").partition(":")
    return [Case.of(int(first) + i) for i in range(int(num or 1))]


@distributed(world=WORLDS, timeout=600)
def fuzz(cases: list[Case], tmp_path: pathlib.Path, world: int) -> Counter[str]:
    return check(cases, world, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(-(-CASES // CHUNK // len(WORLDS))))
@pytest.mark.parametrize("number", WORLDS)
def test_random_compositions_equal_one_device(part: int, number: int, tmp_path: pathlib.Path) -> None:
    cases = [case for case in night() if case.world == number][part :: -(-CASES // CHUNK // len(WORLDS))]
    if cases:
        print(f"\nSHARDFN_FUZZ={night()[0].seed}:{len(night())}", fuzz(cases, tmp_path, world=number)[0])


@pytest.mark.nightly
@distributed(world=3)
def test_cases_found_at_night(tmp_path: pathlib.Path) -> None:
    """One rank has nothing of a bias, so that its graph gathers it before it reduces anything."""
    assert check([Case.of(519003897)], 3, tmp_path)["equal"] == 1


@pytest.mark.nightly
@distributed(world=2)
def test_a_scan_that_is_computed_again_saves_the_tensors_of_its_forward(tmp_path: pathlib.Path) -> None:
    """Three captured microbatches of a scan under remat and offload: the second knew the layers of the first."""
    assert check([Case.of(1899771216)], 2, tmp_path)["equal"] == 1


@distributed(world=2)
def test_a_few_compositions_equal_one_device(tmp_path: pathlib.Path) -> None:
    some = [case for case in map(Case.of, range(40)) if case.world == 2][:6]
    assert check(some, 2, tmp_path)["equal"] >= 4


def test_a_case_is_a_function_of_its_seed() -> None:
    assert [Case.of(seed) for seed in range(50)] == [Case.of(seed) for seed in range(50)]
    assert {Case.of(seed).world for seed in range(50)} == set(WORLDS)
