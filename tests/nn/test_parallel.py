"""Covers the layers along an axis: values and gradients of one device, any sizes, and that no psum can be missing."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import nn, optim
from shardfn.collectives import all_gather_invariant, take_own_block
from shardfn.graph import AxisTypeError
from shardfn.models import gpt
from shardfn.nn import _cross_entropy, _parallel
from shardfn.testing import assert_parity, distributed

B, T, D, K, V = 2, 5, 6, 2, 7
CUT, COLUMNS, WHOLE = sf.P("tp"), sf.P(None, "tp"), sf.P()
Along = dict[str, Any]  # axis and sequence


def _attention(heads: nn.Heads, p: Any, x: Tensor, along: Along) -> Tensor:
    weights = nn.AttentionWeights(*(p[name] for name in ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo")))
    table = nn.rope_table(torch.arange(x.shape[1] if along["sequence"] is None else T), K, dtype=x.dtype)
    return nn.self_attention(x, weights, heads, table=table, **along)


def _alibi(p: Any, x: Tensor, along: Along) -> Tensor:
    weights = nn.AttentionWeights(p["wq"], p["wk"], p["wv"], p["wo"])
    slopes_H = torch.tensor(nn.alibi_slopes(3), dtype=x.dtype)
    return nn.self_attention(x, weights, nn.Heads(3, 3, K), slopes_H=slopes_H, **along)


def _attention_leaves(H: int, G: int, bias: bool = True) -> dict[str, Any]:
    leaves = {"wq": ((H, K, D), CUT), "wk": ((G, K, D), CUT), "wv": ((G, K, D), CUT), "wo": ((D, H, K), COLUMNS)}
    more = {"bq": ((H, K), CUT), "bk": ((G, K), CUT), "bv": ((G, K), CUT), "bo": ((D,), WHOLE)}
    return leaves | (more if bias else {})


def _linears(p: Any, x: Tensor, along: Along) -> Tensor:
    h = torch.tanh(nn.column_linear(x, p["up"], p["b_up"], features=7, **along))
    return nn.row_linear(h, p["down"], p["b"], features=7, **along)


def _normed(p: Any, x: Tensor, along: Along) -> Tensor:
    x = nn.layer_norm(x, nn.between(p["w"], **along), nn.between(p["b"], **along))
    return nn.mlp(x, p["up"], p["down"], d_ff=7, **along) + nn.rank_tokens(p["position"], **along)


# name -> (leaves with their shapes and specs, the layer)
LAYERS: dict[str, tuple[dict[str, Any], Callable[[Any, Tensor, Along], Tensor]]] = {
    "linear": ({"up": ((7, D), CUT), "b_up": ((7,), CUT), "down": ((D, 7), COLUMNS), "b": ((D,), WHOLE)}, _linears),
    "mlp": (
        {"up": ((7, D), CUT), "b_up": ((7,), CUT), "down": ((D, 7), COLUMNS), "b": ((D,), WHOLE)},
        lambda p, x, along: nn.mlp(x, p["up"], p["down"], p["b_up"], p["b"], d_ff=7, **along),
    ),
    "swiglu": (
        {"gate": ((7, D), CUT), "up": ((7, D), CUT), "down": ((D, 7), COLUMNS)},
        lambda p, x, along: nn.swiglu(x, p["gate"], p["up"], p["down"], d_ff=7, **along),
    ),
    "fused_swiglu": (
        {"up": ((2, 7, D), COLUMNS), "down": ((D, 7), COLUMNS)},
        lambda p, x, along: nn.fused_swiglu(x, p["up"], p["down"], d_ff=7, **along),
    ),
    "norm": (
        {"w": ((D,), WHOLE), "b": ((D,), WHOLE), "position": ((T, D), WHOLE)}
        | {"up": ((7, D), CUT), "down": ((D, 7), COLUMNS)},
        _normed,
    ),
    "attention": (_attention_leaves(3, 3), functools.partial(_attention, nn.Heads(3, 3, K))),
    "grouped": (_attention_leaves(4, 2), functools.partial(_attention, nn.Heads(4, 2, K))),
    "unaligned": (_attention_leaves(6, 3), functools.partial(_attention, nn.Heads(6, 3, K))),
    "one_key": (_attention_leaves(3, 1), functools.partial(_attention, nn.Heads(3, 1, K))),
    "alibi": (_attention_leaves(3, 3, bias=False), _alibi),
    "fused_attention": (
        {"w": ((3, 3, K, D), CUT), "b_w": ((3, 3, K), CUT), "wo": ((D, 3, K), COLUMNS), "b": ((D,), WHOLE)},
        lambda p, x, along: nn.fused_self_attention(x, p["w"], p["wo"], p["b_w"], p["b"], groups=3, **along),
    ),
}


def _layer_loss(name: str, axis: str | None, cut: bool, p: Any, b: Any) -> Tensor:
    """A layer between a shift, whose gradient comes through the layer, and a mean."""
    along: Along = {"axis": axis, "sequence": T if cut else None}
    x = b["x"] + p["shift"]
    y = LAYERS[name][1](p, _parallel.rank_tokens(x, **along), along)
    y = all_gather_invariant(y, axis, dim=1, size=T) if cut else y
    return ((y - b["y"]) ** 2).mean()


def _words_loss(axis: str | None, cut: bool, p: Any, b: Any) -> sf.WeightedMean:
    """A vocabulary-parallel embedding and loss of one table, with targets that do not count."""
    along: Along = {"axis": axis, "sequence": T if cut else None}
    x = nn.embedding(b["tokens"], p["table"], vocab_size=V, **along)
    x = x + nn.rank_tokens(p["shift"] * torch.ones(T, 1, dtype=x.dtype), **along)
    logits = nn.column_linear(x, p["table"], features=V, **along)
    return sf.WeightedMean(*nn.cross_entropy_sum(logits, nn.next_tokens(b["tokens"]), axis=axis, vocab_size=V))


def _case(name: str, axis: str | None, cut: bool) -> tuple[Callable[..., Any], Any, Any, dict[str, Tensor]]:
    """Loss, parameters, specs and a batch."""
    g = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    leaves = {"table": ((V, D), CUT)} if name == "words" else LAYERS[name][0]
    leaves = leaves | {"shift": ((D,), WHOLE)}
    batch = {"x": draw(B, T, D), "y": draw(B, T, D)}
    batch = {"tokens": torch.randint(V, (B, T), generator=g)} if name == "words" else batch
    loss: Callable[..., Any] = _words_loss if name == "words" else functools.partial(_layer_loss, name)
    loss = functools.partial(loss, axis, cut)
    return loss, {k: draw(s) for k, (s, _) in leaves.items()}, {k: spec for k, (_, spec) in leaves.items()}, batch


@pytest.mark.parametrize("cut", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["whole", "sequence"])
@distributed(world=3)
def test_layers_equal_one_device(cut: bool) -> None:
    _layers_equal_one_device(3, cut)


@pytest.mark.nightly
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "sequence"])
@distributed(world=[2, 8])
def test_layers_on_other_meshes_equal_one_device(cut: bool, world: int) -> None:
    _layers_equal_one_device(world, cut)


def _layers_equal_one_device(world: int, cut: bool) -> None:
    torch.set_num_threads(1)
    mesh = sf.make_mesh({"tp": world})
    for name in (*LAYERS, "words"):
        loss, params, specs, batch = _case(name, "tp", cut)
        plain = _case(name, None, False)[0]
        options: dict[str, Any] = {"specs": specs, "batch": sf.P(), "zero": sf.Zero(stage=0)}
        assert_parity(loss, optim.sgd(0.1), params, [batch], mesh=mesh, reference=plain, **options)


# Each psum and pvary of the layers, left out.


class Sites:
    """Counts the calls of some functions, and skips one, whose name it adds to `names`."""

    def __init__(self, left_out: int | None = None, names: list[str] | None = None) -> None:
        self.left_out, self.count, self.names = left_out, 0, names

    def watch(self, usual: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count - 1 != self.left_out:
                return usual(*args, **kwargs)
            if self.names is not None:
                self.names.append(usual.__name__)
            return without(*args, **kwargs)

        return called


def _own_rows_silently(x: Tensor, axis: str, *, dim: int = 0) -> Tensor:
    """`take_own_block` of the first rank, but its transpose does not join the blocks."""
    return x.narrow(dim, 0, take_own_block(x.detach(), axis, dim=dim).shape[dim])


def _lowered(
    monkeypatch: pytest.MonkeyPatch, name: str, cut: bool, left_out: int | None, names: list[str] | None = None
) -> int:
    sites = Sites(left_out, names)
    mesh = sf.make_mesh({"dp": 1, "tp": 2}, device="cpu", abstract=True)
    with monkeypatch.context() as patch:
        for module in (_parallel, _cross_entropy):
            patch.setattr(module, "psum", sites.watch(sf.psum, lambda x, axis: x))
        patch.setattr(_parallel, "pvary", sites.watch(sf.pvary, lambda x, axis: x))
        patch.setattr(_parallel, "take_own_block", sites.watch(take_own_block, _own_rows_silently))
        if name in GPTS:
            config = GPTS[name]
            loss = functools.partial(gpt.loss, config, axis="tp", sequence=cut)
            with sf.core.deferred():
                params = gpt.init(config, sf.key(0))
            specs, batch = gpt.specs(config, tp="tp"), {"tokens": torch.empty(2, 6, dtype=torch.int64, device="meta")}
        else:
            loss, params, specs, batch = _case(name, "tp", cut)
        jitted = sf.jit(loss, backend="graph")
        sf.sharded_step(jitted, optim.sgd(0.1), mesh=mesh, specs=specs, batch=sf.P("dp")).lower(params, batch)
    return sites.count


SHAPE: dict[str, Any] = {"vocab_size": V, "num_layers": 1, "d_model": D, "num_heads": 3, "max_len": T, "d_ff": 7}
GPTS = {
    "gpt2": gpt.Config(**SHAPE, per_head=True, tie_embeddings=True),
    "bloom": gpt.Config(**SHAPE, per_head=True, position="alibi", embedding_norm=True),
}


NAMES = [*LAYERS, "words", *GPTS]
BY_DAY = ("words",)


@pytest.mark.nightly
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in NAMES]
)
def test_a_psum_that_is_missing_is_refused_and_a_pvary_inserted(
    monkeypatch: pytest.MonkeyPatch, name: str, cut: bool
) -> None:
    count = _lowered(monkeypatch, name, cut, None)
    assert count >= 1
    for site in range(count):
        left_out = list[str]()
        try:
            _lowered(monkeypatch, name, cut, site, left_out)
        except AxisTypeError:
            continue
        # A slice in place of an own block is a value that varies, and right.
        assert set(left_out) <= {"pvary", "take_own_block"}, (
            f"site {site} of {count} of {name} was left out: {left_out}"
        )


def test_vocabulary_parallel_loss_has_the_published_values() -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]], requires_grad=True)
    loss = nn.cross_entropy(logits, torch.tensor([[2]]), axis="tp")
    torch.testing.assert_close(loss.item(), 2.440189699, rtol=1e-7, atol=0)
    want = torch.tensor([0.643914260, 0.236882818, -0.912855681, 0.032058603])
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0].flatten(), want, rtol=1e-6, atol=0)


@distributed(world=2)
def test_vocabulary_parallel_loss_has_the_refusals_of_one_device() -> None:
    mesh = sf.make_mesh({"tp": 2})

    def lookup(table: Tensor, tokens: Tensor) -> Tensor:
        return nn.embedding(tokens, table, axis="tp", vocab_size=3).sum()

    step = sf.sharded_step(lookup, optim.sgd(0.1), mesh=mesh, specs=CUT, batch=sf.P())
    state = step.init(torch.ones(3, 2))
    with pytest.raises((IndexError, sf.RankError), match="index out of range"):
        step(state, torch.tensor([0, 3]))


def test_alibi() -> None:
    assert nn.alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(nn.alibi_slopes(12)[8:], [0.70710678, 0.35355339, 0.17677670, 0.08838835])
    many = nn.alibi_slopes(112)
    torch.testing.assert_close(
        [*many[:3], many[63], many[64], many[-1]],
        [0.917004, 0.840896, 0.771105, 0.00390625, 0.957603, 0.016316778],
        rtol=1e-6,
        atol=0,
    )
    q, k, v = torch.randn(3, 2, T, 3, K, dtype=torch.float64)
    slopes_H = torch.tensor(nn.alibi_slopes(3), dtype=torch.float64)
    scores = torch.einsum("bthk,bshk->bhts", q, k) / K**0.5 + slopes_H[:, None, None] * torch.arange(T)  # BLOOM's form
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    want = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v)
    torch.testing.assert_close(nn.attention(q, k, v, slopes_H=slopes_H), want)
    with pytest.raises(ValueError, match="Use causal"):
        nn.attention(q, k, v, slopes_H=slopes_H, causal=False)


@pytest.mark.nightly
def test_dropout_of_rows_is_that_of_the_whole() -> None:
    index_B, key = torch.arange(3) + 7, sf.key(1)
    for tokens, width in ((13, 3), (4, 8), (1, 5), (6, 1)):
        x = torch.ones(3, tokens, width)
        whole = nn.dropout(key, x, 0.4, index_B)
        for start in range(tokens):
            for stop in range(start, tokens + 1):
                part = nn.dropout(key, x[:, start:stop], 0.4, index_B, rows=(start, tokens))
                assert torch.equal(part, whole[:, start:stop])
    with pytest.raises(ValueError, match="do not hold x"):
        nn.dropout(key, torch.ones(3, 4, 2), 0.4, index_B, rows=(2, 5))


def test_fused_layers_equal_the_layers() -> None:
    g, heads = torch.Generator().manual_seed(0), nn.Heads(4, 2, K)
    draw = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    x, w_GRKD, wo = draw(B, T, D), draw(2, 4, K, D), draw(D, 4, K)
    weights = nn.AttentionWeights(w_GRKD[:, :2].flatten(0, 1), w_GRKD[:, 2], w_GRKD[:, 3], wo)
    torch.testing.assert_close(nn.fused_self_attention(x, w_GRKD, wo), nn.self_attention(x, weights, heads))
    with pytest.raises(ValueError, match="must cut both weights equally"):
        nn.fused_self_attention(x, w_GRKD, draw(D, 3, K))
    gate, up, down = draw(7, D), draw(7, D), draw(D, 7)
    torch.testing.assert_close(nn.fused_swiglu(x, torch.stack([gate, up]), down), nn.swiglu(x, gate, up, down))
    wq, wk, wv = (w.flatten(0, 1) for w in weights[:3])
    flat = nn.AttentionWeights(wq, wk, wv, wo.flatten(1))
    assert torch.equal(nn.self_attention(x, flat, heads), nn.self_attention(x, weights, heads))
    torch.testing.assert_close(nn.column_linear(x, w_GRKD)[..., 1, 2, :], F.linear(x, w_GRKD[1, 2]))


def test_arguments_that_do_not_fit_are_named() -> None:
    mesh = sf.make_mesh({"tp": 2}, device="cpu", abstract=True)
    x, w = torch.ones(B, T, D), torch.ones(3, 6)
    flat = nn.AttentionWeights(w, w, w, w)
    with sf.collectives.bind_mesh(mesh):
        with pytest.raises(ValueError, match=r"cut 3 heads of 2 rows inside a head. .*per_head=True"):
            nn.self_attention(x, flat, nn.Heads(3, 3, K), axis="tp")
        with pytest.raises(
            ValueError, match=r"wq of .* has \(3,\) of heads=4, but .* is \(2,\). Cut the leaf along 'tp'"
        ):
            nn.self_attention(x, flat, nn.Heads(2, 2, K), axis="tp")
        with pytest.raises(ValueError, match=r"w_VD has \(7,\) of vocab_size=7, but this rank's block .* is \(4,\)"):
            nn.embedding(torch.zeros(2, 2, dtype=torch.int64), torch.ones(7, 3), axis="tp", vocab_size=7)
        with pytest.raises(ValueError, match="has other tokens"):
            nn.leave_parallel(x, "tp", sequence=4)
        config = gpt.Config(**SHAPE)
        with pytest.raises(ValueError, match=r"(?s)\['w_down'\] is .*params\['embed'\] is \(7, 6\)"):
            gpt.apply(config, gpt.init(config, sf.key(0)), torch.zeros(1, 2, dtype=torch.int64), axis="tp")


# A whole leaf where a block belongs, and a layer of unstated size.
WRONG: dict[str, Callable[[Tensor], Any]] = {
    "mlp": lambda x: nn.mlp(x, torch.ones(4, D), torch.ones(D, 4), d_ff=4, axis="tp"),
    "swiglu": lambda x: nn.swiglu(x, torch.ones(4, D), torch.ones(4, D), torch.ones(D, 4), d_ff=4, axis="tp"),
    "fused_swiglu": lambda x: nn.fused_swiglu(x, torch.ones(2, 4, D), torch.ones(D, 4), d_ff=4, axis="tp"),
    "column_linear": lambda x: nn.column_linear(x, torch.ones(3, 4, D), features=(3, 4), axis="tp"),
    "row_linear": lambda x: nn.row_linear(x, torch.ones(4, D), features=D, axis="tp"),
    "fused": lambda x: nn.fused_self_attention(x, torch.ones(2, 3, K, D), torch.ones(D, 2, K), groups=2, axis="tp"),
    "columns of wo": lambda x: nn.fused_self_attention(
        x, torch.ones(1, 4, K, D), torch.ones(D, 2, K), groups=3, axis="tp"
    ),
    "embedding": lambda x: nn.embedding(torch.zeros(2, 2, dtype=torch.int64), x[0], vocab_size=T, axis="tp"),
    "logits": lambda x: nn.cross_entropy(x, torch.zeros(B, T, dtype=torch.int64), vocab_size=D, axis="tp"),
}
UNSAID: dict[str, Callable[[Tensor], Any]] = {
    "d_ff": lambda x: nn.mlp(x, torch.ones(4, D), torch.ones(D, 4), axis="tp"),
    "features": lambda x: nn.column_linear(x, torch.ones(4, D), axis="tp"),
    "groups": lambda x: nn.fused_self_attention(x, torch.ones(2, 3, K, D), torch.ones(D, 2, K), axis="tp"),
    "vocab_size": lambda x: nn.embedding(torch.zeros(2, 2, dtype=torch.int64), x[0], axis="tp"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(WRONG)]
)
def test_a_whole_leaf_is_not_taken_for_a_block(name: str) -> None:
    mesh = sf.make_mesh({"tp": 2}, device="cpu", abstract=True)
    with sf.collectives.bind_mesh(mesh), pytest.raises(ValueError, match="this rank's block over the 2 ranks of 'tp'"):
        WRONG[name](torch.ones(B, T, D))


@pytest.mark.parametrize(
    "option", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(UNSAID)]
)
def test_the_size_of_the_whole_layer_is_required(option: str) -> None:
    mesh = sf.make_mesh({"tp": 2}, device="cpu", abstract=True)
    with sf.collectives.bind_mesh(mesh), pytest.raises(ValueError, match=f"pass {option}=, of the whole layer"):
        UNSAID[option](torch.ones(B, T, D))


@pytest.mark.nightly
@distributed(world=2)
def test_a_bias_of_values_without_one_of_keys() -> None:
    mesh = sf.make_mesh({"tp": 2})
    for keys in (2, 1):
        shapes = {"wq": (4, K, D), "wk": (keys, K, D), "wv": (keys, K, D), "wo": (D, 4, K), "bv": (keys, K)}
        g = torch.Generator().manual_seed(5)
        params = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}

        def loss(p: Any, x: Tensor, axis: str | None = None, keys: int = keys) -> Tensor:
            weights = nn.AttentionWeights(p["wq"], p["wk"], p["wv"], p["wo"], bv=p["bv"])
            return nn.self_attention(x, weights, nn.Heads(4, keys, K), axis=axis).square().mean()

        assert_parity(
            functools.partial(loss, axis="tp"),
            params=params,
            batches=[torch.randn(B, T, D, generator=g, dtype=torch.float64)],
            mesh=mesh,
            optimizer=optim.sgd(0.1),
            reference=loss,
            specs={n: COLUMNS if n == "wo" else CUT for n in shapes},
            batch=sf.P(),
        )
