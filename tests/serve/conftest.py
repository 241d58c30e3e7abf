"""The servers that tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.serve.server import Running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server with the default settings."""
    made = Running()
    yield made
    made.wait_idle()
    assert made.close() == 0


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts servers that end with the test."""
    made: list[Running] = []

    def begin(**settings: Any) -> Running:
        made.append(Running(**settings))
        return made[-1]

    yield begin
    for one in made:
        one.close()
