"""Low-rank adapters: a few trainable leaves for a frozen model."""

from ._lora import with_base as with_base, without_base as without_base
from ._lora import LoRA as LoRA
from ._peft import load_peft as load_peft, save_peft as save_peft
from ._weight import LowRankWeight as LowRankWeight
