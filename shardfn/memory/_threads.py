"""Work for other threads, which lets go of what it worked on before it says that it is done."""

import concurrent.futures
from collections.abc import Callable
from typing import Any


def submit(
    threads: concurrent.futures.ThreadPoolExecutor, work: Callable[..., None], *args: Any
) -> concurrent.futures.Future[None]:
    """Runs `work(*args)` on one of `threads`.

    An executor alone drops the arguments some time after the future is done. Then memory and files would seem to be in
    use a little longer than they are, and a file that is free would not be found.

    Example:
        >>> with concurrent.futures.ThreadPoolExecutor(1) as threads:
        ...     submit(threads, print, "hello").result()
        hello
    """
    return threads.submit(_run, work, [args])


def _run(work: Callable[..., None], job: list[tuple[Any, ...]]) -> None:
    work(*job.pop())
