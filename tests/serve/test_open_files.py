"""Covers the limit on open files: it is raised where the system permits, else the server is refused."""

import resource

import pytest

from shardfn.serve import Settings
from shardfn.serve._server import allow_connections


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (64, 4096, (1088, 4096)),
        (64, resource.RLIM_INFINITY, (1088, resource.RLIM_INFINITY)),
        (1088, 1088, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_is_raised(
    soft: int, hard: int, raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda of: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda of, limits: made.append(limits))
    allow_connections(Settings("gpt"))
    assert made == ([] if raised is None else [raised])


def test_more_connections_than_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda of: (256, 1024))
    words = r"max_connections is 1024, and this process may open 1024 files, .* Use at most 960, .* ulimit -n 1088"
    with pytest.raises(ValueError, match=words):
        allow_connections(Settings("gpt"))
