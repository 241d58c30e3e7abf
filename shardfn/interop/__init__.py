"""Imports and exports weights and settings of other libraries' models."""

from shardfn.interop.leaves import Archive as Archive, ArchiveWriter as ArchiveWriter
from ._hf_config import gpt_config as gpt_config, hf_config as hf_config
from ._hf_config import IMAGES_RULE as IMAGES_RULE, check_sizes as check_sizes
from ._hf_gpt import gpt_from_hf as gpt_from_hf, gpt_to_hf as gpt_to_hf
from ._hf_llava import llava_to_hf as llava_to_hf
from ._hf_seq2seq import SEQ2SEQ_TYPES as SEQ2SEQ_TYPES
from ._hf_seq2seq import hf_seq2seq_config as hf_seq2seq_config, seq2seq_config as seq2seq_config
from ._hf_seq2seq import seq2seq_from_hf as seq2seq_from_hf, seq2seq_to_hf as seq2seq_to_hf
from ._hf_classifier import classifier_from_hf as classifier_from_hf, is_classifier as is_classifier
from ._gguf import GGUFFile as GGUFFile
from ._gguf_model import gguf_config as gguf_config, gpt_from_gguf as gpt_from_gguf
from ._hf_module import module_from_hf as module_from_hf, module_to_hf as module_to_hf
from ._hf_module import file_dtypes as file_dtypes, without_weights as without_weights
from .deepspeed import DeepSpeedJob as DeepSpeedJob, DeepSpeedRecipe as DeepSpeedRecipe
from .deepspeed import DeepSpeedState as DeepSpeedState, from_deepspeed_config as from_deepspeed_config
from .deepspeed import read_deepspeed as read_deepspeed, read_deepspeed_experts as read_deepspeed_experts
from .deepspeed import read_deepspeed_weights as read_deepspeed_weights, restore_deepspeed as restore_deepspeed
from .deepspeed import save_deepspeed as save_deepspeed
from ._checkpoint_weights import export_checkpoint as export_checkpoint, import_weights as import_weights
from ._eval_state import eval_state as eval_state
from ._trained import Format as Format, export as export, export_program as export_program
from ._trained import master_params as master_params, to_module as to_module
from ._hf_sequence import causal_lm_batch as causal_lm_batch, causal_lm_loss as causal_lm_loss
