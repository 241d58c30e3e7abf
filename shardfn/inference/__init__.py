"""Exact inference: an engine over one pure step, and the values that decide the step's input.

Requests, events, the pool of blocks, the schedule and the plans have no tensors.
"""

from ._limits import Limits as Limits
from ._grammar import Grammar as Grammar, spell_schema as spell_schema
from ._matchers import Compiler as Compiler
from ._options import ReasoningBudget as ReasoningBudget
from ._requests import Request as Request, Sampling as Sampling, check_request as check_request
from ._options import JsonKind as JsonKind
from ._requests import SAMPLING_OPTIONS as SAMPLING_OPTIONS, encode_sampling as encode_sampling
from ._results import CacheStats as CacheStats, EngineStats as EngineStats, SpeculationStats as SpeculationStats
from ._draft_tree import DraftTree as DraftTree
from ._drafters import BatchDrafter as BatchDrafter, Context as Context, Drafter as Drafter, Ngram as Ngram
from ._drafters import RejectionDrafter as RejectionDrafter
from ._jacobi import Jacobi as Jacobi, MultiBlockJacobi as MultiBlockJacobi
from ._drafters import HiddenStateDrafter as HiddenStateDrafter, HiddenWindowDrafter as HiddenWindowDrafter
from ._drafters import SpecTokenDrafter as SpecTokenDrafter
from ._suffix_drafter import Guess as Guess, Suffix as Suffix
from ._events import Add as Add, Cancel as Cancel, Clock as Clock, Drain as Drain, Event as Event
from ._events import Stop as Stop, Weights as Weights
from ._pool import BlockPool as BlockPool, PrefixScope as PrefixScope, list_prefix_keys as list_prefix_keys
from ._state import State as State, start as start
from ._plan import StepPlan as StepPlan
from ._schedule import Output as Output, advance as advance
from ._digest import digest as digest, field_digests as field_digests, first_difference as first_difference
from ._cache import CacheLayout as CacheLayout, PagedAttention as PagedAttention
from ._cache import make_single_bodies as make_single_bodies
from ._layouts import Layout as Layout, Outputs as Outputs
from ._decoder import Decoder as Decoder, decoder as decoder
from ._seq2seq_decoder import seq2seq_decoder as seq2seq_decoder
from ._hf_decoder import hf_decoder as hf_decoder
from ._fit_codes import fit_quantization as fit_quantization
from ._results import MemoryPlan as MemoryPlan
from ._checks import limits_of as limits_of
from ._runner import Runner as Runner
from ._draft_model import DraftModel as DraftModel
from ._detokenize import Detokenizer as Detokenizer, DecodeStream as DecodeStream, detokenizer as detokenizer
from ._score import Score as Score, make_score_sampling as make_score_sampling, sum_tokens as sum_tokens
from ._score import Activation as Activation, Classes as Classes, Classifier as Classifier
from ._results import Completion as Completion, Token as Token
from ._processors import check_names as check_names
from ._beam_search import Beam as Beam, BeamSearch as BeamSearch, PromptSearch as PromptSearch, spell_beam as spell_beam
from ._engine_core import EngineCore as EngineCore
from ._engine import Engine as Engine
from ._image_rows import ImageRule as ImageRule, RequestImages as RequestImages
from ._images import EncodedImage as EncodedImage, ImageEncoder as ImageEncoder, ImagePrompt as ImagePrompt
from ._images import ImageReader as ImageReader, check_embedded as check_embedded
from ._images import make_embedded_prompt as make_embedded_prompt, make_request_images as make_request_images
from ._speech import SourceFeatures as SourceFeatures, SpeechReader as SpeechReader
from ._simulate import SimulatedEngine as SimulatedEngine, SimulatedLatency as SimulatedLatency
from ._simulate import Simulation as Simulation, TimedRequest as TimedRequest, check_trace as check_trace
from ._simulate import simulate as simulate
from ._decision_log import DecisionLog as DecisionLog, LoggedStep as LoggedStep, Replay as Replay
from ._decision_log import count_pairs as count_pairs, replay_log as replay_log
from ._draw_rows import logprobs as logprobs, widen_floats as widen_floats
