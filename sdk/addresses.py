"""Where a drafter in another process is reached, and who else could reach it there."""

from __future__ import annotations

import re

from .errors import ConfigError

_FILE = re.compile(r"ipc:///.+")
_LOOPBACK = re.compile(r"tcp://(127\.\d+\.\d+\.\d+|localhost|\[::1\]):(\d{1,5}|\*)")
_NETWORK = re.compile(r"tcp://[^/:\s]+:(\d{1,5}|\*)|tcp://\[[0-9a-fA-F:.%\w]+\]:(\d{1,5}|\*)")
EXAMPLES = "ipc:///run/user/1000/drafter, or tcp://127.0.0.1:5570; with a key also tcp://HOST:5570"


def require_private(address: str, *, has_key: bool = False) -> None:
    """Raise ConfigError SD-E333 for an address that other machines can reach without a key, or that is none."""
    if _FILE.fullmatch(address) or _LOOPBACK.fullmatch(address):
        return
    if _NETWORK.fullmatch(address):
        if has_key:
            return
        reason = "other machines could reach it, and nothing that is sent is encrypted or authenticated"
        facts = {"reason": reason, "accepted": EXAMPLES, "fix": "specdec serve-proposer --new-key FILE"}
    else:
        facts = {"reason": "it is the address of no file and no port", "accepted": EXAMPLES}
    raise ConfigError("SD-E333", f"{address!r} is no private address", facts)
