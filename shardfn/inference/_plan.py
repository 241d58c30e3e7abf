"""The plan of a step: flat arrays of sizes by the bucket, so that each bucket has one graph."""

import itertools
import operator
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from ._limits import DEFAULT_LAYOUT, Limits
from ._requests import Sampling
from ._state import Rows, Sequence, SourceFill

_Arrays = tuple[array, array, array, array, array, array, array, array, array, array]


class SourceArrays(NamedTuple):
    """Sources of a plan's sequences.

    Attributes:
        tables: blocks of each sequence's source [S, source_width], flat.
        last: last position of the source of each token's sequence [B]. 0 for padding.
    """

    tables: array
    last: array


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step's input. Rows from `num_tokens` on are padding: token 0 of the last sequence, written to block 0.

    Arrays have sizes of the bucket B: S = min(B, running) + 1 sequences, of which the last is padding, and R =
    `limits.wanted(B)` wanted rows. A token at position p of sequence s writes slot `slots[i]` and then reads slots
    `tables[s, q // block] * block + q % block` of all q <= p. `array` has the buffer interface: `torch.frombuffer` and
    `numpy.frombuffer` make tensors without a copy.

    Attributes:
        step: step of the schedule.
        version: version of the parameters to compute with.
        bucket: B, the number of rows.
        num_tokens: rows without padding.
        num_rows: wanted rows without padding.
        tokens: ids [B].
        positions: positions of tokens in their sequences [B].
        sequences: sequence of each token [B].
        slots: slots for keys and values of each token [B].
        tables: block tables [S, width], flat. Unused places have block 0.
        lengths: tokens of each sequence in the KV cache after the step [S], or 1 for padding.
        rows: tokens with wanted logits [R].
        keys: keys of the draws [R].
        places: position of the drawn or scored token of a row [R].
        targets: token of a wanted log probability, or -1 where a token is drawn [R].
        sampling: rule by which each wanted row draws, without padding.
        histories: where a row has an extended sampling, the tokens before the place of each row with penalties [R,
            context], flat, with -1 at the end, else None.
        prompts: number of prompt tokens among the tokens of `histories` [R], else None.
        adapters: digest of each sequence's adapter, without padding, empty if no sequence has an adapter.
        branches: row of the first draft and parents of all drafts, for each sequence with branching drafts. A draft
            sees its ancestors in the drafts' slots, not the slots of the positions.
        moves: slots whose content moves before the step writes, and the new slots, which may be slots that move, too.
        layout: layout of the decoder in which the step runs.
        fills: sources that are encoded into the cache of sources before the step.
        source: sources of the sequences of an encoder-decoder model, else None.
    """

    step: int
    version: int
    bucket: int
    num_tokens: int
    num_rows: int
    tokens: array
    positions: array
    sequences: array
    slots: array
    tables: array
    lengths: array
    rows: array
    keys: array
    places: array
    targets: array
    sampling: tuple[Sampling, ...]
    histories: array | None = None
    prompts: array | None = None
    adapters: tuple[bytes, ...] = ()
    branches: tuple[tuple[int, tuple[int, ...]], ...] = ()
    moves: tuple[tuple[int, int], ...] = ()
    layout: str = DEFAULT_LAYOUT
    fills: tuple[SourceFill, ...] = ()
    source: SourceArrays | None = None

    def arrays(self) -> _Arrays:
        """Returns all arrays but histories, in the order of the attributes."""
        return (
            *(self.tokens, self.positions, self.sequences, self.slots, self.tables, self.lengths),
            *(self.rows, self.keys, self.places, self.targets),
        )


def make_plan(
    chunks: Seq[Rows],
    limits: Limits,
    step: int,
    version: int,
    moves: Seq[tuple[int, int]] = (),
    fills: Seq[SourceFill] = (),
) -> StepPlan:
    """Returns a plan of the rows of sequences.

    Example:
        >>> from ._state import start
        >>> from ._requests import Request
        >>> limits = Limits(vocab=100, context=8, blocks=5, block=4, buckets=(4, 8), running=2)
        >>> state = start(limits)
        >>> state.add("a", Request((7, 8, 9)))
        >>> sequence = state.sequences[0]
        >>> sequence.blocks = [3]
        >>> plan = make_plan([Rows(sequence, 3, range(2, 3))], limits, step=0, version=0)
        >>> list(plan.tokens), list(plan.positions), list(plan.sequences), list(plan.slots)
        ([7, 8, 9, 0], [0, 1, 2, 0], [0, 0, 0, 2], [12, 13, 14, 0])
        >>> list(plan.tables), list(plan.lengths), list(plan.rows), list(plan.places)
        ([3, 0, 0, 0, 0, 0], [3, 1, 1], [2, 0], [3, 0])
    """
    columns, num_decodes = _Columns(), _count_decodes(chunks)
    columns.add_decodes([*map(_SEQUENCE, chunks[:num_decodes])], limits)
    for s in range(num_decodes, len(chunks)):
        columns.take(s, chunks[s], limits)
    num_tokens, num_rows = len(columns.tokens), len(columns.rows)
    adapters = tuple(map(_ADAPTER, chunks))
    bucket = limits.bucket_of(num_tokens)
    arrays, histories = columns.padded(bucket, limits), (None, None)
    if any(map(_EXTENDED, columns.sampling)):
        histories = _make_histories(chunks, limits.wanted(bucket), limits.context)
    return StepPlan(
        *(step, version, bucket, num_tokens, num_rows, *arrays, tuple(columns.sampling), *histories),
        adapters=adapters if any(adapters) else (),
        branches=tuple(columns.branches),
        moves=tuple(moves),
        layout=limits.layout_of(
            bucket, adapters=any(adapters) or any([chunk.sequence.request.images is not None for chunk in chunks])
        ),
        fills=tuple(fills),
        source=_make_source(chunks, columns.sequences, limits) if limits.source else None,
    )


def _make_source(chunks: Seq[Rows], sequences: array, limits: Limits) -> SourceArrays:
    """Returns the sources of chunks, for tokens of these sequences. Padding reads one place of block 0."""
    tables, ends, width = array("i"), array("i"), limits.source_width
    for number, chunk in enumerate(chunks, 1):
        tables.extend(chunk.sequence.source_blocks)
        _pad_arrays(width * number, 0, tables)
        ends.append(len(chunk.sequence.request.source) - 1)
    most = min(len(sequences), limits.running)
    _pad_arrays(width * (most + 1), 0, tables)
    _pad_arrays(most + 1, 0, ends)
    return SourceArrays(tables, array("i", [ends[s] for s in sequences]))


def _count_decodes(chunks: Seq[Rows]) -> int:
    """Returns the number of first chunks with only the last known token of a sequence."""
    num = 0
    for sequence, count, _, drafts in chunks:
        if count != 1 or drafts.tokens or sequence.computed != len(sequence.tokens) - 1:
            break
        num += 1
    return num


class _Columns:
    """The arrays of a plan while sequences add their rows; `StepPlan` documents them."""

    def __init__(self) -> None:
        self.tokens, self.positions, self.sequences, self.slots = (array("i") for _ in range(4))
        self.tables, self.lengths, self.rows, self.places, self.targets = (array("i") for _ in range(5))
        self.keys = array("Q")
        self.sampling: list[Sampling] = []
        self.branches: list[tuple[int, tuple[int, ...]]] = []

    def add_decodes(self, sequences: Seq[Sequence], limits: Limits) -> None:
        """Adds the first rows of a plan: the last known token of each sequence, column by column."""
        num, width, block = len(sequences), limits.width, limits.block
        self.tokens.extend([x.tokens[-1] for x in sequences])
        self.positions.extend(map(_COMPUTED, sequences))
        self.sequences.extend(range(num))
        tables, held = array("i", bytes(num * width * self.tables.itemsize)), [*map(_BLOCKS, sequences)]
        for at, blocks in zip(range(0, num * width, width), held, strict=True):
            tables[at : at + len(blocks)] = array("i", blocks)
        self.tables = tables
        places = zip(self.positions, held, strict=True)
        self.slots.extend([blocks[p // block] * block + p % block for p, blocks in places])
        self.lengths.extend([p + 1 for p in self.positions])
        self.rows.extend(range(num))
        self.keys.extend(map(_KEY, sequences))
        self.places.extend(self.lengths)
        self.targets.extend(itertools.repeat(-1, num))
        self.sampling.extend(map(_SAMPLING, sequences))

    def take(self, number: int, chunk: Rows, limits: Limits) -> None:
        """Adds the rows of a sequence, which has this number in the plan."""
        sequence, count, wanted, drafts = chunk
        begin, end, known = sequence.computed, sequence.computed + count, sequence.tokens
        blocks, block = sequence.blocks, limits.block
        if drafts.branches:
            self.branches.append((len(self.tokens) + count - len(drafts), drafts.parents))
        self.tokens.extend(array("i", known[begin:end]))
        self.tokens.extend(array("i", drafts.tokens))
        self.positions.extend(wanted if drafts.branches else range(begin, end))
        self.sequences.extend([number] * count)
        self.slots.extend([blocks[p // block] * block + p % block for p in range(begin, end)])
        self.tables.fromlist(blocks)
        _pad_arrays(limits.width * (number + 1), 0, self.tables)
        self.lengths.append(end)
        self.rows.extend(range(len(self.tokens) - len(wanted), len(self.tokens)))
        for p in wanted:
            self.keys.append(sequence.key)
            self.places.append(p + 1)
            self.targets.append(known[p + 1] if p + 1 < len(known) else -1)
            self.sampling.append(sequence.request.sampling)

    def padded(self, bucket: int, limits: Limits) -> _Arrays:
        """Returns the arrays in the sizes of a bucket, in the order of `StepPlan.arrays`."""
        most, num_rows = min(bucket, limits.running), limits.wanted(bucket)
        _pad_arrays(bucket, 0, self.tokens, self.positions, self.slots)
        _pad_arrays(bucket, most, self.sequences)
        _pad_arrays((most + 1) * limits.width, 0, self.tables)
        _pad_arrays(most + 1, 1, self.lengths)
        _pad_arrays(num_rows, 0, self.rows, self.keys, self.places)
        _pad_arrays(num_rows, -1, self.targets)
        return (
            *(self.tokens, self.positions, self.sequences, self.slots, self.tables, self.lengths),
            *(self.rows, self.keys, self.places, self.targets),
        )


def _make_histories(chunks: Seq[Rows], num: int, context: int) -> tuple[array, array]:
    """Returns the tokens before the places of rows with penalties, and the number of prompt tokens among them.

    See `StepPlan`.
    """
    histories, prompts = _make_empty_histories(num, context)
    for i, (chunk, row) in enumerate([(x, row) for x in chunks for row in range(len(x.positions))]):
        if not chunk.sequence.request.sampling.penalised:
            continue
        before = chunk.before(row)
        histories[i * context : i * context + len(before)] = array("i", before)
        prompts[i] = min(chunk.sequence.prompt, len(before))
    return histories, prompts


def widen_plan(plan: StepPlan, bucket: int, limits: Limits, *, extended: bool) -> StepPlan:
    """Returns a plan with the rows of a larger bucket.

    Args:
        plan: plan.
        bucket: number of rows.
        limits: sizes.
        extended: whether the plan has histories even where no row has an extended sampling.

    Example:
        >>> limits = Limits(vocab=100, context=8, blocks=5, block=4, buckets=(4, 8), running=2)
        >>> wide = widen_plan(make_padding(4, limits), 8, limits, extended=True)
        >>> want = make_padding(8, limits, extended=True)
        >>> wide.arrays() == want.arrays(), wide.histories == want.histories
        (True, True)
    """
    columns, tokens, rows = _Columns(), plan.num_tokens, plan.num_rows
    num = max(plan.sequences[:tokens], default=-1) + 1
    sizes = *[tokens] * 4, num * limits.width, num, *[rows] * 4
    for name, array_, size in zip(_ARRAYS, plan.arrays(), sizes, strict=True):
        setattr(columns, name, array_[:size])
    arrays, wanted, histories, prompts = columns.padded(bucket, limits), limits.wanted(bucket), None, None
    if extended:
        histories, prompts = _make_empty_histories(wanted, limits.context)
        if plan.histories is not None and plan.prompts is not None:
            histories[: len(plan.histories)], prompts[: len(plan.prompts)] = plan.histories, plan.prompts
    return replace(
        plan,
        **dict(zip(_ARRAYS, arrays, strict=True)),
        bucket=bucket,
        histories=histories,
        prompts=prompts,
        layout=limits.layout_of(bucket),
    )


# The names of `StepPlan.arrays`.
_ARRAYS = (
    *("tokens", "positions", "sequences", "slots", "tables", "lengths"),
    *("rows", "keys", "places", "targets"),
)


def make_padding(bucket: int, limits: Limits, *, extended: bool = False) -> StepPlan:
    """Returns a plan of a bucket that has no tokens.

    The plan writes only to block 0. If `extended`, the plan has histories, too.
    """
    num = limits.wanted(bucket)
    past = _make_empty_histories(num, limits.context) if extended else (None, None)
    columns = _Columns()
    arrays = columns.padded(bucket, limits)
    source = _make_source((), columns.sequences, limits) if limits.source else None
    return StepPlan(0, 0, bucket, 0, 0, *arrays, (), *past, layout=limits.layout_of(bucket), source=source)


def _make_empty_histories(num: int, context: int) -> tuple[array, array]:
    return array("i", [-1]) * (num * context), array("i", [0] * num)


def find_wanted(sequence: Sequence, count: int) -> range:
    """Returns the positions of the next `count` tokens whose logits are wanted.

    Scored tokens, and the last known token.

    A sequence that still has tokens to score has drawn none, so that the last known token is the prompt's last token.
    """
    end = sequence.computed + count
    if sequence.scored < sequence.prompt - 1:
        return range(max(sequence.computed, sequence.scored), end)
    return range(end - 1 if end == len(sequence.tokens) else end, end)


# For all sequences at once, in C, without a bytecode for each.
_COMPUTED, _BLOCKS, _KEY = (operator.attrgetter(name) for name in ("computed", "blocks", "key"))
_EXTENDED, _SAMPLING = operator.attrgetter("extended"), operator.attrgetter("request.sampling")
_SEQUENCE, _ADAPTER = operator.attrgetter("sequence"), operator.attrgetter("sequence.request.adapter")


def _pad_arrays(size: int, value: int, *arrays: array) -> None:
    for a in arrays:
        if len(a) < size:
            a.extend(array(a.typecode, [value]) * (size - len(a)))
