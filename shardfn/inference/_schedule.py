"""One step of continuous batching: `(state, events, drawn tokens) -> (state, plan, outputs)`.

The step is a pure function of its arguments. It reads no clock, no memory and no hash of Python's, and walks no set, so
that ranks with the same events hold the same state. The schedule is Dynamic SplitFuse [1], which is chunked prefill,
with prefix caching [2], priorities and preemption by recomputation.

References:
    [1] Holmes et al., DeepSpeed-FastGen, 2024, https://arxiv.org/abs/2401.08671
    [2] Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023,
        https://arxiv.org/abs/2309.06180
"""

import hashlib
import operator
from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

from jaxtyping import Float32
from torch import Tensor

from shardfn.core import DonatedError

from ._events import Add, Cancel, Clock, Drain, Event, Stop, Weights, check_time
from ._plan import StepPlan, make_plan
from ._pool import extend_contents
from ._select import select_chunks
from ._speculate import Permit, add_drafts, take_drafts
from ._state import Rows, Sequence, State


class Output(NamedTuple):
    """A token of a request, or its end, or both.

    Args:
        name: name of the request.
        choice: choice of the request.
        position: position of the token in the sequence, below the prompt's length for a scored token.
        token: drawn or scored token, or None for an end without a token.
        row: row of the plan that was in flight, for the log probability, or None without a token.
        version: version of the parameters that computed the token.
        finish_reason: "stop", "length", "cancelled", "deadline", "error" or "refused" for the last output of a choice.
    """

    name: str
    choice: int
    position: int
    token: int | None
    row: int | None
    version: int
    finish_reason: str | None


def advance(
    state: State,
    events: Seq[Event] = (),
    drawn: Seq[int] = (),
    cut: Permit | None = None,
    hidden: Float32[Tensor, "rows d"] | None = None,
) -> tuple[State, StepPlan | None, list[Output]]:
    """Takes the tokens that the last plan has drawn, then the events, and makes the next plan.

    Args:
        state: state, which is donated: it cannot be advanced again. `state.copy()` keeps a state.
        events: events numbered from `state.number` on. Requests have passed `check_request`.
        drawn: drawn token for each wanted row of the last plan, any token id for a row that scores, and -1 where logits
            were not finite: such a choice ends as "error".
        cut: function `(context, drafts) -> drafts` that keeps the drafts that a sequence's grammar permits. The result
            follows only from these calls. Without `cut`, requests with a grammar have no drafts.
        hidden: hidden states of the rows of the last plan, for a drafter that wants states, equal on all ranks.

    Returns:
        The next state, the plan, or None if there is nothing to compute, and outputs in the order of the plan's rows.

    Raises:
        ValueError: an event's number, name or time, or the drawn tokens are wrong. The state is unchanged.
        DonatedError: the state was advanced before.

    Example:
        >>> from shardfn.inference import Add, Limits, Request, Sampling, advance, start
        >>> limits = Limits(vocab=100, context=8, blocks=5, block=4, buckets=(4, 8), running=2)
        >>> state = start(limits)
        >>> request = Request((7, 8, 9), Sampling(max_tokens=2))
        >>> state, plan, outputs = advance(state, [Add(0, "a", request)])
        >>> list(plan.tokens[: plan.num_tokens]), outputs
        ([7, 8, 9], [])
        >>> state, plan, outputs = advance(state, drawn=[50])
        >>> list(plan.tokens[: plan.num_tokens]), outputs[0].token, outputs[0].finish_reason
        ([50], 50, None)
        >>> state, plan, outputs = advance(state, drawn=[51])
        >>> plan, outputs[0].token, outputs[0].finish_reason, state.idle
        (None, 51, 'length', True)
    """
    _check_step(state, events, drawn)
    state = state.succeed()
    outputs: list[Output] = []
    stops = {(event.name, event.choice, event.at): event.finish_reason for event in events if isinstance(event, Stop)}
    _settle_plan(state, drawn, stops, outputs, hidden)
    for event in events:
        _take_event(state, event, outputs)
    _finish_sequences(state, _list_late(state), "deadline", outputs)
    if state.pending is not None and not any(s.begun for s in state.sequences.values()):
        _renew_version(state, state.pending)
    chunks = select_chunks(state)
    chunks = chunks if state.drafter is None else add_drafts(state, chunks, cut)
    first = state.moves, state.fills
    plan = make_plan(chunks, state.limits, state.step, state.version, *first) if chunks else None
    state.moves, state.fills = ([], []) if chunks else first
    state.flight = chunks
    state.chain = _link_chain(state, events, drawn, plan)
    state.step += 1
    return state, plan, outputs


def _check_step(state: State, events: Seq[Event], drawn: Seq[int]) -> None:
    """Checks events and drawn tokens. All checks precede all changes."""
    if state.consumed:
        raise DonatedError("This state was advanced before. Advance its successor, or a copy: state.copy().")
    rows = sum(map(len, map(_POSITIONS, state.flight)))
    if len(drawn) != rows:
        raise ValueError(
            f"drawn must have {rows} tokens, one for each wanted row of the plan in flight, got {len(drawn)}."
        )
    if drawn and not -1 <= min(drawn) <= max(drawn) < state.limits.vocab:
        i, token = next((i, token) for i, token in enumerate(drawn) if not -1 <= token < state.limits.vocab)
        raise ValueError(f"drawn[{i}] must be from 0 to {state.limits.vocab - 1}, or -1, got {token}.")
    names, version = set[str](), state.version if state.pending is None else state.pending
    for i, event in enumerate(events):
        if event.number != state.number + i:
            raise ValueError(f"event {event.number} came where event {state.number + i} was expected.")
        if isinstance(event, Add):
            if event.name in state.names or event.name in names:
                raise ValueError(f"a request named {event.name!r} is in progress. Give the new one another name.")
            names.add(event.name)
        elif isinstance(event, Clock):
            check_time(event.time)
        elif isinstance(event, Weights):
            if event.version <= version:
                raise ValueError(f"version must be above {version}, the last version, got {event.version}.")
            version = event.version
        elif isinstance(event, Stop):
            if event.finish_reason not in ("stop", "error"):
                raise ValueError(f"{event}: finish_reason must be 'stop' or 'error'.")
            if not _is_drawn(state, event, drawn):
                raise ValueError(f"{event}: the plan in flight draws no token of that choice at {event.at}.")


def _is_drawn(state: State, stop: Stop, drawn: Seq[int]) -> bool:
    """Returns whether the plan in flight draws the token of a stop."""
    for chunk, one, first in state.rows_in_flight():
        if (one.name, one.choice) == (stop.name, stop.choice):
            places = [p + 1 for _, p, _ in chunk.read_rows(drawn, first)]
            return stop.at in places and stop.at >= len(one.tokens)
    return False


# For all rows or sequences at once, in C, without a bytecode for each.
_POSITIONS, _DEADLINE = operator.attrgetter("positions"), operator.attrgetter("request.deadline")
_Stops = dict[tuple[str, int, int], str]  # by names, choices and positions


def _settle_plan(state: State, drawn: Seq[int], stops: _Stops, outputs: list[Output], hidden: Tensor | None) -> None:
    """Takes the results of the plan in flight, also of requests that end by an event of this step."""
    block = state.limits.block
    for chunk, sequence, first in state.rows_in_flight():
        known, ends = len(sequence.tokens), False
        for row, p, token in chunk.read_rows(drawn, first):
            if ends := _take_token(state, sequence, p + 1, token, row, stops, outputs):
                break
        drafts, accepted = len(chunk.drafts.tokens), 0
        if hidden is not None and not ends:
            _keep_hidden_states(state, chunk, drawn, first, len(sequence.tokens) - known, hidden)
        if drafts:
            accepted = max(0, len(sequence.tokens) - known - 1)
        sequence.computed += chunk.num - drafts + accepted
        if sequence.computed // block > sequence.recorded:
            _record_blocks(state, sequence)
        if drafts:
            take_drafts(state, sequence, chunk, accepted, drawn[first : first + len(chunk.positions)])
        if ends:
            state.remove(sequence)
    state.flight = []


def _keep_hidden_states(state: State, chunk: Rows, drawn: Seq[int], first: int, num: int, hidden: Tensor) -> None:
    """Keeps the hidden states behind the last `num` tokens of a sequence, for a drafter that wants states."""
    sequence = chunk.sequence
    if num and state.spec_tokens:
        own = chunk.find_state_row(drawn[first : first + len(chunk.positions)], num - 1)
        sequence.state_rows = () if own is None else ((hidden, first + own),)
    elif num:
        rows = [(hidden, row) for row, *_ in chunk.read_rows(drawn, first)]
        sequence.state_rows = (*sequence.state_rows, *rows[-num:])[-state.hidden_window :]


def _take_token(
    state: State, sequence: Sequence, place: int, token: int, row: int, stops: _Stops, outputs: list[Output]
) -> bool:
    """Appends or scores one token, and returns whether the choice ends with the token."""
    sampling, known, finish, name, choice = (
        sequence.request.sampling,
        sequence.tokens,
        None,
        sequence.name,
        sequence.choice,
    )
    stop = stops.get((name, choice, place)) if stops else None
    if token < 0 or stop == "error":
        outputs.append(_make_end(name, choice, state, "error", place))
        return True
    if place < len(known):
        token, sequence.scored = known[place], place
        finish = None if sequence.draws or place + 1 < len(known) else "length"
    elif not sampling.max_tokens:  # the prompt is computed, and the row's draw is dropped
        outputs.append(_make_end(name, choice, state, "length"))
        return True
    else:
        known.append(token)
        if stop or token in sampling.stop_tokens:
            finish = "stop"
        elif place + 1 - sequence.prompt == sampling.max_tokens:
            finish = "length"
    outputs.append(Output(name, choice, place, token, row, state.version, finish))
    return finish is not None


def _record_blocks(state: State, sequence: Sequence) -> None:
    """Records the blocks that the last plan has filled, for prefix caching."""
    full = sequence.computed // state.limits.block
    extend_contents(sequence.contents, sequence.keyed, state.limits.block, full, state.scope(sequence))
    for i in range(sequence.recorded, full):
        state.pool.record(sequence.blocks[i], sequence.contents[i])
    sequence.recorded = full


def _take_event(state: State, event: Event, outputs: list[Output]) -> None:
    state.number += 1
    match event:
        case Add(_, name, request) if state.draining:
            outputs.extend(_make_end(name, c, state, "refused") for c in range(request.sampling.n))
        case Add(_, name, request):
            state.add(name, request)
        case Cancel(_, name):
            _finish_sequences(state, [state.sequences[s] for s in state.names.get(name, [])], "cancelled", outputs)
        case Stop():
            pass  # taken with its token
        case Clock(_, time):
            state.time = max(state.time, time)
        case Weights(_, version, recompute):
            state.pending = version
            if recompute:
                _renew_version(state, version)
        case Drain():
            state.draining = True


def _finish_sequences(state: State, sequences: list[Sequence], reason: str, outputs: list[Output]) -> None:
    for sequence in sequences:
        outputs.append(_make_end(sequence.name, sequence.choice, state, reason, len(sequence.tokens)))
        state.remove(sequence)


def _list_late(state: State) -> list[Sequence]:
    """Returns the sequences whose deadline has come."""
    found = state.sequences.values()
    deadlines = [*map(_DEADLINE, found)]
    if deadlines.count(None) == len(deadlines):
        return []
    return [s for s, deadline in zip(found, deadlines, strict=True) if deadline is not None and deadline <= state.time]


def _make_end(name: str, choice: int, state: State, reason: str, position: int = 0) -> Output:
    return Output(name, choice, position, None, None, state.version, reason)


def _renew_version(state: State, version: int) -> None:
    """Changes the version. No block that was computed before is used again."""
    for sequence in state.running[:]:
        state.preempt(sequence)
        sequence.preempted = -1  # a waiting sequence may be admitted in this step
    for sequence in state.sequences.values():
        sequence.contents, sequence.state_rows = [], ()
    state.pool.forget()
    state.sources.forget()
    state.fills = []
    state.version, state.pending = version, None


def _link_chain(state: State, events: Seq[Event], drawn: Seq[int], plan: StepPlan | None) -> bytes:
    """Returns the next value of the chain. Its cost does not grow with the state."""
    link = hashlib.blake2b(state.chain, digest_size=8)
    counts = (state.step, state.number, state.version, state.time, len(events), len(drawn), *state.counts().values())
    link.update(array("q", counts).tobytes())
    link.update(array("q", drawn).tobytes())
    for event in events:
        text = repr(event).encode()
        link.update(len(text).to_bytes(8, "little") + text)
    if plan is not None:
        link.update(b"".join(plan.arrays()))
        if plan.branches or plan.moves:
            link.update(repr((plan.branches, plan.moves)).encode())
        if plan.fills:
            link.update(repr(plan.fills).encode())
        link.update(plan.layout.encode())
    return link.digest()
