"""Covers `ragged_all_to_all` and `ragged_exchange`: values, derivatives, batches, graphs, traffic and refusals."""

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, jvp, vmap

import shardfn as sf
from shardfn.collectives import HEAD, bind_mesh, ragged_exchange
from shardfn.collectives._reference import ragged_all_to_all_ref
from shardfn.collectives.transport._sharing import VARIABLE
from shardfn.core import Axes
from shardfn.testing import distributed

# Forward-mode AD loads these on its first use, and torch warns of itself.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

_DTYPES = (torch.float64, torch.bfloat16, torch.int64)


class Case(NamedTuple):
    """The places of all ranks, sender by sender, and the rows of each rank."""

    rows: list[int]
    room: list[int]
    input_offsets: list[list[int]]
    send_sizes: list[list[int]]
    output_offsets: list[list[int]]

    def places(self, r: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
        """The operands of rank r."""
        received = [sizes[r] for sizes in self.send_sizes]
        each = (self.input_offsets[r], self.send_sizes[r], self.output_offsets[r], received)
        return tuple(torch.tensor(x, dtype=dtype) for x in each)


def draw_case(n: int, seed: int, *, apart: bool = False) -> Case:
    """Random places: gaps, ranks without rows, rows that go to several ranks unless `apart`."""
    made = random.Random(seed)
    sizes = [[made.choice([0, 0, 1, 2, 3, 5]) for _ in range(n)] for _ in range(n)]
    starts, rows = [], []
    for own in sizes:
        at = [0] * n
        end = 0
        for j in made.sample(range(n), n):
            at[j] = end if apart else made.randint(0, max(end, 2))
            end = max(end, at[j] + own[j]) + made.randint(0, 1)
        starts.append(at)
        rows.append(end)
    offsets, room = [[0] * n for _ in range(n)], []
    for j in range(n):
        end = made.randint(0, 2)
        for i in made.sample(range(n), n):
            offsets[i][j] = end
            end += sizes[i][j] + made.randint(0, 1)
        room.append(end)
    return Case(rows, room, starts, sizes, offsets)


def draw(counts: list[int], row: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """The rows of all ranks, which every rank can draw."""
    made = torch.Generator().manual_seed(seed)
    return [(torch.randn(k, *row, generator=made, dtype=torch.float64) * 8).to(dtype) for k in counts]


def by_numpy(case: Case, xs: list[Tensor], outs: list[Tensor]) -> list[np.ndarray]:
    """JAX's definition: slice i of a shard is written to device i's output, at an offset that the sender names."""
    results = [out.numpy().copy() for out in outs]
    for sender, x in enumerate(xs):
        for receiver in range(len(xs)):
            start, to = case.input_offsets[sender][receiver], case.output_offsets[sender][receiver]
            for k in range(case.send_sizes[sender][receiver]):
                results[receiver][to + k] = x.numpy()[start + k]
    return results


def _call(case: Case, r: int, axis: Axes = "ep") -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, out: sf.ragged_all_to_all(x, out, *case.places(r), axis=axis)


def _same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def _ref(case: Case, xs: list[Tensor], outs: list[Tensor]) -> list[Tensor]:
    return ragged_all_to_all_ref(xs, outs, case.input_offsets, case.send_sizes, case.output_offsets)


@pytest.mark.day("gloo-3")
@distributed(world=(pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly), 3))
@pytest.mark.parametrize("way", ["memory", "gloo"])
def test_rows_go_to_the_ranks_that_their_senders_choose(world: int, way: str) -> None:
    r = dist.get_rank() if world > 1 else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, way)
        with sf.make_mesh({"ep": world}, device="cpu") as mesh, bind_mesh(mesh):
            for seed in range(12):
                case, dtype = draw_case(world, seed), _DTYPES[seed % 3]
                row = [(), (3,), (2, 5), (0,)][seed % 4]
                xs, outs = draw(case.rows, row, dtype, seed), draw(case.room, row, dtype, seed + 100)
                places = case.places(r, (torch.int64, torch.int32)[seed % 2])
                got = sf.ragged_all_to_all(xs[r], outs[r], *places, axis="ep")
                _same(got, _ref(case, xs, outs)[r])
                if dtype != torch.bfloat16:
                    _same(got, torch.from_numpy(by_numpy(case, xs, outs)[r]))
                assert got.data_ptr() != outs[r].data_ptr() or not got.numel()


@distributed(world=(pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(3, marks=pytest.mark.nightly)))
def test_derivatives_are_those_of_the_slow_spec(world: int) -> None:
    r = dist.get_rank() if world > 1 else 0
    with bind_mesh(sf.make_mesh({"ep": world}, device="cpu")):
        for seed in range(6):
            case = draw_case(world, seed)
            xs, vs, outs, us, ys, zs = (
                draw(counts, (2,), torch.float64, seed * 10 + k)
                for k, counts in enumerate([case.rows, case.rows, case.room, case.room, case.room, case.rows])
            )
            leaves = [t.requires_grad_() for t in (*xs, *outs)]
            want = torch.autograd.grad(_ref(case, xs, outs), leaves, ys, allow_unused=True, materialize_grads=True)
            got = torch.autograd.grad(_call(case, r)(xs[r], outs[r]), (xs[r], outs[r]), ys[r])
            torch.testing.assert_close(got, (want[r], want[world + r]))
            # The transpose is linear, too, and its transpose is the exchange.
            y = ys[r].requires_grad_()
            (x_bar,) = torch.autograd.grad(_call(case, r)(xs[r], outs[r]), xs[r], y, create_graph=True)
            (back,) = torch.autograd.grad(x_bar, y, zs[r])
            zeros = [torch.zeros_like(o) for o in outs]
            torch.testing.assert_close(back, _ref(case, zs, zeros)[r].detach())
            tangent = jvp(_call(case, r), (xs[r].detach(), outs[r].detach()), (vs[r], us[r]))[1]
            _same(tangent, _ref(case, vs, us)[r].detach())
            by_func = grad(lambda x, case=case, y=y, out=outs[r]: (_call(case, r)(x, out.detach()) * y.detach()).sum())
            torch.testing.assert_close(by_func(xs[r].detach()), got[0])


@distributed(world=3)
@pytest.mark.parametrize("rows", [None, 7])
def test_the_transpose_of_an_exchange_is_its_inverse_bit_for_bit(rows: int | None) -> None:
    sizes = torch.tensor([[1, 0, 3], [2, 2, 0], [0, 0, 1]])
    with sf.make_mesh({"ep": 3}, device="cpu") as mesh, bind_mesh(mesh):
        x = draw(sizes.sum(1).tolist(), (2,), torch.float64, 0)[mesh.rank].requires_grad_()
        y = sf.collectives.exchange_rows(x, sizes, "ep", rows=rows)
        assert len(y) == (sizes[:, mesh.rank].sum() if rows is None else rows)
        _same(torch.autograd.grad(y, x, y.detach())[0], x.detach())
        _same(sf.collectives.exchange_rows(y, sizes.t(), "ep", rows=len(x)), x)


@distributed(world=(pytest.param(1, marks=pytest.mark.nightly), 3))
def test_batches_of_rows_and_batches_of_places_are_their_members(world: int) -> None:
    r = dist.get_rank() if world > 1 else 0
    with bind_mesh(sf.make_mesh({"ep": world}, device="cpu")):
        cases = [draw_case(world, seed) for seed in (3, 4)]
        rows = [max(k) for k in zip(*(case.rows for case in cases), strict=True)]
        room = [max(k) for k in zip(*(case.room for case in cases), strict=True)]
        xs, outs = torch.randn(rows[r], 2, 3).double(), torch.randn(2, room[r], 3).double()
        # One exchange of rows that are twice as wide.
        got = vmap(_call(cases[0], r), (1, 0), 1)(xs, outs)
        for b in range(2):
            _same(got[:, b], _call(cases[0], r)(xs[:, b].contiguous(), outs[b]))
        # Places that differ between members, of rows that do not, and with gradients.
        places = [torch.stack(each) for each in zip(*(case.places(r) for case in cases), strict=True)]
        x = torch.randn(rows[r], 3).double()
        f = lambda x, out, *places: sf.ragged_all_to_all(x, out, *places, axis="ep")  # noqa: E731
        got = vmap(f, (None, 0, 0, 0, 0, 0))(x, outs, *places)
        for b, case in enumerate(cases):
            _same(got[b], _call(case, r)(x, outs[b]))
        square = lambda x, out, *places: (f(x, out, *places) ** 2).sum()  # noqa: E731
        both = torch.stack([x, -x])
        got = vmap(grad(square))(both, outs, *places)
        for b, case in enumerate(cases):
            want = grad(square)(both[b], outs[b], *case.places(r))
            torch.testing.assert_close(got[b], want)


@distributed(world=4)
def test_axes_in_any_order_count_ranks_in_the_order_of_their_names() -> None:
    mesh = sf.make_mesh({"dp": 2, "ep": 2}, device="cpu")
    with bind_mesh(mesh):
        for seed, axis in enumerate([("dp", "ep"), ("ep", "dp"), "ep", "dp"]):
            n, index = mesh.axis_size(axis), mesh.axis_index(axis)
            case = draw_case(n, seed, apart=True)
            xs, outs = draw(case.rows, (2,), torch.float64, seed), draw(case.room, (2,), torch.float64, seed + 9)
            _same(_call(case, index, axis)(xs[index], outs[index]), _ref(case, xs, outs)[index])
            x = torch.arange(8.0) + 10 * index
            got, sizes = ragged_exchange(x, torch.arange(n), axis)
            begin = index * (index - 1) // 2
            _same(got, torch.cat([torch.arange(8.0)[begin : begin + index] + 10 * j for j in range(n)]))
            assert sizes.tolist() == [index] * n


@distributed(world=(pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly), 3))
def test_an_exchange_returns_the_rows_that_arrive(world: int) -> None:
    r = dist.get_rank() if world > 1 else 0
    with bind_mesh(sf.make_mesh({"ep": world}, device="cpu")):
        for seed in range(4):
            sizes = draw_case(world, seed).send_sizes
            xs = draw([sum(s) + 1 for s in sizes], (2,), torch.float64, seed)
            parts = [x[:-1].split(s) for x, s in zip(xs, sizes, strict=True)]
            x = xs[r].requires_grad_()
            got, come = ragged_exchange(x, torch.tensor(sizes[r]), "ep")
            _same(got.detach(), torch.cat([parts[i][r] for i in range(world)]).detach())
            assert come.tolist() == [s[r] for s in sizes]
            (g,) = torch.autograd.grad((got * (r + 1)).sum(), x)
            each = [torch.full((k, 2), j + 1.0) for j, k in enumerate(sizes[r])]
            _same(g, torch.cat([*each, torch.zeros(1, 2)]).double())
        with pytest.raises(
            ValueError,
            match=r"vmapped over send_sizes\.\s+Use\s+sf.ragged_all_to_all, with an `out`",
        ):
            sf.jit(lambda x: ragged_exchange(x, torch.tensor([1] * world), "ep")[0])(torch.ones(world))
        with pytest.raises(ValueError, match="vmapped over send_sizes"):
            vmap(lambda s: ragged_exchange(torch.ones(world), s, "ep")[0])(torch.ones(2, world, dtype=torch.int64))
        if world > 1:
            with pytest.raises(ValueError, match=rf"rank 1 of 'ep': send_sizes\[0\] must be 0 or more, got -{1}"):
                ragged_exchange(torch.ones(9), torch.tensor([-1 if r == 1 else 1] + [1] * (world - 1)), "ep")
            with pytest.raises(ValueError, match=r"input_offsets\[1\] is 1 and send_sizes\[1\] 9, beyond the 4 rows"):
                ragged_exchange(torch.ones(4), torch.tensor([1, 9] + [0] * (world - 2)), "ep")


@distributed(world=(2, pytest.param(3, marks=pytest.mark.nightly)))
def test_the_bytes_are_those_that_leave(world: int) -> None:
    r, case = dist.get_rank(), draw_case(world, 5)
    with bind_mesh(sf.make_mesh({"ep": world}, device="cpu")):
        x, out = torch.ones(case.rows[r], 3, requires_grad=True), torch.ones(case.room[r], 3)
        leaving = sum(k for j, k in enumerate(case.send_sizes[r]) if j != r)
        coming = sum(s[r] for j, s in enumerate(case.send_sizes) if j != r)
        compared = 8 * (HEAD + 4 * world) * (world - 1)
        for f in (_call(case, r), sf.jit(_call(case, r), backend="graph")):
            with sf.count_traffic() as traffic:
                y = f(x.detach(), out)
            assert traffic.by_op == {
                ("all_gather", ("ep",)): [1, compared],
                ("ragged_all_to_all", ("ep",)): [1, leaving * 12],
            }
        y = _call(case, r)(x, out)
        with sf.count_traffic() as traffic:
            y.sum().backward()
        assert traffic.by_op == {("ragged_all_to_all", ("ep",)): [1, coming * 12]}


@distributed(world=2)
def test_a_backward_may_come_when_no_mesh_is_bound() -> None:
    r, case = dist.get_rank(), draw_case(2, 5)
    x = torch.ones(case.rows[r], 3, requires_grad=True)
    with bind_mesh(sf.make_mesh({"ep": 2}, device="cpu")):
        y = _call(case, r)(x, torch.ones(case.room[r], 3))
        (want,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert want.any()
    _same(torch.autograd.grad(y.sum(), x)[0], want)


_GOOD = {"io": [0, 1], "ss": [1, 1], "oo": [0, 0], "rs": [1, 1]}


@pytest.mark.day("False")
@distributed(world=2)
@pytest.mark.parametrize("graph", [False, True])
def test_places_that_do_not_fit_are_refused_on_all_ranks_before_anything_is_sent(graph: bool) -> None:
    r = dist.get_rank()
    bad = {  # of rank 1, whose rows go to row 1 of each rank
        "input_offsets[0] is 3 and send_sizes[0] 1, beyond the 3 rows of x": {"io": [3, 1]},
        "send_sizes[0] must be 0 or more, got -1": {"ss": [-1, 1]},
        "recv_sizes[1] must be 0 or more, got -2": {"rs": [1, -2]},
        "rank 1 of 'ep' sends 2 rows to rank 0 of 'ep', whose recv_sizes[1] is 1. Use one number": {"ss": [2, 1]},
        "rank 0 of 'ep' sends 1 rows to rank 1 of 'ep', whose recv_sizes[0] is 0. Use one number": {"rs": [0, 1]},
        "output_offsets[0] is 4 and send_sizes[0] 1, beyond the 4 rows that out has on rank 0 of 'ep'": {"oo": [4, 1]},
        "output_offsets[1] is -1 and send_sizes[1] 1, beyond": {"oo": [1, -1]},
        "rank 0 of 'ep': two ranks write the same rows of out: rows 0 to 1 of rank 0 of 'ep' and rows 0 to 1 of": {
            "oo": [0, 1]
        },
    }
    with bind_mesh(sf.make_mesh({"ep": 2}, device="cpu")):
        call: Any = functools.partial(sf.ragged_all_to_all, axis="ep")
        f: Any = sf.jit(lambda x, out, *places: call(x, out, *places), backend="graph") if graph else call
        x, out = torch.arange(3.0), torch.zeros(4)
        good = _GOOD | {"oo": [1, 1] if r else [0, 0]}
        for text, changes in bad.items():
            places = good | (changes if r == 1 else {})
            with sf.count_traffic() as traffic, pytest.raises(ValueError, match="Nothing was sent") as error:
                f(x, out, *(torch.tensor(places[k]) for k in ("io", "ss", "oo", "rs")))
            assert text in str(error.value), (text, str(error.value))
            assert not any(op == "ragged_all_to_all" for op, _ in traffic.by_op)
            assert out.eq(0).all()
            after = f(x, out, *(torch.tensor(good[k]) for k in ("io", "ss", "oo", "rs")))
            _same(after, torch.tensor([1.0, 1, 0, 0] if r else [0.0, 0, 0, 0]))


@distributed(world=2)
def test_operands_that_do_not_go_together_are_refused_on_all_ranks() -> None:
    r, one = dist.get_rank(), torch.tensor([1, 1])
    at = torch.tensor([r, r])
    good: dict[str, Any] = {
        "x": torch.ones(2, 3),
        "out": torch.zeros(2, 3),
        "input_offsets": one - 1,
        "send_sizes": one,
        "output_offsets": at,
        "recv_sizes": one,
    }
    bad: dict[str, dict[str, Any]] = {
        "x is torch.float32, out torch.float64. Cast one of them": {"out": torch.zeros(2, 3).double()},
        "rows of x and out must have one shape, got (4,) and (3,)": {"x": torch.ones(2, 4)},
        "x and out must have rows along dim 0, got shapes () and (2, 3)": {"x": torch.tensor(1.0)},
        "send_sizes must have one entry a rank, (2,), got shape (3,)": {"send_sizes": torch.ones(3, dtype=torch.int64)},
        "recv_sizes must be torch.int32 or torch.int64, got torch.float32": {"recv_sizes": one.float()},
        "output_offsets must have one entry a rank, (2,), got shape (1, 2)": {"output_offsets": at[None]},
    }
    with bind_mesh(sf.make_mesh({"ep": 2}, device="cpu")):
        for text, changes in bad.items():
            with pytest.raises(ValueError, match="rank 1 of 'ep': ") as error:
                sf.ragged_all_to_all(**good | (changes if r else {}), axis="ep")
            assert text in str(error.value), str(error.value)
        with pytest.raises(ValueError, match=r"rank 1 of 'ep': rows of float64 \(3,\)") as error:
            double = {"x": good["x"].double(), "out": good["out"].double()}
            sf.ragged_all_to_all(**good | (double if r else {}), axis="ep")
        assert "rank 0 of 'ep': rows of float32 (3,)" in str(error.value)
        assert sf.ragged_all_to_all(**good, axis="ep").eq(1).all()
    with pytest.raises(ValueError, match=r"send_sizes must have one entry a rank, \(1,\), got shape \(2,\)"):
        sf.ragged_all_to_all(good["x"], good["out"], one[:1] - 1, one, one[:1], one[:1], "ep")
    with pytest.raises(ValueError, match="this rank: output_offsets"):
        sf.ragged_all_to_all(good["x"], good["out"], one[:1] - 1, one[:1], one[:1] + 1, one[:1], "ep")


@pytest.mark.day("inductor-2")
@distributed(world=(pytest.param(1, marks=pytest.mark.nightly), 2))
@pytest.mark.parametrize("backend", ["graph", "inductor"])
def test_one_graph_serves_all_places(world: int, backend: str) -> None:
    r = dist.get_rank() if world > 1 else 0
    cases = [draw_case(world, seed) for seed in range(8)]
    rows, room = (
        max(max(k) for k in zip(*(getattr(c, name) for c in cases), strict=True)) for name in ("rows", "room")
    )

    def f(x: Tensor, out: Tensor, *places: Tensor) -> tuple[Tensor, Tensor]:
        def square(x: Tensor) -> Tensor:
            return (sf.ragged_all_to_all(x * 2, out, *places, axis="ep").sin() ** 2).sum()

        return sf.ragged_all_to_all(x + 1, out, *places, axis="ep"), torch.func.grad(square)(x)

    with bind_mesh(sf.make_mesh({"ep": world}, device="cpu")):
        graph = sf.jit(f, backend=backend)
        for seed, case in enumerate(cases):
            x, out = draw([rows, room], (4,), torch.float64, seed + 7 * r)
            got, want = graph(x, out, *case.places(r)), f(x, out, *case.places(r))
            _same(got[0], want[0])
            torch.testing.assert_close(got[1], want[1])
        assert graph.cache_info().misses == 1
