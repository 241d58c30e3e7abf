"""Covers `models.gpt` on ranks that each have some tokens of a sequence: their results equal those of one device."""

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import memory, nn, optim
from shardfn.core import tree_flatten, tree_unflatten
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

SHAPE: dict[str, Any] = {"vocab_size": 13, "num_layers": 2, "d_model": 12, "num_heads": 3, "max_len": 9, "d_ff": 10}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
CONFIGS = {
    "gpt2": gpt.Config(**SHAPE, tie_embeddings=True, per_head=True),
    "llama": gpt.Config(**{**SHAPE, "d_model": 16, "num_heads": 4, "num_kv_heads": 2}, **LLAMA, per_head=True),
    "bloom": gpt.Config(**SHAPE, position="alibi", embedding_norm=True, per_head=True),
}
BODIES = {
    "ulysses": lambda T: nn.Ulysses("sp", T),
    "ring": lambda T: nn.Ring("sp", T, block=2),
    "zigzag": lambda T: nn.Ring("sp", T, zigzag=True, block=4),
}


def params_of(config: gpt.Config) -> Any:
    leaves, treedef = tree_flatten(gpt.init(config, sf.key(0)))
    g = torch.Generator().manual_seed(0)
    noise = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in leaves]
    return tree_unflatten(treedef, [x.double() + 0.2 * n for x, n in zip(leaves, noise, strict=True)])


def trainable_of(config: gpt.Config) -> Any:
    """All leaves but the bias of keys, whose gradient is 0 without rotation."""
    params = gpt.init(config, sf.key(0))
    keep = [config.position == "rope" or "'bk'" not in path for path in sf.core.tree_paths(params)]
    return tree_unflatten(tree_flatten(params)[1], keep)


def batches_of(config: gpt.Config, T: int, packed: bool, order: Tensor, rows: int = 4) -> list[Any]:
    """Rows with some targets that do not count, in the order in which they are cut."""
    g, out = torch.Generator().manual_seed(1), []
    for n in range(2):
        batch: dict[str, Any] = {"tokens": torch.randint(config.vocab_size, (rows, T + 1), generator=g)}
        if packed:
            batch["segment_ids"] = torch.randint(3, (rows, T + 1), generator=g).sort(-1).values
        batch = gpt.shifted(batch)
        batch["targets"] = batch["targets"].masked_fill(torch.rand(rows, T, generator=g) < 0.3, -100)
        batch["targets"][0, T // 2 :] = -100  # ranks with no valid target in a row
        out.append({name: x[:, order] for name, x in batch.items()} | {"index": torch.arange(rows) + rows * n})
    return out


def parity(
    config: gpt.Config,
    mesh: sf.Mesh,
    body: nn.Ulysses | nn.Ring | nn.Chunked,
    T: int,
    *,
    packed: bool = False,
    stage: int = 0,
    jit: bool = False,
    remat: bool = False,
    accumulate: int = 1,
    sequence: bool = False,
    tile: int | None = None,
) -> None:
    torch.set_num_threads(1)
    order = nn.sequence_order(body, T, [mesh.axis_size(axis) for axis in body.shuffled_axes])
    cut, pp = dataclasses.replace(config, attention=body, loss_tile=tile), mesh.axis_size("pp") > 1
    how: dict[str, Any] = {"axis": "tp", "sequence": sequence, "wrap": sf.remat if remat else lambda f: f}
    loss: Any = functools.partial(gpt.loss, cut, **how)
    loss = sf.pipeline(*gpt.stages(cut, **how), num_microbatches=2) if pp else loss
    loss = sf.accumulate(loss, accumulate) if accumulate > 1 else loss

    def reference(params: Any, batch: Any, *key: Tensor) -> Any:
        back = {k: x if k == "index" else x[:, order.argsort()] for k, x in batch.items()}
        return gpt.loss(config, params, back, *key)

    spec = sf.P("dp", body.axes)
    names = ("tokens", "targets", *(("segment_ids",) if packed else ()))
    assert_parity(
        sf.jit(loss, backend="graph") if jit else loss,
        optim.sgd(0.1, momentum=0.9),
        params_of(config),
        batches_of(config, T, packed, order),
        mesh=mesh,
        reference=reference,
        key=sf.key(5) if config.dropout or config.attention_dropout else None,
        trainable=trainable_of(config),
        zero=sf.Zero(stage=stage, axis=("dp", *body.axes), persist_elements=0) if stage else None,
        specs=gpt.specs(config, tp="tp", pp="pp" if pp else None),
        batch={**dict.fromkeys(names, spec), "index": sf.P("dp")},
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    ["ulysses", "ring", "zigzag"],
)
@distributed(world=2)
def test_every_style_on_two_ranks(name: str) -> None:
    mesh, T = sf.make_mesh({"sp": 2}), 7
    for n, style in enumerate(CONFIGS):
        drop = {"dropout": 0.25 * (n < 2), "attention_dropout": 0.25}
        config = dataclasses.replace(CONFIGS[style], **drop, stacked=n == 1, num_layers=1 + (n == 1))
        parity(config, mesh, BODIES[name](T), T, packed=n != 2, stage=3 * (n % 2), remat=n == 2)


@pytest.mark.nightly
@distributed(world=4)
def test_dp_and_tp_and_a_captured_step() -> None:
    ulysses, ring = BODIES["ulysses"](7), BODIES["zigzag"](7)
    llama = dataclasses.replace(CONFIGS["llama"], dropout=0.25, attention_dropout=0.25, num_layers=1)
    gpt2 = dataclasses.replace(CONFIGS["gpt2"], num_layers=1)
    parity(gpt2, sf.make_mesh({"dp": 2, "sp": 2}), ring, 7, stage=3, accumulate=2, packed=True)
    parity(llama, sf.make_mesh({"sp": 2, "tp": 2}), ulysses, 7, stage=3, sequence=True)
    parity(llama, sf.make_mesh({"dp": 2, "sp": 2}), ring, 7, stage=3, remat=True, jit=True, packed=True)


@pytest.mark.nightly
@distributed(world=4)
def test_ring_and_ulysses_at_once() -> None:
    mesh = sf.make_mesh({"r": 2, "u": 2})
    body = nn.Ulysses("u", 9, nn.Ring("r", zigzag=True, block=4))
    parity(CONFIGS["llama"], mesh, body, 9, packed=True, stage=3)


@pytest.mark.nightly
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", BODIES)
@distributed(world=[1, 2, 3, 4, 6], timeout=900)
def test_grid(name: str, jit: bool, world: int) -> None:
    """{sp 1, 2, 3} x {dp 1, 2} x {tp 1, 2} x stages 0 and 3 x styles, lengths that no mesh divides."""
    for sp, dp, tp in itertools.product((1, 2, 3), (1, 2), (1, 2)):
        if sp * dp * tp != world:
            continue
        mesh = sf.make_mesh({"dp": dp, "sp": sp, "tp": tp})
        for (n, style), stage in itertools.product(enumerate(CONFIGS), (0, 3)):
            drop = {"dropout": 0.25 * (n != 1), "attention_dropout": 0.25 * (n != 2)}
            config = dataclasses.replace(CONFIGS[style], **drop, stacked=n == 1)
            how: dict[str, Any] = {"packed": n != 2, "stage": stage, "remat": n == 1, "sequence": n == 0, "jit": jit}
            parity(config, mesh, BODIES[name](8), 8, accumulate=1 + (stage == 3), **how)


@pytest.mark.nightly
@distributed(world=4)
def test_a_pipeline_of_ranks_that_have_some_tokens() -> None:
    config = dataclasses.replace(CONFIGS["llama"], stacked=True)
    parity(config, sf.make_mesh({"pp": 2, "sp": 2}), BODIES["zigzag"](7), 7, stage=1, tile=3)


@pytest.mark.nightly
@distributed(world=2)
def test_chunks_on_the_host_and_on_disk(tmp_path: Any) -> None:
    """Keys and values that wait elsewhere, in a step of a model; also captured, and recomputed."""
    one = dataclasses.replace(CONFIGS["llama"], num_layers=1, attention_dropout=0.25)
    mesh = sf.make_mesh({"sp": 2})
    pool = memory.Pool(tmp_path / str(mesh.rank))
    parity(one, mesh, nn.Chunked(4, "sp", 7), 7, stage=3, packed=True, jit=True)
    parity(one, mesh, nn.Chunked(4, "sp", 7, to="disk", pool=pool), 7, stage=3, remat=True, tile=2)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("other", ["dp", "tp", "pp"])
@pytest.mark.parametrize("name", ["ulysses", "zigzag"])
@distributed(world=[2, 4, 6], timeout=600)
def test_a_line_beside_another_axis(name: str, other: str, stage: int, world: int) -> None:
    """{sp 1, 2, 3} x {ulysses, ring} x {dp, tp, pp} x stages 0 to 3 x the loss whole and in tiles."""
    config = dataclasses.replace(CONFIGS["llama"], stacked=True)
    for tile in (None, 3):
        parity(
            config,
            sf.make_mesh({other: 2, "sp": world // 2}),
            BODIES[name](8),
            8,
            stage=stage,
            tile=tile,
            packed=tile is None,
        )


@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("other", ["dp", "tp", "pp"])
@distributed(world=[4, 8], timeout=600)
def test_a_grid_beside_another_axis(other: str, stage: int, world: int) -> None:
    """The ring and Ulysses at once, of 1 x 2, 2 x 1 and 2 x 2 ranks."""
    config = dataclasses.replace(CONFIGS["llama"], stacked=True)
    for (r, u), tile in itertools.product(((1, 2), (2, 1), (2, 2)), (None, 3)):
        if 2 * r * u == world:
            body = nn.Ulysses("u", 9, nn.Ring("r", zigzag=True, block=4))
            mesh = sf.make_mesh({other: 2, "r": r, "u": u})
            parity(config, mesh, body, 9, stage=stage, tile=tile, packed=tile is None)


@pytest.mark.nightly
@distributed(world=4, timeout=600)
def test_two_axes_cut_one_sequence() -> None:
    """The four ranks have 3, 2, 2 and 2 of 9 tokens; cut over one axis, they would have 3, 3, 3 and none."""
    mesh, axes = sf.make_mesh({"a": 2, "b": 2}), ("a", "b")
    for body in (nn.Ring(axes, 9, zigzag=True, block=4), nn.Chunked(4, axes, 9), nn.Ulysses(axes, 9)):
        parity(dataclasses.replace(CONFIGS["llama"], stacked=True), mesh, body, 9, stage=3, packed=True)


@pytest.mark.nightly
@distributed(world=2)
def test_a_rank_without_tokens_fetches_the_leaves_of_the_others() -> None:
    """All ranks ask for the leaves of the first backward in one order: a rank that asked for fewer would hang them."""
    torch.set_num_threads(1)
    config = dataclasses.replace(CONFIGS["gpt2"], stacked=True, attention=nn.Chunked(4, "sp", 1))
    first, layer, last = gpt.stages(config)
    assert_parity(
        sf.pipeline(first, [layer] * config.num_layers, last, num_microbatches=1),
        optim.sgd(0.1),
        params_of(dataclasses.replace(config, stacked=False)),
        batches_of(config, 1, False, torch.arange(1)),
        mesh=sf.make_mesh({"sp": 2}),
        reference=functools.partial(gpt.loss, dataclasses.replace(CONFIGS["gpt2"], stacked=False)),
        trainable=trainable_of(dataclasses.replace(config, stacked=False)),
        zero=sf.Zero(stage=0, axis="sp", params="host", persist_elements=0),
        batch={"tokens": sf.P("dp", "sp"), "targets": sf.P("dp", "sp"), "index": sf.P("dp")},
    )


@distributed(world=3)
def test_cut_sequences_follow_the_spec() -> None:
    """The tokens of each rank, taken by position, are its block of the rows in `sequence_order`."""
    tokens, mesh = torch.arange(24).view(2, 12), sf.make_mesh({"sp": 3})
    batch = {"tokens": tokens, "segment_ids": (tokens > 5).long() + (tokens > 16).long()}
    whole = gpt.shifted(batch)
    assert (whole["targets"] == -100).sum() == 2  # the successors of documents' last tokens
    for body in (nn.Ring("sp", 11, zigzag=True), nn.Ulysses("sp", 11), nn.Ring("sp", 11)):
        got = gpt.cut_sequences(gpt.Config(**{**SHAPE, "max_len": 11}, attention=body), batch, mesh)
        own = nn.sequence_order(body, 11, 3).chunk(3)[mesh.rank]
        assert all(torch.equal(got[name], whole[name][:, own]) for name in whole)


def test_refusals() -> None:
    mesh = sf.make_mesh({"sp": 2}, abstract=True, device="cpu")
    x = torch.ones(1, 3, 2, 2)
    with sf.collectives.bind_mesh(mesh):
        with pytest.raises(ValueError, match="needs length=, the tokens of the whole sequence"):
            nn.attention(x, x, x, impl=nn.Ring("sp"))
        with pytest.raises(ValueError, match="this rank has 3 tokens, but of 9 over 2 ranks of 'sp' its part is 5"):
            nn.attention(x, x, x, impl=nn.Ulysses("sp", 9))
        with pytest.raises(ValueError, match="has two lengths"):
            nn.attention(x, x, x, impl=nn.Ulysses("sp", 6, nn.Ring("r", 5)))
    config = gpt.Config(**SHAPE, attention=nn.Ring("sp", 8))
    with pytest.raises(ValueError, match="Give their number as length"):
        gpt.cut_sequences(config, {"tokens": torch.zeros(1, 8, dtype=torch.int64)}, mesh)
