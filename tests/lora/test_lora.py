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


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 3, 1, 2])
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


def test_at_first_the_model_is_unchanged_and_merging_adds_them() -> None:
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


KINDS: dict[str, dict[str, Any]] = {
    "dora": {"dora": True},
    "saved": {"modules_to_save": ["head"]},
    "patterns": {"rank_pattern": {"blocks.up": 3}, "alpha_pattern": {"down": 1}},
}


def _kind(kind: str, specs: Any = P()) -> tuple[LoRA, Any]:
    params = _params()
    lora = LoRA.of(params, ["up$", r"\.down"], rank=2, alpha=8, specs=specs, **KINDS[kind])
    adapters = lora.init(sf.key(3), dtype=torch.float64, params=params)
    for i, own in enumerate(adapters.values()):  # as after some steps
        for name, x in own.items():
            x += 0.0 if name == "a" else torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).double() / 4
    return lora, {"base": params, "lora": adapters}


def _whole(lora: LoRA, loss: Any) -> Any:
    """The loss of leaves that are made by plain operations."""

    def plain(p: Any, batch: Any) -> Tensor:
        own, blocks = p["lora"], dict(p["base"]["blocks"])
        for name in ("up", "down"):
            ab, path = own[f"blocks.{name}"], f"blocks.{name}"
            w = blocks[name] + lora.scale_of(path) * (ab["b"] @ ab["a"])
            blocks[name] = w / w.detach().norm(dim=-1, keepdim=True) * ab["m"][..., None] if lora.dora else w
        head = own["head"]["full"] if "head" in own else p["base"]["head"]
        return loss({"blocks": blocks, "head": head}, batch)

    return plain


@pytest.mark.day("patterns")
@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_each_kind_trains_sharded_as_on_one_device(kind: str) -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    lora, tree = _kind(kind)
    assert_parity(
        lora.adapt(_loss), optim.adamw(1e-2), tree, _batches(), mesh=mesh, reference=_whole(lora, _loss),
        specs=lora.specs, trainable=lora.trainable, zero=Zero(stage=3, persist_elements=0),
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "dora" else NIGHTLY) for kind in KINDS])
@distributed(world=2)
def test_each_kind_beside_leaves_that_are_cut(kind: str) -> None:
    mesh = sf.make_mesh({"tp": 2}, device="cpu")
    lora, tree = _kind(kind, TP)
    assert_parity(
        lora.adapt(functools.partial(_loss, axis="tp")), optim.adamw(1e-2), tree, _batches(), mesh=mesh,
        reference=_whole(lora, _loss), specs=lora.specs, trainable=lora.trainable, batch=P(),
    )  # fmt: skip


def test_dora_and_whole_leaves_start_as_the_model_and_are_merged() -> None:
    params, batch = _params(), _batches()[0]
    lora = LoRA.of(params, ["up", "down"], rank=2, dora=True, modules_to_save=["head"])
    with pytest.raises(ValueError, match=r"start from the model's values. Pass params="):
        lora.init(sf.key(0))
    fresh = lora.init(sf.key(0), dtype=torch.float64, params=params)
    assert fresh["blocks.up"]["m"].shape == (L, F_) and torch.equal(fresh["head"]["full"], params["head"])
    torch.testing.assert_close(lora.adapt(_loss)({"base": params, "lora": fresh}, batch), _loss(params, batch))
    lora, tree = _kind("dora")
    torch.testing.assert_close(_loss(lora.merge(tree["base"], tree["lora"]), batch), _whole(lora, _loss)(tree, batch))


def _flat_loss(p: Any, batch: Any) -> Tensor:
    return (torch.tanh(batch["x"] @ p["up"].mT) @ p["down"].mT - batch["y"]).square().mean()


def _flat() -> tuple[LoRA, Any]:
    params = {name: x[0] for name, x in _params()["blocks"].items() if name != "g"} | {"down": _params()["head"]}
    params["down"] = torch.cat([params["down"], params["down"][:, :4]], 1)
    lora = LoRA.of(params, ["up", "down"], rank=2, dropout=0.5)
    adapters = lora.init(sf.key(1), dtype=torch.float64)
    for ab in adapters.values():
        ab["b"] += 0.5
    return lora, {"base": params, "lora": adapters}


def _numbered() -> list[Any]:
    return [{**batch, "index": torch.arange(B) + n * B} for n, batch in enumerate(_batches())]


@pytest.mark.nightly
@distributed(world=2)
def test_dropout_has_the_same_masks_on_any_number_of_ranks() -> None:
    mesh, (lora, tree) = sf.make_mesh({"dp": 2}, device="cpu"), _flat()
    assert_parity(
        lora.adapt(_flat_loss), optim.adamw(1e-2), tree, _numbered(), mesh=mesh, key=sf.key(5), specs=lora.specs,
        trainable=lora.trainable, zero=Zero(stage=3, persist_elements=0),
    )  # fmt: skip


@pytest.mark.nightly
def test_dropout_acts_on_the_inputs_of_adapters_alone() -> None:
    lora, tree = _flat()
    batch, other = _numbered()[0], _numbered()[1]
    loss = lora.adapt(_flat_loss)
    assert torch.equal(loss(tree, batch, sf.key(0)), loss(tree, batch, sf.key(0)))
    assert not torch.equal(loss(tree, batch, sf.key(0)), loss(tree, batch, sf.key(1)))
    assert not torch.equal(loss(tree, batch, sf.key(0)), loss(tree, {**batch, "index": other["index"]}, sf.key(0)))
    # The mean over many masks of a product is the product without dropout: the model's own part is not dropped.
    x, up = batch["x"], tree["base"]["up"]
    product = [lora.apply(tree["base"], tree["lora"], sf.key(n), batch["index"])["up"] for n in range(2000)]
    mean = torch.stack([x @ w.mT for w in product]).mean(0)
    torch.testing.assert_close(mean, x @ lora.merge(tree["base"], tree["lora"])["up"].mT, rtol=0.0, atol=0.2)
    assert not torch.equal(mean, x @ up.mT)
    # One of merged rows, as GPT-2's Conv1D has it, has the masks of whole rows.
    w = lora.apply(tree["base"], tree["lora"], sf.key(0), torch.arange(3))["up"]
    rows = torch.randn(3, 4, D, dtype=torch.float64)
    assert torch.equal((rows.reshape(12, D) @ w.mT).view(3, 4, -1), torch.nn.functional.linear(rows, w))


def test_options_that_exclude_each_other() -> None:
    params = _params()
    with pytest.raises(ValueError) as caught:
        LoRA.of(params, ["up"], modules_to_save=["up", "hed"], rank_pattern={"q": 2}, dora=True, dropout=0.1, rank=2)
    assert str(caught.value).splitlines()[1:] == [
        "  - the target 'hed' is found in no path",
        "  - blocks.up is a target, and in modules_to_save; leave it out of one",
        "  - rank_pattern['q'] fits no target",
        "  - dropout=0.1 is not there with dora=True; leave one out",
    ]
    with pytest.raises(ValueError, match="not there with stacked layers"):
        LoRA.of(params, ["up"], rank=2, dropout=0.1)
    lora, tree = _flat()
    with pytest.raises(ValueError, match=r"needs the global number of each row: batch\['index'\]"):
        lora.adapt(_flat_loss)(tree, _batches()[0], sf.key(0))


def test_leaves_that_cannot_be_adapted_are_refused() -> None:
    params = {**_params(), "ids": torch.ones(3, 3, dtype=torch.int64)}
    with pytest.raises(ValueError) as caught:
        LoRA.of(params, ["upp", "blocks.g", "ids", "head"], rank=5)
    assert str(caught.value).splitlines() == [
        "these adapters cannot be made. Paths are such as blocks.down, blocks.g, blocks.up.",
        "  - the target 'upp' is found in no path",
        "  - blocks.g (3, 6) has a smaller side than rank=5",
        "  - head (4, 6) has a smaller side than rank=5",
        "  - ids (3, 3) of torch.int64 is not a weight of two dims or more",
    ]
    with pytest.raises(ValueError, match="rank=0 is not 1 or more"):
        LoRA.of(params, ["up"], rank=0)
    lora, tree = _lora(_params())
    with pytest.raises(ValueError, match=r"Write jit\(adapt\(f\)\)"):
        lora.adapt(sf.jit(_loss))
    with pytest.raises(ValueError, match=r"adapters must be of .*, got "):
        lora.apply(tree["base"], {"other": {}})


@pytest.mark.parametrize("around", ["plain", "jit", "accumulate", "mixed", "partial", "several"])
def test_a_loss_of_adapt_trains_only_adapters_by_default(around: str) -> None:
    params = {"wq": torch.randn(4, 3), "bias": torch.zeros(4)}
    lora = LoRA.of(params, ["wq"], rank=2)
    loss = lora.adapt(lambda p, x: (torch.nn.functional.linear(x, p["wq"], p["bias"]) - 1).square().mean())
    made: dict[str, Any] = {
        "plain": loss,
        "jit": sf.jit(loss),
        "accumulate": sf.jit(sf.accumulate(loss, 2)),
        "mixed": sf.mixed_precision(loss, sf.Policy.bf16()),
        "partial": functools.partial(loss),
        "several": {"one": loss, "two": loss},
    }
    step = sf.sharded_step(made[around], sf.optim.adamw(0.1))
    state = step.init({"base": params, "lora": lora.init(sf.key(0))})
    if around != "mixed":  # whose state is around that of the rule
        assert state.opt_state[0].mu["base"] == {"wq": None, "bias": None}
    rows = torch.randn(4, 3)
    state, _ = step(state, dict.fromkeys(made[around], rows) if around == "several" else rows)
    kept = state.params["base"]["wq"].full_tensor()
    assert torch.equal(kept, params["wq"].to(kept.dtype))
    assert state.params["lora"]["wq"]["b"].full_tensor().any()


def test_a_named_mask_counts_more_than_that_of_adapt_and_a_trained_base_is_announced() -> None:
    params = {"wq": torch.randn(4, 3), "wk": torch.randn(4, 3)}
    lora = LoRA.of(params, ["wq", "wk"], rank=2)

    def own(tree: Any, x: Tensor) -> Tensor:  # without adapt
        p = lora.apply(tree["base"], tree["lora"])
        return (x @ p["wq"].t() @ p["wk"]).square().mean()

    adapted = lora.adapt(lambda p, x: (x @ p["wq"].t() @ p["wk"]).square().mean())
    for loss, trainable in ((own, None), (adapted, True), (adapted, {"base": {"wq": True, "wk": False}, "lora": True})):
        step = sf.sharded_step(loss, sf.optim.sgd(0.1), trainable=trainable)
        state = step.init({"base": params, "lora": lora.init(sf.key(0))})
        num = 1 if isinstance(trainable, dict) else 2
        with pytest.warns(
            UserWarning, match=rf"but {num} weights .* such as w[qk].*Pass trainable=lora.trainable to shard"
        ):
            state, _ = step(state, torch.ones(2, 3))
        assert not torch.equal(state.params["base"]["wq"].full_tensor(), params["wq"])
    step = sf.sharded_step(own, sf.optim.sgd(0.1), trainable=lora.trainable)  # no warning
    step(step.init({"base": params, "lora": lora.init(sf.key(0))}), torch.ones(2, 3))


def test_a_merge_rounds_once() -> None:
    w = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    lora = LoRA.of({"w": w}, ["w"], rank=2, alpha=3.0)
    adapters = {"w": {name: torch.randn_like(x) for name, x in lora.init(sf.key(0))["w"].items()}}
    merged = lora.merge({"w": w}, adapters)["w"]
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, (w.float() + 1.5 * (adapters["w"]["b"] @ adapters["w"]["a"])).bfloat16())
    with pytest.raises(ValueError, match=r"adapters must be of \['w'\], got \['v'\]"):
        lora.merge({"w": w}, {"v": adapters["w"]})
