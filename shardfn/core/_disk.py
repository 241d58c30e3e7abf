"""`Disk`: where the states that are kept on disk are, and what is asked of it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Disk:
    """A directory for the states whose memory is "disk", and how far it is trusted.

    Attributes:
        directory: each rank makes a directory of its own in it; ranks may give different ones.
        checksum: whether what is read from the disk is compared with what was written.
        durable: whether commits outlive a loss of power too: a step waits until the device has what it wrote.

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
