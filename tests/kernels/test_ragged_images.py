"""Covers `kernels.ragged_attention(images=)`: the softmaxes of text and of images, with equal bits on every path."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from shardfn import kernels
from shardfn.kernels import _build
from shardfn.kernels._ragged_attention import BRANCHES
from tests.kernels.test_ragged_rows import HOW, KINDS, _call


def _draw_images(args: dict[str, Any], seed: int = 0, branch: str = "text") -> torch.Tensor:
    """Images in both sequences. The guesses, from position 7 of the first sequence on, are text."""
    flags = torch.rand(2, 48, generator=torch.Generator().manual_seed(seed)) < 0.4
    flags[0, 7:] = False
    if branch == "whole":  # no image ends behind the tokens of the call
        flags[1, int(args["positions"].max()) + 1 :] = False
    return flags


def _find_image(flags: torch.Tensor, at: int) -> range:
    """The positions of the image around a position, or none."""
    low = high = at
    while low > 0 and flags[low - 1]:
        low -= 1
    while high < len(flags) and flags[high]:
        high += 1
    return range(low, high) if flags[at] else range(0)


@pytest.mark.parametrize("branch", BRANCHES)
def test_the_formula(branch: str) -> None:
    args = _call((4, 2, 7), torch.float64, {}, tree=False)
    flags = _draw_images(args, branch=branch)
    y, _ = kernels.ragged_attention(**args, images=kernels.pack_bits(flags), branch=branch)
    at, of = args["positions"].long(), args["sequences"].long()
    k, v = (args[name].repeat_interleave(2, 1) for name in "kv")
    for i in range(46):
        own = [j for j in range(46) if of[j] == of[i] and at[j] <= at[i]]
        image = flags[of[i], at[i]]
        seen = {
            "text": [j for j in own if not flags[of[j], at[j]] and not image],
            "images": [i] if image else [j for j in own if flags[of[j], at[j]]],
            "text_of_all": [j for j in own if not flags[of[j], at[j]]],
            "whole": [
                j
                for j in range(46)
                if of[j] == of[i] and (j in own or int(at[j]) in _find_image(flags[of[i]], int(at[i])))
            ],
        }[branch]
        scores = torch.einsum("hk,shk->hs", args["q"][i], k[seen]) / math.sqrt(7)
        want = torch.einsum("hs,shk->hk", scores.softmax(-1), v[seen])
        torch.testing.assert_close(y[i], want, rtol=1e-12, atol=1e-13)
        assert seen or not y[i].any()


@pytest.mark.parametrize("window", [3, 9])
def test_a_window_does_not_cut_an_image(window: int) -> None:
    """Rows around an image of 20 positions, each against the sum over the keys that it sees."""
    args = _call((4, 2, 7), torch.float64, {}, tree=False)
    flags = torch.zeros(2, 48, dtype=torch.bool)
    flags[1, 4:24] = True
    with kernels.implemented_by("reference"):
        want = kernels.ragged_attention(**args, images=kernels.pack_bits(flags), branch="whole", window=window)[0]
    at, of = args["positions"].long(), args["sequences"].long()
    k, v = (args[name].repeat_interleave(2, 1) for name in "kv")
    for i in range(46):
        image = _find_image(flags[of[i]], int(at[i]))
        seen = [j for j in range(46) if of[j] == of[i] and (0 <= at[i] - at[j] < window or int(at[j]) in image)]
        scores = torch.einsum("hk,shk->hs", args["q"][i], k[seen]) / math.sqrt(7)
        torch.testing.assert_close(want[i], torch.einsum("hs,shk->hk", scores.softmax(-1), v[seen]))
    narrow = args | {name: args[name].float() for name in ("q", "k", "v", "cache")}
    with kernels.implemented_by("native" if _build.library() else "reference"):
        found = kernels.ragged_attention(**narrow, images=kernels.pack_bits(flags), branch="whole", window=window)[0]
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads, dtype, how", HOW, ids=["float32", "bfloat16", "int8", "float64"])
def test_kinds_have_the_bits_of_the_definition(
    heads: Any, dtype: Any, how: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    chosen = kind if kind != "native" or _build.library() else "reference"
    for seed, tree in enumerate((False, True)):
        args = _call(heads, dtype, how, tree=tree)
        found = []
        for branch in BRANCHES:
            images = kernels.pack_bits(_draw_images(args, seed, branch))
            with kernels.implemented_by("reference"):
                want = kernels.ragged_attention(**args, images=images, branch=branch)
            with kernels.implemented_by(chosen), np.errstate(all="ignore"):
                got = kernels.ragged_attention(**args, images=images, branch=branch)
            for a, b in zip(got, want, strict=True):
                if kind == "triton":
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
                else:
                    # lse = m + log(sum) rounds at the size of m, also where the sum is near 0.
                    close = a is got[1] and torch.allclose(a, b, rtol=1e-6, atol=5e-7)
                    assert torch.equal(a, b) or close, branch
            found.append(got[0])
        assert len({x.sum().item() for x in found}) == 4


@pytest.mark.parametrize("heads, dtype, how", HOW, ids=["float32", "bfloat16", "int8", "float64"])
def test_positions_of_text_alone_have_the_bits_of_a_call_without_images(heads: Any, dtype: Any, how: Any) -> None:
    args = _call(heads, dtype, how, tree=True)
    want = kernels.ragged_attention(**args)
    none = torch.zeros(2, 2, dtype=torch.int32)
    for branch in ("text", "text_of_all", "whole"):
        got = kernels.ragged_attention(**args, images=none, branch=branch)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    assert args.get("sinks") is not None or not kernels.ragged_attention(**args, images=none, branch="images")[0].any()


def test_hidden_values_that_are_not_finite_are_never_read() -> None:
    args = _call((4, 2, 16), torch.float32, {}, tree=False)
    flags = _draw_images(args)
    hidden = flags[args["sequences"].long(), args["positions"].long()]
    args["v"][hidden] = math.nan
    args["k"][hidden] = math.inf
    for kind in ("reference", "native" if _build.library() else "reference"):
        with kernels.implemented_by(kind):
            y, _ = kernels.ragged_attention(**args, images=kernels.pack_bits(flags))
        assert y.isfinite().all()


def test_mistakes() -> None:
    args = _call((4, 2, 7), torch.float32, {}, tree=False)
    images = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"images is of shape \(2, 1\), must be \(2, 2\): a bit for each position"):
        kernels.ragged_attention(**args, images=images[:, :1])
    with pytest.raises(TypeError, match="images"):
        kernels.ragged_attention(**args, images=images.long())
    with pytest.raises(ValueError, match="branch must be one of 'text', 'images', 'text_of_all', 'whole', got 'image'"):
        kernels.ragged_attention(**args, images=images, branch="image")
