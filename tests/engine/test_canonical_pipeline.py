"""Covers canonical sums of pipelines: the bits of one device on 1 to 4 stages and 1 to 4 parts of the batch."""

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, PipelineState, Sharding, WeightedMean, optim, schedules
from shardfn.core import tree_leaves, tree_map
from shardfn.modules import from_module
from shardfn.testing import distributed

CHUNKS, V, D, T = 4, 11, 6, 3
ROWS = 6 * CHUNKS  # of a global batch: in 1, 2, 3 or 6 microbatches a chunk


def _draw(seed: int) -> Callable[..., Tensor]:
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=g) / 2


def _params(stacks: int = 1) -> Any:
    draw = _draw(0)
    made = [{"w": draw(5 - stacks + c, D, D), "b": draw(5 - stacks + c, D)} for c in range(stacks)]
    return {"embed": draw(V, D), "blocks": made if stacks > 1 else made[0], "scale": draw(D), "unused": draw(2)}


def _batch(n: int) -> Any:
    g = torch.Generator().manual_seed(n)
    return {"tokens": torch.randint(V, (ROWS, T), generator=g), "weight": torch.rand(ROWS, generator=g)}


def _first(p: Any, batch: Any) -> Tensor:
    return p["embed"][batch["tokens"]]


def _block(p: Any, h: Tensor) -> Tensor:
    return h + torch.tanh(h @ p["w"] + p["b"])


def _scores(p: Any, h: Tensor, batch: Any) -> Tensor:
    logits = (h * p["scale"]) @ p["embed"].t()  # tied
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="none")


def _mean(p: Any, h: Tensor, batch: Any) -> Tensor:
    return _scores(p, h, batch).mean()


def _weighted(p: Any, h: Tensor, batch: Any) -> Any:
    by = batch["weight"].repeat_interleave(T)
    return WeightedMean((_scores(p, h, batch) * by).sum(), by.sum()), {"size": h.square().mean()}


def _norm(s: Any, h: Tensor) -> tuple[Tensor, Any]:
    mean = 0.5 * s["mean"] + 0.5 * h.detach().mean((0, 1))
    return h - mean, {"mean": mean, "seen": s["seen"] + len(h)}


def _first_kept(p: Any, s: Any, batch: Any) -> Any:
    return _norm(s, _first(p, batch))


def _block_kept(p: Any, s: Any, h: Tensor) -> Any:
    normed, s = _norm(s, h)
    return _block(p, normed), s


def _last_kept(p: Any, s: Any, h: Tensor, batch: Any) -> Any:
    normed, s = _norm(s, h)
    return _mean(p, normed, batch), s


def _state(layers: int) -> PipelineState:
    def make(*rows: int) -> Any:
        return {"mean": torch.zeros(*rows, D), "seen": torch.zeros(rows, dtype=torch.int64)}

    return PipelineState(make(), make(layers), make())


def _functions() -> Any:
    draw = _draw(3)
    blocks = [{"w": draw(D, D), "b": draw(D)}, {"w": draw(D, D), "b": draw(D)}, (), {"w": draw(D, D), "b": draw(D)}]
    return {"embed": draw(V, D), "blocks": blocks, "scale": draw(D)}


def _centre(p: Any, h: Tensor) -> Tensor:
    del p
    return h - h.mean(-1, keepdim=True)


def _shared(p: Any) -> Any:
    """The leaves of each function. The first and the third share their weights."""
    return [p["blocks"][0], p["blocks"][1], p["blocks"][2], p["blocks"][0], p["blocks"][3]]


@functools.cache
def _gpt2() -> tuple[Any, Any, str]:
    import transformers  # seconds, which the other cases need not wait

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=8, n_layer=4, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    path = "transformer.h"
    params, apply = from_module(transformers.GPT2LMHeadModel(config).eval(), layers=path)
    return params, apply, path


def _run_gpt2(params: Any, batch: Any) -> Tensor:
    return _gpt2()[1](params, input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False).loss


# Kind of loss, microbatches a chunk, schedule, wrap, and options of `Zero`.
Case = tuple[str, int, str, str, tuple[tuple[str, Any], ...]]


def _made(kind: str, m: int, schedule: str) -> tuple[Any, Any, Any]:
    """Parameters, their specs and the loss."""
    how: dict[str, Any] = {"num_microbatches": m, "schedule": schedule}
    if kind == "module":
        params, apply, path = _gpt2()
        specs = {key: P("pp") if key == path else P() for key in params}
        return params, specs, sf.pipeline_module(_run_gpt2, apply, **how)
    if kind == "functions":
        layers = [_block, sf.remat(_block), _centre, _block, _block]
        return _functions(), P(), sf.pipeline(_first, layers, _mean, blocks=_shared, **how)
    stacks = 2 if schedule == "interleaved" else 1
    params, cut = _params(stacks), Sharding(P("pp"), stacked=True) if kind == "stacked" else P("pp")
    specs = tree_map(lambda _: P(), params) | {"blocks": tree_map(lambda _: cut, params["blocks"])}
    if kind == "kept":
        return params, specs, sf.pipeline(_first_kept, _block_kept, _last_kept, **how)
    last = _weighted if kind == "weighted" else _mean
    loss = sf.pipeline(_first, sf.remat(_block), last, num_chunks=stacks, **how)
    return params, specs, sf.mixed_precision(loss, sf.Policy.bf16()) if kind == "bf16" else loss


def _train(case: Case, shape: dict[str, int], directory: str, steps: int = 3) -> list[Tensor]:
    """Parameters, states and metrics after some steps, on a mesh of this shape."""
    kind, m, schedule, wrap, options = case
    mesh = sf.make_mesh({"dp": 1, "pp": 1} | shape) if shape else sf.make_mesh(alone=True)
    where = dict(options)
    if "disk" in where.values():
        where["disk"] = sf.Disk(tempfile.mkdtemp(dir=directory))
    zero = sf.Zero(**{"persist_elements": 0, "reduction": "canonical", "reduction_chunks": CHUNKS, **where})
    params, specs, loss = _made(kind, m, schedule)
    loss = sf.jit(loss, backend="graph") if wrap == "jit" else loss
    rule = optim.lamb(1e-2) if kind == "stacked" else optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    kept = kind == "kept"
    step = sf.sharded_step(
        loss, rule, mesh=mesh, specs=specs, batch=P("dp"), zero=zero, has_aux=kind == "weighted", has_state=kept,
        state_specs=PipelineState(P(), P("pp"), P()) if kept else P(),
    )  # fmt: skip
    state = step.init(params, model_state=_state(len(params["blocks"]["w"])) if kept else ())
    metrics = []
    for n in range(steps):
        state, found = step(state, tree_map(lambda x: x[step.rows(ROWS)], _batch(n)))
        metrics += [found[k].float() for k in sorted(found) if k in ("loss", "grad_norm", "size")]
    trees = (state.params, state.opt_state, state.model_state)
    leaves = [x.full_tensor() for x in tree_leaves(trees) if hasattr(x, "full_tensor")]
    step.close()
    return [*leaves, torch.stack(metrics)]


@distributed(world=1, timeout=800)
def on_1(cases: Sequence[Case], shape: dict[str, int], directory: str) -> list[list[Tensor]]:
    return [_train(case, shape, directory) for case in cases]


@distributed(world=2, timeout=800)
def on_2(cases: Sequence[Case], shape: dict[str, int], directory: str) -> list[list[Tensor]]:
    return [_train(case, shape, directory) for case in cases]


@distributed(world=3, timeout=800)
def on_3(cases: Sequence[Case], shape: dict[str, int], directory: str) -> list[list[Tensor]]:
    return [_train(case, shape, directory) for case in cases]


@distributed(world=4, timeout=800)
def on_4(cases: Sequence[Case], shape: dict[str, int], directory: str) -> list[list[Tensor]]:
    return [_train(case, shape, directory) for case in cases]


# Results of one device, for all tests of a session.
_KNOWN: dict[Case, list[Tensor]] = {}


def _compare(cases: Sequence[Case], shape: dict[str, int], directory: Any) -> None:
    new = [case for case in cases if case not in _KNOWN]
    if new:
        _KNOWN.update(zip(new, on_1(new, {}, str(directory))[0], strict=True))
    run: Any = {2: on_2, 3: on_3, 4: on_4}[math.prod(shape.values())]
    for rank, found in enumerate(run(cases, shape, str(directory))):
        for case, got in zip(cases, found, strict=True):
            for i, (x, y) in enumerate(zip(_KNOWN[case], got, strict=True)):
                assert torch.equal(x, y), (case, shape, rank, i, (x.double() - y.double()).abs().max())


DISK = (("stage", 2), ("optimizer", "disk"), ("grads", "host"))
KINDS = ("mean", "weighted", "kept", "functions", "module", "stacked", "bf16")
CASES: list[Case] = [
    *((kind, 2, "1f1b", "", (("stage", stage),)) for stage in (0, 3) for kind in KINDS),
    *(("mean", m, schedule, "", (("stage", 1),)) for schedule in ("gpipe", "1f1b") for m in (1, 3, 6)),
    *((kind, 2, "1f1b", "", DISK) for kind in ("mean", "functions")),
    ("mean", 3, "interleaved", "", (("stage", 2),)),
]
JITTED: list[Case] = [(kind, 2, "1f1b", "jit", (("stage", 3),)) for kind in KINDS if kind != "bf16"]
# The cases of each shape. Four stages have more layers than a chunk of the interleaved schedule.
RUNS: dict[str, tuple[dict[str, int], list[Case]]] = {
    "2 stages": ({"pp": 2}, CASES),
    "2 stages, jit": ({"pp": 2}, JITTED),
    "3 stages": ({"pp": 3}, CASES[1:-1:3]),
    "3 parts": ({"dp": 3}, CASES[::3]),
    "4 stages": ({"pp": 4}, CASES[:-1:2]),
    "2 stages, 2 parts": ({"dp": 2, "pp": 2}, CASES[1::2]),
    "2 stages, 2 parts, jit": ({"pp": 2, "dp": 2}, JITTED),
}


def test_two_stages_have_the_bits_of_one_device(tmp_path: Any) -> None:
    cases = [("weighted", 3, "1f1b", "", (("stage", 1),)), ("kept", 2, "1f1b", "", (("stage", 0),))]
    _compare(cases, {"pp": 2}, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("run", RUNS)
def test_any_stages_and_ranks_have_the_bits_of_one_device(run: str, tmp_path: Any) -> None:
    shape, cases = RUNS[run]
    _compare(cases, shape, tmp_path)


def _add_tree(parts: Sequence[Tensor]) -> Tensor:
    half = len(parts) // 2
    return _add_tree(parts[:half]) + _add_tree(parts[half:]) if half else parts[0]


def _slow_gradients(params: Any, batch: Any, m: int) -> Any:
    """Gradients by definition: of each function's own leaves, each microbatch on its own."""
    sums: list[list[list[Tensor]]] = []
    for chunk in range(CHUNKS):
        rows = tree_map(lambda x, c=chunk: x.chunk(CHUNKS)[c], batch)
        of_chunk: list[list[Tensor]] = []
        for k in range(m):
            part = tree_map(lambda x, k=k: x.chunk(m)[k], rows)
            first, blocks, last = (tree_map(lambda x: x.clone().requires_grad_(), params) for _ in range(3))
            h = _first(first, part)
            for w, b in zip(blocks["blocks"]["w"], blocks["blocks"]["b"], strict=True):
                h = _block({"w": w, "b": b}, h)
            wanted = [first["embed"], last["embed"], *blocks["blocks"].values(), last["scale"]]
            seed = torch.tensor(1 / (CHUNKS * m))
            of_chunk.append([*torch.autograd.grad(_mean(last, h, part), wanted, seed)])
        sums.append([functools.reduce(torch.add, column) for column in zip(*of_chunk, strict=True)])
    first, last, w, b, scale = (_add_tree(column) for column in zip(*sums, strict=True))
    return {"embed": first + last, "blocks": {"w": w, "b": b}, "scale": scale}


@pytest.mark.parametrize("m", [1, 3])
def test_gradients_are_sums_by_function_and_chunk(m: int) -> None:
    params, specs, loss = _made("mean", m, "1f1b")
    del params["unused"], specs["unused"]
    zero = sf.Zero(reduction="canonical", reduction_chunks=CHUNKS)
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=sf.make_mesh(alone=True), specs=specs, batch=P("dp"), zero=zero)
    grads, _ = step.gradients(step.init(params), _batch(0))
    want = _slow_gradients(params, _batch(0), m)
    for x, y in zip(tree_leaves(grads), tree_leaves(want), strict=True):
        assert torch.equal(x.full_tensor(), y)


@pytest.mark.parametrize("name", ["zb-h1", "backwards reversed"])
@distributed(world=2)
def test_other_orders_of_backwards_are_refused(name: str) -> None:
    schedule: Any = name
    if name != "zb-h1":
        rows = (schedules.parse("F0 F1 F2 F3 B3 B2 B1 B0"),) * 2
        schedule = schedules.PipelineSchedule(name, CHUNKS, ((0,), (1,)), rows)
    params, specs, loss = _made("mean", 1, schedule)
    zero = sf.Zero(reduction="canonical", reduction_chunks=CHUNKS)
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=sf.make_mesh({"pp": 2}), specs=specs, batch=P("dp"), zero=zero)
    with pytest.raises((ValueError, sf.RankError), match="backwards are split, or come in another order"):
        step(step.init(params), _batch(0))
