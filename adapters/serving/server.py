"""The loop of a process that drafts for engines elsewhere: one message after the other, until it is told to end."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from safetensors import SafetensorError
from zmq.utils import z85

from specdec.sdk.addresses import require_private
from specdec.sdk.errors import ConfigError, ProposerError, RequestError, SpecdecError
from specdec.sdk.keys import ServerKey
from specdec.sdk.wire import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    UNREADABLE,
    Ask,
    AskStates,
    Bye,
    Call,
    Drafts,
    DrawnDrafts,
    End,
    Failed,
    Hello,
    Returned,
    Start,
    ToClient,
    ToServer,
    Unknown,
    Welcome,
    as_failed,
    as_refused,
    at_server,
    encode,
)

from ..request_options import NOT_TAKEN
from .drawing import drawings_of
from .hosted import Hosted
from .sessions import ClientId, Limits, Session, Sessions

logger = logging.getLogger("specdec")

TICK_MS = 1000
"""The longest time between two looks at silent clients."""

WAITING_MESSAGES = 16
"""Of one client, in each direction: a client that sends more waits, one that reads fewer is forgotten."""

ASKED_AT = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a client may come in (ZeroMQ RFC 27)."""

COME_IN, STAY_OUT = b"200", b"400"


class Server:
    """Answers the clients of one socket with the drafts of one proposer.

    Whatever a client sends, only that client has to do without drafts.
    """

    def __init__(
        self,
        hosted: Hosted,
        address: str,
        limits: Limits = Limits(),  # noqa: B008 - it is a constant
        clock: Callable[[], float] = time.monotonic,
        *,
        keeps_state: bool = False,
        key: ServerKey | None = None,
    ) -> None:
        """Listen at once; clients wait until `serve`. Raises ConfigError SD-E333 for an address that cannot be had.

        keeps_state: a client may have the proposer save and load its state, and take weights. None but an engine that
        started it may.
        key: who has none that fits is not let in. None means that nothing is encrypted.
        """
        require_private(address, has_key=key is not None)
        _require_free(address)
        self._hosted = hosted
        self._limits = limits
        self._keeps_state = keeps_state
        self._sessions = Sessions(limits, clock, self._forget)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.ipv6 = "[" in address
        self._socket.set_hwm(WAITING_MESSAGES)
        self._socket.router_mandatory = True  # a client that does not read is known by it
        self._doors = [] if key is None else [Door(self._context, self._socket, key)]
        try:
            with _files_of_owner():
                self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            facts = {"because": str(error), "fix": "another port, or a folder that is there and may be written to"}
            raise ConfigError("SD-E333", f"{address!r} cannot be listened to", facts) from error

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def serve(self, *until: int) -> None:
        """Serve until one of these file descriptors can be read, or is closed on its other side."""
        poller = zmq.Poller()
        doors = {door.socket: door for door in self._doors}
        for each in (self._socket, *doors, *until):
            poller.register(each, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0 if self._hosted.has_more_to_do else TICK_MS))
            if not ready and self._hosted.has_more_to_do:
                self._hosted.draft_ahead()
                continue
            if ready.keys() - {self._socket, *doors}:
                return
            for each in ready.keys() & doors.keys():
                doors[each].answer()
            if self._socket in ready:
                self._receive()
            for session in self._sessions.evict():
                logger.info("%s was silent for %g s", session.label, self._limits.idle_seconds)

    def close(self) -> None:
        """Close the socket. Clients go on without drafts."""
        self._context.destroy(linger=0)

    def _receive(self) -> None:
        client, *frames = self._socket.recv_multipart()
        try:
            said = at_server(frames[0] if len(frames) == 1 else b"")
        except UNREADABLE as error:
            facts = {"because": str(error), "frames": str(len(frames))}
            self._refuse(client, RequestError("SD-E331", "a client sent what is no message", facts))
            return
        try:
            answer = self._answer(client, said)
        except (ConfigError, RequestError) as error:
            self._refuse(client, error)
        except SpecdecError as error:
            logger.warning("%s", error)
            self._send(client, as_failed(error, said.number if isinstance(said, Ask | Call) else 0))
        else:
            if answer is not None:
                self._send(client, answer)

    def _answer(self, client: ClientId, said: ToServer) -> ToClient | None:
        """Answer a message. None means that it gets no answer. Raises SpecdecError."""
        if isinstance(said, Hello):
            return self._welcome(client, said)
        session = self._sessions.get(client)
        if isinstance(said, Bye):
            self._sessions.close(client)
        elif isinstance(said, Call) and (session or self._keeps_state):  # an engine's first words to its own process
            return self._called(said)
        elif session is None:
            return Unknown() if isinstance(said, Ask) else None
        elif isinstance(said, Ask):
            return self._drafts(session, said)
        elif isinstance(said, Start):
            return self._started(session, said)
        elif isinstance(said, End):
            self._hosted.end(session.name_of(said.request_id), said)
        return None

    def _welcome(self, client: ClientId, hello: Hello) -> ToClient:
        info, k = self._hosted.info, self._hosted.num_draft_tokens
        wrong: dict[str, tuple[object, object, bool]] = {
            "protocol": (PROTOCOL, hello.protocol, hello.protocol != PROTOCOL),
            "vocabulary": (info.vocab_size, hello.vocab_size, hello.vocab_size != info.vocab_size),
            "max_model_len": (info.max_model_len, hello.max_model_len, hello.max_model_len > info.max_model_len),
        }
        form = self._hosted.form
        if hello.form is not None:
            wrong["draft distributions"] = (form or "none", hello.form, form is None or not hello.form.holds(form))
        facts = {name: f"{here} here, {there} there" for name, (here, there, differs) in wrong.items() if differs}
        if facts:
            fix = "one version of specdec-sdk on both sides; the server has the client's --target and --max-model-len"
            if "draft distributions" in facts:
                fix = '"draft_sample_method", "draft_distribution" and "sparse_top_m" alike on both sides'
            raise ConfigError("SD-E332", "the drafter is not for this engine", facts | {"fix": fix})
        session = self._sessions.open(client, hello)
        if session is None:
            facts = {"accepted": f"{self._limits.max_sessions} clients", "fix": "--max-clients, or another server"}
            raise ConfigError("SD-E332", "the drafter has too many clients", facts)
        logger.info("%s is served", session.label)
        return Welcome(PROTOCOL, self._hosted.plugin.label, k, self._hosted.num_uniforms)

    def _drafts(self, session: Session, ask: Ask) -> Drafts:
        start = time.perf_counter()
        rows = [(session.name_of(row.request_id), row) for row in ask.rows]
        if len(dict(rows)) < len(rows):
            raise RequestError("SD-E331", "a client asks twice for a request in one message")
        drawings = drawings_of(ask, self._hosted.num_uniforms)
        drafts = self._hosted.step(rows, drawings, ask.counts if isinstance(ask, AskStates) else ())
        answer: type[Drafts] = DrawnDrafts if drawings else Drafts
        return answer(ask.number, drafts, int(1e6 * (time.perf_counter() - start)))

    def _started(self, session: Session, start: Start) -> Failed | None:
        """Take a request in. What the proposer is not told of it concerns no other request of the client."""
        try:
            self._hosted.start(session.name_of(start.request_id), start)
        except RequestError as error:
            if error.code != NOT_TAKEN:
                raise
            logger.warning("%s\n  client  %s", error, session.label)
            return as_failed(error, request_id=start.request_id)
        return None

    def _called(self, call: Call) -> Returned | Failed:
        if call.method == "metrics":
            return Returned(call.number, self._hosted.figures())
        if not self._keeps_state:
            raise RequestError("SD-E331", "a client asks for what changes a proposer that it shares with others")
        try:
            self._hosted.call(call.method, Path(call.path))
        except ConfigError as error:  # weights that do not fit
            return as_failed(error, call.number)
        except (OSError, SafetensorError) as error:  # an earlier process could read them
            facts = {"because": f"{call.path}: {error}", "effect": "it keeps the old ones", "fix": "pass them again"}
            raise ProposerError("SD-E336", "new weights cannot be read", facts, plugin=self._hosted.plugin) from error
        return Returned(call.number)

    def _refuse(self, client: ClientId, error: SpecdecError) -> None:
        """The client goes; what it sends from now on is answered with Unknown."""
        session = self._sessions.close(client)
        logger.warning("%s\n  client  %s", error, session.label if session else "has not said hello")
        self._send(client, as_refused(error))

    def _send(self, client: ClientId, answer: ToClient) -> None:
        try:
            self._socket.send_multipart([client, encode(answer)], zmq.DONTWAIT)
        except zmq.ZMQError:  # it has gone, or it does not read
            session = self._sessions.close(client)
            if session:
                logger.info("%s is gone", session.label)

    def _forget(self, session: Session) -> None:
        """The proposer's part of a client that is gone. What it raises is of interest to nobody else."""
        for name in self._hosted.names(session.prefix):
            try:
                self._hosted.end(name)
            except ProposerError as error:
                logger.warning("%s", error)


class Door:
    """Lets clients in whose key fits: answers libzmq, in the server's own loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], served: zmq.Socket[bytes], key: ServerKey) -> None:
        """`served` is encrypted from now on, before it is bound."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ASKED_AT)
        self._client = z85.decode(key.client)
        served.zap_domain = b"specdec"
        served.curve_server = True
        served.curve_publickey, served.curve_secretkey = key.public.encode(), key.secret.encode()

    def answer(self) -> None:
        """Answer one question of libzmq: whether a client may connect."""
        version, number, _, address, _, mechanism, *proof = self.socket.recv_multipart()
        fits = mechanism == b"CURVE" and proof == [self._client]
        if not fits:
            logger.warning("a client at %s has no key that fits", address.decode(errors="replace"))
        status, text = (COME_IN, b"OK") if fits else (STAY_OUT, b"no key that fits")
        self.socket.send_multipart([version, number, status, text, b"", b""])


def _require_free(address: str) -> None:
    """Raise ConfigError SD-E333 where a server answers: libzmq would take its file away without a word."""
    path = address.removeprefix("ipc://")
    if path == address:
        return
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(path)
        except BlockingIOError:  # there is one, and others wait for it
            pass
        except OSError:
            return
    facts = {"because": "a server answers there already", "fix": "another file, or end that server first"}
    raise ConfigError("SD-E333", f"{address!r} cannot be listened to", facts)


@contextmanager
def _files_of_owner() -> Iterator[None]:
    """Sockets that are made inside are their owner's alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
