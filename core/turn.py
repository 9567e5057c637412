"""Whose turn it is with an engine: one thread's at a time, and nobody's within a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

from specdec.sdk import RequestError


class Turn:
    """Refuses whoever comes while another thread is inside, who goes on unharmed.

    The thread that is inside may enter again, for anything but another call that wants to be `alone`.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        """`after`: called whenever somebody has left."""
        self._lock = RLock()
        self._alone = False
        self._after = after

    @contextmanager
    def taken(self, doing: str) -> Iterator[None]:
        """Inside, for `doing`. Raises RequestError SD-E177 if another thread is."""
        if not self._lock.acquire(blocking=False):
            raise _refused(doing, "another thread is inside", "one LLM for each thread, or a lock around its calls")
        try:
            yield
        finally:
            self._lock.release()
            self._after()

    @contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """The same with nobody further out: not a step, from whose proposer or hook this may be called."""
        with self.taken(doing):
            if self._alone:
                raise _refused(doing, "a step calls this", "a proposer or hook calls abort or add_request at the most")
            with self._being_alone():
                yield

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Whether the caller is inside and alone now; nobody is refused and nothing is called after."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            if self._alone:
                yield False
            else:
                with self._being_alone():
                    yield True
        finally:
            self._lock.release()

    @contextmanager
    def _being_alone(self) -> Iterator[None]:
        self._alone = True
        try:
            yield
        finally:
            self._alone = False


def _refused(doing: str, found: str, fix: str) -> RequestError:
    return RequestError("SD-E177", f"the engine is in use: {doing} is refused", {"found": found, "fix": fix})
