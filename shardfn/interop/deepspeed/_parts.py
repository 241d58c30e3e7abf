"""Part of a checkpoint of DeepSpeed for each leaf of a state, and `restore_deepspeed`.

params['a'], opt_state...master['a']   fp32 of a
opt_state...mu['a'], ...nu['a']        exp_avg, exp_avg_sq of a
opt_state...trace['a']                 momentum_buffer of a
opt_state...count, step                step
model_state['b']                       buffer b of the module

Leaves are assigned to the parts of a job by the module's names, stacks layer by layer.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn import core
from shardfn.checkpoint import restore_tensors
from shardfn.interop.leaves import join_keys

from ._partition import Partition
from ._read import DeepSpeedState

# From the name of a parameter or buffer here to DeepSpeed's.
Names = Callable[[str], str]
_PARAM = re.compile(r"params(.*)")
_BUFFER = re.compile(r"model_state(.*)")
_STATE = re.compile(r"opt_state(?:\[\d+\]|\.\w+|\['[^']*'\])*?\.(mu|nu|trace|master|count)((?:\[.*|\..*)?)")
_FIELDS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer", "master": "fp32", "count": "step"}


class StatePart(NamedTuple):
    """Part of a leaf: "fp32", "buffer" or a state, and the parameter's name, empty for the step."""

    kind: str
    name: str = ""


def find_part(path: str, names: Names) -> StatePart | None:
    """Returns the part of a leaf, or None without a counterpart."""
    if found := _PARAM.fullmatch(path):
        return StatePart("fp32", names(join_keys(found[1])))
    if found := _BUFFER.fullmatch(path):
        return StatePart("buffer", names(join_keys(found[1])))
    if found := _STATE.fullmatch(path):
        kind = _FIELDS[found[1]]
        return StatePart(kind) if kind == "step" else StatePart(kind, names(join_keys(found[2])))
    return StatePart("step") if path == "step" else None


def describe_part(part: StatePart) -> str:
    """Returns the name of the part in messages.

    Example:
        >>> describe_part(StatePart("exp_avg", "a.weight")), describe_part(StatePart("step"))
        ('exp_avg of a.weight', 'step')
    """
    return f"{part.kind} of {part.name}" if part.name else part.kind


def is_master(path: str) -> bool:
    """Returns whether a leaf is the wide copy of a parameter."""
    found = _STATE.fullmatch(path)
    return found is not None and found[1] == "master"


class PlacedPart(NamedTuple):
    """Leaf, or a layer of a stacked leaf, with the part."""

    part: StatePart
    leaf: Any
    layer: int | None = None


def place_leaves(
    parts: Mapping[StatePart, Any], cut: Partition, module: nn.Module, own: Mapping[StatePart, str], names: Names
) -> list[PlacedPart]:
    """Returns all leaves in the files of a job, in an order equal on all ranks.

    Args:
        parts: leaves of the state, by part.
        cut: partition of the job.
        module: module of the job.
        own: names of parameters here, by part.
        names: function from a name here to the module's name.

    Raises:
        ValueError: the state does not fit the module and optimizer, or a buffer has no values. The message lists all.
    """
    firsts = {name: first for first, names in cut.names.items() for name in names}
    buffers = _saved_buffers(module)
    out = [
        PlacedPart(StatePart("buffer", name), x)
        for name, x in buffers.items()
        if StatePart("buffer", name) not in parts
    ]
    problems = [f"buffer {x.part.name} of the module is on meta, and the state lacks it" for x in out if x.leaf.is_meta]
    loose = {name for name, _ in core.named_buffers(module)} - buffers.keys()
    for part, x in parts.items():
        if part.kind == "buffer":
            if part.name in buffers:
                out.append(PlacedPart(part, x))
            elif part.name not in loose:
                problems.append(
                    f"{describe_part(part)} is not in the module.{core.did_you_mean(part.name, [*buffers])}"
                )
            continue
        name, shape = firsts.get(part.name, part.name), torch.Size(x.shape)
        if name in cut.shapes:
            out.append(PlacedPart(part._replace(name=name), x))
            if shape != cut.shapes[name]:
                problems.append(f"{part.name} is {tuple(shape)}, but {tuple(cut.shapes[name])} in the module")
        elif layers := _find_layers(part.name, shape, cut.shapes) or _find_layers(own[part], shape, cut.shapes, names):
            out += [PlacedPart(part._replace(name=layer), x, i) for i, layer in enumerate(layers)]
        else:
            problems.append(
                f"{part.name} is not a parameter of the module.{core.did_you_mean(part.name, [*cut.shapes])}"
            )
    core.raise_all(ValueError, "the state is not one of this job's module:", problems + _check_states(out, cut))
    return out


def _check_states(out: list[PlacedPart], cut: Partition) -> list[str]:
    kinds: dict[str, set[str]] = {kind: set() for kind in ("fp32", *cut.states)}
    for x in out:
        if x.part.kind != "buffer":
            kinds.setdefault(x.part.kind, set()).add(x.part.name)
    problems = [f"{name} is not in the state" for name in cut.shapes if name not in kinds["fp32"]]
    trained = cut.trained()
    for kind, names in kinds.items():
        if kind == "fp32":
            continue
        if kind not in cut.states or not names:
            lacks = "no such state here" if kind in cut.states else "no such state there"
            problems.append(f"{kind}: the optimizer has {lacks}. Give config['optimizer'] of the same rule")
            continue
        problems += [f"{name} is trained there, and has no {kind} here" for name in sorted(trained - names)]
        empty = {name for name, shape in cut.shapes.items() if not shape.numel()}
        problems += [f"{name} has {kind} here, and is frozen there" for name in sorted(names - trained - empty)]
    return problems


def _saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that the module saves in addition to parameters."""
    weights = {name for name, _ in core.named_parameters(module, remove_duplicate=False)}
    kept = zip(core.state_names(module), module.state_dict().values(), strict=True)
    rest = {name: x for name, x in kept if name not in weights}
    odd = [name for name, x in rest.items() if not isinstance(x, Tensor)]
    core.raise_all(ValueError, "the module saves values that are not tensors, which the state lacks:", odd)
    return rest


def _find_layers(
    name: str, shape: torch.Size, shapes: Mapping[str, torch.Size], names: Names = lambda name: name
) -> list[str] | None:
    """Returns the names of a stack's layers, with an index between the parts, or None if some are missing."""
    words = name.split(".")
    for k in range(len(words) + 1 if shape else 0):
        layers = [names(".".join((*words[:k], str(i), *words[k:]))) for i in range(shape[0] + 1)]
        beyond = layers.pop()
        if layers and all(shapes.get(x) == shape[1:] for x in layers):
            return None if beyond in shapes else layers
    return None


def restore_deepspeed(
    found: DeepSpeedState,
    like: core.PyTree,
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
    tensors = {describe_part(StatePart("fp32", name)): x for name, x in found.params.items()}
    for kind, tree in found.moments.items():
        tensors |= {describe_part(StatePart(kind, name)): x for name, x in tree.items()}
    there = {
        path: part
        for path in core.tree_paths(like, at)
        if (part := find_part(path.removeprefix("."), names)) is not None
    }
    kept = {part.name for part in there.values() if part.kind == "buffer"}
    tensors |= {describe_part(StatePart("buffer", name)): x for name, x in found.buffers.items() if name in kept}
    if any(part.kind == "step" for part in there.values()):
        tensors["step"] = torch.tensor(found.step)
    if at:
        kinds = {part.kind for part in there.values()}
        tensors = {key: x for key, x in tensors.items() if key.split(" of ")[0] in kinds}

    def rename_path(path: str) -> str | None:
        part = find_part(path, names)
        if part is None:
            return None if path == "key" or path.startswith("loss_scale") else path
        return describe_part(part._replace(name=found.shared.get(part.name, part.name)))

    return restore_tensors(tensors, like, at=at, rename=rename_path, cast=True, donate=donate)
