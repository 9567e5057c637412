"""For how many outcomes a proposer prepares drafts while its engine works: as many as asked, or as many as pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from specdec.sdk.child_wire import AheadSetting
from specdec.sdk.extensions import MOST_OUTCOMES

PER_STEP = 16
"""Outcomes of all requests of a step together, for auto."""
PER_REQUEST = 8

TRIAL = 24
"""Rounds, every other one with drafts prepared."""
FIRST_HOLD = 128
"""Rounds from a trial to the next. They double."""
LONGEST_HOLD = 4096

GAIN = 0.98
"""Of the time without: what is not faster than that does not pay."""

MOST_CLIENTS = 256


class Trial:
    """Compares rounds in which drafts are prepared for so many outcomes with rounds in which none are."""

    def __init__(self, num_outcomes: int) -> None:
        self._num_outcomes = num_outcomes
        self._round = 0  # since the trial began
        self._hold = FIRST_HOLD
        self._pays = True
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # of rounds without, and with

    def next(self, seconds: float | None) -> int:
        """The outcomes of the round that begins. seconds: of the one that ended. None means that it is not known."""
        if seconds is not None:
            self._record(seconds)
        does = self._round % 2 == 0 if self._round < TRIAL else self._pays
        return self._num_outcomes if does else 0

    def _record(self, seconds: float) -> None:
        if self._round < TRIAL:
            self._seconds[self._round % 2 == 0].append(seconds)
        self._round += 1
        if self._round == TRIAL:
            self._pays = median(self._seconds[True]) < GAIN * median(self._seconds[False])
        elif self._round == TRIAL + self._hold:
            self._round, self._hold = 0, min(2 * self._hold, LONGEST_HOLD)
            self._seconds = {False: [], True: []}


class NumOutcomes:
    """Chosen anew for each round: from a question of a client to its next one."""

    def __init__(self, setting: AheadSetting, clock: Callable[[], float]) -> None:
        """clock: seconds."""
        self._setting, self._clock = setting, clock
        self._trials: dict[int, Trial] = {}  # by the number of requests
        self._asked: dict[tuple[str, ...], float] = {}  # when these requests were asked for

    def next(self, names: Sequence[str]) -> int:
        """For the time from now on. names: the requests that drafts were made for."""
        if self._setting != "auto":
            return min(self._setting, MOST_OUTCOMES) if names else 0
        if not names:
            return 0
        key, now = tuple(names), self._clock()
        before = self._asked.pop(key, None)
        if len(self._asked) >= MOST_CLIENTS:
            self._asked.clear()
        self._asked[key] = now
        if len(names) not in self._trials:
            self._trials[len(names)] = Trial(max(1, min(PER_REQUEST, PER_STEP // len(names))))
        return self._trials[len(names)].next(None if before is None else now - before)
