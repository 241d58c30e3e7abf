"""Multi-token prediction in pretraining: the modules' loss is added to the model's, over a shared embedding and head.

    loss = CE(model) + weight / n * sum over k of CE(module k)

So the model learns from the modules, too. The parameters are {"model": parameters of the GPT, "mtp": leaves of the
modules}, and `take_speculator` makes a drafter's parameters of both.

References:
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437, section 2.2
"""

from collections.abc import Mapping

from jaxtyping import Int64
from torch import Tensor

from shardfn import nn
from shardfn.core import Axes, PyTree, fold_in, raise_all
from shardfn.engine import WeightedMean
from shardfn.models import gpt

from ._config import MTPConfig
from ._loss import Params, init, loss, specs

_SHARED = ("embed", "head")


def joint_init(model: gpt.Config, config: MTPConfig, key: Int64[Tensor, "2"]) -> Params:
    """Returns fresh parameters of a model and its multi-token-prediction modules.

    Args:
        model: shape of the model.
        config: shape of the modules.
        key: key. The model is drawn with the key itself.

    Returns:
        {"model": as of `gpt.init`, "mtp": as of `init`, without embedding and head}.

    Raises:
        ValueError: the modules are of another model, or the model has dropout or experts. The message lists all.

    Example:
        >>> from shardfn import core
        >>> model = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> config = MTPConfig(64, d_model=32, num_layers=1, d_inner=32, num_drafts=2)
        >>> sorted(joint_init(model, config, core.key(0)))
        ['model', 'mtp']
    """
    _check_pair(model, config)
    modules = init(config, fold_in(key, 0))
    return {"model": gpt.init(model, key), "mtp": {name: x for name, x in modules.items() if name not in _SHARED}}


def joint_specs(model: gpt.Config, config: MTPConfig, *, tp: Axes = None) -> PyTree:
    """Returns the compute layout of `joint_init`: the model's by `gpt.specs`, and whole modules.

    Args:
        model: shape of the model.
        config: shape of the modules.
        tp: mesh axes of tensor parallelism, the `axis` of `joint_loss`.
    """
    modules = {name: spec for name, spec in specs(config).items() if name not in _SHARED}
    return {"model": gpt.specs(model, tp=tp), "mtp": modules}


def joint_loss(
    model: gpt.Config,
    config: MTPConfig,
    params: Params,
    batch: Mapping[str, Tensor],
    *,
    weight: float = 0.3,
    axis: Axes = None,
) -> WeightedMean:
    """Returns the model's mean cross entropy, plus `weight` times the mean over the modules of theirs.

    Args:
        model: shape of the model.
        config: shape of the modules.
        params: parameters as from `joint_init`.
        batch: {"tokens": int64 [B, T + 1]}.
        weight: weight of the modules. DeepSeek-V3 takes 0.3, and 0.1 for the last third of the tokens.
        axis: mesh axes along which `joint_specs(model, config, tp=axis)` cuts the leaves. None is a single device.

    Raises:
        ValueError: see `joint_init`. Or `weight` is negative, or a batch has further entries or fewer than n + 2 tokens
            a row.

    Example:
        >>> from shardfn import core
        >>> model = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> config = MTPConfig(64, d_model=32, num_layers=1, d_inner=32, num_drafts=2)
        >>> batch = {"tokens": core.uniform(core.key(1), (2, 9)).mul(64).long()}
        >>> joint_loss(model, config, joint_init(model, config, core.key(0)), batch).weight.item()
        16.0
    """
    _check_pair(model, config)
    if weight < 0 or [*batch] != ["tokens"]:
        raise ValueError(
            f"joint_loss: weight must be at least 0 and a batch must have only 'tokens', got {weight} and {[*batch]}."
        )
    tokens_BT, modules = batch["tokens"], params["model"] | params["mtp"]
    logits_BTV, hidden_BTD = gpt.apply_and_hidden(model, params["model"], tokens_BT[:, :-1], axis=axis)
    total, count = nn.cross_entropy_sum(logits_BTV, tokens_BT[:, 1:], axis=axis, vocab_size=model.vocab_size)
    modules["head"] = _find_head(model, params["model"])
    own = loss(config, modules, {"hidden": hidden_BTD, "tokens": tokens_BT[:, :-1]}, axis=axis)
    return WeightedMean(total + weight / config.num_drafts * own.total * (count / own.weight), count)


def take_speculator(model: gpt.Config, config: MTPConfig, params: Params) -> Params:
    """Returns the parameters of a drafter: the modules, with the model's embedding and head.

    Args:
        model: shape of the model.
        config: shape of the modules.
        params: parameters as from `joint_init`, whole.
    """
    _check_pair(model, config)
    shared = {"embed": params["model"]["embed"], "head": _find_head(model, params["model"])}
    return shared | params["mtp"]


def _find_head(model: gpt.Config, params: Params) -> Tensor:
    return params["embed" if model.tie_embeddings else "head"]


def _check_pair(model: gpt.Config, config: MTPConfig) -> None:
    sizes = ("vocab_size", "d_model", "num_layers")
    pairs = {name: (getattr(config, name), getattr(model, name)) for name in sizes}
    problems = [f"{name} is {own}, and the model has {other}" for name, (own, other) in pairs.items() if own != other]
    problems += [f"the model has dropout={model.dropout}, and takes no key here"] if model.dropout else []
    problems += ["the model has experts, and their balance is not a part of this loss"] if model.experts else []
    raise_all(ValueError, "multi-token prediction with a model:", problems)
