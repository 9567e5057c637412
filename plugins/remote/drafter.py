"""The drafter elsewhere: reached, lost, and found again after pauses that grow."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from specdec.sdk.errors import ConfigError, message
from specdec.sdk.keys import ClientKey
from specdec.sdk.wire import Bye, Drafts, Failed, Hello, Refused, Returned, ToServer, Unknown, Welcome

from .connection import Connection, LostError

logger = logging.getLogger("specdec")

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
PROVEN_AFTER = 16
"""Answers after which a drafter that came back counts as well again: its next pause is the first one."""


class Place(Protocol):
    """Where a drafter is."""

    @property
    def label(self) -> str:
        """For people."""
        ...

    def connect(self) -> Connection:
        """A new connection. A drafter that belongs to the place is started."""
        ...

    def has_failed(self) -> bool:
        """Whether it is known that the drafter will not answer."""
        ...

    def fate(self) -> str:
        """What is known of its end; empty: nothing. A drafter that belongs to the place has ended when it returns."""
        ...

    def close(self) -> None:
        """End what belongs to the place."""
        ...


class At:
    """A server that somebody else runs."""

    def __init__(self, address: str, key: ClientKey | None = None) -> None:
        self._address, self._key = address, key
        self.label = f"the drafter at {address}"

    def connect(self) -> Connection:
        return Connection(self._address, key=self._key)

    def has_failed(self) -> bool:
        return False

    def fate(self) -> str:
        return ""

    def close(self) -> None: ...


class Drafter:
    """Messages go there and come back while it is up. An outage costs drafts, is said once, and is never raised.

    figures: counts `outages` and `returns`.
    """

    def __init__(
        self, place: Place, hello: Hello, figures: Counter[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place, self._hello, self._figures, self._clock = place, hello, figures, clock
        self._connection: Connection | None = None
        self._up = False
        self._pauses = 0  # since it was last well
        self._answers = 0  # since it came back
        self._next_try = 0.0
        self.num_draft_tokens = 0  # the most that it drafts
        self.first_words: ToServer | None = None  # behind the hello of each connection

    def begin(self, seconds: float) -> None:
        """Reach it for the first time. Raises ConfigError SD-E334 if it does not answer, or as it refuses."""
        try:
            self._connect()
            answer = self._open.receive(seconds)
        except LostError as error:
            raise self._not_there(str(error)) from error
        if isinstance(answer, Refused):
            raise ConfigError(answer.code, answer.summary, answer.facts)
        if not isinstance(answer, Welcome):
            raise self._not_there(f"it did not answer within {seconds:g} s")
        self._welcomed(answer)

    @property
    def is_up(self) -> bool:
        """Whether it can be asked. Tries to reach one that was lost, and never waits."""
        if not self._up and self._connection is None and self._clock() >= self._next_try:
            try:
                self._connect()
            except LostError as error:
                self.lose(str(error))
        if not self._up and self._connection is not None:
            self.receive(0)
            if not self._up and self._place.has_failed():
                self.lose("it did not start")
        return self._up

    def send(self, said: ToServer) -> bool:
        """Whether it was sent."""
        if self._connection is None:
            return False
        try:
            self._connection.send(said)
        except LostError as error:
            self.lose(str(error))
            return False
        return True

    def receive(self, seconds: float) -> Drafts | Failed | Returned | None:
        """Its next answer, within so many seconds. None: none came, or it is lost (`is_up`)."""
        if self._connection is None:
            return None
        try:
            answer = self._connection.receive(seconds)
        except LostError as error:
            self.lose(str(error))
            return None
        if isinstance(answer, Drafts | Failed | Returned):
            self._answers += 1
            if self._answers == PROVEN_AFTER:
                self._pauses = 0
            return answer
        if isinstance(answer, Welcome):
            self._welcomed(answer)
            self._figures["returns"] += 1
            logger.info("%s is back", self._place.label)
        elif isinstance(answer, Refused):
            self.lose(f"{answer.code} {answer.summary}", **answer.facts)
        elif isinstance(answer, Unknown):
            self.lose("it does not know this engine any more")
        return None

    def lose(self, reason: str, **facts: str) -> None:
        """It cannot be used: end it, say so, and try again later."""
        connection, self._connection = self._connection, None
        was_up, self._up = self._up, False
        if connection is not None:
            connection.close()
        reason = self._place.fate() or reason
        pause = min(FIRST_PAUSE * (2**self._pauses - 1), LONGEST_PAUSE)
        self._pauses, self._answers = self._pauses + 1, 0
        self._next_try = self._clock() + pause
        if was_up:
            self._figures["outages"] += 1
            facts |= {"because": reason, "effect": "decoding goes on without drafts until it is back"}
            logger.warning("%s", message("SD-W331", f"{self._place.label} is lost", facts))
        else:
            logger.debug("%s is not back: %s; next try in %.2f s", self._place.label, reason, pause)

    def close(self) -> None:
        """Leave it, and end what is the place's."""
        if self._connection is not None:
            self._connection.leave(Bye())
            self._connection = None
        self._up = False
        self._place.close()

    @property
    def _open(self) -> Connection:
        assert self._connection is not None, "it was connected"
        return self._connection

    def _connect(self) -> None:
        """Raises LostError."""
        self._connection = self._place.connect()
        self._connection.send(self._hello)
        if self.first_words is not None:
            self._connection.send(self.first_words)

    def _welcomed(self, answer: Welcome) -> None:
        self._up = True
        self.num_draft_tokens = answer.num_draft_tokens

    def _not_there(self, reason: str) -> ConfigError:
        facts = {
            "because": self._place.fate() or reason,
            "fix": "specdec serve-proposer NAME --target MODEL --listen ADDRESS",
        }
        self.close()
        return ConfigError("SD-E334", f"{self._place.label} is not there", facts)
