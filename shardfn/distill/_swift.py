"""Loss by which a model with SwiftKV learns from itself without.

Qiao et al., SwiftKV, 2024, https://arxiv.org/abs/2410.03960, section 3.3
"""

from collections.abc import Callable
from typing import Any

import torch

from shardfn.core import Axes
from shardfn.engine import WeightedMean
from shardfn.models import gpt

from ._divergence import logits
from ._features import features


def swift_loss(
    config: gpt.Config,
    params: Any,
    batch: dict[str, Any],
    *,
    temperature: float = 2.0,
    hidden_weight: float = 1.0,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda inner: inner,
    axis: Axes = None,
) -> WeightedMean:
    """Returns the divergence of a model with SwiftKV from the same model without, and the error of its last states.

        L = t^2 KL(softmax(teacher / t), softmax(student / t)) + hidden_weight * mean((h_student - h_teacher)^2)

    h are the states that the head multiplies. The teacher reads the same leaves, but not the leaves of SwiftKV, and
    gets no gradient. With `trainable=gpt.swift_trainable(config)` only the leaves of SwiftKV learn.

    Args:
        config: model with `swift`.
        params: parameters of the model.
        batch: see `gpt.loss`. Targets with -100 do not count in the divergence.
        temperature: t.
        hidden_weight: weight of the error of states. 0 leaves the error out.
        wrap: see `gpt.apply`.
        axis: see `gpt.apply`.

    Raises:
        ValueError: the model has no SwiftKV.

    Example:
        >>> import functools, shardfn as sf
        >>> base = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)
        >>> config, params = gpt.add_swift_kv(base, gpt.init(base, sf.key(0)), first=1)
        >>> loss = functools.partial(swift_loss, config)
        >>> step = sf.sharded_step(loss, sf.optim.adam(1e-3), trainable=gpt.swift_trainable(config))
        >>> state, batch = step.init(params), {"tokens": torch.arange(18).view(2, 9)}
        >>> losses = [float(step(state, batch)[1]["loss"])]
    """
    if config.swift is None:
        raise ValueError("distill.swift_loss: the config has swift=None. Take the config of gpt.add_swift_kv.")
    batch = gpt.shifted(batch)
    how: dict[str, Any] = {"wrap": wrap, "axis": axis}
    student = gpt.apply_and_hidden(config, params, batch["tokens"], **how)
    with torch.no_grad():
        teacher = gpt.apply_and_hidden(*gpt.drop_swift_kv(config, params), batch["tokens"], **how)
    own: Any = {} if axis is None else {"axis": axis, "vocab_size": config.vocab_size}
    total, weight = logits(student[0], teacher[0], batch["targets"], temperature=temperature, **own)
    if hidden_weight == 0:
        return WeightedMean(total, weight)
    mask = batch["targets"] != -100
    error, _ = features({"last": student[1]}, {"last": teacher[1]}, mask)
    return WeightedMean(total + hidden_weight * error, weight)
