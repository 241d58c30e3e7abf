"""Time and traffic of a single step, by formula.

Work: 6 N + 12 L D T operations per token, for N multiplied weights (tables for look-ups do not count) and sequences of
T tokens; with remat the blocks' forward runs twice. Attention counts all pairs, masked pairs too, as in PaLM's appendix
B (Chowdhery et al. 2022, arXiv 2204.02311). Data-parallel transfers overlap with the computation: a layer takes
max(computation, transfers). The time of sums of tensor parallelism is added, without an overlap. A pipeline is as slow
as the slowest stage, and is idle during the filling and draining, by the schedule's timeline.
"""

import dataclasses
import math

from shardfn.core import is_device, is_disk
from shardfn.models import gpt

from ._layout import (
    activation_bytes,
    attention_weights,
    experts_plan,
    matrices,
    mean_width,
    pipeline,
    router_weights,
    stage_layers,
)
from ._states import Setup, States, model_states


@dataclasses.dataclass(frozen=True)
class PlannedTransfer:
    """Traffic of a kind of transfer.

    Attributes:
        axis: axis of the mesh.
        what: name of the sent values.
        nbytes: number of bytes that each rank sends in a step.
        messages: transfers in a step.
        bandwidth: bandwidth of the link, in bytes per second.
        seconds: time on the link if nothing else uses it.
    """

    axis: str
    what: str
    nbytes: float
    messages: int
    bandwidth: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """Parts of a step's time, in seconds unless noted.

    Attributes:
        transfers: the traffic.
        compute: time of only forward and backward, at the assumed efficiency.
        exposed: waiting for data-parallel transfers not hidden by the computation.
        tensor: sums of tensor parallelism.
        experts: exchanges of tokens between experts' ranks, of equally busy experts.
        pipeline: waiting while a pipeline fills and drains, for slower stages, and for messages between stages.
        update: the optimizer, limited by the memory's bandwidth.
        moves: waiting for the host and the disk that the computation does not hide.
        model_flops: operations of the model per step, over all ranks, without those that remat repeats.
        mfu: model_flops / (time x ranks x the device's peak).
        tokens_per_second: over all ranks.
    """

    transfers: tuple[PlannedTransfer, ...]
    compute: float
    exposed: float
    tensor: float
    experts: float
    pipeline: float
    update: float
    model_flops: float
    mfu: float
    tokens_per_second: float
    moves: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the time of the step."""
        return self.compute + self.exposed + self.tensor + self.experts + self.pipeline + self.update + self.moves

    @property
    def dominates(self) -> str:
        """Returns the name of the largest part of the step."""
        parts = {
            "computation": self.compute,
            "waiting for data-parallel transfers": self.exposed,
            "tensor-parallel sums": self.tensor,
            "the exchange of tokens": self.experts,
            "the pipeline": self.pipeline,
            "the optimizer's memory traffic": self.update,
            "moves between memories": self.moves,
        }
        return max(parts, key=lambda name: parts[name])


def step_cost(setup: Setup) -> Cost:
    """Returns the estimate for a single step.

    Raises:
        ValueError: the device does not compute in the precision.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("gpt2", parse_model("gpt2"), {"dp": 8}, cluster("h100"), Zero(stage=3), batch=8)
        >>> step_cost(run).dominates
        'computation'
    """
    states, device = model_states(setup, stage_layers(setup)), setup.cluster.device
    model_flops = setup.tokens * _flops_per_token(setup.config, setup.seq)
    if setup.lora:  # the backward has no products for the gradients of frozen weights
        model_flops -= setup.tokens * _linear_flops_per_token(setup.config) / 3
    again = setup.tokens * _block_flops_per_token(setup.config, setup.seq) / 3 if setup.remat else 0.0
    peak = device.rate(setup.bytes_of.dtype) * setup.world
    compute = (model_flops + again) / (peak * setup.efficiency) * _head_imbalance(setup)
    data, tensor, line = data_transfers(setup, states), tensor_transfers(setup), pipeline_transfers(setup, states)
    exposed = _exposed_time(setup, compute, data)
    update, moved = _update_seconds(setup, states), move_transfers(setup, states)
    tokens = expert_transfers(setup)
    summed, exchanged = (sum(t.seconds for t in kind) for kind in (tensor, tokens))
    waiting = _waiting_time(setup, compute + summed + exchanged, line)
    moving = sum(max(0.0, sum(t.seconds for t in moved if t.axis == x) - compute) for x in ("host", "disk"))
    seconds = compute + exposed + summed + exchanged + waiting + update + moving
    return Cost(
        (*data, *tensor, *tokens, *line, *moved),
        compute,
        exposed,
        summed,
        exchanged,
        waiting,
        update,
        model_flops,
        model_flops / (seconds * peak),
        setup.tokens / seconds,
        moving,
    )


def move_transfers(setup: Setup, states: States) -> tuple[PlannedTransfer, ...]:
    """Returns the moves between the device and the host, and between the host and the disk, of a rank's step.

    Parameters are read for the forward and for the backward of each microbatch. The optimizer's state on disk is read
    and written by the update, whose time has it.
    """
    k, homes, cluster = setup.accumulate, setup.homes, setup.cluster
    pieces = states.optimizer // setup.bytes_of.optimizer  # parameters that this rank updates
    new = 0 if "params" in homes or "optimizer" not in homes else pieces * setup.bytes_of.params
    once = pieces * setup.bytes_of.grads if "optimizer" in homes else 0
    rows = (
        ("parameters", 2 * k * states.params if "params" in homes else 0, homes.get("params")),
        ("gradients", k * states.grads if "grads" in homes else once, homes.get("grads")),
        ("updated parameters", new, None),
        ("inputs of blocks", 2 * k * activation_bytes(setup).saved if "activations" in homes else 0, None),
    )
    out = []
    for what, nbytes, home in rows:
        wires = (("host", cluster.host), ("disk", cluster.disk if home is not None and is_disk(home) else None))
        for memory, link in wires:
            if nbytes and link is not None:
                seconds = link.seconds(nbytes)
                out.append(
                    PlannedTransfer(memory, f"{what}, to or from the {memory}", nbytes, k, link.bandwidth, seconds)
                )
    return tuple(out)


def _update_seconds(setup: Setup, states: States) -> float:
    """Returns the time of the update, in which each state is read and written."""
    cluster, home = setup.cluster, setup.zero.optimizer
    trained = states.optimizer // setup.bytes_of.optimizer * setup.bytes_of.params if setup.lora else states.params
    nbytes = 2 * (states.optimizer + trained)
    if is_device(home) or cluster.machine is None:
        return nbytes / cluster.device.bandwidth
    host = nbytes / (cluster.machine.bandwidth / setup.ranks_of_machine)
    disk = cluster.disk.seconds(2 * states.optimizer) if is_disk(home) and cluster.disk is not None else 0.0
    return max(host, disk)


def data_transfers(setup: Setup, states: States) -> tuple[PlannedTransfer, ...]:
    """Returns the transfers along dp in a step.

    Gathers for use, gradients, and gathers of parameters after the update.
    """
    k = setup.accumulate
    reduces = k if setup.zero.pace.accumulate == "each" else 1
    rows = (
        ("gather of parameters, forward", states.gathered, k, "gathered"),
        ("gather of parameters, backward", states.gathered, k, "gathered"),
        ("gradients, each rank keeps rows", states.scattered, reduces, "scattered"),
        # Each microbatch leaves every rank some rows of the sum. The rows are gathered once, at the end.
        ("gradients, summed whole", states.summed, reduces + 1, "summed"),
        ("parameters made whole after the update", states.refreshed, 1, "refreshed"),
    )
    made = [_time_transfer(setup, "dp", what, n * size, n * states.messages[name]) for what, size, n, name in rows]
    return tuple(t for t in made if t.nbytes > 0)


def tensor_transfers(setup: Setup) -> tuple[PlannedTransfer, ...]:
    """Returns the transfers along tp.

    Two sums of the residual stream per block in the forward, and two in the backward.
    """
    c, k = setup.config, setup.accumulate
    sums = (6 if setup.remat else 4) * stage_layers(setup) * k
    size = setup.micro * setup.seq * c.d_model * setup.bytes_of.params
    made = _time_transfer(setup, "tp", "sums of activations", 2.0 * sums * size, sums)
    return (made,) if made.nbytes > 0 else ()


def expert_transfers(setup: Setup) -> tuple[PlannedTransfer, ...]:
    """Returns the all-to-all of tokens along ep, never hidden."""
    found = experts_plan(setup)
    if found is None or setup.ep == 1:
        return ()
    mesh = {k: n // setup.ep if k == "dp" else n for k, n in setup.mesh.items()}
    link = setup.cluster.link(mesh | {"ep": setup.ep}, "ep")
    times = (6 if setup.remat else 4) * found.layers * setup.accumulate
    # Each message goes directly to a rank, without a ring.
    seconds = link.seconds(found.balanced, times)
    return (PlannedTransfer("ep", "tokens to experts and back", found.balanced, times, link.bandwidth, seconds),)


def pipeline_transfers(setup: Setup, states: States) -> tuple[PlannedTransfer, ...]:
    """Returns the transfers along pp.

    The residual stream between stages, and gradients of the leaves on all stages.
    """
    line, size = pipeline(setup), setup.micro * setup.seq * setup.config.d_model * setup.bytes_of.params
    if not line.sends:
        return ()
    link, messages = setup.cluster.link(setup.mesh, "pp"), line.sends * setup.accumulate
    between = link.seconds(messages * size, messages)
    sends = PlannedTransfer("pp", "activations and their gradients", messages * size, messages, link.bandwidth, between)
    return sends, _time_transfer(setup, "pp", "gradients outside the stack, summed", 2.0 * states.shared, 2)


def _time_transfer(setup: Setup, axis: str, what: str, nbytes: float, messages: int) -> PlannedTransfer:
    n = setup.axis(axis)
    if n == 1:
        return PlannedTransfer(axis, what, 0.0, 0, math.inf, 0.0)
    link, sent = setup.cluster.link(setup.mesh, axis), nbytes * (n - 1) / n
    hops = messages * math.ceil(math.log2(n))
    return PlannedTransfer(axis, what, sent, messages, link.bandwidth, link.seconds(sent, hops))


def _exposed_time(setup: Setup, compute: float, data: tuple[PlannedTransfer, ...]) -> float:
    """Returns the waiting for transfers of slow layers, the first gather, the last gradient and the refresh."""
    layers = stage_layers(setup)
    forward = compute / (4 if setup.remat else 3)
    wire = {t.what: t.seconds for t in data}
    refresh = wire.pop("parameters made whole after the update", 0.0)
    ahead = wire.get("gather of parameters, forward", 0.0)
    behind = sum(s for what, s in wire.items() if what != "gather of parameters, forward")
    grads = sum(s for what, s in wire.items() if what.startswith("gradients"))
    ends = (ahead + grads) / (layers * setup.accumulate)
    return max(0.0, ahead - forward) + max(0.0, behind - (compute - forward)) + ends + refresh


def _waiting_time(setup: Setup, busy: float, sent: tuple[PlannedTransfer, ...]) -> float:
    """Returns the extra time of the slowest stage compared with the mean, plus the idle time of its rank.

    Args:
        setup: the run.
        busy: seconds that a mean rank computes.
        sent: the transfers along pp.
    """
    if not sent:
        return 0.0
    line, (between, shared) = pipeline(setup), sent
    one = busy / setup.accumulate * _stage_imbalance(setup)
    behind = max(0.0, between.seconds - one * setup.accumulate)
    ends = line.hops * between.seconds / between.messages
    return one * (setup.accumulate + line.idle) - busy + behind + ends + shared.seconds


def _stage_imbalance(setup: Setup) -> float:
    """Returns the work of the slowest stage divided by the mean. The last stage has the output layer."""
    layer = _block_flops_per_token(setup.config, setup.seq) / setup.config.num_layers * (4 / 3 if setup.remat else 1)
    whole, last = layer * setup.config.num_layers, 6.0 * setup.config.vocab_size * setup.config.d_model
    p = setup.axis("pp")
    fewest = setup.config.num_layers - (p - 1) * stage_layers(setup)
    slowest = max(layer * stage_layers(setup), layer * max(fewest, setup.config.num_layers // p) + last)
    return slowest * p / (whole + last)


def _head_imbalance(setup: Setup) -> float:
    """Returns the work of the rank with the most heads, divided by the mean of the ranks along tp."""
    c, tp = setup.config, setup.axis("tp")
    more = setup.heads_on_a_rank[0] * tp / c.num_heads - 1
    wide = c.num_heads * c.head_dim
    attention = 12.0 * (c.d_model * (wide + c.kv_heads * c.head_dim) + wide * setup.seq)
    return 1 + more * c.num_layers * attention / _flops_per_token(c, setup.seq)


def _block_flops_per_token(c: gpt.Config, seq: int) -> float:
    """Returns the operations per token of all blocks: 6 per weight, and 12 H K T per block for attention."""
    wide = c.num_heads * c.head_dim
    weights = attention_weights(c) + matrices(c) * c.d_model * mean_width(c) + router_weights(c)
    seen = [min(seq, x.window or seq) for x in c.layer_settings]  # tokens that a token attends to, with a window
    return c.num_layers * 6.0 * weights + 12.0 * wide * sum(seen)


def _linear_flops_per_token(c: gpt.Config) -> float:
    """Returns the operations per token of all layers but attention: 6 per weight."""
    return _block_flops_per_token(c, 0) + 6.0 * c.vocab_size * c.d_model


def _flops_per_token(c: gpt.Config, seq: int) -> float:
    return _block_flops_per_token(c, seq) + 6.0 * c.vocab_size * c.d_model
