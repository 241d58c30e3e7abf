"""The model that a speculator guesses for: digests of some values of each leaf, and the embedding and the head."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import Draw, PyTree, draw_block, first_of
from shardfn.inference import Decoder
from shardfn.state import lies_on_disk

_VALUES = 4  # of each leaf, the first: a leaf may be read from a file only in part


class LeafDigest(NamedTuple):
    """Digest of a leaf.

    Attributes:
        size: number of values.
        values: digest of some values in bfloat16, or of codes, in which case the digest begins with "codes". Empty
            where this rank does not have the whole leaf.
    """

    size: int
    values: str


def digest_weights(decoder: Decoder, params: PyTree) -> dict[str, LeafDigest]:
    """Returns a digest of each leaf, by name. Weights in float32 and in bfloat16 have equal digests.

    Args:
        decoder: decoder of the model.
        params: parameters: tensors, or `GlobalTensor`s.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> digest_weights(decoder(config), gpt.init(config, core.key(0)))["['embed']"].size
        2048
    """
    return {name: _digest_leaf(x) for name, x in decoder.name_weights(params)}


def list_other_weights(known: Mapping[str, LeafDigest], found: Mapping[str, LeafDigest]) -> list[str]:
    """Returns the leaves in which a model differs from the model of a speculator, with both digests.

    Values are compared where both models have floats, or codes.
    """
    problems = [f"{name} is missing" for name in known if name not in found]
    problems += [f"{name} is unknown to the speculator's model" for name in found if name not in known]
    for name in known.keys() & found.keys():
        old, new = known[name], found[name]
        if not old.values or not new.values or old.values.startswith("codes") != new.values.startswith("codes"):
            continue
        if old.size != new.size:
            problems.append(f"{name} has {new.size} values, and {old.size} in the speculator's model")
        elif old.values != new.values:
            problems.append(f"{name} has the digest {new.values}, and {old.values} in the speculator's model")
    return first_of(sorted(problems), 8)


def find_shared(decoder: Decoder, params: PyTree) -> dict[str, Tensor]:
    """Returns the embedding and the head of a model, "embed" and "head", in float32, where they are found by name.

    A model without a head has the embedding as head. Codes, and leaves with only a part on this rank, are left
    out.

    Args:
        decoder: decoder of the model.
        params: parameters: tensors, or `GlobalTensor`s.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> [x.shape for x in find_shared(decoder(config), gpt.init(config, core.key(0))).values()]
        [torch.Size([64, 32]), torch.Size([64, 32])]
    """
    ends = {"embed": ("['embed']", "embed_tokens.weight']"), "head": ("['head']", "lm_head.weight']")}
    found = dict[str, Tensor]()
    for name, x in decoder.name_weights(params):
        for leaf, end in ends.items():
            if name.endswith(end) and (whole := _find_whole(x)) is not None:
                values = draw_block(whole, tuple(slice(0, n) for n in whole.shape)).detach()
                found |= {leaf: values.float().cpu()} if values.is_floating_point() else {}
    return {"embed": found["embed"], "head": found["embed"], **found} if "embed" in found else found


def _digest_leaf(x: Any) -> LeafDigest:
    whole, size = _find_whole(x), x.shape.numel()
    if whole is None or not size:
        return LeafDigest(size, "")
    first = (*[slice(0, 1) for _ in x.shape[1:]], slice(0, _VALUES))[: len(x.shape)]
    values = draw_block(whole, first).detach().flatten().cpu()
    codes = values.dtype == torch.uint8
    data = values if codes else values.to(torch.bfloat16).view(torch.uint8)
    digest = hashlib.blake2b(data.numpy().tobytes(), digest_size=6).hexdigest()
    return LeafDigest(size, f"codes {digest}" if codes else digest)


def _find_whole(x: Any) -> Tensor | None:
    """Returns the tensor of a leaf that is whole on this rank, in memory or drawn when cut."""
    if isinstance(x, GlobalTensor):
        cut = lies_on_disk(x) or any(x.mesh.axis_size(axis) > 1 for axis in x.spec.axes)
        return None if cut else x.local
    return None if x.is_meta and not isinstance(x, Draw) else x
