"""The limit on open files of a server's front: each connection is a file."""

from ._settings import Settings

_OWN = 64  # files of the front: its sockets, the ranks' sockets, and files that a tokenizer reads


def allow_connections(settings: Settings) -> None:
    """Raises this process's limit on open files where it is below the number of connections.

    Otherwise connections beyond the limit would wait without an answer, instead of being refused by an answer.

    Raises:
        ValueError: the system does not permit so many files.

    Example:
        >>> allow_connections(Settings("gpt", max_connections=8))
    """
    import resource  # systems other than Unix lack it

    needed = settings.max_connections + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    if hard != unlimited and hard < needed:
        raise ValueError(
            f"max_connections is {settings.max_connections}, and this process may open {hard} files, with {_OWN} for"
            f" the server itself. Use at most {max(0, hard - _OWN)}, or raise the limit: ulimit -n {needed}."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
