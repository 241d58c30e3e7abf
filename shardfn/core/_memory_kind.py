"""`MemoryKind`: the memories in which a value is kept, and the questions that code asks about them."""

from typing import Literal

MemoryKind = Literal["device", "host", "disk"]

# Code outside of this room compares no memory kinds: it calls these, or the operations of `StoredValue`. They also take
# text that may be no memory kind, as arguments of users are before they are checked.


def is_device(kind: str) -> bool:
    """Returns whether a value of this memory kind lies in the device's memory.

    Example:
        >>> is_device("device"), is_device("host")
        (True, False)
    """
    return kind == "device"


def is_host(kind: str) -> bool:
    """Returns whether a value of this memory kind lies in the host's memory."""
    return kind == "host"


def is_disk(kind: str) -> bool:
    """Returns whether a value of this memory kind lies on disk, where it is no tensor and is never overwritten."""
    return kind == "disk"
