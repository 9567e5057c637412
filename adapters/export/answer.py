"""What is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Route = Literal["native", "adapter"]
"""The engine's own drafter (or a class that was written for it), or the proposer of this installation in it."""


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """How another engine runs the same target and proposer."""

    engine: str
    route: Route
    text: str  # a shell command or lines of Python
    settings: Mapping[str, object]  # as the engine takes them
    dropped: Mapping[str, str] = field(default_factory=dict)  # key -> why it does not survive
    notes: tuple[str, ...] = ()  # what differs all the same
