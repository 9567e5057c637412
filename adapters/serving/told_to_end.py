"""How a server is told to end, and what a process that its proposer forks does with the same signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def told_to_end() -> Iterator[int]:
    """A file descriptor that can be read once SIGTERM or SIGINT has come. In the main thread alone.

    In processes that are forked meanwhile, these signals do what they do without a handler.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def tell(number: int, frame: FrameType | None) -> None:
        with suppress(BlockingIOError):
            os.write(writing, b"!")

    before: dict[int, Any] = {each: signal.signal(each, tell) for each in SIGNALS}
    forks = _Forks(tell)
    try:
        yield reading
    finally:
        forks.goes_on = False
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


class _Forks:
    """Takes a handler away in forks. Signals wait meanwhile: Python drops those that come before a fork has begun."""

    def __init__(self, handler: Any) -> None:
        self.goes_on = True
        self._handler = handler
        self._held = threading.local()
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._reset)

    def _hold(self) -> None:
        if self.goes_on:
            self._held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _release(self) -> None:
        mask = vars(self._held).pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _reset(self) -> None:
        for each in SIGNALS if self.goes_on else ():
            if signal.getsignal(each) is self._handler:
                signal.signal(each, signal.SIG_DFL)
        self.goes_on = False
        self._release()
