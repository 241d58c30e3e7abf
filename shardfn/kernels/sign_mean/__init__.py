"""The mean of several workers' signs, compressed again to signs and a scale."""

from ._api import sign_mean as sign_mean, sign_mean_ as sign_mean_
