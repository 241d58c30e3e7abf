"""Adapters that an administrator loads and removes over HTTP, and profiles, by the routes of vLLM."""

import asyncio
import functools
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ._errors import ApiError
from ._fields import TEXT, FieldKind, get_required, read_fields
from ._ipc import LoadAdapter, Profile, RemoveAdapter
from ._model import Model
from ._request_tracker import RequestTracker

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
START_PROFILE, STOP_PROFILE = "/start_profile", "/stop_profile"
ADMIN = (LOAD, UNLOAD, START_PROFILE, STOP_PROFILE)
_FIELDS: Mapping[str, FieldKind] = {"lora_name": TEXT, "lora_path": TEXT}
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_LONGEST = 200  # characters of a name


class AdapterChange(NamedTuple):
    """Change of the adapters of a server.

    Attributes:
        name: name of the adapter.
        path: directory of an adapter that is loaded, or None for an adapter that is removed.
    """

    name: str
    path: pathlib.Path | None = None


def parse_load(body: Mapping[str, Any], model: Model, root: pathlib.Path) -> AdapterChange:
    """Returns the meaning of a body of `/v1/load_lora_adapter`.

    Args:
        body: fields `lora_name` and `lora_path`. The path is absolute, or relative to `root`.
        model: model of the server.
        root: directory of the adapters that may be loaded.

    Raises:
        ApiError: a field is missing, the name is taken, or the directory is outside of `root` or has no adapter.
    """
    del model
    given = read_fields(body, _FIELDS)
    name, place = get_required(given, "lora_name"), get_required(given, "lora_path")
    if not 0 < len(name) <= _LONGEST:
        text = f"lora_name must have from 1 to {_LONGEST} characters, got {len(name)}."
        raise ApiError(400, text, "lora_name")
    path = (root / place).resolve() if "\0" not in place else root.parent
    if not path.is_relative_to(root.resolve()):
        text = f"lora_path must be a directory below the server's --adapter-root, got {place[:100]!r}."
        raise ApiError(400, text, "lora_path")
    if missing := [file for file in _FILES if not (path / file).is_file()]:
        text = f"lora_path must be a directory of peft, got {place[:100]!r} without {' and '.join(missing)}."
        raise ApiError(404, text, "lora_path", "adapter_not_found")
    return AdapterChange(name, path)


def parse_unload(body: Mapping[str, Any], model: Model) -> AdapterChange:
    """Returns the meaning of a body of `/v1/unload_lora_adapter`.

    Raises:
        ApiError: the name is missing.
    """
    del model
    return AdapterChange(get_required(read_fields(body, {"lora_name": TEXT}), "lora_name"))


class AdapterChanges:
    """Changes of the adapters of a server, each after the end of the change before.

    Args:
        calls: requests in progress, and the replicas.
    """

    def __init__(self, calls: RequestTracker) -> None:
        self._calls, self._turn = calls, asyncio.Lock()

    async def apply(self, app: Any, change: AdapterChange) -> None:
        """Changes the adapters of all replicas and the names in `app.model`, or nothing.

        Raises:
            ApiError: the name is taken (400) or unknown (404), requests in progress have the adapter (409), or the
                engine refuses the adapter (400).
        """
        async with self._turn:
            if change.path is None:
                await self._remove(app, change.name)
            else:
                await self._load(app, change.name, change.path)

    async def _load(self, app: Any, name: str, path: pathlib.Path) -> None:
        if name in app.model.names:
            text = f"lora_name must be a new name, got {name[:60]!r}, which the server has. Unload it first."
            raise ApiError(400, text, "lora_name")
        reason = await self._calls.add_adapter(name, functools.partial(LoadAdapter, name=name, path=str(path)))
        if reason:
            raise ApiError(400, f"The adapter {name[:60]!r} is refused: {reason}", "lora_path")
        app.model = app.model._replace(adapters=(*app.model.adapters, name))

    async def _remove(self, app: Any, name: str) -> None:
        if name not in app.model.adapters:
            text = f"lora_name must be one of {', '.join(map(repr, app.model.adapters))}, got {name[:60]!r}."
            raise ApiError(404, text, "lora_name", "adapter_not_found")
        if num := self._calls.count_users(name):
            text = f"{num} requests in progress have the adapter {name[:60]!r}. Unload it when they have ended."
            raise ApiError(409, text, "lora_name")
        before = app.model
        app.model = before._replace(adapters=tuple(x for x in before.adapters if x != name))  # for new requests
        if reason := await self._calls.remove_adapter(name, functools.partial(RemoveAdapter, name=name)):
            app.model = before
            raise ApiError(409, f"The adapter {name[:60]!r} is not unloaded: {reason}", "lora_name")


class Profiles:
    """Profiles of the ranks by torch's profiler, one at a time.

    Args:
        calls: requests in progress, and the replicas.
        root: directory of the files.
    """

    def __init__(self, calls: RequestTracker, root: pathlib.Path) -> None:
        self._calls, self._root, self._turn = calls, root, asyncio.Lock()

    async def start(self) -> dict[str, str]:
        """Starts a profile, and returns the answer.

        Raises:
            ApiError: a profile has been started before (409).
        """
        return await self._change("")

    async def stop(self) -> dict[str, str]:
        """Ends the profile, and returns the answer with the beginning of the files' names. Each rank writes a file.

        Raises:
            ApiError: no profile has been started, or the files cannot be written (409).
        """
        return await self._change(str(self._root / time.strftime("profile-%Y%m%d-%H%M%S")))

    async def _change(self, path: str) -> dict[str, str]:
        async with self._turn:
            if reason := await self._calls.change_all(functools.partial(Profile, path=path)):
                raise ApiError(409, f"{reason[0].upper()}{reason[1:]}.")
        return {"status": "stopped", "files": path} if path else {"status": "started"}
