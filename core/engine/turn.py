"""Which thread uses an engine: one at a time, and none within a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

from specdec.sdk.errors import RequestError

from ..runner.request_progress import uninterrupted


class Turn:
    """Refuses a thread while another one is inside. That one goes on unharmed.

    The thread that is inside may come in again, but only one of its calls may be `alone`.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        """`after`: called whenever somebody has left."""
        self._lock, self._errand = RLock(), RLock()
        self._alone = 0
        self._after = after

    @contextmanager
    def taken(self, doing: str, *, alone: bool = False) -> Iterator[None]:
        """Hold the engine for `doing`. Raises RequestError SD-E177 if another thread holds it.

        `alone`: also if this thread is alone inside already: a step, from whose proposer or hook this is called.
        """
        refusal: dict[str, str] | None = {}
        try:
            with self._errand, uninterrupted():
                refusal = self._come_in(alone)
            if refusal:
                raise RequestError("SD-E177", f"the engine is in use: {doing} is refused", refusal)
            yield
        finally:
            if refusal is None:
                self._alone -= alone
                self._lock.release()
                self._after()

    @contextmanager
    def alone_if_free(self) -> Iterator[bool]:
        """Whether the caller is alone inside now, for an errand whose end others wait for. Nothing is called after."""
        with self._errand:
            free = self._come_in(alone=True) is None
            try:
                yield free
            finally:
                if free:
                    self._alone -= 1
                    self._lock.release()

    def _come_in(self, alone: bool) -> dict[str, str] | None:
        """Take the lock; or why not, as facts of an error."""
        if not self._lock.acquire(blocking=False):
            fix = "an LLM for each thread, a lock around the calls, or all prompts in one generate"
            return {"found": "another thread is inside", "fix": fix}
        if alone and self._alone:
            self._lock.release()
            fix = "call it between steps; abort and add_request may be called within one"
            return {"found": "a proposer or hook calls it while a step runs", "fix": fix}
        self._alone += alone
        return None
