"""Covers compressed collectives: the formula of all ranks at once, conservation, bytes, errors, captures, hierarchy."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from shardfn import collectives as c
from shardfn.collectives import Compressor, Residual
from shardfn.collectives import _reference as ref
from shardfn.core import P, make_mesh, tree_map
from shardfn.testing import distributed

# Forward-mode AD loads these on its first use, and torch warns of itself.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

EXACT = dict(rtol=0, atol=0)
LENGTHS = (1, 7, 8, 9, 1000, 4097)
COMPRESSORS = [c.sign(), c.int8(), c.int8(block=16), c.int4(), c.top_k(0.1), c.identity()]


# The formula, of all ranks' inputs and errors.


class Oracle:
    """What P ranks compute together, straight from the formula; keeps their errors."""

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


# The golden values of a small example, twice in a row. Its rows of four signs are no whole byte.

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


@distributed(world=[1, 2, 3, 4])
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


@distributed(world=[1, 2, 3])
def test_leaves_buckets_donation_dtypes_and_codes_change_no_bits(world: int) -> None:
    with on(world):
        compressor = c.error_feedback(c.sign())
        x = given(3000, rank())
        tree: Any = {
            "a": x[:1000].view(10, 100), "b": [x[:0], None, x[1000]], "c": x[:2000].view(40, 50).T, "d": x[5:14].bfloat16(),
            "e": x.half()[:8],
        }  # fmt: skip
        leaves = [x[:1000].view(10, 100), x[:0], x[1000], x[:2000].view(40, 50).T, x[5:14].bfloat16(), x.half()[:8]]
        one_by_one = [c.compressed_pmean(t, "dp", compressor, c.compressed_init(t, "dp", compressor)) for t in leaves]
        state = c.compressed_init(tree, "dp", compressor)
        coded, _ = c.coded_pmean(tree, "dp", compressor, state)
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
            torch.testing.assert_close(c.decoded(coded, tree, "dp", compressor), out, **EXACT)
        wide, _ = c.compressed_pmean(x[5:14].bfloat16().float(), "dp", compressor, new["d"]._replace(
            worker=torch.zeros_like(new["d"].worker), server=torch.zeros_like(new["d"].server)))  # fmt: skip
        torch.testing.assert_close(wide.bfloat16(), out["d"], **EXACT)
