"""Stories: requests, cancels and changes of weights over steps of an engine, held against one forward of each sequence.

A story is drawn by hypothesis; each feature of the engine adds an axis to it.
"""

import functools
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from shardfn import core, kernels, nn
from shardfn.inference import (
    Compiler,
    Decoder,
    Drafter,
    Engine,
    Grammar,
    Limits,
    Runner,
    Sampling,
    Token,
    detokenizer,
)
from shardfn.inference._cache import make_single_bodies
from shardfn.inference._state import draw_key
from shardfn.lora import LoRA
from shardfn.models import gpt

VERSIONS = 3
# The bytes of the model's tokens: some are halves of a character, or have no text.
TOKENS = [b"a", b"b", b"ab", b" ", b"\n", b"\xc3", b"\xa9", None, b"b ", "\N{PILE OF POO}z".encode(), b"\xf0", b"z"]
# Finite languages, with all texts listed. Some texts cannot be written where `b` is a stop token.
LANGUAGES: dict[Grammar | None, list[str]] = {None: []}
if importlib.util.find_spec("llguidance") is not None:
    LANGUAGES |= {
        Grammar.regex("(ab|b|\u00e9){1,4}"): [
            "".join(w) for n in range(1, 5) for w in itertools.product(("ab", "b", "\u00e9"), repeat=n)
        ],
        Grammar.regex("a?b{1,2}( z|\u00e9\n?)?"): [
            a + b + c for a in ("", "a") for b in ("b", "bb") for c in ("", " z", "\u00e9", "\u00e9\n")
        ],
        Grammar.lark('start: "a" start "b" | "z"'): ["a" * n + "z" + "b" * n for n in range(20)],
    }
# A processor of two arguments and one of three, pure functions.
PROCESSORS = {
    "odd": lambda output, logits: logits + torch.arange(len(logits)) % 2 * (1 + len(output) % 3),
    "prompt": lambda prompt, output, logits: logits.index_add(0, torch.tensor([prompt[-1]]), torch.tensor([4.0])),
}
SMALL = st.integers(0, 2)  # few tokens, so that prompts share prefixes


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it is added, and the one before which it is cancelled."""

    step: int
    prompt: tuple[int, ...]
    sampling: Sampling
    priority: int = 0
    cancel: int | None = None
    adapter: str | None = None
    picture: int = 0


@dataclass(frozen=True)
class Story:
    """Arrivals, changes of weights (step, whether the cache is computed anew), and the blocks of the pool."""

    arrivals: tuple[Arrival, ...]
    updates: tuple[tuple[int, bool], ...]
    blocks: int


samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 2]),
    stop_tokens=st.sampled_from([(), (), (1, 4)]),
    stop=st.sampled_from([(), (), ("ab ", "bb"), ("é", "\n\n", "zz")]),
    include_stop=st.booleans(),
    grammar=st.sampled_from(list(LANGUAGES)),
    prompt_logprobs=st.sampled_from([False, False, True]),
    logit_bias=st.sampled_from([(), (), ((2, 5.5), (0, -100.0)), ((7, 0.25), (3, 1.0), (12, -3.0))]),
    top_logprobs=st.sampled_from([0, 0, 3, 20]),
    min_tokens=st.sampled_from([0, 0, 0, 2, 5]),
    bad_words=st.sampled_from([(), (), ((2,), (0, 1)), ((3, 3), (1, 0, 9), (11,))]),
    allowed_token_ids=st.sampled_from([None, None, None, (0, 1, 4, 9, 11)]),
    logits_processors=st.sampled_from([(), (), (), ("odd",), ("prompt", "odd")]),
).map(lambda one: replace(one, min_tokens=min(one.min_tokens, one.max_tokens)))
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=st.lists(SMALL, min_size=1, max_size=18).map(tuple),
    sampling=samplings,
    priority=st.integers(0, 1),
    cancel=st.one_of(st.none(), st.none(), st.integers(1, 20)),
    adapter=st.sampled_from([None, None, "thin", "wide"]),
    picture=st.integers(0, 1),
)


def stories(limits: Limits, image: int | None = None) -> st.SearchStrategy[Story]:
    """Stories for an engine of these limits, also in pools so small that sequences lose their blocks.

    With an image token, prompts have image tokens in place of token 2.
    """

    def show(a: Arrival) -> Arrival:
        return a if image is None else replace(a, prompt=tuple(image if t == 2 else t for t in a.prompt))

    return st.builds(
        Story,
        arrivals=st.lists(arrivals.map(show), min_size=1, max_size=7).map(tuple),
        updates=st.lists(st.tuples(st.integers(1, 10), st.booleans()), max_size=VERSIONS - 1).map(tuple),
        blocks=st.integers(limits.width + 1, limits.blocks),
    )


@dataclass
class Told:
    """The tokens of one choice."""

    tokens: list[Token] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        return self.tokens[-1].finish_reason if self.tokens else None


@dataclass
class Model:
    """A decoder, the parameters of each version, and the logits of whole sequences, computed once each."""

    config: gpt.Config
    decoder: Decoder
    params: Sequence[Any]
    adapters: dict[str, tuple[LoRA, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.full = functools.lru_cache(maxsize=4096)(self._full)

    @property
    def has_images(self) -> bool:
        return self.config.images is not None

    def features(self, tokens: Sequence[int], picture: int) -> Tensor | None:
        """The features of a prompt's image tokens, in a model with images."""
        if self.config.images is None:
            return None
        drawn, D = torch.Generator().manual_seed(picture), self.config.d_model
        return torch.randn(tokens.count(self.config.images.token), D, generator=drawn)

    def _full(self, version: int, tokens: tuple[int, ...], adapter: str | None = None, picture: int = 0) -> Tensor:
        params, tokens_T = self.params[version], torch.tensor(tokens)
        with torch.no_grad():
            if adapter is None:
                seen = self.features(tokens, picture)
                return gpt.apply(self.config, params, tokens_T[None], image_features=seen)[0]
            T, then = len(tokens), products(*self.adapters[adapter])
            at_T = torch.arange(T, dtype=torch.int32)
            bodies = make_single_bodies(self.decoder.cache, T)
            packed = gpt.pack(self.config, params)
            return gpt.decode(self.config, packed, tokens_T, at_T, at_T, bodies, then=then).logits


def products(lora: LoRA, tree: Any) -> dict[str, nn.Then]:
    """The definition of an adapter's products, of each row alone."""

    def then(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        thin = kernels.row_linear(x, kernels.pack_rows(a), len(a))
        return y + kernels.row_linear(thin, kernels.pack_rows(b), len(b))

    return {path: functools.partial(then, own["a"], own["b"] * lora.scale_of(path)) for path, own in tree.items()}


def adapter(params: Any, targets: list[str], rank: int, seed: int) -> tuple[LoRA, Any]:
    """An adapter that changes tokens."""
    lora = LoRA.of(params, targets, rank=rank, alpha=3)
    drawn = torch.Generator().manual_seed(seed)
    shapes = lora.shapes
    return lora, {
        path: {name: torch.randn(shape, generator=drawn) for name, shape in own.items()} for path, own in shapes.items()
    }


@functools.cache
def model(tp: str | None = None, sp: str | None = None, **changes: Any) -> Model:
    """A small exact model with parameters of several versions, whose logits are far apart."""
    base = {"vocab_size": 13, "num_layers": 2, "d_model": 24, "num_heads": 4, "max_len": 28, "batch_invariant": True}
    config = gpt.Config(**{**base, **changes})
    params = [core.tree_map(lambda x: x * 8, gpt.init(config, core.key(i))) for i in range(VERSIONS)]
    from shardfn.inference import decoder

    adapters = {}
    if not config.stacked and not config.per_head and config.swift is None and config.images is None:
        mlp = [] if config.experts else [r"\.w_down$"]
        adapters["thin"] = adapter(params[0], [r"\.wq$", *mlp], 3, 0)
        value = r"\.wv$" if config.latent is None else r"\.wkv_a$"
        adapters["wide"] = adapter(params[0], [r"\.wo$", value, *mlp, *([r"0\.w_up$"] if mlp else [])], 9, 1)
    return Model(config, decoder(config, tp=tp, sp=sp), params, adapters)


def run(
    story: Story, model: Model, runner: Runner, limits: Limits, drafter: Drafter | None = None
) -> tuple[dict[tuple[str, int], Told], Engine]:
    """The tokens of all choices. At the end no block is held."""
    sizes = replace(limits, blocks=story.blocks)
    engine = Engine(
        model.decoder,
        model.params[0],
        limits=sizes,
        runner=runner,
        tokenizer=TOKENS,
        drafter=drafter,
        adapters=model.adapters,
        logits_processors=PROCESSORS,
    )
    told: dict[tuple[str, int], Told] = {}
    updates, version, step = sorted(story.updates), 0, 0
    last = max([a.step for a in story.arrivals] + [s for s, _ in updates])
    while step <= last or not engine.idle:
        for i, a in enumerate(story.arrivals):
            if a.step == step:
                own = a.adapter if a.adapter in model.adapters else None
                seen = model.features(a.prompt, a.picture) if model.has_images else None
                engine.add(a.prompt, a.sampling, name=str(i), priority=a.priority, adapter=own, image_features=seen)
                told |= {(str(i), c): Told() for c in range(a.sampling.n)}
            if a.cancel is not None and a.step + a.cancel == step:
                engine.cancel(str(i))
        for at, recompute in updates:
            if at == step:
                version += 1
                lanes = model.decoder.cache.lanes
                groups = lanes is not None and not lanes.stages  # share experts, so that all change at once
                engine.update_weights(model.params[version], recompute=recompute or groups)
        for token in engine.step():
            told[token.name, token.choice].tokens.append(token)
        step += 1
        assert step < 500, "requests do not end"
    counts = engine.stats.counts
    assert counts["held"] == 0 and counts["free"] + counts["cached"] == (story.blocks - 1) * runner.num_lanes
    return told, engine


def check(story: Story, told: dict[tuple[str, int], Told], model: Model) -> int:
    """Compares each token and its log probability with those of one forward, bit for bit; returns their number."""
    checked = 0
    for (name, choice), got in told.items():
        a = story.arrivals[int(name)]
        assert got.finish_reason in ("stop", "length", "cancelled", "error")
        assert a.cancel is not None or got.finish_reason != "cancelled"
        drawn = [t for t in got.tokens if t.token is not None and t.position >= len(a.prompt)]
        assert [t.position for t in drawn] == list(range(len(a.prompt), len(a.prompt) + len(drawn)))
        sequence = [*a.prompt, *(t.token for t in drawn)]
        if got.finish_reason == "length":
            assert len(drawn) == a.sampling.max_tokens
        tokens = [t.token for t in drawn if t.token is not None]
        grammars, complete = _follow(tokens, got.finish_reason, a.sampling)
        allowed = [permitted(a.sampling, tokens[:i], grammars[i]) for i in range(len(tokens) + 1)]
        if got.finish_reason == "error":
            assert not allowed[len(tokens)].any()
        _check_text(got, tokens, a, complete)
        scored = [t for t in got.tokens if t.token is not None and t.position < len(a.prompt)]
        if a.sampling.prompt_logprobs and choice == 0 and drawn:
            assert [t.position for t in scored] == list(range(1, len(a.prompt)))
        for t in [*scored, *drawn]:
            assert t.token is not None
            whole = tuple(sequence[: len(sequence) - 1] or sequence)
            own = (a.adapter,) if a.adapter in model.adapters else (None, a.picture) if model.has_images else ()
            logits = model.full(t.version, whole, *own)[t.position - 1]
            target = -1 if t.position >= len(a.prompt) else t.token
            how = (a.sampling, draw_key(a.sampling.seed, choice), t.position)
            _, logprob = draw_alone(logits, *how, t.token)
            _check_top(logits, t, a.sampling.top_logprobs)
            if target < 0:
                num = t.position - len(a.prompt)
                logits = biased(processed(logits, a, tokens[:num]), a.sampling).where(allowed[num], -torch.inf)
            token, _ = draw_alone(logits, *how, target)
            assert (token, logprob) == (t.token, t.logprob), (name, choice, t, token, logprob)
            checked += 1
    return checked


def processed(logits: Tensor, a: Arrival, output: list[int]) -> Tensor:
    """The logits after the processors of a request."""
    for name in a.sampling.logits_processors:
        logits = PROCESSORS[name](*([[*a.prompt]] if name == "prompt" else []), output, logits)
    return logits


def permitted(how: Sampling, output: list[int], grammar: Any) -> Tensor:
    """The tokens that may be drawn, by the definition of each option."""
    mask = torch.ones(len(TOKENS) + 1, dtype=torch.bool) if grammar is None else torch.from_numpy(grammar.copy())
    if how.allowed_token_ids is not None:
        mask &= torch.tensor([token in how.allowed_token_ids for token in range(len(mask))])
    for token in range(len(mask)):
        after = [*output, token]
        early = token in how.stop_tokens and len(after) <= how.min_tokens
        if early or any(after[-len(word) :] == list(word) for word in how.bad_words):
            mask[token] = False
    return mask


def biased(logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits that a draw sees."""
    changed = logits.clone()
    for token, bias in sampling.logit_bias:
        changed[token] += bias
    return changed


def _check_top(logits: Tensor, t: Token, num: int) -> None:
    """The most probable tokens are those of the raw logits, in order, each with the log probability of a draw."""
    first = logits.sort(descending=True, stable=True).indices[:num].tolist()
    assert [token for token, _ in t.top] == first
    for token, logprob in t.top:
        assert draw_alone(logits, Sampling(), 0, 0, token) == (token, logprob)
        assert token != t.token or logprob == t.logprob


def _follow(tokens: list[int], finish: str | None, how: Sampling) -> tuple[list[Any], bool]:
    """The tokens that a matcher of its own allows at each place, and whether the text is complete at the end."""
    if how.grammar is None:
        return [None] * (len(tokens) + 1), False
    matcher = _compiler().compile(how.grammar, how.stop_tokens)
    allowed, end, text, words = [], None, b"", [word.encode() for word in LANGUAGES[how.grammar]]
    for token in tokens:
        assert end is None
        allowed.append(matcher.allowed)
        end = matcher.take(token)
        assert end != "error"
        if token in how.stop_tokens:
            assert text in words
            return [*allowed, matcher.allowed], True
        text += TOKENS[token] or b"?"
        assert any(word.startswith(text) for word in words)
    assert end is None or (text in words and finish in ("stop", "cancelled"))
    return [*allowed, matcher.allowed], end is not None


@functools.cache
def _compiler() -> Compiler:
    return Compiler(detokenizer(TOKENS), 13)


def _check_text(got: Told, tokens: list[int], a: Arrival, complete: bool) -> None:
    """The text is that of all tokens, up to the first stop string after `min_tokens`, and no token comes after it."""
    how = a.sampling
    hidden = bool(tokens) and tokens[-1] in how.stop_tokens and not how.include_stop
    growing = detokenizer(TOKENS).start(a.prompt)
    pieces = [growing.add(token) for token in tokens[: len(tokens) - hidden]] + [""] * hidden
    early = len("".join(pieces[: how.min_tokens]))  # no stop string ends in this text
    assert not _cut_text("".join(pieces[:-1]), early, how)[1]
    whole = "".join([*pieces, growing.end()])
    want, stopped = (whole, False) if len(tokens) <= how.min_tokens else _cut_text(whole, early, how)
    assert "".join(t.text for t in got.tokens) == want
    if stopped or complete or (tokens and tokens[-1] in how.stop_tokens):
        assert got.finish_reason in ("stop", "cancelled")
    else:
        assert got.finish_reason != "stop"


def _cut_text(text: str, early: int, how: Sampling) -> tuple[str, bool]:
    """The text up to the first stop string that ends after some characters, and whether there is one."""
    for end in range(early + 1, len(text) + 1):
        if found := [stop for stop in how.stop if text[:end].endswith(stop)]:
            return text[: end if how.include_stop else end - max(map(len, found))], True
    return text, False


def draw_alone(logits: Tensor, sampling: Sampling, key: int, place: int, target: int) -> tuple[int, float]:
    """A token of one row of logits, and its log probability."""

    def one(x: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([x], dtype=dtype)

    signed = key - (1 << 64) if key >> 63 else key
    tokens, logprobs = kernels.draw(
        logits[None],
        kernels.draw_uniforms(one(signed, torch.int64), one(place, torch.int64)),
        temperature=one(sampling.temperature),
        top_k=one(sampling.top_k, torch.int64),
        top_p=one(sampling.top_p),
        min_p=one(sampling.min_p),
        targets=one(target, torch.int64),
    )
    return target if target >= 0 else int(tokens), float(logprobs)
