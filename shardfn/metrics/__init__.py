"""Metrics of a run: conversion to numbers, speed, and a log of both."""

from ._values import to_floats as to_floats
from ._logger import Logger as Logger
from ._logger import Sink as Sink
from ._logger import CSV as CSV
from ._logger import TensorBoard as TensorBoard
from ._logger import WandB as WandB
from ._logger import MLflow as MLflow
from ._stopping import NonFiniteGuard as NonFiniteGuard
from ._stopping import EarlyStopping as EarlyStopping
from ._values import by_layer as by_layer
from ._values import memory_in_use as memory_in_use
from ._values import Throughput as Throughput, flops_per_token as flops_per_token
