"""Metrics of a run: their conversion to numbers, its speed, and a log of both."""

from ._floats import to_floats as to_floats
from ._logger import Logger as Logger
from ._throughput import Throughput as Throughput, flops_per_token as flops_per_token
