"""Signs as bits, on a CPU."""

from ._reference import pack_signs as pack_signs
from ._reference import unpack_signs as unpack_signs
