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
from ._owl import add_spec_token as add_spec_token, compute_spec_states as compute_spec_states, owl_loss as owl_loss
from ._target import find_shared as find_shared
from ._hidden_states import hidden_states as hidden_states
from ._train import HiddenRows as HiddenRows, train as train
from ._drafter import Speculator as Speculator
from ._hybrid import Hybrid as Hybrid
from ._train import find_frequent_tokens as find_frequent_tokens, measure_acceptance as measure_acceptance
from ._files import load as load, save as save, write_published as write_published
from ._forcing import ForcingConfig as ForcingConfig, Trajectory as Trajectory, forcing_loss as forcing_loss
from ._forcing import find_divergence as find_divergence, make_forcing_batch as make_forcing_batch
from ._forcing import pack_blocks as pack_blocks, pick_noise as pick_noise
from ._trajectories import draw_trajectories as draw_trajectories
from ._trajectories import load_trajectories as load_trajectories, save_trajectories as save_trajectories
