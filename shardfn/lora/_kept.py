"""Checkpoints of only adapters: a state without the frozen model, which can be read from the model's files."""

from shardfn.core import PyTree
from shardfn.state import TrainState


def without_base(state: TrainState) -> TrainState:
    """Returns the part of a state to save: adapters, and the optimizer's state of the adapters.

    Args:
        state: state of a step over `{"base": ..., "lora": ...}`, with the model frozen.

    Raises:
        ValueError: the parameters are another tree.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import shardfn as sf
        >>> params = {"w": torch.ones(4, 3)}
        >>> lora = sf.lora.LoRA.of(params, ["w"], rank=2)
        >>> loss = lora.adapt(lambda p, x: (x @ p["w"].t()).square().mean())
        >>> step = sf.sharded_step(loss, sf.optim.adamw(1e-3), trainable=lora.trainable)
        >>> state, _ = step(step.init({"base": params, "lora": lora.init(sf.key(0))}), torch.ones(2, 3))
        >>> directory = tempfile.mkdtemp()
        >>> _ = sf.checkpoint.save(directory, without_base(state), step=1)
        >>> fresh = step.init({"base": params, "lora": lora.init(sf.key(0))})
        >>> kept = sf.checkpoint.restore(directory, without_base(fresh)).tree
        >>> state = with_base(kept, fresh.params["base"])
        >>> int(state.step), sorted(state.params)
        (1, ['base', 'lora'])
    """
    if not isinstance(state.params, dict) or state.params.keys() != {"base", "lora"}:
        raise ValueError("without_base(state): its parameters are not {'base': ..., 'lora': ...}, as LoRA.adapt takes.")
    return state._replace(params={"lora": state.params["lora"]})


def with_base(state: TrainState, base: PyTree) -> TrainState:
    """Returns a state to train on, from a restored part and the model's leaves of a fresh state.

    Args:
        state: restored part of a state.
        base: `params["base"]` of the state that `step.init` made from the model's files.
    """
    return state._replace(params={"base": base, **state.params})
