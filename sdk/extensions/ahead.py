"""Drafts that are prepared while the target verifies earlier ones."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ..config import Extension

MOST_OUTCOMES = 16
"""Of a request that a host lets a proposer prepare for."""


class AheadMethods(Protocol):
    """What a proposer has for it."""

    def draft_ahead(self, num_outcomes: int, /) -> bool:
        """Prepare for the step that comes next, in the time until it comes. Returns whether more is to be done.

        It is not known yet what the target makes of the last drafts. An outcome is a number of them that it accepts,
        and the token behind these. A draft that was prepared behind an outcome is ready where that outcome happens. It
        is the draft that `propose` would make then: nothing but the time may depend on what was prepared.

        Called between two steps, again and again while it returns true, no step comes, and no request of the last step
        ends. A step that comes waits for the call that runs, so a call takes no longer than one pass of a network.

        num_outcomes: the most outcomes of a request, 1 .. MOST_OUTCOMES.
        """
        ...


class Ahead(Extension):
    """Drafts are prepared between steps: `draft_ahead` is called.

    A process that serves a proposer to engines elsewhere offers it, because it has nothing else to do then.
    """

    name: ClassVar[str] = "ahead"
    version: ClassVar[int] = 1
    methods: ClassVar[type | None] = AheadMethods
