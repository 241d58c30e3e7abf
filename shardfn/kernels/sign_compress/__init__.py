"""Compression to 1 bit per element with error feedback.

Signs and scales of a tensor plus the error of earlier calls.
"""

from ._api import sign_compress as sign_compress, sign_compress_ as sign_compress_
