"""Pretrained models: files, settings, tokenizers and chat templates, and `LLM`, a model in one line."""

from ._llm import LLM as LLM
from ._settings import CACHE_DTYPES as CACHE_DTYPES, DRAFTERS as DRAFTERS, DTYPES as DTYPES, KINDS as KINDS
from ._settings import ModelSettings as ModelSettings, Problem as Problem, kind_of as kind_of
from ._generation_config import SAMPLING_FIELDS as SAMPLING_FIELDS, read_sampling as read_sampling
from ._load import AXIS as AXIS, Served as Served, about as about, engine_of as engine_of
from ._load import load as load, load_text as load_text
from ._text import Text as Text, text_of_transformers as text_of_transformers
from ._chat_template import template as template
