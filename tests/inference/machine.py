"""A hypothesis machine of events and steps over a model; its invariants are the laws of the schedule."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shardfn.inference import (
    Add,
    Cancel,
    Clock,
    Drafter,
    Event,
    Limits,
    Output,
    Request,
    Sampling,
    Stop,
    Weights,
    advance,
    check_request,
    digest,
    start,
)
from shardfn.inference._hooks import list_new_tokens
from shardfn.inference._state import draw_key
from tests.inference.drafters import DRAFTERS
from tests.inference.model import Model, draw

SMALL = st.integers(0, 1)  # few tokens, so that prompts share prefixes


class Laws(RuleBasedStateMachine):
    """Events wait in `events` until the next step takes them."""

    steps = 0  # of all machines

    @initialize(
        blocks=st.integers(5, 14),
        running=st.integers(1, 6),
        starvation_steps=st.sampled_from([0, 8, 1000]),
        buckets=st.sampled_from([(8,), (1, 2, 4, 7), (4, 16)]),
        drafts=st.integers(0, 12),
        drafter=st.sampled_from([None, *DRAFTERS]),
    )
    def begin(
        self,
        blocks: int,
        running: int,
        starvation_steps: int,
        buckets: tuple[int, ...],
        drafts: int,
        drafter: Drafter | None,
    ) -> None:
        sizes = {
            "vocab": 5,
            "context": 24,
            "blocks": blocks,
            "block": 4,
            "buckets": buckets,
            "starvation_steps": starvation_steps,
        }
        self.limits = Limits(**sizes, running=min(running, buckets[-1] - 1), drafts=drafts)
        self.state, self.twin = (start(self.limits, drafter=drafter) for _ in range(2))
        self.model = Model(self.limits)
        self.events: list[Event] = []
        self.drawn: list[int] = []
        self.requests: dict[str, Request] = {}
        self.known: dict[tuple[str, int], list[int]] = {}  # prompt and drawn tokens of choices in progress
        self.scored: dict[tuple[str, int], list[int]] = {}
        self.versions: dict[tuple[str, int], set[int]] = {}
        self.version, self.always_old = 0, True

    @property
    def number(self) -> int:
        return self.state.number + len(self.events)

    @rule(
        prompt=st.lists(SMALL, min_size=1, max_size=16),
        tokens=st.integers(1, 8),
        n=st.sampled_from([1, 1, 1, 3]),
        seed=st.integers(0, 1),
        stop=st.sampled_from([(), (3,)]),
        texts=st.booleans(),
        scores=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 5, -5]),
        salt=st.sampled_from([b"", b"", b"x"]),
        deadline=st.sampled_from([None, None, 40]),
    )
    def add(
        self,
        prompt: list[int],
        tokens: int,
        n: int,
        seed: int,
        stop: tuple[int, ...],
        texts: bool,
        scores: bool,
        priority: int,
        salt: bytes,
        deadline: int | None,
    ) -> None:
        ends = ("text",) if texts else ()  # a text ends with an even token after another one
        sampling = Sampling(max_tokens=tokens, n=n, seed=seed, stop_tokens=stop, stop=ends, prompt_logprobs=scores)
        request = Request(tuple(prompt), sampling, priority=priority, salt=salt, deadline=deadline)
        try:
            check_request(request, self.limits)
        except ValueError:
            return
        name = f"r{len(self.requests)}"
        self.requests[name] = request
        self.events.append(Add(self.number, name, request))
        for choice in range(n):
            self.known[name, choice] = list(prompt)
            self.scored[name, choice], self.versions[name, choice] = [], set()

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        self.events.append(Cancel(self.number, f"r{which % len(self.requests)}"))

    @rule(recompute=st.booleans())
    def weights(self, recompute: bool) -> None:
        self.version += 1
        self.always_old = self.always_old and not recompute
        self.events.append(Weights(self.number, self.version, recompute))

    @rule(time=st.integers(0, 50))
    def clock(self, time: int) -> None:
        self.events.append(Clock(self.number, time))

    @rule(num=st.integers(1, 24))
    def step(self, num: int) -> None:
        for _ in range(num):
            self.advance()

    def advance(self) -> None:
        events, self.events = [*self.events, *self.stops()], []
        before = {chunk.sequence.serial for chunk in self.state.flight}
        self.state, plan, outputs = advance(self.state, events, self.drawn)
        self.twin, _, twins = advance(self.twin, events, self.drawn)
        type(self).steps += 1
        assert self.state.chain == self.twin.chain and outputs == twins
        for output in outputs:
            self.take(output)
        self.drawn = self.model.run(plan) if plan else []
        self.check_progress(before)
        self.check_blocks()

    def stops(self) -> list[Stop]:
        """The ends by texts among the tokens of the last plan."""
        found, ended, last = [], set(), dict[tuple[str, int], int]()
        for one in list_new_tokens(self.state, self.drawn):
            of = one.place[:2]
            before, last[of] = last.get(of, self.known[of][-1]), one.token
            if one.request.sampling.stop and self.ends([before], one.token) and of not in ended:
                found.append(Stop(self.number + len(found), *one.place))
                ended.add(of)
        return found

    def ends(self, known: list[int], token: int) -> bool:
        return token % 2 == 0 and known[-1] % 2 == 0

    def take(self, output: Output) -> None:
        """A token is that of a full forward of this choice alone, and nothing follows its end."""
        of = output.name, output.choice
        request, known = self.requests[output.name], self.known[of]
        if output.token is not None and output.position < len(request.prompt):
            self.scored[of].append(output.position)
            assert output.token == known[output.position]
        elif output.token is not None:
            assert output.position == len(known)
            key = draw_key(request.sampling.seed, output.choice)
            assert output.token == draw(tuple(known), key, output.version, self.limits.vocab)
            ended = bool(request.sampling.stop) and self.ends(known, output.token)
            assert (output.finish_reason == "stop") == (ended or output.token in request.sampling.stop_tokens)
            known.append(output.token)
            self.versions[of].add(output.version)
        if output.finish_reason:
            num = len(known) - len(request.prompt)
            if output.finish_reason == "length":
                assert num == request.sampling.max_tokens
            if output.finish_reason in ("stop", "length") and request.sampling.prompt_logprobs and output.choice == 0:
                assert self.scored[of] == list(range(1, len(request.prompt)))
            assert not self.always_old or len(self.versions[of]) <= 1
            del self.known[of]

    def check_progress(self, before: set[int]) -> None:
        """The first in order has tokens in the plan, and so has each decode that ran before and still runs."""
        state = self.state
        flight = {chunk.sequence.serial: chunk.num for chunk in state.flight}
        state.step -= 1  # the order of the plan
        able = [s for s in state.sequences.values() if state.pending is None or s.begun]
        first = min(able, key=state.rank, default=None)
        state.step += 1
        assert first is None or first.serial in flight
        for sequence in state.running:
            decodes = sequence.computed == len(sequence.tokens) - 1 >= sequence.prompt
            if decodes and sequence.serial in before:
                assert flight.get(sequence.serial, 0) >= 1
        assert sum(flight.values()) <= self.limits.budget
        assert len(state.running) <= self.limits.running

    def check_blocks(self) -> None:
        state, pool = self.state, self.state.pool
        counts = pool.counts()
        held = Counter(block for s in state.sequences.values() for block in s.blocks)
        assert sum(counts.values()) == self.limits.usable and counts["held"] == len(held)
        assert {b: n for b, n in enumerate(pool.references) if n} == held
        assert 0 not in held and not set(held) & (set(pool.free) | set(pool.cached))
        assert pool.index == {content.key: block for block, content in pool.contents.items()}
        assert set(pool.cached) <= set(pool.contents) and not set(pool.free) & set(pool.contents)
        assert {s.serial for s in state.running} == {s.serial for s in state.sequences.values() if s.blocks}
        waiting = sorted(serial for lane in state.waiting.values() for serial in lane)
        assert waiting == sorted(s.serial for s in state.sequences.values() if not s.blocks)
        if state.idle:
            assert not held and not state.running and not state.waiting and not state.names

    @invariant()
    def twins_are_equal(self) -> None:
        if hasattr(self, "state"):
            assert digest(self.state) == digest(self.twin)

    def teardown(self) -> None:
        """Without further events all requests end, in at most as many steps as they have tokens, after their ages."""
        if not hasattr(self, "state"):
            return
        self.advance()
        bound = sum(s.prompt + s.request.sampling.max_tokens for s in self.state.sequences.values())
        begun = self.state.step
        while not self.state.idle:
            self.advance()
        # Without arrivals the order changes only where one comes of age, and the first in order is then another.
        young = self.limits.starvation_steps if self.limits.starvation_steps < 1000 else 0
        assert self.state.step - begun <= bound + young
        assert not self.known
