"""Penalties on logits, on a CPU without a C++ compiler: the definition."""

from ._reference import penalise as penalise
