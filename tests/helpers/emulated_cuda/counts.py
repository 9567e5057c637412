"""What a device was asked to do, each with the place in our code that asked for it."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

OURS = "/src/specdec/", "/site-packages/transformers/"
NUM_PLACES = 2


@dataclass
class Counts:
    """Since counting began."""

    waits: Counter[str] = field(default_factory=Counter)  # "what @ place": the host stands until the device is done
    uploads: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)  # one by one, outside of recorded work
    places: Counter[str] = field(default_factory=Counter)  # of these launches, if `with_places`
    with_places: bool = False
    replays: int = 0
    nodes: int = 0  # launches within what was replayed

    def figures(self) -> dict[str, int]:
        """The numbers alone."""
        return {
            "waits": self.waits.total(),
            "uploads": self.uploads.total(),
            "launches": self.launches.total(),
            "replays": self.replays,
            "nodes": self.nodes,
        }


def place() -> str:
    """Where in our code, or in transformers, the call came from: the innermost lines, the nearest first."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < NUM_PLACES:
        name = frame.f_code.co_filename
        if any(part in name for part in OURS):
            found.append(f"{name.rsplit('/src/', 1)[-1].rsplit('site-packages/', 1)[-1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "?"
