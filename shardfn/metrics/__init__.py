"""What a run shows of itself: metrics as numbers, its speed, and where they are written."""

from ._floats import to_floats as to_floats
from ._logger import Logger as Logger
from ._throughput import Throughput as Throughput, flops_per_token as flops_per_token
