"""Tokens drawn from logits, each row by itself."""

from ._api import draw as draw, draw_uniforms as draw_uniforms, top_logprobs as top_logprobs
