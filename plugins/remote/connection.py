"""One socket to one server. Nothing that comes from there can do more than end the connection."""

from __future__ import annotations

import math
import os
import time
import weakref
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from specdec.sdk.keys import ClientKey
from specdec.sdk.wire import MAX_MESSAGE_BYTES, UNREADABLE, ToClient, ToServer, at_client, encode

WAITING_MESSAGES = 4096
"""That the server has not taken yet. One that takes no more is lost."""

UNREAD_MESSAGES = 16
"""Of the server's. One that sends more waits: it answers one question at a time, and may not fill the memory here."""

RETRY_MS = 100
"""Between two attempts to reach a server that is not there."""

FILES = 16
"""That a connection may take."""

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class LostError(Exception):
    """The connection cannot be used any more. Its text says why."""


class ClosedError(LostError):
    """The other side has gone."""


class Connection:
    """To a server at an address, which may not be there yet."""

    def __init__(
        self,
        address: str,
        retry_ms: int = RETRY_MS,
        key: ClientKey | None = None,
        most_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """key: of a server that has one. None means that nothing is encrypted. most_bytes: of a message from there.

        Raises LostError where no socket can be had: the process has too many open files, or it is no address.
        """
        _require_files()
        self._context = zmq.Context()
        try:
            self._open(address, retry_ms, key, most_bytes)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise LostError(f"no socket can be opened: {error}") from error

    def _open(self, address: str, retry_ms: int, key: ClientKey | None, most_bytes: int) -> None:
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = retry_ms
        self._socket.set(zmq.MAXMSGSIZE, most_bytes)
        self._socket.ipv6 = "[" in address  # a host's name keeps its IPv4 address
        self._socket.sndhwm, self._socket.rcvhwm = WAITING_MESSAGES, UNREAD_MESSAGES
        if key is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = key.public.encode(), key.secret.encode()
            self._socket.curve_serverkey = key.server.encode()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self._socket.connect(address)
        self._end = weakref.finalize(self, _close, self._context, self._socket, self._monitor)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, message: ToServer) -> None:
        """Never waits. Raises LostError if the server takes no more."""
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise LostError(
                f"a message of {len(data)} bytes is longer than the {MAX_MESSAGE_BYTES} that a server reads"
            )
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.Again as error:
            raise LostError(f"it has not read {WAITING_MESSAGES} messages") from error

    def receive(self, seconds: float) -> ToClient | None:
        """The next message, within so many seconds; None: none came. Raises LostError."""
        end = time.monotonic() + seconds
        while True:
            message = self._next()
            if message is not None:
                return message
            left = end - time.monotonic()
            ready = dict(self._poller.poll(max(0, math.ceil(1000 * left))))
            if self._socket in ready:
                continue
            if ready:
                event = recv_monitor_message(self._monitor)["event"]
                if event & HANDSHAKE_FAILED:
                    raise LostError("the keys of the two sides do not fit")
                raise ClosedError("it closed the connection")
            return None

    def close(self) -> None:
        """Let go of the socket, with what was not sent."""
        self._end()

    def leave(self, message: ToServer) -> None:
        """Send a last message, if the server takes it within a moment, and close."""
        self._socket.linger = 100  # milliseconds
        with suppress(zmq.Again):
            self._socket.send(encode(message), zmq.DONTWAIT)
        self._end()

    def _next(self) -> ToClient | None:
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        if len(frames) != 1:
            raise LostError(f"it sent {len(frames)} parts in the place of a message")
        try:
            message: ToClient = at_client(frames[0])
        except UNREADABLE as error:
            raise LostError(f"it sent what is no message: {error}") from error
        return message


def _require_files() -> None:
    """Raise LostError where few more files can be opened: where libzmq lacks one, it may end the process."""
    opened: list[int] = []
    try:
        while len(opened) < FILES:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise LostError(f"no socket can be opened: {error}") from error
    finally:
        for each in opened:
            os.close(each)


def _close(context: zmq.Context[zmq.Socket[bytes]], *sockets: zmq.Socket[bytes]) -> None:
    """Also where nobody closes it before it is collected."""
    for each in sockets:
        each.close()  # each with its own linger
    context.term()
