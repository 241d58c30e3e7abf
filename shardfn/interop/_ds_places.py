"""Assigns the leaves of a state to parts of a job of DeepSpeed: by the module's names, stacks layer by layer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.core import did_you_mean, named_buffers, named_parameters, raise_all, state_names

from ._ds_job import Partition
from ._ds_parts import Names, StatePart, key_of


class PlacedPart(NamedTuple):
    """Leaf, or a layer of a stacked leaf, with the part."""

    part: StatePart
    leaf: Any
    layer: int | None = None


def placed(
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
    loose = {name for name, _ in named_buffers(module)} - buffers.keys()
    for part, x in parts.items():
        if part.kind == "buffer":
            if part.name in buffers:
                out.append(PlacedPart(part, x))
            elif part.name not in loose:
                problems.append(f"{key_of(part)} is not in the module.{did_you_mean(part.name, [*buffers])}")
            continue
        name, shape = firsts.get(part.name, part.name), torch.Size(x.shape)
        if name in cut.shapes:
            out.append(PlacedPart(part._replace(name=name), x))
            if shape != cut.shapes[name]:
                problems.append(f"{part.name} is {tuple(shape)}, but {tuple(cut.shapes[name])} in the module")
        elif layers := _find_layers(part.name, shape, cut.shapes) or _find_layers(own[part], shape, cut.shapes, names):
            out += [PlacedPart(part._replace(name=layer), x, i) for i, layer in enumerate(layers)]
        else:
            problems.append(f"{part.name} is no parameter of the module.{did_you_mean(part.name, [*cut.shapes])}")
    raise_all(ValueError, "the state is not one of this job's module:", problems + _check_states(out, cut))
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
    weights = {name for name, _ in named_parameters(module, remove_duplicate=False)}
    kept = zip(state_names(module), module.state_dict().values(), strict=True)
    rest = {name: x for name, x in kept if name not in weights}
    odd = [name for name, x in rest.items() if not isinstance(x, Tensor)]
    raise_all(ValueError, "the module saves values that are no tensors, which the state lacks:", odd)
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
