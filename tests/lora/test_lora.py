"""Covers `LoRA`: adapters beside a model train like the sum, sharded as on one device, and no other leaf does."""

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.lora import LoRA
from shardfn.testing import assert_parity, distributed

D, F_, L, B = 6, 10, 3, 12
NIGHTLY = pytest.mark.nightly


def _params(dtype: torch.dtype = torch.float64) -> Any:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) / 2).to(dtype)

    return {"blocks": {"up": draw(L, F_, D), "down": draw(L, D, F_), "g": draw(L, D)}, "head": draw(4, D)}


def _model(p: Any, x: Tensor, axis: str | None = None) -> Tensor:
    def block(h: Tensor, w: Any) -> tuple[Tensor, None]:
        y = sf.pvary(h, axis) if axis else h
        y = torch.tanh(y * w["g"] @ w["up"].mT if axis is None else y * sf.pvary(w["g"], axis) @ w["up"].mT)
        y = torch.einsum("bf,df->bd", y, w["down"])
        return h + (sf.psum(y, axis) if axis else y), None

    return sf.scan(block, x, p["blocks"])[0] @ p["head"].t()


def _loss(p: Any, batch: Any, axis: str | None = None) -> Tensor:
    return (_model(p, batch["x"], axis) - batch["y"]).square().mean()


def _batches(dtype: torch.dtype = torch.float64) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    return [{"x": draw(B, D).to(dtype), "y": draw(B, 4).to(dtype)} for _ in range(3)]


def _by_hand(lora: LoRA, loss: Any) -> Any:
    """The loss of sums, made by plain operations."""

    def plain(p: Any, batch: Any) -> Tensor:
        blocks = dict(p["base"]["blocks"])
        for name in ("up", "down"):
            ab = p["lora"][f"blocks.{name}"]
            blocks[name] = blocks[name] + lora.scale * (ab["b"] @ ab["a"])
        return loss({**p["base"], "blocks": blocks}, batch)

    return plain


def _lora(params: Any, specs: Any = P(), **options: Any) -> tuple[LoRA, Any]:
    lora = LoRA.of(params, ["up$", r"\.down"], rank=2, alpha=8, specs=specs, **options)
    adapters = lora.init(sf.key(3), dtype=torch.float64)
    for i, ab in enumerate(adapters.values()):  # as after some steps
        ab["b"] = torch.randn(ab["b"].shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) / 4
    return lora, {"base": params, "lora": adapters}


@pytest.mark.parametrize("capture", [False, pytest.param(True, marks=NIGHTLY)])
@distributed(world=2)
def test_layers_that_are_gathered_one_at_a_time(capture: bool) -> None:
    mesh, params = sf.make_mesh({"dp": 2}, device="cpu"), _params()
    specs = {"blocks": sf.Sharding(P(), stacked=True), "head": P()}
    lora, tree = _lora(params, specs)
    assert lora.specs["lora"]["blocks.up"] == {k: sf.Sharding(P(), stacked=True) for k in "ab"}
    loss = lora.adapt(_loss)
    assert_parity(
        sf.jit(loss, backend="graph") if capture else loss, optim.adamw(1e-2), tree, _batches(), mesh=mesh,
        reference=_by_hand(lora, _loss), specs=lora.specs, trainable=lora.trainable,
        zero=Zero(stage=3, persist_elements=0),
    )  # fmt: skip


TP = {"blocks": {"up": P(None, "tp"), "down": P(None, None, "tp"), "g": P()}, "head": P()}


@pytest.mark.parametrize("stage", [0, 3, *(pytest.param(n, marks=NIGHTLY) for n in (1, 2))])
@distributed(world=2)
def test_sharded_it_equals_one_device(stage: int) -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    lora, tree = _lora(_params(), rslora=stage == 3)
    for loss in (_loss, sf.remat(_loss)):
        assert_parity(
            lora.adapt(loss), optim.adamw(1e-2), tree, _batches(), mesh=mesh, reference=_by_hand(lora, _loss),
            specs=lora.specs, trainable=lora.trainable, zero=Zero(stage=stage, persist_elements=0),
        )  # fmt: skip


@pytest.mark.parametrize("stage", [pytest.param(0, marks=NIGHTLY), 3])
@distributed(world=4)
def test_beside_leaves_that_are_cut(stage: int) -> None:
    """All ranks of the axis use the whole leaf of an adapter, and its gradient sums over all of them."""
    mesh = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu")
    lora, tree = _lora(_params(), TP)
    assert lora.specs["lora"]["blocks.up"] == {"a": P(), "b": P(None, "tp")}
    assert lora.specs["lora"]["blocks.down"] == {"a": P(None, None, "tp"), "b": P()}
    assert_parity(
        lora.adapt(functools.partial(_loss, axis="tp")), optim.adamw(1e-2), tree, _batches(), mesh=mesh,
        reference=_by_hand(lora, _loss), specs=lora.specs, trainable=lora.trainable, batch=P("dp"),
        zero=Zero(stage=stage, persist_elements=0),
    )  # fmt: skip


@pytest.mark.nightly
@distributed(world=2)
def test_captured_it_has_the_bits_of_the_eager_step() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    lora, tree = _lora(_params())
    out = []
    for wrap in (lambda f: f, functools.partial(sf.jit, backend="graph")):
        zero = Zero(stage=3, persist_elements=0)
        step = sf.sharded_step(
            wrap(lora.adapt(_loss)), optim.adamw(1e-2), mesh=mesh, specs=lora.specs, trainable=lora.trainable, zero=zero
        )
        state, metrics = step.init(tree), {}
        for batch in _batches():
            state, metrics = step(state, sf.core.tree_map(lambda x: x.chunk(2)[mesh.coords["dp"]], batch))
        out.append((sf.unshard(state.params), metrics["loss"]))
        for path, x in sf.core.tree_map(torch.equal, sf.unshard(state.params)["base"], tree["base"]).items():
            assert all(sf.core.tree_leaves(x)), path
    for a, b in zip(sf.core.tree_leaves(out[0]), sf.core.tree_leaves(out[1]), strict=True):
        assert torch.equal(a, b)


def test_at_first_the_model_is_as_it_was_and_merging_adds_them() -> None:
    params = _params()
    lora = LoRA.of(params, ["up", "down"], rank=2)
    fresh = lora.init(sf.key(0), dtype=torch.float64)
    batch = _batches()[0]
    assert torch.equal(lora.adapt(_loss)({"base": params, "lora": fresh}, batch), _loss(params, batch))
    lora, tree = _lora(params)
    merged = lora.merge(params, tree["lora"])
    assert [type(x) for x in sf.core.tree_leaves(merged)] == [Tensor] * 4
    torch.testing.assert_close(_loss(merged, batch), lora.adapt(_loss)(tree, batch))
    torch.testing.assert_close(_loss(merged, batch), _by_hand(lora, _loss)(tree, batch))


def _shares(x: Tensor, y: Any) -> bool:
    return isinstance(y, Tensor) and x.untyped_storage()._cdata == y.untyped_storage()._cdata


def test_no_sum_is_made_and_no_gradient_of_a_whole_weight() -> None:
    """The purpose of adapters: memory of their size, not of the leaves'."""
    lora, tree = _lora(_params())
    for ab in tree["lora"].values():
        for x in ab.values():
            x.requires_grad_()
    shapes: set[tuple[int, ...]] = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not any(_shares(out, a) for a in args):
                shapes.add(tuple(out.shape))
            return out

    with Seen():
        loss = lora.adapt(_loss)(tree, _batches()[0])
        torch.autograd.grad(loss, sf.core.tree_leaves(tree["lora"]))
    assert not shapes & {(F_, D), (D, F_), (L, F_, D), (L, D, F_)}, shapes


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_modules_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 17, "bos_token_id": 1, "eos_token_id": 2}
    if name == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, **common
        )
        module, path, targets = transformers.LlamaForCausalLM(config), "model.layers", [r"\.[qv]_proj\.", "down_proj"]
    else:
        config = transformers.GPT2Config(
            n_embd=8, n_layer=2, n_head=2, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common
        )
        module, path, targets = transformers.GPT2LMHeadModel(config), "transformer.h", ["c_attn.weight", "c_fc.weight"]
    params, apply = sf.from_module(module.double(), layers=path)
    ids = torch.randint(3, 17, (2, 5), generator=torch.Generator().manual_seed(0))

    def loss(p: Any, ids: Tensor) -> Tensor:
        return apply(p, input_ids=ids, labels=ids, use_cache=False).loss

    lora = LoRA.of(params, targets, rank=2, fan_in_fan_out=name == "gpt2")
    adapters = lora.init(sf.key(0), dtype=torch.float64)
    for i, ab in enumerate(adapters.values()):
        ab["b"] = torch.randn(ab["b"].shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) / 4
        for x in ab.values():
            x.requires_grad_()
    leaves = sf.core.tree_leaves(adapters)
    got = lora.adapt(loss)({"base": params, "lora": adapters}, ids)
    merged = sf.core.tree_map(lambda x: x, params)
    for path, ab in adapters.items():
        key = lora.sites[path].entries
        delta = ab["b"] @ ab["a"]
        merged[key[0]] = {**merged[key[0]], key[1]: merged[key[0]][key[1]] + (delta.mT if name == "gpt2" else delta)}
    want = loss(merged, ids)
    assert not torch.equal(want, loss(params, ids))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves))


def test_what_cannot_be_adapted_is_refused() -> None:
    params = {**_params(), "ids": torch.ones(3, 3, dtype=torch.int64)}
    with pytest.raises(ValueError) as caught:
        LoRA.of(params, ["upp", "blocks.g", "ids", "head"], rank=5)
    assert str(caught.value).splitlines() == [
        "these adapters cannot be made. Paths are such as blocks.down, blocks.g, blocks.up.",
        "  - the target 'upp' is found in no path",
        "  - blocks.g (3, 6) has a smaller side than rank=5",
        "  - head (4, 6) has a smaller side than rank=5",
        "  - ids (3, 3) of torch.int64 is no weight of two dims or more",
    ]
    with pytest.raises(ValueError, match="rank=0 is not 1 or more"):
        LoRA.of(params, ["up"], rank=0)
    lora, tree = _lora(_params())
    with pytest.raises(ValueError, match=r"write jit\(adapt\(f\)\)"):
        lora.adapt(sf.jit(_loss))
    with pytest.raises(ValueError, match=r"adapters are of .*, and the leaves with one are"):
        lora.apply(tree["base"], {"other": {}})
