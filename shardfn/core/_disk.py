"""`Disk`: the directory of states that are kept on disk, and their protection there."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Disk:
    """A directory for states whose memory is "disk", and how they are protected there.

    Attributes:
        directory: each rank makes a directory of its own in it. Ranks may have different ones.
        checksum: whether bytes that are read are compared with a checksum of those written.
        durable: whether commits also survive a loss of power: each step then waits until the disk has its bytes.

    Raises:
        ValueError: there is no directory.

    Example:
        >>> Disk("/path/to/a/fast/disk", checksum=True).durable
        False
    """

    directory: str
    checksum: bool = False
    durable: bool = False

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError(f"Disk({self.directory!r}): name a directory, or leave disk= out.")
