"""Penalties on the logits of tokens already in a sequence, such as a repetition penalty."""

from ._api import penalise as penalise
