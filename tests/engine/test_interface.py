"""Covers the interface of a sharded function: arguments, results, their global shapes, and the errors of each."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import GlobalTensor
from shardfn.core import Mesh
from shardfn.engine import Interface

from .fakes import ScriptedRounds

P = sf.P
MESH = Mesh({"dp": 2, "tp": 2}, torch.device("cpu"), abstract=True)  # this is rank 0


def _leaf(*shape: int, spec: P, **more: Any) -> GlobalTensor:
    """A leaf; this rank has the first half along each dim that is cut."""
    block = [-(-n // 2) if spec.dim_axes(d) else n for d, n in enumerate(shape)]
    return GlobalTensor(torch.ones(block), torch.Size(shape), spec, more.pop("mesh", MESH), **more)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"in_specs": ("dp",)}, r"in_specs'?\]?\[0\] is 'dp'; write P\(\.\.\.\), or None"),
        pytest.param(
            {"donate": (0,)}, "donate=0: the first argument is gathered during its use", marks=pytest.mark.nightly
        ),
        pytest.param(
            {"donate": (1,)}, r"donate=1 has no effect: in_specs has no entry for args\[1\]", marks=pytest.mark.nightly
        ),
        ({"in_specs": (None,), "donate": (1,)}, "donate=1 has no effect"),
    ],
)
def test_specs_and_donations_that_fit_no_call_are_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Interface(MESH, **how).check()


def test_arguments_have_the_specs_of_their_prefix_and_are_seen_as_blocks() -> None:
    interface = Interface(MESH, (P("dp"), None), donate=(1,))
    interface.check()
    cache = {"k": _leaf(4, 3, spec=P("dp")), "v": _leaf(6, spec=P("dp"))}
    plain = torch.zeros(2)
    k, v, x, name = interface.arguments((cache, plain, "name"))
    assert [a.path for a in (k, v, x, name)] == ["args[1]['k']", "args[1]['v']", "args[2]", "args[3]"]
    assert [a.spec for a in (k, v, x, name)] == [P("dp"), P("dp"), None, None]
    assert [a.donated for a in (k, v, x, name)] == [True, True, False, False]
    assert k.seen is cache["k"].local and x.seen is plain and name.seen == "name"


def test_results_in_the_place_of_arguments_have_their_shapes_without_an_exchange() -> None:
    interface = Interface(MESH, (P("dp"),), (sf.Donated(1), P("dp")), donate=(1,))
    interface.check()
    arguments = interface.arguments(({"k": _leaf(5, 3, spec=P("dp")), "v": _leaf(7, spec=P("dp"))},))
    asked: list[Any] = []

    def shape_of(blocks: Any) -> list[torch.Size]:
        asked.extend(path for path, _, _ in blocks)
        return [torch.Size([9])]

    places, other = interface.results(
        ({"k": torch.zeros(3, 3), "v": torch.zeros(4)}, torch.zeros(5)), shape_of, arguments
    )
    assert asked == ["result[1]"] and other.shape == (9,)
    assert (places["k"].shape, places["v"].shape, places["k"].spec) == ((5, 3), (7,), P("dp"))
    with pytest.raises(
        ValueError, match=r"result\[0\]\['k'\] is a block \(5, 3\) .*has \(3, 3\) of torch\.float32; return"
    ):
        interface.results(({"k": torch.zeros(5, 3), "v": torch.zeros(4)}, torch.zeros(5)), shape_of, arguments)


def test_in_specs_name_no_donated_argument() -> None:
    with pytest.raises(ValueError, match=r"in_specs\[0\] is Donated\(argument=1\); only out_specs may name"):
        Interface(MESH, (sf.Donated(1),), donate=(1,)).check()


def test_more_specs_than_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"in_specs has 2 entries, .* but there is 1"):
        Interface(MESH, (P(), P())).arguments((_leaf(2, spec=P()),))


OTHER = Mesh({"dp": 4}, torch.device("cpu"), abstract=True)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: torch.ones(4), TypeError, r"args\[1\]\['b'\] is a Tensor"),
        pytest.param(
            lambda: _leaf(4, spec=P()),
            ValueError,
            r"args\[1\]\['b'\] is kept as P\(\), in_specs says P\('dp'\)",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: _leaf(4, spec=P("dp"), mesh=OTHER),
            ValueError,
            r"args\[1\]\['b'\] is on Mesh",
            marks=pytest.mark.nightly,
        ),
        (lambda: _leaf(4, spec=P("dp"), memory_kind="host"), ValueError, r"args\[1\]\['b'\] is kept at 'host'"),
    ],
    ids=["no leaf", "other spec", "other mesh", "other memory"],
)
def test_a_leaf_that_is_kept_otherwise_is_named(make: Any, error: type[Exception], says: str) -> None:
    good = _leaf(4, spec=P("dp"))
    with pytest.raises(error, match=says) as caught:
        Interface(MESH, (P("dp"),)).arguments(({"a": good, "b": make()},))
    assert "['a']" not in str(caught.value)


def test_leaves_of_an_earlier_donation_are_named() -> None:
    used = _leaf(4, spec=P("dp"))
    used.donate()
    with pytest.raises(sf.DonatedError, match=r"(?s)consumed by an earlier call.*args\[1\]"):
        Interface(MESH, (P("dp"),)).arguments((used,))


def test_whole_tensors_become_this_rank_s_blocks_without_data() -> None:
    interface = Interface(MESH, (P("dp", "tp"),))
    whole, as_it_is, number = interface.abstract((torch.ones(5, 4), torch.ones(3), 7))
    assert isinstance(whole, GlobalTensor) and whole.shape == (5, 4) and whole.local.shape == (3, 2)
    assert as_it_is.shape == (3,) and number == 7
    (leaf,) = interface.abstract((_leaf(5, 4, spec=P("dp", "tp")),))
    assert leaf.shape == (5, 4) and leaf.local.shape == (3, 2)


def test_results_with_a_spec_become_global_tensors() -> None:
    seen: list[Any] = []

    def shape_of(blocks: Any) -> list[torch.Size]:
        seen.extend((path, tuple(x.shape), spec) for path, x, spec in blocks)
        return [torch.Size([5, 3])]

    out = {"a": torch.ones(3, 3), "b": torch.zeros(())}
    made = Interface(MESH, out_specs={"a": P("dp"), "b": None}).results(out, shape_of)
    assert seen == [("result['a']", (3, 3), P("dp"))]
    assert made["a"].shape == (5, 3) and made["a"].local is out["a"] and made["b"] is out["b"]
    with pytest.raises(ValueError, match=r"result of shape \(\) has spec P\('dp'\)"):
        Interface(MESH, out_specs=P("dp")).results(torch.zeros(()), shape_of)


class _Ranks(ScriptedRounds):
    """Rounds in which ranks 1 to 3 have blocks of these shapes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes, self.asked = shapes, 0

    def gather(self, value: Any) -> list[Any]:
        self.asked += 1
        return [value, *([shape] for shape in self.shapes)]


def _control(*shapes: tuple[int, ...]) -> Any:
    """The rounds of a control plane, which suffice here."""
    return _Ranks(*shapes)


def _found(spec: P, *shapes: tuple[int, ...]) -> torch.Size:
    """The global shape of blocks of these shapes, in the order of ranks: (dp, tp) = (0, 0), (0, 1), (1, 0), (1, 1)."""
    own: Tensor = torch.ones(shapes[0])
    (shape,) = Interface(MESH).shapes_by(_control(*shapes[1:]))([("result", own, spec)])
    return shape


def test_global_shapes_are_the_sums_of_the_blocks() -> None:
    assert _found(P("dp"), (3, 2), (3, 2), (2, 2), (2, 2)) == (5, 2)
    assert _found(P("dp", "tp"), (3, 2), (3, 1), (2, 2), (2, 1)) == (5, 3)
    assert _found(P(("dp", "tp")), (2,), (2,), (2,), (1,)) == (7,)


def test_blocks_that_are_cut_otherwise_are_shown_with_the_cut_of_the_spec() -> None:
    with pytest.raises(ValueError, match="results are not cut according to out_specs") as caught:
        _found(P("dp"), (2,), (2,), (3,), (3,))
    assert "result has blocks [(2,), (2,), (3,), (3,)]" in str(caught.value)
    assert "cuts (5,) as [(3,), (3,), (2,), (2,)]" in str(caught.value)


def test_results_that_are_not_cut_cost_no_message() -> None:
    ranks = _control()
    assert Interface(MESH).shapes_by(ranks)([("result", torch.ones(3), P())]) == [(3,)]
    assert ranks.asked == 0
    assert not Interface(MESH, out_specs={"a": None}).has_specs and Interface(MESH, out_specs=(None, P())).has_specs
