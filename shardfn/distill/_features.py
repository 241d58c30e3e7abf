"""Distances of a student's features from a frozen teacher's, by name.

B batch, T tokens, D model.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from shardfn.core import raise_all
from shardfn.engine import WeightedMean

from ._divergence import check_frozen


def features(
    student: Mapping[str, Float[Tensor, "b t _"]],
    teacher: Mapping[str, Float[Tensor, "b t _"]],
    mask_BT: Bool[Tensor, "b t"] | None = None,
    *,
    projections: Mapping[str, Float[Tensor, "_ _"]] | None = None,
) -> WeightedMean:
    """Returns the mean squared error of features: over their dims, then over tokens and names.

    Args:
        student: features of the student by name, [B, T, D] each. Differences are taken in float32 at least.
        teacher: features of the teacher by the same names, without a gradient.
        mask_BT: False for tokens that do not count, such as padding. None counts all.
        projections: by name, a weight [D of the teacher, D of the student] that is multiplied with the student's
            features first: a trainable leaf. Needed where the widths differ.

    Returns:
        The sum over the counted tokens of the mean over names and dims, and the number of counted tokens.

    Raises:
        ValueError: lists the names that only the student or only the teacher has, projections without features, and
            features of other tokens or widths. Or a teacher's features get a gradient, or there are no names.

    Example:
        >>> student, teacher = {"layer 1": torch.zeros(1, 2, 3)}, {"layer 1": torch.ones(1, 2, 4)}
        >>> features(student, teacher, projections={"layer 1": torch.zeros(4, 3)}).mean()
        tensor(1.)

    References:
        Romero et al., FitNets, 2014, https://arxiv.org/abs/1412.6550
    """
    projections = {} if projections is None else projections
    _check_features(student, teacher, mask_BT, projections)
    errors = []
    for name, x_BTD in student.items():
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        y_BTD = F.linear(x_BTD.to(wide), projections[name].to(wide)) if name in projections else x_BTD.to(wide)
        errors.append((y_BTD - teacher[name].to(wide)).square().mean(-1))
    error_BT = torch.stack(errors).mean(0)
    if mask_BT is None:
        return WeightedMean(error_BT.sum(), error_BT.new_full((), error_BT.numel()))
    return WeightedMean(error_BT.masked_fill(~mask_BT, 0.0).sum(), mask_BT.sum().to(error_BT.dtype))


def _check_features(
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    mask: Tensor | None,
    projections: Mapping[str, Tensor],
) -> None:
    problems = [] if student else ["there must be features, got none"]
    problems += [
        f"{name!r} is only of the student; the teacher has {sorted(teacher)}" for name in student - teacher.keys()
    ]
    problems += [
        f"{name!r} is only of the teacher; the student has {sorted(student)}" for name in teacher - student.keys()
    ]
    problems += [f"projections[{name!r}] is of no feature. Leave it out" for name in projections - student.keys()]
    tokens = {tuple(x.shape[:-1]) for x in (*student.values(), *teacher.values())} | (
        set() if mask is None else {tuple(mask.shape)}
    )
    if len(tokens) > 1:
        problems.append(f"all must be of the same tokens, got {sorted(tokens)}. Cut or pad them to the same [B, T]")
    for name in student.keys() & teacher.keys():
        widths = (teacher[name].shape[-1], student[name].shape[-1])
        if name not in projections and widths[0] != widths[1]:
            problems.append(
                f"{name!r} has {widths[1]} dims in the student and {widths[0]} in the teacher. Pass"
                f" projections={{{name!r}: a leaf of shape {widths}}}"
            )
        elif name in projections and tuple(projections[name].shape) != widths:
            problems.append(f"projections[{name!r}] has shape {tuple(projections[name].shape)}; it must be {widths}")
    raise_all(ValueError, "distill.features:", sorted(problems))
    check_frozen("distill.features", **dict(teacher))
