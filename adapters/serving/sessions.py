"""Which clients a server has, and what each of them may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from specdec.sdk.wire import Hello

ClientId = bytes
"""What the socket calls a client's connection."""


class Limits(NamedTuple):
    """What keeps one client, or a thousand dead ones, from taking everything."""

    max_sessions: int = 64
    idle_seconds: float = 600.0  # a client that says nothing for so long is forgotten; it may say hello again


@dataclass(eq=False)
class Session:
    """The requests of one client. Their names in the server differ from those of every other client's."""

    number: int
    hello: Hello
    last_heard: float  # seconds

    def name_of(self, request_id: str) -> str:
        """A request's name in the server. Names sort by client, and within a client by its own ids."""
        return f"{self.prefix}{request_id}"

    @property
    def prefix(self) -> str:
        """What the names of its requests begin with, and those of no other client."""
        return f"{self.number:06}/"

    @property
    def label(self) -> str:
        return f"client {self.number}" + (f" ({self.hello.client})" if self.hello.client else "")


class Sessions:
    """The clients that said hello and have neither left nor fallen silent."""

    def __init__(self, limits: Limits, clock: Callable[[], float], end: Callable[[Session], None]) -> None:
        """clock: seconds, growing. end: forgets the requests of a client that is gone."""
        self._limits, self._clock, self._end = limits, clock, end
        self._by_id: dict[ClientId, Session] = {}
        self._last_number = 0

    def get(self, client: ClientId) -> Session | None:
        """The session of a known client, whose time of last contact is now. None if it is not known."""
        session = self._by_id.get(client)
        if session is not None:
            session.last_heard = self._clock()
        return session

    def open(self, client: ClientId, hello: Hello) -> Session | None:
        """A new one. A client that has one begins anew. None: there are too many."""
        self.close(client)
        self.evict()
        if len(self._by_id) >= self._limits.max_sessions:
            return None
        self._last_number += 1
        self._by_id[client] = session = Session(self._last_number, hello, self._clock())
        return session

    def close(self, client: ClientId) -> Session | None:
        """Forget a client and its requests. None: there was none."""
        session = self._by_id.pop(client, None)
        if session is not None:
            self._end(session)
        return session

    def evict(self) -> list[Session]:
        """Forget those that have been silent for too long."""
        latest = self._clock() - self._limits.idle_seconds
        silent = [client for client, session in self._by_id.items() if session.last_heard < latest]
        return [session for client in silent if (session := self.close(client))]
