"""Covers images in `models.gpt`: features in place of tokens, on ranks as on one device, and wrong batches."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import nn, optim
from shardfn.core import tree_map
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

IMAGE, T, D = 12, 9, 16
SHAPE: dict[str, Any] = {"vocab_size": 13, "num_layers": 2, "d_model": D, "num_heads": 4, "num_kv_heads": 2}
CONFIG = gpt.Config(**SHAPE, max_len=T, per_head=True, images=gpt.Images(IMAGE))


def make_batch(seed: int, rows: int = 4, num: int = 3) -> dict[str, Any]:
    """Rows with one image of `num` tokens each, and its pixels of 7 numbers a token."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(IMAGE, (rows, T + 1), generator=draw)
    for row, at in enumerate(torch.randint(T - num, (rows,), generator=draw).tolist()):
        tokens[row, at : at + num] = IMAGE
    return {"tokens": tokens, "pixels": torch.randn(rows, num, 7, generator=draw, dtype=torch.float64)}


def make_params(config: gpt.Config) -> Any:
    draw = torch.Generator().manual_seed(0)
    leaves = {"gpt": gpt.init(config, sf.key(0)), "tower": torch.zeros(11, 7), "projector": torch.zeros(D, 11)}
    return tree_map(lambda x: x.double() + 0.2 * torch.randn(x.shape, generator=draw, dtype=torch.float64), leaves)


def look(config: gpt.Config, params: Any, batch: Any, **how: Any) -> Any:
    """The model: a tower, which is frozen, a projector and the GPT."""
    seen = (batch["pixels"] @ params["tower"].detach().T).tanh() @ params["projector"].T
    rest = {name: x for name, x in batch.items() if name != "pixels"}
    return gpt.loss(config, params["gpt"], rest | {"image_features": seen.flatten(0, 1)}, **how)


def get_trainable(params: Any) -> Any:
    return tree_map(lambda _: True, params) | {"tower": False}


def check(
    config: gpt.Config, mesh: sf.Mesh, *, body: Any = None, stage: int = 3, jit: bool = False, **how: Any
) -> None:
    torch.set_num_threads(1)
    cut = config if body is None else dataclasses.replace(config, attention=body)
    axes = () if body is None else body.axes
    order = (
        torch.arange(T) if body is None else nn.sequence_order(body, T, [mesh.axis_size(a) for a in body.shuffled_axes])
    )
    whole = [make_batch(seed) for seed in range(2)]
    batches = [gpt.shifted(x) for x in whole]
    batches = [x | {n: x[n][:, order] for n in ("tokens", "targets")} for x in batches]

    def reference(params: Any, batch: Any) -> Any:
        back = {name: batch[name][:, order.argsort()] for name in ("tokens", "targets")}
        return look(config, params, batch | back)

    loss: Any = functools.partial(look, cut, axis="tp", **how)
    params, spec = make_params(config), sf.P("dp", axes) if axes else sf.P("dp")
    specs = {"gpt": gpt.specs(config, tp="tp"), "tower": sf.P(), "projector": sf.P()}
    keys = "bk" if config.position == "learned" else "?"  # the gradient of keys' biases is 0 without rotation
    trainable = get_trainable(params)
    trainable["gpt"]["blocks"] = [{n: n != keys for n in p} for p in params["gpt"]["blocks"]]
    assert_parity(
        sf.jit(loss, backend="graph") if jit else loss,
        optim.sgd(0.1, momentum=0.9),
        params,
        batches,
        mesh=mesh,
        reference=reference,
        trainable=trainable,
        zero=sf.Zero(stage=stage, axis=("dp", *axes), persist_elements=0) if stage else None,
        specs=specs,
        batch={"tokens": spec, "targets": spec, "pixels": sf.P("dp")},
    )


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_without_images_in_its_batch_has_the_bits_of_a_causal_model(exact: bool) -> None:
    tokens = torch.randint(IMAGE, (2, 70))
    plain = dataclasses.replace(CONFIG, images=None, max_len=70, batch_invariant=exact)
    params = gpt.init(plain, sf.key(0))
    got, want = (gpt.apply(x, params, tokens) for x in (dataclasses.replace(plain, images=CONFIG.images), plain))
    assert torch.equal(got[..., :IMAGE], want[..., :IMAGE])
    assert (got[..., IMAGE] == -1e9).all()  # no image token is predicted


@pytest.mark.parametrize("rule", ["separate", "code", "causal"])
def test_the_rules_differ_after_an_image_alone(rule: Any) -> None:
    config = dataclasses.replace(CONFIG, images=gpt.Images(IMAGE, rule))
    params, batch = gpt.init(config, sf.key(0)), make_batch(0)
    tokens, seen = batch["tokens"][:, :T], torch.randn(12, D)
    first = (tokens == IMAGE).int().argmax(1)
    logits = gpt.apply(config, params, tokens, image_features=seen)
    others = [gpt.Images(IMAGE, other) for other in ("separate", "code", "causal") if other != rule]
    for other in others:
        found = gpt.apply(dataclasses.replace(config, images=other), params, tokens, image_features=seen)
        for row, at in enumerate(first.tolist()):
            assert torch.equal(found[row, :at], logits[row, :at])
        assert not torch.allclose(found, logits)


def test_packed_rows_equal_separate_rows() -> None:
    config = dataclasses.replace(CONFIG, max_len=2 * T, position="rope")
    params, batch = make_params(config)["gpt"], make_batch(0, rows=2)
    seen, tokens = torch.randn(6, D, dtype=torch.float64), batch["tokens"][:, :T]
    packed = {"tokens": tokens.reshape(1, -1), "targets": tokens.reshape(1, -1), "image_features": seen}
    packed["segment_ids"] = torch.tensor([[0] * T + [1] * T])
    separate = {"tokens": tokens, "targets": tokens, "image_features": seen}
    got, want = (gpt.loss(config, params, x) for x in (packed, separate))
    torch.testing.assert_close(got.total, want.total, rtol=1e-12, atol=0)
    assert got.weight == want.weight == 2 * T - 6  # image tokens are not targets


def test_stages_equal_the_loss() -> None:
    config = dataclasses.replace(CONFIG, stacked=True)
    params, batch = make_params(config)["gpt"], make_batch(0)
    batch = {"tokens": batch["tokens"], "image_features": torch.randn(12, D, dtype=torch.float64)}
    first, block, last = gpt.stages(config)
    h = first(params, batch)
    for i in range(config.num_layers):
        h = block({name: x[i] for name, x in params["blocks"].items()}, h)
    got, want = last(params, h, batch), gpt.loss(config, params, batch)
    torch.testing.assert_close(got.total, want.total, rtol=1e-12, atol=0)
    assert got.weight == want.weight


@distributed(world=2)
def test_ranks_equal_one_device() -> None:
    check(CONFIG, sf.make_mesh({"sp": 2}), body=nn.Ulysses("sp", T))


@pytest.mark.nightly
@distributed(world=2)
def test_a_captured_step_of_cut_heads_equals_one_device() -> None:
    check(CONFIG, sf.make_mesh({"tp": 2}), stage=0, sequence=True, jit=True)


@pytest.mark.nightly
@distributed(world=4)
def test_meshes_equal_one_device() -> None:
    code = dataclasses.replace(CONFIG, images=gpt.Images(IMAGE, "code"), position="rope", norm="rms", bias=False)
    check(code, sf.make_mesh({"dp": 2, "sp": 2}), body=nn.Ring("sp", T, zigzag=True, block=2))
    check(code, sf.make_mesh({"dp": 2, "tp": 2}), jit=True, wrap=sf.remat)
    check(CONFIG, sf.make_mesh({"tp": 2, "sp": 2}), body=nn.Ulysses("sp", T), stage=1)
    for stage in range(4):
        check(CONFIG, sf.make_mesh({"dp": 4}), stage=stage)


@distributed(world=2)
def test_a_rank_without_an_image() -> None:
    """Rows of text on one rank: the step equals one device."""
    mesh = sf.make_mesh({"dp": 2})
    params = make_params(CONFIG)
    parts = [make_batch(0, rows=2), make_batch(1, rows=2)]
    parts[1] = {"tokens": parts[1]["tokens"] % IMAGE, "pixels": torch.zeros(0, 3, 7, dtype=torch.float64)}
    loss: Any = functools.partial(look, CONFIG)
    options: Any = {"trainable": get_trainable(params)}
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0), **options)
    state, metrics = step(step.init(params), parts[mesh.rank])
    whole = {name: torch.cat([x[name] for x in parts]) for name in parts[0]}
    alone = sf.sharded_step(loss, optim.sgd(0.1), mesh=sf.make_mesh(alone=True), **options)
    want, expected = alone(alone.init(params), whole)
    torch.testing.assert_close(metrics["loss"], expected["loss"], rtol=1e-12, atol=0)
    for got, x in zip(sf.core.tree_leaves(sf.unshard(state.params)), sf.core.tree_leaves(want.params), strict=True):
        torch.testing.assert_close(got, sf.unshard(x), rtol=1e-11, atol=1e-13)


@pytest.mark.nightly
@distributed(world=4)
def test_a_frozen_tower_of_transformers_equals_one_device() -> None:
    """ZeRO-3 over dp, and heads of the GPT cut over tp: a CLIP tower, which is frozen, and its projector."""
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(image_size=8, patch_size=4, **sizes))
    tower, read = sf.from_module(made.double().eval().requires_grad_(False))
    draw = torch.Generator().manual_seed(1)
    projector = torch.randn(D, 8, generator=draw, dtype=torch.float64)
    params = {"gpt": make_params(CONFIG)["gpt"], "tower": tower, "projector": projector}

    def loss(params: Any, batch: Any, **how: Any) -> Any:
        patches = read(params["tower"], pixel_values=batch["images"]).last_hidden_state[:, 1:]
        seen = (patches @ params["projector"].T).flatten(0, 1)
        batch = {"tokens": batch["tokens"], "targets": batch["targets"], "image_features": seen}
        return gpt.loss(CONFIG, params["gpt"], batch, **how)

    batches = []
    for seed in range(2):
        one = gpt.shifted(make_batch(seed, num=4))
        images = torch.randn(4, 3, 8, 8, generator=draw, dtype=torch.float64)
        batches.append({"tokens": one["tokens"], "targets": one["targets"], "images": images})
    trainable: Any = tree_map(lambda _: True, params) | {"tower": tree_map(lambda _: False, tower)}
    trainable["gpt"]["blocks"] = [{n: n != "bk" for n in p} for p in params["gpt"]["blocks"]]
    for shape, specs in (
        ({"dp": 4}, None),
        (
            {"dp": 2, "tp": 2},
            {"gpt": gpt.specs(CONFIG, tp="tp"), "tower": tree_map(lambda _: sf.P(), tower), "projector": sf.P()},
        ),
    ):
        more: dict[str, Any] = {"specs": specs} if specs else {}
        run = assert_parity(
            functools.partial(loss, axis="tp") if specs else loss,
            optim.sgd(0.1, momentum=0.9),
            params,
            batches,
            mesh=sf.make_mesh(shape),
            reference=loss,
            trainable=trainable,
            zero=sf.Zero(stage=3, axis="dp", persist_elements=0),
            **more,
        )
        assert all(torch.equal(x, tower[name]) for name, x in run.params["tower"].items())


def test_generated_tokens_are_text() -> None:
    params = gpt.init(CONFIG, sf.key(0))
    prompt = torch.tensor([[1, IMAGE, IMAGE, 2]])
    found = gpt.generate(CONFIG, params, prompt, 5, sf.key(1), 100.0, image_features=torch.randn(2, D))
    assert found.shape == (1, 9)
    assert int((found == IMAGE).sum()) == 2
    with pytest.raises(ValueError, match=r"must be at most max_len=9, got 4 \+ 7"):
        gpt.generate(CONFIG, params, prompt, 7, sf.key(1), image_features=torch.randn(2, D))


def test_mistakes() -> None:
    params, tokens = gpt.init(CONFIG, sf.key(0)), torch.tensor([[1, IMAGE, IMAGE, 2]])
    with pytest.raises(ValueError, match="got 2 image tokens and 3 rows"):
        gpt.apply(CONFIG, params, tokens, image_features=torch.zeros(3, D))
    with pytest.raises(ValueError, match="got 2 image tokens and 0 rows"):
        gpt.apply(CONFIG, params, tokens)
    with pytest.raises(ValueError, match=r"must have shape \[N, 16\].* got \(2, 8\).* projector 16 outputs"):
        gpt.apply(CONFIG, params, tokens, image_features=torch.zeros(2, 8))
    plain = dataclasses.replace(CONFIG, images=None)
    with pytest.raises(ValueError, match="need a config with images"):
        gpt.apply(plain, params, tokens, image_features=torch.zeros(2, D))
    with pytest.raises(ValueError, match=r"images.token must be from 0 to 12, .* got 13"):
        dataclasses.replace(CONFIG, images=gpt.Images(13))
    with pytest.raises(ValueError, match=r"images.rule must be 'separate', 'code' or 'causal', got 'seperate'"):
        misspelt = gpt.Images(1)
        object.__setattr__(misspelt, "rule", "seperate")  # past the type checks, as a caller without them would
        dataclasses.replace(CONFIG, images=misspelt)
    with pytest.raises(ValueError, match=r"does not know attention_dropout=0.5"):
        dataclasses.replace(CONFIG, attention_dropout=0.5)
    with pytest.raises(ValueError, match="loss_tile=4 knows no logits_softcap, head_bias and images"):
        dataclasses.replace(CONFIG, loss_tile=4)
    loss: Any = sf.jit(functools.partial(gpt.loss, CONFIG), backend="graph")
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=None)
    with pytest.raises(Exception, match="another number of image tokens and 3 rows"):
        step(step.init(params), {"tokens": tokens, "image_features": torch.zeros(3, D)})
