"""Configurations and checkpoints of DeepSpeed."""

from ._config import DeepSpeedRecipe as DeepSpeedRecipe, from_deepspeed_config as from_deepspeed_config
from ._read import DeepSpeedState as DeepSpeedState, read_deepspeed as read_deepspeed
from ._read_experts import read_deepspeed_experts as read_deepspeed_experts
from ._read_experts import read_deepspeed_weights as read_deepspeed_weights
from ._partition import DeepSpeedJob as DeepSpeedJob
from ._parts import restore_deepspeed as restore_deepspeed
from ._save import save_deepspeed as save_deepspeed
