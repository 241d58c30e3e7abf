"""A tensor and what is still owed, as signs and scales."""

from ._api import sign_compress as sign_compress, sign_compress_ as sign_compress_
