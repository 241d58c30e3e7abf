"""Layout of a plan: the layers of a pipeline's ranks, experts, and the activations of both.

Pipelines in a plan: the layers of a rank, the microbatches with activations in memory, and the idle time.

Computed from the schedule. A pipeline fills and drains once for any number of microbatches, so the schedule of a few
microbatches gives the idle time of many.

Experts in a plan: parameters, work and activations for a token, and the bytes of the exchange.

S tokens of a rank and microbatch, k choices of a token, E experts, F ffn of an expert, D model. Experts lie on ep of
the dp ranks of data: a dense leaf is cut over dp ranks, an expert over dp / ep. With ep 1 every rank has all experts,
which ZeRO's stage 3 gathers as any leaf. An all-to-all sends each token to the ranks of the token's k experts and back.


"""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

from shardfn.core import did_you_mean
from shardfn.models import gpt
from shardfn.nn.moe import exchange_bytes
from shardfn.schedules import SCHEDULES, Costs, timeline

from ._states import Setup


class Pipeline(NamedTuple):
    """Pipeline of p ranks.

    Attributes:
        num_chunks: number of pieces of the model on each rank.
        held: largest number of chunks with activations in memory at a time for each rank.
        idle: idle time of a rank in a step, in units of the time of a single microbatch on the rank.
        sends: number of messages of the busiest rank for a single microbatch.
        hops: number of transfers on the way from the first stage to the last and back.
    """

    num_chunks: int
    held: tuple[int, ...]
    idle: float
    sends: int
    hops: int


def pipeline(setup: Setup) -> Pipeline:
    """Returns the pipeline of a run, or a pipeline of a single rank without "pp" in the mesh.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("1t", parse_model("1t"), {"pp": 4}, cluster("a100-80"), Zero(0), batch=8, accumulate=8)
        >>> pipeline(run)
        Pipeline(num_chunks=1, held=(4, 3, 2, 1), idle=3.0, sends=2, hops=6)
    """
    return _plan_pipeline(setup.schedule, setup.axis("pp"), setup.accumulate, setup.remat)


def pipeline_problems(setup: Setup) -> list[str]:
    """Returns the problems of a run's pipeline, as texts, empty if there are no problems."""
    name, p, layers = setup.schedule, setup.axis("pp"), setup.config.num_layers
    if name not in SCHEDULES:
        return [f"--schedule {name!r} is not known.{did_you_mean(name, SCHEDULES)} Known: {', '.join(SCHEDULES)}."]
    if p == 1 or setup.accumulate < 1:
        return []
    if setup.accumulate % p and name == "interleaved":
        return [f"--schedule {name} goes through its chunks {p} microbatches at a time; {setup.accumulate} do not fit."]
    try:
        stages = p * _num_chunks(name, p, min(setup.accumulate, 3 * p))
    except ValueError as e:
        return [str(e)]
    if stages > layers:
        return [f"pp={p} with {name} makes {stages} stages of {layers} layers; some would have no layer."]
    return []


def stage_layers(setup: Setup) -> int:
    """Returns the number of layers of the rank that has the most."""
    chunks = pipeline(setup).num_chunks
    return chunks * -(-setup.config.num_layers // (chunks * setup.axis("pp")))


@functools.lru_cache(maxsize=4096)
def _num_chunks(name: str, p: int, m: int) -> int:
    return SCHEDULES[name](p, m).num_chunks


@functools.lru_cache(maxsize=4096)
def _plan_pipeline(name: str, p: int, m: int, remat: bool) -> Pipeline:
    if p == 1:
        return Pipeline(1, (1,), 0.0, 0, 0)
    if name in ("gpipe", "1f1b"):  # the timeline's results in closed form
        held = tuple(m if name == "gpipe" else min(m, p - rank) for rank in range(p))
        return Pipeline(1, held, p - 1.0, 1 if p == 2 else 2, 2 * (p - 1))
    # From 3 p microbatches on there is a middle, which more microbatches make longer.
    few = min(m, 3 * p)
    schedule = SCHEDULES[name](p, few)
    run = timeline(schedule, Costs(1.0, 2.0 if remat else 1.0, 1.0))
    busy = few * (4.0 if remat else 3.0)
    homes = [schedule.home[s][0] for s in range(schedule.num_stages)]
    crossed = [(a, b) for a, b in itertools.pairwise(homes) if a != b]
    sends = max(sum((a == rank) + (b == rank) for a, b in crossed) for rank in range(p))
    idle = (run.makespan - busy) * few / busy
    return Pipeline(schedule.num_chunks, run.peaks, round(idle, 9), sends, 2 * len(crossed))


def bubble(setup: Setup) -> float:
    """Returns the idle time of a step divided by its busy time, for equal stages: (p - 1) / m for GPipe and 1F1B.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> model = parse_model("mt-nlg-530b")
        >>> run = Setup("mt-nlg-530b", model, {"pp": 35}, cluster("a100-80"), Zero(0), batch=240, accumulate=240)
        >>> round(bubble(run), 4) == round(34 / 240, 4)
        True
    """
    return pipeline(setup).idle / setup.accumulate


@dataclasses.dataclass(frozen=True)
class ExpertsPlan:
    """Experts of a run.

    Attributes:
        layers: number of layers with experts.
        active: number of parameters that a token uses.
        balanced: bytes that a rank sends in a step for the exchange of tokens, if experts are equally busy.
        most: bytes if all tokens choose the experts of a single rank: the room of a captured step.
        weights: bytes of the gathers and sums of all experts, in place of the exchange.
    """

    layers: int
    active: int
    balanced: float
    most: float
    weights: float


def matrices(config: gpt.Config) -> int:
    """Returns the matrices of an MLP or an expert."""
    return 3 if config.is_gated else 2


def attention_weights(config: gpt.Config) -> int:
    """Returns the weights of attention that multiply a row in a layer.

    Example:
        >>> attention_weights(gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4))
        4096
    """
    D, H, latent = config.d_model, config.num_heads, config.latent
    if latent is None:
        return 2 * D * (H + config.kv_heads) * config.head_dim
    queries = H * latent.head_dim
    queries = D * queries if latent.q_rank is None else latent.q_rank * (D + queries)
    return queries + D * latent.row + H * ((latent.nope_dim + latent.v_dim) * latent.kv_rank + latent.v_dim * D)


def widths(config: gpt.Config) -> list[int]:
    """Returns the ffn features of a token in its products for each layer.

    Example:
        >>> from shardfn.models import moe
        >>> widths(moe.gpt_moe(num_layers=2))
        [3072, 6144]
    """
    experts = config.experts
    if experts is None:
        return [config.ff_dim] * config.num_layers
    own = experts.top_k * (experts.d_ff or config.ff_dim) + (
        config.shared_ff_dim if experts.shared or experts.residual else 0
    )
    return [own if experts.in_layer(i) else config.ff_dim for i in range(config.num_layers)]


def mean_width(config: gpt.Config) -> float:
    """Returns the mean of `widths`."""
    return sum(widths(config)) / config.num_layers


def row_copies(config: gpt.Config) -> float:
    """Returns the values of width D that a mean layer keeps for a token's choices."""
    if config.experts is None:
        return 0.0
    return 3 * config.experts.top_k * len(config.expert_layers) / config.num_layers


def router_weights(config: gpt.Config) -> float:
    """Returns the number of weights of the router of a mean layer."""
    if config.experts is None:
        return 0.0
    return sum(config.num_experts) * config.d_model / config.num_layers


@functools.lru_cache(maxsize=64)
def _active_params(config: gpt.Config) -> int:
    from shardfn.models import moe

    return moe.num_active_params(config)


def experts_plan(setup: Setup) -> ExpertsPlan | None:
    """Returns the experts of a run, or None for a dense model.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("m", parse_model("mixtral-8x7b"), {"dp": 8}, cluster("h100"), Zero(stage=3), ep=8)
        >>> found = experts_plan(run)
        >>> round(found.active / 1e9, 1), found.balanced < found.weights
        (12.9, True)
    """
    c, experts = setup.config, setup.config.experts
    if experts is None:
        return None
    each = functools.partial(
        exchange_bytes,
        setup.micro * setup.seq,
        experts.top_k,
        d_model=c.d_model,
        d_ff=-(-(experts.d_ff or c.ff_dim) // setup.axis("tp")),
        ranks=max(setup.ep, 1),
        matrices=matrices(c),
        itemsize=setup.bytes_of.params,
        remat=setup.remat,
    )
    layers, times = [each(num) for num in c.num_experts], setup.accumulate / setup.axis("pp")
    return ExpertsPlan(
        len(c.expert_layers),
        _active_params(c),
        *(sum(getattr(x, n) for x in layers) * times for n in ("tokens", "most", "weights")),
    )


def expert_problems(s: Setup) -> list[str]:
    """Returns the problems of `--ep`."""
    if s.ep == 1:
        return []
    if s.config.experts is None:
        return [f"--ep {s.ep} cuts experts, and {s.model} has none; leave it out, or take mixtral-8x7b, for example."]
    dp, num = s.axis("dp"), max(s.config.num_experts)
    out = [] if s.ep >= 1 and dp % s.ep == 0 else [f"--ep {s.ep} must divide dp={dp}: experts lie on ranks of data."]
    return out + ([f"--ep {s.ep} is more than the model's {num} experts."] if s.ep > num else [])


# Bytes a logit at the peak, in the backward of the loss: log softmax, its gradient and the logits' gradient, float32.
_LOGIT_BYTES = 12


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes of activations on a single rank.

    Attributes:
        saved: bytes stored for the backward, of all microbatches open at a time. Without a pipeline there is one.
        temporaries: largest number of further bytes in memory, for the loss over the vocabulary, or for a single block.
    """

    saved: int
    temporaries: int


def activation_bytes(setup: Setup) -> Activations:
    """Returns the activations on the rank with the most.

    With remat (activation checkpointing) a block stores only the input, and the activations of a single block at a time
    exist, in the block's backward.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("gpt2", parse_model("gpt2"), {"dp": 1}, cluster("h100"), Zero(), batch=1, seq=1024, remat=True)
        >>> activation_bytes(run).saved == (12 + 2) * 2 * 1024 * 768
        True
    """
    c, tokens, size = setup.config, setup.micro * setup.seq, setup.bytes_of.params
    block = tokens * _block_bytes(setup)
    ends = 2 * tokens * size * c.d_model  # the last norm's input and the output layer's
    logits = tokens * -(-c.vocab_size // setup.axis("tp")) * _LOGIT_BYTES
    widest = tokens * size * ((3 if c.is_gated else 2) * -(-max(widths(c)) // setup.axis("tp")) + 2 * c.d_model)
    line, layers = pipeline(setup), stage_layers(setup)
    kept, busy = (tokens * size * c.d_model, block + widest) if setup.remat else (block, widest)
    per_chunk = layers // line.num_chunks * kept
    ranks = [Activations(held * per_chunk, busy) for held in line.held]
    # The model's end: on the first rank with stages that go down the ranks and up again.
    end = 0 if setup.schedule in ("zb-v", "dualpipe-v") else -1
    ranks[end] = Activations(ranks[end].saved + ends, max(logits, busy))
    return max(ranks, key=lambda a: a.saved + a.temporaries)


def _block_bytes(setup: Setup) -> int:
    """Returns the bytes that a block keeps for each token."""
    c, size = setup.config, setup.bytes_of.params
    features = math.ceil((4 if c.is_gated else 2) * mean_width(c))
    heads, kv_heads = setup.heads_on_a_rank
    masks = 2 * c.d_model if c.dropout else 0
    rows = math.ceil(row_copies(c) * c.d_model)  # whole: tensor parallelism cuts the experts' features
    wide = 2 * (heads + kv_heads) * c.head_dim + -(-features // setup.axis("tp"))
    return size * (4 * c.d_model + rows + wide) + masks
