"""Covers arguments that collectives refuse, on one rank as on many, and modes that may intercept them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import collectives as c
from shardfn.core import make_mesh
from shardfn.testing import distributed

CALLS: dict[str, Callable[[Tensor, Any], Any]] = {
    "psum": c.psum,
    "pmean": c.pmean,
    "pmax": c.pmax,
    "pvary": c.pvary,
    "all_gather": c.all_gather,
    "all_gather_invariant": c.all_gather_invariant,
    "psum_scatter": c.psum_scatter,
    "take_own_block": c.take_own_block,
    "ppermute": lambda x, axis: c.ppermute(x, axis, [(0, 0)]),
    "all_to_all": lambda x, axis: c.all_to_all(x, axis, split_dim=0, concat_dim=1),
}


def refuses_bad_axes() -> None:
    x = torch.ones(2, 2)
    for call in CALLS.values():
        with pytest.raises(ValueError, match=r"axis 'dpx' is not in the mesh.*Did you mean 'dp'"):
            call(x, "dpx")


def refuses_bad_dims() -> None:
    x = torch.ones(2, 2)
    for call in (c.all_gather, c.all_gather_invariant, c.psum_scatter, c.take_own_block):
        for dim in (2, -3):
            with pytest.raises(ValueError, match=rf"{call.__name__}: dim={dim} is out of range .*Use -2 to 1"):
                call(x, "dp", dim=dim)
        with pytest.raises(ValueError, match="Unsqueeze it first"):
            call(torch.ones(()), "dp")
    with pytest.raises(ValueError, match="split_dim=2 is out of range"):
        c.all_to_all(x, "dp", split_dim=2, concat_dim=0)
    with pytest.raises(ValueError, match="concat_dim=5 is out of range"):
        c.all_to_all(x, "dp", split_dim=0, concat_dim=5)


def refuses_bad_sizes() -> None:
    x = torch.ones(3, 2)
    for call in (c.all_gather, c.all_gather_invariant):
        with pytest.raises(ValueError, match=rf"{call.__name__}: size=20 over . ranks? gives index"):
            call(x, "dp", size=20)
    with pytest.raises(ValueError, match="all_to_all: size=20"):
        c.all_to_all(x, "dp", split_dim=1, concat_dim=0, size=20)
    with pytest.raises(ValueError, match="size=3 has no meaning"):
        c.all_to_all(x, "dp", split_dim=0, concat_dim=0, size=3)


def refuses_bad_permutations() -> None:
    x = torch.ones(2)
    for perm, message in [
        ([(0, 7)], "index is out of range"),
        ([(0, 0), (0, 0)], "source 0 must occur in one pair, got 2"),
        ([(0, 0), (-1, 0)], "destination 0 must occur in one pair, got 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            c.ppermute(x, "dp", perm)


def refuses_bad_leaves() -> None:
    for call in (c.psum, c.pmean, c.pmax, c.pvary):
        with pytest.raises(TypeError, match=r"(?s)x\['b'\] is 2.*x\['c'\]\[0\] is 'no'"):
            call({"a": torch.ones(()), "b": 2, "c": ["no"]}, "dp")


def refuse_all() -> None:
    refuses_bad_axes()
    refuses_bad_dims()
    refuses_bad_sizes()
    refuses_bad_permutations()
    refuses_bad_leaves()


def test_refusals_on_one_rank() -> None:
    refuse_all()


@pytest.mark.nightly
@distributed(world=2)
def test_refusals_on_several_ranks() -> None:
    with c.bind_mesh(make_mesh({"dp": 2}, device="cpu")):
        refuse_all()
        with pytest.raises(ValueError, match="must name each axis once"):
            c.psum(torch.ones(1), ("dp", "dp"))
        with pytest.raises(ValueError, match=r"of which 2 ranks must divide the size, got 3\. Pad it to 4"):
            c.all_to_all(torch.ones(3), "dp", split_dim=0, concat_dim=0)
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(NotImplementedError, match=r"pmax has no derivative.*x\.detach\(\)"):
            c.pmax(x, "dp").sum().backward()
        with warnings.catch_warnings(), pytest.raises(NotImplementedError, match="pmax has no derivative"):
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at the first use of forward mode
            torch.func.jvp(lambda t: c.pmax(t, "dp"), (x.detach(),), (x.detach(),))
        assert not c.pmax(x.detach(), "dp").requires_grad


@distributed(world=2)
def test_identities_on_several_ranks() -> None:
    with c.bind_mesh(make_mesh({"dp": 2}, device="cpu")):
        x = torch.ones(2, 2)
        for axis in (None, (), "tp", ("tp", "sp")):
            assert all(call(x, axis) is x for call in CALLS.values())


def test_one_rank_keeps_dtypes_and_gradients_of_many() -> None:
    assert c.psum(torch.tensor(True), "dp").dtype == torch.int64
    assert c.psum_scatter(torch.tensor([True]), "dp").dtype == torch.int64
    assert c.pmean(torch.tensor(1), "dp").dtype == torch.float32
    x = torch.tensor([torch.inf], requires_grad=True)
    (g,) = torch.autograd.grad(c.ppermute(x, "dp", []).sum(), x)
    assert g.item() == 0


class Lazy(Tensor):
    """A leaf that becomes the real tensor when an op uses it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "dim"):
            return super().__torch_function__(func, types, args, kwargs or {})
        return func(*(vars(a)["real"] if isinstance(a, Lazy) else a for a in args), **(kwargs or {}))


@distributed(world=2)
def test_a_tensor_subclass_may_intercept() -> None:
    with c.bind_mesh(make_mesh({"dp": 2}, device="cpu")):
        leaf = torch.ones(2, requires_grad=True)
        lazy = torch.zeros(2).as_subclass(Lazy)
        vars(lazy)["real"] = leaf * 3
        out = c.psum(lazy, "dp")
        assert type(out) is Tensor and out.tolist() == [6.0, 6.0]
        out.sum().backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [3.0, 3.0]


@pytest.mark.nightly
@distributed(world=2)
def test_a_tracer_captures_the_collectives_of_forward_and_backward() -> None:
    with c.bind_mesh(make_mesh({"dp": 2}, device="cpu")):
        me = c.axis_index("dp")

        def loss(x: Tensor) -> Tensor:
            whole = c.all_gather(x, "dp", size=3)
            moved = c.all_to_all(torch.outer(whole, whole[: len(x)] + me), "dp", split_dim=0, concat_dim=1, size=3)
            return c.psum((c.ppermute(moved.sum(1).sum(), "dp", [(0, 1), (1, 0)]) ** 2).sin(), "dp")

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.detach().requires_grad_()
            value = loss(x)
            return value.detach(), torch.autograd.grad(value, x)[0]

        x = torch.randn(3)[c.axis_index("dp") * 2 :][:2]
        graph = make_fx(step, tracing_mode="fake")(x)
        ops = [str(node.target) for node in graph.graph.nodes if str(node.target).startswith("shardfn.")]
        kinds = [op.split(".")[1] for op in ops]
        # forward: gather, exchange, permutation, sum; backward: permutation, exchange, scattered sum
        names = ("loss_all_gather_start", "loss_exchange_start", "loss_psum_start", "loss_psum_scatter_start", "wait")
        assert [kinds.count(name) for name in names] == [1, 4, 1, 1, 7]
        for got, want in zip(graph(x), step(x), strict=True):
            assert torch.equal(got, want)
