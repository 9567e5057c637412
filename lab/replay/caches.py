"""The processor's caches, which a target's pass empties and a replay leaves full."""

from __future__ import annotations

import time
from statistics import median

import torch

NUM_BYTES = 16 << 20  # several times what a core keeps to itself
WIDTH = 512
SHARE = 0.1  # of a replay's time that emptying takes at most


class Caches:
    """Emptied before some steps, so that proposing is timed as it goes behind a target's pass."""

    def __init__(self) -> None:
        self._weights, self._state = torch.ones(NUM_BYTES // 4 // WIDTH, WIDTH), torch.ones(WIDTH)
        self._start, self._spent = time.perf_counter(), 0.0
        self._empty = False  # in this step
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # of proposing, with full and with empty caches

    def pass_of_target(self) -> None:
        """Read as much as a small target's weights, unless that took its share of the time already."""
        before = time.perf_counter()
        self._empty = self._spent <= SHARE * (before - self._start)
        if self._empty:
            self._weights.mv(self._state)
            self._spent += time.perf_counter() - before

    def proposed(self, seconds: float) -> None:
        """What proposing took in this step."""
        self._seconds[self._empty].append(seconds)

    @property
    def seconds_saved(self) -> float:
        """What a step's proposing takes less with full caches than with empty ones."""
        full, empty = self._seconds[False], self._seconds[True]
        return max(median(empty) - median(full), 0.0) if full and empty else 0.0
