"""Quantised files of other libraries: GPTQ, AWQ, compressed-tensors, block-scaled fp8 and mxfp4."""

from ._archive import (
    CodedArchive as CodedArchive,
    OpenedArchive as OpenedArchive,
    QuantizedArchive as QuantizedArchive,
    QuantizedEntry as QuantizedEntry,
    open_archive as open_archive,
)
from ._archive import read_quantization as read_quantization
from ._archive import can_decode as can_decode
from ._mxfp4 import MXFP4Archive as MXFP4Archive, decode_mxfp4 as decode_mxfp4
from ._weight import Span as Span
