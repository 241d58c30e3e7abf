"""Searches: the ways to run a global batch that fit, and the longest sequence that fits.

The longest sequence that fits in a device's memory, and the settings for it.

The peak of a step on a rank with t tokens, in bytes and without parameters, optimizer state and (on several ranks)
gathered leaves, is the largest of three, for elements of s bytes and a loss that computes in float32:

    the loss in tiles of n tokens   max(2 n V + V D, n V + 2 V D) 4 + (2 + kept) t D s
    the loss whole                  12 t V + (2 + kept) t D s
    a block's backward              attention (11 D + 2 K) t s or, if larger, the MLP: whole (4 D + 8 F + 2.5 K) t s,
                                    in tiles of w tokens 6 t D s + (4 D + 8 F) w s; and
      the last block's              + kept t D s + the gradients of the output layer and of a block
      the first stage's               + t D s + all gradients but the embedding's
    the update                      all gradients + the largest leaf

where kept is L, for the inputs of L blocks, or 0 if these are stored on the host. The factors were read off steps of
`models.gpt` in Llama's style whose numbers of key heads and heads are equal; with fewer key heads it is less.
`benchmarks/bench_longest_sequence.py` compares them with counted bytes. Messages of attention between ranks are not in
them.

B batch, t tokens of a rank, D model, K head dim, F ffn, V vocabulary, L layers.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from shardfn.core import progress, raise_all
from shardfn.models import gpt

from ._layout import pipeline_problems, widths
from ._plan import HEADROOM, JobPlan, plan, problems
from ._states import Setup, model_states

# The schedules that a search tries.
SEARCHED = ("1f1b", "interleaved", "zb-h1")


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: plans that fit, the fastest first, and the smaller first among equally fast plans.
        failed: smallest plan of each (tp, pp, stage) or (tp, pp, stage, remat) with no plan that fits.
        tried: number of plans made.
        skipped: reasons why some combinations were not tried.
    """

    best: tuple[JobPlan, ...]
    failed: tuple[JobPlan, ...]
    tried: int
    skipped: tuple[str, ...]


def search(setup: Setup) -> SearchResult:
    """Tries every ZeRO stage, accumulation, remat and, if the mesh names tp or pp, every split of the ranks.

    Along pp the schedules of `SEARCHED` are tried, with each accepted number of microbatches.

    The global batch (batch x dp of `setup`), sequence, precision, device and the number of ranks stay fixed.

    Raises:
        ValueError: the settings that stay are out of range.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("gpt2-xl", parse_model("gpt2-xl"), {"dp": 8}, cluster("a100-40"), Zero(), batch=8)
        >>> found = search(run)
        >>> found.best[0].fits, found.tried
        (True, 32)
    """
    plan(setup)
    skipped: list[tuple[str, str]] = []
    candidates = list(_list_candidates(setup, skipped))
    plans = [plan(candidate) for candidate in progress(candidates, desc="planning", unit="plan", part=True)]
    fitting = sorted((p for p in plans if p.fits), key=_sort_key)
    return SearchResult(tuple(fitting), _smallest_failures(plans, fitting), len(plans), _merge_reasons(skipped))


def _smallest_failures(plans: list[JobPlan], fitting: list[JobPlan]) -> tuple[JobPlan, ...]:
    """Returns the smallest plan of each combination in which none fits.

    A single plan for both settings of remat if neither fits.
    """
    good, good_stages = {_plan_family(p) for p in fitting}, {_plan_family(p)[:3] for p in fitting}
    smallest: dict[tuple[int, ...], JobPlan] = {}
    for p in sorted(plans, key=lambda p: (p.peak, _sort_key(p))):
        family = _plan_family(p)
        if family not in good:
            smallest.setdefault(family if family[:3] in good_stages else family[:3], p)
    return tuple(smallest[f] for f in sorted(smallest))


def _merge_reasons(skipped: list[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the reasons, each once."""
    reasons: dict[str, list[str]] = {}
    for mesh, reason in skipped:
        reasons.setdefault(reason, []).append(mesh)
    return tuple(f"{'; '.join(meshes)}: {reason}" for reason, meshes in reasons.items())


def _list_candidates(setup: Setup, skipped: list[tuple[str, str]]) -> Iterator[Setup]:
    rows = setup.batch * setup.axis("dp")
    for tp in _list_divisors(setup.world) if "tp" in setup.mesh else [1]:
        if tp > setup.cluster.per_node:
            skipped.append((f"tp={tp}", f"more than the {setup.cluster.per_node} ranks of a node"))
            continue
        for pp in _list_divisors(setup.world // tp) if "pp" in setup.mesh else [1]:
            yield from _split_mesh(setup, rows, tp, pp, skipped)


def _split_mesh(setup: Setup, rows: int, tp: int, pp: int, skipped: list[tuple[str, str]]) -> Iterator[Setup]:
    dp = setup.world // tp // pp
    mesh = {name: {"dp": dp, "tp": tp, "pp": pp}[name] for name in setup.mesh}
    base = dataclasses.replace(setup, mesh=mesh, batch=max(1, rows // dp), accumulate=1, schedule="1f1b")
    name_of_mesh = ",".join(f"{name}={size}" for name, size in mesh.items() if name != "dp")
    if rows % dp:
        skipped.append((name_of_mesh, f"the ranks along dp do not divide the global batch of {rows} sequences"))
    elif problems(base):
        skipped.append((name_of_mesh, "; ".join(problems(base))))
    else:
        yield from _vary_mesh(base)


def _vary_mesh(base: Setup) -> Iterator[Setup]:
    schedules = SEARCHED if base.axis("pp") > 1 else SEARCHED[:1]
    choices = itertools.product(schedules, _list_divisors(base.batch))
    for schedule, k in choices:
        run = dataclasses.replace(base, accumulate=k, schedule=schedule)
        if pipeline_problems(run):
            continue
        for stage, remat in itertools.product(range(4), (False, True)):
            yield dataclasses.replace(run, zero=dataclasses.replace(base.zero, stage=stage), remat=remat)


def _sort_key(p: JobPlan) -> tuple[float, int, int, int, bool, int, int]:
    s = p.setup
    return p.cost.seconds, p.peak, s.zero.stage, s.accumulate, s.remat, s.axis("tp"), s.axis("pp")


def _plan_family(p: JobPlan) -> tuple[int, int, int, int]:
    return p.setup.axis("tp"), p.setup.axis("pp"), p.setup.zero.stage, int(p.setup.remat)


def _list_divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# Tokens of a tile of the MLP, and the tiles of the loss that are tried.
MLP_WIDTH = 256
LOSS_TILES = (1024, 512, 256, 128, 64, 32, 16)
# The search ends here.
_END = 1 << 32


@dataclasses.dataclass(frozen=True)
class LongSettings:
    """Settings by which a step keeps activations small. Blocks are always computed again in the backward.

    Attributes:
        loss_tile: number of tokens with logits in memory at a time. None means all.
        tiled_mlp: whether the MLP runs in tiles of `MLP_WIDTH` tokens.
        offload: whether the inputs of the blocks are stored on the host.
    """

    loss_tile: int | None = None
    tiled_mlp: bool = False
    offload: bool = False

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Returns which of the three techniques are in use."""
        return self.loss_tile is not None, self.tiled_mlp, self.offload

    def __str__(self) -> str:
        parts = ["sf.remat"]
        parts += [] if self.loss_tile is None else [f"Config(loss_tile={self.loss_tile})"]
        parts += [f"sf.tiled ({MLP_WIDTH} tokens of the MLP)"] if self.tiled_mlp else []
        parts += ["sf.offload (inputs of blocks to the host)"] if self.offload else []
        return " + ".join(parts)


@dataclasses.dataclass(frozen=True)
class LongestSequence:
    """Longest sequence that fits with some settings.

    Attributes:
        settings: settings of the step.
        tokens: tokens of the whole sequence, over all ranks, or 0 if not even one token fits.
        peak: bytes at the peak of a rank's step.
    """

    settings: LongSettings
    tokens: int
    peak: int


def longest(setup: Setup, limit: int | None = None) -> tuple[LongestSequence, ...]:
    """Returns the longest sequence for each kind of settings, longest last. All ranks of the mesh cut one sequence.

    Args:
        setup: settings of the run. `seq`, `remat` and `accumulate` are ignored.
        limit: bytes that a rank's tensors may take. Default: the device's memory less a reserve.

    Raises:
        ValueError: a mesh with tp or pp, or several sequences a step.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("llama-7b", parse_model("llama-7b"), {"dp": 8}, cluster("a100-80"), Zero(3))
        >>> found = longest(run)
        >>> found[0].tokens < found[-1].tokens, found[-1].peak <= 80 * 2**30
        (True, True)
    """
    own = dataclasses.replace(setup, seq=1, accumulate=1, remat=True)
    wrong = [f"{axis}={setup.axis(axis)}: take dp alone" for axis in ("tp", "pp") if setup.axis(axis) > 1]
    wrong += [f"--lora {setup.lora}: it is not planned; leave it out"] if setup.lora else []
    wrong += [f"--batch {setup.batch}: take 1, since all ranks cut one sequence"] if setup.batch > 1 else []
    raise_all(ValueError, "plan --longest:", [*wrong, *problems(own)])
    room = int(setup.cluster.device.memory * (1 - HEADROOM)) if limit is None else limit
    best: dict[tuple[bool, bool, bool], LongestSequence] = {}
    for settings in _list_settings():
        tokens = _most_tokens(own, settings, room)
        found = LongestSequence(settings, tokens, peak_bytes(own, settings, tokens))
        if settings.kind not in best or found.tokens > best[settings.kind].tokens:
            best[settings.kind] = found
    return tuple(sorted(best.values(), key=lambda x: (x.tokens, x.settings.kind)))


def peak_bytes(setup: Setup, settings: LongSettings, tokens: int) -> int:
    """Returns the bytes at the peak of a rank's step, for `tokens` tokens cut over the ranks."""
    c, size, states = setup.config, setup.bytes_of.params, model_states(setup)
    ranks = setup.axis("dp")
    t, layer = -(-tokens // ranks), c.vocab_size * c.d_model
    homes = setup.homes
    stay = 0 if "params" in homes else states.params
    stay += (0 if "optimizer" in homes else states.optimizer) + (states.window if ranks > 1 or "params" in homes else 0)
    kept = 0 if settings.offload else c.num_layers * t * c.d_model * size
    n = settings.loss_tile
    loss = 12 * t * c.vocab_size if n is None else 4 * max(2 * n * c.vocab_size + layer, n * c.vocab_size + 2 * layer)
    narrow, wide = 11 * c.d_model + 2 * c.head_dim, 4 * c.d_model + 8 * max(widths(c))
    tile = 6 * c.d_model * t + wide * min(t, MLP_WIDTH)
    block = size * max(narrow * t, tile if settings.tiled_mlp else (wide + 5 * c.head_dim // 2) * t)
    last = kept + 4 * layer + _block_grads(c) * setup.bytes_of.grads
    first = t * c.d_model * size + (0 if "grads" in homes else states.grads - 4 * layer // ranks)
    update = 0 if "optimizer" in homes else states.grads + 4 * layer // ranks
    return stay + max(loss + 2 * t * c.d_model * size + kept, block + max(last, first), update)


def _list_settings() -> Iterator[LongSettings]:
    """Yields the settings to try, each kind with one technique more, and all sizes of tiles of the loss."""
    yield LongSettings()
    for tiled_mlp, offload in ((False, False), (True, False), (True, True)):
        for n in LOSS_TILES:
            yield LongSettings(n, tiled_mlp, offload)


def _most_tokens(setup: Setup, settings: LongSettings, room: int) -> int:
    """Returns the largest number of tokens that fits; bytes grow with tokens."""
    end = setup.config.max_len if setup.config.position == "learned" else _END
    low, high = 0, end + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak_bytes(setup, settings, middle) <= room else (low, middle)
    return low


def _block_grads(c: gpt.Config) -> int:
    """Returns the number of parameters of the largest block: blocks with experts may be few, and differ."""
    blocks = gpt.leaf_shapes(c)["blocks"]
    return max(sum(math.prod(shape) for shape in block.values()) for block in blocks)
