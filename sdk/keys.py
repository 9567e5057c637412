"""Keys of drafters that other machines reach: CurveZMQ encrypts what is sent, and each side knows the other by its key.

A server has one file, and its clients have another. Both are their owner's alone.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError

LENGTH = 40  # characters of a key, as Z85 writes its 32 bytes
SUFFIX = ".client"


class ServerKey(NamedTuple):
    """The keys that a server has."""

    public: str
    secret: str
    client: str  # the public key of its clients


class ClientKey(NamedTuple):
    """The keys that a client has."""

    public: str
    secret: str
    server: str  # the server's public key


def make_keys(path: Path) -> Path:
    """Write a server's key to `path`, and its clients' to the file that is returned.

    Raises ConfigError SD-E337 where a file is there, or none can be written.
    """
    import zmq

    for_clients = path.with_name(path.name + SUFFIX)
    (server, server_secret), (client, client_secret) = (
        [each.decode() for each in zmq.curve_keypair()] for _ in range(2)
    )
    _write(path, ServerKey(server, server_secret, client)._asdict())
    _write(for_clients, ClientKey(client, client_secret, server)._asdict())
    return for_clients


def read_server_key(path: Path) -> ServerKey:
    """Raises ConfigError SD-E337 for a file that is not there, is not a server's key, or may be read by others."""
    return ServerKey(*_read(path, ServerKey._fields, f"the key of clients, {path.name}, where the server's belongs"))


def read_client_key(path: Path) -> ClientKey:
    """Raises ConfigError SD-E337 for a file that is not there, is not a client's key, or may be read by others."""
    return ClientKey(*_read(path, ClientKey._fields, f"the server's key, where that of clients ({SUFFIX}) belongs"))


def _write(path: Path, values: dict[str, str]) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(values, file, indent=2)
    except OSError as error:
        raise _unusable(path, str(error), "a name that no file has, in a folder that is there") from error


def _read(path: Path, names: tuple[str, ...], other: str) -> list[str]:
    fix = "specdec serve-proposer --new-key FILE"
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise _unusable(path, "others may read it or write to it", f"chmod 600 {path}, or a new key")
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unusable(path, str(error), fix) from error
    if isinstance(found, dict) and set(found) == set(names) and all(map(_is_key, found.values())):
        return [found[name] for name in names]
    both = {*ServerKey._fields, *ClientKey._fields}
    is_other = isinstance(found, dict) and set(found) < both and len(found) == len(names)
    raise _unusable(path, other if is_other else "it holds no key", fix)


def _is_key(value: object) -> bool:
    from zmq.utils import z85

    try:
        return isinstance(value, str) and len(value) == LENGTH and bool(z85.decode(value))
    except (KeyError, ValueError, struct.error):  # no character of Z85, or five of them beyond 32 bits
        return False


def _unusable(path: Path, because: str, fix: str) -> ConfigError:
    return ConfigError("SD-E337", "a key cannot be used", {"path": path, "because": because, "fix": fix})
