"""Keys and draws: known answers of threefry2x32, jax.random's numbers, blocks equal to slices, deferred draws."""

import itertools
from typing import Any

import pytest
import torch

from shardfn.core import (
    Draw,
    bernoulli,
    bits,
    deferred,
    draw_block,
    fold_in,
    full,
    key,
    normal,
    normal_block,
    ones,
    split,
    threefry2x32,
    tree_leaves,
    uniform,
    uniform_block,
    zeros,
)

# (key words, counter words, output words): Random123's kat_vectors for threefry2x32 with 20 rounds.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
SHAPES_AND_SLICES = [
    ((), ()),
    ((7,), (slice(2, 5),)),
    ((70001,), (slice(1, 70001),)),
    ((5, 3, 7), (slice(1, 4), slice(0, 2), slice(3, 7))),
    ((5, 3, 7), (slice(None), slice(1, 2))),
    ((5, 3, 7), (slice(4, 99),)),
    ((5, 3, 7), (slice(2, 2),)),
    ((5, 3, 7), (slice(0, 5), slice(0, 3), slice(-2, None))),
    ((0, 4), ()),
    ((4, 0), (slice(1, 3),)),
    ((301, 333), (slice(7, 300), slice(5, 332))),
    ((3, 40009), (slice(1, 3), slice(0, 40008))),
    ((2, 3, 40009), (slice(0, 2), slice(1, 3), slice(11, 40009))),
]


@pytest.mark.parametrize(
    ("k", "counter", "words"),
    [pytest.param(*x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(KNOWN_ANSWERS)],
)
def test_threefry_known_answers(k, counter, words):
    index = counter[0] << 32 | counter[1]
    index = index - (1 << 64) if index >> 63 else index
    out = threefry2x32(torch.tensor(k), torch.tensor(index))
    assert tuple(int(w) & 0xFFFFFFFF for w in out) == words


# Literals from jax 0.10.2 with its default, jax_threefry_partitionable=True.


def test_keys_are_jax_s():
    assert key(42).tolist() == [0, 42]
    assert key(2**40 + 5).tolist() == [256, 5]
    assert key(-1).tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    assert split(key(42), 3).tolist() == [[1832780943, 270669613], [64467757, 2916123636], [2465931498, 255383827]]
    assert fold_in(key(42), 7).tolist() == [2547012911, 1371500959]
    assert fold_in(key(42), 4000000000).tolist() == [4151844817, 2174040936]


def test_bits_are_jax_s():
    words = [2098992034, 2919706841, 2646866425, 2409546199, 1935504149, 2516274904]
    assert bits(key(42), 0, 6).tolist() == words
    assert bits(key(42), 2, 3).tolist() == words[2:5]


def test_uniform_is_jax_s_bit_for_bit():
    words = ["0x1.f470480000000p-2", "0x1.5c0e600000000p-1", "0x1.3b87f00000000p-1", "0x1.1f3d800000000p-1"]
    assert uniform(key(42), (4,)).tolist() == [float.fromhex(w) for w in words]
    words = ["0x1.d1c1200000000p-1", "0x1.381cc00000000p+1", "0x1.ee1fc00000000p+0", "0x1.7cf6000000000p+0"]
    assert uniform(key(42), (4,), minval=-3.0, maxval=5.0).tolist() == [float.fromhex(w) for w in words]
    words = ["0x1.b4f8123c40884p-2", "0x1.ebd996d6e8400p-7", "0x1.25f641d41e71ap-1", "0x1.75aad28c6a974p-1"]
    assert uniform(key(42), (4,), dtype=torch.float64).tolist() == [float.fromhex(w) for w in words]


def test_normal_is_jax_s_up_to_erfinv_rounding():
    want = torch.tensor([-0.02830461598932743, 0.4671318531036377, 0.2957029640674591, 0.15354591608047485])
    torch.testing.assert_close(normal(key(42), (4,)), want, rtol=1e-5, atol=1e-6)
    want = torch.tensor([0.47891655564308167, -1.0878113508224487, -1.811444878578186])
    x = normal(key(1), (1000, 1000))
    torch.testing.assert_close(x[999, -3:], want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.stack([x.max(), x.min()]), torch.tensor([4.797158, -4.7336316]))
    want = torch.tensor([-0.18471174528191162, -2.169824560397754, 0.18693555179382582], dtype=torch.float64)
    torch.testing.assert_close(normal(key(42), (3,), dtype=torch.float64), want, rtol=1e-12, atol=1e-12)


def test_bernoulli_is_jax_s():
    assert bernoulli(key(42), 0.3, (10,)).nonzero().flatten().tolist() == [6]


@pytest.mark.day(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "slices"),
    [pytest.param(*x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(SHAPES_AND_SLICES)],
)
def test_block_equals_slice(shape, slices, dtype):
    args = {"mean": 0.3, "stddev": 0.02, "dtype": dtype}
    assert torch.equal(normal_block(key(5), shape, slices, **args), normal(key(5), shape, **args)[slices])
    args = {"minval": -0.1, "maxval": 0.7, "dtype": dtype}
    assert torch.equal(uniform_block(key(5), shape, slices, **args), uniform(key(5), shape, **args)[slices])


def test_block_equals_slice_at_any_offset_and_length():
    whole = normal(key(3), (200_000,))
    for start, count in itertools.product((0, 1, 17, 63, 65_537, 131_071), (1, 2, 15, 31, 33, 63, 65, 1000)):
        block = normal_block(key(3), (200_000,), (slice(start, start + count),))
        assert torch.equal(block, whole[start : start + count]), (start, count)


def test_blocks_beyond_32_bits_use_the_high_word():
    shape = (1 << 20, 1 << 20)
    a = uniform_block(key(0), shape, (slice(1 << 12, (1 << 12) + 1), slice(0, 4)))
    assert not torch.equal(a, uniform_block(key(0), shape, (slice(0, 1), slice(0, 4))))
    hi, lo = threefry2x32(key(0), torch.arange(4) + (1 << 32))
    assert torch.equal(a[0], (((hi ^ lo) >> 9) & ((1 << 23) - 1)).float() * 2.0**-23)


def test_moments_and_range():
    u, x = uniform(key(0), (300_000,)), normal(key(0), (300_000,), mean=1.0, stddev=2.0)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.003 and abs(u.var().item() - 1 / 12) < 0.002
    assert abs(x.mean().item() - 1) < 0.02 and abs(x.std().item() - 2) < 0.02
    kurtosis = ((x - 1) / 2).pow(4).mean().item()
    assert abs(kurtosis - 3) < 0.1
    assert abs(bernoulli(key(0), 0.25, (300_000,)).float().mean().item() - 0.25) < 0.005


def test_different_keys_differ_and_equal_keys_agree():
    keys = [key(0), key(1), *split(key(0)), fold_in(key(0), 2), fold_in(key(1), 0)]
    draws = [normal(k, (8,)) for k in keys]
    for a, b in itertools.combinations(draws, 2):
        assert not (a == b).any()
    assert torch.equal(normal(key(7), (8,)), normal(key(7), (8,)))


def test_fold_in_of_a_tensor_is_fold_in_of_each_entry():
    data = torch.tensor([[3, 0], [2**40, 5]])
    each = [fold_in(key(9), int(d)) for d in data.flatten()]
    assert torch.equal(fold_in(key(9), data), torch.stack(each).view(2, 2, 2))
    assert torch.equal(fold_in(key(9), 2**64 - 1), fold_in(key(9), -1))


def test_keys_pass_through_vmap():
    keys = split(key(0), 3)
    out = torch.func.vmap(lambda k: normal(fold_in(k, 1), (5,)))(keys)
    assert torch.equal(out, torch.stack([normal(fold_in(k, 1), (5,)) for k in keys]))


def test_deferred_is_eager_bit_for_bit():
    makers = [
        lambda: normal(key(1), (37, 11), stddev=0.02),
        lambda: uniform(key(1), (37, 11), minval=-1.0, dtype=torch.float64),
        lambda: zeros((37, 11), dtype=torch.int64),
        lambda: ones((37, 11)),
        lambda: full((37, 11), 0.5, dtype=torch.bfloat16),
    ]
    cut = (slice(3, 30), slice(2, 9))
    for make in makers:
        eager = make()
        with deferred():
            lazy = make()
        assert isinstance(lazy, Draw) and not isinstance(eager, Draw)
        assert (lazy.shape, lazy.dtype, lazy.device, lazy.ndim) == (eager.shape, eager.dtype, eager.device, 2)
        assert torch.equal(lazy.full(), eager)
        assert torch.equal(draw_block(lazy, cut), eager[cut])
        assert torch.equal(draw_block(eager, cut), eager[cut])


def test_deferred_nests_and_ends():
    with deferred():
        with deferred():
            pass
        assert isinstance(ones(()), Draw)
        assert not isinstance(bernoulli(key(0), 0.5, (2,)), Draw)
        assert not isinstance(normal_block(key(0), (2,), ()), Draw)
    assert not isinstance(ones(()), Draw)
    with pytest.raises(KeyError), deferred():
        raise KeyError
    assert not isinstance(ones(()), Draw)


def test_a_draw_is_free_until_used():
    with deferred():
        huge = normal(key(0), (1 << 20, 1 << 20))
    assert (huge.numel(), huge.size(0), len(huge), huge.element_size()) == (1 << 40, 1 << 20, 1 << 20, 4)
    assert huge.is_floating_point() and not huge.requires_grad
    assert repr(huge) == "Draw(shape=(1048576, 1048576), dtype=torch.float32, device=cpu)"
    tree: Any = {"w": huge}
    (leaf,) = tree_leaves(tree)
    assert leaf is huge
    assert draw_block(huge, (slice(5, 6), slice(0, 3))).shape == (1, 3)


def test_a_draw_used_in_an_op_is_its_value():
    with deferred():
        w = normal(key(0), (4, 3))
    value = normal(key(0), (4, 3))
    assert torch.equal(w + 1, value + 1)
    assert torch.equal(w.T, value.T)
    assert torch.equal(w[1:, 0], value[1:, 0])
    assert torch.equal(torch.cat([w, value]), torch.cat([value, value]))
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, value))
    assert type(w * 2) is torch.Tensor


def test_a_draw_refuses_to_be_written():
    with deferred():
        w = ones((2,))
    with pytest.raises(TypeError, match=r"immutable. Call \.full\(\)"):
        w.add_(1)
    with pytest.raises(TypeError, match="immutable"):
        w[0] = 3.0
    with pytest.raises(TypeError, match="immutable"):
        torch.add(torch.ones(2), 1, out=w)
    with pytest.raises(TypeError, match="immutable"):
        torch.nn.init.zeros_(w)
    other = w
    other += 1  # Python falls back to other = other + 1
    assert other.tolist() == [2.0, 2.0] and w.tolist() == [1.0, 1.0]


@pytest.mark.nightly
def test_traced_draw_is_one_graph_with_the_same_bits():
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(k):
        return normal(fold_in(k, 3), (70_000,))

    graph = make_fx(f, tracing_mode="fake")(key(0))
    assert torch.equal(graph(key(4)), f(key(4)))


def test_bad_arguments():
    with pytest.raises(ValueError, match="at most 64 bits"):
        key(1 << 64)
    with pytest.raises(ValueError, match="at most 64 bits"):
        fold_in(key(0), 1 << 64)
    with pytest.raises(ValueError, match=r"split\(key, -1\)"):
        split(key(0), -1)
    with pytest.raises(ValueError, match=r"bernoulli\(p=1\.5\)"):
        bernoulli(key(0), 1.5, (2,))
    with pytest.raises(TypeError, match="int64"):
        normal(key(0), (2,), dtype=torch.int64)
    with pytest.raises(ValueError, match="2 slices for shape"):
        normal_block(key(0), (2,), (slice(0, 1), slice(0, 1)))
    with pytest.raises(ValueError, match="step 1"):
        normal_block(key(0), (4,), (slice(0, 4, 2),))
