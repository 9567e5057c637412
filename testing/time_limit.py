"""A limit of time for code that may never come back."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT_S = 300.0
"""For one check. Those of a proposer without a network take some milliseconds each, of a large one minutes."""

MOST_S = 1_000_000
"""A timer takes no infinite time."""

GRACE_S = 5.0
"""Code that does not return to Python within so many seconds more cannot be interrupted: the process has to end."""


class OutOfTime(KeyboardInterrupt):
    """Raised where the code stands when its time is over. An interrupt: whatever contains errors lets it pass."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime inside the block after `seconds`; 0 sets no limit.

    Needs POSIX signals, the main thread, and a timer that nobody else has set. Elsewhere the block has no limit.
    """
    if not seconds or not _timer_is_free():
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def _timer_is_free() -> bool:
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getitimer(signal.ITIMER_REAL)[0] == 0


def _interrupt(number: int, frame: object) -> None:
    raise OutOfTime
