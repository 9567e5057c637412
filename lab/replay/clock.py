"""What a step's proposing takes, without the time in which the processor ran something else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from specdec.sdk import hookimpl
from specdec.sdk.hooks import VerifiedStep


class Moment(NamedTuple):
    """Readings of the thread that runs."""

    wall: float
    processor: float
    num_waits: int | None  # how often it gave the processor away by itself; None: the system does not tell

    @classmethod
    def now(cls) -> Moment:
        """Read them."""
        num_waits = None
        if sys.platform == "linux":
            from resource import RUSAGE_THREAD, getrusage

            num_waits = getrusage(RUSAGE_THREAD).ru_nvcsw
        return cls(time.perf_counter(), time.thread_time(), num_waits)

    def displaced_until(self, later: Moment) -> float:
        """Seconds in which the thread was ready and others ran; 0 where it waited for something itself."""
        if self.num_waits is None or self.num_waits != later.num_waits:
            return 0.0
        return max(later.wall - self.wall - (later.processor - self.processor), 0.0)


class ProposeClock:
    """Times proposing, from what the engine's own profile says of it. It listens to know when a step has verified."""

    def __init__(self, stages: Mapping[str, float]) -> None:
        """stages: the profile, in seconds."""
        self._stages = stages
        self._verified: Moment | None = None
        self._before = stages.get("propose", 0.0)
        self.wall = 0.0  # of all steps
        self.displaced = 0.0  # of it, what others took

    @hookimpl
    def on_verified(self, step: VerifiedStep) -> None:
        """Proposing is next."""
        self._verified = Moment.now()

    def step_ended(self) -> float:
        """Seconds of the step's proposing.

        A share of others counts as such where it fits into the time of the stage: little else happens behind it.
        """
        wall = self._stages.get("propose", 0.0) - self._before
        self._before += wall
        displaced = self._verified.displaced_until(Moment.now()) if self._verified else 0.0
        self._verified = None
        displaced = displaced if displaced <= wall else 0.0
        self.wall += wall
        self.displaced += displaced
        return wall - displaced
