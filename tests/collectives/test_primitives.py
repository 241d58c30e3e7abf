"""Covers each collective of the table against its slow spec: forward, transpose, transforms, any size, any axes."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap

import shardfn as sf
from shardfn import collectives as c
from shardfn.collectives import _reference as ref
from shardfn.collectives.transport._channel import LOSS_CHANNELS
from shardfn.collectives.transport._sharing import VARIABLE
from shardfn.core import Axes, P, block_slices, make_mesh
from shardfn.testing import distributed

# Forward-mode AD loads these on its first use, and torch warns of itself.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

Blocks = list[Tensor]
EXACT = dict(rtol=0, atol=0)


class Row(NamedTuple):
    """One collective with its arguments bound: the call, its reference, and the reference of its transpose."""

    name: str
    shapes: list[tuple[int, ...]]
    apply: Callable[[Tensor], Tensor]
    spec: Callable[[Blocks], Blocks]
    transpose: Callable[[Blocks], Blocks] | None
    invariant_in: bool = False
    invariant_out: bool = False
    sums: bool = False


def rows(axis: Axes, n: int, sizes: tuple[int, ...]) -> Iterator[Row]:
    for shape in [(), (3,), (2, 5), (0, 2)]:
        same = [shape] * n
        psum, pvary = ref.psum_ref, ref.pvary_ref
        yield Row("psum", same, lambda x: c.psum(x, axis), psum, pvary, invariant_out=True, sums=True)
        yield Row("pvary", same, lambda x: c.pvary(x, axis), pvary, psum, invariant_in=True)
        yield Row("pmax", same, lambda x: c.pmax(x, axis), ref.pmax_ref, None, invariant_out=True)
    for size, (dim, shape) in itertools.product(sizes, [(0, ()), (1, (2,)), (-1, (2, 3))]):
        at = dim if dim >= 0 else len(shape)
        tail = (3,) if dim >= 0 else ()
        yield from _dim_rows(axis, n, (*shape, size, *tail), dim, at)
    for (s, k), (split, concat) in itertools.product(itertools.product(sizes, sizes), [(0, 1), (2, 0), (-2, -1)]):
        yield _all_to_all_row(axis, n, s, k, split % 3, concat % 3)
    for dim in (0, 1):
        yield _exchange_row(axis, n, dim)
    ring = [(i, (i + 1) % n) for i in range(n)]
    for perm in [ring, ring[:-1], [(n - 1, 0)]]:
        yield _ppermute_row(axis, n, perm)


def _dim_rows(axis: Axes, n: int, whole: tuple[int, ...], dim: int, at: int) -> Iterator[Row]:
    size = whole[at]
    cuts = [tuple(b.shape) for b in ref.cut(torch.empty(whole), n, at)]
    cut = lambda f: lambda blocks: f(blocks, at)  # noqa: E731
    gather, scatter, take = cut(ref.all_gather_ref), cut(ref.psum_scatter_ref), cut(ref.take_own_block_ref)
    yield Row("all_gather", cuts, lambda x: c.all_gather(x, axis, dim=dim, size=size), gather, scatter)
    yield Row("psum_scatter", [whole] * n, lambda x: c.psum_scatter(x, axis, dim=dim), scatter, gather, sums=True)
    invariant = lambda x: c.all_gather_invariant(x, axis, dim=dim, size=size)  # noqa: E731
    yield Row("all_gather_invariant", cuts, invariant, gather, take, invariant_out=True)
    own = lambda x: c.take_own_block(x, axis, dim=dim)  # noqa: E731
    yield Row("take_own_block", [whole] * n, own, take, gather, invariant_in=True)


def _all_to_all_row(axis: Axes, n: int, s: int, k: int, split: int, concat: int) -> Row:
    shape = [2, 2, 2]
    shape[split], shape[concat] = s, k
    cuts = [tuple(b.shape) for b in ref.cut(torch.empty(shape), n, concat)]
    return Row(
        "all_to_all",
        cuts,
        lambda x: c.all_to_all(x, axis, split_dim=split, concat_dim=concat, size=k),
        lambda blocks: ref.all_to_all_ref(blocks, split, concat),
        lambda blocks: ref.all_to_all_ref(blocks, concat, split),
    )


def _exchange_row(axis: Axes, n: int, dim: int) -> Row:
    spec = lambda blocks: ref.all_to_all_ref(blocks, dim, dim)  # noqa: E731
    apply = lambda x: c.all_to_all(x, axis, split_dim=dim, concat_dim=dim)  # noqa: E731
    return Row("all_to_all", [(2 * n, n)] * n, apply, spec, spec)


def _ppermute_row(axis: Axes, n: int, perm: list[tuple[int, int]]) -> Row:
    back = [(dst, src) for src, dst in perm]
    return Row(
        "ppermute",
        [(2, 3)] * n,
        lambda x: c.ppermute(x, axis, perm),
        lambda blocks: ref.ppermute_ref(blocks, perm),
        lambda blocks: ref.ppermute_ref(blocks, back),
    )


def draw(shapes: list[tuple[int, ...]], dtype: torch.dtype, invariant: bool, seed: int) -> Blocks:
    """The blocks of all ranks, which every rank can draw."""
    out = []
    for i, shape in enumerate(shapes):
        g = torch.Generator().manual_seed(seed * 100 + (0 if invariant else i))
        out.append((torch.randn(shape, generator=g, dtype=torch.float64) * 8).to(dtype))
    return out


def check(got: Tensor, want: Tensor, row: Row, exact: bool = True) -> None:
    assert got.is_contiguous(), row.name
    tolerance: dict[str, Any] = EXACT if exact else {torch.bfloat16: dict(rtol=2e-2, atol=0.2)}.get(want.dtype, {})
    torch.testing.assert_close(got, want, **tolerance, msg=lambda m: f"{row.name} {row.shapes}: {m}")


def check_forward(row: Row, index: int, seed: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        blocks = draw(row.shapes, dtype, row.invariant_in, seed)
        if row.name == "psum_scatter" and dtype == torch.bfloat16:
            want = row.spec([b.float() for b in blocks])[index].bfloat16()
        else:
            want = row.spec(blocks)[index]
        # Only the order in which the backend's all_reduce adds is its own.
        check(row.apply(blocks[index]), want, row, exact=row.name != "psum" or dtype == torch.int64)


def check_transpose(row: Row, index: int, seed: int) -> None:
    assert row.transpose is not None
    xs, zs = (draw(row.shapes, torch.float64, row.invariant_in, seed + k) for k in (0, 1))
    outs = row.spec(xs)
    ys = draw([tuple(o.shape) for o in outs], torch.float64, row.invariant_out, seed + 2)
    x, y, z = xs[index].requires_grad_(), ys[index].requires_grad_(), zs[index]
    out = row.apply(x)
    (x_bar,) = torch.autograd.grad(out, x, y, create_graph=True)
    check(x_bar.detach(), row.transpose([b.detach() for b in ys])[index], row, exact=False)
    # <A x, y> == <x, A^T y>: sums over ranks for varying values, counted once for invariant ones.
    inner = lambda a, b, once: (a * b).sum() if once else c.psum((a * b).sum().detach(), AXIS[0])  # noqa: E731
    left, right = inner(out, y, row.invariant_out), inner(x, x_bar, row.invariant_in)
    torch.testing.assert_close(left.detach(), right.detach(), rtol=1e-12, atol=1e-11)
    # (A^T)^T == A
    (back,) = torch.autograd.grad(x_bar, y, z)
    check(back, row.spec(zs)[index], row, exact=False)


def check_transforms(row: Row, index: int, seed: int) -> None:
    assert row.transpose is not None
    xs, vs = (draw(row.shapes, torch.float64, row.invariant_in, seed + k) for k in (0, 1))
    x, v = xs[index], vs[index]
    out, tangent = jvp(row.apply, (x,), (v,))[:2]
    check(out, row.spec(xs)[index], row, exact=False)
    check(tangent, row.spec(vs)[index], row, exact=False)
    pull = vjp(row.apply, x)[1]
    check(pull(out)[0], row.transpose(row.spec(xs))[index], row, exact=False)

    def loss(t: Tensor) -> Tensor:
        value = (row.apply(t) ** 2).sum()
        return value if row.invariant_out else c.psum(value, AXIS[0])

    normal = lambda blocks: [2 * b for b in row.transpose(row.spec(blocks))]  # type: ignore[misc]  # noqa: E731
    check(grad(loss)(x), normal(xs)[index], row, exact=False)
    check(jvp(grad(loss), (x,), (v,))[1], normal(vs)[index], row, exact=False)
    check(grad(lambda t: (grad(loss)(t) * v).sum())(x), normal(vs)[index], row, exact=False)


def check_vmap(row: Row, index: int, seed: int) -> None:
    batch = [draw(row.shapes, torch.float64, row.invariant_in, seed + k)[index] for k in range(3)]
    want = torch.stack([row.apply(x) for x in batch])
    for in_dim in range(batch[0].ndim + 1):
        check(vmap(row.apply, in_dims=in_dim)(torch.stack(batch, in_dim)).contiguous(), want, row, exact=False)
    nested = vmap(vmap(row.apply, in_dims=-1), in_dims=0)
    both = torch.stack([torch.stack(batch, -1)] * 2)
    check(nested(both).contiguous(), torch.stack([want] * 2), row, exact=False)
    if row.transpose is not None:
        pulls = torch.stack([vjp(row.apply, x)[1](x_out)[0] for x, x_out in zip(batch, want, strict=True)])
        got = vmap(lambda x, y: vjp(row.apply, x)[1](y)[0])(torch.stack(batch), want)
        check(got.contiguous(), pulls, row, exact=False)


AXIS: list[Axes] = [None]


def check_rows(axis: Axes, seed: int, sizes: tuple[int, ...]) -> None:
    AXIS[0] = axis
    n, index = c.axis_size(axis), c.axis_index(axis)
    for k, row in enumerate(rows(axis, n, sizes)):
        check_forward(row, index, seed + 3 * k)
        if row.transpose is not None:
            check_transpose(row, index, seed + 3 * k)
    for k, row in enumerate(rows(axis, n, sizes[-1:])):
        check_vmap(row, index, seed + 3 * k)
        if row.transpose is not None:
            check_transforms(row, index, seed + 3 * k)


@distributed(
    world=[
        pytest.param(1, marks=pytest.mark.nightly),
        2,
        pytest.param(3, marks=pytest.mark.nightly),
        pytest.param(4, marks=pytest.mark.nightly),
    ],
    timeout=300,
)
def test_rows_equal_the_slow_spec(world: int) -> None:
    with c.bind_mesh(make_mesh({"dp": world}, device="cpu")):
        check_rows("dp", 0, (2, 7))


@pytest.mark.nightly
@distributed(world=4, timeout=300)
def test_rows_along_one_or_several_axes_of_a_grid() -> None:
    with c.bind_mesh(make_mesh({"dp": 2, "tp": 2}, device="cpu")):
        check_rows(("dp", "sp"), 1000 * c.axis_index("tp"), (3,))
        check_rows(("tp", "dp"), 0, (7,))


@pytest.mark.nightly
@distributed(world=4)
def test_blocks_are_those_of_the_partition_spec() -> None:
    mesh = make_mesh({"dp": 2, "tp": 2}, device="cpu")
    axes: list[Axes] = ["dp", "tp", ("dp", "tp"), ("tp", "dp")]
    with c.bind_mesh(mesh):
        for size, axis, dim in itertools.product([0, 1, 2, 3, 5, 6, 9], axes, [0, 1]):
            spec = P(*[None] * dim, axis)
            whole = torch.arange(size * 3).reshape((size, 3) if dim == 0 else (3, size))
            block = whole[block_slices(tuple(whole.shape), spec, mesh.shape, mesh.coords)]
            assert torch.equal(c.take_own_block(whole, axis, dim=dim), block)
            assert torch.equal(c.psum_scatter(whole, axis, dim=dim), block * mesh.axis_size(axis))
            assert torch.equal(c.all_gather(block, axis, dim=dim, size=size), whole)
            assert torch.equal(c.all_gather_invariant(block, axis, dim=dim, size=size), whole)
            other = P(*[None] * (1 - dim), axis)
            moved = whole[block_slices(tuple(whole.shape), other, mesh.shape, mesh.coords)]
            assert torch.equal(c.all_to_all(block, axis, split_dim=1 - dim, concat_dim=dim, size=size), moved)


@distributed(world=4)
def test_the_backend_s_own_reduce_scatter_gives_the_same_blocks() -> None:
    with c.bind_mesh(make_mesh({"dp": 2, "tp": 2}, device="cpu")) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "gloo")
        whole = torch.arange(30).reshape(5, 6) * (c.axis_index(("dp", "tp")) + 1)
        cases = list(itertools.product(["tp", ("dp", "tp"), ("tp", "dp")], [0, 1]))
        want = [c.psum_scatter(whole, axis, dim=dim) for axis, dim in cases]
        channels: Any = LOSS_CHANNELS.get(mesh)
        for channel in channels._made.values():
            channel._direct = False  # as that of a backend that sums by itself
        for (axis, dim), block in zip(cases, want, strict=True):
            assert torch.equal(c.psum_scatter(whole, axis, dim=dim), block)


@distributed(world=3)
def test_jacobian_of_a_gather() -> None:
    with c.bind_mesh(make_mesh({"dp": 3}, device="cpu")):
        x = torch.randn(2)
        jacobian = jacrev(lambda t: c.all_gather_invariant(t, "dp"))(x)
        lo = 2 * c.axis_index("dp")
        torch.testing.assert_close(jacobian, torch.eye(6)[:, lo : lo + 2])


@distributed(world=2)
def test_pmean_and_trees() -> None:
    with c.bind_mesh(make_mesh({"dp": 2}, device="cpu")):
        me = c.axis_index("dp")
        tree = {"a": torch.tensor([1.0, 2.0]) + me, "b": (None, torch.tensor(me))}
        got = c.pmean(tree, "dp")
        torch.testing.assert_close(got["a"], torch.tensor([1.5, 2.5]))
        assert got["b"][0] is None and got["b"][1] == 0.5
        assert c.psum(tree, "dp")["b"][1] == 1
        assert c.pmax(tree, "dp")["a"].tolist() == [2.0, 3.0]
        assert c.pvary(tree, "dp")["b"][1] == me
        x = torch.tensor([3.0], requires_grad=True)
        (g,) = torch.autograd.grad(c.pmean(x * (me + 1), "dp").sum(), x)
        assert g.item() == (me + 1) / 2
        flags = torch.tensor([me == 0, me == 1, False, True])
        assert c.psum(flags, "dp").tolist() == [1, 1, 0, 2]
        assert c.pmax(flags, "dp").tolist() == [True, True, False, True]
        assert c.psum_scatter(flags, "dp").tolist() == [[1, 1], [0, 2]][me]


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_a_nan_of_one_rank_is_the_maximum_of_all(world: int) -> None:
    """By torch's own group and through memory, eagerly and captured; NaN of either sign, infinities and zeros."""
    me = torch.distributed.get_rank()
    nan = torch.tensor(torch.nan)
    own = [nan, -nan, -torch.inf, -0.0, -1.5] if me == world - 1 else [torch.inf, 1.0, -2.0, 0.0, -1.25]
    want = torch.tensor([torch.nan, torch.nan, -2.0, 0.0, -1.25])
    for channel in ("gloo", "memory"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHARDFN_CHANNEL", channel)
            mesh = make_mesh({"dp": world}, device="cpu")
            with mesh, c.bind_mesh(mesh):
                for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                    x = torch.stack([torch.as_tensor(v) for v in own]).to(dtype)
                    for f in (c.pmax, sf.jit(c.pmax, backend="graph")):
                        got = f(x, "dp")
                        assert got.dtype == dtype
                        torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0, equal_nan=True)
                assert c.pmax(x.new_zeros(0, 2), "dp").shape == (0, 2)
                assert c.pmax(x[0], "dp").isnan()


@distributed(world=2)
def test_a_reduced_loss_has_the_gradient_of_the_whole_batch() -> None:
    with c.bind_mesh(make_mesh({"dp": 2}, device="cpu")):
        w, batch = torch.randn(3), torch.randn(4, 3)
        mine = c.take_own_block(batch, "dp")
        sharded = grad(lambda w: c.pmean(torch.tanh(mine @ c.pvary(w, "dp")).mean(), "dp"))(w)
        torch.testing.assert_close(sharded, grad(lambda w: torch.tanh(batch @ w).mean())(w))
