"""Errors of a disk. All are `OSError`s. Messages give the loss, the values that are safe, and the remedy."""


class DiskFullError(OSError):
    """No room for a value. Earlier values on disk are untouched."""


class DamagedError(OSError):
    """A file differs from the written file: truncated, changed, or gone."""


class InUseError(OSError):
    """Another process owns a directory that only one may write to."""


class PoolInUseError(InUseError):
    """Another pool, of this process or of another, owns the directory."""
