"""`restore_deepspeed`: resumes a state where DeepSpeed stopped."""

from typing import Any

import torch

from shardfn.checkpoint import restore_tensors
from shardfn.core import PyTree, tree_paths

from ._ds_checkpoint import DeepSpeedState
from ._ds_parts import Names, StatePart, key_of, part_of


def restore_deepspeed(
    found: DeepSpeedState,
    like: PyTree,
    *,
    at: str = "",
    names: Names = lambda name: name,
    donate: bool = True,
) -> Any:
    """Resumes where DeepSpeed stopped: weights, moments, step and buffers, into a state of any mesh. Collective.

    A leaf's name is the keys of the tree with dots between, for example `blocks.0.w` for `params['blocks'][0]['w']`.
    Stacked layers are read one by one. Parameters in 16 bits get rounded values, and their master copies the exact
    ones. The key and the loss scale are not changed. Buffers outside of the state are ignored.

    Args:
        found: result of `read_deepspeed`, the same on all ranks.
        like: result of `step.init`, with an optimizer that has the moments of DeepSpeed's, or a part of the state.
        at: prefix of the paths of `like`: "params" for `state.params`, to begin training with only the weights.
        names: function from a parameter's or buffer's name here to DeepSpeed's.
        donate: whether the memory of `like` is filled. `like` cannot be used afterwards.

    Returns:
        The state.

    Raises:
        ValueError: leaves are missing, or additional, or of another shape. The message lists all.
        DonatedError: a step has consumed `like`.
        RankError: another rank failed.

    Example:
        >>> import shardfn as sf
        >>> w = {"w": torch.ones(2)}
        >>> found = DeepSpeedState(w, {"exp_avg": w, "exp_avg_sq": w}, 7, {}, {})
        >>> step = sf.sharded_step(lambda p, x: (p["w"] * x).sum(), sf.optim.adam(0.1))
        >>> state = restore_deepspeed(found, step.init({"w": torch.zeros(2)}))
        >>> state.step, state.opt_state[0].mu["w"].full_tensor()
        (tensor(7), tensor([1., 1.]))
    """
    tensors = {key_of(StatePart("fp32", name)): x for name, x in found.params.items()}
    for kind, tree in found.moments.items():
        tensors |= {key_of(StatePart(kind, name)): x for name, x in tree.items()}
    there = {
        path: part for path in tree_paths(like, at) if (part := part_of(path.removeprefix("."), names)) is not None
    }
    kept = {part.name for part in there.values() if part.kind == "buffer"}
    tensors |= {key_of(StatePart("buffer", name)): x for name, x in found.buffers.items() if name in kept}
    if any(part.kind == "step" for part in there.values()):
        tensors["step"] = torch.tensor(found.step)
    if at:
        kinds = {part.kind for part in there.values()}
        tensors = {key: x for key, x in tensors.items() if key.split(" of ")[0] in kinds}

    def rename_path(path: str) -> str | None:
        part = part_of(path, names)
        if part is None:
            return None if path == "key" or path.startswith("loss_scale") else path
        return key_of(part._replace(name=found.shared.get(part.name, part.name)))

    return restore_tensors(tensors, like, at=at, rename=rename_path, cast=True, donate=donate)
