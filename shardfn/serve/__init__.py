"""A server of OpenAI's interface over an engine: a front for clients, and ranks that compute."""

from ._message_formats import REASONING_PARSERS as REASONING_PARSERS, TOOL_PARSERS as TOOL_PARSERS
from ._settings import POOLINGS as POOLINGS, Settings as Settings
from ._access import ApiKeys as ApiKeys, read_keys as read_keys
from ._errors import ApiError as ApiError
from ._model import Text as Text
from ._ipc import Ready as Ready
from ._join import check_join_key as check_join_key, run_joiner as run_joiner
from ._worker import run_worker as run_worker
from ._load import Arrival as Arrival, Delays as Delays, measure as measure, trace as trace
from ._batch import (
    BatchRequest as BatchRequest,
    read_answered as read_answered,
    read_batch as read_batch,
    send_batch as send_batch,
)
from ._request_tracker import USUAL_ANSWER as USUAL_ANSWER
from ._router import PrefixTable as PrefixTable, choose_replica as choose_replica
from ._server import Server as Server, serve as serve
