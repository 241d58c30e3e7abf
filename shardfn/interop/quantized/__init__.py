"""Quantised files of other libraries: GPTQ, AWQ, compressed-tensors and block-scaled fp8."""

from ._archive import (
    CodedArchive as CodedArchive,
    QuantizedArchive as QuantizedArchive,
    QuantizedEntry as QuantizedEntry,
    open_archive as open_archive,
)
from ._archive import read_quantization as read_quantization
from ._archive import can_decode as can_decode
from ._weight import Span as Span
