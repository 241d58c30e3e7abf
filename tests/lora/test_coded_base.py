"""Covers frozen weights in codes: adapters beside them train as beside the decoded weights, and codes never change."""

import functools
import pathlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.core import tree_leaves, tree_map
from shardfn.kernels import block_bytes
from shardfn.leaves import LeafLayout
from shardfn.lora import LoRA
from shardfn.memory import QuantizedBlocks
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

D, F_, L, B = 64, 40, 3, 12  # rows of 64 and of 40 elements, which groups of 32 do not divide
DTYPE = torch.float64  # of the sums; codes have values of float32
NIGHTLY = pytest.mark.nightly
CODES = ["int4", pytest.param("int8", marks=NIGHTLY)]
TARGETS = ["up$", "down"]


def rounded(w: Tensor, codes: Any) -> Tensor:
    """The values of a weight's codes."""
    return QuantizedBlocks.of(w, codes).load()


def params_of(codes: Any = None) -> Any:
    """A stack of layers and a head; their values are those of codes, if these are given."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        w = torch.randn(shape, generator=g, dtype=DTYPE) / 4
        return w if codes is None else rounded(w, codes)

    return {
        "blocks": {"up": draw(L, F_, D), "down": draw(L, D, F_)},
        "head": torch.randn(4, D, generator=g, dtype=DTYPE),
    }


def loss_of(p: Any, batch: Any, axis: str | None = None) -> Tensor:
    """A residual network, whose inner features an axis may cut."""

    def block(h: Tensor, w: Any) -> tuple[Tensor, None]:
        y = torch.tanh((sf.pvary(h, axis) if axis else h) @ w["up"].mT) @ w["down"].mT
        return h + (sf.psum(y, axis) if axis else y), None

    return (sf.scan(block, batch["x"], p["blocks"])[0] @ p["head"].mT - batch["y"]).square().mean()


def batches() -> list[Any]:
    """Three global batches."""
    g = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(B, D, generator=g, dtype=DTYPE), "y": torch.randn(B, 4, generator=g, dtype=DTYPE)}
        for _ in range(3)
    ]


def with_adapters(params: Any, codes: Any, specs: Any = P(), **options: Any) -> tuple[LoRA, Any]:
    """Adapters as after some steps."""
    lora = LoRA.of(params, TARGETS, rank=2, specs=specs, quantization=codes, **options)
    adapters = lora.init(sf.key(3), params=params, dtype=DTYPE)
    for i, ab in enumerate(adapters.values()):
        ab["b"] = torch.randn(ab["b"].shape, generator=torch.Generator().manual_seed(i), dtype=DTYPE) / 4
    return lora, {"base": params, "lora": adapters}


STACKED = {"blocks": sf.Sharding(P(), stacked=True), "head": P()}


@pytest.mark.day("plain-int4")
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("how", ["plain", "remat", "graph", pytest.param("inductor", marks=NIGHTLY)])
def test_it_has_the_bits_of_the_decoded_base(how: str, codes: Any) -> None:
    wrap: Any = {"plain": lambda f: f, "remat": sf.remat}.get(how) or functools.partial(sf.jit, backend=how)
    (lora, tree), (plain, decoded) = (
        with_adapters(params_of(), codes, STACKED),
        with_adapters(params_of(codes), None, STACKED),
    )
    for a, b in zip(tree_leaves(tree["base"]["blocks"]), tree_leaves(decoded["base"]["blocks"]), strict=True):
        assert torch.equal(rounded(a, codes), b) and not torch.equal(a, b)
    out = []
    for one, given in ((lora, tree), (plain, decoded)):
        step = sf.sharded_step(wrap(one.adapt(loss_of)), optim.adamw(1e-2), specs=one.specs, trainable=one.trainable)
        state = step.init(given)
        grads, metrics = step.gradients(state, batches()[0])
        out.append([metrics["loss"], *(x.local for x in tree_leaves(grads))])
        for batch in batches():
            state, metrics = step(state, batch)
            out[-1].append(metrics["loss"])
        out[-1] += tree_leaves(sf.unshard(state.params))
    for a, b in zip(*out, strict=True):
        assert torch.equal(a, b)


@pytest.mark.nightly
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("stage", [1, 3, 0, 2])
@pytest.mark.parametrize("capture", [False, True])
@distributed(world=[2, 3])
def test_sharded_it_equals_one_device(world: int, capture: bool, stage: int, codes: Any) -> None:
    mesh, params = sf.make_mesh({"dp": world}, device="cpu"), params_of(codes)
    for specs in (P(), STACKED):
        lora, tree = with_adapters(params, codes, specs)
        loss = lora.adapt(sf.remat(loss_of) if specs == P() else loss_of)
        assert_parity(
            sf.jit(loss, backend="graph") if capture else loss, optim.adamw(1e-2), tree, batches(), mesh=mesh,
            reference=with_adapters(params, None)[0].adapt(loss_of), specs=lora.specs, trainable=lora.trainable,
            zero=Zero(stage=stage, persist_elements=0),
        )  # fmt: skip


@pytest.mark.nightly
@distributed(world=4)
def test_beside_leaves_that_are_cut() -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu")
    specs = {"blocks": {"up": P(None, "tp"), "down": P()}, "head": P()}
    params = params_of("int8")
    g = torch.Generator().manual_seed(5)
    params["blocks"] = {"up": rounded(torch.randn(L, 64, D, generator=g, dtype=DTYPE) / 4, "int8"),
                        "down": rounded(torch.randn(L, D, 64, generator=g, dtype=DTYPE) / 4, "int8")}  # fmt: skip
    specs["blocks"]["down"] = P(None, None, "tp")
    lora, tree = with_adapters(params, "int8", specs)
    assert_parity(
        lora.adapt(functools.partial(loss_of, axis="tp")), optim.adamw(1e-2), tree, batches(), mesh=mesh,
        reference=with_adapters(params, None)[0].adapt(loss_of), specs=lora.specs, trainable=lora.trainable,
        batch=P("dp"), zero=Zero(stage=3, persist_elements=0),
    )  # fmt: skip


def in_stages(codes: Any) -> tuple[LoRA, Any, Any, Any]:
    """Adapters of the layers of a pipeline, the parameters with them, its loss, and that of one device."""
    params = params_of(codes)
    lora, tree = with_adapters(params["blocks"], codes, P("pp"))

    def block(p: Any, h: Tensor) -> Tensor:
        w = lora.apply(p["base"], p["lora"])
        return h + torch.tanh(h @ w["up"].mT) @ w["down"].mT

    def last(p: Any, h: Tensor, batch: Any) -> Tensor:
        return (h @ p["head"].mT - batch["y"]).square().mean()

    def plain(p: Any, batch: Any) -> Tensor:
        blocks = p["blocks"]
        return loss_of({"blocks": lora.apply(blocks["base"], blocks["lora"]), "head": p["head"]}, batch)

    piped = sf.pipeline(lambda p, batch: batch["x"], block, last, num_microbatches=2)
    return lora, {"blocks": tree, "head": params["head"]}, piped, plain


@pytest.mark.nightly
@pytest.mark.parametrize("codes", CODES)
@distributed(world=[2, 3])
def test_in_the_stages_of_a_pipeline(world: int, codes: Any, tmp_path: pathlib.Path) -> None:
    lora, tree, piped, plain = in_stages(codes)
    mesh, specs = sf.make_mesh({"pp": world}, device="cpu"), {"blocks": lora.specs, "head": P()}
    how: dict[str, Any] = {"specs": specs, "trainable": {"blocks": lora.trainable, "head": False}, "batch": P()}
    assert_parity(piped, optim.adamw(1e-2), tree, batches(), mesh=mesh, reference=plain, **how)
    step = sf.sharded_step(piped, optim.adamw(1e-2), mesh=mesh, **how)
    state, _ = step(step.init(tree), batches()[0])
    up = state.params["blocks"]["base"]["up"]
    assert up.sharding.quantization == codes and up.held.nbytes <= -(-L // world) * F_ * block_bytes(D, codes)
    sf.checkpoint.save(tmp_path, state, step=1)
    again = sf.checkpoint.restore(tmp_path, step.init(tree_map(torch.zeros_like, tree))).tree
    a, b = (step(x, batches()[1]) for x in (state, again))
    for x, y in zip(tree_leaves(sf.unshard(a)), tree_leaves(sf.unshard(b)), strict=True):
        assert torch.equal(x, y)


@distributed(world=2)
def test_ranks_keep_and_gather_codes() -> None:
    mesh, params = sf.make_mesh({"dp": 2}, device="cpu"), params_of()
    lora, tree = with_adapters(params, "int4")
    step = sf.sharded_step(
        lora.adapt(loss_of), optim.adamw(1e-2), mesh=mesh, specs=lora.specs, trainable=lora.trainable,
        zero=Zero(stage=3, persist_elements=0),
    )  # fmt: skip
    state = step.init(tree)
    up = state.params["base"]["blocks"]["up"]
    assert up.spec != P() and up.sharding.quantization == "int4"
    whole = L * F_ * block_bytes(D, "int4")
    assert 0 < up.held.nbytes <= whole * 2 // 3
    want = up.full_tensor()
    assert torch.equal(want, rounded(params["blocks"]["up"], "int4"))


@pytest.mark.day("1-device", "1-host")
@pytest.mark.parametrize("kind", ["device", "host"])
@distributed(world=[1, 2])
def test_checkpoints_keep_the_codes(world: int, kind: Any, tmp_path: pathlib.Path) -> None:
    mesh, params = sf.make_mesh({"dp": world}, device="cpu"), params_of()
    lora, tree = with_adapters(params, "int4")
    made = functools.partial(sf.sharded_step, lora.adapt(loss_of), optim.adamw(1e-2), mesh=mesh)
    made = functools.partial(made, specs=lora.specs, trainable=lora.trainable)
    step, other = (made(zero=Zero(stage=n, persist_elements=0, params=kind)) for n in (3, 1))
    mine = tree_map(lambda x: x.chunk(world)[mesh.coords["dp"]], batches())
    state, _ = step(step.init(tree), mine[0])
    sf.checkpoint.save(tmp_path, state, step=1)
    again = sf.checkpoint.restore(tmp_path, other.init(tree_map(torch.zeros_like, tree))).tree
    for a, b in zip(tree_leaves(sf.unshard(again)), tree_leaves(sf.unshard(state)), strict=True):
        assert torch.equal(a, b)
    up = again.params["base"]["blocks"]["up"]
    assert up.sharding.quantization == "int4" and up.memory_kind == kind
    assert torch.equal(up.held.blocks, QuantizedBlocks.of(params["blocks"]["up"], "int4").blocks)
    assert torch.equal(*(one(x, mine[1])[1]["loss"] for one, x in ((step, state), (other, again))))
    [path] = [path for path in sf.checkpoint.stored(tmp_path) if path.endswith("['up']")]
    kept = sf.checkpoint.stored(tmp_path)[path]
    assert (kept.dtype, tuple(kept.shape)) == (torch.uint8, (L, F_, block_bytes(D, "int4")))


def test_layers_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the forward and once for the backward: whole weights do not wait in between."""
    alive, most = weakref.WeakSet[Tensor](), list[int]()

    def seen(self: LeafLayout, x: Tensor) -> Tensor:
        out = opened(self, x)
        if out is not x:
            alive.add(out)
            most.append(len(alive))
        return out

    opened = LeafLayout.opened
    monkeypatch.setattr(LeafLayout, "opened", seen)
    lora, tree = with_adapters(params_of(), "int4", STACKED)
    zero = Zero(pace=sf.Pace(prefetch_bytes=0))
    step = sf.sharded_step(
        lora.adapt(loss_of), optim.adamw(1e-2), specs=lora.specs, trainable=lora.trainable, zero=zero
    )
    step(step.init(tree), batches()[0])
    assert len(most) in (4 * L - 2, 4 * L - 1, 4 * L) and max(most) <= 2


@pytest.mark.nightly
def test_the_engine_serves_the_trained_codes() -> None:
    """Rows of a trained base are the blocks that the decoder takes, and adding them changes no value."""
    config = gpt.Config(vocab_size=13, num_layers=1, d_model=64, num_heads=2, max_len=16, batch_invariant=True)
    params: Any = gpt.init(config, sf.key(0))
    lora = LoRA.of(params, [r"\.w[qv]$"], rank=2, quantization="int4")
    step = sf.sharded_step(
        lora.adapt(functools.partial(gpt.loss, config)), optim.adamw(1e-2), specs=lora.specs, trainable=lora.trainable
    )
    state = step.init({"base": params, "lora": lora.init(sf.key(1))})
    state, _ = step(state, {"tokens": torch.arange(12).view(2, 6)})
    base = tree_map(lambda x: x.held.blocks if isinstance(x.held, QuantizedBlocks) else x.local, state.params["base"])
    greedy = sf.inference.Sampling(max_tokens=4, temperature=0.0)
    [got] = sf.inference.Engine(sf.inference.decoder(config), base).generate([[1, 2, 3]], greedy)
    [want] = sf.inference.Engine(sf.inference.decoder(config), sf.unshard(state.params["base"])).generate(
        [[1, 2, 3]], greedy
    )
    assert base["blocks"][0]["wq"].dtype == torch.uint8 and (got.tokens, got.logprobs) == (want.tokens, want.logprobs)


@pytest.mark.day("1")
@distributed(world=[1, 2])
def test_refusals(world: int) -> None:
    mesh, params = sf.make_mesh({"dp": world}, device="cpu"), params_of()
    lora, tree = with_adapters(params, "int4")
    made = functools.partial(sf.sharded_step, lora.adapt(loss_of), optim.adamw(1e-2), mesh=mesh)
    up = r"params\['base'\]\['blocks'\]\['up'\] of shape \(3, 40, 64\)"
    with pytest.raises(
        ValueError, match=rf"{up} is trained, and quantization='int4' would round each update away; freeze it"
    ):
        made(specs=lora.specs, trainable=True).init(tree)
    disk = Zero(stage=3, params="disk", disk=sf.Disk("/nowhere"), persist_elements=0)
    with pytest.raises(
        ValueError, match=rf"{up} would be on disk; quantization='int4' is kept on the device or on the host"
    ):
        made(specs=lora.specs, trainable=lora.trainable, zero=disk).init(tree)
    wrong = sf.Sharding(quantization="int8")
    object.__setattr__(wrong, "quantization", "int3")
    odd = {"base": wrong, "lora": P()}
    with pytest.raises(ValueError, match=rf"{up} quantization must be one of \('int8', 'int4'\), got 'int3'"):
        made(specs=odd, trainable=lora.trainable).init(tree)
    with pytest.raises(
        ValueError, match=r"\['w'\] of shape \(4,\) is torch.int64, which is not rounded; remove quantization"
    ):
        sf.sharded_step(
            lambda p, x: x.sum(), optim.sgd(1.0), mesh=mesh, specs={"w": sf.Sharding(quantization="int8"), "v": P()}
        ).init({"w": torch.arange(4), "v": torch.ones(2)})
    plain = made(specs=with_adapters(params, None)[0].specs, trainable=lora.trainable)
    state = plain.init(tree)
    with pytest.raises(
        ValueError, match=r"is kept as P\(\) at 'device'; here it is P\(\) at 'device' quantized as int4"
    ):
        made(specs=lora.specs, trainable=lora.trainable)(state, batches()[0])


@distributed(world=2)
def test_a_cut_between_elements_that_share_a_scale_is_refused() -> None:
    mesh, params = sf.make_mesh({"tp": 2}, device="cpu"), params_of()
    lora = LoRA.of(
        params,
        ["down"],
        rank=2,
        quantization="int4",
        specs={"blocks": {"up": P(), "down": P(None, None, "tp")}, "head": P()},
    )
    step = sf.sharded_step(
        lora.adapt(loss_of), optim.adamw(1e-2), mesh=mesh, specs=lora.specs, trainable=lora.trainable
    )
    words = r"has spec P\(None, None, 'tp'\), whose 2 ranks do not cut its last dim of 40 between groups of 32"
    with pytest.raises(ValueError, match=words):
        step.init({"base": params, "lora": lora.init(sf.key(0))})


def test_a_resumed_state_has_the_codes_of_the_commit(tmp_path: pathlib.Path) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return (x @ p["base"] @ p["w"]).square().mean()

    def make() -> Any:
        home = Zero(3, persist_elements=0, optimizer="disk", disk=sf.Disk(str(tmp_path)))
        train, specs = {"base": False, "w": True}, {"base": sf.Sharding(quantization="int4"), "w": P()}
        mixed = sf.mixed_precision(loss, sf.Policy(param=torch.bfloat16))  # the weight is the cast of a copy on disk
        return sf.sharded_step(
            mixed, optim.adamw(0.1), mesh=sf.make_mesh({"dp": 1}), specs=specs, trainable=train, zero=home
        )

    params, x = {"base": torch.randn(32, 32), "w": torch.randn(32, 64)}, torch.randn(4, 32)
    step = make()
    state, _ = step(step.init(params), x)
    base = state.params["base"].held.blocks.clone()
    step.close()
    again = make()
    resumed = again.resume(params)
    assert torch.equal(resumed.params["base"].held.blocks, base)
    assert torch.isfinite(again(resumed, x)[1]["loss"])
    again.close()
