"""Tokens drawn from logits, on a GPU: the definition, row by row. There is no kernel yet."""

from ._reference import draw as draw
from ._reference import draw_uniforms as draw_uniforms
