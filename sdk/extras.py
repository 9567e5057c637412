"""Libraries that come with an extra of this distribution, and are imported only where somebody uses them."""

from __future__ import annotations

from importlib.util import find_spec

from .lifecycle import SDK_DISTRIBUTION

REMOTE = {"msgspec": "msgspec", "zmq": "pyzmq"}
"""Of the extra `remote`: the distribution of each module."""

INSTALL_STRUCTURED = f'pip install "{SDK_DISTRIBUTION}[structured]"'
INSTALL_REMOTE = f'pip install "{SDK_DISTRIBUTION}[remote]"'


def missing_of_remote() -> str:
    """The distributions of the extra `remote` that are not installed, as a text. Empty: all are there."""
    return " and ".join(name for module, name in REMOTE.items() if find_spec(module) is None)
