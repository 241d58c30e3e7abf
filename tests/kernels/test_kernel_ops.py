"""Covers kernels as torch ops: one node each in a graph, torch's own checks, refusals, the choice of implementation."""

import pathlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import kernels
from shardfn.kernels import _build, _op, _sources

OPS = torch.ops.shardfn_kernels
X, ERROR, SCALES = torch.randn(2, 16), torch.randn(2, 16), torch.rand(2)
BITS = torch.randint(0, 256, (2, 2), dtype=torch.uint8)
CODES, FACTORS = kernels.quantize(torch.randn(3, 2, 5).view(6, 5), bits=4, block=2)
MOMENTS = X, ERROR, X.square(), *torch.tensor([0.1, 0.9, 0.01])
TILES: Any = [torch.tensor(x, dtype=torch.int32) for x in ([[0, 1, 3]], [0, 0, 1], [-1, 0, -1])]
TILES += [torch.ones(1, 2, 2, dtype=torch.uint8)]
QKV = torch.randn(3, 1, 3, 2, 4).unbind()
SPARSE: dict[str, Any] = {"block": 2, "scale": 0.5}
RESULTS = kernels.block_sparse_attention(QKV[0], QKV[1], QKV[2], kernels.Tiles(*TILES), **SPARSE)
PAGES: Any = (
    *torch.randn(3, 2, 2, 4).unbind(),
    torch.zeros(2, 2, 2, 2, 4),
    *torch.tensor([[2, 3], [0, 1], [0, 0]]).int(),
)
PAGES += (torch.tensor([[1]], dtype=torch.int32),)
MANY = CODES.view(3, 2, 3), FACTORS.view(3, 2, 3)

# name, public function, its arguments, the op's arguments
CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = [
    ("pack_signs", kernels.pack_signs, (X,), (X,)),
    ("unpack_signs", kernels.unpack_signs, (BITS, SCALES), (BITS, SCALES)),
    ("sign_compress", kernels.sign_compress, (X, ERROR), (X, ERROR, False)),
    ("sign_compress_", kernels.sign_compress_, (X, ERROR), (X, ERROR, True)),
    ("sign_mean", kernels.sign_mean, (BITS, SCALES, ERROR[0]), (BITS, SCALES, ERROR[0])),
    ("sign_mean_", kernels.sign_mean_, (BITS, SCALES, ERROR[0]), (BITS, SCALES, ERROR[0])),
    ("quantize", kernels.quantize, (X,), (X, 4, 6)),
    ("dequantize", lambda c, s: kernels.dequantize(c, s, 5, bits=4, block=2), (CODES, FACTORS),
     (CODES, FACTORS, 5, 4, 2, torch.bfloat16)),
    ("dequantize_sum", lambda c, s: kernels.dequantize_sum(c, s, 5, bits=4, block=2), MANY, (*MANY, 5, 4, 2)),
    ("dequantize_sum_quantize", lambda c, s: kernels.dequantize_sum_quantize(c, s, 5, bits=4, block=2), MANY,
     (*MANY, 5, 4, 2)),
    ("unpack_signs_into", lambda b, s, out: kernels.unpack_signs(b, s, out=out), (BITS, SCALES, ERROR),
     (BITS, SCALES, ERROR)),
    ("dequantize_into", lambda c, s, out: kernels.dequantize(c, s, 5, bits=4, block=2, out=out),
     (CODES, FACTORS, torch.empty(6, 5)), (CODES, FACTORS, 4, 2, torch.empty(6, 5))),
    ("moving_average_", lambda m, x: kernels.moving_average_(m, x, 0.9), (X, ERROR), (X, ERROR, 0.9)),
    ("preconditioned_step", lambda *xs: kernels.preconditioned_step(*xs, eps=1e-8), MOMENTS, (*MOMENTS, 1e-8, 0.0)),
    ("block_sparse_attention", lambda q, k, v, *t: kernels.block_sparse_attention(q, k, v, kernels.Tiles(*t), **SPARSE),
     (*QKV, *TILES), (*QKV, *TILES, *[None] * 5, 0, 0, 0, 0, 2, 0.5)),
    ("block_sparse_attention_backward",
     lambda dy, q, k, v, y, lse, *t: kernels.block_sparse_attention_backward(
         dy, (q, k, v), y, lse, kernels.Tiles(*t), **SPARSE),
     (QKV[1], *QKV, *RESULTS, *TILES), (QKV[1], *QKV, *RESULTS, *TILES, *[None] * 5, 0, 0, 0, 0, 2, 0.5)),
    ("draw", lambda x, u, k: kernels.draw(x, u, temperature=u, top_k=k, top_p=u, min_p=u),
     (X, SCALES.double(), torch.tensor([0, 3])),
     (X, *[SCALES.double()] * 2, torch.tensor([0, 3]), *[SCALES.double()] * 2, None)),
    ("top_logprobs", lambda x: kernels.top_logprobs(x, 2), (X,), (X, 2)),
    ("draw_uniforms", kernels.draw_uniforms, (torch.tensor([3, 4]), torch.tensor([0, 3])),
     (torch.tensor([3, 4]), torch.tensor([0, 3]))),
    ("penalise", lambda x, h, n, p: kernels.penalise(x, h, n, repetition=p, presence=p, frequency=p),
     (X, torch.tensor([[1, 2], [3, -1]]).int(), torch.tensor([1, 0]).int(), SCALES.double()),
     (X, torch.tensor([[1, 2], [3, -1]]).int(), torch.tensor([1, 0]).int(), *[SCALES.double()] * 3)),
    ("row_linear", lambda x, w: kernels.row_linear(x, w, 5), (X, kernels.pack_rows(torch.randn(5, 16))),
     (X, kernels.pack_rows(torch.randn(5, 16)), 5, 8, torch.ones(5))),
    ("row_linears", lambda x, w: tuple(kernels.row_linears(x, [w, w], [5, 3])),
     (X, kernels.pack_rows(torch.randn(5, 16))),
     (X, [kernels.pack_rows(torch.randn(5, 16))] * 2, [5, 3], 8, [torch.ones(5), None])),
    ("integer_linears", lambda x, w: tuple(kernels.integer_linears(x, [w, w], [5, 3])),
     (X, kernels.pack_rows(torch.randn(5, 16), "int8")),
     (X, [kernels.pack_rows(torch.randn(5, 16), "int4")] * 2, [5, 3], 8, [torch.ones(5), None])),
    ("ragged_attention", kernels.ragged_attention, PAGES, (*PAGES, 0.5, None, None, None, torch.ones(2), None, None)),
    ("gated_silu", kernels.gated_silu, (X, ERROR), (X, ERROR)),
    ("gated_sigmoid", kernels.gated_sigmoid, (X, ERROR), (X, ERROR)),
    ("gelu", kernels.gelu, (X,), (X,)),
    ("gated_silu_gradient", kernels.gated_silu_gradient, (X, X[:, :8]), (X, X[:, :8])),
    ("row_norm", lambda x, w: kernels.row_norm(x, w, centered=True), (X, ERROR[0]), (X, ERROR[0], X[0], 1e-5, False)),
    ("gather_rows", kernels.gather_rows, (X, torch.tensor([[0, -1], [1, 0]]), X[:, :2].clone()),
     (X, torch.tensor([[0, -1], [1, 0]]), None)),
    ("row_dots", kernels.row_dots, (X, ERROR, torch.tensor([[0, -1], [1, 0]])),
     (X.bfloat16(), ERROR.bfloat16(), torch.tensor([[0, -1], [1, 0]]))),
    ("grouped_product", kernels.grouped_product, (X, torch.randn(2, 16, 5), torch.tensor([0, 1])),
     (X.bfloat16(), torch.randn(2, 5, 16).bfloat16(), torch.tensor([2, 0]), True, False)),
    ("grouped_outer", kernels.grouped_outer, (X, ERROR, torch.tensor([0, 1, 0])), (X, ERROR, torch.tensor([0, 1, 0]))),
    ("preconditioned_step_", lambda *xs: kernels.preconditioned_step_(*xs, eps=1e-8), MOMENTS, (*MOMENTS, 1e-8, 0.1)),
]  # fmt: skip


@pytest.mark.day("quantize", "dequantize_sum_quantize", "moving_average_")
@pytest.mark.parametrize(
    "name, function, args, flat",
    [pytest.param(*x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(CASES)],
    ids=[case[0] for case in CASES],
)
def test_one_node_and_a_well_behaved_op(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], flat: tuple[Any, ...]
) -> None:
    copies = [arg.clone() for arg in args]
    graph = make_fx(lambda *xs: function(*xs), tracing_mode="fake")(*copies)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function" and "getitem" not in node.name]
    assert calls == [getattr(OPS, name).default]
    again = [arg.clone() for arg in args]
    for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (graph(*copies), function(*again))), strict=True):
        assert a is b is None or torch.equal(a, b)
    assert all(map(torch.equal, copies, again))
    torch.library.opcheck(getattr(OPS, name).default, flat, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "run, kind, said",
    [
        (lambda: kernels.pack_signs(torch.ones(1, 7)), ValueError, "rows of 7 elements"),
        pytest.param(
            lambda: kernels.pack_signs(torch.ones(1, 8, dtype=torch.float64)),
            TypeError,
            "float64",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: kernels.sign_compress(torch.ones(9), torch.zeros(1, 8)),
            ValueError,
            "9 elements.*room for 8",
            marks=pytest.mark.nightly,
        ),
        (lambda: kernels.sign_compress_(torch.ones(9), torch.zeros(8, 16)[:, ::2]), ValueError, "contiguous"),
        pytest.param(
            lambda: kernels.sign_mean_(BITS, SCALES, torch.zeros(32)[::2]),
            ValueError,
            "contiguous",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: kernels.sign_mean(BITS[:0], SCALES[:0], torch.zeros(16)),
            ValueError,
            "at least one row",
            marks=pytest.mark.nightly,
        ),
        (lambda: kernels.unpack_signs(BITS, SCALES, out=torch.zeros(16, 2).t()), ValueError, "contiguous"),
        pytest.param(
            lambda: kernels.quantize(X, bits=3), ValueError, "bits must be 4 or 8, got 3", marks=pytest.mark.nightly
        ),
        pytest.param(
            lambda: kernels.quantize(X, bits=4, block=5),
            ValueError,
            "block must be .*, got 5",
            marks=pytest.mark.nightly,
        ),
        (lambda: kernels.dequantize(CODES, FACTORS, 7, bits=4, block=2), ValueError, "c = 7"),
        pytest.param(
            lambda: kernels.dequantize(CODES, FACTORS, 5, bits=8, block=2),
            TypeError,
            "codes is torch.uint8",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: kernels.dequantize(CODES, FACTORS, 5, bits=4, block=4),
            ValueError,
            "scales is of shape",
            marks=pytest.mark.nightly,
        ),
        (lambda: kernels.dequantize_sum(MANY[0][:0], MANY[1][:0], 5, bits=4, block=2), ValueError, "at least one row"),
        pytest.param(
            lambda: kernels.preconditioned_step_(X.t(), X.t(), X.t(), *MOMENTS[3:], eps=0.0),
            ValueError,
            "contiguous",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: kernels.implemented_by("fortran").__enter__(), ValueError, "'fortran'", marks=pytest.mark.nightly
        ),
    ],
)
def test_refusals(run: Callable[[], Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        run()


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[None]:
    """The state before any build, with an empty cache; builds in the test do not outlast it."""
    caches = (_build._load_library, _build._warn_once, _op._choose_kind, _op._find_implementation)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_sources, "SHIPPED", tmp_path)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("unbuilt")
def test_without_a_compiler_the_references_run_and_one_warning_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with kernels.implemented_by("reference"):
        want = kernels.pack_signs(X), kernels.gelu(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = kernels.pack_signs(X), kernels.gelu(X)
    assert all(map(torch.equal, got, want))
    assert [("apt install g++" in str(w.message), "C++ compiler" in str(w.message)) for w in caught] == [(True, True)]
    assert _op._choose_kind("cpu") == "reference" and not kernels.is_native("gelu")
    with pytest.raises(ValueError, match="must have a C\\+\\+ compiler"), kernels.implemented_by("native"):
        pass


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("call", [lambda: kernels.pack_signs(X), lambda: kernels.gelu(X)], ids=["shared", "own file"])
def test_a_compiler_that_fails_is_an_error(
    call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    for _ in range(2):  # also when called again
        with pytest.raises(RuntimeError, match="/bin/false must build shardfn's kernels"):
            call()
    assert [left.suffix for left in (tmp_path / "shardfn").iterdir()] == [".lock"]  # the file that builders lock


@pytest.mark.usefixtures("unbuilt")
def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    if kernels.cxx_compiler() is None:
        pytest.skip("no C++ compiler")
    with pytest.raises(RuntimeError, match="XDG_CACHE_HOME"):
        kernels.pack_signs(X)


def test_a_record_without_a_reference_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'nothing' must have a reference.*got none"):
        kernels.KernelOp(schema="nothing(Tensor x) -> Tensor", abstract=torch.empty_like)
    assert "nothing" not in kernels.KERNELS and not hasattr(OPS, "nothing")


@pytest.mark.parametrize("name", sorted(kernels.KERNELS))
def test_a_record_is_whole(name: str) -> None:
    """Its C++ is a file of the tables, its Triton a function, its labels fit the schema, and its writer exists."""
    kernel = kernels.KERNELS[name]
    schema = kernel.op.default._schema
    assert f"kernels/{kernel.source}" in _sources.FLAGS
    assert kernel.native is not None or not kernel.triton
    if kernel.triton:
        file, function = kernel.triton.split(".")  # read, as an import would fix whether the interpreter runs it
        text = (_sources.PACKAGE / "kernels" / f"{file}.py").read_text()
        assert re.search(rf"^(def {function}\(|{function} = )", text, re.MULTILINE)
    if kernel.sharding is not None:
        given = kernel.sharding(*[None] * 3, False, False) if callable(kernel.sharding) else kernel.sharding
        ins, outs = (side.split(",") for side in given.labels.split("->"))
        tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
        assert (len(ins), len(outs)) == (len(tensors), len(schema.returns))
        assert set(given.linear) <= set(range(len(ins)))
        kept = {label for term in outs for label in term} - {"."}
        assert kept <= {label for term in ins for label in term}
    assert kernels.without_dispatch(kernel.op.default) is kernels.without_dispatch(kernel.op.default) is not None
    assert not kernel.in_place or kernels.KERNELS[kernel.in_place].op.default._schema.is_mutable


@pytest.mark.parametrize("name", sorted(name for name, kernel in kernels.KERNELS.items() if kernel.dtypes))
def test_a_dtype_outside_of_the_record_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"x must be .*, got torch\.int32\. Convert x"):
        kernels.KERNELS[name].check_dtype("x", torch.ones(2, dtype=torch.int32))
