"""Covers kernels.ragged_attention: its plain formula, and the bits of a row beside any others in a plan."""

import contextlib
import inspect
import math
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, kernels
from shardfn.kernels import _build, _ragged_attention
from shardfn.testing import distributed

NIGHTLY = pytest.mark.nightly
CODES = (torch.int8, torch.float8_e4m3fn)


class Story(NamedTuple):
    """Queries, keys and values of whole sequences, and the arguments of scores."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    how: dict[str, Any]


def _story(lengths: tuple[int, ...], heads: tuple[int, int, int], **how: Any) -> Story:
    (H, G, K), draw = heads, torch.Generator().manual_seed(sum(lengths) + heads[2])
    q, k, v = ([torch.randn(n, x, K, generator=draw) for n in lengths] for x in (H, G, G))
    for name, scale in (("slopes", 0.1), ("sinks", 1.0)):
        if how.get(name) is True:
            how[name] = torch.randn(H, generator=draw) * scale
    if how.get("relative") is True:
        how["relative"] = torch.randn(H, 6, generator=draw)
    return Story(q, k, v, how)


class Pages:
    """A cache of shuffled blocks, with rubbish in it, and one table for each sequence of a story."""

    def __init__(self, story: Story, block: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.story, self.block = story, block
        num, G, K = len(story.q), *story.k[0].shape[1:]
        width = max(-(-len(q) // block) for q in story.q) + 1
        shuffled = torch.randperm(num * width + 1, generator=torch.Generator().manual_seed(seed))[: num * width]
        self.tables = shuffled.view(num, width).int()
        shape = (num * width + 1, 2, G, block, kernels.cache_row(K, dtype))
        # A scale of these bytes is NaN.
        coded = torch.full(shape, 255, dtype=torch.uint8).view(dtype) if dtype in CODES else None
        self.cache = torch.full(shape, math.nan, dtype=dtype) if coded is None else coded

    def run(self, *chunks: tuple[int, range]) -> list[Tensor]:
        """One call for the tokens at some positions of some sequences; the rows of each chunk."""
        story, block = self.story, self.block
        positions = torch.tensor([p for _, r in chunks for p in r], dtype=torch.int32)
        sequences = torch.tensor([s for s, r in chunks for _ in r], dtype=torch.int32)
        slots = self.tables[sequences.long(), positions.long() // block] * block + positions % block
        q, k, v = (torch.cat([x[s][r.start : r.stop] for s, r in chunks]) for x in story[:3])
        y, _ = kernels.ragged_attention(q, k, v, self.cache, slots, positions, sequences, self.tables, **story.how)
        return list(y.split([len(r) for _, r in chunks]))

    def whole(self) -> list[Tensor]:
        """One call with all tokens."""
        return self.run(*((s, range(len(q))) for s, q in enumerate(self.story.q)))


def _plain(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """The formula in float64, of one whole sequence: y and lse."""
    (T, H, K), G = q.shape, k.shape[1]
    k, v = (x.double().repeat_interleave(H // G, 1) for x in (k, v))
    scores = torch.einsum("thk,shk->hts", q.double(), k) * (how.get("scale") or K**-0.5)
    if "softcap" in how:
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    distance = torch.arange(T)[:, None] - torch.arange(T)
    if "slopes" in how:
        scores = scores - how["slopes"].double()[:, None, None] * distance
    if "relative" in how:
        scores = scores + how["relative"].double()[:, distance.clamp(0, how["relative"].shape[1] - 1)]
    seen = (distance >= 0) & (distance < how.get("window", T))
    scores = scores.masked_fill(~seen, -math.inf)
    if "sinks" in how:
        scores = torch.cat([scores, how["sinks"].double()[:, None, None].expand(H, T, 1)], -1)
    return torch.einsum("hts,shk->thk", scores.softmax(-1)[..., :T], v).float(), scores.logsumexp(-1).mT.float()


HOW: list[dict[str, Any]] = [
    {},
    {"window": 5, "scale": 0.3},
    {"softcap": 2.0},
    {"slopes": True, "sinks": True},
    {"relative": True, "scale": 1.0},
    {"window": 33, "softcap": 5.0, "slopes": True, "sinks": True, "relative": True},
]


@pytest.mark.parametrize("how", HOW, ids=lambda x: "-".join(x) or "plain")
@pytest.mark.parametrize("heads", [(2, 2, 8), (6, 2, 77)], ids=str)
def test_the_plain_formula(heads: tuple[int, int, int], how: dict[str, Any]) -> None:
    story = _story((70, 1, 9), heads, **how)
    for s, y in enumerate(Pages(story, 4).whole()):
        want, _ = _plain(story.q[s], story.k[s], story.v[s], **story.how)
        torch.testing.assert_close(y, want, rtol=2e-5, atol=2e-6)


@pytest.mark.day("plain-native", "plain-reference")
@pytest.mark.parametrize("kind", ["native", "reference", "triton"])
@pytest.mark.parametrize("how", [pytest.param(HOW[0], id="plain"), pytest.param(HOW[-1], id="all", marks=NIGHTLY)])
def test_lse_is_the_logarithm_of_the_sum(how: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    story = _story((40,), (6, 2, 7), **how)
    places, cache = torch.arange(40, dtype=torch.int32), torch.zeros(10, 2, 2, 4, 7)
    tables = torch.arange(10, dtype=torch.int32)[None]
    with kernels.implemented_by(kind if kind != "native" or _build.library() else "reference"):
        args = cache, places, places, torch.zeros_like(places), tables
        _, lse = kernels.ragged_attention(story.q[0], story.k[0], story.v[0], *args, **story.how)
    torch.testing.assert_close(lse, _plain(story.q[0], story.k[0], story.v[0], **story.how)[1], rtol=2e-5, atol=2e-6)


def test_the_attention_of_torch() -> None:
    story = _story((50,), (4, 2, 16))
    q, k, v = (x[0].double().movedim(1, 0)[None] for x in story[:3])
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    (got,) = Pages(story, 16).whole()
    torch.testing.assert_close(got, want[0].movedim(0, 1).float(), rtol=2e-5, atol=2e-6)


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@pytest.mark.day(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *CODES], ids=str)
@pytest.mark.parametrize(
    "heads, how",
    [((6, 2, 77), HOW[4]), ((2, 1, 32), HOW[0])]
    + [
        pytest.param(heads, how, marks=NIGHTLY)
        for heads in ((2, 2, 8), (8, 1, 64), (71, 1, 16), (3, 3, 1), (2, 1, 256))
        for how in HOW
    ],
    ids=str,
)
def test_every_processor_has_the_bits_of_the_definition(
    generation: int, heads: tuple[int, int, int], how: dict[str, Any], dtype: torch.dtype
) -> None:
    story = _story((45, 1, 6), heads, **dict(how))
    with kernels.implemented_by("reference"):
        pages = Pages(story, 4, dtype=dtype)
        want, written = pages.whole(), pages.cache
    pages = Pages(story, 4, dtype=dtype)
    assert _equal(pages.whole(), want), generation
    assert torch.equal(pages.cache.view(torch.uint8), written.view(torch.uint8))


def test_the_functions_of_scores() -> None:
    x = torch.cat([torch.linspace(-90, 0, 5001), torch.tensor([-math.inf, -87.0, -1e-30])])
    got = _ragged_attention.exponential(x)
    assert torch.equal(got[x < -87], torch.zeros(int((x < -87).sum()))) and got[5000] == 1
    near = x >= -87
    assert float((got[near].double() / x[near].double().exp() - 1).abs().max()) < 2e-7
    x = torch.cat([x / 10, -x / 10, torch.tensor([math.inf])])
    torch.testing.assert_close(_ragged_attention.tanh(x), x.double().tanh().float(), rtol=3e-7, atol=0)
    assert (
        _ragged_attention.tanh(torch.tensor(math.nan)).isnan()
        and _ragged_attention.exponential(torch.tensor(math.nan)).isnan()
    )


@pytest.mark.day("plain-1", "plain-16", "plain-32")
@pytest.mark.parametrize("block", [1, 4, 16, 32])
@pytest.mark.parametrize("how", [HOW[0], HOW[4]], ids=["plain", "all"])
def test_chunks_blocks_tables_and_neighbours_change_no_bit(block: int, how: dict[str, Any]) -> None:
    story = _story((97, 40, 65), (4, 2, 24), **dict(how))
    want = Pages(story, 7).whole()
    draw = torch.Generator().manual_seed(block)
    for seed in range(3):
        pages, done = Pages(story, block, seed=seed), [0, 0, 0]
        found: list[list[Tensor]] = [[], [], []]
        while any(n < len(q) for n, q in zip(done, story.q, strict=True)):
            chunks = []
            for s in torch.randperm(3, generator=draw).tolist():
                end = min(len(story.q[s]), done[s] + int(torch.randint(0, 40, (), generator=draw)))
                if seed == 2:  # decoding
                    end = min(len(story.q[s]), done[s] + 1)
                chunks += [(s, range(done[s], end))] if end > done[s] else []
                done[s] = end
            for (s, _), y in zip(chunks, pages.run(*chunks) if chunks else [], strict=True):
                found[s].append(y)
        assert _equal([torch.cat(ys) for ys in found], want), (block, seed)


@pytest.mark.day("x86-64-v4", "x86-64-v3")
def test_a_row_has_its_bits_among_any_number_of_rows(generation: int) -> None:
    story = _story((66,), (2, 1, 20))
    (want,) = Pages(story, 16).whole()
    for rows in range(1, 66):
        q, k, v = ([x[0][:rows]] for x in story[:3])
        first = Pages(Story(q, k, v, story.how), 16).whole()
        assert torch.equal(first[0], want[:rows]), (generation, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    story, before = _story((130, 1, 77), (6, 3, 32)), torch.get_num_threads()
    want = Pages(story, 16, dtype=dtype).whole()
    monkeypatch.setattr(_ragged_attention, "FEW", -1)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert _equal(Pages(story, 16, dtype=dtype).whole(), want), threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_a_cache_in_codes_holds_rounded_keys_and_values(dtype: torch.dtype) -> None:
    story = _story((40,), (4, 2, 26))
    k, v = ([kernels.decode_rows(kernels.encode_rows(x[0], dtype), 26, dtype)] for x in story[1:3])
    (want,) = Pages(Story(story.q, k, v, story.how), 16).whole()
    pages = Pages(story, 16, dtype=dtype)
    chunks = [pages.run((0, range(lo, hi)))[0] for lo, hi in ((0, 13), (13, 14), (14, 40))]
    assert torch.equal(torch.cat(chunks), want)
    (whole,) = Pages(story, 7, dtype=dtype).whole()
    assert torch.equal(whole, want)


@pytest.mark.parametrize("implementation", ["reference", None])
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_rows_of_codes(dtype: torch.dtype, implementation: Any) -> None:
    x = torch.randn(300, 22, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 300)[:, None]
    x[5, 3], x[6, 1], x[7], x[8, 2:] = math.nan, -math.inf, 0, 0
    x[9], x[10] = torch.arange(22.0) / 7, torch.tensor([2.0**-i for i in range(22)])
    place, cache = torch.arange(300, dtype=torch.int32), torch.zeros(75, 2, 1, 4, kernels.cache_row(22, dtype))
    cache, first = cache.to(torch.uint8).view(dtype), torch.zeros_like(place)
    with kernels.implemented_by(implementation) if implementation else contextlib.nullcontext():
        kernels.ragged_attention(x[:, None], x[:, None], -x[:, None], cache, place, first, first, first[:1, None])
    rows = cache.view(torch.uint8)[:, :, 0].transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows, torch.stack([kernels.encode_rows(y, dtype) for y in (x, -x)], 1))
    back = kernels.decode_rows(rows[:, 0], 22, dtype)
    assert back[5:7].isnan().all() and (back[7] == 0).all()
    scale = x.abs().amax(1, keepdim=True) / (127 if dtype == torch.int8 else 448)
    bound = scale / 2 if dtype == torch.int8 else torch.maximum(x.abs() / 16, scale / 1024)
    fine = [i for i in range(300) if i not in (5, 6)]
    assert ((back - x).abs() <= bound * (1 + 1e-5) + x.abs() * 1e-6)[fine].all()


def test_a_cache_in_bfloat16_holds_rounded_keys_and_values() -> None:
    story = _story((40,), (4, 2, 24))
    k, v = ([x[0].bfloat16().float()] for x in story[1:3])
    rounded = Story(story.q, k, v, story.how)
    assert _equal(Pages(story, 4, dtype=torch.bfloat16).whole(), Pages(rounded, 4).whole())


@pytest.mark.day("x86-64-v4", "x86-64-v3")
def test_values_that_are_not_finite_reach_only_the_rows_that_see_them(generation: int) -> None:
    story = _story((40, 50, 9), (4, 2, 24))
    want = Pages(story, 4).whole()
    story.k[1][11], story.v[1][33, 0] = math.nan, math.inf
    for implementation in ("native", "reference"):
        with kernels.implemented_by(implementation):
            got = Pages(story, 4).whole()
        assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
        assert torch.equal(got[1][:11], want[1][:11]) and got[1][11:].isnan().all()
    story.k[1][11] = 1.0
    got = Pages(story, 4).whole()
    assert got[1][:33].isfinite().all() and not got[1][33:, :2].isfinite().any()


def test_scores_and_sinks_at_the_ends(generation: int) -> None:
    story = _story((3,), (2, 2, 4), sinks=torch.tensor([-math.inf, math.inf]))
    (got,) = Pages(story, 4).whole()
    plain = Pages(_story((3,), (2, 2, 4)), 4).whole()[0]
    assert torch.equal(got[:, 0], plain[:, 0]) and got[:, 1].isnan().all()
    story.k[0][:] = -math.inf
    story.q[0][:] = 1.0
    story = story._replace(how={})
    assert torch.equal(Pages(story, 4).whole()[0], torch.zeros(3, 2, 4))


@pytest.mark.day("x86-64-v4-torch.float32", "x86-64-v4-torch.int8")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, pytest.param(CODES[1], marks=NIGHTLY)], ids=str)
def test_guesses_that_branch_have_the_bits_of_their_branch(generation: int, dtype: torch.dtype) -> None:
    # After 30 or 37 tokens come guesses: token -> its parent among the guesses.
    parents, heads = [None, 0, 0, 1, 2, 4, 1], (4, 2, 24)
    for how, prompt in ((HOW[0], 30), (HOW[4], 37)):
        story = _story((prompt, 20, len(parents)), heads, **dict(how))
        paths: list[list[int]] = []
        for i, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent is not None else []), i])
        # Each guess's branch as a sequence of its own.
        q, k, v = ([torch.cat([x[0], x[2][path]]) for path in paths] for x in story[:3])
        want = [y[-1] for y in Pages(Story(q, k, v, story.how), 8, dtype=dtype).whole()]

        pages = Pages(story, 8, dtype=dtype)
        pages.run((0, range(prompt)), (1, range(12)))
        num, tokens = len(parents), range(12, 20)  # beside the prompt of another sequence
        spare = pages.tables[2, :1] * 8 + torch.arange(num)
        other = pages.tables[1, torch.tensor(tokens) // 8] * 8 + torch.tensor(tokens) % 8
        slots = torch.cat([other, spare]).int()
        positions = torch.tensor([*tokens, *(prompt - 1 + len(path) for path in paths)], dtype=torch.int32)
        sequences = torch.tensor([1] * len(tokens) + [0] * num, dtype=torch.int32)
        tree = torch.zeros(len(tokens) + num, len(tokens) + num, dtype=torch.bool)
        for i, path in enumerate(paths):
            tree[len(tokens) + i, [len(tokens) + j for j in path]] = True
        q, k, v = (torch.cat([x[1][12:], x[2]]) for x in story[:3])
        cache = pages.cache.clone()
        for kind, bits in (("native", tree), ("native", tree.byte()), ("reference", tree)):
            pages.cache.copy_(cache)
            with kernels.implemented_by(kind):
                y, _ = kernels.ragged_attention(
                    *(q, k, v, pages.cache, slots, positions, sequences, pages.tables), **story.how, tree=bits
                )
            assert torch.equal(y[len(tokens) :], torch.stack(want)), (generation, kind)
            assert torch.equal(y[: len(tokens)], Pages(story, 8, dtype=dtype).whole()[1][12:]), (generation, kind)


def test_padding_that_shares_a_slot_changes_nothing() -> None:
    story = _story((20,), (2, 1, 8))
    want = Pages(story, 4).whole()[0]
    for kind in ("native", "reference"):
        pages = Pages(story, 4)
        tables = torch.cat([pages.tables, torch.full_like(pages.tables, 6 * 4 + 2)])
        free = next(b for b in range(len(pages.cache)) if b not in pages.tables.flatten().tolist())
        tables[1] = free
        slots = torch.cat(
            [pages.tables[0].repeat_interleave(4)[:20] * 4 + torch.arange(20) % 4, torch.tensor([4 * free] * 3)]
        )
        positions = torch.tensor([*range(20), 0, 0, 0], dtype=torch.int32)
        sequences = torch.tensor([0] * 20 + [1] * 3, dtype=torch.int32)
        q, k, v = (torch.cat([x[0], x[0][:3]]) for x in story[:3])
        with kernels.implemented_by(kind):
            y, _ = kernels.ragged_attention(q, k, v, pages.cache, slots.int(), positions, sequences, tables)
        assert torch.equal(y[:20], want) and torch.equal(pages.cache[free, 1, :, 0], v[-1])
        assert torch.equal(y[20:], v[-1:].expand(3, 2, 8))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kinds",
    [
        ((HOW[0], torch.bfloat16), (HOW[4], torch.float32)),
        pytest.param(((HOW[0], torch.int8), (HOW[3], torch.float8_e4m3fn)), marks=NIGHTLY),
    ],
    ids=["floats", "codes"],
)
def test_triton_has_the_bits_of_a_row_alone(kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for how, dtype in kinds:
        story = _story((35, 3), (2, 1, 9), **dict(how))
        with kernels.implemented_by("triton"):
            got, pages = Pages(story, 4, dtype=dtype).whole(), Pages(story, 16, seed=1, dtype=dtype)
            parts = [pages.run((0, range(33))), pages.run((1, range(3)), (0, range(33, 35)))]
        assert _equal([torch.cat([parts[0][0], parts[1][1]]), parts[1][0]], got)
        for y, want in zip(got, Pages(story, 4, dtype=dtype).whole(), strict=True):
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)


def _plan(**changed: Any) -> tuple[Any, ...]:
    """The arguments of two tokens of one sequence, in a cache of 3 blocks of 2 tokens."""
    ints = {"slots": [2, 3], "positions": [0, 1], "sequences": [0, 0], "tables": [[1, 2]]}
    plan = {name: torch.tensor(changed.pop(name, x), dtype=torch.int32) for name, x in ints.items()}
    rows = {"q": torch.ones(2, 4, 3), "k": torch.ones(2, 2, 3), "v": torch.ones(2, 2, 3)}
    given = rows | {"cache": torch.zeros(3, 2, 2, 2, 3)} | plan
    return ({**given, **changed},)


REFUSALS: list[tuple[dict[str, Any], Any, str]] = [
    ({"slots": [2, 6]}, ValueError, r"slots\[1\] is 6, must be from 0 to 5: cache has 3 blocks of 2 tokens"),
    ({"slots": [-1, 3]}, ValueError, r"slots\[0\] is -1"),
    ({"positions": [0, 4]}, ValueError, r"positions\[1\] is 4, must be from 0 to 3: tables has 2 blocks of 2 tokens"),
    ({"sequences": [1, 0]}, ValueError, r"sequences\[0\] is 1, must be from 0 to 0: tables has 1 sequences"),
    ({"tables": [[3, 0]]}, ValueError, r"tables\[0, 0\] must be from 0 to 2, .*, got 3 for token 0 at position 0"),
    ({"tables": [[1, -1]], "positions": [0, 2]}, ValueError, r"tables\[0, 1\] .* got -1 for token 1 at position 2"),
    ({"tree": torch.tensor([[1, 0], [0, 1]]).byte(), "positions": [1, 0]}, None, ""),
    (
        {"tree": torch.ones(2, 2).byte()},
        ValueError,
        r"tree\[0\] has tokens \[0, 1\] of sequences \[0, 0\] at pos.* \[0, 1\]",
    ),
    (
        {"tree": torch.tensor([[1, 0], [1, 1]]).byte(), "positions": [0, 2]},
        ValueError,
        r"consecutive positions up to 2",
    ),
    ({"q": torch.ones(2, 3, 3)}, ValueError, "got 2 key heads of cache and 3 heads of q"),
    ({"q": torch.ones(2, 4, 3).half()}, TypeError, "q must be float32 or float64, got torch.float16"),
    ({"k": torch.ones(2, 1, 3)}, ValueError, r"k is of shape \(2, 1, 3\), must be \(2, 2, 3\)"),
    ({"cache": torch.zeros(3, 2, 2, 2, 3).half()}, TypeError, "cache must be .*, got torch.float16"),
    (
        {"cache": torch.zeros(3, 3, 2, 2, 3)},
        ValueError,
        r"cache is of shape \(3, 3, 2, 2, 3\), must be \(3, 2, 2, 2, 3\)",
    ),
    ({"cache": torch.zeros(3, 2, 2, 3, 2).mT}, ValueError, "cache is written in place"),
    ({"window": 0}, ValueError, "window must be 1 or more .*, got 0"),
    ({"softcap": 0.0}, ValueError, "softcap must be a number above 0, or None, got 0.0"),
    ({"sinks": torch.ones(2)}, ValueError, r"sinks is of shape \(2,\), must be \(4,\)"),
    ({"tree": torch.ones(2, 2)}, TypeError, "tree is torch.float32"),
]


@pytest.mark.parametrize("kind", ["native", "reference"])
@pytest.mark.parametrize("changed, error, said", REFUSALS)
def test_refusals_write_nothing(changed: dict[str, Any], error: Any, said: str, kind: str) -> None:
    (args,) = _plan(**changed)
    with kernels.implemented_by(kind if _build.library() else "reference"):
        run = inspect.unwrap(kernels.ragged_attention)  # without the shape checks of tests
        if error is None:
            run(**args)
            return
        with pytest.raises(error, match=said):
            run(**args)
    assert not args["cache"].any()


def test_blocks_before_the_window_are_not_read() -> None:
    for kind in ("native", "reference"):
        (args,) = _plan(positions=[2, 3], slots=[4, 5], tables=[[-1, 2]], window=1)
        with kernels.implemented_by(kind if _build.library() else "reference"):
            assert torch.equal(kernels.ragged_attention(**args)[0], torch.ones(2, 4, 3))


def test_no_tokens_and_columns_of_a_larger_tensor() -> None:
    (args,) = _plan()
    ints = {name: args[name][:0] for name in ("slots", "positions", "sequences")}
    for kind in ("native", "reference"):
        with kernels.implemented_by(kind if _build.library() else "reference"):
            none = args | ints | {name: args[name][:0] for name in "qkv"}
            assert kernels.ragged_attention(**none)[0].shape == (0, 4, 3)
            whole = torch.randn(2, 8 * 3, generator=torch.Generator().manual_seed(0))
            parts = dict(zip("qkv", whole.view(2, 8, 3).split([4, 2, 2], 1), strict=True))
            apart = {name: x.clone() for name, x in parts.items()}
            assert torch.equal(kernels.ragged_attention(**args | parts)[0], kernels.ragged_attention(**args | apart)[0])


def test_a_backward_is_refused() -> None:
    (args,) = _plan()
    q = args["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"ragged_attention has no derivative: call it on q\.detach"):
        kernels.ragged_attention(**args)[0].sum().backward()
    assert q.grad is None


def _layers(params: list[Tensor], caches: list[Tensor], x: Tensor, plan: tuple[Tensor, ...]) -> Any:
    """Two layers; the second reads the first one's cache, too."""
    for cache, w in zip([*caches, caches[0]], [*params, params[0]], strict=True):
        q, k, v = (x @ w).view(len(x), 4, 8).split([2, 1, 1], 1)
        x = x + kernels.ragged_attention(q, k, v, cache, *plan)[0].flatten(1)
    return x, caches


@distributed(world=1)
def test_a_bound_call_writes_its_caches_in_place() -> None:
    mesh, draw = sf.make_mesh({"tp": 1}), torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 32, generator=draw) for _ in range(2)]
    f = sf.sharded(
        sf.jit(_layers, backend="graph"), mesh=mesh, in_specs=(P(),), out_specs=(None, sf.Donated(1)), donate=1
    )
    params = f.init(weights)
    whole, mine = ([torch.zeros(4, 2, 1, 4, 8) for _ in range(2)] for _ in range(2))
    caches = [sf.GlobalTensor(c, c.shape, P(), mesh) for c in mine]
    tables = torch.tensor([[2, 0, 3]], dtype=torch.int32)

    def step(first: int, last: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        positions = torch.arange(first, last, dtype=torch.int32)
        slots = tables[0, positions.long() // 4] * 4 + positions % 4
        x = torch.randn(last - first, 16, generator=draw)
        return x, (slots, positions, torch.zeros_like(positions), tables)

    args = step(0, 1)
    bound = f.bind(params, caches, *args)
    for at in range(8):
        args = step(at, at + 1)
        y, caches = bound(params, caches, *args)
        with torch.no_grad():
            want, _ = _layers(weights, whole, *args)
        torch.testing.assert_close(y, want)
        assert all(
            torch.equal(c.local, m) and c.local.data_ptr() == m.data_ptr() for c, m in zip(caches, mine, strict=True)
        )
        for c, w in zip(mine, whole, strict=True):
            torch.testing.assert_close(c, w)
    text = f.lower(params, caches, *args).as_text()
    assert text.count("shardfn_kernels.ragged_attention(") == 3 and not re.search(r"aten\.\w*(copy|clone)", text), text
