"""The parts of exact inference without tensors: requests, events, the pool of blocks, the schedule and its plans."""

from ._limits import Limits as Limits
from ._requests import Request as Request, Sampling as Sampling, check_request as check_request
from ._events import Add as Add, Cancel as Cancel, Clock as Clock, Drain as Drain, Event as Event, Weights as Weights
from ._pool import Pool as Pool
from ._state import State as State, start as start
from ._plan import Plan as Plan
from ._schedule import Output as Output, advance as advance
from ._digest import digest as digest, field_digests as field_digests, first_difference as first_difference
