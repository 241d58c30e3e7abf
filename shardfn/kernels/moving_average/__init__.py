"""A moving average in place."""

from ._api import moving_average_ as moving_average_
