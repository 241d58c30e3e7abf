"""Models: one file each, as (Config, init, specs, apply, loss)."""

from . import gpt as gpt
from . import moe as moe
from . import recurrent as recurrent
from . import seq2seq as seq2seq
