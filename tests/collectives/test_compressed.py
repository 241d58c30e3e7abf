"""Covers compressed collectives: the formula of all ranks at once, conservation, bytes, errors, captures, hierarchy."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
from shardfn import collectives as c
from shardfn import graph
from shardfn.collectives import Compressor, Residual
from shardfn.collectives import _reference as ref
from shardfn.collectives._residual import check_compressor
from shardfn.core import P, make_mesh, tree_leaves, tree_map
from shardfn.testing import distributed

# Forward-mode AD loads these on its first use, and torch warns of itself.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

EXACT: Any = dict(rtol=0, atol=0)
LENGTHS = (1, 7, 8, 9, 1000, 4097)
COMPRESSORS = [c.sign(), c.int8(), c.int8(block=16), c.int4(), c.top_k(0.1), c.identity()]


# The formula, of all ranks' inputs and errors.


class Oracle:
    """The computation of P ranks together, straight from the formula; keeps their errors."""

    def __init__(self, n: int, ranks: int, squeeze: Callable[[Tensor, bool], Tensor], quantum: int) -> None:
        d = math.lcm(ranks, quantum)
        self.size = -(-n // (ranks * d)) * ranks * d
        self.n, self.ranks, self.squeeze = n, ranks, squeeze
        self.worker, self.server = torch.zeros(ranks, self.size), torch.zeros(self.size)

    def mean(self, inputs: list[Tensor]) -> Tensor:
        return self._step(inputs, self.ranks)

    def _step(self, inputs: list[Tensor], divisor: int) -> Tensor:
        sent = []
        for i, x in enumerate(inputs):
            y = torch.cat([x.flatten().float(), torch.zeros(self.size - self.n)]) + self.worker[i]
            q = self.squeeze(y.view(self.ranks, -1), True).view(-1)
            self.worker[i] = y - q
            sent.append(q)
        total = sent[0].clone()
        for q in sent[1:]:
            total += q
        z = total / divisor + self.server
        out = torch.cat([self.squeeze(row[None], True)[0] for row in z.chunk(self.ranks)])
        self.server = z - out
        return out[: self.n]


def sign_of(y: Tensor, whole: bool) -> Tensor:
    del whole
    scale = y.double().square().mean().sqrt().float()
    return torch.where(y >= 0, scale, -scale)


def by(compressor: Compressor) -> Callable[[Tensor, bool], Tensor]:
    """Back and forth through a compressor whose arithmetic is tested elsewhere."""
    return lambda y, whole: compressor.decompress(
        compressor.compress(y.clone(), (), whole=whole, donate=False)[0], y.shape[1]
    )


def given(n: int, rank: int, step: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + n % 7))


def on(world: int) -> Any:
    return c.bind_mesh(make_mesh({"dp": world}, device="cpu"))


def rank() -> int:
    return c.axis_index("dp")


def same_everywhere(x: Tensor) -> None:
    blocks = c.all_gather(x[None], "dp")
    torch.testing.assert_close(blocks, x[None].expand_as(blocks), **EXACT)


def errors_of(state: Residual) -> tuple[Tensor, Tensor]:
    """The errors of all ranks, as the oracle keeps them."""
    return c.all_gather(state.worker, "dp"), c.all_gather(state.server, "dp")


# The golden values of a small example, twice in a row. Its rows of four signs do not fill a byte.

X = [[1.0, -2, 3, -4, 0.5, 0.5, -0.5, 0], [-1.0, -2, 1, 4, 0.25, -0.5, -0.75, 2]]
FIRST = [1.341931909598993 * s for s in (1, -1, 1, -1)] + [1.6429040834778512 * s for s in (1, 1, -1, 1)]
SECOND = [2.407199948092071 * s for s in (-1, -1, 1, 1)] + [1.9111488160477388 * s for s in (-1, -1, 1, 1)]
WORKER = [
    [-0.96054839, -0.03945161, 1.03945161, -2.03945161, -1.46054839, -1.46054839, 1.46054839, -1.96054839],
    [0.83285979, -0.16714021, -0.83285979, 2.16714021, -1.58285979, 1.33285979, 1.08285979, 0.16714021],
]
SERVER = [-1.27808761, -0.55477218, 0.55477218, 1.27808761, 0.25380001, -1.57905978, -0.25380001, 0.25380001]


def loose_sign() -> Compressor:
    """A compressor of one's own: signs that are sent as floats."""
    return Compressor(
        "loose", lambda like: (), lambda x, memory, *, whole, donate: ((sign_of(x, whole),), memory),
        lambda codes, c: codes[0], quantum=2,
    )  # fmt: skip


@distributed(world=2)
def test_a_worked_example() -> None:
    with on(2):
        x, compressor = torch.tensor(X[rank()]), c.error_feedback(loose_sign())
        mean, state = c.compressed_pmean(x, "dp", compressor, c.compressed_init(x, "dp", compressor))
        torch.testing.assert_close(mean, torch.tensor(FIRST))
        worker, server = errors_of(state)
        torch.testing.assert_close(worker, torch.tensor(WORKER))
        torch.testing.assert_close(server, torch.tensor(SERVER))
        mean, _ = c.compressed_pmean(x, "dp", compressor, state)
        torch.testing.assert_close(mean, torch.tensor(SECOND))


def test_sizes() -> None:
    sizes = {(1000, 2): 1008, (1000, 3): 1008, (1000, 4): 1024, (1000, 8): 1024, (1000, 16): 1024, (1024, 4): 1024}
    for (n, ranks), size in {**sizes, (8, 2): 16}.items():
        with c.bind_mesh(make_mesh({"dp": ranks}, device="cpu", abstract=True)):
            state = c.compressed_init(torch.empty(n), "dp", c.error_feedback(c.sign()))
        assert (state.worker.shape, state.server.shape) == ((1, size), (size // ranks,))
        assert state.worker.dtype == torch.float32


# Equal to the formula


@pytest.mark.nightly
@distributed(
    world=[
        1,
        2,
        3,
        4,
    ]
)
def test_equals_the_formula_of_all_ranks(world: int) -> None:
    with on(world):
        compressor = c.error_feedback(c.sign())
        tree = {f"{n:04d}": given(n, rank()) for n in LENGTHS}
        state = c.compressed_init(tree, "dp", compressor)
        oracles = [Oracle(n, world, sign_of, 8) for n in LENGTHS]
        paid, owed = [torch.zeros(n) for n in LENGTHS], [torch.zeros(n) for n in LENGTHS]
        for step in range(3):
            tree = {f"{n:04d}": given(n, rank(), step) for n in LENGTHS}
            kept = {k: (v.clone(), state[k].worker.clone()) for k, v in tree.items()}
            before = {k: errors_of(v) for k, v in state.items()}
            out, new = c.compressed_pmean(tree, "dp", compressor, state, bucket=4000)
            for (key, x), oracle in zip(kept.items(), oracles, strict=True):
                torch.testing.assert_close((tree[key], state[key].worker), x, **EXACT)  # nothing was donated
                inputs = [given(oracle.n, i, step) for i in range(world)]
                torch.testing.assert_close(out[key], oracle.mean(inputs), **EXACT)
                torch.testing.assert_close(errors_of(new[key]), (oracle.worker, oracle.server), **EXACT)
                same_everywhere(out[key])
                check_conservation(torch.stack(inputs).mean(0), before[key], out[key], errors_of(new[key]))
            for i, key in enumerate(tree):
                paid[i] += out[key]
                owed[i] += torch.stack([given(LENGTHS[i], r, step) for r in range(world)]).mean(0)
            state = new
        for i, errors in enumerate(map(errors_of, state.values())):  # over all steps, too
            check_conservation(owed[i], (torch.zeros(1, 1), torch.zeros(1)), paid[i], errors)


def check_conservation(x: Tensor, before: Any, out: Tensor, after: Any) -> None:
    n = len(x)
    left = x + before[0].mean(0)[:n] + before[1][:n]
    right = out + after[0].mean(0)[:n] + after[1][:n]
    torch.testing.assert_close(left, right, rtol=1e-6, atol=2e-6)


@pytest.mark.nightly
@distributed(world=[1, 2, 3])
def test_leaves_buckets_donation_dtypes_and_codes_change_no_bits(world: int) -> None:
    with on(world):
        compressor = c.error_feedback(c.sign())
        x = given(3000, rank())
        tree: Any = {"a": x[:1000].view(10, 100), "b": [x[:0], None, x[1000]], "c": x[:2000].view(40, 50).T}
        tree |= {"d": x[5:14].bfloat16(), "e": x.half()[:8]}
        leaves = [x[:1000].view(10, 100), x[:0], x[1000], x[:2000].view(40, 50).T, x[5:14].bfloat16(), x.half()[:8]]
        one_by_one = [c.compressed_pmean(t, "dp", compressor, c.compressed_init(t, "dp", compressor)) for t in leaves]
        state = c.compressed_init(tree, "dp", compressor)
        coded, _ = c.compressed_pmean_codes(tree, "dp", compressor, state)
        assert coded["b"][:2] == [(), None] and sum(t.nbytes for t in coded["a"]) <= 1100 // 8 + 4 * world
        for bucket, donate in ((1, False), (1100, False), (1 << 22, True)):
            copy, fresh = tree_map(torch.clone, (tree, state))
            out, new = c.compressed_pmean(copy, "dp", compressor, fresh, bucket=bucket, donate=donate)
            if donate:
                assert out["a"].data_ptr() == copy["a"].data_ptr() and new["a"].worker is not fresh["a"].worker
                assert new["a"].worker.data_ptr() == fresh["a"].worker.data_ptr()
            found = [out["a"], out["b"][0], out["b"][2], out["c"], out["d"], out["e"]]
            states = [new["a"], new["b"][0], new["b"][2], new["c"], new["d"], new["e"]]
            for have, have_state, (want, want_state), like in zip(found, states, one_by_one, leaves, strict=True):
                assert have.dtype == like.dtype
                torch.testing.assert_close(have, want, **EXACT)
                torch.testing.assert_close(tuple(have_state), tuple(want_state), **EXACT)
            torch.testing.assert_close(c.decompress_codes(coded, tree, "dp", compressor), out, **EXACT)
        room = tree_map(torch.zeros_like, tree)
        means = c.decompress_codes(coded, room, "dp", compressor, donate=True)
        torch.testing.assert_close(means, out, **EXACT)
        assert means["a"].data_ptr() == room["a"].data_ptr()
        exact = c.compressed_init(x, "dp", compressor)
        double, _ = c.compressed_pmean(x.double(), "dp", compressor, exact)
        torch.testing.assert_close(double, c.compressed_pmean(x, "dp", compressor, exact)[0].double(), **EXACT)
        wide, _ = c.compressed_pmean(x[5:14].bfloat16().float(), "dp", compressor, new["d"]._replace(
            worker=torch.zeros_like(new["d"].worker), server=torch.zeros_like(new["d"].server)))  # fmt: skip
        torch.testing.assert_close(wide.bfloat16(), out["d"], **EXACT)


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_every_compressor_equals_its_formula_and_bounds_its_error(world: int) -> None:
    with on(world):
        for plain in COMPRESSORS:
            for compressor in (plain, c.error_feedback(plain)):
                for n in (1, 9, 1000):
                    oracle = Oracle(n, world, by(plain), plain.quantum)
                    x = given(n, rank())
                    state = c.compressed_init(x, "dp", compressor)
                    assert compressor.remembers == (len(state.worker) > 0)
                    for step in range(2):
                        inputs = [given(n, i, step) for i in range(world)]
                        x = inputs[rank()].clone()
                        out, state = c.compressed_pmean(x, "dp", compressor, state, donate=step > 0)
                        if not compressor.remembers:
                            oracle = Oracle(n, world, by(plain), plain.quantum)
                        torch.testing.assert_close(out, oracle.mean(inputs), **EXACT)
                        same_everywhere(out)
                        assert_near(compressor, out, torch.stack(inputs).mean(0))


# How far from the mean the result may be, in parts of the greatest input, after two compressions.
BOUND = {"int8": 3 / 128, "int4": 3 / 8, "identity": 1e-6}


def assert_near(compressor: Compressor, out: Tensor, mean: Tensor) -> None:
    bound = BOUND.get(compressor.name.removeprefix("error_feedback(").split("(")[0])
    if bound is not None:
        assert (out - mean).abs().max() <= bound * 5  # no input is greater than 5
    else:
        assert out.isfinite().all() and out.norm() <= 3 * mean.norm() + 3


@distributed(world=[pytest.param(2, marks=pytest.mark.nightly), 3])
def test_identity_is_the_sum_in_the_order_of_ranks_and_sums_conserve(world: int) -> None:
    with on(world):
        inputs = [given(1000, i).view(10, 100) for i in range(world)]
        x = inputs[rank()]
        for compressor in (c.identity(), c.error_feedback(c.identity())):
            state = c.compressed_init(x, "dp", compressor)
            mean, kept = c.compressed_pmean(x, "dp", compressor, state)
            total, _ = c.compressed_psum(x, "dp", compressor, kept)
            torch.testing.assert_close(mean, ref.pmean_ref(inputs)[0], **EXACT)
            torch.testing.assert_close(total, ref.psum_ref(inputs)[0], **EXACT)
            if world == 2:
                torch.testing.assert_close((mean, total), (c.pmean(x, "dp"), c.psum(x, "dp")), **EXACT)
        compressor = c.error_feedback(c.sign())
        before = c.compressed_init(x, "dp", compressor)
        for step in range(2):
            inputs = [given(1000, i, step) for i in range(world)]
            out, after = c.compressed_psum(inputs[rank()].view(10, 100), "dp", compressor, before)
            left, right = errors_of(before), errors_of(after)
            torch.testing.assert_close(
                sum(inputs) + left[0].sum(0)[:1000] + left[1][:1000],
                out.view(-1) + right[0].sum(0)[:1000] + right[1][:1000],
                rtol=1e-6, atol=1e-5,
            )  # fmt: skip
            before = after


# Bytes


@distributed(world=[2, pytest.param(4, marks=pytest.mark.nightly)])
def test_bytes(world: int) -> None:
    with on(world):
        compressor = c.error_feedback(c.sign())
        tree = [given(100_000, rank()), given(1000, rank()), given(4097, rank())]
        state = c.compressed_init(tree, "dp", compressor)
        with c.count_traffic() as traffic:
            c.compressed_pmean(tree, "dp", compressor, state, bucket=100_000)
        sizes = [r.worker.numel() for r in state]
        assert traffic.by_op == {
            ("all_to_all", ("dp",)): [2, sum(n // (8 * world) + 4 for n in sizes) * (world - 1)],
            ("all_gather", ("dp",)): [2, sum(n // (8 * world) + 4 for n in sizes) * (world - 1)],
        }
        assert traffic.by_dtype == {torch.uint8: traffic.bytes}
        with c.count_traffic() as plain:
            c.pmean(tree, "dp")
        assert traffic.bytes <= plain.bytes / 31


def test_bytes_of_30_million_parameters() -> None:
    """The formula that the counter follows, for a GPT of 12 layers of width 384 and 50304 tokens."""
    leaves = [50304 * 384, 384, 384] + 12 * [384 * 1152, 384 * 384, 384 * 1536, 1536 * 384, 384, 384, 1152, 1536]
    for ranks in (2, 3, 8, 64):
        d = math.lcm(ranks, 8)
        sizes = [-(-n // (ranks * d)) * ranks * d for n in leaves]
        sent = 2 * sum(n // (8 * ranks) + 4 for n in sizes) * (ranks - 1)
        assert sum(leaves) > 30e6 and sent <= 2 * 4 * sum(leaves) * (ranks - 1) // ranks / 28


# Another number of ranks


def test_errors_of_another_number_of_ranks_owe_the_same() -> None:
    compressor, like = c.error_feedback(c.sign()), {"a": torch.empty(3, 33), "b": torch.empty(5)}
    for old, new, blocks in ((4, 2, 1), (2, 3, 1), (3, 1, 2)):
        state, sizes = {}, {}
        for key, x in like.items():
            with c.bind_mesh(make_mesh({"dp": old}, device="cpu", abstract=True)):
                width = c.compressed_init(x, "dp", compressor).worker.numel()
            n, sizes[key] = x.numel(), width
            kept = torch.arange(width) < n  # padding has no errors
            state[key] = Residual(
                given(old * blocks * width, 0).view(old, -1), given(blocks * width, 1) * kept.repeat(blocks)
            )
        out = c.recut_residuals(state, like, new, compressor, others=blocks)
        for key, x in like.items():
            with c.bind_mesh(make_mesh({"dp": new}, device="cpu", abstract=True)):
                want = c.compressed_init(x, "dp", compressor).worker.numel()
            worker, server = out[key]
            assert worker.shape == (new, blocks * want) and server.shape == (blocks * want,)
            owed = [(r.worker.mean(0) + r.server).view(blocks, -1)[:, : x.numel()] for r in (state[key], out[key])]
            torch.testing.assert_close(owed[0], owed[1], rtol=1e-6, atol=1e-6)
            assert (worker == worker[0]).all() and not worker.view(new, blocks, -1)[:, :, x.numel() :].any()
    with pytest.raises(ValueError, match=r"state\['a'\] has a worker error of \[3, .*\n.*state\['b'\]"):
        c.recut_residuals(state, like, 2, compressor)
    stateless = c.recut_residuals(c.compressed_init(like, "dp", c.int8()), like, 2, c.int8())
    assert stateless["a"] == Residual((), ())


@distributed(world=4)
def test_errors_are_global_tensors() -> None:
    mesh, compressor = make_mesh({"dp": 2, "tp": 2}, device="cpu"), c.error_feedback(c.sign())
    with c.bind_mesh(mesh):
        x = {"w": given(9, mesh.rank), "b": given(8, mesh.coords["dp"])}
        _, state = c.compressed_pmean(x, "dp", compressor, c.compressed_init(x, "dp", compressor))
        whole = c.global_residuals(state, "dp", {"w": P(None, "tp"), "b": P()})
        assert (whole["w"].worker.spec, whole["w"].server.spec) == (P("dp", "tp"), P(("tp", "dp")))
        worker, server = whole["w"].worker.full_tensor(), whole["w"].server.full_tensor()
        i, j = mesh.coords["dp"], mesh.coords["tp"]
        torch.testing.assert_close(worker.view(2, 2, 16)[i, j], state["w"].worker[0], **EXACT)
        torch.testing.assert_close(server.view(2, 2, 8)[j, i], state["w"].server, **EXACT)
        assert whole["b"].worker.shape == (2, 16) and whole["b"].server.shape == (16,)


# Two axes


@pytest.mark.nightly
@distributed(world=4)
def test_two_axes_are_exact_inside_and_compressed_between() -> None:
    mesh = make_mesh({"node": 2, "gpu": 2}, device="cpu")
    with c.bind_mesh(mesh):
        axes = ("node", "gpu")
        for compressor, squeeze in ((c.error_feedback(c.sign()), sign_of), (c.identity(), by(c.identity()))):
            for n in (1, 7, 1000, 4097):
                piece = -(-n // 2)
                oracles = [Oracle(piece, 2, squeeze, compressor.quantum) for _ in range(2)]
                x = given(n, mesh.rank)
                state = c.compressed_init(x, axes, compressor, outer="node")
                sent: dict[Any, list[int]] = {}
                for step in range(2):
                    inputs = [given(n, i, step) for i in range(4)]
                    with c.count_traffic() as traffic:
                        out, state = c.compressed_pmean(inputs[mesh.rank], axes, compressor, state, outer="node")
                    sent = traffic.by_op
                    full = [torch.cat([t, t.new_zeros(2 * piece - n)]).view(2, piece) for t in inputs]
                    nodes = [(full[0] + full[1]) / 2, (full[2] + full[3]) / 2]
                    if not compressor.remembers:
                        oracles = [Oracle(piece, 2, squeeze, compressor.quantum) for _ in range(2)]
                    want = torch.cat([oracles[g].mean([node[g] for node in nodes]) for g in range(2)])[:n]
                    torch.testing.assert_close(out, want, **EXACT)
                if compressor.remembers:
                    assert sent["psum_scatter", ("gpu",)][1] == 4 * piece
                    crossing = sum(v[1] for (_, where), v in sent.items() if "node" in where)
                    assert crossing == 2 * (oracles[0].size // 16 + 4)
                    whole = c.global_residuals(state, axes, outer="node")
                    assert whole.worker.shape == (2, 2 * oracles[0].size) and whole.worker.spec == P("node", "gpu")
                    assert whole.server.spec == P(("gpu", "node"))
                    errors = whole.worker.full_tensor().view(2, 2, -1), whole.server.full_tensor().view(2, -1)
                    for g, oracle in enumerate(oracles):
                        torch.testing.assert_close(
                            (errors[0][:, g], errors[1][g]), (oracle.worker, oracle.server), **EXACT
                        )
            both, _ = c.compressed_pmean(x, ("gpu", "node"), c.identity(), c.compressed_init(x, axes, c.identity()))
            torch.testing.assert_close(both, (given(n, 0) + given(n, 2) + given(n, 1) + given(n, 3)) / 4, **EXACT)
            codes, _ = c.compressed_pmean_codes(
                x, axes, compressor, c.compressed_init(x, axes, compressor, outer="node"), outer="node"
            )
            direct, _ = c.compressed_pmean(
                x, axes, compressor, c.compressed_init(x, axes, compressor, outer="node"), outer="node"
            )
            torch.testing.assert_close(c.decompress_codes(codes, x, axes, compressor, outer="node"), direct, **EXACT)


# psum_scatter


@pytest.mark.nightly
@distributed(world=[1, 2, 3])
def test_compressed_psum_scatter(world: int) -> None:
    with on(world):
        shapes = [(7,), (5, 3), (1, 4), (2, 0), (8, 16)]
        for plain in COMPRESSORS:
            for compressor in (plain, c.error_feedback(plain)):
                for dim in (0, -1):
                    trees = [[given(math.prod(s), i).view(s) for s in shapes] for i in range(world)]
                    state = c.compressed_scatter_init(trees[0], "dp", compressor, dim=dim)
                    out, new = c.compressed_psum_scatter(trees[rank()], "dp", compressor, state, dim=dim)
                    for i, own in enumerate(out):
                        blocks = [_rounded(plain, ref.cut(t[i], world, dim % t[i].ndim), dim) for t in trees]
                        want = blocks[0][rank()]
                        for other in blocks[1:]:
                            want = want + other[rank()]
                        torch.testing.assert_close(own, want, **EXACT)
                    if compressor.remembers and trees[0][4].numel():
                        assert new[4].server == () and new[4].worker.shape == state[4].worker.shape
                        again, _ = c.compressed_psum_scatter(trees[rank()], "dp", compressor, new, dim=dim, donate=True)
                        two = ref.psum_scatter_ref([t[4] for t in trees], dim % 2)[rank()] * 2
                        owed = c.all_to_all(new[4].worker.view(world, -1), "dp", split_dim=0, concat_dim=0)
                        assert again[4].shape == two.shape and owed.isfinite().all()


def _rounded(compressor: Compressor, blocks: list[Tensor], dim: int) -> list[Tensor]:
    """Each block there and back, as rows that are padded to the longest."""
    at = dim % blocks[0].ndim
    out = []
    for block in blocks:
        first = block.movedim(at, 0)
        rest = first.shape[1:].numel()
        c_ = -(-blocks[0].shape[at] * rest // compressor.quantum) * compressor.quantum
        flat = torch.zeros(1, c_)
        flat[0, : first.numel()] = first.reshape(-1)
        codes = compressor.compress(flat, (), whole=False, donate=False)[0]
        back = compressor.decompress(codes, c_)[0, : first.numel()] if c_ else flat[0]
        out.append(back.view(first.shape).movedim(0, at))
    return out


@pytest.mark.nightly
@distributed(world=4)
def test_psum_scatter_over_two_links() -> None:
    mesh = make_mesh({"node": 2, "gpu": 2}, device="cpu")
    with c.bind_mesh(mesh):
        for axes, shape, dim in itertools.product((("node", "gpu"), ("gpu", "node")), ((8, 6), (5, 3), (3, 2)), (0, 1)):
            inputs = [given(math.prod(shape), i).view(shape) for i in range(4)]
            x = inputs[mesh.rank]
            run = functools.partial(c.compressed_psum_scatter, x, axes, dim=dim, outer="node")
            exact = c.psum_scatter(x, axes, dim=dim)
            state = c.compressed_scatter_init(x, axes, c.identity(), dim=dim, outer="node")
            torch.testing.assert_close(run(c.identity(), state)[0], exact)
            torch.testing.assert_close(run(c.int8(), state, inner=c.int8())[0], exact, rtol=0, atol=0.15)
        x = given(4096, mesh.rank)
        with c.count_traffic() as traffic:
            c.compressed_psum_scatter(x, ("node", "gpu"), c.int4(), Residual((), ()), outer="node", inner=c.int4())
        assert traffic.by_op == {
            ("all_to_all", ("gpu",)): [1, 2048 // 2 + 2048 // 256 * 4],
            ("all_to_all", ("node",)): [1, 1024 // 2 + 1024 // 256 * 4],
        }


# quantized_all_gather


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_quantized_all_gather(world: int) -> None:
    with on(world):
        cases: list[tuple[torch.dtype, Literal[8, 4]]] = [(torch.float32, 8), (torch.bfloat16, 8), (torch.float16, 4)]
        for dtype, bits in cases:
            for shape, dim in (((7,), 0), ((4, 5), 1), ((2, 0), 0), ((1,), 0)):
                whole = given(math.prod(shape), 0).view(shape).to(dtype)
                blocks = ref.cut(whole, world, dim)
                compressor = c.int8(block=16) if bits == 8 else c.int4(block=16)
                run = functools.partial(
                    c.quantized_all_gather, axis="dp", dim=dim, size=shape[dim], bits=bits, block=16
                )
                want = torch.cat(_rounded(compressor, [b.float() for b in blocks], dim), dim).to(dtype)
                out = run(blocks[rank()])
                torch.testing.assert_close(out, want, **EXACT)
                same_everywhere(out) if out.numel() else None
                # The transpose is that of all_gather, without rounding.
                y = given(out.numel(), 5 + rank()).view(shape).to(dtype)
                back = vjp(run, blocks[rank()])[1](y)[0]
                torch.testing.assert_close(back, c.psum_scatter(y, "dp", dim=dim), **EXACT)
                tangent = jvp(run, (blocks[rank()],), (blocks[rank()],))[1]
                torch.testing.assert_close(tangent, whole, **EXACT)
                batch = torch.stack([blocks[rank()], 2 * blocks[rank()]], 1)
                torch.testing.assert_close(
                    vmap(run, in_dims=1)(batch), torch.stack([out, run(2 * blocks[rank()])]), **EXACT
                )
        with c.count_traffic() as traffic:
            c.quantized_all_gather(torch.ones(512), "dp", bits=4)
        assert traffic.by_op == {("all_gather", ("dp",)): [1, (256 + 2 * 4) * (world - 1)]}
        with pytest.raises(ValueError, match="bits=4, block=3"):
            c.quantized_all_gather(torch.ones(4), "dp", bits=4, block=3)
        with pytest.raises(TypeError, match="float64; it takes"):
            c.quantized_all_gather(torch.ones(4).double(), "dp")


# Errors


def test_decoded_values_are_no_view_of_their_codes() -> None:
    codes = (torch.ones(1, 4),)
    c.decompress_codes(codes, torch.empty(4), "dp", c.identity()).zero_()
    assert bool(codes[0].all())


def test_refusals() -> None:
    x, sign = {"a": torch.ones(9), "b": [torch.ones(3)]}, c.error_feedback(c.sign())
    state = c.compressed_init(x, "dp", sign)
    run = functools.partial(c.compressed_pmean, x, "dp", sign)
    for bad, match in (
        ({"a": state["a"]}, "Make it by compressed_init"),
        (c.compressed_init(x, "dp", c.int8()), r"x\['a'\] of shape \(9,\).*\n.*x\['b'\]\[0\].*worker error is \(\)"),
        (
            {"a": state["a"], "b": [state["a"]._replace(server=torch.ones(3))]},
            r"x\['b'\].*server error is float32 \[3\]",
        ),
        ({"a": torch.ones(3), "b": state["b"]}, r"x\['a'\]: the state must be a Residual, got Tensor"),
        ({"a": tree_map(torch.Tensor.double, state["a"]), "b": state["b"]}, r"float64 \[1, 16\], and is to be float32"),
    ):
        with pytest.raises(ValueError, match=match):
            run(bad)
    with pytest.raises(ValueError, match=r"x\['a'\].*its worker error is float32 \[1, 16\], and is to be \(\)"):
        c.compressed_psum_scatter(x, "dp", c.int8(), state)
    for what, match in (
        (c.sign, r"must be a Compressor, got .*Call it"),
        ("sign", r"must be a Compressor, got 'sign'\. The compressors are"),
    ):
        with pytest.raises(TypeError, match=match):
            check_compressor("compressed_pmean", what)
    with pytest.raises(ValueError, match=r"axis 'dpp' is not in the mesh"):
        c.compressed_pmean(x, "dpp", sign, state)
    with pytest.raises(ValueError, match="outer must be among axis='dp', got outer='tp'"):
        c.compressed_pmean(x, "dp", sign, state, outer="tp")
    with pytest.raises(TypeError, match=r"x\['a'\] is a tensor of torch.int64\n.*x\['b'\] is 3"):
        c.compressed_pmean({"a": torch.ones(2).long(), "b": 3}, "dp", sign, {"a": state["a"], "b": state["a"]})
    with pytest.raises(ValueError, match=r"dim=1 is out of range:\n  - x\['a'\] has shape \(9,\)"):
        c.compressed_scatter_init(x, "dp", sign, dim=1)
    with pytest.raises(ValueError, match="must have no memory"):
        c.compressed_psum_scatter(x, "dp", sign, state, inner=sign)
    with pytest.raises(ValueError, match="inner must have no memory, got"):
        c.error_feedback(sign)
    for make in (lambda: c.int8(0), lambda: c.int4(7), lambda: c.top_k(0.0), lambda: c.top_k(1.5)):
        with pytest.raises(ValueError, match=r"block|fraction"):
            make()


def test_there_is_no_derivative() -> None:
    x, sign = torch.ones(9), c.error_feedback(c.sign())
    state = c.compressed_init(x, "dp", sign)
    run = lambda t: c.compressed_pmean(t, "dp", sign, state)[0]  # noqa: E731
    scatter = lambda t: c.compressed_psum_scatter(t, "dp", c.int8(), Residual((), ()))[0]  # noqa: E731
    for f in (run, scatter):
        with pytest.raises(NotImplementedError, match=r"no derivative.*x.detach\(\), for\n  - x of shape \(9,\)"):
            f(x.clone().requires_grad_())
        with pytest.raises(NotImplementedError):
            grad(f)(x)
        with pytest.raises(NotImplementedError):
            jvp(f, (x,), (x,))
        with pytest.raises(NotImplementedError):
            vmap(f)(torch.ones(2, 9))
    with torch.no_grad():
        assert not run(x.clone().requires_grad_()).requires_grad


# Captures


@pytest.mark.nightly
@distributed(world=2)
def test_a_capture_is_the_same_and_its_transfers_are_those_counted() -> None:
    mesh = make_mesh({"dp": 2}, device="cpu")
    with c.bind_mesh(mesh):
        for compressor in (c.error_feedback(c.sign()), c.error_feedback(c.int8()), c.top_k(0.1)):
            for donate in (False, True):
                tree = [given(1000, rank()).view(10, 100), given(9, rank()), given(3000, rank()).bfloat16()]
                state = tree_map(lambda x: x + 0.1, c.compressed_init(tree, "dp", compressor))
                f = functools.partial(_both, compressor=compressor, donate=donate)
                gm = make_fx(f, tracing_mode="fake")(tree, state)
                with c.count_traffic() as traffic:
                    want = f(*tree_map(torch.clone, (tree, state)))
                have = gm(*tree_map(torch.clone, (tree, state)))
                torch.testing.assert_close(tree_leaves(have), tree_leaves(want), **EXACT)
                gm.meta |= {"mesh_shape": mesh.shape, "coords": mesh.coords}
                seen: dict[Any, list[int]] = {}
                for move in graph.transfers(gm):
                    entry = seen.setdefault((move.op, (move.axes,)), [0, 0])
                    entry[0], entry[1] = entry[0] + 1, entry[1] + move.sent
                assert seen == traffic.by_op


def _both(tree: Any, state: Any, compressor: Compressor, donate: bool) -> Any:
    mean, state = c.compressed_pmean(tree, "dp", compressor, state, donate=donate, bucket=1100)
    whole = c.quantized_all_gather(mean[0], "dp")
    own, _ = c.compressed_psum_scatter(whole, "dp", c.int4(), Residual((), ()))
    return mean, state, whole, own


# In a step


class _Boom(Exception):
    pass


@distributed(world=2)
def test_in_a_step_captured_or_not_and_when_a_rank_fails() -> None:
    fails: list[int] = []
    compressor = c.error_feedback(c.sign())

    def update(grads: Any, state: Any, params: Any = None, *, specs: Any = None) -> Any:
        if torch.distributed.get_rank() in fails:
            raise _Boom("before it compresses")
        varied = tree_map(lambda g: g * (1 + rank()), grads)
        out, state = c.compressed_pmean(varied, "dp", compressor, c.compressed_init(grads, "dp", compressor))
        return tree_map(lambda u, r: -0.1 * u - 0.01 * r.server.mean(), out, state), ()

    tx = sf.optim.GradientTransformation(lambda params: (), update)
    mesh = make_mesh({"dp": 2}, device="cpu")
    found = []
    for jit in (lambda loss: loss, functools.partial(sf.jit, backend="graph")):
        loss = jit(lambda params, batch: ((batch["x"] @ params["w"] + params["b"]) ** 2).mean())
        step = sf.sharded_step(loss, tx, mesh=mesh, zero=sf.Zero(stage=0))
        state = step.init({"w": given(5, 0), "b": torch.zeros(())})
        with c.count_traffic() as traffic:
            for i in range(2):
                state, _ = step(state, {"x": given(20, mesh.rank, i).view(4, 5)})
        found.append((c.unshard(state.params), traffic.by_op["all_to_all", ("dp",)]))
    torch.testing.assert_close(found[0], found[1], **EXACT)
    fails.append(1)
    step = sf.sharded_step(lambda p, b: (b["x"] @ p["w"]).mean(), tx, mesh=mesh, zero=sf.Zero(stage=0))
    state = step.init({"w": given(5, 0)})
    with pytest.raises(_Boom if mesh.rank else sf.RankError, match=None if mesh.rank else r"rank 1 raised _Boom"):
        step(state, {"x": given(20, mesh.rank).view(4, 5)})


@pytest.mark.nightly
@distributed(world=[2, 3, 4], timeout=200)
def test_a_million_elements_and_odd_lengths(world: int) -> None:
    with on(world):
        compressor = c.error_feedback(c.sign())
        lengths = [1_000_000, 65_537, 8 * world - 1, 8 * world + 1]
        oracles = [Oracle(n, world, sign_of, 8) for n in lengths]
        state = c.compressed_init([given(n, rank()) for n in lengths], "dp", compressor)
        for step in range(3):
            tree = [given(n, rank(), step) for n in lengths]
            out, state = c.compressed_pmean(tree, "dp", compressor, state, donate=step > 0)
            for mean, oracle in zip(out, oracles, strict=True):
                want = oracle.mean([given(oracle.n, i, step) for i in range(world)])
                torch.testing.assert_close(mean, want, **EXACT)
