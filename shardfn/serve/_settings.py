"""Settings of a server: the address, the admitted clients, and limits."""

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ._access import KeyLimits
from ._message_formats import REASONING_PARSERS, TOOL_PARSERS

POOLINGS = ("last", "mean")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Settings:
    """Settings of a server, fixed at the start.

    Args:
        name: name of the model, as clients name it.
        host: address to listen on.
        port: port. 0 takes a free port.
        keys: keys of clients, or limits by keys. Without keys, each client is served.
        adapters: names of adapters, which clients give in place of the model's.
        pooling: pooling of embeddings, as for `shardfn.inference.Engine.embed`.
        hosts: further names in the `Host` header, in addition to the names of loopback, while `host` is a loopback
            address.
        max_body: bytes of a request's body.
        max_connections: number of connections at a time.
        max_waiting: most tokens of prompts that wait for their first token. None is 65,536, or the context where it is
            longer. A request with more tokens is refused.
        max_choices: completions of a single request, over all of its prompts.
        header_seconds: time in which a request's headers arrive.
        body_seconds: time in which a request's body arrives.
        stall_seconds: time that a reader may leave a piece of its answer in the server.
        drain_seconds: time for requests in progress after SIGTERM.
        health_seconds: time that a step may take before the server counts as ill.
        defaults: values of `shardfn.inference.Sampling` for fields that a body leaves out, by name.
        tool_call_parser: format of calls of tools: "hermes" (also Qwen's), "llama3_json", "mistral", "none", or "auto"
            for the format that the chat template shows.
        reasoning_parser: format of the model's reasoning: "think" for `<think>`, "mistral", "none" or "auto".
        replicas: number of groups of ranks, each with the whole model.
        restarts: number of times that a replica is started again after the end of one of its ranks, with growing waits.
            The next end is the server's end.
        joined: number of the replicas, the last ones, that are groups of ranks of other machines.
        join_at: host and port at which these groups join.
        join_key: key of these groups. See `check_join_key`.
        adapter_root: directory whose adapters may be loaded over HTTP, or None without such a change of adapters.
        admin_keys: keys of administrators, who may load and unload adapters.
        profile_root: directory for profiles that an administrator asks for over HTTP, or None without such profiles.
        traces: address that takes OpenTelemetry's spans of requests over HTTP, or None without traces.
        prompt_embeds: whether clients may give embeddings in place of a prompt's tokens.
        origins: origins of further sites with pages that may use the server, for example "https://example.org", or "*".

    Raises:
        ValueError: a value is out of range, or the address is not a loopback address and there are no keys.

    Example:
        >>> Settings("gpt").loopback
        True
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Mapping[str, KeyLimits] | tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    pooling: str = "last"
    hosts: tuple[str, ...] = ()
    max_body: int = 4 << 20
    max_connections: int = 1024
    max_waiting: int | None = None
    max_choices: int = 128
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    stall_seconds: float = 30.0
    drain_seconds: float = 30.0
    health_seconds: float = 60.0
    defaults: Mapping[str, float] = field(default_factory=dict)
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    replicas: int = 1
    restarts: int = 0
    joined: int = 0
    join_at: tuple[str, int] = ("127.0.0.1", 0)
    join_key: bytes = b""
    origins: tuple[str, ...] = ()
    adapter_root: pathlib.Path | None = None
    admin_keys: Mapping[str, KeyLimits] | tuple[str, ...] = ()
    profile_root: pathlib.Path | None = None
    traces: str | None = None
    prompt_embeds: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}.")
        names = (self.name, *self.adapters)
        if len(set(names)) < len(names) or not all(names):
            raise ValueError(f"the model and its adapters must have different names, got {names}.")
        words = {"pooling": POOLINGS, "tool_call_parser": TOOL_PARSERS, "reasoning_parser": REASONING_PARSERS}
        for name, known in words.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        for name, value in vars(self).items():
            if name.startswith("max_") or name.endswith("_seconds"):
                if value is not None and not value > 0:
                    raise ValueError(f"{name} must be above 0, got {value}.")
        for name, least in (("replicas", 1), ("restarts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if not 0 <= self.joined <= self.replicas or (self.joined and not self.join_key):
            raise ValueError(
                f"joined must be from 0 to {self.replicas}, the number of replicas, with a key, got {self.joined} and a"
                f" key of {len(self.join_key)} bytes."
            )
        for name in ("adapter_root", "profile_root"):
            if getattr(self, name) is not None and not self.admin_keys:
                raise ValueError(f"{name} needs admin_keys, got none. Pass a file of keys of administrators.")
        if not self.loopback and not self.keys:
            raise ValueError(
                f"a server that other machines can reach needs a file of keys, got host {self.host} without keys. Pass"
                " a file of keys, or listen on 127.0.0.1."
            )

    @property
    def loopback(self) -> bool:
        """Returns whether only programs of this machine reach the server."""
        return self.host in _LOOPBACK

    def allows(self, host: str) -> bool:
        """Returns whether a `Host` header names this server, and not for example another site that resolves here."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return not self.loopback or name.strip("[]") in (*_LOOPBACK, *self.hosts)
