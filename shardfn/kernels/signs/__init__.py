"""Signs of floats, packed 8 to a byte, and back."""

from ._api import pack_signs as pack_signs, unpack_signs as unpack_signs
