"""State that requests share, kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol

from ..config import Extension


class StateMethods(Protocol):
    """The methods of a proposer that asks for `State`."""

    def save(self, path: Path, /) -> None:
        """Write shared state (a corpus, statistics) below `path`."""
        ...

    def load(self, path: Path, /) -> None:
        """Read the state that `save` wrote below `path`."""
        ...


class State(Extension):
    """Shared state is written and read: `save` and `load` are called."""

    name: ClassVar[str] = "state"
    version: ClassVar[int] = 1
    methods: ClassVar[type | None] = StateMethods
