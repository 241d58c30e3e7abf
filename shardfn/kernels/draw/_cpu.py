"""Tokens drawn from logits, on a CPU without a C++ compiler: the definition."""

from ._reference import draw as draw
from ._reference import draw_uniforms as draw_uniforms
from ._reference import top_logprobs as top_logprobs
