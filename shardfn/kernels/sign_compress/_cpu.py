"""A tensor and what is still owed, as signs and scales, on a CPU."""

from ._reference import sign_compress as sign_compress
