"""Pretrained models: files, settings, tokenizers and chat templates, and `LLM`, a model in a single line."""

from ._llm import LLM as LLM
from ._harness import EVAL_RUNNING as EVAL_RUNNING, evaluate_tasks as evaluate_tasks
from ._harness import make_harness_model as make_harness_model
from ._settings import CACHE_DTYPES as CACHE_DTYPES, DRAFTERS as DRAFTERS, DTYPES as DTYPES, KINDS as KINDS
from ._settings import ModelSettings as ModelSettings, Problem as Problem, detect_kind as detect_kind
from ._settings import SAMPLING_FIELDS as SAMPLING_FIELDS, read_sampling as read_sampling
from ._load import (
    AXIS as AXIS,
    LoadedModel as LoadedModel,
    describe_engine as describe_engine,
    make_engine as make_engine,
)
from ._load import load_model as load_model
from ._tokenizers import load_text as load_text
from ._images import load_image_encoder as load_image_encoder, load_text_and_images as load_text_and_images
from ._policy import GPTModel as GPTModel, TextPolicy as TextPolicy, load_policy as load_policy
from ._policy import make_policy as make_policy
from ._ppo import TextPPO as TextPPO, make_ppo as make_ppo
from ._text import ModelText as ModelText, wrap_transformers_tokenizer as wrap_transformers_tokenizer
from ._text import compile_chat_template as compile_chat_template
