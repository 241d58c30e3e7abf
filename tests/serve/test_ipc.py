"""Covers the store by which a server's ranks meet: other machines cannot reach it."""

import pathlib

from shardfn.serve._ipc import _store_at_loopback


def test_the_store_listens_at_loopback_alone() -> None:
    store = _store_at_loopback()
    store.set("a", "b")
    assert store.get("a") == b"b"
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in pathlib.Path("/proc/net", name).read_text().splitlines()
    ]
    listening = [line[1] for line in lines if line[1].endswith(f":{store.port:04X}") and line[3] == "0A"]
    assert listening == [f"0100007F:{store.port:04X}"]
