"""Signs as bits."""

from ._api import pack_signs as pack_signs, unpack_signs as unpack_signs
