"""Metrics of a run: conversion to numbers, speed, and a log of both."""

from ._floats import to_floats as to_floats
from ._logger import Logger as Logger
from ._sinks import Sink as Sink
from ._csv import CSV as CSV
from ._tensorboard import TensorBoard as TensorBoard
from ._wandb import WandB as WandB
from ._mlflow import MLflow as MLflow
from ._nonfinite import NonFiniteGuard as NonFiniteGuard
from ._early_stopping import EarlyStopping as EarlyStopping
from ._by_layer import by_layer as by_layer
from ._memory_in_use import memory_in_use as memory_in_use
from ._throughput import Throughput as Throughput, flops_per_token as flops_per_token
