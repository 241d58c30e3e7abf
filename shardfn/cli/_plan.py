"""A plan of a run: whether the run fits, the memory by kind, and the time."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from shardfn.core import did_you_mean, is_device, is_disk, raise_all
from shardfn.models import gpt

from ._layout import ExpertsPlan, activation_bytes, expert_problems, experts_plan, pipeline_problems, stage_layers
from ._states import PRECISIONS, Setup, States, model_states
from ._time import Cost, step_cost
from ._units import of_limit, with_unit

# The fraction of a device's memory taken by the driver's context, communicators and the allocator's fragments.
HEADROOM = 0.06


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """Memory and time that a run needs.

    Attributes:
        setup: settings of the run.
        num_params: parameter count, N.
        states: model states on the fullest rank.
        memory: bytes at the peak by kind, on the fullest rank.
        limit: bytes that the program may use on a device.
        cost: time of the step.
        notes: assumptions to know.
        experts: experts of a model with experts.
        outside: bytes of the rank on the host and on the disk, by memory and kind, empty if all is on the device.
        room: bytes that a rank may use of these memories.
    """

    setup: Setup
    num_params: int
    states: States
    memory: Mapping[str, int]
    limit: int
    cost: Cost
    notes: tuple[str, ...]
    experts: ExpertsPlan | None = None
    outside: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    room: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Returns the bytes at the peak."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Returns whether the peak is within the limit, and the parts on the host and the disk within theirs."""
        return self.peak <= self.limit and not self.overfull

    @property
    def overfull(self) -> tuple[str, ...]:
        """Returns the memories next to the device that are too small."""
        return tuple(x for x, kinds in self.outside.items() if sum(kinds.values()) > self.room[x])

    @property
    def verdict(self) -> str:
        """Returns whether the run fits, in words; if not, which kind of memory to reduce."""
        if self.fits:
            return f"fits: {of_limit(self.peak, self.limit)}"
        for memory in self.overfull[: self.peak <= self.limit]:
            need = sum(self.outside[memory].values())
            return f"does not fit: {of_limit(need, self.room[memory])} of the {memory} for each rank"
        biggest = max(self.memory, key=lambda kind: self.memory[kind])
        return (
            f"does not fit: {of_limit(self.peak, self.limit)}, {with_unit(self.peak - self.limit)} too many;"
            f" the largest kind is {biggest} ({with_unit(self.memory[biggest])})"
        )


def plan(setup: Setup) -> JobPlan:
    """Returns the plan of a run.

    Peak = parameters + gradients + optimizer state + gathered window + activations + temporaries. The temporaries are
    the largest of the loss, of a block and of the optimizer's update.

    Raises:
        ValueError: lists every setting that is out of range.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("gpt2", parse_model("gpt2"), {"dp": 8}, cluster("a100-40"), Zero(stage=3), batch=4)
        >>> plan(run).verdict
        'fits: 3.813 of 37.60 GiB'
    """
    raise_all(ValueError, "plan:", problems(setup))
    states, acts = model_states(setup, stage_layers(setup)), activation_bytes(setup)
    sizes = {
        "params": states.params,
        "grads": states.grads,
        "optimizer": states.optimizer,
        "gathered window": states.window,
        "activations": acts.saved,
        "temporaries": acts.temporaries + states.reducing + _grads_in_flight(setup, states),
    }
    homes, room = setup.homes, rank_room(setup)
    memory = {kind: 0 if kind in homes else nbytes for kind, nbytes in sizes.items()}
    outside: dict[str, dict[str, int]] = {}
    for kind, home in homes.items():
        outside.setdefault(home, {})[kind] = sizes[kind]
    limit = int(setup.cluster.device.memory * (1 - HEADROOM))
    cost, experts, notes = step_cost(setup), experts_plan(setup), _list_notes(setup)
    num_params = _num_params(setup.config)
    return JobPlan(setup, num_params, states, memory, limit, cost, notes, experts, outside, room)


def rank_room(setup: Setup) -> dict[str, int]:
    """Returns the bytes of host and disk for a rank, by memory, empty for a machine without figures."""
    machine = setup.cluster.machine
    if machine is None:
        return {}
    return {
        "host": int(machine.memory * (1 - HEADROOM)) // setup.ranks_of_machine,
        "disk": machine.disk // setup.ranks_of_machine,
    }


def _grads_in_flight(setup: Setup, states: States) -> int:
    """Returns the bytes of a whole gradient on its way to another memory, where no reduction has counted it."""
    if "grads" not in setup.homes or states.reducing:
        return 0
    return states.largest // setup.bytes_of.params * setup.bytes_of.grads


def by_ep(p: JobPlan) -> list[JobPlan]:
    """Returns the plans of a run with its experts on 1, .. of the ranks along dp: all divisors up to their number."""
    s, experts = p.setup, p.setup.config.experts
    if experts is None:
        return []
    sizes = [n for n in range(1, min(s.axis("dp"), max(s.config.num_experts)) + 1) if s.axis("dp") % n == 0]
    return [plan(dataclasses.replace(s, ep=n)) for n in sizes]


def best_ep(plans: Sequence[JobPlan]) -> JobPlan:
    """Returns the fastest of some plans that fit; the smallest if none fits."""
    fitting = [p for p in plans if p.fits]
    return min(fitting, key=lambda p: p.cost.seconds) if fitting else min(plans, key=lambda p: p.peak)


_num_params = functools.lru_cache(maxsize=64)(gpt.num_params)


def problems(s: Setup) -> list[str]:
    """Returns the problems of a run's settings, as texts, empty if the settings are valid."""
    out = []
    for name in ("batch", "seq", "accumulate"):
        if getattr(s, name) < 1:
            out.append(f"--{name} {getattr(s, name)} must be at least 1.")
    if s.accumulate > 0 and s.batch % s.accumulate:
        out.append(f"--accumulate {s.accumulate} does not divide --batch {s.batch}. Use a divisor.")
    if s.seq > s.config.max_len:
        out.append(f"--seq {s.seq} is longer than the model's max_len={s.config.max_len}; cut it, or add max_len=..")
    if not 0 < s.efficiency <= 1:
        out.append(f"--efficiency {s.efficiency} must lie in (0, 1].")
    if s.precision not in PRECISIONS:
        hint = did_you_mean(s.precision, PRECISIONS)
        out.append(f"--precision {s.precision!r} is not known.{hint} Known: {', '.join(PRECISIONS)}.")
    elif s.bytes_of.dtype not in s.cluster.device.flops:
        known = [p for p, row in PRECISIONS.items() if row.dtype in s.cluster.device.flops]
        out.append(f"{s.cluster.device.name} does not compute in {s.bytes_of.dtype}; use {' or '.join(known)}.")
    if s.zero.travel.gather or s.zero.near or s.zero.travel.reduce:
        out.append("Travel(gather=, secondary_axis=, reduce=) are not planned; lower the step on an abstract mesh.")
    out += pipeline_problems(s) + expert_problems(s) + _list_memory_problems(s)
    tp, heads = s.axis("tp"), s.config.num_heads
    if tp > heads:
        out.append(f"tp={tp} is more than the model's {heads} heads; some ranks would have no head.")
    return out


def _list_memory_problems(s: Setup) -> list[str]:
    out = []
    if not is_device(s.activations) and not s.remat:
        out.append("--activations host moves the inputs of blocks, which only --remat keeps; add --remat.")
    if is_disk(s.activations):
        out.append("--activations disk is not possible; use host.")
    if s.lora < 0:
        out.append(f"--lora must be a rank of at least 1, or 0 for no adapters, got {s.lora}.")
    if s.lora and s.config.experts is not None:
        out.append(f"--lora {s.lora} puts adapters on dense layers, and {s.model} has experts; leave it out.")
    if s.quantization is not None and not s.lora:
        out.append(f"--quantization {s.quantization} is of frozen weights; add --lora RANK.")
    if s.homes and s.cluster.machine is None:
        given = ", ".join(f"--{kind} {memory}" for kind, memory in s.homes.items())
        out.append(f"{given}: {s.cluster.device.name} has no memory next to the device's. Leave it out.")
    return out


def _list_notes(s: Setup) -> tuple[str, ...]:
    notes = []
    if s.zero.stage == 1:
        notes.append(
            "Stage 1 keeps whole gradients by ZeRO's definition, and so they are counted. The step of shardfn frees"
            " them as they are reduced, unless Zero(pace=Pace(accumulate='once')): it then has the needs of stage 2."
        )
    if s.axis("tp") > 1:
        notes.append(
            "Tensor parallelism is planned in Megatron's layout (columns, rows, vocabulary), that of"
            " `models.gpt.specs(config, tp='tp')`."
        )
    if s.has_uneven_heads:
        tp, heads = s.axis("tp"), s.config.num_heads
        notes.append(
            f"tp={tp} does not divide the {heads} heads: the fullest rank has {s.heads_on_a_rank[0]}, the others"
            " wait for it. `models.gpt` refuses this without Config(per_head=True), which the plan assumes. A loss"
            " under `partition` runs as it is."
        )
    if s.axis("pp") > 1:
        notes.append(
            "Every rank of a pipeline has the leaves outside the stack of blocks (embedding, last norm, output layer),"
            " and sums their gradients over pp. Where stages have unequal numbers of layers, the first have more."
        )
    if s.config.experts is not None:
        notes.append(
            "Time, activations and traffic are those of equally busy experts; with others the fullest rank has more"
            " rows, and the step waits for it. A captured step has room for the bound. The exchange is not hidden."
        )
    if s.lora:
        notes.append(
            f"Adapters of rank {s.lora} on the {'' if s.quantization is None else s.quantization + ' '}matrices of all"
            " blocks are trained; all other weights are frozen, without gradients and optimizer state."
        )
    if s.homes:
        notes.append(
            "The host's memory and disks are those of the vendor's machine, shared by the machine's ranks. The update"
            " of an optimizer away from the device runs on the host. Moves run beside the computation."
        )
    if s.bytes_of.optimizer == 12:
        notes.append("The optimizer state holds a float32 master copy of the parameters beside mu and nu.")
    return tuple(notes)
