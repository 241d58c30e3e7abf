"""`Disk`: the directory of states that are kept on disk, and their protection there."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Disk:
    """Directory for states with the memory "disk", and their protection there.

    Attributes:
        directory: parent directory. Each rank makes a separate directory inside. Ranks may have different parents.
        checksum: whether bytes that are read are compared with a checksum of the written bytes.
        durable: whether commits also survive a loss of power: each step then waits until the disk has all bytes.

    Raises:
        ValueError: the directory does not exist.

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
