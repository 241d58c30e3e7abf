"""Programs written by hand, as one writes them in JAX: each shows one rule of the types along axes."""

from typing import Any

from .programs import MESHES, Program, Spec

X: Spec = ("x",)
REPLICATED: Spec = ()
# name: body, shapes, in_specs, out_specs; the shapes are of whole arrays for any number of ranks up to 3
_ONE: dict[str, tuple[Any, ...]] = {
    # sums of sums, and sums beside a varying value
    "psum_psum": (lambda s, x: s.psum(s.psum(x, "x"), "x"), [(6,)], [X], REPLICATED),
    "pmean_pmean": (lambda s, x: s.pmean(s.tanh(s.pmean(x, "x")), "x"), [(6,)], [X], REPLICATED),
    "psum_times_x": (lambda s, x: s.sum(s.psum(x, "x")) * x, [(6,)], [X], X),
    "norm": (lambda s, x: x / (1 + s.psum(s.sum(x * x), "x")), [(6,)], [X], X),
    "softmax": (lambda s, x: _softmax(s, x), [(6,)], [X], X),
    "batch_norm": (lambda s, x: _batch_norm(s, x), [(6, 2)], [X], X),
    "psum_of_replicated": (lambda s, w: s.psum(w * w, "x"), [(3,)], [REPLICATED], REPLICATED),
    "pmean_of_replicated": (lambda s, w: s.pmean(w * w, "x"), [(3,)], [REPLICATED], REPLICATED),
    "psum_both": (lambda s, x, w: s.psum(x * w, "x") * w, [(6,), (6,)], [X, X], REPLICATED),
    # replicated values
    "double": (lambda s, w: w * 2, [(3,)], [REPLICATED], REPLICATED),
    "itself": (lambda s, w: w, [(3,)], [REPLICATED], REPLICATED),
    "copy_own_block": (lambda s, x: x, [(6,)], [X], X),
    "weights": (lambda s, w, x: s.psum(s.sum(s.tanh(w * x)), "x"), [(), (6,)], [REPLICATED, X], REPLICATED),
    "regulariser": (
        lambda s, w, x: s.psum(s.sum(w * x), "x") + s.sum(w * w),
        [(), (6,)],
        [REPLICATED, X],
        REPLICATED,
    ),
    "regulariser_within": (lambda s, w, x: s.pmean(s.sum(w * x) + w * w, "x"), [(), (6,)], [REPLICATED, X], REPLICATED),
    "constant": (lambda s, w: s.literal([1.0, 2.0]), [(3,)], [REPLICATED], REPLICATED),
    "closed": (lambda s, x, c: s.psum(x * c, "x"), [(6, 2)], [X], REPLICATED, [(2,)]),
    "closed_with_replicated": (lambda s, w, c: w * s.tanh(c), [(2,)], [REPLICATED], REPLICATED, [(2,)]),
    "closed_alone": (lambda s, x, c: s.psum(x, "x") + c * c, [(6, 2)], [X], REPLICATED, [(2,)]),
    "closed_varied": (lambda s, x, c: x + s.pvary(c, "x"), [(6, 2)], [X], X, [(2,)]),
    "unused": (lambda s, x, w: s.psum(x, "x"), [(6,), (2,)], [X, REPLICATED], REPLICATED),
    # casts
    "pvary": (lambda s, w, x: s.psum(s.pvary(w, "x") * x, "x"), [(), (6,)], [REPLICATED, X], REPLICATED),
    "pvary_itself": (lambda s, w: s.pvary(w, "x"), [(3,)], [REPLICATED], X),
    "pvary_of_varying": (lambda s, x: s.psum(s.pvary(x, "x"), "x"), [(6,)], [X], REPLICATED),
    "pvary_of_mixed": (lambda s, w, x: s.psum(s.pvary(w * x, "x"), "x"), [(), (6,)], [REPLICATED, X], REPLICATED),
    "pvary_twice": (lambda s, w: s.psum(s.pvary(s.pvary(w, "x"), "x"), "x"), [(3,)], [REPLICATED], REPLICATED),
    "pmax": (lambda s, x: s.pmax(x, "x"), [(6,)], [X], REPLICATED),
    "index": (lambda s, w: s.psum(w * s.axis_index("x"), "x"), [(3,)], [REPLICATED], REPLICATED),
    "choice": (lambda s, w: s.psum(s.where(s.axis_index("x") == 1, w, w * w), "x"), [(3,)], [REPLICATED], REPLICATED),
    # results: their specs determine the axes along which they vary
    "replicated_as_blocks": (lambda s, x: s.psum(x, "x"), [(6,)], [X], X),
    "varying_as_replicated": (lambda s, x: s.tanh(x), [(6,)], [X], REPLICATED),
    "gathered_as_replicated": (lambda s, x: s.all_gather(x, "x", 0), [(6,)], [X], REPLICATED),
    "gathered_replicated": (lambda s, w: s.all_gather(w, "x", 0), [(3,)], [REPLICATED], REPLICATED),
    "gathered_as_blocks": (lambda s, x: s.all_gather(x, "x", 0), [(6,)], [X], X),
    "gathered_invariant": (lambda s, x: s.tanh(s.all_gather_invariant(x, "x", 0)), [(6,)], [X], REPLICATED),
    "invariant_of_replicated": (lambda s, w: s.all_gather_invariant(w, "x", 0), [(3,)], [REPLICATED], REPLICATED),
    "permuted_as_replicated": (lambda s, x: s.ppermute(x, "x", ((0, 1), (1, 0))), [(6,)], [X], REPLICATED),
    "permuted_replicated": (lambda s, w: s.ppermute(w, "x", ((0, 1), (1, 0))), [(3,)], [REPLICATED], X),
    "scattered_as_replicated": (lambda s, w: s.psum_scatter(w, "x", 0), [(6,)], [REPLICATED], REPLICATED),
    "scattered_replicated": (lambda s, w: s.psum_scatter(w, "x", 0), [(6,)], [REPLICATED], X),
    "exchanged_replicated": (lambda s, w: s.all_to_all(w, "x", 0, 1), [(6, 2)], [REPLICATED], X),
    "index_as_replicated": (lambda s, w: w * s.axis_index("x"), [(3,)], [REPLICATED], REPLICATED),
    "constant_as_blocks": (lambda s, w: s.literal([1.0, 2.0]), [(3,)], [REPLICATED], X),
    # recomputation
    "remat_psum": (lambda s, x: s.remat(lambda y: s.tanh(s.psum(y * y, "x")))(x), [(6,)], [X], REPLICATED),
    "remat_remat": (lambda s, x: _twice(s, x), [(6,)], [X], REPLICATED),
    "remat_closes": (lambda s, w, x: s.remat(lambda y: s.psum(y * x, "x") * w)(w), [(), (6,)], [REPLICATED, X], ()),
    "remat_meets": (lambda s, w, x: s.psum(s.remat(lambda y: s.tanh(y * x))(w), "x"), [(), (6,)], [REPLICATED, X], ()),
    "remat_replicated": (lambda s, w: s.remat(lambda y: s.psum(s.tanh(y), "x"))(w), [(3,)], [REPLICATED], REPLICATED),
    # models
    "columns_and_rows": (
        lambda s, x, a, b: s.psum(s.tanh(x @ a) @ b, "x"),
        [(2, 3), (3, 6), (6, 2)],
        [(), (None, "x"), ("x",)],
        REPLICATED,
    ),
    "two_layers": (
        lambda s, x, a, b: s.psum(s.tanh(s.psum(s.tanh(x @ a) @ b, "x") @ a) @ b, "x") + x,
        [(2, 3), (3, 6), (6, 3)],
        [(), (None, "x"), ("x",)],
        REPLICATED,
    ),
    "scatter_and_gather": (
        lambda s, x, a, b: s.psum_scatter(s.tanh(s.all_gather(x, "x", 0) @ a) @ b, "x", 0),
        [(6, 3), (3, 6), (6, 2)],
        [X, (None, "x"), ("x",)],
        X,
    ),
    "contrastive": (lambda s, y: _contrastive(s, y, s.all_gather), [(6, 2)], [X], REPLICATED),
    "contrastive_invariant": (lambda s, y: _contrastive(s, y, s.all_gather_invariant), [(6, 2)], [X], REPLICATED),
    "own_rows_and_all": (
        lambda s, w, x: s.pmean(s.mean(s.tanh(x * w)) + s.sum(s.tanh(s.pmean(x * w, "x"))), "x"),
        [(2,), (6, 2)],
        [REPLICATED, X],
        REPLICATED,
    ),
    "exchange": (lambda s, x, w: s.all_to_all(s.all_to_all(x, "x", 1, 0) * w, "x", 0, 1), [(6, 6), ()], [X, ()], X),
    "ring": (lambda s, x: _ring(s, x), [(6, 2)], [X], REPLICATED),
}
XY: Spec = ("x", "y")
_TWO: dict[str, tuple[Any, ...]] = {
    "one_after_the_other": (lambda s, x: s.psum(s.tanh(s.psum(x, "x")), "y"), [(4, 4)], [XY], REPLICATED),
    "both_at_once": (lambda s, x: s.psum(x * x, ("x", "y")), [(4, 4)], [XY], REPLICATED),
    "sum_along_more": (lambda s, x: s.psum(x * x, ("x", "y")), [(4,)], [X], REPLICATED),
    "pvary_along_more": (lambda s, x: s.psum(s.pvary(x, ("x", "y")), ("x", "y")), [(4,)], [X], REPLICATED),
    "meet": (lambda s, x, y: s.psum(x * y, ("x", "y")), [(4,), (4,)], [X, ("y",)], REPLICATED),
    "meet_after_a_sum": (lambda s, x, y: s.psum(s.psum(x, "x") * y, "y") * x, [(4,), (4,)], [X, ("y",)], X),
    "an_axis_left_out": (lambda s, x, y: x * y, [(4,), (4,)], [X, ("y",)], X),
    "data_and_tensor": (
        lambda s, x, a, b: s.pmean(s.mean(s.psum(s.tanh(x @ a) @ b, "y")), "x"),
        [(4, 3), (3, 4), (4, 2)],
        [X, (None, "y"), ("y",)],
        REPLICATED,
    ),
    "data_and_tensor_forgotten": (
        lambda s, x, a, b: s.pmean(s.mean(s.tanh(x @ a) @ b), "x"),
        [(4, 3), (3, 4), (4, 2)],
        [X, (None, "y"), ("y",)],
        REPLICATED,
    ),
    "gathered_along_one": (lambda s, x: s.all_gather(x, "x", 0), [(4,)], [(("x", "y"),)], ("y",)),
    "major_and_minor": (lambda s, x: s.all_gather(s.tanh(x), ("x", "y"), 0), [(4,)], [(("x", "y"),)], XY[:1]),
}


def _softmax(s: Any, x: Any) -> Any:
    e = s.exp(s.tanh(x) - s.pmax(s.detach(s.tanh(x)[0]), "x"))
    return e / s.psum(s.sum(e), "x")


def _batch_norm(s: Any, x: Any) -> Any:
    centred = x - s.pmean(s.sum(x, 0), "x")
    return centred / s.sqrt(0.1 + s.pmean(s.sum(centred * centred, 0), "x"))


def _twice(s: Any, x: Any) -> Any:
    inner = s.remat(lambda y: s.tanh(s.psum(y, "x")) * y)
    return s.remat(lambda y: s.psum(inner(s.tanh(y)), "x"))(x)


def _contrastive(s: Any, y: Any, gather: Any) -> Any:
    """Own rows against all rows, beside a term of all rows alone."""
    every = gather(s.tanh(y), "x", 0)
    own = s.mean(s.softmax(s.tanh(y) @ s.transpose(every)))
    return s.pmean(own + s.mean(every * every), "x")


def _ring(s: Any, x: Any) -> Any:
    n = s.size("x")
    total, moving = s.tanh(x), x
    for _ in range(n - 1):
        moving = s.ppermute(moving, "x", tuple((i, (i + 1) % n) for i in range(n)))
        total = total + s.tanh(moving * x)
    return s.psum(total, "x")


def cases(world: int) -> list[Program]:
    """The programs that fit the mesh of `world` ranks."""
    return [_program(name, world, *case) for name, case in (_ONE if world < 4 else _TWO).items()]


def _program(name: str, world: int, body: Any, shapes: Any, specs: Any, out: Spec, closed: Any = ()) -> Program:
    def results(s: Any, *values: Any) -> tuple[Any]:
        return (body(s, *values),)

    text = " ".join(body.__code__.co_names)
    return Program(f"{world}:{name}", MESHES[world], tuple(shapes), tuple(specs), tuple(closed), (out,), results, text)
