"""Codes of a model's weights, fitted to a text: `--fit FILE`."""

import pathlib

from shardfn.core import PyTree
from shardfn.inference import Decoder, fit_quantization

from ._settings import ModelSettings
from ._text import ModelText

# Rows of the text, and tokens of each.
_ROWS, _LENGTH = 16, 512


def fit_codes(job: ModelSettings, params: PyTree, text: ModelText, plain: Decoder) -> tuple[PyTree, str]:
    """Returns the parameters on the grids of the codes, and a remark. Each rank fits all. Collective.

    Args:
        job: job with the text and the codes.
        params: parameters of the model. Parameters in codes already are not changed.
        text: tokenizer of the model.
        plain: decoder of the model, without codes, on a single rank.

    Raises:
        ValueError: the text has no tokens, or the model's layers are not known one by one.
        OSError: the text cannot be read.
    """
    assert job.fit is not None
    place, length = pathlib.Path(job.fit), min(_LENGTH, plain.context)
    tokens = text.encode(place.read_text(encoding="utf-8"))[: _ROWS * length]
    if not tokens:
        raise ValueError(f"--fit must be a text with tokens, similar to the prompts, got no tokens in {place}.")
    rows = [tokens[at : at + length] for at in range(0, len(tokens), length)]
    return fit_quantization(plain, params, job.weights, rows), f"fitted to {len(tokens):,} tokens of {place.name}"
