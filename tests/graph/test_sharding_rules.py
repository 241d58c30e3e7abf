"""Each sharding rule, by a property: the op on parts, combined, equals the op on the whole, over drawn shapes."""

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn.graph import PARTIAL, VARYING, WHOLE, Form, Operand, OpUse, Owner, Ranks, Strategy, blocks, cut, find_op
from shardfn.nn import moe

aten, kernels = torch.ops.aten, torch.ops.shardfn_kernels


class Board(Ranks):
    """The ranks of one process, each a thread; their messages lie on a board."""

    def __init__(self, num: int, index: int, barrier: threading.Barrier, board: dict[int, Tensor]) -> None:
        self.axis, self.num, self.index, self._barrier, self._board = "tp", num, index, barrier, board
        self.functions = {}

    def _all(self, x: Tensor) -> Tensor:
        self._board[self.index] = x
        self._barrier.wait(10)
        out = torch.stack([self._board[i] for i in range(self.num)])
        self._barrier.wait(10)
        return out

    def psum(self, x: Tensor) -> Tensor:
        return self._all(x).sum(0)

    def pmax(self, x: Tensor) -> Tensor:
        return self._all(x).amax(0)

    def pvary(self, x: Tensor) -> Tensor:
        return x


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def sizes(r: random.Random, *names: str) -> list[int]:
    return [r.choice([1, 2, 3, 4, 5, 6, 7, 8, 12]) for _ in names]


# Draws of arguments for each op.


def _mm(r):
    m, k, n = sizes(r, *"mkn")
    return (randn(m, k), randn(k, n))


def _bmm(r):
    b, m, k, n = sizes(r, *"bmkn")
    return (randn(b, m, k), randn(b, k, n))


def _x(r, dims=3) -> Any:
    return randn(*sizes(r, *"abcde"[:dims]))


def _pair(r) -> Any:
    x = _x(r)
    shape = [r.choice([1, n]) for n in x.shape][r.choice([0, 0, 1, 2]) :]
    return (x, randn(*shape))


def _view(r):
    a, b, c, d = sizes(r, *"abcd")
    return r.choice(
        [
            (randn(a, b * c, d), [a, b, c, d]),
            (randn(a, b, c, d), [a, b * c, d]),
            (randn(a * b, c), [a, b, c]),
            (randn(a, b, c), [a * b, c]),
            (randn(a, 2 * b, 3), [a, 2, b * 3]),
            (randn(a, b), [1, a, 1, b]),
            (randn(1, a, b, 1), [a, b]),
        ]
    )


def _expand(r):
    a, b, c = sizes(r, *"abc")
    return (randn(a, 1, c), [b, a, 4, c]) if r.random() < 0.5 else (randn(a, 1, c), [-1, b, -1])


def _cat(r):
    a, b, c = sizes(r, *"abc")
    return ([randn(a, b, c), randn(a, 3, c)], 1)


def _embedding(r):
    v, d, b = sizes(r, *"vdb")
    return (randn(v, d), torch.randint(0, v, (b, 3)))


def _gather(r):
    x = _x(r)
    return (x, 1, torch.randint(0, x.shape[1], (x.shape[0], 4, x.shape[2])))


def _index(r):
    x = _x(r, 4)
    i, j = torch.randint(0, x.shape[1], (5, 1)), torch.randint(0, x.shape[2], (5, 6))
    return r.choice(
        [(x, [None, i, j]), (x, [None, None, j]), (x, [j.clamp(max=x.shape[0] - 1)]), (x, [i * 0, None, j])]
    )


def _norm(r) -> Any:
    x = _x(r)
    d = x.shape[-1:]
    return (x, list(d), randn(*d), randn(*d), 1e-5)


def _nll(reduction):
    def draw(r):
        n, v = sizes(r, *"nv")
        target = torch.randint(0, v, (n,))
        target[n // 2 + 1 :] = -100
        return (randn(n, v), target, None, reduction, -100)

    return draw


def _attention(r):
    b, g, t, s, k = sizes(r, *"bgtsk")
    q, k_, v = randn(b, g * r.choice([1, 1, 2, 3]), t, k), randn(b, g, s, k), randn(b, g, s, k)
    return (q, k_, v)


def _masked_attention(r):
    q, k, v = _attention(r)
    return (q, k, v), {"attn_mask": randn(r.choice([1, q.shape[0]]), r.choice([1, q.shape[1]]), q.shape[2], k.shape[2])}


def _select(r):
    x = _x(r)
    return (x, r.randrange(3), 0)


def _put_in(r):
    x, dim = _x(r), r.randrange(-3, 3)
    step = r.choice([1, 2])
    part = x[tuple(slice(1, None, step) if d == dim % 3 else slice(None) for d in range(3))]
    return (x, torch.randn_like(part), dim, 1, 2**63 - 1, step)


def _put_in_row(r):
    x, dim = _x(r), r.randrange(-3, 3)
    return (x, torch.randn_like(x.select(dim, 0)), dim, 0)


def _halves(r):
    n = r.choice([1, 2, 3, 4])
    return (randn(3, 2 * n, 2), n, 1)


def _head(r) -> Any:
    n = r.choice([2, 3, 4, 7])
    return (randn(n, 2, 3), [n - 1, 1], 0)


def _groups(r, m, e):
    """Sizes of groups of at most m rows."""
    bounds = sorted(r.randrange(m + 1) for _ in range(e))
    return torch.tensor([b - a for a, b in zip([0, *bounds], bounds, strict=False)])


def _grouped_product(r):
    m, k, n, e = sizes(r, *"mkne")
    transposed = r.random() < 0.5
    w = randn(e, n, k) if transposed else randn(e, k, n)
    return (randn(m, k), w, _groups(r, m, e), transposed, False)


def _grouped_outer(r):
    m, k, n, e = sizes(r, *"mkne")
    return (randn(m, k), randn(m, n), _groups(r, m, e))


def _grouped_mm(r):
    m, e = sizes(r, *"me")
    k, n = r.choice([4, 8, 12]), r.choice([4, 8, 12])
    offs = _groups(r, m, e).cumsum(0).int()
    offs[-1] = m  # torch leaves the rows past the last group undetermined
    w = randn(e, k, n) if r.random() < 0.5 else randn(e, n, k).transpose(1, 2)
    return (randn(m, k).float(), w.float(), offs)


def _grouped_mm_of_rows(r):
    m, e = sizes(r, *"me")
    k, n = r.choice([4, 8, 12]), r.choice([4, 8, 12])
    m += 1  # of a single row torch does not see the strides
    return (randn(m, k).float().t(), randn(m, n).float(), _groups(r, m, e).cumsum(0).int())


def _gather_rows(r):
    n, d, m, j = sizes(r, *"ndmj")
    return (randn(n, d), torch.randint(-1, n, (m, j)), r.choice([None, randn(m, j)]))


def _placed_rows(r):
    """Tokens, the token of each row, and the rows of each token."""
    s, d, k, e = sizes(r, *"sdke")
    p, _ = moe.permutation(torch.randint(-1, e, (s, k)), e)
    return randn(s, d), p.source[:, None], p.places


def _combined_rows(r):
    x, source, places = _placed_rows(r)
    return randn(len(source), x.shape[1]), randn(*places.shape), source[:, 0], places


def _row_dots(r):
    n, d, m, j = sizes(r, *"ndmj")
    return (randn(n, d), randn(m, d), torch.randint(-1, n, (m, j)))


CASES: dict[str, Any] = {
    "mm": (aten.mm.default, _mm),
    "bmm": (aten.bmm.default, _bmm),
    "mv": (aten.mv.default, lambda r: (randn(*(s := sizes(r, *"mk"))), randn(s[1]))),
    "dot": (aten.dot.default, lambda r: (lambda n: (randn(n), randn(n)))(sizes(r, "k")[0])),
    "add": (aten.add.Tensor, _pair),
    "add number": (aten.add.Tensor, lambda r: (_x(r), 2.5)),
    "sub": (aten.sub.Tensor, _pair),
    "mul": (aten.mul.Tensor, _pair),
    "mul number": (aten.mul.Tensor, lambda r: (_x(r), 2.5)),
    "mul 0-d": (aten.mul.Tensor, lambda r: (_x(r), randn())),
    "div": (aten.div.Tensor, _pair),
    "div number": (aten.div.Tensor, lambda r: (_x(r), 2.5)),
    "div rounded": (aten.div.Tensor_mode, lambda r: ((_x(r), 2.5), {"rounding_mode": "floor"})),
    "rsub": (aten.rsub.Scalar, lambda r: (_x(r), 1.0)),
    "neg": (aten.neg.default, lambda r: (_x(r),)),
    "exp": (aten.exp.default, lambda r: (_x(r),)),
    "gelu": (aten.gelu.default, lambda r: (_x(r),)),
    "pow": (aten.pow.Tensor_Scalar, lambda r: (_x(r), 2)),
    "clamp": (aten.clamp.default, lambda r: (_x(r), -0.5)),
    "where": (aten.where.self, lambda r: (lambda x, y: (x > 0, x, y))(*_pair(r))),
    "masked_fill": (aten.masked_fill.Scalar, lambda r: (lambda x, y: (x, y > 0, -1.0))(*_pair(r))),
    "fill": (aten.fill.Scalar, lambda r: (_x(r), 2.5)),
    "fill 0-d": (aten.fill.Tensor, lambda r: (_x(r), randn())),
    "zero": (aten.zero.default, lambda r: (_x(r),)),
    "clone": (aten.clone.default, lambda r: (_x(r),)),
    "detach": (aten.detach.default, lambda r: (_x(r),)),
    "_to_copy": (aten._to_copy.default, lambda r: ((_x(r),), {"dtype": torch.float64})),
    "t": (aten.t.default, lambda r: (_x(r, 2),)),
    "transpose": (aten.transpose.int, lambda r: (_x(r), r.randrange(-3, 3), r.randrange(3))),
    "permute": (aten.permute.default, lambda r: (_x(r), r.sample([0, 1, -1], 3))),
    "unsqueeze": (aten.unsqueeze.default, lambda r: (_x(r), r.randrange(-4, 4))),
    "squeeze": (aten.squeeze.dim, lambda r: (_x(r), r.randrange(-3, 3))),
    "squeeze dims": (aten.squeeze.dims, lambda r: (_x(r), [0, -1])),
    "squeeze all": (aten.squeeze.default, lambda r: (_x(r),)),
    "expand": (aten.expand.default, _expand),
    "repeat": (aten.repeat.default, lambda r: (_x(r), [2, 1, r.choice([1, 2]), 1])),
    "view": (aten.view.default, _view),
    "slice": (aten.slice.Tensor, lambda r: (_x(r), r.randrange(3), 0, r.choice([2, 2**63 - 1]))),
    "select": (aten.select.int, _select),
    "unbind": (aten.unbind.int, lambda r: (_x(r), r.randrange(3))),
    "split": (aten.split.Tensor, lambda r: (_x(r), 2, r.randrange(3))),
    "split in halves": (aten.split.Tensor, _halves),
    "split with sizes": (aten.split_with_sizes.default, _head),
    "slice of parts": (aten.slice.Tensor, lambda r: (lambda x, s, d: (x, d, s[0], x.shape[d]))(*_head(r))),
    "slice scatter": (aten.slice_scatter.default, _put_in),
    "select scatter": (aten.select_scatter.default, _put_in_row),
    "cat": (aten.cat.default, _cat),
    "stack": (aten.stack.default, lambda r: (lambda x: ([x, x + 1, 2 * x], r.randrange(-4, 4)))(_x(r))),
    "pad": (aten.constant_pad_nd.default, lambda r: (_x(r), r.choice([[0, 1], [0, 0, 1, 2]]), r.choice([0.0, 1.0]))),
    "cumsum": (aten.cumsum.default, lambda r: (_x(r), r.randrange(3))),
    "embedding": (aten.embedding.default, _embedding),
    "index_select": (aten.index_select.default, lambda r: (lambda x: (x, 1, torch.zeros(5, dtype=torch.int64)))(_x(r))),
    "gather": (aten.gather.default, _gather),
    "index": (aten.index.Tensor, _index),
    "sum": (aten.sum.dim_IntList, lambda r: (_x(r), r.sample([0, 1, -1], r.randrange(1, 4)), r.random() < 0.5)),
    "sum all": (aten.sum.default, lambda r: (_x(r),)),
    "mean": (aten.mean.dim, lambda r: (_x(r), r.sample([0, 1, -1], r.randrange(1, 3)), r.random() < 0.5)),
    "mean all": (aten.mean.default, lambda r: (_x(r),)),
    "amax": (aten.amax.default, lambda r: (_x(r), [r.randrange(3)], r.random() < 0.5)),
    "argmax": (aten.argmax.default, lambda r: (_x(r), r.randrange(3))),
    "var": (aten.var.correction, lambda r: ((_x(r), [r.randrange(3)]), {"correction": 0})),
    "logsumexp": (aten.logsumexp.default, lambda r: (_x(r), [r.randrange(3)])),
    "layer norm": (aten.native_layer_norm.default, _norm),
    "rms norm": (aten._fused_rms_norm.default, lambda r: (lambda x, d, w, b, e: (x, d, w, e))(*_norm(r))),
    "softmax": (aten._softmax.default, lambda r: (_x(r), r.randrange(-3, 3), False)),
    "log_softmax": (aten._log_softmax.default, lambda r: (_x(r), r.randrange(-3, 3), False)),
    "nll": (aten.nll_loss_forward.default, _nll(1)),
    "nll sum": (aten.nll_loss_forward.default, _nll(2)),
    "nll each": (aten.nll_loss_forward.default, _nll(0)),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, _attention),
    "masked attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, _masked_attention),
    "grouped product": (kernels.grouped_product.default, _grouped_product),
    "grouped outer": (kernels.grouped_outer.default, _grouped_outer),
    "grouped_mm": (aten._grouped_mm.default, _grouped_mm),
    "grouped_mm of rows": (aten._grouped_mm.default, _grouped_mm_of_rows),
    "multiplied rows": (kernels.multiplied_rows.default, _grouped_product),
    "copied rows": (kernels.copied_rows.default, lambda r: _placed_rows(r)[:3]),
    "combined rows": (kernels.combined_rows.default, _combined_rows),
    "gather rows": (kernels.gather_rows.default, _gather_rows),
    "row dots": (kernels.row_dots.default, _row_dots),
    "ones": (aten.new_ones.default, lambda r: (_x(r), [2, 3])),
}


def seen_of(args, kwargs):
    tensors: list[Tensor] = []

    def seen(x):
        if isinstance(x, Tensor):
            tensors.append(x)
            return Operand(tuple(x.shape), x.element_size(), len(tensors) - 1)
        return [seen(y) for y in x] if isinstance(x, list | tuple) else x

    args = tuple(seen(a) for a in args)
    kwargs = {k: seen(v) for k, v in kwargs.items()}
    return args, kwargs, tensors


def part(x, form, ranks, seed):
    if form.kind == "cut":
        return ranks.block(x, form)
    if form.kind == "partial":
        generator = torch.Generator().manual_seed(seed)
        noise = [torch.randn(x.shape, generator=generator).to(x.dtype) for _ in range(ranks.num - 1)]
        return [*noise, x - sum(noise)][ranks.index]
    return x


def filled(x, parts):
    if isinstance(x, Operand):
        return parts[x.number]
    return [filled(y, parts) for y in x] if isinstance(x, list | tuple) else x


def run(strategy, target, args, kwargs, tensors, num):
    """The results of each rank, run side by side."""
    barrier, board = threading.Barrier(num), {}
    outs: list[Any] = [None] * num

    def one(i):
        ranks = Board(num, i, barrier, board)
        try:
            parts = [part(x, f, ranks, k) for k, (x, f) in enumerate(zip(tensors, strategy.ins, strict=True))]
            own = tuple(filled(a, parts) for a in args)
            named = {k: filled(v, parts) for k, v in kwargs.items()}
            if strategy.run is None:
                outs[i] = target(*own, **named)
            else:
                outs[i] = strategy.run(ranks, own, named)
        except Exception as error:
            outs[i] = error
            barrier.abort()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(num)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for out in outs:
        if isinstance(out, Exception):
            raise out
    return [(out,) if isinstance(out, Tensor) else tuple(out) for out in outs]


def joined(parts, form, size):
    if form.kind == "cut":
        held = [[each[i] for each in blocks(size, len(parts), form)] for i in range(len(parts))]
        pieces = [x.split(lengths, form.dim) for x, lengths in zip(parts, held, strict=True)]
        return torch.cat([one for part in zip(*pieces, strict=True) for one in part], form.dim)
    return sum(parts) if form.kind in ("partial", "rows") else parts[0]


def forms_of(tensors, num):
    """Some ways in which the operands may come."""
    out = [(WHOLE,) * len(tensors), (PARTIAL,) * len(tensors)]
    for k, x in enumerate(tensors):
        for d, size in enumerate(x.shape):
            for multiple in {g for g in (1, 2, 3, 4) if size % g == 0}:
                out.append(tuple(cut(d, size, num, multiple) if i == k else WHOLE for i in range(len(tensors))))
            for parts in {((size // 2, 1),) * 2, ((size // 3, 1),) * 3, ((size - 1, 1), (1, 1))}:
                if sum(n for n, _ in parts) == size and all(n for n, _ in parts):
                    form = cut(d, size, num, parts=parts)
                    out.append(tuple(form if i == k else WHOLE for i in range(len(tensors))))
    return out


@pytest.mark.day(4)
@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(list(CASES))]
)
def test_an_op_on_parts_is_the_op_on_the_whole(name, num):
    target, draw = CASES[name]
    r, tried = random.Random(name), set()
    for trial in range(5):
        torch.manual_seed(trial)
        drawn = draw(r)
        given, named = drawn if isinstance(drawn[-1], dict) else (drawn, {})
        want = target(*given, **named)
        wants = (want,) if isinstance(want, Tensor) else tuple(want)
        args, kwargs, tensors = seen_of(given, named)
        operands = tuple(Operand(tuple(x.shape), x.element_size()) for x in tensors)
        outs = tuple(Operand(tuple(x.shape), x.element_size()) for x in wants)
        strategies = {}
        rule = find_op(target).sharding
        assert rule is not None, f"{target} has no rule"
        for forms in forms_of(tensors, num):
            for s in rule(OpUse(target, args, kwargs, operands, forms, outs, num)):
                strategies[s.ins, s.outs] = s
        for s in strategies.values():
            tried.add((s.ins, s.outs))
            got = run(s, target, args, kwargs, tensors, num)
            for k, (form, whole) in enumerate(zip(s.outs, wants, strict=True)):
                if form == WHOLE:
                    assert all(torch.equal(o[k], got[0][k]) for o in got), (s, k)
                value = joined([o[k] for o in got], form, whole.shape[form.dim] if whole.ndim else 0)
                assert value.shape == whole.shape, (s, k, value.shape, whole.shape)
                near = 1e-5 if whole.dtype == torch.float32 else 1e-10
                assert torch.allclose(value, whole, rtol=near, atol=near, equal_nan=True), (s, k)
    assert len(tried) > 1 or name in ("ones",)


def strategies_of(use: OpUse) -> list[Strategy]:
    rule = find_op(use.target).sharding
    assert rule is not None
    return rule(use)


ROWS = Form("rows", owner=Owner("counts", False, 5, 1))
OF_ROWS = {
    "silu": (aten.silu.default, lambda x: (x,)),
    "gelu": (aten.gelu.default, lambda x: (x,)),
    "cast": (aten._to_copy.default, lambda x: (x,)),
    "product": (aten.mul.Tensor, lambda x: (x, randn(len(x), 1))),
    "scale": (aten.mul.Tensor, lambda x: (x, 3.0)),
    "columns": (aten.split.Tensor, lambda x: (x, 2, 1)),
    "column": (aten.slice.Tensor, lambda x: (x, -1, 1, 3)),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_an_op_that_makes_zeros_of_zeros_keeps_own_rows(name: str) -> None:
    target, given = OF_ROWS[name]
    x = randn(7, 4)
    args, _, tensors = seen_of(given(x), {})
    want = target(*given(x)) if name != "product" else tensors[0] * tensors[1]
    wants = [want] if isinstance(want, Tensor) else list(want)
    outs = tuple(Operand(tuple(y.shape), y.element_size()) for y in wants)
    operands, forms = tuple(Operand(tuple(t.shape), 8) for t in tensors), (ROWS, *(WHOLE for _ in tensors[1:]))
    offered = strategies_of(OpUse(target, args, {}, operands, forms, outs, 2))
    (one,) = [s for s in offered if s.ins[0] == ROWS]
    assert one.outs == (ROWS,) * len(wants) and set(one.ins[1:]) <= {VARYING} and one.run is None
    own = torch.arange(7)[:, None] % 2 == 0
    parts = [target(*filled(args, [torch.where(mine, x, 0), *tensors[1:]])) for mine in (own, ~own)]
    for k, y in enumerate(wants):
        pair = parts if isinstance(want, Tensor) else [part[k] for part in parts]
        assert torch.equal(pair[0] + pair[1], y) and torch.equal(pair[0], torch.where(own, y, 0))


@pytest.mark.parametrize(
    ("target", "given"),
    [
        (aten.exp.default, lambda x: (x,)),
        (aten.add.Tensor, lambda x: (x, randn(2, 7, 4))),
        (aten.mul.Tensor, lambda x: (x, randn(2, 7, 4))),
        (aten.split.Tensor, lambda x: (x, 2, 0)),
    ],
)
def test_other_ops_keep_no_rows(target: Any, given: Any) -> None:
    drawn = given(randn(7, 4))
    args, _, tensors = seen_of(drawn, {})
    made = target(*drawn)
    outs = tuple(Operand(tuple(y.shape), 8) for y in ([made] if isinstance(made, Tensor) else made))
    operands, forms = tuple(Operand(tuple(t.shape), 8) for t in tensors), (ROWS, *(WHOLE for _ in tensors[1:]))
    assert all(ROWS not in s.ins for s in strategies_of(OpUse(target, args, {}, operands, forms, outs, 2)))


CLEARED = {
    "sigmoid": (aten.sigmoid.default, lambda x: (x,)),
    "clamp": (aten.clamp.default, lambda x: (x, 0.2, 0.5)),
    "number": (aten.add.Tensor, lambda x: (x, 1.0)),
    "bias": (aten.add.Tensor, lambda x: (x, randn(7, 4))),
}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", CLEARED)
def test_an_op_that_fills_zeros_clears_the_rows_of_other_ranks(name: str, ends: bool) -> None:
    target, given = CLEARED[name]
    sizes, x = torch.tensor([2, 0, 1, 3, 1]), randn(7, 4)
    args, _, tensors = seen_of(given(x), {})
    owned = Form("rows", owner=Owner("sizes", ends, 5, 1))
    operands, forms = tuple(Operand(tuple(t.shape), 8) for t in tensors), (owned, *(WHOLE for _ in tensors[1:]))
    offered = strategies_of(OpUse(target, args, {}, operands, forms, (Operand((7, 4), 8),), 2))
    (one,) = [s for s in offered if s.ins[0] == owned]
    assert one.outs == (owned,) and one.beside == ("sizes",)
    assert one.run is not None
    want = target(*filled(args, tensors))
    for i, own in enumerate((torch.arange(7) < 3, torch.arange(7) >= 3)):  # three experts and two
        part = [torch.where(own[:, None], x, 0), *tensors[1:]]
        beside = sizes.cumsum(0) if ends else sizes
        got = one.run(Board(2, i, threading.Barrier(2), {}), (*filled(args, part), beside), {})
        assert torch.equal(got, torch.where(own[:, None], want, 0))


@pytest.mark.parametrize("num", [2, 3])
def test_a_second_product_reads_the_rows_that_the_first_has_made(num: int) -> None:
    counts, op = torch.tensor([2, 0, 3, 1, 1]), kernels.multiplied_rows.default
    x, one, two = randn(9, 4), randn(5, 4, 6), randn(5, 6, 3)

    def rule(x: Tensor, w: Tensor, form: Form, name: str = "counts") -> Any:
        args: Any
        args, _, tensors = seen_of((x, w, counts, False, False), {})
        named = (*args[:2], args[2]._replace(name=name), *args[3:])
        operands = tuple(Operand(tuple(t.shape), t.element_size()) for t in tensors)
        forms = form, cut(0, 5, num), WHOLE
        out = Operand((9, w.shape[2]), 8)
        offered = strategies_of(OpUse(op, named, {}, operands, forms, (out,), num))
        return [s for s in offered if s.outs[0].kind == "rows"]

    (first,) = rule(x, one, WHOLE)
    (_, second) = rule(randn(9, 6), two, first.outs[0])
    assert second.ins[0] == second.outs[0] == first.outs[0]
    assert len(rule(randn(9, 6), two, first.outs[0], name="other counts")) == 1  # whose groups may have other rows
    total = torch.zeros(9, 3, dtype=torch.float64)
    for i in range(num):
        ranks = Board(num, i, threading.Barrier(num), {})
        start, stop = ranks.bounds(5)
        h = aten.silu(first.run(ranks, (x, one[start:stop], counts, False, False), {}))
        total += second.run(ranks, (h, two[start:stop], counts, False, False), {})
    torch.testing.assert_close(total, op(aten.silu(op(x, one, counts, False, False)), two, counts, False, False))
