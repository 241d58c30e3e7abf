"""Speculators: small trained models that guess the next tokens of a frozen model, from its hidden states."""

from ._config import (
    KINDS as KINDS,
    EagleConfig as EagleConfig,
    MTPConfig as MTPConfig,
    RecurrentConfig as RecurrentConfig,
)
from ._config import Kind as Kind, SpeculatorConfig as SpeculatorConfig, config_of as config_of
from ._loss import init as init, specs as specs, apply as apply, loss as loss
from ._joint import joint_init as joint_init, joint_loss as joint_loss, joint_specs as joint_specs
from ._joint import take_speculator as take_speculator
from ._hidden_states import hidden_states as hidden_states
from ._train import HiddenRows as HiddenRows, train as train
from ._drafter import Speculator as Speculator
from ._train import measure_acceptance as measure_acceptance
from ._files import load as load, save as save
