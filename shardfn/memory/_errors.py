"""What can go wrong with a disk. All are `OSError`s; messages say what is lost, what is not, and what to do."""


class DiskFullError(OSError):
    """No room for a value. What was on disk before is untouched."""


class DamagedError(OSError):
    """A file is not what was written: truncated, changed, or gone."""


class InUseError(OSError):
    """Another process owns a directory that only one may write to."""


class PoolInUseError(InUseError):
    """Another pool, of this process or of another, owns the directory."""
