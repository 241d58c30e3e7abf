"""Speculators: small trained models that guess the next tokens of a frozen model, from its hidden states."""

from ._config import KINDS as KINDS, EagleConfig as EagleConfig, RecurrentConfig as RecurrentConfig
from ._config import Kind as Kind, SpeculatorConfig as SpeculatorConfig, config_of as config_of
from ._loss import init as init, specs as specs, apply as apply, loss as loss
from ._hidden_states import hidden_states as hidden_states
from ._train import HiddenRows as HiddenRows, train as train
from ._drafter import Speculator as Speculator
from ._train import measure_acceptance as measure_acceptance
from ._files import load as load, save as save
