"""Covers adapters that are loaded and unloaded over HTTP, on all replicas or on none, and profiles."""

import gzip
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from shardfn.serve import Settings
from tests.serve.server import ADAPTERS, NAME, Running

ADMIN = {"Authorization": "Bearer admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"prompt": "abc", "max_tokens": 8, "temperature": 0}


def make_adapter(root: pathlib.Path, name: str, targets: str = r"wq$") -> pathlib.Path:
    (root / name).mkdir()
    (root / name / "adapter_config.json").write_text(targets)
    (root / name / "adapter_model.safetensors").write_text("")
    return root / name


def text_of(server: Running, model: str) -> str:
    found = server.send("/v1/completions", BODY | {"model": model})
    assert found.status == 200, found.data
    return found.json["choices"][0]["text"]


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def begin(start: Callable[..., Running], root: pathlib.Path) -> Callable[..., Running]:
    return lambda **more: start(adapter_root=root, admin_keys=("admin",), **more)


def test_an_adapter_comes_and_goes(begin: Callable[..., Running], root: pathlib.Path) -> None:
    server = begin(replicas=2)
    make_adapter(root, "new", ADAPTERS["tuned"][0])
    plain = text_of(server, NAME)
    found = server.send(LOAD, {"lora_name": "mine", "lora_path": "new"}, ADMIN)
    assert found.status == 200
    names = [row["id"] for row in found.json["data"]]
    assert names == [NAME, *ADAPTERS, "mine"] == [row["id"] for row in server.get("/v1/models").json["data"]]
    tuned = {text_of(server, "mine") for _ in range(4)}  # of both replicas
    assert len(tuned) == 1 and tuned != {plain} == {text_of(server, NAME)}
    assert server.send(UNLOAD, {"lora_name": "mine"}, ADMIN).status == 200
    assert server.send("/v1/completions", BODY | {"model": "mine"}).status == 404
    # An adapter of another content under the same name.
    make_adapter(root, "other", r"w_down$")
    assert server.send(LOAD, {"lora_name": "mine", "lora_path": str(root / "other")}, ADMIN).status == 200
    assert text_of(server, "mine") not in {plain, *tuned}


def test_a_replica_that_begins_again_has_the_changes(begin: Callable[..., Running], root: pathlib.Path) -> None:
    server = begin(restarts=2)
    make_adapter(root, "new")
    assert server.send(LOAD, {"lora_name": "mine", "lora_path": "new"}, ADMIN).status == 200
    assert server.send(UNLOAD, {"lora_name": "tuned"}, ADMIN).status == 200
    before, first = text_of(server, "mine"), server.ranks
    first.die()
    server.wait_for(lambda: server.ranks is not first and server.get("/ready").status == 200)
    assert text_of(server, "mine") == before and server.engine.adapters.names == ["other/one", "mine"]


def test_an_adapter_of_requests_in_progress_stays(begin: Callable[..., Running], root: pathlib.Path) -> None:
    server = begin(slow=0.02)
    stream = server.connect()
    body = b'{"model": "tuned", "prompt": "a", "max_tokens": 300, "ignore_eos": true, "stream": true}'
    stream.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    stream.getresponse().readline()
    found = server.send(UNLOAD, {"lora_name": "tuned"}, ADMIN)
    assert found.status == 409 and "1 requests in progress have the adapter 'tuned'" in found.error["message"]
    stream.close()
    server.wait_for(lambda: len(server.front.calls) == 0)
    assert server.send(UNLOAD, {"lora_name": "tuned"}, ADMIN).status == 200


def test_refusals_change_nothing(begin: Callable[..., Running], root: pathlib.Path) -> None:
    server = begin(replicas=2)
    make_adapter(root, "new")
    make_adapter(root, "empty", "")
    make_adapter(root, "odd", "no_such_leaf$")
    make_adapter(root.parent, "outside")
    (root / "link").symlink_to(root.parent / "outside")
    (root / "bare").mkdir()
    given = {"lora_name": "mine", "lora_path": "new"}
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"lora_name": "mine"}, 400, "lora_path"),
        (given | {"lora_name": ""}, 400, "from 1 to 200 characters, got 0"),
        (given | {"lora_name": "tuned"}, 400, "must be a new name, got 'tuned'"),
        (given | {"lora_path": "../outside"}, 400, "must be a directory below the server's --adapter-root"),
        (given | {"lora_path": "link"}, 400, "must be a directory below the server's --adapter-root"),
        (given | {"lora_path": str(root.parent / "outside")}, 400, "must be a directory below"),
        (given | {"lora_path": "a\0b"}, 400, "must be a directory below"),
        (given | {"lora_path": "bare"}, 404, "without adapter_config.json and adapter_model.safetensors"),
        (given | {"lora_path": "empty"}, 400, "is refused: "),
        (given | {"lora_path": "odd"}, 400, "is refused: "),
        (given | {"lora_rank": 3}, 400, "lora_rank"),
    ]
    for body, status, words in cases:
        found = server.send(LOAD, body, ADMIN)
        assert found.status == status and words in found.error["message"], (body, found.data)
    for key in ({}, {"Authorization": "Bearer other"}):
        assert server.send(LOAD, given, key).status == 401 == server.send(UNLOAD, given, key).status
    found = server.send(UNLOAD, {"lora_name": "mine"}, ADMIN)
    assert found.status == 404 and "must be one of 'tuned', 'other/one', got 'mine'" in found.error["message"]
    for ranks in server.made.values():
        assert ranks.engine.adapters.names == [*ADAPTERS]
    assert server.send(LOAD, given, ADMIN).status == 200


def test_without_a_root_there_is_no_route(server: Running) -> None:
    assert server.send(LOAD, {"lora_name": "a", "lora_path": "b"}, ADMIN).status == 404
    with pytest.raises(ValueError, match="adapter_root needs admin_keys, got none"):
        Settings("a", adapter_root=pathlib.Path("b"))


def test_profiles_are_written_by_each_rank(start: Callable[..., Running], tmp_path: pathlib.Path) -> None:
    server = start(profile_root=tmp_path / "profiles", admin_keys=("admin",), keys=("key",))
    for path in ("/start_profile", "/stop_profile"):
        for key in ({}, {"Authorization": "Bearer key"}):
            assert server.send(path, None, key).status == 401
    found = server.send("/stop_profile", None, ADMIN)
    assert found.status == 409 and found.error["message"] == "No profile has been started."
    assert server.send("/start_profile", None, ADMIN).json == {"status": "started"}
    assert server.send("/start_profile", None, ADMIN).error["message"] == "A profile has been started before."
    body = {"model": NAME, "prompt": "abc", "max_tokens": 2}
    assert server.send("/v1/completions", body, {"Authorization": "Bearer key"}).status == 200
    found = server.send("/stop_profile", None, ADMIN).json
    [file] = (tmp_path / "profiles").iterdir()
    assert found["status"] == "stopped" and str(file).startswith(found["files"]) and ".rank0.json.gz" in file.name
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any("shardfn" in event.get("name", "") or "aten" in event.get("name", "") for event in events)


def test_without_a_directory_there_are_no_profiles(server: Running) -> None:
    assert server.send("/start_profile", None, ADMIN).status in (401, 404)
    with pytest.raises(ValueError, match="profile_root needs admin_keys, got none"):
        Settings("a", profile_root=pathlib.Path("b"))
