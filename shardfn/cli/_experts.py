"""Experts in a plan: parameters, work and activations for a token, and the bytes of the exchange.

S tokens of a rank and microbatch, k choices of a token, E experts, F ffn of an expert, D model. Experts lie on ep of
the dp ranks of data: a dense leaf is cut over dp ranks, an expert over dp / ep. With ep 1 every rank has all experts,
which ZeRO's stage 3 gathers as any leaf. An all-to-all sends each token to the ranks of the token's k experts and back.
"""

import dataclasses
import functools

from shardfn.models import gpt
from shardfn.nn.moe import exchange_bytes

from ._states import Setup


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
    return 2 if config.mlp == "gelu" else 3


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
    own = experts.top_k * (experts.d_ff or config.ff_dim) + (config.ff_dim if experts.shared or experts.residual else 0)
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
