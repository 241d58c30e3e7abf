"""Speculators: small trained models that guess the next tokens of a frozen model, from its hidden states."""

from ._config import KINDS as KINDS, RecurrentConfig as RecurrentConfig, Kind as Kind, config_of as config_of
from ._recurrent import init as init, specs as specs, apply as apply, loss as loss
from ._hidden_states import hidden_states as hidden_states
from ._train import States as States, train as train
from ._drafter import Speculator as Speculator
from ._train import measure_acceptance as measure_acceptance
from ._files import load as load, save as save
