"""Penalties on the logits of tokens that a sequence has already."""

from ._api import penalise as penalise
