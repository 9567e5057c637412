"""The drafter elsewhere: reached, lost, and found again after pauses that grow."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specdec.sdk.errors import ConfigError, message
from specdec.sdk.keys import ClientKey
from specdec.sdk.wire import (
    MAX_MESSAGE_BYTES,
    Bye,
    Call,
    Drafts,
    Failed,
    Hello,
    Refused,
    Returned,
    ToClient,
    ToServer,
    Unknown,
    Welcome,
)

from .connection import ClosedError, Connection, LostError

logger = logging.getLogger("specdec")

FILE = "ipc://"
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
PROVEN_AFTER = 16
"""Answers after which a drafter that came back counts as well again: its next pause is the first one.

For one that only ended or forgot this engine, the first answer is enough: it works, and that costs no step. A hang or
nonsense does.
"""
LOOK_SECONDS = 0.25
"""Between two looks at whether a drafter that owes an answer has ended: its helpers may hold the connection open."""

FATE_SECONDS = 5.0
"""The longest that the start waits for how a drafter ended. Steps wait for none."""


class Place:
    """Where a drafter is. `At` is a place of somebody else's; a process of the engine's own is one too."""

    label: str  # for people

    def connect(self, most_bytes: int) -> Connection:
        """A new connection, for messages up to a size. A drafter that belongs to the place is started."""
        raise NotImplementedError

    def require_own(self) -> None:
        """Raise LostError where whoever answers may be somebody else's."""

    def has_failed(self) -> bool:
        """Whether it is known that the drafter will not answer."""
        return False

    def fate(self, seconds: float) -> str | None:
        """What is known of its end; empty: nothing. None: it does not end within so many seconds, and is asked again.

        A drafter that belongs to the place is ended by it.
        """
        return ""

    def close(self) -> None:
        """End what belongs to the place."""


class At(Place):
    """A server that somebody else runs."""

    def __init__(self, address: str, key: ClientKey | None = None) -> None:
        self._address, self._key = address, key
        self._path = address.removeprefix(FILE) if address.startswith(FILE) else None
        self.label = f"the drafter at {address}"

    def connect(self, most_bytes: int) -> Connection:
        if self._path is not None and os.path.lexists(self._path):
            self.require_own()
        return Connection(self._address, key=self._key, most_bytes=most_bytes)

    def require_own(self) -> None:
        """It is asked again when it has answered: at the start there may be no socket yet."""
        if self._path is None:
            return
        try:
            owner = os.stat(self._path).st_uid
        except OSError as error:
            raise LostError(f"nobody can say whose socket {self._path} is: {error}") from error
        if owner not in (os.geteuid(), 0):
            raise LostError(
                f"user {owner} owns {self._path}: expected user {os.geteuid()}, or root. Let it be in a folder of yours"
            )


@dataclass(frozen=True)
class _Loss:
    """What there is to say of an outage, once it is known how the drafter ended."""

    reason: str
    facts: Mapping[str, str]
    was_up: bool
    pause: float  # seconds


class Drafter:
    """Messages go there and come back while it is up. An outage costs drafts, is said once, and is never raised.

    figures: counts `outages` and `returns`.
    """

    def __init__(
        self,
        place: Place,
        hello: Hello,
        figures: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        most_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._place, self._hello, self._figures, self._clock = place, hello, figures, clock
        self._most_bytes = most_bytes  # of an answer
        self._connection: Connection | None = None
        self._up = False
        self._pause = 0.0  # seconds to the next try after its next loss
        self._answers = 0  # since it came back
        self._next_try = 0.0
        self._loss: _Loss | None = None  # of a drafter that has not ended yet
        self.num_losses = 0  # each time, what it was told is gone
        self.num_uniforms = 0  # that it draws the drafts of a request with
        self.first_words: dict[str, Call] = {}  # before the hello of each later connection, in this order
        self.failed: Failed | None = None  # the newest of them that did

    def begin(self, seconds: float) -> None:
        """Reach it for the first time. Raises ConfigError SD-E334 if it does not answer, or as it refuses."""
        try:
            answer = self._connect().receive(seconds)
            if isinstance(answer, Welcome):
                self._welcomed(answer)
        except LostError as error:
            raise self._not_there(str(error)) from error
        if isinstance(answer, Refused):
            raise ConfigError(answer.code, answer.summary, answer.facts)
        if not isinstance(answer, Welcome):
            raise self._not_there(f"it did not answer within {seconds:g} s")

    @property
    def is_up(self) -> bool:
        """Whether it can be asked. Tries to reach one that was lost, and never waits. After a loss it is False once."""
        if self._loss is not None and not self._has_ended(self._loss):
            return False
        if not self._up and self._connection is None and self._clock() >= self._next_try:
            try:
                self._connect()
            except LostError as error:
                self.lose(str(error))
        elif not self._up and self._connection is not None:
            answer = self.receive(0)
            self.failed = answer if isinstance(answer, Failed) else self.failed
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
            answer = self._heard(self._connection, seconds)
            if isinstance(answer, Drafts | Failed | Returned):
                self._answers += isinstance(answer, Drafts)
                return answer
            self._take(answer)
        except ClosedError as error:
            self.lose(str(error), let_go=True)
        except LostError as error:
            self.lose(str(error))
        return None

    def _heard(self, connection: Connection, seconds: float) -> ToClient | None:
        """Wait, and look meanwhile whether the drafter is still there. Raises LostError."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            answer = connection.receive(min(max(0.0, left), LOOK_SECONDS))
            if answer is not None:
                return answer
            if self._up and self._place.has_failed():
                raise ClosedError("it has ended")
            if left <= LOOK_SECONDS:
                return None

    def _take(self, answer: ToClient | None) -> None:
        """What is no answer to a question. Raises LostError."""
        if isinstance(answer, Welcome) and not self._up:
            self._welcomed(answer)
            self._figures["returns"] += 1
            logger.info("%s is back", self._place.label)
        elif isinstance(answer, Welcome):
            self.lose("it welcomed this engine again")
        elif isinstance(answer, Refused):
            self.lose(f"{answer.code} {answer.summary}", answer.facts)
        elif isinstance(answer, Unknown):
            self.lose("it does not know this engine any more", let_go=True)

    def lose(self, reason: str, facts: Mapping[str, str] | None = None, *, let_go: bool = False) -> None:
        """It cannot be used: end it, say so, and try again later, at once if it was well.

        let_go: whether it let go of this engine by itself. If not it is told to, or it would keep slots for it.
        """
        self.num_losses += 1
        connection, self._connection = self._connection, None
        was_up, self._up = self._up, False
        if connection is not None and was_up and not let_go:
            connection.leave(Bye())
        elif connection is not None:
            connection.close()
        self._figures["outages"] += was_up
        pause = 0.0 if self._answers >= (1 if let_go else PROVEN_AFTER) else self._pause
        self._pause, self._answers = min(2 * pause + FIRST_PAUSE, LONGEST_PAUSE), 0
        self._next_try = self._clock() + pause
        self._loss = _Loss(reason, facts or {}, was_up, pause)
        self._has_ended(self._loss)

    def close(self) -> None:
        """Leave it, and end what is the place's."""
        if self._connection is not None:
            self._connection.leave(Bye())
            self._connection = None
        self._up = False
        self._place.close()

    def _has_ended(self, loss: _Loss) -> bool:
        """Whether it is gone, which is said then."""
        fate = self._place.fate(0)
        if fate is None:
            return False
        self._loss, label = None, self._place.label
        if loss.was_up:
            end = {"end": fate} if fate else {}
            effect = "decoding goes on without drafts until it is back"
            facts = {**loss.facts, "because": loss.reason, **end, "effect": effect}
            logger.warning("%s", message("SD-W331", f"{label} is lost", facts))
        else:
            logger.debug("%s is not back: %s %s; next try in %.2f s", label, loss.reason, fate, loss.pause)
        return True

    def _connect(self) -> Connection:
        """Raises LostError."""
        self._connection = connection = self._place.connect(self._most_bytes)
        self.failed = None
        for each in self.first_words.values():
            if each.method != "load" or os.path.isdir(each.path):  # a later save removes what an earlier one wrote
                connection.send(each)
        connection.send(self._hello)  # last, so that it is up when it has done that: no step waits for it
        return connection

    def _welcomed(self, answer: Welcome) -> None:
        """Raises LostError."""
        self._place.require_own()
        self._up = True
        self.num_uniforms = answer.num_uniforms

    def _not_there(self, reason: str) -> ConfigError:
        facts = {
            "because": self._place.fate(FATE_SECONDS) or reason,
            "fix": "specdec serve-proposer NAME --target MODEL --listen ADDRESS",
        }
        self.close()
        return ConfigError("SD-E334", f"{self._place.label} is not there", facts)
