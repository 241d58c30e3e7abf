"""Checks of the arguments of an engine and of its calls."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ._adapters import Adapters
from ._checks import limits_of
from ._decoder import Decoder, SourceEncoder
from ._drafters import BatchDrafter, Drafter, RejectionDrafter, find_wanted_layers, wants_spec_token
from ._image_rows import RequestImages
from ._limits import DRAFTS, Limits
from ._options import Encode
from ._requests import Request, Sampling, check_request, encode_sampling, ids_of
from ._speech import make_features


def choose_limits(decoder: Decoder, limits: Limits | None, drafter: Drafter | None) -> Limits:
    """Returns the limits of an engine, with room for the drafts of its drafter.

    Raises:
        ValueError: the limits have no room for drafts, or for a block of drafts, or the drafter has another vocabulary,
            or wants states that the decoder does not have.
    """
    if limits is None:
        limits = limits_of(decoder) if drafter is None else limits_of(decoder, drafts=DRAFTS)
    if drafter is not None and not limits.drafts:
        raise ValueError(
            f"limits.drafts is 0, and the drafter is {drafter!r:.80}. Try limits_of(..., drafts={DRAFTS})."
        )
    if isinstance(drafter, BatchDrafter):
        drafter.check(decoder, limits)
    if isinstance(drafter, RejectionDrafter) and drafter.block > limits.drafts:
        raise ValueError(
            f"engine: the drafter has blocks of {drafter.block} drafts, and limits.drafts is {limits.drafts}. Take"
            f" smaller blocks, or limits_of(..., drafts={drafter.block})."
        )
    if wants_spec_token(drafter) and not decoder.spec_token:
        raise ValueError(
            "engine: the drafter reads the state of a [SPEC] token, so the decoder must have one, got spec_token=False."
            " Take decoder and parameters from Speculator.prepare."
        )
    if missing := [x for x in find_wanted_layers(drafter) if x not in decoder.hidden_layers]:
        raise ValueError(
            f"engine: the drafter wants hidden states after {missing} layers, and this decoder has states after"
            f" {[*decoder.hidden_layers]}. Use a drafter of this model."
        )
    return limits


def make_request(
    prompt: Sequence[int],
    sampling: Sampling | None,
    limits: Limits,
    adapters: Adapters,
    encode: Encode | None,
    more: dict[str, Any],
    images: RequestImages | None,
) -> Request:
    """Returns a request within the limits. An adapter is named in `more`, and the request has the adapter's digest.

    Words of the sampling are encoded by `encode`.

    Raises:
        TypeError: an argument is of a wrong type, or unknown.
        ValueError: a value is out of range, or the request can never fit.
    """
    unknown = set(more) - {"priority", "deadline", "salt", "adapter", "source", "features"}
    if unknown:
        raise TypeError(
            f"add: {', '.join(sorted(unknown))}: a request has priority, deadline, salt, adapter, source and"
            " image_features and image_grids."
        )
    fields: dict[str, Any] = more | {"adapter": adapters.digest(more.get("adapter")), "images": images}
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is a {type(sampling).__name__}. Pass a Sampling.")
    request = Request(ids_of(prompt), sampling or Sampling(), **fields)
    check_request(request, limits)
    if (encoded := encode_sampling(request.sampling, encode)) is not request.sampling:
        request = replace(request, sampling=encoded)
        check_request(request, limits)
    return request


def split_source(
    prompt: Sequence[int] | Tensor, sources: SourceEncoder | None, more: dict[str, Any]
) -> tuple[Sequence[int], dict[str, Any]]:
    """Returns the decoder's prompt, and further fields of a request: with the source for an encoder-decoder model.

    A prompt without `source` in `more` is the source, and the decoder begins with its first token.

    Raises:
        ValueError: the source is to be features, and is not, or has another shape or numbers that are not finite.
    """
    if sources is None:
        return prompt, more  # type: ignore[return-value]
    if "source" not in more:
        prompt, more = (sources.start,), more | {"source": prompt}
    if sources.features is None:
        return prompt, more | {"source": ids_of(more["source"])}  # type: ignore[return-value]
    features = make_features(more["source"], sources.features)
    return prompt, more | {"source": (0,) * sources.longest, "features": features}  # type: ignore[return-value]


def check_features(sources: SourceEncoder | None, request: Request) -> None:
    """Refuses a source of token ids where the encoder reads features.

    Raises:
        ValueError: the request has no features.
    """
    if sources is not None and sources.features is not None and request.features is None:
        shape = list(sources.features)
        raise ValueError(
            f"source must be features, float {shape}, got {len(request.source)} token ids. Make them by data.log_mel."
        )


def split_sampling(sampling: Any, num: int) -> list[Sampling]:
    """Returns the sampling of each prompt. A single `Sampling` is for all prompts.

    Raises:
        ValueError: the numbers of samplings and prompts differ.
    """
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * num
    if len(each := list(sampling)) != num:
        raise ValueError(f"generate: {num} prompts and {len(each)} samplings. Give one for all, or one each.")
    return each


def split_images(num: int, **given: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Returns the arguments of each prompt about its images.

    Raises:
        ValueError: the numbers of entries and prompts differ.

    Example:
        >>> split_images(2, image_grids=[[(1, 2)], None])
        [{'image_grids': [(1, 2)]}, {'image_grids': None}]
    """
    for name, each in given.items():
        if each is not None and len(each) != num:
            raise ValueError(f"generate: {name} must have an entry for each of {num} prompts, got {len(each)}.")
    return [{name: each[i] for name, each in given.items() if each is not None} for i in range(num)]


def check_name(name: Any) -> None:
    """Refuses a name of a request that is not a text.

    Raises:
        TypeError: the name is of another type.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got a {type(name).__name__}.")
