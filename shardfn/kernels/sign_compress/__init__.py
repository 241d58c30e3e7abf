"""Compression to one bit per element: signs and scales of a tensor plus the error that is still to be sent."""

from ._api import sign_compress as sign_compress, sign_compress_ as sign_compress_
